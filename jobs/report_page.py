"""The report of a job as one HTML file: no script, nothing loaded from anywhere, light, dark and on paper.

What comes from a job or a model is escaped, and the page's own policy forbids whatever would be loaded all
the same. This room may not know where the figures come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

from pagemill.jobs.render import harmless
from pagemill.jobs.report import Price, Report, binned, percentile, quantile
from pagemill.jobs.report_cards import none, note, section
from pagemill.jobs.report_charts import MOST_BARS, Axis, Bar, columns, round_step, shares
from pagemill.jobs.report_time import over_time
from pagemill.jobs.report_words import (
    count,
    foreign,
    length,
    moment,
    money,
    pace,
    percent,
    rows,
    share_name,
    short,
)

SHARES = (0.5, 0.9, 0.99)
FEWEST_CLASSES = 12  # a histogram of fewer is as wide all the same: one length is a bar, and not a wall
TIMES_NOTE = "Of a row, from when the engine had it; a row that waited behind others counts in full."
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report, price: Price | None = None) -> str:
    """The whole document."""
    manifest = report.manifest
    title = escape(f"{manifest['job']} · Pagemill")
    style = files("pagemill.jobs").joinpath("report.css").read_text()
    body = "".join([_head(manifest), _tiles(report, price), *_sections(report), _foot(report, price)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _head(manifest: dict[str, Any]) -> str:
    job, model, state = (escape(harmless(str(manifest[name]))) for name in ("job", "model", "state"))
    why = ""
    if manifest["error_code"]:
        said = harmless(f"{manifest['error_code']}: {manifest['error_message']}")
        why = f'<p class="why">{escape(said)}</p>'
    submitted, ended = manifest["created_at"], manifest["finished_at"]
    return (
        f'<header><h1>{job} <span class="state {state}">{state}</span></h1>'
        f'<p class="sub">model <b>{model}</b> · submitted <time>{moment(submitted)}</time>'
        f" · ended <time>{moment(ended)} UTC</time>, {length(ended - submitted)} later</p>{why}</header>"
    )


def _tiles(report: Report, price: Price | None) -> str:
    manifest, working = report.manifest, report.clock.working_s
    total, written, read, cached = (
        manifest[name] for name in ("total", "completion_tokens", "prompt_tokens", "cached_tokens")
    )
    told = [
        ("rows completed", count(manifest["completed"]), f"of {count(total)}"),
        ("rows failed", count(manifest["failed"]), percent(manifest["failed"], total)),
        ("tokens written", count(written), pace(written, working)),
        ("tokens read", count(read), pace(read, working)),
        ("from the cache", percent(cached, read) or "–", f"{count(cached)} tokens"),
        (
            "engines at work",
            length(working) if working else "unknown",
            f"{rows(report.clock.rows / working)} a second" if working else "",
        ),
    ]
    if price is not None and working:
        cost = price.cost(working)
        each = f"{money(cost / written * 1e6)} a million written" if written else ""
        told.append(("cost, estimated", money(cost), each))
    tiles = (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, figure, note in told
    )
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _sections(report: Report) -> Iterator[str]:
    yield over_time(report.clock)
    times = section("Waiting and running", _times(report))
    if report.reasons:
        prompts = section("Prompt lengths", _lengths(report.prompt, "prompt"))
        answers = section("Answer lengths", _lengths(report.completion, "answer"))
        reasons = section("Finish reasons", shares(report.reasons.most_common(), report.reasons.total()))
        yield _pair(prompts, answers) + _pair(reasons, times)
    else:
        yield section("Lengths and finish reasons", none("No row completed.")) + times
    yield section("Errors", _errors(report))
    if damaged := report.manifest.get("damaged"):
        listed = "".join(f"<li><code>{escape(key)}</code></li>" for key in damaged)
        yield section("Parts that the store damaged", f"<ul>{listed}</ul>")


def _pair(left: str, right: str) -> str:
    return f'<div class="pair">{left}{right}</div>'


def _lengths(counts: Counter[int], what: str) -> str:
    mean = sum(tokens * number for tokens, number in counts.items()) / counts.total()
    told = ", ".join(f"{share_name(share)} {quantile(counts, share):,}" for share in SHARES)
    drawn, left_out = _without_tail(counts)
    bars = [
        Bar(low, high, (number,), f"{_whole_range(low, high)} tokens: {rows(number)}")
        for low, high, number in _widened(list(binned(drawn, MOST_BARS // 2)))
    ]
    step = max(1.0, round_step((bars[-1].end - bars[0].start) / 6))
    first = -(-bars[0].start // step)
    axis = Axis(f"tokens of the {what}", [(first + index) * step for index in range(8)], short)
    chart = columns(bars, ("a",), axis, label=f"Rows by tokens of the {what}", unit="rows", least_step=1)
    return note(f"Tokens: mean {mean:,.1f}, {told}, longest {max(counts):,}.{left_out}") + chart


def _without_tail(counts: Counter[int]) -> tuple[Counter[int], str]:
    """What is worth drawing: one row a hundred times as long as the others would press them into one bar."""
    most = quantile(counts, SHARES[-1]) or 0
    if max(counts) <= 2 * most:
        return counts, ""
    drawn = Counter({tokens: number for tokens, number in counts.items() if tokens <= most})
    longer = counts.total() - drawn.total()
    verb = "is" if longer == 1 else "are"
    return drawn, f" {rows(longer).capitalize()} of more than {most:,} {verb} not drawn."


def _widened(classes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """With empty classes at both sides of few, none of them below 0."""
    low, high = classes[0][0], classes[-1][1]
    width, missing = classes[0][1] - low, FEWEST_CLASSES - len(classes)
    before = min(max(0, missing) // 2, low // width)
    empty = [(low - number * width, low - (number - 1) * width, 0) for number in range(before, 0, -1)]
    after = [(high + n * width, high + (n + 1) * width, 0) for n in range(missing - before)]
    return [*empty, *classes, *after]


def _whole_range(low: int, high: int) -> str:
    return f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}"


def _times(report: Report) -> str:
    names = {
        "queued_ms": "until its first step",
        "first_token_ms": "until its first token",
        "total_ms": "until its end",
    }
    if not any(report.times[column] for column in names):
        return none("No row says how long it took.")
    lines = []
    for column, name in names.items():
        found = [percentile(report.times[column], share) for share in SHARES]
        told = "".join(f'<td class="number">{"–" if ms is None else length(ms / 1000)}</td>' for ms in found)
        lines.append(f'<tr><th scope="row">{name}</th>{told}</tr>')
    heads = "".join(f'<th scope="col" class="number">{share_name(share)}</th>' for share in SHARES)
    return f"{note(TIMES_NOTE)}<table><tr><td></td>{heads}</tr>{''.join(lines)}</table>"


def _errors(report: Report) -> str:
    if not report.errors:
        return none("No row failed.")
    head = (
        '<tr><th scope="col">code</th><th scope="col" class="number">rows</th>'
        '<th scope="col" class="wide">one of their messages</th></tr>'
    )
    lines = "".join(
        f'<tr><th scope="row"><code>{escape(foreign(code))}</code></th>'
        f'<td class="number">{count(number)}</td>'
        f'<td class="wide">{escape(foreign(report.examples.get(code, "")))}</td></tr>'
        for code, number in report.errors.most_common()
    )
    return f'<table class="errors">{head}{lines}</table>'


def _foot(report: Report, price: Price | None) -> str:
    said = [
        "Engines are at work while at least one row is in one: time in queues, loads and outages is left out."
    ]
    untimed = report.manifest["total"] - report.clock.rows
    if untimed == 1:
        said.append("1 row never ran, or does not say when it ended: the charts over time leave it out.")
    elif untimed:
        said.append(
            f"{rows(untimed)} never ran, or do not say when they ended: the charts over time leave them out."
        )
    if price is not None:
        gpus = f"{price.gpus:,} GPU{'s' if price.gpus > 1 else ''}"
        said.append(
            f"The cost is {gpus} at {money(price.hour)} an hour for the time that engines were at work;"
            " machines that wait or load a model cost more."
        )
    return f"<footer>{''.join(f'<p>{escape(line)}</p>' for line in said)}</footer>"

"""The report of a job as one HTML file: no script, nothing loaded from anywhere, light and dark.

What comes from a job or a model is escaped, and the page's own policy forbids whatever would be loaded all
the same. This room may not know where the figures come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from pagemill.jobs.render import span
from pagemill.jobs.report import Clock, Price, Report, binned, percentile, quantile
from pagemill.jobs.report_charts import MOST_BARS, NARROW, Bar, columns, round_step, shares

SHARES = (0.5, 0.9, 0.99)
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
LONGEST_MESSAGE = 240
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
    job, model, state = (escape(str(manifest[name])) for name in ("job", "model", "state"))
    why = ""
    if manifest["error_code"]:
        why = f'<p class="why">{escape(manifest["error_code"])}: {escape(manifest["error_message"])}</p>'
    submitted, ended = manifest["created_at"], manifest["finished_at"]
    return (
        f'<header><h1>{job} <span class="state {state}">{state}</span></h1>'
        f'<p class="sub">model <b>{model}</b> · submitted {_moment(submitted)}'
        f" · ended {_moment(ended)}, {span(ended - submitted)} later</p>{why}</header>"
    )


def _tiles(report: Report, price: Price | None) -> str:
    manifest, working = report.manifest, report.clock.working_s
    hits = manifest["cached_tokens"] / manifest["prompt_tokens"] if manifest["prompt_tokens"] else 0.0
    told = [
        ("rows completed", f"{manifest['completed']:,}", f"of {manifest['total']:,}"),
        ("rows failed", f"{manifest['failed']:,}", _percent(manifest["failed"], manifest["total"])),
        (
            "tokens written",
            f"{manifest['completion_tokens']:,}",
            _pace(manifest["completion_tokens"], working),
        ),
        ("tokens read", f"{manifest['prompt_tokens']:,}", _pace(manifest["prompt_tokens"], working)),
        ("from the cache", f"{hits:.1%}", f"{manifest['cached_tokens']:,} tokens"),
        (
            "engines at work",
            span(working) if working else "unknown",
            _rows_a_second(report.clock.rows, working),
        ),
    ]
    if price is not None and working:
        cost = price.cost(working)
        told.append(
            ("cost, estimated", _money(cost), _cost_of_a_million(cost, manifest["completion_tokens"]))
        )
    tiles = (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, figure, note in told
    )
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _sections(report: Report) -> Iterator[str]:
    yield _over_time(report.clock)
    yield '<div class="pair">'
    yield _section("Prompt lengths", _lengths(report.prompt, "prompt"))
    yield _section("Answer lengths", _lengths(report.completion, "answer"))
    yield '</div><div class="pair">'
    reasons = report.reasons.most_common()
    yield _section(
        "Finish reasons", shares(reasons, report.reasons.total()) if reasons else _none("No row completed.")
    )
    yield _section("Waiting and running", _times(report))
    yield "</div>"
    yield _section("Errors", _errors(report))
    if damaged := report.manifest.get("damaged"):
        listed = "".join(f"<li><code>{escape(key)}</code></li>" for key in damaged)
        yield _section("Parts that the store damaged", f"<ul>{listed}</ul>")


def _section(title: str, inner: str, note: str = "") -> str:
    said = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{inner}</section>"


def _note(sentence: str) -> str:
    return f'<p class="note">{escape(sentence)}</p>'


def _key(series: str, name: str) -> str:
    return f'<span class="key {series}"></span>{escape(name)}'


def _none(sentence: str) -> str:
    return f'<p class="none">{escape(sentence)}</p>'


# -- over time ------------------------------------------------------------------------------------------


def _over_time(clock: Clock) -> str:
    start, end = clock.span
    if start == end:
        return _section("Throughput", _none("No row of this job says when it ended."))
    fitting = (step for step in STEPS_S if (end - start) / step <= MOST_BARS)
    width = next(fitting, -(-(end - start) // MOST_BARS))
    edges = list(range(start, end + width, width))
    written = _spread(clock.written(), edges)
    read, cached = _gathered(clock.read, edges), _gathered(clock.cached, edges)
    running = _spread(clock.running(), edges)
    ended = _gathered(clock.ended, edges)
    places = [(edge - start, edge - start + width) for edge in edges[:-1]]
    ticks = _ticks(end - start)

    def drawn(label: str, series: Sequence[str], values: Iterable[tuple[float, ...]], tip: str) -> str:
        bars = [
            Bar(*place, value, f"{span(place[0])} to {span(place[1])}: " + tip.format(*value))
            for place, value in zip(places, values, strict=True)
        ]
        return columns(bars, series, label=label, axis=_elapsed, ticks=ticks)

    fresh = [(r - c) / width for r, c in zip(read, cached, strict=True)]
    return "".join(
        [
            _section(
                "Tokens written a second",
                drawn(
                    "Tokens written a second, over time",
                    ("a",),
                    ((w / width,) for w in written),
                    "{0:,.0f} tokens/s",
                ),
                f"Answers; {span(width)} a bar.",
            ),
            _section(
                "Tokens read a second",
                drawn(
                    "Tokens of prompts a second, over time",
                    ("b", "c"),
                    zip(fresh, (c / width for c in cached), strict=True),
                    "{0:,.0f} tokens/s computed, {1:,.0f} from the cache",
                ),
                f"Prompts: {_key('b', 'computed')} {_key('c', 'from the prefix cache')}.",
            ),
            _section(
                "Rows in the engines",
                drawn(
                    "Rows in the engines, over time", ("d",), ((r / width,) for r in running), "{0:,.0f} rows"
                ),
                f"On average over a bar; in the best one, {max(ended) / width:,.3g} rows a second ended.",
            ),
        ]
    )


def _gathered(counts: Counter[int], edges: Sequence[int]) -> list[int]:
    """Sums of what lies between each two edges, which are equally far apart."""
    width = edges[1] - edges[0]
    sums = Counter[int]()
    for second, count in counts.items():
        sums[(second - edges[0]) // width] += count
    return [sums[index] for index in range(len(edges) - 1)]


def _spread(levels: Iterable[tuple[int, int, float]], edges: Sequence[int]) -> list[float]:
    """What levels come to between each two edges, in units times seconds."""
    width, sums = edges[1] - edges[0], [0.0] * (len(edges) - 1)
    for here, there, level in levels:
        while here < there:
            index = (here - edges[0]) // width
            until = min(there, edges[index + 1])
            sums[index] += level * (until - here)
            here = until
    return sums


def _ticks(seconds: int) -> list[float]:
    step = next((step for step in STEPS_S if seconds / step <= 8), round_step(seconds / 8))
    return [place * step for place in range(int(seconds // step) + 1)]


def _elapsed(seconds: float) -> str:
    return "0" if not seconds else span(seconds).replace(".0 s", " s")


# -- lengths, times, errors -----------------------------------------------------------------------------


def _lengths(counts: Counter[int], what: str) -> str:
    if not counts:
        return _none("No row completed.")
    bars = [
        Bar(low, high, (rows,), f"{_whole_range(low, high)} tokens: {rows:,} rows")
        for low, high, rows in binned(counts, MOST_BARS // 2)
    ]
    step = max(1.0, round_step((bars[-1].end - bars[0].start) / 6))
    first = -(-bars[0].start // step)
    chart = columns(
        bars,
        ("a",),
        label=f"Rows by tokens of the {what}",
        axis=lambda tokens: f"{tokens:,.0f}",
        ticks=[(first + index) * step for index in range(8)],
        width=NARROW,
    )
    mean = sum(length * rows for length, rows in counts.items()) / counts.total()
    told = ", ".join(f"{_share(share)} {quantile(counts, share):,}" for share in SHARES)
    return f'<p class="note">Tokens: mean {mean:,.1f}, {told}, longest {max(counts):,}.</p>{chart}'


def _whole_range(low: int, high: int) -> str:
    return f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}"


def _times(report: Report) -> str:
    names = {
        "queued_ms": "until its first step",
        "first_token_ms": "until its first token",
        "total_ms": "until its end",
    }
    rows = []
    for column, name in names.items():
        found = [percentile(report.times[column], share) for share in SHARES]
        told = "".join(f'<td class="number">{"–" if ms is None else _duration(ms)}</td>' for ms in found)
        rows.append(f'<tr><th scope="row">{name}</th>{told}</tr>')
    heads = "".join(f'<th scope="col" class="number">{_share(share)}</th>' for share in SHARES)
    return f"{_note(TIMES_NOTE)}<table><tr><td></td>{heads}</tr>{''.join(rows)}</table>"


def _errors(report: Report) -> str:
    if not report.errors:
        return _none("No row failed.")
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(code)}</code></th><td class="number">{count:,}</td>'
        f'<td class="wide">{escape(_cut(report.examples.get(code, "")))}</td></tr>'
        for code, count in report.errors.most_common()
    )
    return f'<p class="note">With one message of each kind.</p><table>{rows}</table>'


def _foot(report: Report, price: Price | None) -> str:
    said = [
        "Engines are at work while at least one row is in one: time in queues, loads and outages is left out."
    ]
    untimed = report.manifest["total"] - report.clock.rows
    if untimed:
        said.append(
            f"{untimed:,} rows never ran, or do not say when they ended: the charts over time leave them out."
        )
    if price is not None:
        gpus = f"{price.gpus:,} GPU{'s' if price.gpus > 1 else ''}"
        said.append(
            f"The cost is {gpus} at {price.hour:g} an hour for the time that engines were at work; machines"
            " that wait or load a model cost more."
        )
    return f"<footer>{''.join(f'<p>{escape(line)}</p>' for line in said)}</footer>"


def _share(share: float) -> str:
    return "median" if share == 0.5 else f"p{share * 100:g}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else ""


def _pace(tokens: int, seconds: int) -> str:
    return f"{tokens / seconds:,.0f} a second" if seconds else ""


def _rows_a_second(rows: int, seconds: int) -> str:
    return f"{rows / seconds:,.3g} rows a second" if seconds else ""


def _money(cost: float) -> str:
    return f"{cost:,.2f}" if cost >= 0.1 else f"{cost:.2g}"


def _cost_of_a_million(cost: float, tokens: int) -> str:
    return f"{_money(cost / tokens * 1e6)} a million written" if tokens else ""


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else span(milliseconds / 1000)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

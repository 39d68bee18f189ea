"""Progress while a job runs: bars on a terminal, a line now and then where somebody else reads along.

On a terminal: rows, tokens, speed, cache hits, workers and the rows that failed lately, drawn over and over.
Piped: plain lines without control codes. This room knows what a job looks like and may not know how to reach
one.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from pagemill.jobs.render import COLOURS, harmless, hit_rate_text, rows_text, span, summary
from pagemill.jobs.status import JobStatus

if TYPE_CHECKING:
    from pagemill.jobs.recent import RecentErrors

PLAIN_EVERY_S = 5.0
PLAIN_ERRORS = 3
"""Failed rows that are told at once, where lines stay; of others it says how many, and where they are."""


class Follower:
    """Shows statuses as they come: bars where `console` is a terminal, else a line when there is news.

    A line comes with each change of state or of what blocks the job, and otherwise every few seconds.
    store: named in what it tells to type, where the surroundings do not name it.
    """

    def __init__(self, console: Console, *, store: str | None = None) -> None:
        self.console = console
        self._store = store
        self._said = ""
        self._said_at = float("-inf")
        self._errors_said = 0
        self._failed_said = 0
        self._fast: tuple[float, int] = (0.0, 0)
        self._fast_at = float("-inf")
        self._live: Live | None = None
        self._bars = Progress(
            TextColumn("{task.description:<6}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._rows, self._tokens = (
            self._bars.add_task(name, total=None, figures="") for name in ("rows", "tokens")
        )

    async def follow(
        self, statuses: AsyncIterator[JobStatus], errors: RecentErrors | None = None
    ) -> JobStatus:
        """The last status. errors: where to learn which rows failed."""
        last: JobStatus | None = None
        failed = 0
        try:
            async for last in statuses:
                if errors is not None and (last.failed > failed or last.terminal):
                    failed = last.failed
                    await errors.look(ended=last.terminal)
                self.show(last, errors)
        finally:
            self.close()
        assert last is not None  # watching yields at least once or raises
        if self.console.is_terminal:
            self._line(last, errors)
        return last

    def show(self, status: JobStatus, errors: RecentErrors | None = None) -> None:
        """One status."""
        if self.console.is_terminal:
            self._draw(status, errors)
            return
        news = f"{status.state}{status.blocked_reason}"
        if news != self._said or time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self._said, self._said_at = news, time.monotonic()
            self._line(status, errors)

    def close(self) -> None:
        """Takes the bars away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, status: JobStatus, errors: RecentErrors | None) -> None:
        for text in self._new_failures(status, errors) if errors is not None else ():
            self.console.print(Text(f"failed · {text}", "red"), soft_wrap=True)
        codes = "" if errors is None or not status.terminal else codes_text(errors)
        line = summary(status) + (f" · {codes}" if codes else "")
        self.console.print(Text(line, COLOURS.get(status.state, "")), soft_wrap=True)

    def _new_failures(self, status: JobStatus, errors: RecentErrors) -> list[str]:
        """Of the rows that failed since the last time: the latest, and how many others there are."""
        new = min(errors.told - self._errors_said, PLAIN_ERRORS)
        if not new and not status.terminal:
            return []  # read a moment later, or never: the next ones count them
        self._errors_said = errors.told
        told = [harmless(text) for text in list(errors.latest)[-new:]] if new else []
        others = status.failed - self._failed_said - len(told)
        self._failed_said = max(status.failed, self._failed_said + len(told))
        if others > 0:
            told.append(f"and {others:,} more: {self._command(status)}")
        return told

    def _command(self, status: JobStatus) -> str:
        """What shows every row."""
        store = f" --store {shlex.quote(self._store)}" if self._store is not None else ""
        return f"pagemill results {status.job}{store}" + ("" if status.terminal else " --partial")

    def _draw(self, status: JobStatus, errors: RecentErrors | None) -> None:
        if self._live is None:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        done, tokens = status.completed + status.failed, status.prompt_tokens + status.completion_tokens
        rows = rows_text(status) if status.total else ""
        self._update(self._rows, done, status.total or None, rows)
        expected = expected_tokens(status)
        self._update(self._tokens, tokens, expected, f"{tokens:,} of about {expected:,}" if expected else "")
        lines = [self._now(status), *_failures(status, errors)]
        self._live.update(Group(self._bars.get_renderable(), *lines), refresh=True)

    def _update(self, bar: TaskID, done: int, total: int | None, figures: str) -> None:
        self._bars.update(bar, completed=done, total=total, figures=figures)

    def _now(self, status: JobStatus) -> Text:
        """What is going on, or was a moment ago: between two shards there are no live figures."""
        now = (status.tokens_per_second, status.workers_active)
        if any(now) or time.monotonic() - self._fast_at > PLAIN_EVERY_S or status.terminal:
            self._fast, self._fast_at = now, time.monotonic()
        speed, workers = self._fast
        left = "" if status.eta_seconds is None or status.terminal else f"{span(status.eta_seconds)} left"
        parts = [
            f"{speed:,.0f} tokens/s" if speed else "",
            hit_rate_text(status),
            left,
            f"{workers} worker{'s' * (workers > 1)}" if workers else "",
        ]
        line = Text().append(status.state, COLOURS.get(status.state, "bold"))
        if status.blocked_reason and not status.terminal:
            line.append(f"  blocked: {harmless(status.blocked_reason)}", "yellow")
        return line.append("".join(f"  {part}" for part in parts if part))


def expected_tokens(status: JobStatus) -> int | None:
    """Tokens of the whole job if the rows to come are like those done; None before the first is."""
    done = status.completed + status.failed
    tokens = status.prompt_tokens + status.completion_tokens
    return round(tokens * status.total / done) if done and tokens else None


def codes_text(errors: RecentErrors) -> str:
    """How many rows failed with which code, the most frequent first."""
    ordered = sorted(errors.codes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {code}" for code, count in ordered)


def _failures(status: JobStatus, errors: RecentErrors | None) -> list[Text]:
    if not status.failed:
        return []
    codes = "" if errors is None else codes_text(errors)
    others = 0 if errors is None else status.failed - errors.codes.total()
    if codes and others > 0:
        codes += f", {others:,} others"
    head = Text(f"{status.failed:,} failed" + (f": {codes}" if codes else ""), "red")
    latest = [] if errors is None else [Text(f"  {harmless(text)}", "red dim") for text in errors.latest]
    for line in latest:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [head, *latest]

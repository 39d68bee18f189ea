"""What came of the jobs of a chaos run: every dataset read through the public client, against what was due.

Then the counters against the dataset, and what is left behind in Redis and the store. This room may not know
which faults there were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.lives import Life
from faults.workload import Expected

from pagemill.jobs import layout
from pagemill.jobs.client import Client
from pagemill.jobs.errors import JobConflict, JobNotFound
from pagemill.jobs.result import ResultRow
from pagemill.jobs.status import JobStatus
from pagemill.jobs.storage import read_json

STOPS = {"cancelled": "batch_cancelled", "expired": "batch_expired"}
SHOWN = 5
RUNNING_KEYS = frozenset({"leases", "pending", "holders", "segments", "trials", "running", "ledger"})


@dataclass
class Findings:
    """Counts of what must be zero, and sentences that say where."""

    jobs: int = 0
    rows: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    wrong_counts: int = 0
    wrong_rows: int = 0
    wrong_ends: int = 0
    wrong_replies: int = 0
    hung: int = 0
    left_behind: int = 0
    unforeseen: int = 0
    said: list[str] = field(default_factory=list)

    BAD = (
        "lost", "doubled", "wrong_counts", "wrong_rows", "wrong_ends", "wrong_replies", "hung", "left_behind",
        "unforeseen",
    )  # fmt: skip

    def note(self, what: str, sentence: str, times: int = 1) -> None:
        setattr(self, what, getattr(self, what) + times)
        self.said.append(f"{what}: {sentence}")

    @property
    def clean(self) -> bool:
        return not any(getattr(self, name) for name in self.BAD)


class Inspection:
    """client: one that no fault gets in the way of."""

    def __init__(self, client: Client) -> None:
        self._client, self._storage = client, client.storage
        self.findings = Findings()

    async def look(self, lives: Iterable[Life]) -> Findings:
        for life in lives:
            for sentence in life.wrong:
                self.findings.note("wrong_replies", f"{life.id}: {sentence}")
            if life.deleted:
                await self._look_at_deleted(life)
            elif life.submitted or self._storage.head(layout.job(life.id)) is not None:
                await self._look_at(life)
        await self._look_at_redis()
        return self.findings

    async def _look_at(self, life: Life) -> None:
        found = self.findings
        found.jobs += 1
        try:
            status = await self._client.status(life.id)
        except JobNotFound as error:
            found.note("hung", f"{life.id}: {error}")
            return
        if not status.terminal:
            found.note("hung", f"{life.id} is {status.state}: {status.blocked_reason or 'nothing blocks it'}")
            return
        rows = await self._client.results(life.id).list()
        found.rows += len(rows)
        found.ends[status.state] += 1
        found.codes.update(row.error_code for row in rows if row.error_code)
        self._judge_end(life, status, rows)
        due = self._due(life)
        plan = read_json(self._storage, layout.plan(life.id)) or {}
        if life.job.refusal or plan.get("stopped"):  # stopped before its plan: the manifest is empty
            due = {}
        self._judge_rows(life, status.state, rows, due)
        self._judge_counts(life, status, rows)
        self._judge_objects(life.id)

    # -- rows -----------------------------------------------------------------------------------------

    def _due(self, life: Life) -> dict[str, Expected]:
        """By custom_id where it is one row's alone, else by row_index; retried jobs have other indexes."""
        if life.retry_of is None:
            return {str(row.row_index): row for row in life.job.rows}
        failed = (row for row in life.retry_of.rows.values() if row.error_code in life.codes)
        return {row.custom_id: self._again(row, life) for row in failed}

    def _again(self, row: ResultRow, life: Life) -> Expected:
        before = life.job.rows[row.row_index]
        return Expected(row.row_index, 0, row.custom_id, before.code, before.texts, before.seed)

    def _judge_rows(self, life: Life, state: str, rows: list[ResultRow], due: dict[str, Expected]) -> None:
        retried = life.retry_of is not None
        judged = compare(rows, due, STOPS.get(state), by_id=retried)
        for what, each in (("lost", judged.lost), ("doubled", judged.doubled), ("wrong_rows", judged.wrong)):
            if each:
                self.findings.note(what, f"{life.id} ({state}): {'; '.join(each[:SHOWN])}", len(each))
        if not retried:
            life.rows = {row.row_index: row for row in rows}

    # -- ends and counts --------------------------------------------------------------------------------

    def _judge_end(self, life: Life, status: JobStatus, rows: list[ResultRow]) -> None:
        job = life.job
        allowed = {"completed"}
        if life.retry_of is None:
            if job.refusal:
                allowed = {"failed"}
            elif job.fate == "expire":
                allowed = {"completed", "expired"}
            elif life.asked_to_stop:
                allowed = {"completed", "cancelled"} if not life.cancel_accepted else {"cancelled"}
        if status.state not in allowed:
            why = status.error_message or status.error_code
            self.findings.note(
                "wrong_ends", f"{life.id} is {status.state}, not {'/'.join(sorted(allowed))} {why}"
            )
        if job.refusal and life.retry_of is None and status.error_code != job.refusal:
            self.findings.note("wrong_ends", f"{life.id} failed for {status.error_code}, not {job.refusal}")
        if life.ended is not None and life.ended.state != status.state:
            self.findings.note("wrong_ends", f"{life.id} was {life.ended.state} and is {status.state}")

    def _judge_counts(self, life: Life, status: JobStatus, rows: list[ResultRow]) -> None:
        manifest = read_json(self._storage, layout.manifest(life.id)) or {}
        kinds = Counter(row.status for row in rows)
        counted = {
            "total": len(rows),
            "completed": kinds["completed"],
            "failed": kinds["failed"],
            "prompt_tokens": sum(row.prompt_tokens for row in rows),
            "completion_tokens": sum(row.completion_tokens for row in rows),
        }
        for name, count in counted.items():
            for where, said in (("status", getattr(status, name)), ("manifest", manifest.get(name))):
                if said != count:
                    self.findings.note(
                        "wrong_counts", f"{life.id}: {where} says {name} {said}, it is {count}"
                    )
        errors = dict(Counter(row.error_code for row in rows if row.error_code))
        if manifest.get("errors") != errors:
            self.findings.note(
                "wrong_counts", f"{life.id}: manifest says {manifest.get('errors')}, it is {errors}"
            )

    # -- what is left -------------------------------------------------------------------------------------

    def _judge_objects(self, job: str) -> None:
        manifest = read_json(self._storage, layout.manifest(job)) or {"parts": []}
        plan = read_json(self._storage, layout.plan(job)) or {}
        kept = {part["key"] for part in manifest["parts"]} | {
            entry["key"] for entry in plan.get("shards", ())
        }
        for prefix in (layout.work(job), layout.parts(job), layout.shards(job)):
            for info in self._storage.list(prefix):
                if info.key not in kept:
                    self.findings.note("left_behind", info.key)

    async def _look_at_deleted(self, life: Life) -> None:
        left = [info.key for info in self._storage.list(layout.root(life.id))]
        for key in left:
            if key != layout.tombstone(life.id):
                self.findings.note("left_behind", f"{key}, though its job was deleted")
        try:
            status = await self._client.status(life.id)
            # A Redis that was rolled back past the delete remembers the end, and no task is left to find out.
            if not status.terminal:
                self.findings.note("wrong_ends", f"{life.id} is {status.state}, though it was deleted")
        except JobNotFound:
            pass
        try:
            await self._client.submit([{"prompt": "x"}], model="chaos", job_id=life.id)
            self.findings.note("wrong_replies", f"{life.id} was deleted, and its id taken again")
        except JobConflict:
            pass

    async def _look_at_redis(self) -> None:
        redis: Any = (await self._client.state()).redis
        async for key in redis.scan_iter("pagemill:*", count=1000):
            name = key.decode()
            if _only_while_running(name):
                self.findings.note("left_behind", f"the key {name}")


def _only_while_running(key: str) -> bool:
    """Whether nobody may find this key when all jobs have ended."""
    _, of_job, kind = key.partition("}:")
    if of_job:
        return kind.partition(":")[0] in RUNNING_KEYS
    return key.endswith((":ready", ":due")) or key in ("pagemill:deadlines", "pagemill:models")


@dataclass(frozen=True)
class Compared:
    """Names of rows that are missing, and of those too many; what is wrong with which of the others."""

    lost: list[str]
    doubled: list[str]
    wrong: list[str]


def compare(
    rows: Iterable[ResultRow], due: Mapping[str, Expected], stop: str | None, *, by_id: bool
) -> Compared:
    """A dataset against what was due, by row_index or by_id, which is also how `due` is keyed.

    stop: the error code that may stand in the place of any row that the job was stopped before.
    """
    seen, wrong = Counter[str](), []
    for row in rows:
        name = row.custom_id if by_id else str(row.row_index)
        seen[name] += 1
        if name in due and (why := _differs(row, due[name], stop, placed=not by_id)):
            wrong.append(f"row {row.row_index}: {why}")
    too_many = [name for name, count in seen.items() for _ in range(count - (name in due))]
    return Compared(sorted(due.keys() - seen.keys()), too_many, wrong)


def _differs(row: ResultRow, due: Expected, stop: str | None, *, placed: bool) -> str:
    """Why this row is not the one that was due; "" when it is. placed: line and index are the input's."""
    name = due.custom_id if due.custom_id is not None else f"row-{due.row_index}"
    if row.custom_id != name or (placed and row.line != due.line):
        return f"is {row.custom_id} of line {row.line}, not {name} of line {due.line}"
    if row.error_code is not None and row.error_code == stop and not due.planned:
        return ""
    if (row.error_code or "") != due.code:
        ended, why = row.error_code or "completed", row.error_message or ""
        return f"ended with {ended}, not {due.code or 'completed'}: {why}"
    if due.planned:
        return ""
    if row.seed != due.seed:
        return f"seed {row.seed}, not {due.seed}"
    if due.code:
        return ""
    texts = tuple(choice["text"] for choice in row.choices) if row.choices else (row.text,)
    return "" if texts == due.texts else f"says {texts}, not {due.texts}"


__all__ = ["Compared", "Findings", "Inspection", "compare"]

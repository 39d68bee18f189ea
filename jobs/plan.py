"""The plan of a job: every line judged, the bad ones written as error rows, the good ones cut into shards.

    pass 1   read the input once; good rows go to a sorter by prefix, faults to one by row, ids to a third
    between  which ids were given twice is known only now
    pass 2   take the rows in order, cut shards and upload them; write the faults as parts
    decide   plan.json, put-if-absent: until then nothing of this is a plan, and a planner that is killed
             or comes second leaves only objects under its own fence that no plan names

Memory is bounded by constants and one bit a row (ten million rows: some 240 MB in all, the rest is in
compressed scratch files). The same input gives the same shards, whoever plans. This room may not know
Redis or leases: whoever calls holds the lease and passes its fence.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import zstandard

from pagemill.jobs import layout
from pagemill.jobs.arrival import Arrival
from pagemill.jobs.commit import check_part
from pagemill.jobs.duplicates import Identities, repeated_id
from pagemill.jobs.errors import (
    ObjectNotFound,
    PlanRefused,
    PreconditionFailed,
    RowFault,
    StorageError,
)
from pagemill.jobs.lines import Line, read_lines
from pagemill.jobs.order import (
    Cut,
    Item,
    Limits,
    cut,
    expected_output,
    prefix_key,
    prompt_bytes,
    shared_bytes,
)
from pagemill.jobs.parquet import ResultRow, write_rows
from pagemill.jobs.row import Row
from pagemill.jobs.scratch import scratch_folder
from pagemill.jobs.sorting import MEMORY, Sorter
from pagemill.jobs.spec import JobSpec, parse_row
from pagemill.jobs.storage import Storage, decide, read_json, scratch_faults
from pagemill.jobs.uploads import Uploads

VERSION: Final = 1
# plan.json and Redis hold an entry a shard: beyond this many, shards grow instead.
MAX_SHARDS: Final = 10_000
ERROR_ROWS_PER_PART: Final = 500_000
STOP_EVERY_S: Final = 2.0
# What a compressed input may expand to: this, or so many times its size if that is more. gzip cannot pass
# the second (its best is about 1,030); zstd can, by a factor of a hundred.
MIN_EXPANDED_BYTES: Final = 4 << 30
MAX_RATIO: Final = 1_100

_HEAD: Final = struct.Struct(">QIIB")  # row index, bytes of prompt, tokens expected, whether the id is filled
_KEY_LENGTH: Final = struct.Struct(">H")


def make_plan(
    storage: Storage,
    spec: JobSpec,
    *,
    fence: str,
    fingerprint: str | None,
    stopped: Callable[[], str | None],
    progress: Callable[[int], None] = lambda rows: None,
    scratch: Path | None = None,
) -> dict[str, Any]:
    """Plan the job unless somebody has; returns the plan that counts (which may be another planner's).

    stopped: why the job was stopped, or None; asked every few seconds. A job stopped before its plan gets
        an empty one. A file that cannot be planned gets a plan that says so ("refused").
    progress: called now and then with the number of rows read.
    scratch: where temporary files go; they need about as much room as the compressed input, twice.
    Raises StorageError (DiskFull for the scratch folder): nothing is decided then, and planning may start
    again.
    """
    found = read_json(storage, layout.plan(spec.job))
    if found is not None:
        return found
    plan: dict[str, Any] = {
        "version": VERSION, "job": spec.job, "fence": fence, "fingerprint": fingerprint,
        "total": 0, "failed": 0, "errors": {}, "error_parts": [], "shards": [],
    }  # fmt: skip
    pace = _Pace(stopped, progress)
    try:
        with scratch_faults("plan the job"), scratch_folder(scratch) as folder:
            plan |= _Planner(storage, spec, fence, folder, pace).run()
        pace.check()
    except PlanRefused as refusal:
        plan |= _NOTHING | {"refused": {"code": refusal.code, "message": str(refusal)}}
    except _Stopped as stop:
        plan |= _NOTHING | {"stopped": stop.reason}
    return decide(storage, layout.plan(spec.job), plan | {"planned_at": time.time()})[0]


_NOTHING: Final[dict[str, Any]] = {"total": 0, "failed": 0, "errors": {}, "error_parts": [], "shards": []}


def read_shard(storage: Storage, entry: dict[str, Any]) -> list[Row]:
    """The rows of a shard, in the order to run them. Raises StorageError where its object was damaged."""
    return [Row.from_json(line) for line in shard_lines(storage, entry)]


def shard_lines(storage: Storage, entry: dict[str, Any]) -> list[bytes]:
    """The same as JSON texts, as `Row.to_json` wrote them."""
    data = storage.get(entry["key"])
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise StorageError(f"{entry['key']} in {storage.url} is damaged: its checksum is not the plan's.")
    lines = zstandard.ZstdDecompressor().decompress(data).split(b"\n")
    return [line for line in lines if line]


def expansion_limit(spec: JobSpec) -> int:
    """What the job's input may expand to."""
    return spec.max_expanded_bytes or max(MIN_EXPANDED_BYTES, MAX_RATIO * spec.input.size)


class _Stopped(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Pace:
    """Asks now and then whether to go on, and tells how far we are."""

    def __init__(self, stopped: Callable[[], str | None], progress: Callable[[int], None]) -> None:
        self._stopped = stopped
        self._progress = progress
        self._next = 0.0

    def tick(self, done: int, rows_read: int) -> None:
        """Cheap enough to call for every row."""
        if done & 255 == 0 and time.monotonic() >= self._next:
            self._progress(rows_read)
            self.check()

    def check(self) -> None:
        reason = self._stopped()
        if reason is not None:
            raise _Stopped(reason)
        self._next = time.monotonic() + STOP_EVERY_S


class _Planner:
    """One attempt at a plan, with its scratch files."""

    def __init__(self, storage: Storage, spec: JobSpec, fence: str, folder: Path, pace: _Pace) -> None:
        self.storage = storage
        self.spec = spec
        self.fence = fence
        self.folder = folder
        self.pace = pace
        self.good = Sorter(folder, "rows")
        self.bad = Sorter(folder, "faults", memory=MEMORY // 4)
        self.identities = Identities(folder)
        self.errors: Counter[str] = Counter()
        self.total = 0
        self.work = 0
        self.first_fault: tuple[int, RowFault] | None = None

    def run(self) -> dict[str, Any]:
        try:
            self.read()
            self.identities.settle(self.total)
            self.judge()
            shards = self.write_shards()
            parts = self.write_faults()
        finally:
            self.identities.close()
        return {
            "total": self.total,
            "failed": sum(self.errors.values()),
            "errors": dict(sorted(self.errors.items())),
            "error_parts": parts,
            "shards": shards,
        }

    # --- pass 1 ---

    def read(self) -> None:
        source = self.spec.input
        self.pace.check()
        try:
            with self.storage.open(source.key, if_match=source.etag) as stream:
                arrival = Arrival(stream, source.sha256, source.key)
                lines = read_lines(
                    arrival,
                    suffix=source.suffix,
                    max_line_bytes=self.spec.max_line_bytes,
                    max_expanded_bytes=expansion_limit(self.spec),
                )
                try:
                    for line in lines:
                        self.take(line)
                except PlanRefused:
                    arrival.check()  # a refusal is for good: not for a fault of the line
                    raise
                arrival.check()
            after = self.storage.head(source.key)
        except (PreconditionFailed, ObjectNotFound):
            after = None
        if after is None or after.etag != source.etag:
            raise PlanRefused(
                "input_changed", f"{source.key} is not what was accepted: submit the file again."
            )
        if self.total == 0:
            raise PlanRefused(
                "empty_file", "The input has no line that is not blank: there is nothing to run."
            )

    def take(self, line: Line) -> None:
        self.total += 1
        self.pace.tick(self.total, self.total)
        if self.spec.max_rows is not None and self.total > self.spec.max_rows:
            raise PlanRefused(
                "too_many_rows", f"The input has more than the {self.spec.max_rows:,} rows allowed: split it."
            )
        row = parse_row(line, self.spec)
        given = row.custom_id if isinstance(row, RowFault) or not row.filled_id else None
        if given is not None:
            self.identities.add(line.row_index, line.number, given)
        if isinstance(row, RowFault):
            self.add_fault(line.row_index, row)
            if self.first_fault is None:
                self.first_fault = (line.row_index, row)
        else:
            record, work = _record(row)
            self.good.add(record)
            self.work += work

    def add_fault(self, row_index: int, fault: RowFault) -> None:
        self.errors[fault.code] += 1
        text = json.dumps([fault.code, fault.message, fault.line, fault.custom_id], ensure_ascii=False)
        self.bad.add(row_index.to_bytes(8, "big") + text.encode())

    # --- between ---

    def judge(self) -> None:
        """Refuse a strict job that has bad lines, before anything of it is uploaded."""
        if not self.spec.strict:
            return
        first = self.first_fault
        repeated = self.identities.first_duplicate()
        if first is None and repeated is None:
            return
        if first is None or (repeated is not None and repeated[0] < first[0]):
            assert repeated is not None
            row = self.good_row(repeated[0])
            fault = repeated_id(row.line, row.custom_id, repeated[1])
        else:
            fault = first[1]
        said = f"The job is strict and the input has bad lines, the first of them: {fault.message}."
        raise PlanRefused(fault.code, said)

    def good_row(self, row_index: int) -> Row:
        """One of those that were read and are no faults. It uses them up: there will be no plan."""
        for done, record in enumerate(self.good.sorted()):
            self.pace.tick(done, self.total)
            head = _head_at(record)
            if _HEAD.unpack_from(record, head)[0] == row_index:
                return Row.from_json(record[head + _HEAD.size : -_KEY_LENGTH.size])
        raise AssertionError(f"row {row_index} was not read")

    # --- pass 2 ---

    def write_shards(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        with Uploads(self.storage) as uploads:
            for number, shard in enumerate(cut(self.items(), self.limits())):
                key = layout.shard(self.spec.job, self.fence, number) + ".zst"
                data = _packed(shard)
                uploads.put(key, data)
                entries.append(
                    {"shard": number, "key": key, "rows": len(shard.rows), "tokens": shard.tokens,
                     "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                )  # fmt: skip
        return entries

    def limits(self) -> Limits:
        return Limits(
            tokens=max(self.spec.shard_tokens, self.work // MAX_SHARDS),
            rows=max(self.spec.shard_rows, self.good.count // MAX_SHARDS),
        )

    def items(self) -> Iterator[Item]:
        """The rows to run, in order; rows whose id was taken turn into faults on the way."""
        before, size_before = b"", 0
        for done, record in enumerate(self.good.sorted()):
            self.pace.tick(done, self.total)
            head = _head_at(record)
            key = record[:head]
            row_index, size, output, filled = _HEAD.unpack_from(record, head)
            data = record[head + _HEAD.size : -_KEY_LENGTH.size]
            if filled:
                data = self.filled(row_index, data)
            elif (first := self.identities.first_line(row_index)) is not None:
                row = Row.from_json(data)
                self.add_fault(row_index, repeated_id(row.line, row.custom_id, first))
                continue
            yield Item(data, size, output, min(shared_bytes(before, key), size, size_before))
            before, size_before = key, size

    def filled(self, row_index: int, data: bytes) -> bytes:
        """The row under an id that is nobody else's; nearly always the one it has."""
        if not self.identities.is_claimed(row_index):
            return data
        row_id = self.identities.fill(row_index)
        return replace(Row.from_json(data), custom_id=row_id).to_json().encode()

    def write_faults(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        rows = self.fault_rows()
        while batch := list(islice(rows, 1)):
            path = self.folder / f"faults-{len(parts)}.parquet"
            stats = write_rows(path, chain(batch, islice(rows, ERROR_ROWS_PER_PART - 1)))
            key = layout.part(self.spec.job, layout.NO_SHARD, self.fence, stats.sha256[:16])
            part = stats.part(key, layout.NO_SHARD)
            self.storage.put_file(key, path)
            check_part(self.storage, part)  # once planned, a damaged part would end the job nowhere
            path.unlink()
            parts.append(part)
        return parts

    def fault_rows(self) -> Iterator[ResultRow]:
        for done, record in enumerate(self.bad.sorted()):
            self.pace.tick(done, self.total)
            row_index = int.from_bytes(record[:8], "big")
            code, message, line, given = json.loads(record[8:])
            row_id = self.identities.fill(row_index) if given is None else given
            yield ResultRow.fault_row(row_index, line, row_id, RowFault(code, message, line, given))


def _record(row: Row) -> tuple[bytes, int]:
    """A row as the sorter takes it: key, head, text, and how long the key is; and the work it is."""
    text = prompt_bytes(row)
    key, output = prefix_key(text), expected_output(row)
    head = _HEAD.pack(row.row_index, len(text), output, row.filled_id)
    record = b"".join((key, head, row.to_json().encode(), _KEY_LENGTH.pack(len(key))))
    return record, Item(b"", len(text), output, 0).work()


def _head_at(record: bytes) -> int:
    """Where the key of such a record ends, and its head begins."""
    length: int = _KEY_LENGTH.unpack_from(record, len(record) - _KEY_LENGTH.size)[0]
    return length


def _packed(shard: Cut) -> bytes:
    """A shard object: one row a line, compressed (neighbours share their beginnings)."""
    data: bytes = zstandard.ZstdCompressor(level=3).compress(b"\n".join(shard.rows) + b"\n")
    return data

"""A file checked without running it: every line judged as the plan would judge it, faults by line.

In bounded memory, like the plan: faults and ids are sorted in files. What only a model can tell (templates,
lengths) is asked of whoever the caller brings. This room may not know models, Redis or the store.
"""

from __future__ import annotations

import heapq
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from pagemill.jobs.duplicates import Identities, repeated_id
from pagemill.jobs.errors import PlanRefused, RowFault, UsageError
from pagemill.jobs.inputs import Chunks, Source
from pagemill.jobs.lines import Line, read_lines
from pagemill.jobs.request import parse_row
from pagemill.jobs.row import Row
from pagemill.jobs.sorting import Sorter
from pagemill.jobs.spec import JobSpec

_PLACE: Final = struct.Struct(">QB")  # row index, and which fault of a row is told: big-endian, to be sorted
_ROW: Final = struct.Struct("<QQH")  # line, where its own id stands in the file of ids, and how long it is
_OF_LINE, _REPEATED, _OF_MODEL = 0, 1, 2


class Appraisal(Protocol):
    """What a model says to rows, one after the other, and what they would take (worker/appraise.py)."""

    def check(self, row: Row) -> RowFault | None:
        """What the model could not do with this row; rows that pass are counted."""

    def fields(self) -> Mapping[str, str]:
        """The estimate for people."""

    def document(self) -> Mapping[str, Any]:
        """The estimate as JSON values."""


@dataclass(frozen=True, slots=True)
class Report:
    """rows: non-blank lines. codes: how many of them would fail with each code."""

    rows: int
    codes: Mapping[str, int]

    @property
    def faults(self) -> int:
        return sum(self.codes.values())


def validate(
    source: Source,
    spec: JobSpec,
    folder: Path,
    tell: Callable[[RowFault], None],
    appraisal: Appraisal | None = None,
) -> Report:
    """Judges every line of a source; tells each fault, by line, once all are read.

    spec: the model, defaults and limits that a job of it would have. folder: for scratch files. Raises
    UsageError for a file that cannot be planned at all.
    """
    judge = _Judge(folder, spec, appraisal)
    try:
        return judge.run(source, tell)
    except PlanRefused as refused:
        raise UsageError(f"{source.name} cannot be run: {refused}") from None
    finally:
        judge.close()


class _Judge:
    """One pass over the lines, and one over what was found."""

    def __init__(self, folder: Path, spec: JobSpec, appraisal: Appraisal | None) -> None:
        self._spec = spec
        self._appraisal = appraisal
        self._faults = Sorter(folder, "faults")
        self._identities = Identities(folder)
        self._read = _Read(folder)
        self._rows = 0

    def close(self) -> None:
        self._identities.close()
        self._read.close()

    def run(self, source: Source, tell: Callable[[RowFault], None]) -> Report:
        stream = Chunks(source.chunks())
        for line in read_lines(stream, suffix=source.suffix, max_line_bytes=self._spec.max_line_bytes):
            self._take(line)
        if not self._rows:
            raise PlanRefused("empty_file", "it has no line that is not blank.")
        self._identities.settle(self._rows)
        codes: Counter[str] = Counter()
        told = -1
        for record in heapq.merge(self._faults.sorted(), self._repeated()):
            row_index, _ = _PLACE.unpack_from(record)
            if row_index == told:  # one row, one fault: that of the line comes before the model's
                continue
            told = row_index
            fault = RowFault(*json.loads(record[_PLACE.size :]))
            codes[fault.code] += 1
            tell(fault)
        return Report(self._rows, dict(codes.most_common()))

    def _take(self, line: Line) -> None:
        self._rows += 1
        row = parse_row(line, self._spec)
        given = row.custom_id if isinstance(row, RowFault) or not row.filled_id else None
        self._read.add(line.number, given or "")
        if given is not None:
            self._identities.add(line.row_index, line.number, given)
        if isinstance(row, RowFault):
            self._faults.add(_record(line.row_index, _OF_LINE, row))
        elif self._appraisal is not None and (fault := self._appraisal.check(row)) is not None:
            self._faults.add(_record(line.row_index, _OF_MODEL, fault))

    def _repeated(self) -> Iterator[bytes]:
        for row_index in range(self._rows):
            first = self._identities.first_line(row_index)
            if first is not None:
                yield _record(row_index, _REPEATED, repeated_id(*self._read.row(row_index), first))


class _Read:
    """The line and the own id of every row, in files: which ids are repeated shows only after the last."""

    def __init__(self, folder: Path) -> None:
        self._rows: BinaryIO = (folder / "rows").open("xb+")
        self._ids: BinaryIO = (folder / "own-ids").open("xb+")
        self._end = 0

    def add(self, line: int, own_id: str) -> None:
        """own_id: empty where the row brought none."""
        data = own_id.encode()
        self._rows.write(_ROW.pack(line, self._end, len(data)))
        self._ids.write(data)
        self._end += len(data)

    def row(self, row_index: int) -> tuple[int, str]:
        self._rows.seek(row_index * _ROW.size)
        line, start, length = _ROW.unpack(self._rows.read(_ROW.size))
        self._ids.seek(start)
        return line, self._ids.read(length).decode()

    def close(self) -> None:
        self._rows.close()
        self._ids.close()


def _record(row_index: int, rank: int, fault: RowFault) -> bytes:
    text = json.dumps([fault.code, fault.message, fault.line, fault.custom_id])
    return _PLACE.pack(row_index, rank) + text.encode()

"""What both ends of the engine's pipe agree on: lines, and notes that outlive their writer."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.row import Row
from pagemill.worker.wire import BOARD_BYTES, Board, Lines, beside, board_file, decode, encode, row_line


@given(st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"")), max_size=8), st.data())
def test_lines_come_out_whole_however_the_stream_is_cut(texts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(text + b"\n" for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    lines, found = Lines(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.feed(stream[start:end])
    assert found == texts


def test_a_message_is_one_line_whatever_its_strings_hold() -> None:
    line = encode({"text": "a\nb\r\n\u2028c", "more": "ü€😀"})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


@given(st.text(max_size=40), st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
def test_a_row_goes_down_as_the_text_it_was_stored_as(prompt: str, metadata: dict[str, str]) -> None:
    row = Row(3, 4, 'id\n"', "completion", None, prompt, None, {"top_p": 0.5}, 2**62, metadata=metadata)
    line = row_line("job/1/f/3", row.to_json().encode(), beside(priority=-2))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line[:-1]) == {
        "rid": "job/1/f/3",
        "context": None,
        "special": "text",
        "priority": -2,
        "group": "",
        "row": row.to_dict(),
    }


def test_a_note_is_read_by_another_mapping_of_the_same_memory() -> None:
    fd = board_file()
    ours, theirs = Board(fd), Board(fd)
    os.close(fd)
    assert theirs.suspects() == set()
    ours.step.write(["a", "b"])
    ours.prepare.write(["c"])
    assert theirs.suspects() == {"a", "b", "c"}
    ours.step.write(())
    ours.prepare.write(())
    assert theirs.suspects() == set()


def test_a_note_too_long_for_its_page_keeps_whole_ids() -> None:
    fd = board_file()
    board = Board(fd)
    os.close(fd)
    ids = [f"row-{i:060d}" for i in range(BOARD_BYTES // 32)]
    board.step.write(ids)
    kept = board.step.read()
    assert 0 < len(kept) < len(ids)
    assert kept == ids[: len(kept)]


def test_a_writer_that_dies_in_the_middle_leaves_the_note_before() -> None:
    fd = board_file()
    board = Board(fd)
    os.close(fd)
    board.step.write(["before"])
    # All that a write does but its last byte: the other page is filled, and not yet the one that holds.
    page = board._map[4096]
    board.step.write(["after"])
    board._map[4096] = page
    assert board.step.read() == ["before"]

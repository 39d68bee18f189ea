import gzip
import io
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.jobs.errors import PlanRefused
from pagemill.jobs.lines import ZSTD_MAX_WINDOW, Line, read_lines


class Drip:
    """A stream that gives a few bytes at a time, and has nothing but `read`."""

    def __init__(self, data: bytes, step: int) -> None:
        self._source = io.BytesIO(data)
        self._step = step

    def read(self, size: int, /) -> bytes:
        return self._source.read(min(size, self._step))


class Endless:
    """A stream made of pieces drawn as they are asked for."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, size: int, /) -> bytes:
        return next(self._pieces, b"")


def read(data: bytes, *, suffix: str = "", step: int = 1 << 30, limit: int = 1 << 20) -> list[Line]:
    return list(read_lines(Drip(data, step), suffix=suffix, max_line_bytes=limit))


def texts(data: bytes, **options: int | str) -> list[bytes]:
    return [line.data for line in read(data, **options)]  # type: ignore[arg-type]


def test_lines_are_numbered_as_a_text_editor_would_and_rows_without_the_blank_ones() -> None:
    lines = read(b"a\n\n \t\r\nb\n")
    assert [(line.number, line.row_index, line.data) for line in lines] == [(1, 0, b"a"), (4, 1, b"b")]


def test_only_the_newline_byte_ends_a_line() -> None:
    text = "a\u2028b\u2029c\u0085d\vd\fe\rf".encode()
    assert texts(text + b"\n" + text) == [text, text]


def test_one_carriage_return_before_the_newline_is_dropped() -> None:
    assert texts(b"a\r\nb\r\r\nc\r") == [b"a", b"b\r", b"c"]


def test_a_last_line_without_a_newline_counts() -> None:
    assert texts(b"a\nb") == [b"a", b"b"]


def test_an_empty_input_has_no_lines() -> None:
    assert texts(b"") == []
    assert texts(b"\n\r\n  \n") == []
    assert texts(b"\xef\xbb\xbf") == []


def test_one_byte_order_mark_at_the_start_is_dropped_and_no_other() -> None:
    mark = b"\xef\xbb\xbf"
    assert texts(mark + b"a\n" + mark + b"b", step=1) == [b"a", mark + b"b"]
    assert texts(mark + mark + b"a") == [mark + b"a"]


def test_a_form_feed_is_not_blank() -> None:
    assert texts(b"\f\n\xc2\xa0\n") == [b"\f", b"\xc2\xa0"]


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_line_over_the_limit_is_skipped_through_and_the_next_ones_are_read(step: int) -> None:
    lines = read(b"x" * 10 + b"\n" + b"y" * 11 + b"\nz\n" + b"w" * 5000, step=step, limit=10)
    assert [line.data for line in lines] == [b"x" * 10, b"", b"z", b""]
    fault = lines[1].fault
    assert fault is not None
    assert (fault.code, fault.line) == ("line_too_long", 2)
    assert "line 2" in fault.message
    assert "max_line_bytes" in fault.message
    assert lines[3].fault is not None
    assert lines[3].fault.line == 4


@pytest.mark.parametrize("step", [1, 4, 1 << 20])
def test_the_line_end_does_not_count_towards_the_limit(step: int) -> None:
    lines = read(b"x" * 10 + b"\r\n" + b"y" * 11 + b"\r\n" + b"z" * 10 + b"\r", step=step, limit=10)
    assert [line.fault is None for line in lines] == [True, False, True]
    assert lines[2].data == b"z" * 10


@pytest.mark.parametrize("step", [3, 1 << 20])
def test_a_blank_line_stays_blank_however_long(step: int) -> None:
    assert texts(b"a\n" + b" " * 100 + b"\r\nb\n" + b"\t" * 50, step=step, limit=10) == [b"a", b"b"]


def test_a_long_line_works_as_long_as_the_limit_allows() -> None:
    long = b"a" * (2 << 20)
    lines = read(long + b"\n" + long + b"a\nb", limit=2 << 20)
    assert lines[0].data == long
    assert lines[1].fault is not None
    assert lines[2].data == b"b"


def test_a_line_without_end_is_read_in_bounded_memory() -> None:
    stream = Endless(iter([b"x" * (256 << 10)] * 200 + [b"\nlast"]))
    tracemalloc.start()
    try:
        lines = list(read_lines(stream, max_line_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [line.data for line in lines] == [b"", b"last"]
    assert peak < 8 << 20


def expected(data: bytes) -> list[bytes]:
    """The rule of P3, said another way."""
    lines = [line.removesuffix(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    return [line for line in lines if line.strip(b" \t\r")]


content = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b" ", b"\t", b"a", b'{"a":1}', b"\xef\xbb\xbf", "é\u2028".encode(), b"\xff", b"-"]
    ),
    max_size=40,
).map(lambda pieces: b"." + b"".join(pieces))


@given(content, st.integers(1, 9))
def test_any_input_in_any_pieces_gives_the_same_lines(data: bytes, step: int) -> None:
    assert texts(data, step=step) == expected(data)


@given(st.binary(max_size=200), st.integers(1, 50), st.integers(1, 20))
def test_any_bytes_are_lines_or_a_refusal_and_numbers_never_skip(data: bytes, step: int, limit: int) -> None:
    try:
        lines = read(data, step=step, limit=limit)
    except PlanRefused as refusal:
        assert refusal.code == "invalid_encoding"
        return
    assert [line.row_index for line in lines] == list(range(len(lines)))
    assert [line.data for line in lines if line.fault is None] == [
        line for line in expected(data) if len(line) <= limit
    ]


# --- compression ---


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACK = {".gz": gzip.compress, ".zst": zstd}


@settings(max_examples=40)
@given(st.lists(content, max_size=4), st.sampled_from([".gz", ".zst"]), st.integers(1, 40))
def test_members_and_frames_read_as_one_file(pieces: list[bytes], suffix: str, step: int) -> None:
    packed = b"".join(PACK[suffix](piece) for piece in pieces)
    assert texts(packed, suffix=suffix, step=step) == expected(b"".join(pieces))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [1, 4, 9, 40])
def test_data_that_was_cut_off_is_refused(suffix: str, cut: int) -> None:
    whole = PACK[suffix](b"".join(b'{"prompt": "number %d"}\n' % i for i in range(1000)))
    with pytest.raises(PlanRefused, match="in the middle") as refusal:
        read(whole + whole[:-cut], suffix=suffix)
    assert refusal.value.code == "invalid_encoding"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_data_are_refused(suffix: str) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True).compress
    whole = bytearray(
        (gzip.compress if suffix == ".gz" else checked)(b"".join(b"line %d\n" % i for i in range(5000)))
    )
    whole[len(whole) // 2] ^= 0x55
    with pytest.raises(PlanRefused, match="not sound") as refusal:
        read(bytes(whole), suffix=suffix)
    assert refusal.value.code == "invalid_encoding"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_text_named_as_compressed_is_refused(suffix: str) -> None:
    with pytest.raises(PlanRefused, match="not sound"):
        read(b'{"prompt": "hello"}\n' * 3, suffix=suffix)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_garbage_behind_compressed_data_is_refused(suffix: str) -> None:
    with pytest.raises(PlanRefused, match="not sound"):
        read(PACK[suffix](b"a\n") + b"garbage, and not a little of it", suffix=suffix)


def test_zero_padding_behind_gzip_data_is_allowed() -> None:
    assert texts(gzip.compress(b"a\nb") + bytes(512), suffix=".gz") == [b"a", b"b"]


def test_a_skippable_zstd_frame_is_skipped() -> None:
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    assert texts(zstd(b"a\n") + skippable + zstd(b"b"), suffix=".zst", step=3) == [b"a", b"b"]


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_data_under_another_name_are_named(suffix: str, kind: str) -> None:
    with pytest.raises(PlanRefused, match=f"{kind} data.*{suffix}"):
        read(PACK[suffix](b"a\n"))


def zstd_bomb(byte: bytes, expands_to: int) -> bytes:
    """A frame of run-length blocks: four bytes for every 128 KiB."""
    block = 128 << 10
    count = expands_to // block
    header = b"\x28\xb5\x2f\xfd" + bytes([0b00000000, 0x38])  # window descriptor: 128 KiB
    blocks = [struct.pack("<I", (block << 3 | 1 << 1 | (i == count - 1)))[:3] + byte for i in range(count)]
    return header + b"".join(blocks)


def gzip_bomb(byte: bytes, expands_to: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([packer.compress(byte * (1 << 20)) for _ in range(expands_to >> 20)]) + packer.flush()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(("byte", "limit"), [(b"x", 128 << 20), (b"\n", 1 << 20)])
def test_what_expands_without_end_is_refused_in_bounded_memory(suffix: str, byte: bytes, limit: int) -> None:
    bomb = {".gz": gzip_bomb, ".zst": zstd_bomb}[suffix](byte, 256 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PlanRefused, match=f"expands to more than {limit:,} bytes") as refusal:
            list(
                read_lines(io.BytesIO(bomb), suffix=suffix, max_line_bytes=1 << 20, max_expanded_bytes=limit)
            )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal.value.code == "invalid_encoding"
    assert peak < 80 << 20  # the zstd frame hands out 32 MiB at once, and joins them from as many


def test_a_zstd_window_larger_than_we_hold_is_refused() -> None:
    # A frame that claims a window of 2 GiB: 31 = 10 + exponent.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + b"\x01\x00\x00"
    assert ZSTD_MAX_WINDOW < 2 << 30
    with pytest.raises(PlanRefused, match="not sound zstd"):
        read(frame, suffix=".zst")


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"\.xz"):
        read(b"a", suffix=".xz")


# --- other encodings ---


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_a_file_in_utf_16_or_32_is_refused_as_a_whole(encoding: str, step: int) -> None:
    with pytest.raises(PlanRefused, match="UTF-8") as refusal:
        read('{"prompt": "hello"}\n'.encode(encoding), step=step)
    assert refusal.value.code == "invalid_encoding"


def test_compressed_utf_16_is_refused_too() -> None:
    with pytest.raises(PlanRefused, match="UTF-16"):
        read(gzip.compress("{}\n".encode("utf-16")), suffix=".gz")


@pytest.mark.parametrize("data", [b"\x00\n{}", b"\xffa\n{}", b"{}\n\xff\xfe{\x00}\x00"])
def test_strange_bytes_in_one_line_are_that_lines_fault(data: bytes) -> None:
    assert len(read(data)) == 2


def test_what_the_stream_raises_passes_through() -> None:
    class Broken:
        def read(self, size: int, /) -> bytes:
            raise ConnectionResetError("gone")

    for suffix in ("", ".gz", ".zst"):
        with pytest.raises(ConnectionResetError):
            list(read_lines(Broken(), suffix=suffix))

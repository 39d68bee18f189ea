"""Text in pieces: the same as the decode of everything, and never more than is certain."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import pytest
from engine_fakes import ByteTokenizer, FakeRunner, fake_engine, prompt, request, run_all
from hypothesis import example, given
from hypothesis import strategies as st

from pagemill.engine.detokenize import PartialText
from pagemill.engine.request import Completion, Delta

BYTES = ByteTokenizer()
TEXTS = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "สวัสดีครับ",
    "👩‍👩‍👧‍👦 👍🏽",
    "a\u0301e\u0308",
    "\ufffd real",
    "mixed 日 👍 é",
]


class MetaspaceTokenizer:
    """As SentencePiece decoders do it: the text's first space is stripped, a run of byte tokens is judged as
    a whole (a broken one is all U+FFFD), and special tokens vanish."""

    words = MappingProxyType({300: " hello", 301: " world", 302: ",", 303: "!", 304: " the", 305: "x"})
    byte_token_ids = frozenset(range(256))

    def decode(self, token_ids: Sequence[int]) -> str:
        out, run = "", b""
        for token in [*token_ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            if run:
                try:
                    out += run.decode()
                except UnicodeDecodeError:
                    out += "\ufffd" * len(run)
                run = b""
            out += self.words.get(token, "") if token is not None else ""
        return out.removeprefix(" ")


def pieces(
    decoder: object, ids: list[int], *, byte_ids: frozenset[int] = frozenset()
) -> tuple[list[str], str]:
    """What is released after each token, and then the rest."""
    partial = PartialText(decoder, byte_token_ids=byte_ids)  # type: ignore[arg-type]
    released = []
    for end in range(1, len(ids) + 1):
        partial.advance(ids[:end])
        released.append(partial.release())
    full = decoder.decode(ids)  # type: ignore[attr-defined]
    return released, partial.rest(partial.settle(full, len(ids)))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_whole_text(text: str) -> None:
    ids = list((text * 20).encode())
    released, rest = pieces(BYTES, ids)
    assert "".join(released) + rest == text * 20
    assert len(rest) <= 1, "All but an uncertain end is released on the way."


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    released, _ = pieces(BYTES, list(text.encode()))
    for n, piece in enumerate(released):
        assert text.startswith("".join(released[: n + 1]))
        assert piece.count("\ufffd") <= text.count("\ufffd")


@given(st.lists(st.integers(0, 255), max_size=60))
@example([0xF0, 0x9F, 0x91])
@example([0xE2, 0x82, 0xAC] * 10 + [0xE2, 0x82])
@example([0x80] * 40 + [0x41])
def test_bytes_that_are_no_text_come_out_as_in_the_whole_decode(ids: list[int]) -> None:
    released, rest = pieces(BYTES, ids)
    assert "".join(released) + rest == BYTES.decode(ids)


@given(st.lists(st.one_of(st.integers(300, 306), st.sampled_from([*"é€👍".encode(), 0x41])), max_size=60))
@example([306, 301])
@example([300, 306, 306, 301, 301])
@example([300] * 30 + [306] * 30 + [301])
@example([0xE2, 0x82, 0xAC, 0xC3])
@example([0xE2, 0x82, 0xAC, 0xC3, 0xA9, 300])
def test_decoders_that_look_at_neighbours_come_out_right(ids: list[int]) -> None:
    decoder = MetaspaceTokenizer()
    released, rest = pieces(decoder, ids, byte_ids=decoder.byte_token_ids)
    assert "".join(released) + rest == decoder.decode(ids)


def test_each_token_costs_a_short_window_only() -> None:
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    partial = PartialText(Counting())
    ids = list("日本語 text ".encode() * 100)
    for end in range(1, len(ids) + 1):
        partial.advance(ids[:end])
    assert longest < 24


def stopped(text: str, stop: tuple[str, ...], **sampling: object) -> Completion:
    """Run an engine whose model writes `text`, one byte a token, until it stops."""
    ids = list(text.encode())
    runner = FakeRunner(64, next=lambda known, _seed: ids[len(known) - 3])
    engine = fake_engine(runner=runner, tokenizer=ByteTokenizer())
    return run_all(engine, [request("a", prompt(3), len(ids), stop=stop, **sampling)])["a"]


def test_text_is_cut_before_a_stop_string_across_token_borders() -> None:
    completion = stopped("one two three", ("two",))
    assert completion.text == "one "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "two")
    assert bytes(completion.token_ids) == b"one two"


@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("aXbYc", ("Y", "X"), "a", "X"),
        ("abcd", ("bcd", "abc"), "", "abc"),
        ("abcd", ("cd", "abcd"), "", "abcd"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
        ("日本語。終", ("。",), "日本語", "。"),
        ("go 👍 on", ("👍",), "go ", "👍"),
        ("aaab", ("aab",), "a", "aab"),
        ("stop", ("stop",), "", "stop"),
    ],
)
def test_the_earliest_stop_string_counts(
    text: str, stops: tuple[str, ...], expected: str, reason: str
) -> None:
    completion = stopped(text, stops)
    assert (completion.text, completion.stop_reason) == (expected, reason)
    assert completion.finish_reason == "stop"


def test_without_a_match_the_text_is_whole() -> None:
    completion = stopped("nothing of the sort 👍", ("zzz", "👍👍"))
    assert completion.text == "nothing of the sort 👍"
    assert completion.finish_reason == "length"


def test_a_stop_string_within_the_first_min_tokens_is_passed_over() -> None:
    completion = stopped("XabcXd", ("X",), min_tokens=3)
    assert completion.text == "Xabc"


def test_a_stop_string_in_text_that_was_uncertain_to_the_end_counts() -> None:
    class Uncertain(ByteTokenizer):
        byte_token_ids = frozenset(range(256))

    ids = list(b"one two")
    runner = FakeRunner(64, next=lambda known, _seed: ids[len(known) - 3])
    engine = fake_engine(runner=runner, tokenizer=Uncertain())
    completion = run_all(engine, [request("a", prompt(3), len(ids), stop=("two",))])["a"]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "two")


def test_a_stream_never_shows_a_part_of_a_stop_string() -> None:
    ids = list(b"so far STOX and on STOP not this")
    runner = FakeRunner(64, next=lambda known, _seed: ids[len(known) - 3])
    engine = fake_engine(runner=runner, tokenizer=ByteTokenizer())
    engine.add(request("a", prompt(3), len(ids), stop=("STOP",)), stream=True)
    deltas: list[Delta] = []
    while engine.has_work:
        engine.step()
        deltas += engine.take_deltas()
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert "so far STOX and on ".startswith(shown)
    assert shown == "so far STOX and on "
    assert deltas[-1].completion is not None and deltas[-1].completion.text == shown


@given(
    st.text(alphabet="ab日👍\n", max_size=30),
    st.lists(st.text(alphabet="ab日👍\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_are_found_as_if_the_whole_were_decoded_after_each_token(
    text: str, stops: list[str], stride: int
) -> None:
    """Tokens of `stride` bytes, against the obvious: decode everything, look for every stop string."""
    data = text.encode()
    chunks = [data[i : i + stride] for i in range(0, len(data), stride)]

    class Chunks:
        def decode(self, token_ids: Sequence[int]) -> str:
            return b"".join(chunks[token] for token in token_ids).decode(errors="replace")

    partial = PartialText(Chunks(), stop=tuple(stops))
    for end in range(1, len(chunks) + 1):
        partial.advance(range(end))
        known = b"".join(chunks[:end]).decode(errors="replace").rstrip("\ufffd")
        starts = [known.find(stop) for stop in stops if stop in known]
        assert (partial.match is not None) == bool(starts)
        if partial.match is not None:
            assert partial.match[0] == min(starts)
            break

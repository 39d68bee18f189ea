from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from pagemill.jobs.row import MAX_SEED, Row, row_seed


def test_a_row_is_written_on_one_line_and_read_back() -> None:
    row = Row(
        row_index=5,
        line=9,
        custom_id="ä\n😀\u2028",
        kind="chat",
        messages=[{"role": "user", "content": "two\nlines\x00"}],
        prompt=None,
        prompt_token_ids=None,
        params={"logprobs": None, "stop": ["\n"], "temperature": 0.0},
        seed=MAX_SEED,
        requested_model="x",
        metadata={"a": {"b": [1, None]}},
    )
    text = row.to_json()
    assert "\n" not in text
    assert Row.from_json(text) == row
    assert Row.from_json(text.encode()) == row
    assert Row.from_dict(row.to_dict()) == row


def test_what_is_unset_is_not_written() -> None:
    row = Row(0, None, "row-0", "completion", None, None, [1], {}, 3)
    assert row.to_dict() == {
        "row_index": 0,
        "custom_id": "row-0",
        "kind": "completion",
        "prompt_token_ids": [1],
        "params": {},
        "seed": 3,
    }
    assert Row.from_json(row.to_json()) == row


def test_the_seed_of_a_row_is_the_documented_hash() -> None:
    digest = blake2b(bytes([1, *[0] * 7, 2, *[0] * 7]), digest_size=8, person=b"pagemill-seed").digest()
    assert row_seed(1, 2) == int.from_bytes(digest, "little") % 2**63


def test_the_seed_of_a_row_never_changes() -> None:
    assert [row_seed(0, 0), row_seed(3, 0), row_seed(3, 1)] == [
        5394460800741110076,
        3335108376273792906,
        6024938678786594991,
    ]


@given(st.integers(0, MAX_SEED), st.integers(0, 2**40))
def test_seeds_fit_63_bits_and_neighbours_differ(job_seed: int, row_index: int) -> None:
    seed = row_seed(job_seed, row_index)
    assert 0 <= seed <= MAX_SEED
    assert seed != row_seed(job_seed, row_index + 1)

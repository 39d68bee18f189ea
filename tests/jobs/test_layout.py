from __future__ import annotations

import pytest

from pagemill.jobs import layout
from pagemill.jobs.storage import check_key

JOB = "job-01h"


def test_everything_of_a_job_lies_under_its_own_prefix() -> None:
    keys = [
        layout.job(JOB),
        layout.input(JOB, ".jsonl.gz"),
        layout.plan(JOB),
        layout.stop(JOB),
        layout.shard(JOB, "0-17", 3),
        layout.segment(JOB, 3, "0-17", 2, "0123456789abcdef"),
        layout.part(JOB, 3, "0-17", "0123456789abcdef"),
        layout.part(JOB, layout.NO_SHARD, "0-17", "0123456789abcdef"),
        layout.commit(JOB, 3),
        layout.manifest(JOB),
        layout.success(JOB),
        layout.epoch(JOB, 1),
        layout.tombstone(JOB),
    ]
    assert all(check_key(key).startswith(layout.root(JOB)) for key in keys)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "a..b", "a b", "ä", "x" * 129, "a\0"])
def test_a_job_id_cannot_lead_out_of_its_prefix(name: str) -> None:
    with pytest.raises(ValueError, match="job id"):
        layout.root(name)


@pytest.mark.parametrize("fence", ["", "1/2", "..", "1~2"])
def test_a_fence_cannot_lead_out_of_its_folder(fence: str) -> None:
    with pytest.raises(ValueError, match="fence"):
        layout.segment(JOB, 0, fence, 0, "0123456789abcdef")


@pytest.mark.parametrize("fence", ["0-1795983498001", "12.7", "3_9-x"])
def test_a_segment_key_tells_what_it_is(fence: str) -> None:
    key = layout.segment(JOB, 1_234_567, fence, 42, "0123456789abcdef")
    assert layout.segment_identity(key) == (1_234_567, fence, 42, "0123456789abcdef")
    assert layout.segment_identity(layout.part(JOB, 1, fence, "0123456789abcdef")) is None


def test_a_commit_key_tells_its_shard() -> None:
    assert layout.commit_shard(layout.commit(JOB, 1_234_567)) == 1_234_567
    assert layout.commit_shard(layout.manifest(JOB)) is None


def test_fences_are_compared_as_numbers() -> None:
    fences = ["1-9", "0-1795983498001", "1-10", "0-999", "10-1"]
    assert sorted(fences, key=layout.fence_order) == ["0-999", "0-1795983498001", "1-9", "1-10", "10-1"]

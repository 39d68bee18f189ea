"""Where everything of a job lies in the object store: the names of keys, and nothing else.

    jobs/<job>/input.jsonl…  job.json               as accepted
              /plan.json  shards/<fence>/<n>.jsonl  what to run; the shards of a planner that lost are orphans
              /model.json                           the weights that its rows run on
              /stop.json                            somebody cancelled, or time ran out
              /_work/<shard>/<fence>~<seq>~…        sealed segments, gone after finalize
              /parts/part-<shard>-<fence>-….parquet
              /commits/<shard>.json                 names the one part of that shard that counts
              /manifest.json  _SUCCESS              what readers trust
              /epochs/<n>.json  tombstone.json      claimed by a rebuild; left by a delete
    unfinished/<model>/<job>                        a hint that the job may not have ended

This room may not know what is inside the objects, nor which store holds them.
"""

from __future__ import annotations

import re
from hashlib import blake2b

JOBS = "jobs/"
NO_SHARD = -1
"""The shard number of the part that holds the rows which the plan itself refused."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,32}){0,4}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


def _checked(pattern: re.Pattern[str], what: str, value: str) -> str:
    if not pattern.fullmatch(value) or ".." in value:
        raise ValueError(f"{what} {value!r} cannot be part of an object's key")
    return value


def root(job: str) -> str:
    """The prefix of every object of a job, with its closing slash."""
    return f"{JOBS}{_checked(_NAME, 'job id', job)}/"


def job(job: str) -> str:
    return f"{root(job)}job.json"


def input(job: str, suffix: str = ".jsonl") -> str:
    """The accepted input; how it is compressed shows in the end of its name."""
    return f"{root(job)}input{_checked(_SUFFIX, 'suffix', suffix)}"


def plan(job: str) -> str:
    return f"{root(job)}plan.json"


def model(job: str) -> str:
    return f"{root(job)}model.json"


def stop(job: str) -> str:
    return f"{root(job)}stop.json"


def shards(job: str) -> str:
    return f"{root(job)}shards/"


def shard(job: str, fence: str, index: int) -> str:
    """Rows of one shard as one planner cut them: two planners differ, and only one plan counts."""
    return f"{shards(job)}{_checked(_NAME, 'fence', fence)}/{_number(index)}.jsonl"


def work(job: str, shard: int | None = None) -> str:
    """The prefix of the sealed segments of a job, or of one shard of it."""
    return f"{root(job)}_work/" if shard is None else f"{root(job)}_work/{_number(shard)}/"


def segment(job: str, shard: int, fence: str, seq: int, digest: str) -> str:
    name = f"{_checked(_NAME, 'fence', fence)}~{_number(seq)}~{_checked(_DIGEST, 'digest', digest)}"
    return f"{work(job, shard)}{name}.parquet"


def segment_identity(key: str) -> tuple[int, str, int, str] | None:
    """(shard, fence, seq, digest) of a segment's key; None for any other key."""
    found = re.search(r"/_work/(\d+)/([A-Za-z0-9._-]+)~(\d+)~([0-9a-f]+)\.parquet$", key)
    return (int(found[1]), found[2], int(found[3]), found[4]) if found else None


def parts(job: str) -> str:
    return f"{root(job)}parts/"


def part(job: str, shard: int, fence: str, digest: str) -> str:
    """Named by its content, so that no two writers can mean different bytes by one key."""
    name = "errors" if shard == NO_SHARD else _number(shard)
    fence = _checked(_NAME, "fence", fence)
    return f"{parts(job)}part-{name}-{fence}-{_checked(_DIGEST, 'digest', digest)}.parquet"


def commits(job: str) -> str:
    return f"{root(job)}commits/"


def commit(job: str, shard: int) -> str:
    return f"{commits(job)}{_number(shard)}.json"


def commit_shard(key: str) -> int | None:
    """The shard of a commit record's key; None for any other key."""
    found = re.search(r"/commits/(\d+)\.json$", key)
    return int(found[1]) if found else None


def manifest(job: str) -> str:
    return f"{root(job)}manifest.json"


def success(job: str) -> str:
    return f"{root(job)}_SUCCESS"


def epoch(job: str, number: int) -> str:
    return f"{root(job)}epochs/{_number(number)}.json"


def tombstone(job: str) -> str:
    return f"{root(job)}tombstone.json"


def hints(model: str) -> str:
    """The prefix of the hints at unfinished jobs of a model, whose name may hold anything."""
    return f"unfinished/{blake2b(model.encode(), digest_size=8).hexdigest()}/"


def hint(model: str, job: str) -> str:
    """Put before job.json and deleted after manifest.json, so that workers find a job that Redis lost without
    looking through all that ever ran."""
    return f"{hints(model)}{_checked(_NAME, 'job id', job)}"


def fence_order(fence: str) -> tuple[int, ...]:
    """What fences are compared by: (epoch, n), read as numbers; as text "9" would beat "10"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", fence))


def _number(value: int) -> str:
    if value < 0:
        raise ValueError(f"{value} cannot be part of an object's key")
    return f"{value:06d}"

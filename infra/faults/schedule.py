"""Which fault comes when: a table of kinds with their weights, and a list of moments drawn from the seed.

This room may not know how any of them is done (storm.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# kind: (weight, least seconds, most seconds) that it lasts, in leases where its name says so below.
KINDS = {
    "kill -9 of a worker": (10, 0.0, 0.0),
    "kill -9 of all workers": (2, 0.0, 0.0),
    "a worker frozen past its lease": (7, 1.5, 3.0),
    "a worker and its engine frozen past its lease": (4, 1.5, 3.0),
    "kill -9 of an engine": (2, 0.0, 0.0),
    "SIGTERM of a worker": (6, 0.0, 0.0),
    "a storm of SIGTERM": (2, 0.0, 0.0),
    "a worker without disk": (5, 1.0, 5.0),
    "Redis killed and started": (5, 0.0, 6.0),
    "Redis flushed": (4, 0.0, 0.0),
    "Redis rolled back by a second": (5, 1.0, 1.2),
    "Redis without scripts": (2, 0.0, 0.0),
    "connections to Redis cut": (5, 0.0, 0.0),
    "replies of scripts lost": (8, 0.0, 0.0),
    "Redis slow": (2, 1.0, 4.0),
    "Redis deaf": (2, 0.5, 4.0),
    "S3 answers 503": (4, 1.0, 5.0),
    "S3 away": (3, 0.5, 5.0),
    "S3 full": (3, 1.0, 4.0),
    "S3 loses replies": (6, 1.0, 4.0),
    "S3 loses requests": (4, 1.0, 4.0),
    "S3 cuts bodies": (4, 1.0, 4.0),
    "S3 damages what is read": (5, 1.0, 4.0),
    "S3 damages what is written": (5, 1.0, 4.0),
    "S3 slow": (3, 1.0, 5.0),
    "S3 stuck": (2, 0.5, 3.0),
}
IN_LEASES = frozenset(kind for kind in KINDS if "past its lease" in kind)
FIRST_S = 2.0


@dataclass(frozen=True)
class Fault:
    """at: seconds after the start. lasts: seconds. draw: a number below 1 that decides what it strikes."""

    at: float
    kind: str
    lasts: float
    draw: float


def make_schedule(seed: int, seconds: float, *, gap_s: float, ttl_s: float) -> list[Fault]:
    """Faults of a run, on average one each gap_s. Every kind comes once before any comes by weight, as far
    as the time allows."""
    rng = Random(f"{seed}/faults")
    first = sorted(KINDS, key=lambda _: rng.random())
    found, at = list[Fault](), FIRST_S
    while at < seconds:
        kind = first.pop() if first else rng.choices(list(KINDS), [kind[0] for kind in KINDS.values()])[0]
        _, least, most = KINDS[kind]
        lasts = rng.uniform(least, most) * (ttl_s if kind in IN_LEASES else 1.0)
        found.append(Fault(at, kind, lasts, rng.random()))
        at += rng.expovariate(1 / gap_s)
    return found

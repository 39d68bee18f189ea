"""The jobs of a chaos run, and what each of their rows has to come out as.

Everything is drawn from the seed before anything runs. The simulated engine's answer is a function of prompt
and seed, so each line's output row is known beforehand; a stop may put `batch_cancelled` or `batch_expired`
in its place, and nothing else may. This room may not know servers, workers or faults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from pagemill.jobs.spec import default_seed, row_seed
from pagemill.jobs.terms import chosen_id
from pagemill.worker.simulated import made_up_text

CHARS = 80
"""How long the answers of the simulated engine are."""
Fate = Literal["run", "cancel", "expire", "delete", "retry", "refused"]
Sender = Literal["plain", "twice", "again", "vanishing", "vanished"]


@dataclass(frozen=True)
class Expected:
    """One output row. code "": completed, with these texts. planned: the plan itself writes it."""

    row_index: int
    line: int
    custom_id: str | None
    code: str
    texts: tuple[str, ...] = ()
    seed: int | None = None
    planned: bool = False


@dataclass(frozen=True)
class ChaosJob:
    """id: the job's, which for `twice` comes of its idempotency key, `key`.

    at: seconds after the start at which it is submitted; act_after: seconds from there to what its fate is.

    fate: run to the end; cancelled, deleted with force; a deadline of `act_after`; its failed rows run again;
        refused by its plan (`refusal`, the job's code).
    sender: plain; the same under one idempotency key from two clients at once; submitted again later, also
        with another input, which must be refused; a process that is killed `vanish_after` s into it, after
        which the same is submitted again (vanishing), or not (vanished).
    """

    id: str
    key: str
    at: float
    fate: Fate
    act_after: float
    sender: Sender
    vanish_after: float
    data: bytes
    rows: tuple[Expected, ...]
    terms: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


def make_jobs(seed: int, seconds: float, *, per_minute: float, kills: int) -> list[ChaosJob]:
    """The jobs of a run of so many seconds. kills: how many may hold a row that kills whole workers."""
    rng = Random(f"{seed}/jobs")
    jobs, at = list[ChaosJob](), 0.0
    while at < seconds * 0.9:
        job = _job(Random(f"{seed}/job/{len(jobs)}"), f"chaos-{seed}-{len(jobs):04d}", at, kills > 0)
        kills -= b"<<kill>>" in job.data
        jobs.append(job)
        # A few at once, so that they compete, then a while nothing.
        at += 0.0 if rng.random() < 0.3 else rng.expovariate(per_minute / 60 * 0.7)
    return jobs


def _job(rng: Random, job: str, at: float, may_kill: bool) -> ChaosJob:
    fate: Fate = rng.choices(
        ("run", "cancel", "expire", "delete", "retry", "refused"), (50, 14, 10, 6, 12, 6)
    )[0]
    sender: Sender = rng.choices(("plain", "twice", "again", "vanishing", "vanished"), (60, 10, 10, 12, 8))[0]
    count = rng.choices((rng.randint(1, 12), rng.randint(20, 150), rng.randint(200, 900)), (45, 40, 15))[0]
    poison = rng.choices(("", "<<crash>>", "<<hang>>", "<<kill>>"), (80, 10, 5, 5))[0]
    if fate != "run" or (poison == "<<kill>>" and not may_kill):
        poison = ""
    if fate in ("cancel", "expire", "delete", "retry"):
        count = max(count, 40)
    terms: dict[str, Any] = {
        "priority": rng.choice((-5, 0, 0, 0, 10)),
        "shard_rows": rng.choice((10, 40, 100, 400)),
        "max_shards": rng.choice((None, None, None, 1, 2)),
    }
    refusal = ""
    if fate == "refused":
        # These terms are the job's, so all senders say the same.
        refusal = rng.choice(("invalid_json_line", "too_many_rows", "empty_file"))
        sender = "plain"
        terms |= {"strict": True} if refusal == "invalid_json_line" else {}
        terms |= {"max_rows": max(count - 1, 1)} if refusal == "too_many_rows" else {}
        count = 0 if refusal == "empty_file" else max(count, 2)
    if sender in ("vanishing", "vanished"):
        terms = {"priority": terms["priority"]}  # what the command has flags for
    if fate == "expire":
        terms["deadline"] = rng.uniform(2.0, 20.0)
        sender = "plain"
    called = chosen_id(None, job) if sender == "twice" else job
    assert called is not None
    writer = _Writer(rng, called, count, poison, bad=0.0 if refusal else 0.06)
    if refusal == "invalid_json_line":
        writer.lines.append(b'{"prompt": "cut off')
    return ChaosJob(
        id=called,
        key=job,
        at=at,
        fate=fate,
        act_after=rng.uniform(0.0, 12.0),
        sender=sender,
        vanish_after=rng.uniform(0.6, 3.0),
        data=b"".join(line + rng.choice((b"\n", b"\n", b"\r\n")) for line in writer.lines),
        rows=() if refusal else tuple(writer.rows),
        terms={name: value for name, value in terms.items() if value is not None},
        refusal=refusal,
    )


class _Writer:
    """Lines of one input, in every shape there is, with what each becomes."""

    def __init__(self, rng: Random, job: str, count: int, poison: str, *, bad: float) -> None:
        self.rng, self.seed, self.bad = rng, default_seed(job), bad
        self.lines: list[bytes] = []
        self.rows: list[Expected] = []
        self.given: list[str] = []  # ids that a later line may repeat
        poisoned = {rng.randrange(count)} if poison and count else set()
        for index in range(count):
            while rng.random() < 0.05:
                self.lines.append(rng.choice((b"", b"   ", b"\t")))
            if index in poisoned:
                self.good(index, poison, code="poison_row")
            elif rng.random() < bad:
                self.broken(index)
            elif bad and rng.random() < 0.03:
                self.good(index, "<<fail>>", code="numeric_error")
            else:
                self.good(index, f"<<slow:{rng.randrange(50, 500)}>>" if rng.random() < 0.1 else "")

    def add(self, doc: dict[str, Any] | bytes, **expected: Any) -> None:
        data = (
            doc if isinstance(doc, bytes) else json.dumps(doc, ensure_ascii=self.rng.random() < 0.5).encode()
        )
        self.lines.append(data)
        self.rows.append(Expected(row_index=len(self.rows), line=len(self.lines), **expected))

    def good(self, index: int, marker: str, code: str = "") -> None:
        rng = self.rng
        words = f"{rng.choice(OPENINGS)} {index} · {rng.getrandbits(40):x} {marker}".strip()
        params: dict[str, Any] = {"max_tokens": rng.randrange(8, 64)}
        own_seed = rng.getrandbits(40) if rng.random() < 0.2 else None
        if own_seed is not None:
            params["seed"] = own_seed
        answers = 2 if rng.random() < 0.08 else 1
        if answers > 1:
            params["n"] = answers
        doc, prompt, takes_id = self.shaped(words, params, marker)
        custom_id = None
        if takes_id and rng.random() < 0.6:
            custom_id = f"id-{index}-{rng.getrandbits(32):x}"
            doc["custom_id"] = custom_id
            self.given.append(custom_id)
        seed = row_seed(self.seed, len(self.rows)) if own_seed is None else own_seed
        texts = () if code else tuple(made_up_text(prompt, seed, i, CHARS) for i in range(answers))
        self.add(doc, custom_id=custom_id, code=code, texts=texts, seed=seed)

    def shaped(self, words: str, params: dict[str, Any], marker: str) -> tuple[dict[str, Any], str, bool]:
        """The line; the prompt as the engine sees it; whether an id fits in."""
        rng = self.rng
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
        batch = {"method": "POST", "url": "/v1/chat/completions"}
        shape = rng.randrange(6)
        if shape == 0:
            return {**batch, "body": {"messages": messages, **params}}, f"Be brief.\n{words}", True
        if shape == 1:
            body = {"prompt": words, "model": "gpt-x", **params}
            return {**batch, "url": "/v1/completions", "body": body}, words, True
        if shape == 2:
            return {"messages": messages[1:], **params}, words, True
        if shape == 3 and not marker:
            ids = [rng.randrange(1, 50_000) for _ in range(rng.randrange(1, 12))]
            return {"prompt": ids, **params}, " ".join(map(str, ids)), True
        return {"prompt": words, "metadata": {"of": "chaos"}, **params}, words, True

    def broken(self, index: int) -> None:
        rng = self.rng
        kind = rng.randrange(5)
        if kind == 0:
            self.add(b'{"prompt": "never closed', custom_id=None, code="invalid_json_line", planned=True)
        elif kind == 1:
            self.add({"prompt": "x", "tools": []} | {"tools": [{"type": "function"}]}, custom_id=None,
                     code="unsupported_parameter", planned=True)  # fmt: skip
        elif kind == 2 and self.given:
            again = rng.choice(self.given)
            self.add({"prompt": f"again {index}", "custom_id": again}, custom_id=again,
                     code="duplicate_custom_id", planned=True)  # fmt: skip
        elif kind == 3:
            doc = {"custom_id": f"u-{index}", "method": "POST", "url": "/v1/images", "body": {"prompt": "x"}}
            self.add(doc, custom_id=f"u-{index}", code="url_mismatch", planned=True)
        else:
            self.add(
                {"prompt": "x", "temperature": "hot"}, custom_id=None, code="invalid_request", planned=True
            )


OPENINGS = ("Name a river.", "Übersetze:", "数を数えて", "What is", "Say why 🌧 falls:")

"""The state of jobs in Redis: one method for each verb of the protocol, each a Lua script that may run twice.

The object store remembers, Redis coordinates. So what was decided in the store (a plan, a commit, a stop, a
manifest) is told here afterwards, by anybody and as often as they like; what is decided here (who holds which
task) is asked with a nonce and guarded by a fence. The protocol, key by key, is in README.md.

This room may not know the store, the engine, or how a worker is built.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from pagemill.jobs.errors import JobConflict, JobNotFound, PagemillError
from pagemill.jobs.observe import FRESH_MS, PREFIX, Observer, protocol_mismatch
from pagemill.jobs.script import Arg
from pagemill.jobs.spec import PROTOCOL, JobSpec
from pagemill.jobs.status import (
    KINDS,
    CommitOutcome,
    Created,
    Kind,
    Lease,
    Renewal,
    SealOutcome,
    StopOutcome,
    StopReason,
    Totals,
    WorkerInfo,
)

__all__ = ["PREFIX", "LeaseLost", "Observer", "State", "new_nonce"]


class LeaseLost(PagemillError):
    """The task has another holder by now, or has ended: drop it, its objects harm nobody."""


def new_nonce() -> str:
    """Names one intention to lease; sending it again asks for the same lease."""
    return secrets.token_hex(12)


class State(Observer):
    """Every change of a job's state. All raise RedisUnavailable when Redis stays away for `patience_s`."""

    async def create(self, spec: JobSpec, output: str) -> Created:
        """Makes a job known. Raises JobConflict when its id belongs to another job, or to a deleted one."""
        reply = await self._create(spec, output)
        return Created(spec.job, existed=reply == "exists")

    async def create_held(
        self, spec: JobSpec, output: str, *, epoch: int, token: str, hold_ms: int
    ) -> Created:
        """For a rebuild: the job is known again, but not leased before the hold is ended or runs out."""
        reply = await self._create(spec, output, epoch=epoch, token=token, hold_ms=hold_ms)
        return Created(spec.job, existed=reply == "exists")

    async def hold(self, job: str, token: str, ms: int) -> None:
        """Lengthens the hold of a rebuild, or ends it (0). Raises LeaseLost when another one has it."""
        await self._call("hold", job, token, ms)

    async def lease(
        self,
        model: str,
        *,
        worker: str,
        nonce: str,
        ttl_ms: int,
        fingerprint: str | None = None,
        context: int | None = None,
        kinds: Sequence[Kind] = KINDS,
        job: str | None = None,
        starved_only: bool = False,
        avoid: Iterable[str] = (),
    ) -> Lease | None:
        """The best task that this worker may run, or None.

        Jobs go by priority, then by fewest live leases, then by the oldest last lease; in a job, finalize
        goes before plan before shards by number. `fingerprint` None means "holds no model": then only tasks
        that need no engine (plans, finalizing, stopped shards). `context` is what the engine can hold,
        None for "enough". `job` asks for one job's tasks only, `starved_only` for jobs nobody works on,
        `avoid` for none of these jobs.
        A refusal that nobody else's work outweighs is written to the job's `blocked_reason`.
        """
        args = (worker, nonce, ttl_ms, fingerprint or "", context or 0, f",{','.join(kinds)},", job or "")
        key = f"{self.prefix}:model:{model}:ready"
        reply = await self.scripts.call("lease", key, self.prefix, model, *args, int(starved_only), *avoid)
        return None if reply[0] == "none" else _lease(reply, ttl_ms)

    async def renew(self, worker: str, leases: Iterable[tuple[str, str, str]], ttl_ms: int) -> list[Renewal]:
        """Renews each (job, task, fence), in one round trip; one that ran out too, if nobody took it."""
        flat = [part for lease in leases for part in lease]
        if not flat:
            return []
        replies = await self.scripts.call(
            "renew", f"{self.prefix}:worker:{worker}", self.prefix, ttl_ms, *flat
        )
        return [Renewal(ok == "1", state, _reason(stop)) for ok, state, stop in replies]

    async def release(self, job: str, task: str, fence: str) -> bool:
        """Hands a task back at once, without blame. False when it was not (or is no longer) held."""
        reply = await self.scripts.call("release", self.key(job), self.prefix, job, task, fence)
        return bool(reply[0] == "ok")

    async def planned(self, job: str, fence: str, plan: Mapping[str, Any]) -> str:
        """Adopts the plan that counts; returns the job's state: `finalizing` when no shard is to run."""
        refused = plan.get("refused") or {}
        shards = [[int(entry["shard"]), int(entry["rows"])] for entry in plan["shards"]]
        args = (
            int(plan["total"]),
            int(plan["failed"]),
            plan.get("fingerprint") or "",
            plan.get("stopped") or "",
        )
        why = (refused.get("code", ""), refused.get("message", ""))
        return str((await self._call("planned", job, fence or "adopted", *args, *why, json.dumps(shards)))[1])

    async def seal(
        self, job: str, shard: int, fence: str, seq: int, segment: Mapping[str, Any], totals: Totals
    ) -> SealOutcome:
        """Records a sealed segment under the fence that holds the shard.

        Raises LeaseLost when it holds it no more, JobConflict when another segment has that (fence, seq).
        """
        return await self._seal(job, shard, fence, seq, segment, totals, "")

    async def reseal(
        self,
        job: str,
        shard: int,
        fence: str,
        seq: int,
        segment: Mapping[str, Any],
        totals: Totals,
        *,
        token: str,
    ) -> SealOutcome:
        """For a rebuild: an earlier holder's segment, under its own fence, while `token` holds the job."""
        return await self._seal(job, shard, fence, seq, segment, totals, token)

    async def note_trial(self, job: str, task: str, fence: str, record: str, *, trying: bool) -> None:
        """Writes down what is known of a task that kills its workers; with `trying`, before it may again.

        Raises LeaseLost when the fence holds the task no more.
        """
        await self._call("trial", job, task, fence, record, int(trying))

    async def trial(self, job: str, task: str) -> tuple[str, str]:
        """That record ("": none), and the fence under which its rows were running when its lease ended
        without a release ("": they were not)."""
        found = await self._hash(f"{self.key(job)}:trials")
        return found.get(task, ""), found.get(f"{task}/trying", "")

    async def segments(self, job: str, shard: int) -> list[dict[str, Any]]:
        """The recorded segments of a shard that is not committed yet, by fence and number."""
        texts = await self._hash(f"{self.key(job)}:segments:{shard}")
        names = sorted(texts, key=lambda name: (name.rpartition("/")[0], int(name.rpartition("/")[2])))
        return [cast(dict[str, Any], json.loads(texts[name])) for name in names]

    async def committed(self, job: str, shard: int, record: Mapping[str, Any]) -> CommitOutcome:
        """Takes over the commit record that the store holds for a shard, whoever wrote it."""
        totals = Totals.of(record["part"]).as_args()
        reply = await self._call("committed", job, shard, _json(record), *totals)
        return CommitOutcome(json.loads(reply[2]), reply[1])

    async def stop(
        self, job: str, reason: StopReason, error_code: str = "", error_message: str = ""
    ) -> StopOutcome:
        """Makes the job drain, once stop.json says so; not from finalizing on, nor for a second reason."""
        reply = await self.scripts.call(
            "stop", self.key(job), self.prefix, job, reason, error_code, error_message
        )
        if reply[0] == "unknown":
            raise _unknown(job)
        return StopOutcome(reply[0] == "ok", reply[1])

    async def finalized(self, job: str, manifest: Mapping[str, Any]) -> str:
        """Ends the job as its manifest says; returns the end it had, which is final."""
        counts = (int(manifest["total"]), *Totals.of(manifest).as_args())
        why = (manifest.get("error_code") or "", manifest.get("error_message") or "")
        at = manifest.get("finished_at")
        reply = await self._call(
            "finalized", job, str(manifest["state"]), *counts, *why, "" if at is None else at
        )
        return str(reply[1])

    async def runs_on(self, job: str, fingerprint: str) -> None:
        """Takes over which weights the job's rows run on, once model.json says so."""
        await self._call("weights", job, fingerprint)

    async def block(self, job: str, reason: str) -> None:
        """Says why the job does not move and how to mend it; work that succeeds unblocks it by itself."""
        await self._call("block", job, reason)

    async def unblock(self, job: str) -> None:
        await self._call("block", job, "")

    async def report(self, job: str, worker: str, *, rows_running: int, tokens_per_second: float) -> None:
        """One worker's live figures of a job, every second or so; both 0 when it leaves the job."""
        await self._call("report", job, worker, rows_running, tokens_per_second, FRESH_MS)

    async def heartbeat(self, worker: WorkerInfo, ttl_ms: int) -> bool:
        """Says that the worker lives; whether Redis had known so. Raises ProtocolMismatch when this Redis
        speaks another version."""
        fields = [part for pair in worker.to_hash().items() if pair[0] != "seen_at" for part in pair]
        args: tuple[Arg, ...] = (PROTOCOL, worker.worker, ttl_ms, json.dumps(worker.models), *fields)
        reply = await self.scripts.call(
            "heartbeat", f"{self.prefix}:worker:{worker.worker}", self.prefix, *args
        )
        if reply[0] == "protocol":
            raise protocol_mismatch(reply[1])
        return bool(reply[1] == "1")

    async def goodbye(self, worker: str) -> None:
        """Takes the worker out of the registry at once instead of when its heartbeat runs out."""
        await self.scripts.call("goodbye", f"{self.prefix}:worker:{worker}", self.prefix, worker)

    async def delete(self, job: str, *, tombstone_s: int = 30 * 86_400, decided: bool = False) -> None:
        """Forgets a job that has ended; its id stays refused. Raises JobConflict while it has not ended.

        decided: the store holds its tombstone; then it had ended, whatever this Redis remembers.
        """
        await self._call("delete", job, tombstone_s * 1000, int(decided))

    async def _create(
        self, spec: JobSpec, output: str, *, epoch: int = 1, token: str = "", hold_ms: int = 0
    ) -> str:
        expires = 0 if spec.expires_at is None else int(spec.expires_at * 1000)
        what = (spec.job, spec.digest(), epoch, spec.model, spec.priority, spec.max_shards or 0, expires)
        public = (spec.retention_s, spec.context or 0, output, spec.created_at, spec.expires_at or "")
        reply = await self.scripts.call(
            "create", self.key(spec.job), self.prefix, *what, *public, hold_ms, token
        )
        if reply[0] == "tombstone":
            raise JobConflict(f"Job {spec.job} was deleted, and its id is used up; submit under another id.")
        if reply[0] == "conflict":
            raise JobConflict(
                f"Job {spec.job} exists with other input, model or parameters; submit under another id."
            )
        return str(reply[0])

    async def _seal(
        self,
        job: str,
        shard: int,
        fence: str,
        seq: int,
        segment: Mapping[str, Any],
        totals: Totals,
        token: str,
    ) -> SealOutcome:
        reply = await self._call("seal", job, shard, fence, seq, _json(segment), *totals.as_args(), token)
        return SealOutcome(reply[0] == "counted", reply[1], _reason(reply[2]))

    async def _call(self, name: str, job: str, *args: Arg) -> list[Any]:
        reply = await self.scripts.call(name, self.key(job), self.prefix, job, *args)
        if reply[0] in ("unknown", "lost", "conflict", "refused"):
            _raise(name, job, reply)
        return cast(list[Any], reply)


def _lease(reply: Sequence[str], ttl_ms: int) -> Lease:
    _, job, task, fence, epoch, state, stop, strikes, attempt, more, fingerprint = reply
    kind, _, shard = task.partition(":")
    return Lease(
        job=job,
        task=task,
        kind=cast(Kind, kind),
        shard=int(shard) if shard else None,
        fence=fence,
        epoch=int(epoch),
        state=state,
        stop=_reason(stop),
        strikes=int(strikes),
        attempt=int(attempt),
        more=more == "1",
        ttl_ms=ttl_ms,
        fingerprint=fingerprint,
    )


def _reason(text: str) -> StopReason | None:
    return cast(StopReason, text) if text else None


def _json(document: Mapping[str, Any]) -> str:
    """One text for one content, so that a call sent again is recognised as the same."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _unknown(job: str) -> JobNotFound:
    return JobNotFound(
        f"Redis knows no job {job}; if the store does, `pagemill recover {job}` brings it back."
    )


def _raise(name: str, job: str, reply: Sequence[str]) -> NoReturn:
    if reply[0] == "unknown":
        raise _unknown(job)
    if reply[0] == "lost":
        raise LeaseLost(f"Job {job}, now {reply[1]}: the task has another holder or has ended.")
    if reply[0] == "conflict":
        raise JobConflict(f"Job {job}: another segment is recorded under this fence and number.")
    raise JobConflict(f"Job {job} is {reply[1]}, so {name} is refused.")

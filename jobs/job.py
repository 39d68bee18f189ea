"""A handle of a submitted job: its id, and what can be asked of it.

This room may not know how a job is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pagemill.jobs.reading import AsyncResults
from pagemill.jobs.spec import check_job_id
from pagemill.jobs.status import JobStatus
from pagemill.jobs.terms import When

if TYPE_CHECKING:
    from pagemill.jobs.client import Client

POLL_S = 1.0


class Named(Protocol):
    """A handle of a job: `Job`, `SyncJob`, or anything else with an id."""

    @property
    def id(self) -> str: ...


AnyJob = str | Named


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """state: the job's now. accepted: it ends, or ended, as cancelled; else it was past that."""

    state: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job: its id, and the client's methods with the id filled in.

    existed: submitting found the very same job instead of making one.
    """

    id: str
    client: Client = field(repr=False, compare=False)
    existed: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.id

    async def status(self) -> JobStatus:
        """See `Client.status`."""
        return await self.client.status(self.id)

    def watch(self, *, poll: float = POLL_S) -> AsyncIterator[JobStatus]:
        """See `Client.watch`."""
        return self.client.watch(self.id, poll=poll)

    async def wait(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        check: bool = False,
    ) -> JobStatus:
        """See `Client.wait`."""
        return await self.client.wait(self.id, timeout=timeout, check=check)

    def results(self, *, partial: bool = False) -> AsyncResults:
        """See `Client.results`."""
        return self.client.results(self.id, partial=partial)

    async def cancel(self) -> CancelOutcome:
        """See `Client.cancel`."""
        return await self.client.cancel(self.id)

    async def delete(self, *, force: bool = False) -> None:
        """See `Client.delete`."""
        await self.client.delete(self.id, force=force)

    async def retry_failed(
        self,
        *,
        codes: Collection[str] | None = None,
        job_id: str | None = None,
        deadline: When | None = None,
    ) -> Job:
        """See `Client.retry_failed`."""
        return await self.client.retry_failed(self.id, codes=codes, job_id=job_id, deadline=deadline)


def id_of(job: AnyJob) -> str:
    """The id of a job or of a handle of one; UsageError where it cannot be an id."""
    return check_job_id(job if isinstance(job, str) else job.id)

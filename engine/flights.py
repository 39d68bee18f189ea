"""Requests that must get the same tokens run once: one row in the engine, any number of riders on it.

Same prompt, salt, group and parameters, and the same noise, which for a greedy request is none at all: then
the tokens are determined, and to compute them again would be waste. A request joins a flight at any time
until it ends, and then gets what there is so far at once. Its priority, stream, times and end are its own:
it may leave early, and the flight goes on for the others, whoever began it.

Only rows in flight are known here: nothing is kept of what has ended. This file may not know the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pagemill.engine.detokenize import PartialText
from pagemill.engine.request import Completion, Delta, Request, Timings, Usage
from pagemill.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Rider:
    """One request on its flight. arrival: its own place among all requests. text: of a streamed one."""

    request: Request
    arrival: int
    queued_at: float
    text: PartialText | None = None
    shown: int = 0  # output tokens already in deltas

    def delta(self, output_ids: list[int]) -> Delta | None:
        """What a streamed request has to show beyond the last delta; None when that is nothing.

        Raises whatever the tokenizer does.
        """
        if self.text is None or len(output_ids) <= self.shown:
            return None
        for end in range(self.shown + 1, len(output_ids) + 1):  # token by token, as one there all along
            self.text.advance(output_ids[:end])
        new, self.shown = output_ids[self.shown :], len(output_ids)
        return Delta(self.request.request_id, tuple(new), self.text.release())

    def last_delta(self, completion: Completion) -> Delta:
        assert self.text is not None, "not streamed"
        new = completion.token_ids[self.shown :]
        return Delta(self.request.request_id, new, self.text.rest(completion.text), completion)

    def completion(self, of: Completion, seq: Sequence, hits: int, now: float) -> Completion:
        """The flight's completion as this rider's own. hits: cached tokens that count for this one."""
        usage = Usage(seq.num_prompt_tokens, seq.num_output_tokens, hits)
        started, first = (
            None if moment is None else max(moment, self.queued_at)
            for moment in (seq.started_at, seq.first_token_at)
        )
        timings = Timings(self.queued_at, first, now, started)
        return replace(of, request_id=self.request.request_id, usage=usage, timings=timings)


@dataclass(slots=True, eq=False)
class Flight:
    """A row and who wants its tokens, in order of joining. text: where stop strings are looked for."""

    seq: Sequence
    text: PartialText | None
    identity: Request | None
    riders: dict[str, Rider] = field(default_factory=dict)
    credited: int = 0  # of the cached tokens, those that a rider's completion has told of
    searched: int = 0  # output tokens in which a stop string has been looked for

    def take_hits(self, rider: Rider) -> int:
        """The cached tokens that this rider's completion tells of: the first aboard has them, once."""
        if next(iter(self.riders.values())) is not rider:
            return 0
        hits, self.credited = self.seq.num_cached_tokens - self.credited, self.seq.num_cached_tokens
        return hits

    def stop_match(self) -> str | None:
        """The stop string in what there is so far. Raises whatever the tokenizer does."""
        if self.text is None:
            return None
        output_ids = self.seq.output_token_ids
        for end in range(self.searched + 1, len(output_ids) + 1):
            self.text.advance(output_ids[:end])
        self.searched = len(output_ids)
        return self.text.match[1] if self.text.match is not None else None


class Flights:
    """Every request in flight. share: whether identical ones share a row."""

    def __init__(self, *, share: bool = True) -> None:
        self.joined = 0  # requests that did not need a row of their own
        self._share = share
        self._by_id: dict[str, Flight] = {}
        self._by_seq: dict[Sequence, Flight] = {}
        self._open: dict[Request, Flight] = {}  # by identity

    def __len__(self) -> int:
        """How many requests there are."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_seq.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def with_request(self, request_id: str) -> Flight | None:
        return self._by_id.get(request_id)

    def of(self, seq: Sequence) -> Flight:
        return self._by_seq[seq]

    def join(self, rider: Rider) -> Flight | None:
        """Put the rider on a flight that computes what it wants, if there is one."""
        flight = self._open.get(identity(rider.request)) if self._share else None
        if flight is not None:
            self.joined += 1
            self._board(rider, flight)
        return flight

    def begin(self, rider: Rider, text: PartialText | None, *, failed: Sequence | None = None) -> Flight:
        """A new row for the rider. failed: the row that it was on before; then nobody is to join it, and it
        goes on after the tokens that it has shown, which can't be taken back."""
        named = identity(rider.request) if self._share and failed is None else None
        flight = Flight(Sequence.of(rider.request, rider.arrival), text, named)
        if failed is not None and rider.shown:
            flight.seq.token_ids += failed.output_token_ids[: rider.shown]
            flight.seq.logprobs += failed.logprobs[: rider.shown]
            flight.seq.started_at, flight.seq.first_token_at = failed.started_at, failed.first_token_at
        self._by_seq[flight.seq] = flight
        if named is not None:
            self._open[named] = flight
        self._board(rider, flight)
        return flight

    def leave(self, request_id: str) -> None:
        """The request is answered; its flight ends with its last rider."""
        flight = self._by_id.pop(request_id)
        del flight.riders[request_id]
        if not flight.riders:
            del self._by_seq[flight.seq]
            if flight.identity is not None:
                del self._open[flight.identity]

    def _board(self, rider: Rider, flight: Flight) -> None:
        flight.riders[rider.request.request_id] = rider
        self._by_id[rider.request.request_id] = flight


def identity(request: Request) -> Request:
    """The request without what does not change its tokens: equal ones get equal tokens."""
    sampling, seed = request.sampling, request.seed
    if sampling.greedy:
        sampling, seed = replace(sampling, sample=0), 0
    return replace(request, request_id="", priority=0, seed=seed, sampling=sampling)

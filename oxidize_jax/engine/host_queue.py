"""Requests that wait on the host for a slot, and the ids of all that have not ended."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from oxidize_jax.engine.request import EngineRequest


class Queued(NamedTuple):
    """A request in line. Compared by its first two fields, of which the second is its own."""

    priority: int
    request_id: int
    request: EngineRequest
    parent: int | None
    """Id of the request that it is a fork of."""


class HostQueue:
    """The line, by priority and then arrival, without limit.

    One thread takes requests out. Others may add and discard at any moment, which is why each
    operation on the heap is one call, and what was found in it is judged afterwards.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._heap: list[Queued] = []
        self._unfinished: set[int] = set()

    def __contains__(self, request_id: int) -> bool:
        """Whether the request has not ended."""
        return request_id in self._unfinished

    @property
    def num_unfinished(self) -> int:
        """Requests in line or beyond it that have not ended."""
        return len(self._unfinished)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is in line."""
        return all(entry.request_id not in self for entry in list(self._heap))

    def new_id(self) -> int:
        """An id for a request that does not stand in line."""
        return next(self._ids)

    def begin(self, request_id: int) -> None:
        """The request counts as unfinished from now on."""
        self._unfinished.add(request_id)

    def end(self, request_id: int) -> None:
        """It has ended, wherever it is."""
        self._unfinished.discard(request_id)

    def push(self, request: EngineRequest, parent: int | None) -> int:
        """Put a request at the end of its priority; returns its id."""
        request_id = self.new_id()
        # First, for what only the heap knows counts as aborted.
        self.begin(request_id)
        try:
            heapq.heappush(self._heap, Queued(request.priority, request_id, request, parent))
        except BaseException:
            self.end(request_id)
            raise
        return request_id

    def pop(self) -> Queued | None:
        """Take out the first in line that has not been aborted."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry.request_id in self:
                return entry
        return None

    def forget_others(self) -> None:
        """Whoever is not in line has ended."""
        self._unfinished &= {entry.request_id for entry in self._heap}

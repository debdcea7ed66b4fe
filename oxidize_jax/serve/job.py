"""Job: the prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from oxidize_jax.completion import Group


class Job:
    """What the engine thread and the reader in the event loop share of one request.

    Text that has not been read waits in the completions themselves and grows together there,
    so a reader that is slow, or gone, holds no more than the texts are long.

    Made in the event loop. ``error`` and ``ended`` are written by the engine thread; the news of
    it comes by ``event``, which is set in the loop.
    """

    def __init__(self, groups: Sequence[Group], *, stream: bool, arrival: float) -> None:
        self.groups = list(groups)
        self.stream = stream
        self.arrival = arrival
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.cancelled = False
        """Nobody waits for it any more."""
        self.error: Exception | None = None
        self.ended = False
        """The engine thread has done with it."""
        self.clocks = [Clock() for _ in self.groups]

    @property
    def finished(self) -> bool:
        """Whether every completion has come to its end."""
        return all(group.ids and group.finished for group in self.groups)

    @property
    def request_ids(self) -> list[int]:
        """Of all its completions that were started."""
        return [request_id for group in self.groups for request_id in group.ids]

    @property
    def scheduled_at(self) -> float | None:
        """When the first of its prompts was seen in a row."""
        return min((c.scheduled for c in self.clocks if c.scheduled is not None), default=None)

    @property
    def first_token_at(self) -> float | None:
        """When its first token was seen."""
        return min((c.first for c in self.clocks if c.first is not None), default=None)


@dataclasses.dataclass
class Clock:
    """What the metrics know of a group; the engine thread's own."""

    scheduled: float | None = None
    """When it was seen in a row."""
    first: float | None = None
    """When its first token was seen."""
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    """By completion: tokens that have been counted."""
    last: dict[int, float] = dataclasses.field(default_factory=dict)
    """By completion: when the newest of them was seen."""
    ended: set[int] = dataclasses.field(default_factory=set)


def now() -> float:
    """The clock of all times here, in seconds."""
    return time.monotonic()

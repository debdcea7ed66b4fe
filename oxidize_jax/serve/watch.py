"""Watch: a picture of the engine for those who look at it, and no work where nobody does.

The engine thread takes a look after a dispatch, a few times a second at most and only while
somebody has asked lately; it reads the look after a later dispatch, when it has arrived. So
a look costs the device a copy of some integers, and the thread no wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from oxidize_jax.engine.observe import Observation, look
from oxidize_jax.llm import LLM
from oxidize_jax.scheduler.state import init_scheduler
from oxidize_jax.serve.job import now

_log = logging.getLogger(__name__)
EVERY_S = 0.2
"""Least time from one look to the next."""
KEEP_S = 3.0
"""How long looks go on after somebody asked."""
_WAIT_S = 1.0
"""How long a request waits for a new look: a step may take long."""
_MOST_REFS = 9
FREE, CACHED = ".", "c"
"""Marks of blocks that nobody holds. The digits 1 to 9 say how many hold one, 9 nine or more."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A look, ready to be sent."""

    time: float
    """When it was taken, on the clock of :func:`~oxidize_jax.serve.job.now`."""
    body: dict[str, Any]


class Watch:
    """The newest picture of the engine of ``llm``. ``wake``: let an idle engine thread look."""

    def __init__(self, llm: LLM, wake: Callable[[], None]) -> None:
        self._llm = llm
        self._wake = wake
        self._until = 0.0
        self._last = 0.0
        self._under_way: tuple[float, Observation] | None = None
        self._picture: Picture | None = None
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def is_wanted(self) -> bool:
        """Whether somebody has asked lately."""
        return now() < self._until

    def compile(self) -> None:
        """Compile the program that looks, so that the engine thread does not have to."""
        look.lower(jax.eval_shape(partial(init_scheduler, self._llm.config))).compile()

    async def picture(self) -> Picture | None:
        """A picture of about now, or after a while the last there is."""
        asked = now()
        self._until = asked + KEEP_S
        event = asyncio.Event()
        entry = asyncio.get_running_loop(), event
        with self._lock:
            self._waiting.append(entry)
        self._wake()
        try:
            async with asyncio.timeout(_WAIT_S):
                while self._picture is None or self._picture.time < asked - EVERY_S:
                    await event.wait()
                    event.clear()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiting.remove(entry)
        return self._picture

    # What follows is the engine thread's own.

    def turn(self, *, idle: bool) -> None:
        """Look, if it is time to; publish the look before this one, if it has arrived.

        ``idle``: nothing runs, so there is nothing to wait for.
        """
        try:
            self._turn(idle=idle)
        except Exception:  # requests go on without a picture
            self._under_way = None
            _log.exception("the engine could not be looked at")

    def _turn(self, *, idle: bool) -> None:
        if self._under_way is not None and (idle or self._under_way[1].is_ready):
            taken, observation = self._under_way
            self._under_way = None
            self._publish(Picture(taken, _body(observation)))
        if self._under_way is None and self.is_wanted and now() - self._last >= EVERY_S:
            self._last = now()
            with self._llm.runner.exclusive() as engine:
                self._under_way = self._last, engine.observe()
            if idle:
                self._turn(idle=True)

    def _publish(self, picture: Picture) -> None:
        self._picture = picture
        with self._lock:
            waiting = list(self._waiting)
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(event.set)


def _body(observation: Observation) -> dict[str, Any]:
    requests = observation.requests
    refs, cached = observation.ref_counts, observation.is_cached
    marks = np.where(cached, ord(CACHED), ord(FREE))
    marks = np.where(refs > 0, ord("0") + np.minimum(refs, _MOST_REFS), marks)
    return {
        "requests": [dataclasses.asdict(one) for one in requests],
        "num_queued": observation.num_queued,
        "blocks": {
            "used": int((refs > 0).sum()),
            "cached": int(cached.sum()),
            "free": int(((refs == 0) & ~cached).sum()),
            "map": marks.astype(np.uint8).tobytes().decode("ascii"),
        },
        "totals": observation.totals,
    }

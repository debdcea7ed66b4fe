"""What one rendering of a chat template may take, and what it has taken."""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

MAX_STEPS = 1_000_000
"""Turns of loops and calls of macros in one rendering."""

MAX_CHARACTERS = 10_000_000
"""Length of the rendered text, and of any text that is made; of a list, as it would be printed."""

MAX_MADE = 50 * MAX_CHARACTERS
"""Length of all texts and lists that are made in one rendering."""

MAX_PRINTED = 4 * MAX_CHARACTERS
"""Length of all that is printed in one rendering, in macros and blocks too."""

MAX_SECONDS = 10.0
"""Time of one rendering, looked at between steps, calls, filters and comparisons."""

MAX_DEPTH = 200
"""Lists in lists. Python takes a hash by recursion in C, without a limit of its own."""

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
_CONTAINER_BYTES = 64


class TemplateLimit(Exception):
    """A template took more than it may."""


@dataclasses.dataclass
class Budget:
    """What one rendering has taken so far.

    The *weight* of a value is about the length of its text. A list that is in a list twice
    counts twice, though it takes no more memory: printing, comparing or hashing the outer one
    goes through it twice, and forty such lists in each other are without end. Every list that
    a template makes is weighed when it is made, so what can be done to it is bounded.
    """

    deadline: float
    steps: int = 0
    made: int = 0
    printed: int = 0
    # By id: the container, which is kept so that its id stays its own, its weight and depth.
    known: dict[int, tuple[Any, int, int]] = dataclasses.field(default_factory=dict)

    def step(self) -> None:
        """One turn of a loop or call of a macro."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimit(f"its loops and macros take more than {MAX_STEPS} steps")
        self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raises :class:`TemplateLimit` if the time is over."""
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, length: int) -> None:
        """A text or list of a length is about to be made."""
        self.made += max(0, length)
        if length > MAX_CHARACTERS or self.made > MAX_MADE:
            raise TemplateLimit(
                f"it makes a text or list of more than {MAX_CHARACTERS} items, or {MAX_MADE} in all"
            )

    def put_out(self, length: int) -> None:
        """A text of a length is about to be printed."""
        self.printed += length
        if self.printed > MAX_PRINTED:
            raise TemplateLimit(f"it prints more than {MAX_PRINTED} characters")

    def allow(self, value: Any) -> Any:
        """``value``, which was just made, if it is not too large."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, _CONTAINERS):
            self.weigh(value)
        elif isinstance(value, Iterator):
            return self._watched(value)
        return value

    def weight(self, *values: Any) -> int:
        """Of all values together."""
        weight = sum(self.weigh(value)[0] for value in values)
        _check_weight(weight)
        return weight

    def weigh(self, value: Any) -> tuple[int, int]:
        """Weight and depth."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, int):
            return 1 + value.bit_length() // 3, 0
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        known = self.known.get(id(value))
        if known is not None:
            return known[1], known[2]
        self.make(_CONTAINER_BYTES + 8 * len(value))
        weight, deepest = 2, 0
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            item_weight, depth = self.weigh(item)
            weight += 2 + item_weight
            deepest = max(deepest, depth)
        return self._note(value, weight, deepest + 1)

    def allow_sum(self, total: Any, left: Any, right: Any) -> Any:
        """``total`` of two lists: their weights are known, so it need not be gone through."""
        (left_weight, left_depth), (right_weight, right_depth) = self.weigh(left), self.weigh(right)
        self.make(_CONTAINER_BYTES + 8 * len(total))
        self._note(total, left_weight + right_weight, max(left_depth, right_depth))
        return total

    def _note(self, value: Any, weight: int, depth: int) -> tuple[int, int]:
        _check_weight(weight)
        if depth > MAX_DEPTH:
            raise TemplateLimit(f"it makes lists in lists more than {MAX_DEPTH} deep")
        self.known[id(value)] = value, weight, depth
        return weight, depth

    def _watched(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.look_at_clock()
            if not isinstance(item, str):  # who made a text has counted it
                item = self.allow(item)
            yield item


def _check_weight(weight: int) -> None:
    if weight > MAX_CHARACTERS:
        raise TemplateLimit(f"it makes a text or list of more than {MAX_CHARACTERS} items")


# One template object serves many threads, so what a rendering has taken is not in it.
current: contextvars.ContextVar[Budget] = contextvars.ContextVar("current")
"""Of the rendering that goes on. There is none while a template is compiled: jinja2 then leaves
what it cannot work out to the rendering."""

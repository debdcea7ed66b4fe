"""Stop strings in a stream of text: found across token edges, never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until the first stop string, which it cuts off.

    Text that may yet turn out to begin a stop string is held back, so that what
    :meth:`add` and :meth:`finish` return is exactly the text before the first match,
    whatever the chunks.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError(
                "stop contains an empty string, which matches everywhere: leave it out."
            )
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def add(self, text: str) -> str:
        """The part of ``text`` (and of what was held) that is safe to show."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda match: match[0])
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back for a match that did not come."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

"""What is said on standard error beside the text."""

from __future__ import annotations

import sys

_CLEAR_LINE = "\r\x1b[K"


class Status:
    """A line on standard error that says what is going on, gone once there is more to see."""

    def __init__(self) -> None:
        self.watched = sys.stderr.isatty()
        self._shown = False

    def show(self, text: str) -> None:
        """Put ``text`` in place of what is shown."""
        if self.watched:
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
            self._shown = False

    def note(self, text: str) -> None:
        """Say something that stays, whether or not someone watches."""
        self.clear()
        print(text, file=sys.stderr, flush=True)


def binary_size(size: float) -> str:
    """``98362432`` -> ``93.8 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

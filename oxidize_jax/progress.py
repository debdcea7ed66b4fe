"""Bars for long work, on the error stream, gone where nobody watches."""

from __future__ import annotations

import sys
from typing import Any

_DELAY_SECONDS = 1.0


def progress_bar(total: int, *, shown: bool, unit: str = "seq", label: str = "") -> Any:
    """A tqdm bar that appears after a second of work, on a terminal or in a notebook only.

    Raises ImportError saying what to install where a bar is to be shown and tqdm is absent.
    """
    if not (shown and is_watched()):
        return _NoBar()
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs tqdm: pip install tqdm") from error
    return tqdm(
        total=total,
        desc=label or None,
        unit=unit,
        delay=_DELAY_SECONDS,
        leave=False,
        dynamic_ncols=True,
    )


def is_watched() -> bool:
    """Whether someone sees the error stream as it is written; not where it is closed."""
    return (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules


class _NoBar:
    """Takes what a bar takes and shows nothing."""

    n = 0

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: int = 1) -> None:
        """Count."""
        self.n += n

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Nothing."""

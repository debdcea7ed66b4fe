"""Bars for long work, on the error stream, gone where nobody watches."""

from __future__ import annotations

import sys
from typing import Any

_DELAY_SECONDS = 1.0


def progress_bar(total: int, *, shown: bool, unit: str = "seq", label: str = "") -> Any:
    """A tqdm bar that appears after a second of work, on a terminal or in a notebook only."""
    from tqdm.auto import tqdm

    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        total=total,
        desc=label or None,
        unit=unit,
        delay=_DELAY_SECONDS,
        disable=not (shown and watched),
        dynamic_ncols=True,
    )

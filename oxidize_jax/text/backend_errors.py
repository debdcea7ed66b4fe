"""Failures of the `tokenizers` library, as errors that a caller catches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_LONGEST = 300


@contextlib.contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Turns what the library raises into ``ValueError("{what}: {reason}")``, in one line.

    It raises a bare ``Exception``, and where its Rust code panics pyo3's ``PanicException``,
    which is no ``Exception`` and cannot be imported: a damaged file would end a thread that
    handles every ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and the like
        reason = " ".join(str(error).split())[:_LONGEST]
        raise ValueError(f"{what}: {reason}") from None

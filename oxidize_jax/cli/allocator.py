"""What the C library does with memory that XLA gives back between two steps.

XLA:CPU takes the temporary arrays of a program from malloc each time it runs, and gives them back
at its end. glibc returns tens of megabytes to the system at once, by ``munmap``, and the next step
finds each page missing: 6,400 page faults a step with 64 rows of SmolLM2-135M, 18 ms of a
core's time. A process that makes one step after the other keeps them instead.
"""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEPT_BYTES = 2**30
"""Free memory at the end of the heap above which glibc gives some back all the same."""


def use_one_arena() -> bool:
    """Have all threads allocate in one place; call it before there are threads.

    The arenas of other threads unmap what is free whatever they are told. Returns whether the C
    library can be told: glibc alone can.
    """
    return _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> bool:
    """Keep what is given back from now on; call it when everything large has been loaded."""
    return _mallopt(_M_MMAP_MAX, 0) and _mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _mallopt(option: int, value: int) -> bool:
    try:
        library = ctypes.CDLL(None)
        _ = library.gnu_get_libc_version  # musl has a mallopt that does nothing
        return library.mallopt(option, value) == 1
    except (AttributeError, OSError, TypeError):  # macOS, musl; Windows has no CDLL(None)
        return False

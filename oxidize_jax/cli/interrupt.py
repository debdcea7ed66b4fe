"""Ctrl-C that works at once, even while XLA compiles for a minute."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell reports it."""
_GRACE_SECONDS = 1.0
_STDERR = 2


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process with status 130 if Ctrl-C has not ended the block after a second.

    Python raises KeyboardInterrupt only between bytecodes, and compiled code can keep it
    waiting for minutes. The interpreter's C signal handler writes to a socket at once, so a
    thread that reads it knows. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()
    watcher = threading.Thread(target=_watch, args=(reader, left), daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(previous)
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, left: threading.Event) -> None:
    while numbers := reader.recv(64):
        if signal.SIGINT in numbers and not left.wait(_GRACE_SECONDS):
            end_line()
            os._exit(INTERRUPTED)


def end_line() -> None:
    """The shell's prompt starts a line of its own after ``^C``."""
    with contextlib.suppress(OSError):
        if os.isatty(_STDERR):
            os.write(_STDERR, b"\n")

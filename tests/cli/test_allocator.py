"""A process that has been told to keeps the memory that it frees, and faults no page in anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from oxidize_jax.cli import allocator

STEPS = """
import resource, sys, threading
from oxidize_jax.cli.allocator import keep_freed_memory, use_one_arena
if sys.argv[1] == "kept":
    assert use_one_arena() and keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 50_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def work():
    faults()
    print(min(faults() for _ in range(3)))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_a_thread_of_a_process_that_keeps_its_memory_faults_in_no_page():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert faults("given back") > 1_000
    assert faults("kept") < 100


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.use_one_arena()
    assert not allocator.keep_freed_memory()

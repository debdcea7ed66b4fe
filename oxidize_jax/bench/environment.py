"""What a measurement was made on and with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import jax

from oxidize_jax import __version__


def describe() -> dict[str, Any]:
    """Versions and processors; nothing that tells one machine of a kind from another."""
    device = jax.devices()[0]
    return {
        "oxidize_jax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
    }


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

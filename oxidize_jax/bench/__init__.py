"""Measurements of speed and quality: what ``oxidize-jax bench`` and ``benchmarks/`` run.

Times are wall-clock seconds. Nothing here prints; each module returns plain data.
"""

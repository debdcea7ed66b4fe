"""``python -m oxidize_jax`` is the command ``oxidize-jax``."""

from oxidize_jax.cli import run_process

run_process()

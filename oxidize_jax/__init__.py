"""oxidize_jax: an LLM inference engine in JAX whose whole step is a pure function."""

__version__ = "0.1.0"

"""Tests run with strict dtype promotion: no array changes its type unasked."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

"""Sampling: user-facing parameters and the jitted sampler."""

"""Continuous batching as pure transitions over fixed-shape arrays."""

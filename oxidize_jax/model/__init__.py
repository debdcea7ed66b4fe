"""Decoder models: configuration, parameters, paged KV cache, attention, forward pass."""

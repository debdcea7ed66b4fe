"""Batch descriptors: what one step of the model needs, in static shapes."""

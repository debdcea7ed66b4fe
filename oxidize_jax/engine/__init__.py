"""The engine: the pure step, the loops over it, and the host shell."""

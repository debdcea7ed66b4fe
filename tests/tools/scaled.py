"""A small program of which executables are kept."""

import numpy as np

BIAS = np.float32(0)


def scaled(factor, pair, offset):
    return {"sum": pair["a"] * np.float32(factor) + offset + BIAS}

"""Second moments and patches by their definition, in float64."""

from itertools import product

import numpy as np


def moment(rows, homogeneous):
    """Sum of the outer products of the rows ``(k, d)``."""
    rows = np.asarray(rows, np.float64)
    if homogeneous:
        rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    return np.einsum("ri,rj->ij", rows, rows)


def patches(x, kernel, strides, dilations, begins, ends):
    """Patches ``(n, positions, taps·channels)``, tap-major, read pixel by pixel."""
    x = np.asarray(x, np.float64)
    n, channels, *sides = x.shape
    outputs = [
        (side + begin + end - (k - 1) * d - 1) // s + 1
        for side, begin, end, k, d, s in zip(
            sides, begins, ends, kernel, dilations, strides, strict=True
        )
    ]
    found = np.zeros((n, int(np.prod(outputs)), int(np.prod(kernel)), channels))
    for o, at in enumerate(product(*map(range, outputs))):
        for u, tap in enumerate(product(*map(range, kernel))):
            pixel = tuple(
                a * s + t * d - b
                for a, s, t, d, b in zip(at, strides, tap, dilations, begins, strict=True)
            )
            if all(0 <= p < side for p, side in zip(pixel, sides, strict=True)):
                found[:, o, u] = x[:, :, *pixel]
    return found.reshape(n, found.shape[1], int(np.prod(kernel)) * channels)

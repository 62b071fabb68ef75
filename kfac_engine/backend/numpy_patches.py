"""The patches of images."""

from itertools import product

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.window import Window


def gather(x: Array, window: Window) -> Array:
    """All patches of all images: ``(n, positions, taps·channels)``, features tap-major."""
    n, channels, *sides = x.shape
    outputs = window.output_sides(tuple(sides))
    found = np.zeros((n, *outputs, *window.kernel, channels), x.dtype)
    channels_last = np.moveaxis(x, 1, -1)
    for tap in product(*map(range, window.kernel)):
        seen = [
            window.seen(axis, u, side)
            for axis, (u, side) in enumerate(zip(tap, sides, strict=True))
        ]
        here = [positions for positions, _ in seen]
        there = [pixels for _, pixels in seen]
        spot: tuple[slice | int, ...] = (slice(None), *here, *tap)
        found[spot] = channels_last[slice(None), *there]
    return found.reshape(n, -1, window.taps * channels)

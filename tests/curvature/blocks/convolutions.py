"""Convolutions for the tests of their blocks, with patches read pixel by pixel."""

from dataclasses import dataclass

import numpy as np

from tests.backend.truths import patches as truth_patches
from tests.lifecycle import plain_packing

PARAMS = {True: ("w", "b"), False: "w"}
FORMATS = {1: ("NCW", "OIW"), 2: ("NCHW", "OIHW"), 3: ("NCDHW", "OIDHW")}


@dataclass(frozen=True)
class Convolution:
    """A convolution of ``groups · channels`` channels into ``groups · outputs``."""

    sides: tuple
    kernel: tuple
    padding: object = "VALID"
    strides: tuple | None = None
    dilations: tuple | None = None
    bias: bool = True
    first: bool = False
    channels: int = 2
    outputs: int = 2
    groups: int = 1

    @property
    def formats(self):
        """The formats to register, if the channels come first."""
        names = ("data_format", "weight_format")
        return dict(zip(names, FORMATS[len(self.sides)], strict=True)) if self.first else {}

    @property
    def filter_shape(self):
        last = (self.channels, self.groups * self.outputs)
        return (*last[::-1], *self.kernel) if self.first else (*self.kernel, *last)

    @property
    def shapes(self):
        return [self.filter_shape] + [(self.groups * self.outputs,)] * self.bias

    @property
    def steps(self):
        ones = (1,) * len(self.sides)
        return self.strides or ones, self.dilations or ones

    @property
    def pads(self):
        """Padding before and after, written out from TensorFlow's definition."""
        if self.padding == "VALID":
            return [(0, 0)] * len(self.sides)
        if self.padding != "SAME":
            return list(self.padding)
        pads = []
        for side, k, s, d in zip(self.sides, self.kernel, *self.steps, strict=True):
            outputs = -(-side // s)
            total = max((outputs - 1) * s + (k - 1) * d + 1 - side, 0)
            pads.append((total // 2, total - total // 2))
        return pads

    @property
    def locations(self):
        spans = zip(self.sides, self.kernel, self.pads, *self.steps, strict=True)
        return tuple((n + sum(pad) - (k - 1) * d - 1) // s + 1 for n, k, pad, s, d in spans)

    def batch(self, n, seed, dtype=np.float64):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, *self.sides, self.groups * self.channels)) + 0.3
        ds = rng.normal(size=(n, *self.locations, self.groups * self.outputs))
        if self.first:
            x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
        return {"x": x.astype(dtype), "ds": ds.astype(dtype)}

    def by_group(self, values):
        """For each group, patches ``(n, t, d)`` and gradients ``(n, t, outputs)``, in float64."""
        x, ds = (values[name].astype(np.float64) for name in ("x", "ds"))
        if not self.first:
            x, ds = np.moveaxis(x, -1, 1), np.moveaxis(ds, -1, 1)
        begins, ends = zip(*self.pads, strict=True)
        for g in range(self.groups):
            read = x[:, g * self.channels : (g + 1) * self.channels]
            made = ds[:, g * self.outputs : (g + 1) * self.outputs]
            rows = truth_patches(read, self.kernel, *self.steps, begins, ends)
            yield rows, made.reshape(*made.shape[:2], -1).swapaxes(1, 2)

    def pack(self, parts):
        """The filter's rows for its outputs, the bias below."""
        weight = parts[0]
        if self.first:
            weight = np.moveaxis(weight, (0, 1), (-1, -2))
        return plain_packing((weight, *parts[1:]))

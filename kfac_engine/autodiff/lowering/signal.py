"""Writes the short-time Fourier transform as Fourier transforms of frames."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node


@lowering("STFT")
def stft(b: LoweringBuilder, node: Node) -> None:
    """Write the Fourier transforms of frames that are multiplied by the window."""
    signal, step, window, length = (*node.inputs, "", "")[:4]
    parts = b.facts[signal].shape[2:] or (1,)
    if len(b.facts[signal].shape) == 2:
        signal = b.op("Unsqueeze", signal, b.constant([2]))
    points = _whole(b, length) if length else b.op("Size", window)
    frames = b.op("Gather", signal, _frames(b, signal, _whole(b, step), points), axis=1)
    if window:
        frames = b.op("Mul", frames, b.op("Unsqueeze", window, b.constant([1])))
    onesided = integer(node, "onesided", 1)
    # Half of the spectrum suffices for real signals only. For complex signals, the second half is
    # removed after the transform.
    cut = onesided and parts != (1,)
    spectra = _transformed(b, frames, onesided and not cut, "" if cut else node.outputs[0])
    if cut:
        half = b.op("Div", points, b.constant(np.array(2)))
        bins = b.op("Unsqueeze", b.op("Add", half, _one(b)), b.constant([0]))
        first, axis = b.constant([0]), b.constant([2])
        b.op("Slice", spectra, first, bins, axis, result=node.outputs[0])


def _frames(b: LoweringBuilder, signal: str, step: str, points: str) -> str:
    """Write the indices of the points of each frame, ``(frames, points)``."""
    samples = b.op("Gather", b.op("Shape", signal), _one(b))
    steps = b.op("Div", b.op("Sub", samples, points), step)
    zero = b.constant(np.array(0))
    numbers = b.op("Range", zero, b.op("Add", steps, _one(b)), _one(b))
    starts = b.op("Unsqueeze", b.op("Mul", numbers, step), b.constant([1]))
    return b.op("Add", starts, b.op("Range", zero, points, _one(b)))


def _transformed(b: LoweringBuilder, frames: str, onesided: int, result: str) -> str:
    """Write the transform of ``(n, frames, points, parts)`` along the points."""
    if b.graph.opset < 20:
        return b.op("DFT", frames, axis=2, onesided=int(onesided), result=result)
    axis = b.constant(np.array(2))
    return b.op("DFT", frames, "", axis, onesided=int(onesided), result=result)


def _one(b: LoweringBuilder) -> str:
    return b.constant(np.array(1))


def _whole(b: LoweringBuilder, number: str) -> str:
    """Write a length as a 0-d int64."""
    return b.op("Reshape", b.cast(number, "int64"), b.constant([], "int64"))

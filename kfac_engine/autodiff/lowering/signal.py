"""The short-time Fourier transform: frames of the signal, each transformed by itself."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node


@lowering("STFT")
def stft(pen: Pen, node: Node) -> None:
    """Gathers frames, weighs them by the window, and transforms them."""
    signal, step, window, length = (*node.inputs, "", "")[:4]
    parts = pen.facts[signal].shape[2:] or (1,)
    if len(pen.facts[signal].shape) == 2:
        signal = pen.op("Unsqueeze", signal, pen.constant([2]))
    points = _whole(pen, length) if length else pen.op("Size", window)
    frames = pen.op("Gather", signal, _frames(pen, signal, _whole(pen, step), points), axis=1)
    if window:
        frames = pen.op("Mul", frames, pen.op("Unsqueeze", window, pen.constant([1])))
    onesided = integer(node, "onesided", 1)
    # Only reals have spectra of which half is enough; of others the second half is cut off.
    cut = onesided and parts != (1,)
    spectra = _transformed(pen, frames, onesided and not cut, "" if cut else node.outputs[0])
    if cut:
        half = pen.op("Div", points, pen.constant(np.array(2)))
        bins = pen.op("Unsqueeze", pen.op("Add", half, _one(pen)), pen.constant([0]))
        first, axis = pen.constant([0]), pen.constant([2])
        pen.op("Slice", spectra, first, bins, axis, to=node.outputs[0])


def _frames(pen: Pen, signal: str, step: str, points: str) -> str:
    """Where in the signal the points of each frame are, ``(frames, points)``."""
    samples = pen.op("Gather", pen.op("Shape", signal), _one(pen))
    steps = pen.op("Div", pen.op("Sub", samples, points), step)
    zero = pen.constant(np.array(0))
    numbers = pen.op("Range", zero, pen.op("Add", steps, _one(pen)), _one(pen))
    starts = pen.op("Unsqueeze", pen.op("Mul", numbers, step), pen.constant([1]))
    return pen.op("Add", starts, pen.op("Range", zero, points, _one(pen)))


def _transformed(pen: Pen, frames: str, onesided: int, to: str) -> str:
    """The transform of ``(n, frames, points, parts)`` along the points."""
    if pen.graph.opset < 20:
        return pen.op("DFT", frames, axis=2, onesided=int(onesided), to=to)
    axis = pen.constant(np.array(2))
    return pen.op("DFT", frames, "", axis, onesided=int(onesided), to=to)


def _one(pen: Pen) -> str:
    return pen.constant(np.array(1))


def _whole(pen: Pen, number: str) -> str:
    """A length as a 0-d int64."""
    return pen.op("Reshape", pen.cast(number, "int64"), pen.constant([], "int64"))

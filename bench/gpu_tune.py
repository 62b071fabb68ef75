"""Measures the variants of second moments by shape, checks each, and writes the fastest ones."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.bench import gpu_meter
from kfac_engine.bench.data import normal
from kfac_engine.bench.gpu_meter import FLOAT32, SPLIT, GpuRow, Layer, Meter, Work, difference
from kfac_engine.bench.jobs import square_window
from kfac_engine.kernels.tuned import Choice, choices, shape_key

# Largest accepted difference of a whole batch from the definition, relative to its largest entry.
TOLERANCE = 2e-6


def tune(meter: Meter, layers: Sequence[Layer], batch: int, path: Path) -> list[GpuRow]:
    """Measure all variants for the shapes of layers, and write the fastest of each shape.

    Other entries of the file are kept, and it is written after each shape. A variant that fails or
    is not accurate is not chosen.
    """
    rows: list[GpuRow] = []
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    fastest = table.setdefault(meter.backend.device.architecture, {})
    for key, layer in _shapes(layers, batch).items():
        measured = [*_measured(meter, key, layer, batch)]
        rows += [row for row, _ in measured]
        if measured:
            fastest[key] = min(measured, key=lambda pair: pair[0].seconds.median)[1]
        path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    return rows


def expected(x: Array, window: Window, *, homogeneous: bool = False) -> Array:
    """Return the second moment of the patches of images, in float64."""
    total: Array = np.zeros(())
    for image in x:  # the patches of a whole batch may not fit the memory
        z = NumpyBackend().patches(image[None], window)[0].astype(np.float64)
        if homogeneous:
            z = np.concatenate([z, np.ones((len(z), 1))], axis=1)
        total = total + z.T @ z
    return total


def _shapes(layers: Sequence[Layer], batch: int) -> dict[str, Layer]:
    """Return a layer of each shape of inputs or outputs; those of outputs have one tap."""
    outputs = [Layer(x.outputs, x.outputs, 1, 1, x.out_side) for x in layers]
    return {shape_key(x.kernel**2, x.inputs, batch * x.out_side**2): x for x in (*layers, *outputs)}


def _measured(meter: Meter, key: str, layer: Layer, batch: int) -> Iterator[tuple[GpuRow, Choice]]:
    """Yield the measurement of each variant."""
    device, scratch = meter.backend.device, meter.backend.scratch_bytes
    products = 3 if device.tensor_cores else 0
    window = square_window(layer.kernel, layer.stride, layer.pad)
    host = normal(batch, layer.inputs, layer.side, layer.side)
    x, wanted = meter.backend.asarray(host), expected(host, window)
    out = meter.backend.asarray(np.zeros(wanted.shape, np.float32))
    how = Accumulation(homogeneous=False, alpha=1.0, beta=0.0)
    plain = layer._replace(homogeneous=False)
    for choice in choices(PatchMoments(device, scratch, products).ways(x, window)):
        moments = PatchMoments(device, scratch, products, {key: choice})
        run: Callable[[], None] = partial(moments.add, x, window, out, how)

        def error(run: Callable[[], None] = run) -> float:
            run()
            return float(difference(meter.backend.to_numpy(out), wanted))

        kind = SPLIT if products else FLOAT32
        work = Work(gpu_meter.input_factors([plain], batch), run, kind, error, TOLERANCE)
        name = f"{choice.way}, {choice.blocks} blocks"
        for row in meter.attempt(f"{key}: {name}", work):
            yield row, choice

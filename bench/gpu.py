"""The GPU: its ceilings, each kernel, and the curvature of a whole ResNet-50, beside their floors.

A floor is the least time that the work can take: its products at the measured rate of float32
products, or its bytes at the measured rate of copies, whichever takes longer. Products that cannot
be avoided are counted: one triangle, and for 3 × 3 filters of stride one thirteen distances of taps
instead of forty-five pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from kfac_engine._types import Array
from kfac_engine.backend.cupy_backend import CupyBackend
from kfac_engine.backend.select import select
from kfac_engine.backend.window import Window
from kfac_engine.bench.report import new_table
from kfac_engine.bench.resnet50 import Layer, resnet50
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.errors import BackendError

_ROUNDS = 10
_BATCH = 32
_DAMPING = 1e-3
_HEADS = ("ms", "quartiles", "floor ms", "of floor", "error", "pool MB")
# Largest difference from the definition relative to its largest entry, by TF32 numbers of a factor.
_TOLERANCES = {"cupy": 1e-5, "cupy-fp32": 1e-5, "cupy-tf32": 1e-2}
# Matrices that a ceiling is measured on.
_CEILING_SIDE = 8192


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What the device reaches at best.

    Attributes:
        products: Multiplications a second in float32, by cuBLAS.
        copied_bytes: Bytes read and written a second.
    """

    products: float
    copied_bytes: float

    def floor(self, products: float, moved: float) -> float:
        """Least seconds for so many multiplications and bytes."""
        return max(products / self.products, moved / self.copied_bytes)


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One measurement.

    Attributes:
        case: What was done.
        backend: With which products.
        seconds: Wall times, the device waited for.
        floor: Least seconds.
        error: Difference from the definition relative to its largest entry; NaN where not compared.
        pool_bytes: Memory that the device's pool held after it.
    """

    case: str
    backend: str
    seconds: Spread
    floor: float
    error: float
    pool_bytes: int


def run_gpu(console: Console, name: str) -> list[GpuRow]:
    """Measure the GPU and print a table.

    Args:
        console: Where to print.
        name: Of the suite.

    Returns:
        The rows of the table.

    Raises:
        BackendError: There is no usable GPU, or a result is not that of its definition.
    """
    backend = _on_gpu("cupy")
    rates = measure_rates(backend, _CEILING_SIDE)
    console.print(
        f"{backend.device.name}: {2e-12 * rates.products:.1f} TFLOP/s (sgemm), "
        f"{1e-12 * rates.copied_bytes:.2f} TB/s (copy)"
    )
    rows = measure_gpu(resnet50(), _BATCH, rates)
    table = new_table(name, ("case", "backend"), _HEADS)
    for row in rows:
        table.add_row(row.case, row.backend, *_cells(row))
    console.print(table)
    return rows


def measure_rates(backend: CupyBackend, side: int) -> GpuRates:
    """The ceilings of a device.

    Args:
        backend: On it.
        side: Of the matrices that are multiplied and copied.

    Returns:
        Its best rates.
    """
    xp = backend.xp
    a, b = xp.ones((side, side), np.float32), xp.empty((side, side), np.float32)
    multiplied = _timed(backend, lambda: a @ a).low
    copied = _timed(backend, lambda: xp.copyto(b, a)).low
    return GpuRates(float(side) ** 3 / multiplied, 2.0 * a.nbytes / copied)


def measure_gpu(layers: Sequence[Layer], batch: int, rates: GpuRates) -> list[GpuRow]:
    """Kernels on the layers with patches, then all factors, inverses and products.

    Args:
        layers: Of a network.
        batch: Images.
        rates: Of the device.

    Returns:
        A row for each measurement.
    """
    rows: list[GpuRow] = []
    filters = dict.fromkeys(layer for layer in layers if layer.kernel > 1)
    for name in _TOLERANCES:
        backend = _on_gpu(name)
        rows += [_patches(backend, name, layer, batch, rates) for layer in filters]
        rows.append(_factors(backend, name, layers, batch, rates))
    backend = _on_gpu("cupy")
    rows += _groups(backend, batch, rates)
    rows += _inverses(backend, layers, rates)
    return rows


def _patches(backend: CupyBackend, name: str, layer: Layer, batch: int, rates: GpuRates) -> GpuRow:
    x, out = _images(backend, layer, batch), _square(backend, layer.d_in)
    # Of one image, the definition takes no time: patches written out, in float64.
    z = backend.to_numpy(backend.patches(x[:1], window(layer)))[0].astype(np.float64)
    backend.patch_second_moment(x[:1], window(layer), out)
    error = _error(backend, out, z.T @ z, _TOLERANCES[name], str(layer))
    seconds = _timed(backend, lambda: backend.patch_second_moment(x, window(layer), out, beta=0.5))
    case = f"A: {batch}×{layer.inputs}×{layer.side}², {layer.kernel}×{layer.kernel}/{layer.stride}"
    floor = rates.floor(_input_products(layer, batch), x.nbytes + 2 * out.nbytes)
    return GpuRow(case, name, seconds, floor, error, _pool(backend))


def _factors(
    backend: CupyBackend, name: str, layers: Sequence[Layer], batch: int, rates: GpuRates
) -> GpuRow:
    """All factors of both sides; layers of equal sizes share their data, not their factors."""
    data = {layer: (_images(backend, layer, batch), _outputs(backend, layer, batch))
            for layer in dict.fromkeys(layers)}  # fmt: skip
    sides = [(_square(backend, x.d_in), _square(backend, x.outputs)) for x in layers]

    def update() -> None:
        for layer, (A, G) in zip(layers, sides, strict=True):
            x, ds = data[layer]
            homogeneous = layer.homogeneous
            backend.patch_second_moment(x, window(layer), A, homogeneous=homogeneous, beta=0.5)
            backend.second_moment(ds, G, feature_axis=1, beta=0.5)

    products = moved = 0.0
    for layer, (A, G) in zip(layers, sides, strict=True):
        x, ds = data[layer]
        rows = batch * layer.out_side**2
        products += _input_products(layer, batch) + 0.5 * rows * layer.outputs**2
        moved += x.nbytes + ds.nbytes + 2 * (A.nbytes + G.nbytes)
    seconds, floor = _timed(backend, update), rates.floor(products, moved)
    return GpuRow("all factors", name, seconds, floor, float("nan"), _pool(backend))


def _groups(backend: CupyBackend, batch: int, rates: GpuRates) -> Iterator[GpuRow]:
    """Kernels for depthwise filters, squared gradients and drawn classes."""
    layer = Layer(64, 64, 3, 1, 28)
    x, ds = _images(backend, layer, batch), _outputs(backend, layer, batch)
    rows = batch * layer.out_side**2
    stack = backend.xp.zeros((64, 9, 9), np.float32)
    squares = backend.xp.zeros((1, layer.d_in, 64), np.float32)
    logits = _normal(backend, (64 * batch, 1000))
    uniforms = backend.asarray(np.random.default_rng(0).random(64 * batch))
    cases: dict[str, tuple[Callable[[], Any], float, int]] = {
        "A of 64 groups, 3×3": (
            lambda: backend.grouped_second_moment(x, window(layer), stack, beta=0.5),
            rows * 64 * 45.0,
            x.nbytes,
        ),
        "squared gradients, 576 × 64": (
            lambda: backend.squared_gradients(x, window(layer), ds, squares, beta=0.5),
            rows * 576.0 * 64,
            x.nbytes + ds.nbytes,
        ),
        "classes drawn of 1000": (
            lambda: backend.draw_classes(logits, uniforms, 1),
            0.0,
            logits.nbytes,
        ),
    }
    for case, (work, products, moved) in cases.items():
        floor = rates.floor(products, moved)
        yield GpuRow(case, "cupy", _timed(backend, work), floor, float("nan"), _pool(backend))


def _inverses(backend: CupyBackend, layers: Sequence[Layer], rates: GpuRates) -> Iterator[GpuRow]:
    """Inverses of all factors, and gradients of all layers between them."""
    sides = [side for layer in layers for side in (layer.d_in, layer.outputs)]
    factors = [_spd(backend, side) for side in sides]
    dampings = [_DAMPING] * len(sides)
    inverses = backend.damped_inverses(factors, dampings)
    off = inverses[0] @ (factors[0] + _DAMPING * backend.xp.eye(sides[0], dtype=np.float32))
    error = _error(backend, off, np.eye(sides[0]), 1e-2, "an inverse")
    floor = rates.floor(sum(float(d) ** 3 for d in sides) / 2, sum(8.0 * d * d for d in sides))
    seconds = _timed(backend, lambda: backend.damped_inverses(factors, dampings))
    yield GpuRow(f"{len(sides)} inverses", "cupy", seconds, floor, error, _pool(backend))
    gradients = [_normal(backend, (layer.d_in, layer.outputs)) for layer in layers]
    pairs = list(zip(inverses[::2], gradients, inverses[1::2], strict=True))
    products = sum(V.size * float(sum(V.shape)) for V in gradients)
    moved = sum(A.nbytes + 2 * V.nbytes + G.nbytes for A, V, G in pairs)
    seconds = _timed(backend, lambda: [A @ V @ G for A, V, G in pairs])
    floor = rates.floor(products, moved)
    yield GpuRow("preconditioning", "cupy", seconds, floor, float("nan"), _pool(backend))


def window(layer: Layer) -> Window:
    """The window of a layer."""
    pads = (layer.pad,) * 2
    return Window((layer.kernel,) * 2, (layer.stride,) * 2, (1, 1), pads, pads)


def _input_products(layer: Layer, batch: int) -> float:
    """Multiplications for a factor's lower triangle, by distances of taps where those are fewer."""
    rows, k = batch * layer.out_side**2, layer.kernel
    if layer.stride == 1 and k > 1:
        return float(rows * layer.inputs**2 * ((2 * k - 1) ** 2 + 1) / 2)
    return float(rows * layer.d_in**2 / 2)


def _timed(backend: CupyBackend, work: Callable[[], object]) -> Spread:
    """Wall times of repeated work; the first, which compiles and plans, is left out."""
    device = backend.xp.cuda.Device()
    times = []
    for _ in range(_ROUNDS + 1):
        start = perf_counter()
        work()
        device.synchronize()
        times.append(perf_counter() - start)
    return spread(times[1:])


def _error(backend: CupyBackend, found: Array, wanted: Array, tolerance: float, what: str) -> float:
    error = float(np.abs(backend.to_numpy(found) - wanted).max() / np.abs(wanted).max())
    if not error <= tolerance:
        raise BackendError(f"{what}: the GPU's result is off by {error:.1e}, not {tolerance:.0e}.")
    return error


def _on_gpu(name: str) -> CupyBackend:
    backend = select(name)
    assert isinstance(backend, CupyBackend)  # or select has raised
    return backend


def _images(backend: CupyBackend, layer: Layer, batch: int) -> Array:
    return _normal(backend, (batch, layer.inputs, layer.side, layer.side))


def _outputs(backend: CupyBackend, layer: Layer, batch: int) -> Array:
    return _normal(backend, (batch, layer.outputs, layer.out_side, layer.out_side))


def _normal(backend: CupyBackend, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(0)
    return backend.asarray(rng.standard_normal(shape, np.float32))


def _square(backend: CupyBackend, side: int) -> Array:
    zeros: Array = backend.xp.zeros((side, side), np.float32)
    return zeros


def _spd(backend: CupyBackend, side: int) -> Array:
    rows, out = _normal(backend, (2 * side, side)), _square(backend, side)
    backend.second_moment(rows, out, alpha=1 / (2 * side))
    return out


def _pool(backend: CupyBackend) -> int:
    return int(backend.xp.get_default_memory_pool().total_bytes())


def _cells(row: GpuRow) -> tuple[str, ...]:
    times = row.seconds
    return (
        f"{1e3 * times.median:.3f}",
        f"{1e3 * times.low:.3f} – {1e3 * times.high:.3f}",
        f"{1e3 * row.floor:.3f}",
        f"{row.floor / times.median:.0%}",
        "" if np.isnan(row.error) else f"{row.error:.0e}",
        f"{row.pool_bytes / 1e6:.0f}",
    )

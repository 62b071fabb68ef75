"""The suite ``gpu``: rates of the device, each kernel, and the curvature of a ResNet-50.

``gpu_meter`` takes the measurements. In a checkout, ``peers.torch_gpu`` does the same work where
torch is installed and sees the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.backend.select import select
from kfac_engine.backend.threads import Task
from kfac_engine.backend.window import Window
from kfac_engine.bench import gpu_meter
from kfac_engine.bench.data import factor, normal
from kfac_engine.bench.gpu_meter import (
    FLOAT64,
    Counted,
    GpuRow,
    Layer,
    Meter,
    Sizes,
    Work,
    difference,
    kernels,
    kind_of,
    resnet50,
)
from kfac_engine.bench.gpu_tune import TOLERANCE, expected, tune
from kfac_engine.bench.jobs import DAMPING, square_window
from kfac_engine.bench.report import Form
from kfac_engine.kernels.moments import mirror
from kfac_engine.kernels.symmetric import Floor, narrow, widen
from kfac_engine.training.rules import POLYNOMIAL, orthogonalize

if TYPE_CHECKING:
    from kfac_engine.bench.peers.torch_gpu import TorchOnDevice


_DECAY = 0.5
_AVERAGE = Accumulation(beta=_DECAY)
_WINDOW = square_window(3, 1, 1)
# Tolerance of squares and of sums of some thousand float32 numbers.
_TOLERANCE = 1e-4


class _Case(NamedTuple):
    """A function of a backend and arrays; it changes its last array and returns it.

    Second moments are compared in their lower triangles, the only part that NumPy writes.
    """

    kernel: str
    run: Callable[..., Array]
    arrays: tuple[Array, ...]
    symmetric: bool = False


def kernel_works(backend: CupyBackend, sizes: Sizes) -> Iterator[Work]:
    """Yield the work of every kernel; whole factors are part of the network's work."""
    counted = kernels(sizes)
    for case in (*_of_images(sizes), *_of_rows(sizes)):
        yield _compared(backend, case, counted[case.kernel])
    moment, *_ = _of_images(sizes)
    yield _compared(CupyBackend(backend.device, products=0), moment, counted["units"])
    matrices = _of_matrices(backend, sizes.matrix)
    others = *_of_layers(backend, sizes.channels), *_of_losses(backend, sizes)
    for kernel, run, wanted in (*matrices, *others):
        yield Work(counted[kernel], run, check=_off(backend, run, wanted))


def _off(backend: CupyBackend, run: Callable[[], Array], wanted: Array) -> Callable[[], float]:
    return lambda: difference(backend.to_numpy(run()), wanted)


def _compared(backend: CupyBackend, case: _Case, counted: Counted) -> Work:
    """Return the work of a primitive, checked against NumPy in float64."""
    arrays = [backend.asarray(array) for array in case.arrays]

    def check() -> float:
        arrays = [backend.asarray(array.copy()) for array in case.arrays]
        result = backend.to_numpy(case.run(backend, *arrays))
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in case.arrays]
        wanted = case.run(NumpyBackend(), *wide)
        pair = map(np.tril, (result, wanted)) if case.symmetric else (result, wanted)
        return float(difference(*pair))

    run = lambda: case.run(backend, *arrays)  # noqa: E731 (the work)
    return Work(counted, run, check=check, tolerance=_TOLERANCE)


def _of_images(sizes: Sizes) -> Iterator[_Case]:
    n, channels, side, *_ = sizes
    x, ds = normal(n, channels, side, side), normal(n, channels, side, side, seed=1)
    d = 9 * channels

    def moment(b: Backend, x: Array, out: Array) -> Array:
        b.patch_second_moment(x, _WINDOW, out, Accumulation(homogeneous=True, beta=_DECAY))
        return out

    def groups(b: Backend, x: Array, out: Array) -> Array:
        b.patch_second_moment(x, _WINDOW, out, _AVERAGE)
        return out

    def squares(b: Backend, x: Array, ds: Array, out: Array) -> Array:
        b.squared_gradients(x, _WINDOW, ds, out, _AVERAGE)
        return out

    def diagonal(b: Backend, x: Array, out: Array) -> Array:
        b.patch_squares(x, _WINDOW, out, beta=_DECAY)
        return out

    yield _Case("moment", moment, (x, _zeros(d + 1, d + 1)), symmetric=True)
    pixels = lambda b, x, out: b.second_moment(x, out, _AVERAGE, feature_axis=1) or out  # noqa: E731 (a case)
    yield _Case("pixels", pixels, (x, _zeros(channels, channels)), symmetric=True)
    yield _Case("groups", groups, (x, _zeros(channels, 9, 9)), symmetric=True)
    yield _Case("squares", squares, (x, ds, _zeros(1, d, channels)))
    yield _Case("channels", squares, (x, ds, _zeros(channels, 9, 1)))
    yield _Case("diagonal", diagonal, (x, _zeros(d)))
    yield _Case("patches", lambda b, x: b.patches(x, _WINDOW), (x,))
    yield _Case("sums", lambda b, x, ds: b.example_sums(x, ds, (2, 3)), (x, ds))


def _of_rows(sizes: Sizes) -> Iterator[_Case]:
    rng, side, words = np.random.default_rng(0), sizes.matrix, sizes.words
    logits, uniforms = normal(sizes.draws, sizes.classes), rng.random(sizes.draws)
    ids = rng.integers(0, words, sizes.ids)

    def average(b: Backend, measured: Array, out: Array) -> Array:
        b.add_scaled(out, measured, 0.1, 0.9)
        return out

    yield _Case("classes", lambda b, z, u: b.draw_classes(z, u, 1), (logits, uniforms))
    yield _Case("ids", lambda b, ids: b.count_ids(ids, words), (ids,))
    norms = lambda b, x: b.asarray(np.array(b.squared_norms([x])))  # noqa: E731 (a case)
    yield _Case("norms", norms, (normal(side, side),))
    yield _Case("finite", lambda b, x: b.are_finite([x]), (normal(side, side),))
    yield _Case("average", average, (normal(side, side), _zeros(side, side)))


def _of_matrices(
    backend: CupyBackend, side: int
) -> Iterator[tuple[str, Callable[[], Array], Array]]:
    """Yield the conversions of a factor for a factorisation: kernel, run and expected result."""
    host = factor(side)
    whole = np.tril(host) + np.tril(host, -1).T
    damped = whole.astype(np.float64) + np.eye(side)
    stack, dampings = backend.asarray(host[None]), backend.asarray(np.ones(1))
    wide = backend.asarray(damped[None])

    def mirrored() -> Array:
        mirror(backend.device, stack[0])
        first: Array = stack[0]
        return first

    def widened() -> Array:
        wide: Array = widen(backend.device, stack, dampings, Floor(0.0, 0.0))[0][0]
        return wide

    def narrowed() -> Array:
        single: Array = narrow(backend.device, wide, np.float32)[0]
        return single

    def inverted() -> Array:
        return backend.linalg.begin_damped_inverses([stack[0]], [1.0])()[0]

    yield "inverse", inverted, np.linalg.inv(damped)
    yield "mirror", mirrored, whole
    yield "widen", widened, damped
    yield "narrow", narrowed, damped


def _of_layers(
    backend: CupyBackend, channels: int
) -> Iterator[tuple[str, Callable[[], Array], Array]]:
    """Yield work on the filters of a network: kernel, run and expected result."""
    d, count = 9 * channels, gpu_meter.FILTERS
    x, y = normal(count, d, channels), normal(count, d, channels, seed=1)
    A, G = factor(d), factor(channels)
    V, W, left, right = map(backend.asarray, (x, y, A, G))
    out: Array = backend.xp.empty_like(V)
    many = backend.many

    def combined() -> Array:
        many.combine([(out[i], 0.9, V[i], 0.1, W[i]) for i in range(count)])
        return out

    def between() -> Array:
        with many.gathered():
            for i in range(count):
                many.multiply_between(left, V[i], right, out[i], 1.0)
        return out

    def orthogonal() -> Array:
        steps = [gpu_meter.ITERATIONS] * count
        stack: Array = backend.xp.stack(many.orthogonalize([*V], POLYNOMIAL, steps, [*V]))
        return stack

    wide = x.astype(np.float64)
    yield "combined", combined, 0.9 * wide + 0.1 * y
    yield "between", between, A @ wide @ G
    yield "orthogonal", orthogonal, orthogonalize(wide, iterations=gpu_meter.ITERATIONS, bound=True)


def _of_losses(
    backend: CupyBackend, sizes: Sizes
) -> Iterator[tuple[str, Callable[[], Array], Array]]:
    """Yield the gradient of the cross-entropy: kernel, run and expected result."""
    z = normal(sizes.draws, sizes.classes)
    ids = np.random.default_rng(0).integers(0, sizes.classes, sizes.draws)
    logits, labels = map(backend.asarray, (z, ids))

    def gradient() -> Array:
        pair = backend.cross_entropy(logits, labels, 1)
        assert pair is not None, "logits in float32 have a kernel"
        return pair[1]

    p = np.exp(z.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(z)), ids] -= 1
    yield "entropy", gradient, p


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


# Another implementation of the work on the device, in float32.
Peer: TypeAlias = "TorchOnDevice | None"

# Largest accepted difference from the definition relative to its largest entry, by backend.
_TOLERANCES = {"cupy": TOLERANCE, "cupy-fp32": TOLERANCE, "cupy-tf32": 1e-2}
# Inverses are rounded to float32, and the damping magnifies errors a thousand times.
_INVERSE_TOLERANCE = 1e-4
# Numbers of rows of matrices whose eigenvectors and roots are computed.
_SPECTRA = (256, 256, 256, 256, 1024)


def window(layer: Layer) -> Window:
    """Return the window of a layer."""
    window: Window = square_window(layer.kernel, layer.stride, layer.pad)
    return window


def factor_works(
    backend: CupyBackend, name: str, layers: Sequence[Layer], batch: int, peer: Peer
) -> Iterator[Work]:
    """Yield input factors of each kind of filter, then all input factors and all output factors.

    Equal layers share their data, not their factors. The name of the backend selects the kind of
    products.
    """
    inputs = {layer: normal(batch, layer.inputs, layer.side, layer.side) for layer in set(layers)}
    outputs = {
        layer: normal(batch, layer.outputs, layer.out_side, layer.out_side) for layer in set(layers)
    }
    kind, tolerance = kind_of(backend, name), _TOLERANCES[name]

    def of_inputs(group: Sequence[Layer]) -> Work:
        runs = [Task(0.0, _input_factor(backend, layer, inputs[layer])) for layer in group]
        others = [peer.input_factor(inputs[layer], layer) for layer in group] if peer else []
        return Work(
            gpu_meter.input_factors(group, batch),
            lambda: backend.run_parallel(runs),
            kind,
            lambda: max(_input_error(backend, x, inputs[x]) for x in dict.fromkeys(group)),
            tolerance,
            _named("torch", others),
        )

    for layer in dict.fromkeys(layer for layer in layers if layer.kernel > 1):
        yield of_inputs([layer])
    yield of_inputs(layers)
    runs = [Task(0.0, _output_factor(backend, outputs[layer])) for layer in layers]
    others = [peer.output_factor(outputs[layer]) for layer in layers] if peer else []
    yield Work(
        gpu_meter.output_factors(layers, batch),
        lambda: backend.run_parallel(runs),
        kind,
        lambda: max(_output_error(backend, outputs[x]) for x in dict.fromkeys(layers)),
        tolerance,
        _named("torch", others),
    )


def refresh_works(backend: CupyBackend, layers: Sequence[Layer], peer: Peer) -> Iterator[Work]:
    """Yield the inverses of all factors, all preconditioned gradients, eigenvectors and roots."""
    sides = [side for layer in layers for side in (layer.d_in, layer.outputs)]
    hosts = {side: factor(side) for side in set(sides)}
    matrices = [backend.asarray(hosts[side]) for side in sides]
    dampings = [DAMPING] * len(sides)
    yield Work(
        gpu_meter.inverses(layers),
        lambda: backend.linalg.begin_damped_inverses(matrices, dampings)(),
        FLOAT64,
        lambda: max(_inverse_error(backend, host) for host in hosts.values()),
        _INVERSE_TOLERANCE,
        peer.inverses([hosts[side] for side in sides], DAMPING) if peer else {},
    )
    yield _preconditioning(backend, layers, peer)
    yield from _spectra(backend, [min(side, max(sides)) for side in _SPECTRA], peer)


def _input_factor(backend: CupyBackend, layer: Layer, x: Array) -> Callable[[], None]:
    data, out = backend.asarray(x), backend.asarray(_zeros(layer.d_in, layer.d_in))
    how = Accumulation(homogeneous=bool(layer.homogeneous), beta=_DECAY)
    return lambda: backend.patch_second_moment(data, window(layer), out, how)


def _output_factor(backend: CupyBackend, ds: Array) -> Callable[[], None]:
    data, out = backend.asarray(ds), backend.asarray(_zeros(ds.shape[1], ds.shape[1]))
    return lambda: backend.second_moment(data, out, _AVERAGE, feature_axis=1)


def _input_error(backend: CupyBackend, layer: Layer, x: Array) -> float:
    """Return the error of a batch, compared with a float64 product of the patches."""
    out = backend.asarray(_zeros(layer.d_in, layer.d_in))
    homogeneous = bool(layer.homogeneous)
    how = Accumulation(homogeneous=homogeneous)
    backend.patch_second_moment(backend.asarray(x), window(layer), out, how)
    wanted = expected(x, window(layer), homogeneous=homogeneous)
    return float(difference(backend.to_numpy(out), wanted))


def _output_error(backend: CupyBackend, ds: Array) -> float:
    out = backend.asarray(_zeros(ds.shape[1], ds.shape[1]))
    backend.second_moment(backend.asarray(ds), out, feature_axis=1)
    rows = np.moveaxis(ds, 1, 0).reshape(ds.shape[1], -1).astype(np.float64)
    return float(difference(backend.to_numpy(out), rows @ rows.T))


def _inverse_error(backend: CupyBackend, host: Array) -> float:
    inverse = backend.linalg.begin_damped_inverses([backend.asarray(host)], [DAMPING])()[0]
    wanted = np.linalg.inv(host.astype(np.float64) + DAMPING * np.eye(len(host)))
    return float(difference(backend.to_numpy(inverse), wanted))


def _preconditioning(backend: CupyBackend, layers: Sequence[Layer], peer: Peer) -> Work:
    """Return the work of multiplying all gradients by matrices of the shapes of their factors."""
    distinct = {
        layer: (factor(layer.d_in), normal(layer.d_in, layer.outputs), factor(layer.outputs))
        for layer in set(layers)
    }
    triples = [tuple(map(backend.asarray, distinct[layer])) for layer in layers]

    def error() -> float:
        products = {layer: A @ V @ G for layer, (A, V, G) in zip(layers, triples, strict=True)}
        wide = {layer: [a.astype(np.float64) for a in three] for layer, three in distinct.items()}
        return max(
            float(difference(backend.to_numpy(products[layer]), A @ V @ G))
            for layer, (A, V, G) in wide.items()
        )

    others = {"torch": peer.precondition([distinct[x] for x in layers])} if peer else {}
    return Work(
        gpu_meter.gradients(layers),
        lambda: [A @ V @ G for A, V, G in triples],
        check=error,
        usual=others,
    )


def _spectra(backend: CupyBackend, sides: Sequence[int], peer: Peer) -> Iterator[Work]:
    """Yield eigenvectors, and inverse fourth roots by products if the device supports them."""
    hosts = [factor(side) for side in sides]
    matrices = [backend.asarray(host) for host in hosts]
    sizes = f"{len(sides)} matrices, sides to {max(sides)}"
    others = {"torch": peer.eigenvectors(hosts)} if peer else {}

    def rebuilt() -> float:
        return max(
            float(difference((Q * w) @ Q.T, host))
            for (w, Q), host in zip(
                (map(backend.to_numpy, pair) for pair in backend.linalg.eighs(matrices)),
                hosts,
                strict=True,
            )
        )

    # The number of multiplications for eigenvectors is undefined: only bytes count.
    moved = float(sum(3 * 4 * side * side for side in sides))
    counted = gpu_meter.Counted(f"eigenvectors of {sizes}", 0.0, moved)
    yield Work(counted, lambda: backend.linalg.eighs(matrices), check=rebuilt, usual=others)
    dampings, degrees = [DAMPING] * len(sides), [4] * len(sides)

    def roots() -> Sequence[Array | None]:
        return backend.linalg.inverse_roots(matrices, dampings, degrees)

    def error() -> float:
        results = [backend.to_numpy(root) for root in roots() if root is not None]
        pairs = zip(results, hosts, strict=True)
        return max(float(difference(a, _fourth_root(b))) for a, b in pairs)

    if all(root is not None for root in roots()):
        counted = gpu_meter.Counted(f"inverse fourth roots of {sizes}, by products", 0.0, moved)
        yield Work(counted, roots, check=error, tolerance=_INVERSE_TOLERANCE)


def _fourth_root(host: Array) -> Array:
    """Return ``(host + damping·I)^(−1/4)`` in float64."""
    values, Q = np.linalg.eigh(host.astype(np.float64))
    root: Array = (Q * (values + DAMPING) ** -0.25) @ Q.T
    return root


def _named(name: str, runs: Sequence[Callable[[], object]]) -> Mapping[str, Callable[[], object]]:
    return {name: lambda: [run() for run in runs]} if runs else {}


_BATCH = 32
# Backends by kind of products; the first also does the work that does not depend on it.
_BACKENDS = ("cupy", "cupy-fp32", "cupy-tf32")


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = row["seconds"]
    return [
        row["case"], row["contender"], f"{1e3 * times['median']:.3f}",
        f"{1e3 * times['low']:.3f} – {1e3 * times['high']:.3f}",
        f"{1e3 * row['host']:.3f}" if "host" in row else "",  # older files have none
        f"{1e3 * row['floor']:.3f}",
        f"{row['fraction']:.0%}", f"{row['ratio']:.2f}",
        "" if row["error"] is None else f"{row['error']:.0e}",
        f"{row['pool_bytes'] / 1e6:.0f}", row["device"],
    ]  # fmt: skip


FORM = Form(
    ("case", "contender"),
    (
        "ms",
        "quartiles",
        "host ms",
        "floor ms",
        "of floor",
        "ours ÷ this",
        "error",
        "pool MB",
        "device",
    ),
    _cells,
)


def run_gpu(
    console: Console, name: str, failures: list[str], tuned: Path | None = None
) -> list[GpuRow]:
    """Measure the GPU and print a table; or write the fastest variants of kernels to a file.

    Each time is printed when it is measured. Work that fails is printed and added to ``failures``,
    and the rest is measured.
    """
    meter = Meter(_on_gpu(_BACKENDS[0]), tell=console.print)
    meter.failures = failures
    if tuned is not None:
        variants: list[GpuRow] = tune(meter, resnet50(), _BATCH, tuned)
        FORM.show(console, f"Suite {name}", variants)
        return variants
    peer = _peer()
    console.print(f"{meter.device}; torch {'takes' if peer else 'does not take'} part")
    for kind, rate in meter.rates.products.items():
        console.print(f"ceiling: {2e-12 * rate:.1f} TFLOP/s in {kind}")
    console.print(f"ceiling: {1e-12 * meter.rates.copied_bytes:.2f} TB/s (copy)")
    rows = [*meter.ceiling_rows(), *measure_gpu(meter, resnet50(), _BATCH, Sizes(), peer)]
    FORM.show(console, f"Suite {name}", rows)
    return rows


def measure_gpu(
    meter: Meter, layers: Sequence[Layer], batch: int, sizes: Sizes, peer: Peer
) -> Iterator[GpuRow]:
    """Measure all factors with each kind of products, then inverses, gradients and kernels."""
    for number, name in enumerate(_BACKENDS):
        others = None if number else peer
        for work in factor_works(_on_gpu(name), name, layers, batch, others):
            yield from meter.attempt(name, work)
    first = _BACKENDS[0]
    for work in refresh_works(meter.backend, layers, peer):
        yield from meter.attempt(first, work)
    for work in kernel_works(meter.backend, sizes):
        yield from meter.attempt(first, work)


def _peer() -> Peer:
    """Return torch on the device, if this is a checkout and torch sees the device."""
    package = "kfac_engine.bench.peers"
    if find_spec(package) is None:
        return None
    peer: Peer = import_module(f"{package}.torch_gpu").torch_on_device()
    return peer


def _on_gpu(name: str) -> CupyBackend:
    backend = select(name)
    assert isinstance(backend, CupyBackend)  # or select has raised
    return backend

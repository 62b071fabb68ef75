"""The network of the GPU suite: all factors, inverses and products of a ResNet-50."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.window import Window
from kfac_engine.bench import gpu_counts
from kfac_engine.bench.data import factor, normal
from kfac_engine.bench.gpu_counts import Layer
from kfac_engine.bench.gpu_meter import FLOAT64, Work, difference, kind_of
from kfac_engine.bench.jobs import DAMPING, square_window

if TYPE_CHECKING:
    from kfac_engine.bench.peers.torch_gpu import TorchOnDevice

# Another implementation of the work on the device, in float32.
Peer: TypeAlias = "TorchOnDevice | None"

_DECAY = 0.5
# Largest accepted difference from the definition relative to its largest entry, by backend.
_TOLERANCES = {"cupy": 1e-5, "cupy-fp32": 1e-5, "cupy-tf32": 1e-2}
# Inverses are rounded to float32, and the damping magnifies errors a thousand times.
_INVERSE_TOLERANCE = 1e-4
# Numbers of rows of matrices whose eigenvectors and roots are computed.
_SPECTRA = (256, 256, 256, 256, 1024)


def window(layer: Layer) -> Window:
    """Return the window of a layer."""
    window: Window = square_window(layer.kernel, layer.stride, layer.pad)
    return window


def factor_works(
    backend: CupyBackend,
    name: str,
    layers: Sequence[Layer],
    batch: int,
    peer: Peer,
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
        runs = [_input_factor(backend, layer, inputs[layer]) for layer in group]
        others = [peer.input_factor(inputs[layer], layer) for layer in group] if peer else []
        return Work(
            gpu_counts.input_factors(group, batch),
            lambda: [run() for run in runs],
            kind,
            lambda: max(_input_error(backend, x, inputs[x][:1]) for x in dict.fromkeys(group)),
            tolerance,
            _named("torch", others),
        )

    for layer in dict.fromkeys(layer for layer in layers if layer.kernel > 1):
        yield of_inputs([layer])
    yield of_inputs(layers)
    runs = [_output_factor(backend, outputs[layer]) for layer in layers]
    others = [peer.output_factor(outputs[layer]) for layer in layers] if peer else []
    yield Work(
        gpu_counts.output_factors(layers, batch),
        lambda: [run() for run in runs],
        kind,
        lambda: max(_output_error(backend, outputs[x][:1]) for x in dict.fromkeys(layers)),
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
        gpu_counts.inverses(layers),
        lambda: backend.linalg.begin_damped_inverses(matrices, dampings)(),
        FLOAT64,
        lambda: max(_inverse_error(backend, host) for host in hosts.values()),
        _INVERSE_TOLERANCE,
        peer.inverses([hosts[side] for side in sides], DAMPING) if peer else {},
    )
    yield _preconditioning(backend, layers, peer)
    yield from _spectra(backend, [min(side, max(sides)) for side in _SPECTRA], peer)


def _input_factor(backend: CupyBackend, layer: Layer, x: Array) -> Callable[[], None]:
    data, out = backend.asarray(x), backend.asarray(_zeros(layer.d_in))
    homogeneous = bool(layer.homogeneous)
    return lambda: backend.patch_second_moment(
        data, window(layer), out, homogeneous=homogeneous, beta=_DECAY
    )


def _output_factor(backend: CupyBackend, ds: Array) -> Callable[[], None]:
    data, out = backend.asarray(ds), backend.asarray(_zeros(ds.shape[1]))
    return lambda: backend.second_moment(data, out, feature_axis=1, beta=_DECAY)


def _input_error(backend: CupyBackend, layer: Layer, x: Array) -> float:
    """Return the error of one image, compared with a float64 product of patches."""
    out = backend.asarray(_zeros(layer.d_in))
    backend.patch_second_moment(
        backend.asarray(x), window(layer), out, homogeneous=layer.homogeneous
    )
    z = NumpyBackend().patches(x, window(layer))[0].astype(np.float64)
    if layer.homogeneous:
        z = np.concatenate([z, np.ones((len(z), 1))], axis=1)
    return float(difference(backend.to_numpy(out), z.T @ z))


def _output_error(backend: CupyBackend, ds: Array) -> float:
    out = backend.asarray(_zeros(ds.shape[1]))
    backend.second_moment(backend.asarray(ds), out, feature_axis=1)
    rows = ds[0].reshape(ds.shape[1], -1).astype(np.float64)
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
        gpu_counts.gradients(layers),
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
    counted = gpu_counts.Counted(f"eigenvectors of {sizes}", 0.0, moved)
    yield Work(counted, lambda: backend.linalg.eighs(matrices), check=rebuilt, usual=others)
    dampings, degrees = [DAMPING] * len(sides), [4] * len(sides)

    def roots() -> Sequence[Array | None]:
        return backend.linalg.inverse_roots(matrices, dampings, degrees)

    def error() -> float:
        results = [backend.to_numpy(root) for root in roots() if root is not None]
        pairs = zip(results, hosts, strict=True)
        return max(float(difference(a, _fourth_root(b))) for a, b in pairs)

    if all(root is not None for root in roots()):
        counted = gpu_counts.Counted(f"inverse fourth roots of {sizes}, by products", 0.0, moved)
        yield Work(counted, roots, check=error, tolerance=_INVERSE_TOLERANCE)


def _fourth_root(host: Array) -> Array:
    """Return ``(host + damping·I)^(−1/4)`` in float64."""
    values, Q = np.linalg.eigh(host.astype(np.float64))
    root: Array = (Q * (values + DAMPING) ** -0.25) @ Q.T
    return root


def _named(name: str, runs: Sequence[Callable[[], object]]) -> Mapping[str, Callable[[], object]]:
    return {name: lambda: [run() for run in runs]} if runs else {}


def _zeros(side: int) -> Array:
    return np.zeros((side, side), np.float32)

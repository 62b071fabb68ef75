"""The time of a refresh of all factors, and of a step, on this machine.

The time of a refresh is estimated from a few operations that are measured. Steps are measured on
the inputs of the sample run.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.refreshes import refresh_cost, refreshed_shapes
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.memory import MemoryReport
from kfac_engine.errors import KfacError
from kfac_engine.system.memory_limits import spelled

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class RefreshEstimate:
    """Cost of a refresh of all factors.

    Attributes:
        flops: Number of operations; layers with equal statistics share a factor, which counts once.
        seconds: Estimate of the time on this machine.
    """

    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation of refreshes, and the bounds of its measurement.

    Attributes:
        run: Computes the results for matrices.
        most_rows: Number of rows to which matrices are cut; a matrix takes about 20 ms on a core.
        most_flops: Number of operations after which no further matrix is measured.
    """

    run: Callable[[Backend, Sequence[Array]], object]
    most_rows: int
    most_flops: float


def _invert(backend: Backend, matrices: Sequence[Array]) -> None:
    backend.download(backend.linalg.begin_damped_inverses(matrices, [1e-3] * len(matrices))()[:1])


def _decompose(backend: Backend, matrices: Sequence[Array]) -> None:
    backend.download([backend.linalg.eighs(matrices)[0][0]])


_INVERSE = _Operation(_invert, 768, 4e8)
_EIGH = _Operation(_decompose, 256, 3e7)


def estimate_refresh(engine: Engine) -> RefreshEstimate:
    """Estimate the time of a refresh of all factors; zero if no factor stores inverses.

    The largest matrices of the factors, cut to several hundred rows, are inverted or decomposed.
    Their time is scaled by the number of operations. The engine needs no statistics.
    """
    flops, seconds = 0.0, 0.0
    for operation, shapes in _shapes(engine).items():
        cost = sum(map(refresh_cost, shapes))
        sides = list(_sample(shapes, operation))
        if sides:
            measured = _measure(engine.collection.backend, operation, sides)
            seconds += measured * cost / sum(float(side) ** 3 for side in sides)
        flops += cost
    return RefreshEstimate(flops, seconds)


def _shapes(engine: Engine) -> Mapping[_Operation, list[tuple[int, ...]]]:
    """Return the shapes of the factors that store inverses, by the operation of their refresh."""
    decomposed = {
        id(factor)
        for layer in engine.layers
        if row(layer.kind, layer.approximation).eigenvectors
        for factor in engine.collection.fisher_blocks[layer.key].factors
    }
    groups: dict[_Operation, list[tuple[int, ...]]] = {_INVERSE: [], _EIGH: []}
    for factor, shapes in refreshed_shapes(engine.collection).items():
        groups[_EIGH if factor in decomposed else _INVERSE] += shapes
    return groups


def _sample(shapes: Sequence[tuple[int, ...]], operation: _Operation) -> Iterator[int]:
    """Yield how many rows each matrix to measure has, the largest first."""
    flops = 0.0
    for shape in sorted(shapes, key=lambda shape: shape[-1], reverse=True):
        if flops >= operation.most_flops:
            return
        side = min(shape[-1], operation.most_rows)
        flops += float(side) ** 3
        yield side


def _measure(backend: Backend, operation: _Operation, sides: Sequence[int]) -> float:
    """Return how many seconds an operation takes on matrices with these numbers of rows."""
    rng = np.random.default_rng(0)
    matrices = [backend.asarray(_positive(rng, side)) for side in sides]
    times = []
    with single_threaded_blas():
        for _ in range(_ROUNDS):
            start = perf_counter()
            operation.run(backend, matrices)
            times.append(perf_counter() - start)
    return min(times)


def _positive(rng: np.random.Generator, side: int) -> Array:
    """Return a symmetric matrix with eigenvalues between 1 and 3, up to random deviations."""
    matrix = rng.standard_normal((side, side), np.float32)
    matrix += matrix.T.copy()
    matrix /= np.sqrt(8 * side)
    matrix[np.diag_indices(side)] += 2
    return matrix


# -- steps -----------------------------------------------------------------------------------------

# Steps are measured unless their first refresh takes longer, in seconds, or they need more memory:
# of large models, a step takes several times the time and the memory of building the engine.
_LONGEST_REFRESH, _MOST_BYTES = 10.0, 500_000_000
# Steps are repeated up to this number, and within this time in seconds.
_MOST_STEPS, _ENOUGH = 5, 1.0
_NEVER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step that updates all statistics and refreshes no inverse.

    Attributes:
        examples: Number of examples of the batch.
        seconds: The least time of several steps; None if no step was measured.
        reason: Why no step was measured; ``""`` if one was.
    """

    examples: int
    seconds: float | None
    reason: str = ""


def measure_step(
    engine: Engine, examples: int, refresh: RefreshEstimate, memory: MemoryReport
) -> StepTime:
    """Measure steps of an engine, which changes its statistics and its schedule.

    The first step refreshes all inverses at the cost ``refresh``; ``memory`` is the peak memory of
    a step. If one of them is too large, the result is the reason why there is no time.
    """
    if refresh.seconds > _LONGEST_REFRESH:
        return StepTime(examples, None, "its first refresh takes too long")
    if memory.total > _MOST_BYTES:
        return StepTime(examples, None, f"it needs more than {spelled(_MOST_BYTES)} of memory")
    times: list[float] = []
    try:
        inputs, targets = engine.sample_batch(examples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step(inputs, targets)  # prepares sessions and inverses
            engine.schedule = Schedule(refresh_every=_NEVER)
            while len(times) < _MOST_STEPS and sum(times) < _ENOUGH:
                start = perf_counter()
                engine.step(inputs, targets)
                times.append(perf_counter() - start)
    except KfacError as failure:
        return StepTime(examples, None, str(failure).rstrip("."))
    return StepTime(examples, min(times))

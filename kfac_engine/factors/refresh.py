"""One refresh of many factors: what all of them want is computed together.

A factor says what it wants and takes the results (``FisherFactor.refreshing``); here requests of
one operation meet, so that a backend can stack matrices of equal side, and read a device once.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import NonFiniteError
from kfac_engine.linalg.spectral import eigh_power

if TYPE_CHECKING:
    from kfac_engine.factors.base import FisherFactor


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a factor wants of one matrix.

    Attributes:
        operation: Row of ``OPERATIONS``.
        matrix: ``(d, d)``, symmetric; but for ``"inverse"`` also a stack ``(g, d, d)``.
        damping: For ``"inverse"`` and ``"cholesky"``; for each matrix of a stack one.
        powers: For ``"powers"``: pairs of exponent and damping.
        clip: For ``"powers"``: least eigenvalue before damping.
    """

    operation: str
    matrix: Array
    damping: Any = 0.0
    powers: tuple[tuple[Any, Any], ...] = ()
    clip: float = 0.0


# What an operation gives: the inverse; the Cholesky factor and its inverse; each of the powers;
# eigenvalues and eigenvectors.
Result: TypeAlias = Sequence[Array]
# Yields requests, one or more times, and is sent their results in the same order.
Refreshing: TypeAlias = Generator[Sequence[Request], Sequence[Result], None]


def refresh(factors: Sequence["FisherFactor"], backend: Backend) -> None:
    """Recompute everything registered with these factors from their averages and dampings.

    Nothing is stored before everything asked for at first was computed.

    Args:
        factors: Any; those that store nothing are passed over.
        backend: The array library of all of them.

    Raises:
        NotReadyError: One has no average yet.
        NonFiniteError: An average holds NaN or infinity.
        InputError: A damping is wrong, or a matrix with its damping has not the power asked for.
    """
    due = [factor for factor in factors if factor.has_inverses]
    with _measured(due, backend):
        rounds = [factor.refreshing() for factor in due]
        asked = [next(one) for one in rounds]
    while rounds:
        results = iter(_computed([r for requests in asked for r in requests], backend))
        shares = [[next(results) for _ in requests] for requests in asked]
        asked, going = [], []
        for one, share in zip(rounds, shares, strict=True):
            following = _sent(one, share)
            if following is not None:
                asked.append(following)
                going.append(one)
        rounds = going


def _sent(one: Refreshing, results: Sequence[Result]) -> Sequence[Request] | None:
    """What a factor asks for next; None where it has finished."""
    try:
        return one.send(results)
    except StopIteration:
        return None


@contextmanager
def _measured(due: Sequence["FisherFactor"], backend: Backend) -> Iterator[None]:
    """Averages were found finite, and traces that dampings depend on need no reading of a device.

    Raises:
        NonFiniteError: An average holds NaN or infinity.
    """
    averages = {name: array for factor in due for name, array in factor.averages().items()}
    dampings = (damping for factor in due for damping in factor.dampings())
    sides = list({id(side): side for d in dampings for side in getattr(d, "sides", ())}.values())
    finite = [backend.xp.isfinite(array).all() for array in averages.values()]
    found = backend.download([*finite, *(side.measured_traces() for side in sides)])
    for name, is_finite in zip(averages, found, strict=False):
        if not is_finite:
            raise NonFiniteError(f"the average of {name} holds NaN or infinity.")
    for side, traces in zip(sides, found[len(finite) :], strict=True):
        side.known_traces = traces
    try:
        yield
    finally:
        for side in sides:
            side.known_traces = None


def _computed(requests: Sequence[Request], backend: Backend) -> list[Result]:
    """The results of all requests, in their order; those of one operation are computed together."""
    results: dict[Request, Result] = {}
    for operation, compute in OPERATIONS.items():
        together = [request for request in requests if request.operation == operation]
        if together:
            results |= zip(together, compute(backend, together), strict=True)
    return [results[request] for request in requests]


def _inverses(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    matrices, dampings = [r.matrix for r in requests], [r.damping for r in requests]
    return [(inverse,) for inverse in backend.damped_inverses(matrices, dampings)]


def _choleskys(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    stacks = [r.matrix if r.matrix.ndim > 2 else r.matrix[None] for r in requests]
    levels = [np.ravel(r.damping).tolist() for r in requests]
    lower = backend.damped_choleskys([m for s in stacks for m in s], list(chain(*levels)))
    pairs = zip(lower, backend.triangular_inverses(lower), strict=True)
    results: list[Result] = []
    for request, stack in zip(requests, stacks, strict=True):
        both = list(zip(*islice(pairs, len(stack)), strict=True))
        single = request.matrix.ndim == 2
        results.append([side[0] if single else backend.xp.stack(side) for side in both])
    return results


def _eighs(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    return backend.eighs([request.matrix for request in requests])


def _powers(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    """Every power of each matrix from one decomposition of it."""
    pairs = backend.eighs([request.matrix for request in requests])
    # Eigenvalues ascend: the first ones say which powers there are.
    smallest = backend.download([values[..., 0] for values, _ in pairs])
    return [
        [
            eigh_power(
                values,
                vectors,
                damping,
                exp,
                clip=request.clip,
                dtype=request.matrix.dtype,
                smallest=least,
            )
            for exp, damping in request.powers
        ]
        for request, (values, vectors), least in zip(requests, pairs, smallest, strict=True)
    ]


OPERATIONS: Mapping[str, Callable[[Backend, Sequence[Request]], Sequence[Result]]] = {
    "inverse": _inverses,
    "cholesky": _choleskys,
    "powers": _powers,
    "eigh": _eighs,
}

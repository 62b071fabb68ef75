"""Requests of factors for inverses and powers of their averages, computed by operation.

Requests of one operation are computed together, so that a backend can stack matrices of equal
shape and read a device once.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.linalg.spectral import eigh_power


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """An operation on a matrix that a factor needs for its refresh.

    Attributes:
        operation: Row of ``OPERATIONS``.
        matrix: Symmetric matrix ``(d, d)``, or a stack ``(g, d, d)`` except for ``"inverse"``.
            ``"inverse"`` and ``"cholesky"`` read its lower triangle only. ``"read"`` accepts any
            array.
        damping: Damping of ``"inverse"`` and ``"cholesky"``; a stack has a number for each matrix.
        powers: Pairs of exponent and damping, of ``"powers"``.
        clip: Least eigenvalue before damping, of ``"powers"``.
    """

    operation: str
    matrix: Array
    damping: Any = 0.0
    powers: tuple[tuple[Any, Any], ...] = ()
    clip: float = 0.0


# Exponents of inverse roots, with the degree of the root.
_DEGREES: Mapping[float, int] = {-0.5: 2, -0.25: 4}
# Result of an operation: the inverse; the Cholesky factor and its inverse; the powers; eigenvalues
# and eigenvectors; a host array.
Result: TypeAlias = Sequence[Array]
# Waits for the results of requests.
Finish: TypeAlias = Callable[[], Sequence[Result]]
# Yields requests, once or several times, and receives their results in the same order.
Refreshing: TypeAlias = Generator[Sequence[Request], Sequence[Result], None]


def begin_requests(requests: Sequence[Request], backend: Backend) -> Callable[[], list[Result]]:
    """Begin all requests by operation; return a function that waits for the results in order."""
    groups = []
    for operation, start in OPERATIONS.items():
        together = [request for request in requests if request.operation == operation]
        if together:
            groups.append((together, start(backend, together)))

    def finished() -> list[Result]:
        results: dict[Request, Result] = {}
        for together, results_of in groups:
            results |= zip(together, results_of(), strict=True)
        return [results[request] for request in requests]

    return finished


def _inverses(backend: Backend, requests: Sequence[Request]) -> Finish:
    matrices, dampings = [r.matrix for r in requests], [r.damping for r in requests]
    finish = backend.linalg.begin_damped_inverses(matrices, dampings)
    return lambda: [(inverse,) for inverse in finish()]


def _choleskys(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    stacks = [r.matrix if r.matrix.ndim > 2 else r.matrix[None] for r in requests]
    levels = [np.ravel(r.damping).tolist() for r in requests]
    lower = backend.linalg.damped_choleskys([m for s in stacks for m in s], list(chain(*levels)))
    pairs = zip(lower, backend.linalg.triangular_inverses(lower), strict=True)
    results: list[Result] = []
    for request, stack in zip(requests, stacks, strict=True):
        both = list(zip(*islice(pairs, len(stack)), strict=True))
        single = request.matrix.ndim == 2
        results.append([array[0] if single else backend.xp.stack(array) for array in both])
    return results


def _eighs(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    return backend.linalg.eighs([request.matrix for request in requests])


def _readings(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    return [(array,) for array in backend.download([request.matrix for request in requests])]


def _powers(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    """Return the requested powers of each matrix, from roots or from one eigendecomposition."""
    results = _roots(backend, requests)
    slow = [request for request in requests if request not in results]
    pairs = backend.linalg.eighs([request.matrix for request in slow])
    # Eigenvalues ascend: the first ones decide which powers exist.
    smallest = backend.download([values[..., 0] for values, _ in pairs])
    for request, pair, least in zip(slow, pairs, smallest, strict=True):
        power = partial(eigh_power, *pair, clip=request.clip, smallest=least)
        dtype = request.matrix.dtype
        results[request] = [power(damping, exp, dtype=dtype) for exp, damping in request.powers]
    return [results[request] for request in requests]


def _roots(backend: Backend, requests: Sequence[Request]) -> dict[Request, Result]:
    """Compute the powers of matrices whose powers are all inverse roots of low degree."""
    suitable = [
        request
        for request in requests
        if request.matrix.ndim == 2
        and not request.clip
        and all(exp in _DEGREES for exp, _ in request.powers)
    ]
    roots_of = [(request, exp, damping) for request in suitable for exp, damping in request.powers]
    roots = backend.linalg.inverse_roots(
        [request.matrix for request, _, _ in roots_of],
        [damping for _, _, damping in roots_of],
        [_DEGREES[exp] for _, exp, _ in roots_of],
    )
    following = iter(roots)
    by_request = {request: list(islice(following, len(request.powers))) for request in suitable}
    return {
        request: [root for root in of_request if root is not None]
        for request, of_request in by_request.items()
        if all(root is not None for root in of_request)
    }


def _later(
    compute: Callable[[Backend, Sequence[Request]], Sequence[Result]],
) -> Callable[[Backend, Sequence[Request]], Finish]:
    """Return an operation that is computed when its results are requested."""
    return lambda backend, requests: partial(compute, backend, requests)


OPERATIONS: Mapping[str, Callable[[Backend, Sequence[Request]], Finish]] = {
    "inverse": _inverses,
    "cholesky": _later(_choleskys),
    "powers": _later(_powers),
    "eigh": _later(_eighs),
    "read": _later(_readings),
}

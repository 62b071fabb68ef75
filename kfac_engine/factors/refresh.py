"""One refresh of many factors: what all of them want is computed together.

A factor says what it wants and takes the results (``FisherFactor.refreshing``); here requests of
one operation meet, so that a backend can stack matrices of equal side, and read a device once.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
        matrix: ``(d, d)``, symmetric; except for ``"inverse"`` it may be a stack ``(g, d, d)``.
            For ``"inverse"`` and ``"cholesky"`` the lower triangle is enough. For ``"read"`` any
            array.
        damping: For ``"inverse"`` and ``"cholesky"``; for each matrix of a stack one.
        powers: For ``"powers"``: pairs of exponent and damping.
        clip: For ``"powers"``: least eigenvalue before damping.
    """

    operation: str
    matrix: Array
    damping: Any = 0.0
    powers: tuple[tuple[Any, Any], ...] = ()
    clip: float = 0.0


# Exponents of inverse roots, with the degree of the root.
_DEGREES: Mapping[float, int] = {-0.5: 2, -0.25: 4}
# What an operation gives: the inverse; the Cholesky factor and its inverse; each of the powers;
# eigenvalues and eigenvectors; an array of the host.
Result: TypeAlias = Sequence[Array]
# Waits for the results of some requests.
Finish: TypeAlias = Callable[[], Sequence[Result]]
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
    begin_refresh(factors, backend)()


def begin_refresh(factors: Sequence["FisherFactor"], backend: Backend) -> Callable[[], None]:
    """A refresh in two steps, so that a device works on inverses while the host goes on.

    Args:
        factors: As for ``refresh``.
        backend: As for ``refresh``.

    Returns:
        Waits for the results and stores them, when it is called for the first time; a factor whose
        average is about to change calls it. Raises an InputError as ``refresh`` does.

    Raises:
        NotReadyError: As for ``refresh``.
        NonFiniteError: As for ``refresh``.
    """
    due = [factor for factor in factors if factor.has_inverses]
    for factor in due:
        factor.settle()
    with _measured(due, backend):
        rounds = [factor.refreshing() for factor in due]
        asked = [next(one) for one in rounds]
    begun = _begun([r for requests in asked for r in requests], backend)

    def finish() -> None:
        for factor in due:
            factor.settle_by(None)
        _stored(rounds, asked, begun, backend)

    for factor in due:
        factor.settle_by(finish)
    return due[0].settle if due else lambda: None


def _stored(
    rounds: Sequence[Refreshing],
    asked: Sequence[Sequence[Request]],
    results: Callable[[], list[Result]],
    backend: Backend,
) -> None:
    """Send results to the factors that asked, and do what they ask for next."""
    while rounds:
        found = iter(results())
        shares = [[next(found) for _ in requests] for requests in asked]
        following = [(one, _sent(one, share)) for one, share in zip(rounds, shares, strict=True)]
        going = [(one, requests) for one, requests in following if requests is not None]
        rounds, asked = [one for one, _ in going], [requests for _, requests in going]
        results = _begun([r for requests in asked for r in requests], backend)


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
    averages = {name: average for factor in due for name, average in factor.averages().items()}
    dampings = (damping for factor in due for damping in factor.dampings())
    sides = list({id(side): side for d in dampings for side in getattr(d, "sides", ())}.values())
    asked = [side.measured_traces() for side in sides]
    arrays = [average.lower(name) for name, average in averages.items()]
    finite, *found = backend.download([backend.are_finite(arrays), *asked])
    for name, is_finite in zip(averages, finite, strict=True):
        # Above the diagonal there may have been anything.
        if not is_finite and not _is_finite(averages[name].read(name), backend):
            raise NonFiniteError(f"the average of {name} holds NaN or infinity.")
    for side, traces in zip(sides, found, strict=True):
        side.known_traces = traces
    try:
        yield
    finally:
        for side in sides:
            side.known_traces = None


def _is_finite(array: Array, backend: Backend) -> bool:
    return bool(backend.download([backend.are_finite([array])])[0].all())


def _begun(requests: Sequence[Request], backend: Backend) -> Callable[[], list[Result]]:
    """Begins all requests, those of one operation together; the results are in their order."""
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
    finish = backend.begin_damped_inverses(matrices, dampings)
    return lambda: [(inverse,) for inverse in finish()]


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


def _readings(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    return [(found,) for found in backend.download([request.matrix for request in requests])]


def _powers(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    """Every power of each matrix: by one decomposition, or without where that is quicker."""
    results = _roots(backend, requests)
    slow = [request for request in requests if request not in results]
    pairs = backend.eighs([request.matrix for request in slow])
    # Eigenvalues ascend: the first ones say which powers there are.
    smallest = backend.download([values[..., 0] for values, _ in pairs])
    for request, pair, least in zip(slow, pairs, smallest, strict=True):
        power = partial(eigh_power, *pair, clip=request.clip, smallest=least)
        dtype = request.matrix.dtype
        results[request] = [power(damping, exp, dtype=dtype) for exp, damping in request.powers]
    return [results[request] for request in requests]


def _roots(backend: Backend, requests: Sequence[Request]) -> dict[Request, Result]:
    """The powers of matrices all of whose powers have a quicker way than eigenvectors."""
    fit = [
        request
        for request in requests
        if request.matrix.ndim == 2
        and not request.clip
        and all(exp in _DEGREES for exp, _ in request.powers)
    ]
    asked = [(request, exp, damping) for request in fit for exp, damping in request.powers]
    roots = backend.inverse_roots(
        [request.matrix for request, _, _ in asked],
        [damping for _, _, damping in asked],
        [_DEGREES[exp] for _, exp, _ in asked],
    )
    following = iter(roots)
    shares = {request: list(islice(following, len(request.powers))) for request in fit}
    return {
        request: [root for root in share if root is not None]
        for request, share in shares.items()
        if all(root is not None for root in share)
    }


def _later(
    compute: Callable[[Backend, Sequence[Request]], Sequence[Result]],
) -> Callable[[Backend, Sequence[Request]], Finish]:
    """An operation that is not begun before its results are wanted."""
    return lambda backend, requests: partial(compute, backend, requests)


OPERATIONS: Mapping[str, Callable[[Backend, Sequence[Request]], Finish]] = {
    "inverse": _inverses,
    "cholesky": _later(_choleskys),
    "powers": _later(_powers),
    "eigh": _later(_eighs),
    "read": _later(_readings),
}

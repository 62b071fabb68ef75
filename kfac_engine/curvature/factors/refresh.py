"""Computes the inverses and powers that many factors request in one refresh.

A factor returns a ``RefreshTask``: requests for inverses and powers of its average, and a function
that stores the results. Requests of one operation are computed together for all factors, so that a
backend can stack matrices of equal shape and read a device once.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array, Rows, whole_arrays
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.linalg.spectral import eigh_power
from kfac_engine.distributed.messages import Form

# Returns the current damping; called at each refresh. Two callables with equal hashable attributes
# ``func_id`` are the same registration.
Damping: TypeAlias = Callable[[], "Level"]
# A number, or a number for each matrix of a stack.
Level: TypeAlias = float | Array


def damping_id(damping_func: Damping) -> Hashable:
    """Return the key of a registration: the callable's ``func_id``, or the callable itself."""
    identity: Hashable = getattr(damping_func, "func_id", damping_func)
    return identity


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """An operation on a matrix that a factor needs for its refresh."""

    operation: str  # row of ``OPERATIONS``
    # Symmetric matrix ``(d, d)``, or a stack ``(g, d, d)``. ``"inverse"`` and ``"cholesky"`` read
    # its lower triangle only.
    matrix: Array
    # Damping of ``"inverse"`` and ``"cholesky"``; a stack has a number for each matrix.
    damping: Any = 0.0
    powers: tuple[tuple[Any, Any], ...] = ()  # pairs of exponent and damping, for ``"powers"``
    clip: float = 0.0  # least eigenvalue before damping, for ``"powers"``


# Exponents of inverse roots, with the degree of the root.
_DEGREES: Mapping[float, int] = {-0.5: 2, -0.25: 4}
# Arrays that an operation returns: the inverse; the Cholesky factor and its inverse; the powers; or
# the eigenvalues and eigenvectors.
Result: TypeAlias = Sequence[Array]
# Waits for the results of requests.
Finish: TypeAlias = Callable[[], Sequence[Result]]


class RefreshTask(NamedTuple):
    """The operations that refresh one factor, and a function that stores their results.

    The operations read the average of the factor. The function takes the results in the order of
    the requests.
    """

    requests: Sequence[Request]
    store: Callable[[Sequence[Result]], None]


# Starts to compute requests; returns a function that waits for their results.
Compute: TypeAlias = Callable[[Sequence[Request]], Callable[[], Mapping[Request, Result]]]


class Division:
    """Divides averages, inverses and products among processes; this class serves one process."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return 1

    # -- statistics -------------------------------------------------------------------------------

    def over_ranks(self, measured: Any) -> Any:
        """Return the measurements of factors, averaged over all processes; a collective call."""
        return measured

    def commit(self, update: Any, decay: float) -> None:
        """Update the averages with a batch, of which each process has measured its shard.

        ``update`` has the measurements of this process. ``decay`` is the weight of the old
        averages.
        """
        update.commit(decay)

    def complete(self) -> None:
        """Make all averages whole on all processes; a collective call."""

    def restart(self) -> None:
        """Record that averages and results were replaced, and are whole on all processes."""

    # -- refreshes --------------------------------------------------------------------------------

    def hand_over(self, due: Sequence[Any]) -> Sequence[Any]:
        """Complete the average of each factor on the process that computes its refresh.

        Return the factors that store results on this process.
        """
        return due

    def compute(
        self, due: Sequence[Any], tasks: Sequence[RefreshTask], compute: Compute
    ) -> Callable[[], Mapping[Request, Result]]:
        """Start to compute the requests of factors, each on one process.

        ``due`` are the factors that store results on this process, and ``tasks`` their refreshes.
        The returned function waits for the results of all requests.
        """
        del due
        return compute([request for task in tasks for request in task.requests])

    def owners(self, factors: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the rank that refreshes a factor, for each factor with a constant rank.

        ``factors`` are all factors that store results.
        """
        del factors
        return {}

    def snapshot(self) -> Callable[[], None]:
        """Save the division of averages; return a function that restores division and averages."""
        return lambda: None

    def refreshing(self) -> AbstractContextManager[None]:
        """Return a context for a refresh outside of a step; processes meet at its begin and end."""
        return nullcontext()

    def all_results(self) -> AbstractContextManager[None]:
        """Return a context in which the first process has the results of all refreshes."""
        return nullcontext()

    # -- products ---------------------------------------------------------------------------------

    def multiplying(self) -> AbstractContextManager[None]:
        """Return a context for products; all processes meet at its end."""
        return nullcontext()

    def owned(self, vectors: Mapping[str, Array | Rows]) -> Mapping[str, Array | Rows]:
        """Return the vectors that this process multiplies."""
        return vectors

    def sum_gradients(self, gradients: dict[str, Array]) -> Mapping[str, Array | Rows]:
        """Return sums of the gradients over all shards; ``gradients`` may be overwritten.

        The result has those sums that this process preconditions. If several processes own a
        table, the result has only the table's rows of this process.
        """
        return gradients

    def gather(
        self, gradients: Mapping[str, Array | Rows], shards: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the gradients of all parameters for the whole batch, on all processes.

        ``gradients`` is the result of ``sum_gradients``. Only shapes and element types of
        ``shards``, the gradients of the shard, are read.
        """
        del shards
        return whole_arrays(gradients)

    def share(self, products: Mapping[str, Array | Rows], names: Sequence[str]) -> dict[str, Array]:
        """Return the products of all processes, on each process.

        ``products`` are the products of this process, with its ``owned`` vectors. ``names`` are
        the parameters of all products.
        """
        del names
        return whole_arrays(products)


UNDIVIDED = Division()


def begin_requests(
    backend: Backend, requests: Sequence[Request]
) -> Callable[[], Mapping[Request, Result]]:
    """Begin all requests by operation; return a function that waits for their results."""
    groups = []
    for operation, start in OPERATIONS.items():
        together = [request for request in requests if request.operation == operation]
        if together:
            groups.append((together, start(backend, together)))

    def finish() -> Mapping[Request, Result]:
        results: dict[Request, Result] = {}
        for together, of_operation in groups:
            results.update(zip(together, of_operation(), strict=True))
        return results

    return finish


def _inverses(backend: Backend, requests: Sequence[Request]) -> Finish:
    finish = backend.linalg.begin_damped_inverses(*_matrices(requests))
    return lambda: _by_request(backend, requests, zip(finish(), strict=True))


def _choleskys(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    lower = backend.linalg.damped_choleskys(*_matrices(requests))
    inverses = backend.linalg.triangular_inverses(lower)
    return _by_request(backend, requests, zip(lower, inverses, strict=True))


def _matrices(requests: Sequence[Request]) -> tuple[list[Array], list[float]]:
    """Return the matrices of all requests, with stacks divided, and their dampings."""
    stacks = [r.matrix if r.matrix.ndim > 2 else r.matrix[None] for r in requests]
    levels = [np.ravel(r.damping).tolist() for r in requests]
    return list(chain(*stacks)), list(chain(*levels))


def _by_request(
    backend: Backend, requests: Sequence[Request], results: Iterator[tuple[Array, ...]]
) -> list[Result]:
    """Return the results of each request, from the results of its matrices."""
    sizes = [len(r.matrix) if r.matrix.ndim > 2 else 0 for r in requests]
    return [
        [backend.xp.stack(array) for array in zip(*islice(results, size), strict=True)]
        if size
        else next(results)
        for size in sizes
    ]


def _eighs(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    return backend.linalg.eighs([request.matrix for request in requests])


def _powers(backend: Backend, requests: Sequence[Request]) -> Sequence[Result]:
    """Return the requested powers of each matrix, from roots or from one eigendecomposition."""
    results = _roots(backend, requests)
    slow = [request for request in requests if request not in results]
    pairs = backend.linalg.eighs([request.matrix for request in slow])
    # Eigenvalues ascend: the smallest eigenvalue decides which powers exist.
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
}


def result_forms(request: Request) -> tuple[Form, ...]:
    """Return the form of each array that the result of a request consists of, in order."""
    matrix = request.matrix
    symmetric = Form(matrix.shape, matrix.dtype, "symmetric")
    lower = Form(matrix.shape, matrix.dtype, "lower")
    wide = np.dtype(np.float64)
    forms: Mapping[str, tuple[Form, ...]] = {
        "inverse": (symmetric,),
        "cholesky": (lower, lower),
        "powers": (symmetric,) * len(request.powers),
        "eigh": (Form(matrix.shape[:-1], wide), Form(matrix.shape, wide)),
    }
    return forms[request.operation]

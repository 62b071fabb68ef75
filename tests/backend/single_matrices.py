"""Batched linear algebra of a backend, applied to many matrices at once and to one matrix."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfac_engine.backend.protocol import Backend


def damped_inverses(backend: Backend, matrices: Sequence[Any], dampings: Sequence[float]) -> list:
    return backend.linalg.begin_damped_inverses(matrices, dampings)()


def damped_choleskys(backend: Backend, matrices: Sequence[Any], dampings: Sequence[float]) -> list:
    return backend.linalg.damped_choleskys(matrices, dampings)


def damped_inverse(backend: Backend, matrix: Any, damping: float) -> Any:
    return damped_inverses(backend, [matrix], [damping])[0]


def damped_cholesky(backend: Backend, matrix: Any, damping: float) -> Any:
    return damped_choleskys(backend, [matrix], [damping])[0]


def triangular_inverse(backend: Backend, lower: Any) -> Any:
    return backend.linalg.triangular_inverses([lower])[0]


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (damped_inverses, damped_choleskys, damped_inverse, damped_cholesky)
}

"""The primitives in JAX: compiled, with buffers donated, on its own thread pool."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench import made
from kfac_engine.bench.jobs import DAMPING, DECAY, Run


def _dense(rows: int, d: int) -> Run:
    def update(average: Any, x: Any) -> Any:
        with_one = jnp.concatenate([x, jnp.ones((rows, 1), x.dtype)], 1)
        return DECAY * average + (1 - DECAY) / rows * (with_one.T @ with_one)

    return _averaged(update, np.zeros((d + 1, d + 1), np.float32), made.normal(rows, d))


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    channels, taps = shape[1], kernel**2
    d = channels * taps

    def update(average: Any, x: Any) -> Any:
        z = jax.lax.conv_general_dilated_patches(
            x, (kernel, kernel), (stride, stride), [(pad, pad), (pad, pad)]
        )
        z = z.reshape(len(x), channels, taps, -1).transpose(2, 1, 0, 3).reshape(d, -1)
        return DECAY * average + (1 - DECAY) / z.shape[1] * (z @ z.T)

    return _averaged(update, np.zeros((d, d), np.float32), made.normal(*shape))


def _inverse(d: int) -> Run:
    def inverted(matrix: Any) -> Any:
        identity = jnp.eye(d)
        lower = jax.scipy.linalg.cho_factor(matrix + DAMPING * identity, lower=True)
        return jax.scipy.linalg.cho_solve(lower, identity)

    return _compiled(inverted, made.factor(d))


def _power(d: int, exp: float) -> Run:
    def raised(matrix: Any) -> Any:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * (jnp.maximum(values, 0) + DAMPING) ** exp) @ vectors.T

    return _compiled(raised, made.factor(d))


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    def products(todo: Any) -> Any:
        return [A @ V @ G for A, G, V in todo]

    compiled = jax.jit(products)
    todo = jax.device_put(made.layers(layers))

    return lambda: jax.block_until_ready(compiled(todo))


def _averaged(update: Callable[[Any, Any], Any], start: Array, x: Array) -> Run:
    compiled = jax.jit(update, donate_argnums=0)
    state, data = jax.device_put(start), jax.device_put(x)

    def run() -> Any:
        nonlocal state
        # A NumPy view of it would keep the next run from writing into the same memory.
        state = jax.block_until_ready(compiled(state, data))
        return state

    return run


def _compiled(function: Callable[[Any], Any], matrix: Array) -> Run:
    compiled, data = jax.jit(function), jax.device_put(matrix)
    return lambda: jax.block_until_ready(compiled(data))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
}

"""The primitives in JAX: compiled, with donated buffers, on its own thread pool."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kfac_engine._types import Array
from kfac_engine.bench import data
from kfac_engine.bench.jobs import DAMPING, DECAY, Run


def _dense(rows: int, d: int) -> Run:
    def update(average: Any, x: Any) -> Any:
        with_one = jnp.concatenate([x, jnp.ones((rows, 1), x.dtype)], 1)
        # Faster than a product with the transpose, which is copied.
        product = jax.lax.dot_general(with_one, with_one, (((0,), (0,)), ((), ())))
        return DECAY * average + (1 - DECAY) / rows * product

    return _averaged(update, data.zeros(d + 1, d + 1), data.normal(rows, d))


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    d = shape[1] * kernel**2

    def update(average: Any, x: Any) -> Any:
        z = _windows(x, kernel, stride, pad).transpose(0, 2, 1, 3, 4).reshape(d, -1)
        return DECAY * average + (1 - DECAY) / z.shape[1] * (z @ z.T)

    return _averaged(update, data.zeros(d, d), data.normal(*shape))


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    channels, taps = shape[1], kernel**2

    def update(average: Any, x: Any) -> Any:
        z = _windows(x, kernel, stride, pad).transpose(2, 0, 1, 3, 4).reshape(channels, taps, -1)
        product = jnp.einsum("cip,cjp->cij", z, z)
        return DECAY * average + (1 - DECAY) / z.shape[2] * product

    return _averaged(update, data.zeros(channels, taps, taps), data.normal(*shape))


def _windows(x: Any, kernel: int, stride: int, pad: int) -> Any:
    """Return a slice for each tap, ``(taps, n, channels, oh, ow)``.

    Slices take half the time of ``conv_general_dilated_patches``, a convolution with an identity.
    """
    padded = jnp.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    height, width = ((side + 2 * pad - kernel) // stride * stride + 1 for side in x.shape[2:])
    return jnp.stack(
        [
            padded[:, :, i : i + height : stride, j : j + width : stride]
            for i in range(kernel)
            for j in range(kernel)
        ]
    )


def _inverse(d: int) -> Run:
    def inverted(matrix: Any) -> Any:
        identity = jnp.eye(d)
        lower = jax.scipy.linalg.cho_factor(matrix + DAMPING * identity, lower=True)
        return jax.scipy.linalg.cho_solve(lower, identity)

    return _compiled(inverted, data.factor(d))


def _power(d: int, exp: float) -> Run:
    def raised(matrix: Any) -> Any:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * (jnp.maximum(values, 0) + DAMPING) ** exp) @ vectors.T

    return _compiled(raised, data.factor(d))


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    def products(todo: Any) -> Any:
        return [A @ V @ G for A, G, V in todo]

    compiled = jax.jit(products)
    todo = jax.device_put(data.layers(layers))

    return lambda: jax.block_until_ready(compiled(todo))


def _averaged(update: Callable[[Any, Any], Any], start: Array, x: Array) -> Run:
    compiled = jax.jit(update, donate_argnums=0)
    state, data = jax.device_put(start), jax.device_put(x)

    def run() -> Any:
        nonlocal state
        # A NumPy view would prevent the next run from writing into the same memory.
        state = jax.block_until_ready(compiled(state, data))
        return state

    return run


def _compiled(function: Callable[[Any], Any], matrix: Array) -> Run:
    compiled, data = jax.jit(function), jax.device_put(matrix)
    return lambda: jax.block_until_ready(compiled(data))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "depthwise": _depthwise,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
}

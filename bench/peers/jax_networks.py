"""The networks of the suite ``step`` in JAX, with the same weights and channels last."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kfac_engine._types import Array
from kfac_engine.bench import step_networks as sizes

# Computes logits from parameters by name and inputs.
Function = Callable[[Mapping[str, Any], Any], Any]


def _mlp(p: Mapping[str, Any], x: Any) -> Any:
    last = len(sizes.MLP) - 2
    for i in range(last):
        x = jax.nn.relu(_dense(p, f"{i}", x))
    return _dense(p, f"{last}", x)


def _resnet20(p: Mapping[str, Any], x: Any) -> Any:
    x = jax.nn.relu(_conv(p, "conv", x, 1))
    channels = sizes.RESNET_STAGES[0][0]
    for stage, (width, first_stride) in enumerate(sizes.RESNET_STAGES):
        for block in range(sizes.RESNET_BLOCKS):
            name, stride = f"{stage}.{block}", first_stride if block == 0 else 1
            y = jax.nn.relu(_conv(p, f"{name}.0", x, stride))
            y = _conv(p, f"{name}.1", y, 1)
            x = _conv(p, f"{name}.short", x, stride) if channels != width else x
            x, channels = jax.nn.relu(x + y), width
    return _dense(p, "head", x.mean((1, 2)))


def _transformer(p: Mapping[str, Any], x: Any) -> Any:
    y = p["tokens"][x]
    for i in range(sizes.LAYERS):
        y = y + _attention(p, f"{i}", _norm(p, f"{i}.norm0", y))
        up = jax.nn.relu(_dense(p, f"{i}.up", _norm(p, f"{i}.norm1", y)))
        y = y + _dense(p, f"{i}.down", up)
    return _dense(p, "head", _norm(p, "last", y))


def _attention(p: Mapping[str, Any], name: str, y: Any) -> Any:
    split = (*y.shape[:2], sizes.HEADS, -1)
    q, k, v = (_dense(p, f"{name}.{part}", y).reshape(split) for part in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return _dense(p, f"{name}.out", seen.reshape(y.shape))


def _dense(p: Mapping[str, Any], name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def _conv(p: Mapping[str, Any], name: str, x: Any, stride: int) -> Any:
    w = p[f"{name}.weight"]
    pad = w.shape[0] // 2
    y = jax.lax.conv_general_dilated(
        x, w, (stride,) * 2, [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + p[f"{name}.bias"]


def _norm(p: Mapping[str, Any], name: str, x: Any) -> Any:
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"]
    return scale * (x - x.mean(-1, keepdims=True)) + p[f"{name}.bias"]


FUNCTIONS: Mapping[str, Function] = {
    "mlp": _mlp,
    "resnet20": _resnet20,
    "transformer": _transformer,
}


def from_onnx(array: Array) -> Array:
    """Return a parameter, with filters as ``(h, w, in, out)``."""
    return array if array.ndim < 4 else array.transpose(2, 3, 1, 0)


def images_last(x: Array) -> Array:
    """Return inputs with channels last if they are images."""
    return x if x.ndim < 4 else x.transpose(0, 2, 3, 1)


def to_onnx(array: Any) -> Any:
    """Return a parameter in the layout of ONNX: the inverse of ``from_onnx``."""
    return array if array.ndim < 4 else array.transpose(3, 2, 0, 1)

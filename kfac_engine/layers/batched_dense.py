"""Dense layers side by side, each with a weight of its own: experts, or heads kept apart.

The weights lie in one array ``(slots, d_in, d_out)``, the data in ``(n, …positions, slots, d_in)``.
"""

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import cast

import numpy as np

from kfac_engine._types import Array, Rows, Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.graph.structure import Node
from kfac_engine.layers.grouped import GroupedForm
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.match import LayerMatch, MatchContext
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.reshaped_bias import moved_bias
from kfac_engine.layers.views import rows_as_images

_LEAST_RANK = 3


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Reads ``(n, …positions, slots, d)``: features are those of all slots, slot by slot."""

    @property
    def rank(self) -> None:
        """Any number of axes from three on."""
        return

    def width(self, shape: tuple[int, ...]) -> int:
        if len(shape) < _LEAST_RANK:
            raise ShapeError(f"a tensor of several slots has shape {shape}; 3 axes are needed.")
        return shape[-2] * shape[-1]

    def count(self, shape: tuple[int, ...]) -> int:
        return prod(shape[:-2])

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        del x, out, backend, homogeneous, alpha, beta
        raise InputError("slots have a second moment each; choose 'kron' or 'diagonal'.")

    def rows(self, x: Array, backend: Backend) -> Array:
        del backend
        return x.reshape(len(x), -1, self.width(x.shape))

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))


@dataclass(frozen=True, slots=True)
class SlotPacking(Packing):
    """The map between a weight ``(slots, d_in, d_out)``, with a bias, and a stack of matrices."""

    def pack(self, vector: Vector, where: object, xp: ModuleType) -> Array:
        parts = self.arrays(vector, where)
        weight = parts[0]
        if weight.ndim != _LEAST_RANK:
            raise ShapeError(f"the weight of {where} has 3 axes; got shape {weight.shape}.")
        slots, _, d_out = weight.shape
        if not self.has_bias:
            return weight.copy()
        if parts[1].size != slots * d_out:
            raise ShapeError(
                f"the bias of {where} has shape {parts[1].shape}, not ({slots}, {d_out})."
            )
        packed: Array = xp.concatenate([weight, parts[1].reshape(slots, 1, d_out)], axis=1)
        return packed

    def unpack(self, matrix: Array, like: Vector) -> Vector:
        assert not isinstance(like, Rows)  # they were refused by pack
        parts = like if isinstance(like, tuple | list) else (like,)
        rows = matrix[:, :-1] if self.has_bias else matrix
        weight = rows.astype(parts[0].dtype, order="C")
        if not self.has_bias:
            return (weight,) if isinstance(like, tuple | list) else weight
        return weight, matrix[:, -1].reshape(parts[1].shape).astype(parts[1].dtype)


def slots_form(weight_shape: tuple[int, ...], *, has_bias: bool) -> GroupedForm:
    """The form of dense layers side by side; a ShapeError where the weight has not three axes."""
    if len(weight_shape) != _LEAST_RANK:
        raise ShapeError(
            f"the weight of dense layers side by side has shape {weight_shape}; (slots, d_in, "
            f"d_out) is needed."
        )
    slots, d_in, d_out = weight_shape
    layer = LayerForm(SlotRows(), SlotRows(), SlotPacking("IO", has_bias))
    return GroupedForm(layer, 1, (slots, d_in + has_bias, d_out))


def match_slots(scene: MatchContext, node: Node) -> LayerMatch | str:
    """Dense layers side by side: a product of data, turned for it and back, with a stack.

    Args:
        scene: The graph.
        node: A MatMul whose second operand is a parameter with three axes.

    Returns:
        The layer, or why there is none.
    """
    weight = node.inputs[1]
    shape = scene.shapes[weight]
    into = scene.graph.producers.get(node.inputs[0])
    users = scene.graph.consumers.get(node.outputs[0], ())
    back = users[0][0] if len(users) == 1 else None
    turned = into and back and into.op == back.op == "Transpose"
    if not into or not back or not turned or into.attributes != back.attributes:
        return f"MatMul of shapes {' and '.join(str(scene.shapes[n]) for n in node.inputs)}"
    x, y = into.inputs[0], back.outputs[0]
    rank = len(scene.shapes[x])
    perm = cast("tuple[int, ...]", into.attributes.get("perm", ()))
    if perm != (*range(rank - 3), rank - 2, rank - 3, rank - 1):
        return f"MatMul with a stack of matrices of shape {shape}"
    features = np.arange(shape[0] * shape[2]).reshape(shape[0], shape[2])
    bias = moved_bias(scene, y, weight, features)
    return LayerMatch("stacked_dense", (weight, *bias), x, y)

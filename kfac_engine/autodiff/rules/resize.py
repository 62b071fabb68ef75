"""Resizing of images."""

from math import prod

from kfac_engine.autodiff.builder import Builder
from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import text
from kfac_engine.autodiff.rules.indexing import rearranged
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import Node

# Coordinates and rounding under which an integer scale repeats every pixel as often.
_REPEATS = {
    ("asymmetric", "floor"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
}


@vjp_rule("Resize")
def resize(b: Builder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Nearest neighbours: what a pixel was copied to is added up."""
    mode = text(node, "mode", "nearest")
    if mode != "nearest" or _coordinates(node) == "tf_crop_and_resize":
        raise UnsupportedOpError(
            f"no derivative rule for Resize in mode '{mode}' with coordinates "
            f"'{_coordinates(node)}' at node '{node.name}'; 'nearest' without cropping has one."
        )
    scales = _tiling(b, node)
    if not scales:
        return {0: rearranged(b, node, g[0], narrow=True)}
    mean = b.op("AveragePool", g[0], kernel_shape=scales, strides=scales)
    return {0: b.op("Mul", mean, b.scalar(prod(scales), node.inputs[0]))}


def _tiling(b: Builder, node: Node) -> tuple[int, ...]:
    """How often every pixel is repeated along each spatial axis; empty where that is not all."""
    name = node.inputs[2] if len(node.inputs) > 2 else ""
    scales = b.graph.constants.get(name)
    rounding = text(node, "nearest_mode", "round_prefer_floor")
    if (
        scales is None
        or not 3 <= scales.size <= 5
        or (_coordinates(node), rounding) not in _REPEATS
    ):
        return ()
    whole = scales.round()
    if (whole != scales).any() or (whole < 1).any() or (whole[:2] != 1).any():
        return ()
    return tuple(int(scale) for scale in whole[2:])


def _coordinates(node: Node) -> str:
    return text(node, "coordinate_transformation_mode", "half_pixel")

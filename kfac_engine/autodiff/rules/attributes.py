"""Reads attributes of a node with their defaults, in the type that ONNX declares."""

from collections.abc import Sequence

from kfac_engine.graph.structure import Node


def number(node: Node, name: str, default: float) -> float:
    """Return a floating-point attribute."""
    value = node.attributes.get(name, default)
    assert isinstance(value, int | float)
    return float(value)


def integer(node: Node, name: str, default: int) -> int:
    """Return an integer attribute."""
    value = node.attributes.get(name, default)
    assert isinstance(value, int)
    return value


def integers(node: Node, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return an attribute that lists integers."""
    value = node.attributes.get(name, tuple(default))
    assert isinstance(value, tuple)
    return tuple(int(entry) for entry in value)


def text(node: Node, name: str, default: str) -> str:
    """Return a string attribute."""
    value = node.attributes.get(name, default)
    assert isinstance(value, str)
    return value


def numbers(node: Node, name: str, default: Sequence[float]) -> tuple[float, ...]:
    """Return an attribute that lists floating-point numbers."""
    value = node.attributes.get(name, tuple(default))
    assert isinstance(value, tuple)
    return tuple(float(entry) for entry in value)

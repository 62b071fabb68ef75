"""Writes one step of LSTM, GRU and RNN as products and activations.

The rows of the weights are the gates, in the order of ONNX. Both products of a step have a bias in
the file, so each product is a dense layer with one use in every step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.recurrent_activations import Activation
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node

State: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one direction.

    Attributes:
        W: Weights of the input, ``(gates·h, d)``.
        R: Weights of the state, ``(gates·h, h)``. A GRU that resets the state before the product
            has two parts, for the gates and for the candidate.
        bias_w: Bias of the product with ``W``; ``""`` without a bias.
        bias_r: Biases of the products with ``R``.
        peepholes: Weights ``(h,)`` of an LSTM for input, output and forget gate; ``""`` if omitted.
    """

    W: str
    R: tuple[str, ...]
    bias_w: str
    bias_r: tuple[str, ...]
    peepholes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kit:
    """The parts that a cell needs to write a step.

    Attributes:
        b: Receives the nodes.
        node: The recurrent node.
        hidden: Size of the state.
        activations: Functions that write the activations f, g and h.
        clip: Function that clips the operands of f and g; the identity without ``clip``.
    """

    b: LoweringBuilder
    node: Node
    hidden: int
    activations: tuple[Activation, ...]
    clip: Activation

    def one_minus(self, value: str) -> str:
        return self.b.op("Sub", self.b.scalar(1, self.node.inputs[0]), value)

    def bounded(self, index: int, value: str) -> str:
        """Write activation ``index`` of a clipped value."""
        return self.activations[index](self.clip(value))

    def parts(self, value: str, *gates: int) -> tuple[str, ...]:
        """Write parts of the columns with ``gates`` gates each; return their names."""
        sizes = self.b.constant([gate * self.hidden for gate in gates])
        return self.b.multi("Split", [value, sizes], ("",) * len(gates), axis=1)


def product(b: LoweringBuilder, x: str, weight: str, bias: str) -> str:
    """Write ``x Wᵀ + b``."""
    operands = (x, weight, bias) if bias else (x, weight)
    return b.op("Gemm", *operands, transB=1)


# -- cells -----------------------------------------------------------------------------------------

Cell: TypeAlias = Callable[[Kit, Weights, str, State], State]


def rnn(kit: Kit, weights: Weights, x: str, state: State) -> State:
    """Write ``h' = f(x Wᵀ + h Rᵀ + b)``."""
    return (kit.bounded(0, _sum_of_products(kit, weights, x, state[0])),)


def lstm(kit: Kit, weights: Weights, x: str, state: State) -> State:
    """Write a step of long short-term memory; the state is ``(h, c)``."""
    h, c = state
    b = kit.b
    i, o, f, g = kit.parts(_sum_of_products(kit, weights, x, h), 1, 1, 1, 1)

    def peeped(gate: str, index: int, cell: str) -> str:
        if not weights.peepholes[index]:
            return gate
        return b.op("Add", gate, b.op("Mul", weights.peepholes[index], cell))

    i = kit.bounded(0, peeped(i, 0, c))
    coupled = integer(kit.node, "input_forget", 0)
    f = kit.one_minus(i) if coupled else kit.bounded(0, peeped(f, 2, c))
    remembered, added = b.op("Mul", f, c), b.op("Mul", i, kit.bounded(1, g))
    c = b.op("Add", remembered, added)
    o = kit.bounded(0, peeped(o, 1, c))
    return b.op("Mul", o, kit.activations[2](c)), c


def gru(kit: Kit, weights: Weights, x: str, state: State) -> State:
    """Write a step of a gated recurrent unit: ``h' = (1 − z) g(…) + z h``."""
    h, b = state[0], kit.b
    from_x = product(b, x, weights.W, weights.bias_w)
    gates_x, x_part = kit.parts(from_x, 2, 1)
    from_h = product(b, h, weights.R[0], weights.bias_r[0])
    before = integer(kit.node, "linear_before_reset", 0)
    gates_h, h_part = kit.parts(from_h, 2, 1) if before else (from_h, "")
    z, r = kit.parts(kit.bounded(0, b.op("Add", gates_x, gates_h)), 1, 1)
    reset = b.op("Mul", r, h_part or h)
    if not before:
        reset = product(b, reset, weights.R[1], weights.bias_r[1])
    candidate = kit.bounded(1, b.op("Add", x_part, reset))
    new = b.op("Mul", kit.one_minus(z), candidate)
    return (b.op("Add", new, b.op("Mul", z, h)),)


def _sum_of_products(kit: Kit, weights: Weights, x: str, h: str) -> str:
    from_x = product(kit.b, x, weights.W, weights.bias_w)
    return kit.b.op("Add", from_x, product(kit.b, h, weights.R[0], weights.bias_r[0]))


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of one of the three operators.

    Attributes:
        cell: Function that writes a step.
        gates: Number of blocks of rows in the weights.
        states: Number of states.
        activations: Default activations.
    """

    cell: Cell
    gates: int
    states: int
    activations: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "RNN": Kind(rnn, 1, 1, ("Tanh",)),
    "GRU": Kind(gru, 3, 1, ("Sigmoid", "Tanh")),
    "LSTM": Kind(lstm, 4, 2, ("Sigmoid", "Tanh", "Tanh")),
}

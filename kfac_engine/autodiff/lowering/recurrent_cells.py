"""One step of LSTM, GRU and RNN, in products and activations.

Gates lie side by side in the rows of the weights, in ONNX's order. Both products of a step have the
bias that the file has for them, so that each is a dense layer of its own, used once a step.
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
    """Operands of one direction.

    Attributes:
        W: Of the input, ``(gates·h, d)``.
        R: Of the state, ``(gates·h, h)``; for a GRU that resets the state before the product two
            parts, those of the gates and that of the candidate.
        bias_w: Added to the product with ``W``; ``""`` for none.
        bias_r: Added to the products with ``R``, one each.
        peepholes: Of an LSTM, ``(h,)`` each for the input, output and forget gate; ``""`` for none.
    """

    W: str
    R: tuple[str, ...]
    bias_w: str
    bias_r: tuple[str, ...]
    peepholes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kit:
    """Operands of a cell: builder, activations in ONNX's order (f, g, h), and bounds.

    Attributes:
        b: Writes the nodes.
        node: Whose cell it is.
        hidden: Size of the state.
        activations: One function each.
        clip: Bounds what goes into f and g; does nothing where the node has no ``clip``.
    """

    b: LoweringBuilder
    node: Node
    hidden: int
    activations: tuple[Activation, ...]
    clip: Activation

    def one_minus(self, value: str) -> str:
        return self.b.op("Sub", self.b.scalar(1, self.node.inputs[0]), value)

    def bounded(self, index: int, value: str) -> str:
        """Activation ``index`` of a value within bounds."""
        return self.activations[index](self.clip(value))

    def parts(self, value: str, *gates: int) -> tuple[str, ...]:
        """Columns cut into pieces of so many gates."""
        sizes = self.b.constant([gate * self.hidden for gate in gates])
        return self.b.multi("Split", [value, sizes], ("",) * len(gates), axis=1)


def product(b: LoweringBuilder, x: str, weight: str, bias: str) -> str:
    """``x Wᵀ + b``."""
    operands = (x, weight, bias) if bias else (x, weight)
    return b.op("Gemm", *operands, transB=1)


# -- cells -----------------------------------------------------------------------------------------

Cell: TypeAlias = Callable[[Kit, Weights, str, State], State]


def rnn(kit: Kit, weights: Weights, x: str, state: State) -> State:
    """``h' = f(x Wᵀ + h Rᵀ + b)``."""
    return (kit.bounded(0, _sum_of_products(kit, weights, x, state[0])),)


def lstm(kit: Kit, weights: Weights, x: str, state: State) -> State:
    """Long short-term memory; the state is ``(h, c)``."""
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
    """Gated recurrent unit: ``h' = (1 − z) g(…) + z h``."""
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
    """One of the three operators.

    Attributes:
        cell: Its step.
        gates: Blocks of rows in its weights.
        states: Values that go from step to step.
        activations: The default ones.
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

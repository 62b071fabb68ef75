"""Unrolls LSTM, GRU and RNN over the sequence length of the sample run.

Every gate matrix is sliced from its parameter once and used in every step, as the weight of a dense
layer. The rows of the weights are the gates, in the order of ONNX. Both products of a step have a
bias in the file, so each product is a dense layer with one use in every step. The batch size
remains dynamic, and the length is fixed. For another length, the node that splits the steps fails,
and its name gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import TypeAlias

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder, split_steps
from kfac_engine.autodiff.rules.attributes import integer, number, text
from kfac_engine.graph.structure import Node

Activation: TypeAlias = Callable[[str], str]


def activations(b: LoweringBuilder, node: Node, names: tuple[str, ...]) -> tuple[Activation, ...]:
    """Return a function for each name that writes the activation with the parameters of ``node``.

    Case is ignored. An unknown name, or a missing parameter without a default, raises
    UnsupportedOpError.
    """
    alphas, betas = (_listed(node, f"activation_{key}") for key in ("alpha", "beta"))
    functions: list[Activation] = []
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise b.refuse(node, f"it has the unknown activation '{name}'")
        write, *defaults = _ACTIVATIONS[name.lower()]
        numbers = [
            next(listed, default)
            for listed, default in zip((alphas, betas), defaults, strict=False)
        ]
        if any(map(isnan, numbers)):
            raise b.refuse(node, f"it does not list the parameters of its activation '{name}'")
        functions.append(partial(write, b, node, *numbers))
    return tuple(functions)


def clipping(b: LoweringBuilder, node: Node) -> Activation:
    """Return a function that clips values by the attribute ``clip``; the identity without it."""
    bound = number(node, "clip", 0)
    if not bound:
        return lambda value: value
    low, high = (b.scalar(limit, node.inputs[0]) for limit in (-bound, bound))
    return lambda value: b.op("Clip", value, low, high)


def _listed(node: Node, name: str) -> Iterator[float]:
    values = node.attributes.get(name, ())
    assert isinstance(values, tuple)
    return map(float, values)


def _plain(op: str) -> Callable[[LoweringBuilder, Node, str], str]:
    return lambda b, node, x: b.op(op, x)


def _leaky(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    return b.op("LeakyRelu", x, alpha=alpha)


def _elu(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    return b.op("Elu", x, alpha=alpha)


def _thresholded(b: LoweringBuilder, node: Node, alpha: float, x: str) -> str:
    """Write the nodes of ThresholdedRelu: ``x`` where ``x > α``, else zero."""
    above = b.op("Greater", x, b.scalar(alpha, node.inputs[0]))
    return b.op("Where", above, x, b.scalar(0, node.inputs[0]))


def _hard_sigmoid(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    return b.op("HardSigmoid", x, alpha=alpha, beta=beta)


def _affine(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """Write the nodes of ``α x + β``."""
    slope, shift = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Add", b.op("Mul", x, slope), shift)


def _scaled_tanh(b: LoweringBuilder, node: Node, alpha: float, beta: float, x: str) -> str:
    """Write the nodes of ``α tanh(β x)``."""
    outer, inner = (b.scalar(value, node.inputs[0]) for value in (alpha, beta))
    return b.op("Mul", b.op("Tanh", b.op("Mul", x, inner)), outer)


# A function and the defaults of alpha and beta. A default is NaN if ONNX Runtime and the
# specification differ: the default threshold of ThresholdedRelu is 0 in ONNX Runtime and 1 in ONNX.
_Row: TypeAlias = tuple[Callable[..., str], *tuple[float, ...]]
_ACTIVATIONS: Mapping[str, _Row] = {
    "relu": (_plain("Relu"),),
    "tanh": (_plain("Tanh"),),
    "sigmoid": (_plain("Sigmoid"),),
    "softsign": (_plain("Softsign"),),
    "softplus": (_plain("Softplus"),),
    "leakyrelu": (_leaky, 0.01),
    "thresholdedrelu": (_thresholded, nan),
    "elu": (_elu, 1.0),
    "hardsigmoid": (_hard_sigmoid, 0.2, 0.5),
    "affine": (_affine, nan, nan),
    "scaledtanh": (_scaled_tanh, nan, nan),
}


State: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of one direction."""

    W: str  # weights of the input, ``(gates·h, d)``
    # Weights of the state, ``(gates·h, h)``. A GRU that resets the state before the product has two
    # parts, for the gates and for the candidate.
    R: tuple[str, ...]
    bias_w: str  # bias of the product with ``W``; ``""`` without a bias
    bias_r: tuple[str, ...]  # biases of the products with ``R``
    # Weights ``(h,)`` of an LSTM for input, output and forget gate; ``""`` if omitted.
    peepholes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kit:
    """The parts that a cell needs to write a step."""

    b: LoweringBuilder  # receives the nodes
    node: Node  # the recurrent node
    hidden: int  # size of the state
    activations: tuple[Activation, ...]  # functions that write the activations f, g and h
    clip: Activation  # function that clips the operands of f and g; the identity without ``clip``

    def one_minus(self, value: str) -> str:
        return self.b.op("Sub", self.b.scalar(1, self.node.inputs[0]), value)

    def bounded(self, index: int, value: str) -> str:
        """Write activation ``index`` of a clipped value."""
        return self.activations[index](self.clip(value))

    def parts(self, value: str, *gates: int) -> tuple[str, ...]:
        """Split the columns into parts of whole gates, and return their names.

        ``gates`` is the number of gates of each part.
        """
        return self.b.split(value, [gate * self.hidden for gate in gates], axis=1)


def product(b: LoweringBuilder, x: str, weight: str, bias: str) -> str:
    """Write ``x Wᵀ + b``."""
    operands = (x, weight, bias) if bias else (x, weight)
    return b.op("Gemm", *operands, transB=1)


# -- cells -----------------------------------------------------------------------------------------

Cell: TypeAlias = Callable[[Kit, RecurrentWeights, str, State], State]


def rnn(kit: Kit, weights: RecurrentWeights, x: str, state: State) -> State:
    """Write ``h' = f(x Wᵀ + h Rᵀ + b)``."""
    return (kit.bounded(0, _sum_of_products(kit, weights, x, state[0])),)


def lstm(kit: Kit, weights: RecurrentWeights, x: str, state: State) -> State:
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


def gru(kit: Kit, weights: RecurrentWeights, x: str, state: State) -> State:
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


def _sum_of_products(kit: Kit, weights: RecurrentWeights, x: str, h: str) -> str:
    from_x = product(kit.b, x, weights.W, weights.bias_w)
    return kit.b.op("Add", from_x, product(kit.b, h, weights.R[0], weights.bias_r[0]))


# -- sequences -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of LSTM, GRU or RNN."""

    cell: Cell  # function that writes a step
    gates: int  # number of blocks of rows in the weights
    states: int  # number of states
    activations: tuple[str, ...]  # default activations


KINDS: Mapping[str, Kind] = {
    "RNN": Kind(rnn, 1, 1, ("Tanh",)),
    "GRU": Kind(gru, 3, 1, ("Sigmoid", "Tanh")),
    "LSTM": Kind(lstm, 4, 2, ("Sigmoid", "Tanh", "Tanh")),
}


# The increments of the step index, for each direction.
_DIRECTIONS = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}
_OPERANDS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


@lowering("LSTM", "GRU", "RNN")
def recurrent(b: LoweringBuilder, node: Node) -> None:
    """Write Gemm and activations for each step of the sample run."""
    _Unrolled(b, node).write()


class _Unrolled:
    """Writes the unrolled steps of an LSTM, GRU or RNN node."""

    def __init__(self, b: LoweringBuilder, node: Node) -> None:
        self._builder, self._node = b, node
        self._kind = KINDS[node.op]
        self._operands = dict(zip(_OPERANDS, node.inputs, strict=False))
        self._hidden = b.facts[self._operands["R"]].shape[2]
        self._signs = _DIRECTIONS[text(node, "direction", "forward")]
        self._zero, self._one = b.constant([0]), b.constant([1])

    def write(self) -> None:
        """Write all steps in all directions, and then the named results."""
        b, node = self._builder, self._node
        weights, states, kits = self._weights(), self._initial_states(), self._kits()
        inputs = split_steps(b, node, self._operands["X"], axis=0)
        masks = self._masks(len(inputs))
        sequences = []
        for index, sign in enumerate(self._signs):
            outputs = []
            for x, mask in list(zip(inputs, masks, strict=True))[::sign]:
                new = self._kind.cell(kits[index], weights[index], x, states[index])
                states[index] = self._chosen(mask, new, states[index])
                outputs.append(self._valid(mask, states[index][0]))
            sequences.append(outputs[::sign])
        sequence, *finals = node.outputs
        if sequence:
            self._write_sequence(sequences, sequence)
        for name, parts in zip(finals, zip(*states, strict=True), strict=False):
            if name:
                rows = (b.op("Unsqueeze", part, self._zero) for part in parts)
                b.op("Concat", *rows, result=name, axis=0)

    # -- operands of a step ----------------------------------------------------------------------

    def _weights(self) -> list[RecurrentWeights]:
        roles = (self._per_direction(role) for role in ("W", "R", "B", "P"))
        return [self._weights_of(*operands) for operands in zip(*roles, strict=True)]

    def _weights_of(self, W: str, R: str, B: str, P: str) -> RecurrentWeights:
        gates = self._kind.gates
        bias_w, bias_r = self._cut(B, gates, gates)
        resets = self._node.op == "GRU" and not integer(self._node, "linear_before_reset", 0)
        blocks = (2, 1) if resets else (gates,)
        return RecurrentWeights(W, self._cut(R, *blocks), bias_w, self._cut(bias_r, *blocks),
                       self._cut(P, 1, 1, 1))  # fmt: skip

    def _initial_states(self) -> list[State]:
        roles = ("initial_h", "initial_c")[: self._kind.states]
        zeros = ""
        if not all(self._operands.get(role) for role in roles):
            x = self._operands["X"]
            batch = self._builder.op("Shape", x, start=1, end=2)
            shape = self._builder.op(
                "Concat", batch, self._builder.constant([self._hidden]), axis=0
            )
            zero = np.zeros(1, self._builder.facts[x].dtype)
            zeros = self._builder.op("ConstantOfShape", shape, value=zero)
        initial = (self._per_direction(role) for role in roles)
        return [tuple(name or zeros for name in state) for state in zip(*initial, strict=True)]

    def _kits(self) -> list[Kit]:
        """Return the operands of the cell for each direction."""
        b, node, default = self._builder, self._node, self._kind.activations
        names = node.attributes.get("activations") or default * len(self._signs)
        assert isinstance(names, tuple)
        count = len(default)
        if len(names) != count * len(self._signs):
            raise b.refuse(
                node, f"it lists {len(names)} activations, but each direction needs {count}"
            )
        functions = activations(b, node, tuple(map(str, names)))
        clip = clipping(b, node)
        return [
            Kit(b, node, self._hidden, functions[start : start + count], clip)
            for start in range(0, len(names), count)
        ]

    def _per_direction(self, role: str) -> tuple[str, ...]:
        """Write the parts of an operand for all directions; return ``""`` for omitted operands."""
        name, count = self._operands.get(role, ""), len(self._signs)
        if not name:
            return ("",) * count
        if count == 1:
            return (self._builder.op("Squeeze", name, self._zero),)
        pieces = self._builder.split(name, [1] * count, axis=0)
        return tuple(self._builder.op("Squeeze", piece, self._zero) for piece in pieces)

    def _cut(self, value: str, *gates: int) -> tuple[str, ...]:
        """Split the rows into parts of whole gates; return ``""`` for an omitted value."""
        if not value or len(gates) == 1:
            return (value,) * len(gates)
        return self._builder.split(value, [count * self._hidden for count in gates], axis=0)

    # -- examples of several lengths ---------------------------------------------------------------

    def _masks(self, length: int) -> list[str]:
        """Write a mask ``(n, 1)`` of unfinished examples for each step; ``""`` without lengths."""
        lengths = self._operands.get("sequence_lens", "")
        known = self._builder.graph.constants.get(lengths)
        if not lengths or (known is not None and (known == length).all()):
            return [""] * length
        column = self._builder.op("Unsqueeze", lengths, self._one)
        dtype = self._builder.facts[lengths].dtype.name
        return [
            self._builder.op("Less", self._builder.constant(t, dtype), column)
            for t in range(length)
        ]

    def _chosen(self, mask: str, new: State, old: State) -> State:
        """Write the new state of unfinished examples and the old state of finished examples."""
        if not mask:
            return new
        pairs = zip(new, old, strict=True)
        return tuple(self._builder.op("Where", mask, after, before) for after, before in pairs)

    def _valid(self, mask: str, h: str) -> str:
        """Write the output of a step: zero for finished examples."""
        if not mask:
            return h
        return self._builder.op("Where", mask, h, self._builder.scalar(0, self._operands["X"]))

    # -- results -----------------------------------------------------------------------------------

    def _write_sequence(self, sequences: Sequence[Sequence[str]], result: str) -> None:
        """Write the outputs of all steps, ``(steps, directions, n, h)``."""
        b = self._builder
        shape = b.constant([len(sequences[0]), 1, -1, self._hidden])
        rows = [b.op("Reshape", b.op("Concat", *outputs, axis=0), shape) for outputs in sequences]
        b.op("Concat", *rows, result=result, axis=1)

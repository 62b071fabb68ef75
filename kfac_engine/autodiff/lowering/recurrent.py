"""Unrolls LSTM, GRU and RNN over the sequence length of the sample run.

Every gate matrix is sliced from its parameter once and used in every step, as the weight of a dense
layer. The batch size remains dynamic, and the length is fixed. For another length, the node that
splits the steps fails, and its name gives the reason.
"""

from collections.abc import Sequence

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.lowering.recurrent_activations import activations, clipping
from kfac_engine.autodiff.lowering.recurrent_cells import KINDS, Kit, State, Weights
from kfac_engine.autodiff.lowering.steps import split_steps
from kfac_engine.autodiff.rules.attributes import integer, text
from kfac_engine.graph.structure import Node

# The increments of the step index, for each direction.
_DIRECTIONS = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}
_OPERANDS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


@lowering("LSTM", "GRU", "RNN")
def recurrent(b: LoweringBuilder, node: Node) -> None:
    """Write Gemm and activations for each step of the sample run."""
    _Unrolled(b, node).write()


class _Unrolled:
    """Writes the unrolled steps of a recurrent node.

    Args:
        b: Receives the nodes.
        node: LSTM, GRU or RNN.
    """

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

    def _weights(self) -> list[Weights]:
        roles = (self._per_direction(role) for role in ("W", "R", "B", "P"))
        return [self._weights_of(*operands) for operands in zip(*roles, strict=True)]

    def _weights_of(self, W: str, R: str, B: str, P: str) -> Weights:
        gates = self._kind.gates
        bias_w, bias_r = self._cut(B, gates, gates)
        resets = self._node.op == "GRU" and not integer(self._node, "linear_before_reset", 0)
        blocks = (2, 1) if resets else (gates,)
        return Weights(W, self._cut(R, *blocks), bias_w, self._cut(bias_r, *blocks),
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
        sizes = self._builder.constant([1] * count)
        pieces = self._builder.multi("Split", [name, sizes], ("",) * count, axis=0)
        return tuple(self._builder.op("Squeeze", piece, self._zero) for piece in pieces)

    def _cut(self, value: str, *gates: int) -> tuple[str, ...]:
        """Write parts of the rows with ``gates`` gates each; return ``""`` for an omitted value."""
        if not value or len(gates) == 1:
            return (value,) * len(gates)
        sizes = self._builder.constant([count * self._hidden for count in gates])
        return self._builder.multi("Split", [value, sizes], ("",) * len(gates), axis=0)

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
        """Write the output of a step, which is zero for finished examples."""
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

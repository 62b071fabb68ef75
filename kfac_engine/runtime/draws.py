"""Computes a forward pass's random numbers as hashes of the seed, pass, node and place.

ONNX Runtime seeds its generators when a session is built, so that a resumed run would draw other
numbers than a run without interruption. Its Dropout also keeps or drops the first entry in every
pass. Sessions therefore compute the hash, and read its start as an input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.autodiff.training_form import draws
from kfac_engine.graph.structure import Fact, Graph, Input, Node
from kfac_engine.recording.operations import Draws, new_tape
from kfac_engine.recording.random_nodes import RESULTS, drawn, shape_of_numbers
from kfac_engine.recording.recorded import Recorded, Shape, Tape, size_of

_INTEGER = np.dtype(np.int64)
# The starts of the nodes of a pass are this far apart: a prime.
_NEXT_NODE = 15485863
_SHAPED = ("RandomNormal", "RandomUniform")


@dataclass(slots=True)
class Passes:
    """The forward passes that have drawn random numbers.

    ``OnnxModel.run`` counts them; ``Engine.load`` and an error of a step restore the count.
    """

    seed: int = 0  # seed of the numbers
    count: int = 0  # number of passes so far

    def next(self) -> Array:
        """Return the start of the numbers of the next pass."""
        self.count += 1
        return self._start(self.count)

    def inference(self) -> Array:
        """Return the start of the numbers of every pass in inference form."""
        return self._start(0)

    def _start(self, number: int) -> Array:
        words = np.random.SeedSequence([self.seed, number]).generate_state(1)
        return np.array(words[0] // 2, _INTEGER)


def start_name(graph: Graph) -> str:
    """Return the name of the input with the start of the numbers; no name begins with it."""
    name = "random"
    while any(value.startswith(name) for value in graph.names):
        name += "_"
    return name


def start_input(name: str) -> Input:
    """Return the input with the start of the numbers."""
    return Input(name, _INTEGER, ())


def with_hashes(
    nodes: Sequence[Node], graph: Graph, facts: Mapping[str, Fact], start: str
) -> tuple[tuple[Node, ...], dict[str, Array]]:
    """Return nodes of a graph in which operators compute the random values, and their constants.

    ``start`` is the name of the input with the start of the numbers.
    """
    places = {node.name: k for k, node in enumerate(n for n in graph.nodes if draws(graph, n))}
    written: list[Node] = []
    constants: dict[str, Array] = {}
    for node in nodes:
        if not draws(graph, node):
            written.append(node)
            continue
        place, dtype = places[node.name], facts[node.outputs[0]].dtype
        tape = new_tape(f"{start}/{place}/", dtype if dtype.kind == "f" else np.float32)
        first = Recorded(tape, start, (), _INTEGER) + place * _NEXT_NODE
        if node.op == "Dropout" and node.inputs[2] in graph.constants:
            node = replace(node, inputs=node.inputs[:2])
        _write(tape, node, Draws(tape, first, None), facts)
        written += tape.level.nodes
        constants |= tape.level.constants
    return tuple(written), constants


def _write(tape: Tape, node: Node, numbers: Draws, facts: Mapping[str, Fact]) -> None:
    """Write the results of a random node."""

    def read(name: str) -> Recorded:
        return Recorded(tape, name, _sizes(tape, name, facts), facts[name].dtype)

    fixed = integers(node, "shape", ())
    like = fixed if node.op in _SHAPED else _sizes(tape, node.inputs[0], facts)
    results = RESULTS[node.op](node, drawn(numbers, node, shape_of_numbers(node, like)), read)
    for name, result in zip(node.outputs, results, strict=False):
        if name:
            value = result.astype(facts[name].dtype, copy=False)
            tape.level.op("Identity", value.name, result=name)


def _sizes(tape: Tape, name: str, facts: Mapping[str, Fact]) -> Shape:
    """Return the sizes of a value, which may differ from its sizes in the sample run."""
    return tuple(size_of(tape, name, axis) for axis in range(len(facts[name].shape)))

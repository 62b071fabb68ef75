"""Recognizes changes that the exporters of PyTorch make to parameters, and equal weights.

The exporters write equal constants once, multiply the scales of normalizations into the weights
before them, and give computed constants names of their own. The file then trains other parameters
than the module. Each note has the line that exports the parameters of the module unchanged.

An exporter may write an embedding table and the transposed output matrix as two constants. The file
does not state whether they must remain equal, so the user decides.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_arrays
from kfac_engine.errors import InputError
from kfac_engine.graph.passes.order import reads
from kfac_engine.graph.structure import Graph, Node
from kfac_engine.printable import quoted

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

REMEDY = "torch.onnx.export(module.eval(), inputs, path, dynamo=True, optimize=False)"
# What to do about parameters that equal no array of the model, by the producer of the file.
_REMEDIES = {
    "pytorch": f"export with {REMEDY}",
    "skl2onnx": "pass the arrays of the fitted estimator (coefs_ and intercepts_, or coef_ and "
    "intercept_)",
}
_GENERATED = re.compile(r"onnx::\w+_\d+|val_\d+")
# Names of constants that a module computes with and that are not among its tensors.
_COMPUTED = re.compile(r"val_\d+|(c_)?lifted_tensor_\d+|(/.*)?/Constant(_\d+)?_output_\d+")
_FOLDED_WEIGHT = re.compile(r"onnx::(?:Conv|ConvTranspose)_\d+")
_AFFINE = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# The metadata with the path of modules of a node, as the representation of a list in Python.
_SCOPES = "pkg.torch.onnx.name_scopes"
# Largest number of names in a note.
_MOST_NAMES = 4


def is_generated(name: str) -> bool:
    """Return whether an exporter of PyTorch gives this name to computed constants."""
    return _GENERATED.fullmatch(name) is not None


def is_computed(name: str) -> bool:
    """Return whether an exporter of PyTorch gives this name to constants of computations only.

    Such constants are numbers in the code of a module, and results of its parameters.
    """
    return _COMPUTED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ExportChanges:
    """Parameters of a file that differ from the parameters of the module."""

    # Parameters that several modules read, because their weights had equal values.
    merged: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()  # weights into which a normalization was multiplied
    generated: tuple[str, ...] = ()  # other parameters with a name that the exporter generated
    producer: str = ""  # the producer that the file names
    unread: tuple[str, ...] = ()  # inputs without a reader, beside a read input of equal form

    @property
    def remedy(self) -> str:
        """What to do about a parameter that equals no array of the model."""
        return _REMEDIES.get(self.producer, "export the parameters with the names of the model")

    @property
    def notes(self) -> tuple[str, ...]:
        """One clause for each kind of change, with the effect and the remedy."""
        rows = (
            (self.merged, "merged weights with equal values into", "one gradient is the sum of "
             "those of several weights, unless the module itself shares them"),
            (self.folded, "folded a normalization into", "the file has no parameters of "
             "normalizations, and trains the products"),
            (self.generated, "computed and renamed", "names and layouts differ from those of the "
             "module; match_parameters converts them"),
        )  # fmt: skip
        changes = tuple(
            f"the exporter {change} {quoted(names, _MOST_NAMES)}: {effect}. Export the parameters "
            f"of the module with {REMEDY}"
            for names, change, effect in rows
            if names
        )
        if not self.unread:
            return changes
        return (
            *changes,
            f"the model does not read {quoted(self.unread, _MOST_NAMES)}: the values have no "
            f"effect. If the module reads them, one tensor was the example of several inputs, and "
            f"the exporter made them one. Export with a tensor of its own for each input",
        )


def export_changes(
    model: "ModelProto", constants: Mapping[str, Array], parameters: Iterable[str]
) -> ExportChanges:
    """Return the parameters that the PyTorch exporter merged, folded or generated.

    Such parameters are not parameters of the module. The result also has the inputs that the
    exporter left without a reader. Files of other producers have no changes. The
    initializers of ``model`` need no data.
    """
    if model.producer_name != "pytorch":
        return ExportChanges(producer=model.producer_name)
    names = dict.fromkeys(parameters)
    graph = model.graph
    merged = sorted({*_identities(graph, constants, names), *_siblings(graph, constants, names)})
    folded = tuple(dict.fromkeys(_folded(graph, names)))
    generated = tuple(n for n in names if is_generated(n) and n not in folded)
    unread = tuple(_unread(graph))
    return ExportChanges(tuple(merged), folded, generated, model.producer_name, unread)


def _unread(graph: "GraphProto") -> Iterator[str]:
    """Yield inputs that nothing reads, if another input of their type and axes is read.

    The newer exporter gives all readers of one example tensor the same input.
    """
    read = {entry.name for entry in graph.output}.union(*map(reads, graph.node))
    stored = {tensor.name for tensor in graph.initializer}
    forms = {entry.name: _form(entry) for entry in graph.input if entry.name not in stored}
    read_forms = {form for name, form in forms.items() if name in read}
    yield from (name for name, form in forms.items() if name not in read and form in read_forms)


def _form(entry: "ValueInfoProto") -> tuple[int, ...]:
    """Return the element type and the sizes of the axes of an input; 0 for an axis that is free."""
    tensor = entry.type.tensor_type
    return (tensor.elem_type, *(axis.dim_value for axis in tensor.shape.dim))


def _identities(
    graph: "GraphProto", constants: Mapping[str, Array], parameters: Container[str]
) -> Iterator[str]:
    """Yield parameters that the older exporter copies to other names by Identity nodes.

    Tied weights have such nodes as well. Their names differ in more than numbers.
    """
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in parameters:
            name = node.input[0]
            alike = without_numbers(name) == without_numbers(node.output[0])
            if alike or _is_one_number(constants[name]):
                yield name


def _siblings(
    graph: "GraphProto", constants: Mapping[str, Array], parameters: Container[str]
) -> Iterator[str]:
    """Yield parameters that several modules read, by the metadata of the newer exporter.

    A module that is used twice has this form as well. It counts as merged only in a file in which
    the exporter computed constants, because without ``optimize`` it merges nothing.
    """
    optimized = any(re.fullmatch(r"val_\d+", entry.name) for entry in graph.initializer)
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        scope = module_path(node)
        for name in node.input:
            if scope and name in parameters:
                readers.setdefault(name, set()).add(scope)
    for name, scopes in readers.items():
        alike = len({without_numbers(scope) for scope in scopes}) == 1
        if len(scopes) > 1 and ((optimized and alike) or _is_one_number(constants[name])):
            yield name


def _folded(graph: "GraphProto", parameters: Container[str]) -> Iterator[str]:
    """Yield weights into which a normalization was multiplied."""
    for node in graph.node:
        if node.op_type not in _AFFINE or len(node.input) < 2 or node.input[1] not in parameters:
            continue
        # The older exporter renames weight and bias; only the weight has a computed form otherwise.
        renamed = len(node.input) > 2 and all(map(_FOLDED_WEIGHT.fullmatch, node.input[1:3]))
        if renamed or "batch_norm" in _scopes(node)[-1]:
            yield node.input[1]


def module_path(node: "NodeProto") -> str:
    """Return the module that a node belongs to, without the number of a repeated call."""
    scopes = _scopes(node)
    return scopes[-2].partition("@")[0] if len(scopes) > 1 else ""


def _scopes(node: "NodeProto") -> list[str]:
    entries = (entry.value for entry in node.metadata_props if entry.key == _SCOPES)
    return re.findall(r"'([^']*)'", next(entries, "")) or [""]


def without_numbers(name: str) -> str:
    """Return a name with each number replaced; copies of a layer then have equal names."""
    return re.sub(r"\d+", "#", name)


def _is_one_number(array: Array) -> bool:
    return bool((array == array.flat[0]).all()) if array.size else False


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight and its copy."""

    first: str  # name of the weight that is first in the file
    copy: str  # name of the later weight with equal values
    transposed: bool = False  # whether the copy is the transpose of the weight

    def as_copy(self, array: Array) -> Array:
        """Convert an array from the layout of the weight to the layout of the copy, or back."""
        return array.T if self.transposed else array


def find_ties(constants: Mapping[str, Array], names: Iterable[str]) -> tuple[Tie, ...]:
    """Return a tie for each weight that equals an earlier weight or its transpose.

    Only weights with at least two axes are tied. Arrays of one repeated number are not tied,
    because different weights are initialized with ones or zeros.
    """
    alike: dict[object, list[str]] = {}
    ties: list[Tie] = []
    for name in names:
        array = constants[name]
        if array.ndim < 2 or not array.size or _is_one_number(array):
            continue
        # Shape, first entry and last entry distinguish nearly all arrays without a full comparison.
        ends = array[(0,) * array.ndim].tobytes(), array[(-1,) * array.ndim].tobytes()
        firsts = alike.setdefault((array.dtype, tuple(sorted(array.shape)), ends), [])
        candidates = (tie for first in firsts for tie in _ties_of(constants, first, name))
        tie = next(candidates, None)
        ties += [tie] if tie else []
        if not tie:
            firsts.append(name)
    return tuple(ties)


def tied(graph: Graph, ties: Sequence[Tie]) -> Graph:
    """Return a graph in which every copy is computed from its original weight."""
    copies = {tie.copy for tie in ties}
    views = tuple(
        Node(
            "Transpose" if tie.transposed else "Identity",
            (tie.first,),
            (tie.copy,),
            name=f"tie {tie.copy}",
        )
        for tie in ties
    )
    constants = {name: array for name, array in graph.constants.items() if name not in copies}
    return replace(graph, nodes=(*views, *graph.nodes), constants=constants)


def spread(ties: Iterable[Tie], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays together with arrays for the copies, in the layout of the copies."""
    copies = {tie.copy: tie.as_copy(values[tie.first]) for tie in ties if tie.first in values}
    return {**values, **copies}


def merge_ties(ties: Iterable[Tie], values: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays of the original weights in place of the arrays of copies.

    An array for a weight or for one of its copies suffices. Different arrays for a weight and its
    copy raise InputError.
    """
    check_arrays(values)
    merged = dict(values)
    for tie in ties:
        if tie.copy in merged:
            array = tie.as_copy(merged.pop(tie.copy))
            first = merged.setdefault(tie.first, array)
            if first.shape != array.shape or not bool((first == array).all()):
                raise InputError(
                    f"'{tie.copy}' is tied to '{tie.first}' and cannot have another value; pass "
                    f"one of them, or omit tie_weights."
                )
    return merged


def _ties_of(constants: Mapping[str, Array], first: str, name: str) -> Iterable[Tie]:
    a, b = constants[first], constants[name]
    if a.shape == b.shape and np.array_equal(a, b):
        yield Tie(first, name)
    elif a.ndim == b.ndim == 2 and a.shape == b.shape[::-1] and np.array_equal(a, b.T):
        yield Tie(first, name, transposed=True)

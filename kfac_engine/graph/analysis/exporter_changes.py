"""Recognizes changes that the exporters of PyTorch make to parameters.

The exporters write equal constants once, multiply the scales of normalizations into the weights
before them, and give computed constants names of their own. The file then trains other parameters
than the module. Each note has the line that exports the parameters of the module unchanged.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_engine._types import Array

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

REMEDY = "torch.onnx.export(module.eval(), inputs, path, dynamo=True, optimize=False)"
_GENERATED = re.compile(r"onnx::\w+_\d+|val_\d+")
# Names of constants that a module computes with and that are not among its tensors.
_COMPUTED = re.compile(r"val_\d+|(c_)?lifted_tensor_\d+|(/.*)?/Constant(_\d+)?_output_\d+")
_FOLDED_WEIGHT = re.compile(r"onnx::(?:Conv|ConvTranspose)_\d+")
_AFFINE = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# The metadata with the path of modules of a node, as the representation of a list in Python.
_SCOPES = "pkg.torch.onnx.name_scopes"
# Largest number of names in a note.
_MOST_NAMES = 4


def is_computed(name: str) -> bool:
    """Return whether an exporter of PyTorch gives this name to constants of computations only.

    Such constants are numbers in the code of a module, and results of its parameters.
    """
    return _COMPUTED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ExportChanges:
    """Parameters of a file that differ from the parameters of the module.

    Attributes:
        merged: Parameters that several modules read, because their weights had equal values.
        folded: Weights into which a normalization was multiplied.
        generated: Other parameters with a name that the exporter generated.
    """

    merged: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()

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
        return tuple(
            f"the exporter {change} {_listed(names)}: {effect}. Export the parameters of the "
            f"module with {REMEDY}"
            for names, change, effect in rows
            if names
        )


def export_changes(
    model: "ModelProto", constants: Mapping[str, Array], parameters: Iterable[str]
) -> ExportChanges:
    """Return the parameters that the PyTorch exporter merged, folded or generated.

    Such parameters are not parameters of the module. Files of other producers have no changes. The
    initializers of ``model`` need no data.
    """
    if model.producer_name != "pytorch":
        return ExportChanges()
    names = dict.fromkeys(parameters)
    graph = model.graph
    merged = sorted({*_identities(graph, constants, names), *_siblings(graph, constants, names)})
    folded = tuple(dict.fromkeys(_folded(graph, names)))
    generated = tuple(n for n in names if _GENERATED.fullmatch(n) and n not in folded)
    return ExportChanges(tuple(merged), folded, generated)


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
        scope = _module_path(node)
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


def _module_path(node: "NodeProto") -> str:
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


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed

"""Reads from a file which constants its exporter declares not to be parameters.

The newer exporter of PyTorch writes the kind of each tensor of a module: a parameter, a buffer, or
a constant of its code. With ``optimize``, it also writes the constants from which it has computed
another. skl2onnx names the arrays of an estimator that scikit-learn trains.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kfac_engine._types import Array
from kfac_engine.graph.analysis.exporter_changes import is_computed
from kfac_engine.graph.structure import Input
from kfac_engine.graph.write import value_info

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto

# Metadata of a value: the kind of the tensor, and a list of names as Python writes it.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SOURCES = "pkg.onnxscript.optimizer.folded_from"
# Metadata of the graph with one line for each tensor, also for those without metadata of their own.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_LINE = re.compile(r"^(\w+): ([A-Z_]+) target='([^']*)'", re.MULTILINE)
# Metadata of a node: the call in the program of PyTorch, with the names in the first column of the
# signature as arguments.
_CALL = "pkg.torch.onnx.fx_node"
_PARAMETER = "PARAMETER"
# Metadata of an output that is the residual of an equation.
_RESIDUAL = "kfac_engine.residual"
_REASONS = {
    "BUFFER": "a buffer of the module, by the metadata of the file",
    "CONSTANT_TENSOR": "a constant in the code of the module, by the metadata of the file",
}

# Names that skl2onnx and the decomposition of linear models give to what an estimator trains.
_TRAINED = re.compile(r"(coef|coefficient|intercept|intercepts)\d*|.*\.(coefficients|intercepts)")
_FITTED = "not an array of an estimator but one that a transformer of scikit-learn measured"


def declared_constants(model: "ModelProto", constants: Mapping[str, Array]) -> dict[str, str]:
    """Return the reasons why constants are not parameters, as the file states them.

    A reason is a phrase that can follow "it is", and empty for a constant that the file states to
    be a parameter. The initializers of ``model`` need no data.
    """
    if model.producer_name == "skl2onnx":
        trained = {name for name in constants if _TRAINED.fullmatch(name)}
        # Models without such names, as naive Bayes classifiers, give no evidence.
        return {name: _FITTED for name in constants if name not in trained} if trained else {}
    kinds = _kinds(model.graph)
    reasons = {name: _REASONS[kind] for name, kind in kinds.items() if kind in _REASONS}
    merged = _merged(model.graph) if kinds else ()
    stated = (name for name, kind in kinds.items() if kind == _PARAMETER)
    reasons |= {name: "" for name in stated if name not in merged}
    if kinds:
        origins = dict(_entries(model.graph, _SOURCES))
        # A number that the exporter computes from a parameter has an origin. A number without one
        # is written in the code, such as the zero of torch.zeros.
        known = kinds.keys() | origins.keys()
        reasons |= {
            name: _REASONS["CONSTANT_TENSOR"]
            for name, array in constants.items()
            if not array.ndim and name not in known and is_computed(name)
        }
        for name, sources in origins.items():
            listed = re.findall(r"'([^']*)'", sources)
            if all(kinds.get(source) != _PARAMETER for source in (name, *listed)):
                reasons[name] = _computed(listed, kinds)
    return {name: reasons[name] for name in constants if name in reasons}


def declare_residuals(model: "ModelProto") -> None:
    """State in a model, in place, that all its outputs are residuals of equations."""
    for entry in model.graph.output:
        entry.metadata_props.add(key=_RESIDUAL, value="zero without targets")


def declared_residuals(model: "ModelProto") -> frozenset[str]:
    """Return the outputs that are residuals, as ``declare_residuals`` states it."""
    outputs = model.graph.output
    return frozenset(entry.name for entry in outputs if _entry(entry.metadata_props, _RESIDUAL))


def declare_untrained(model: "ModelProto", constants: Mapping[str, Array]) -> None:
    """State in a model, in place, that some of its initializers are not parameters."""
    for name, array in constants.items():
        entry = value_info(Input(name, array.dtype, array.shape))
        entry.metadata_props.add(key=_KIND, value="CONSTANT_TENSOR")
        model.graph.value_info.append(entry)


def merged_buffers(
    graph: "GraphProto", names: Container[str]
) -> Iterator[tuple["NodeProto", int, str]]:
    """Yield operands that are parameters in the file and buffers of the module.

    With ``optimize``, the exporter stores equal arrays once, under the name of the first. Each
    entry is a node, the index of an operand in ``names``, and the name of the buffer. Operands with
    several possible origins are left out.
    """
    signature = _signature(graph)
    programs = {name: program for program, kind, name in signature if kind == _PARAMETER}
    lost = {program: (kind, name) for program, kind, name in signature if name not in names}
    for node in graph.node if lost else ():
        called = set(re.findall(r"%(\w+)", _entry(node.metadata_props, _CALL)))
        origins = [lost[program] for program in called & lost.keys()]
        strangers = [
            index
            for index, name in enumerate(node.input)
            if name in names and name in programs and programs[name] not in called
        ]
        if len(origins) == len(strangers) == 1 and origins[0][0] == "BUFFER":
            yield node, strangers[0], origins[0][1]


def _merged(graph: "GraphProto") -> set[str]:
    """Return the parameters that also stand for other numbers of the module.

    With ``optimize``, the exporter stores equal numbers once, also those in the code: then a node
    reads a parameter that is not an argument of its call. It also stores functions of a parameter,
    which do not follow it.
    """
    programs = {name: program for program, kind, name in _signature(graph) if kind == _PARAMETER}
    merged = {n for _, text in _entries(graph, _SOURCES) for n in re.findall(r"'([^']*)'", text)}
    for node in graph.node if programs else ():
        call = _entry(node.metadata_props, _CALL)
        called = {*re.findall(r"%(\w+)", call)}
        its = (name for name in node.input if call and programs.get(name, "") not in {"", *called})
        merged.update(its)
    return merged


def _kinds(graph: "GraphProto") -> Mapping[str, str]:
    """Return the kinds of tensors that the exporter of PyTorch states, by name."""
    kinds = {name: kind for _, kind, name in _signature(graph)}
    return kinds | dict(_entries(graph, _KIND))


def _signature(graph: "GraphProto") -> list[tuple[str, str, str]]:
    """Return name in the program, kind and name in the module of each tensor of a module."""
    inputs = _entry(graph.metadata_props, _SIGNATURE).partition("# outputs")[0]
    return _LINE.findall(inputs)


def _entries(graph: "GraphProto", key: str) -> Iterator[tuple[str, str]]:
    """Yield the names of values and initializers with an entry of this key, and the entry."""
    for value in (*graph.value_info, *graph.input, *graph.initializer):
        entry = _entry(value.metadata_props, key)
        if entry:
            yield value.name, entry


def _entry(metadata: "Iterable[StringStringEntryProto]", key: str) -> str:
    return next((entry.value for entry in metadata if entry.key == key), "")


def _computed(sources: Sequence[str], kinds: Mapping[str, str]) -> str:
    buffers = [f"'{name}'" for name in sources if kinds.get(name) == "BUFFER"]
    origin = f"the buffer {buffers[0]}" if buffers else "constants in the code"
    return f"computed from {origin} of the module, by the metadata of the file"

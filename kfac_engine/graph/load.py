"""ONNX models in, canonical graphs out.

The road, for a model as read: take the data of its initializers out; inline its functions; order
and check its nodes; make constants of what is spelled as nodes; bring its operators to sets 18 to
26; compute half precision in single; leave protobuf behind; spell out what nothing executes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import onnx

from kfac_engine._types import Array, DType
from kfac_engine.errors import ModelError, UnsupportedError
from kfac_engine.graph.external import ExternalData
from kfac_engine.graph.nodes import canonical_nodes
from kfac_engine.graph.passes.batch_first_rnn import put_steps_first
from kfac_engine.graph.passes.bodies import hoist_weights
from kfac_engine.graph.passes.branches import fold_constant_ifs
from kfac_engine.graph.passes.canonicalize import (
    OLDEST_OPSET,
    check_nodes,
    check_versions,
    inline_functions,
    opset,
    unify_standard_domain,
    upgrade,
)
from kfac_engine.graph.passes.constants import lift_constants
from kfac_engine.graph.passes.decompose import spell_out
from kfac_engine.graph.passes.expansions import check_sizes
from kfac_engine.graph.passes.newer_opsets import executable
from kfac_engine.graph.passes.order import all_nodes, refuse_repeated, sort_nodes
from kfac_engine.graph.passes.shared_constants import separate_statistics
from kfac_engine.graph.passes.upcast import declared_halves, widen
from kfac_engine.graph.read import read_model
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.tensors import (
    element_type,
    is_external,
    nested_tensors,
    to_array,
)
from kfac_engine.graph.write import tensor, value_info

# Larger constants are weights or tables, never shapes, axes or scales: the upgrade need not see
# their values, only their types.
_LARGE_BYTES = 4096

_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    | {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)

# Words that exporters write for an unknown size; they are not symbols.
_NO_SYMBOLS = frozenset({"", "?", "-1", "None"})

# Where a model may come from: a path, the bytes of a file, or a message.
ModelSource: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto


@dataclass(frozen=True)
class LoadedModel:
    """A model as the engine computes with it, and as its file spells it.

    Attributes:
        graph: The canonical form.
        template: The model as read, its initializers without data: that is in
            ``graph.passes.constants``.
        stored: The file's element type of every constant, input and output that is float16 or
            bfloat16 there and float32 in the graph.
    """

    graph: Graph
    template: onnx.ModelProto
    stored: Mapping[str, DType] = field(default_factory=dict)

    @property
    def float_outputs(self) -> tuple[str, ...]:
        """Outputs that the file declares as floating-point numbers."""
        entries = self.template.graph.output
        return tuple(e.name for e in entries if e.type.tensor_type.elem_type in _FLOATS)

    @property
    def output_shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        """Shapes of outputs as the file declares them, where it does."""
        return {
            entry.name: tuple(_side(side) for side in entry.type.tensor_type.shape.dim)
            for entry in self.template.graph.output
            if entry.type.tensor_type.HasField("shape")
        }


def load_graph(source: ModelSource) -> Graph:
    """The canonical graph of a model; see ``load_model``."""
    return load_model(source).graph


def load_model(source: ModelSource) -> LoadedModel:
    """The canonical graph of a model, and what is needed to write the model back.

    Args:
        source: A path, the bytes of a file, or a model, which stays unchanged.

    Returns:
        Both forms.

    Raises:
        ModelError: The file cannot be read, or does not hold a valid model.
        UnsupportedError: The model has inputs, constants or attributes that are no dense tensors.
    """
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    try:
        return _load(read_model(source), path)
    except UnicodeDecodeError as failure:
        # Protobuf passes any bytes for text until someone reads them.
        raise ModelError(
            f"{path or 'the model'} holds a name or text that is not UTF-8 "
            f"({failure.object[:40]!r}); the file is damaged."
        ) from failure


def external_files(path: Path) -> Iterator[Path]:
    """The files of the external data of a model."""
    model = read_model(path)
    functions = (node for function in model.functions for node in function.node)
    nested = nested_tensors((*functions, *model.graph.node))
    for held in (*model.graph.initializer, *nested):
        if is_external(held):
            yield from (path.parent / e.value for e in held.external_data if e.key == "location")


def _load(model: onnx.ModelProto, path: Path | None) -> LoadedModel:
    check_versions(model)
    if model.graph.sparse_initializer:
        name = model.graph.sparse_initializer[0].values.name
        raise UnsupportedError(f"initializer '{name}' is sparse; store it as a dense tensor.")
    refuse_repeated((entry.name for entry in model.graph.initializer), "initializers")
    external = ExternalData(path) if path else None
    constants = {entry.name: to_array(entry, external) for entry in model.graph.initializer}
    template = _template(model, external)
    separate_statistics(template, constants)
    working, filled, inner = _canonical(template, constants)
    _decode_all(working.graph, template)
    stored = declared_halves((*template.graph.input, *template.graph.output))
    stored |= widen(working.graph, constants)
    return LoadedModel(
        graph=Graph(
            nodes=spell_out(canonical_nodes(working.graph.node), constants),
            inputs=tuple(_inputs(working.graph.input, constants, stored)),
            outputs=tuple(entry.name for entry in working.graph.output),
            constants=constants,
            opset=opset(working),
            name=path.name if path else _text(model.graph.name) or "model",
            domains={entry.domain: entry.version for entry in working.opset_import if entry.domain},
            filled=filled,
            inner=inner,
        ),
        template=template,
        stored=stored,
    )


def _template(model: onnx.ModelProto, external: ExternalData | None) -> onnx.ModelProto:
    """``model``, which is used up, without the data of its initializers; the rest is complete."""
    stubs = [
        onnx.TensorProto(name=entry.name, data_type=entry.data_type, dims=entry.dims)
        for entry in model.graph.initializer
    ]
    del model.graph.initializer[:]
    model.graph.initializer.extend(stubs)
    # A message keeps the memory of deleted fields: only a new one is small.
    template = onnx.ModelProto()
    template.ParseFromString(model.SerializeToString())
    functions = (node for function in template.functions for node in function.node)
    for nested in nested_tensors((*functions, *template.graph.node)):
        if is_external(nested):
            nested.CopyFrom(tensor(to_array(nested, external), nested.name))
    return template


def _canonical(
    template: onnx.ModelProto, constants: dict[str, Array]
) -> tuple[onnx.ModelProto, frozenset[str], frozenset[str]]:
    """``template`` in the canonical form.

    Args:
        template: Unchanged.
        constants: Grows by what was written as nodes.

    Returns:
        A copy in the canonical spelling; the names of constants that are filled, and of those that
        bodies hold.
    """
    # Inputs of its graph are the data and the large constants.
    working = onnx.ModelProto()
    working.CopyFrom(template)
    _declare_constants(working.graph, constants)
    working = inline_functions(working)
    unify_standard_domain(working)
    sort_nodes(working.graph)
    filled = lift_constants(working.graph, constants)
    inner = hoist_weights(working.graph, constants)
    check_sizes(working.graph, constants)
    _declare_constants(working.graph, constants)
    check_nodes(working)
    working = executable(working)
    filled |= lift_constants(working.graph, constants)
    while fold_constant_ifs(working.graph, constants):
        filled |= lift_constants(working.graph, constants)
    if opset(working) < OLDEST_OPSET:
        _declare_constants(working.graph, constants)
        working = upgrade(working)
        constants.update((entry.name, to_array(entry)) for entry in working.graph.initializer)
        filled |= lift_constants(working.graph, constants)
    put_steps_first(working.graph)
    return working, filled, inner


def _declare_constants(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> None:
    """Make small constants initializers of ``graph`` and large ones inputs."""
    data = [entry for entry in graph.input if entry.name not in constants]
    large = {name: a for name, a in constants.items() if a.nbytes > _LARGE_BYTES}
    declared = [value_info(Input(name, a.dtype, a.shape)) for name, a in large.items()]
    small = [tensor(a, name) for name, a in constants.items() if name not in large]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(small)
    graph.input.extend([*data, *declared])


def _inputs(
    entries: Iterable[onnx.ValueInfoProto],
    constants: Mapping[str, Array],
    stored: Mapping[str, DType],
) -> Iterator[Input]:
    for entry in entries:
        if entry.name in constants:
            continue
        if not entry.type.HasField("tensor_type"):
            kind = entry.type.WhichOneof("value") or "untyped"
            raise UnsupportedError(
                f"input '{entry.name}' is no dense tensor ({kind}); only tensors can be fed."
            )
        form = entry.type.tensor_type
        dtype = element_type(form.elem_type, f"input '{entry.name}'")
        shape = tuple(_side(side) for side in form.shape.dim) if form.HasField("shape") else None
        yield Input(entry.name, dtype, shape, stored.get(entry.name))


def _side(side: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """A size or a symbol; old exporters write -1 for a size they do not know, others a word."""
    if side.HasField("dim_value"):
        return side.dim_value if side.dim_value >= 0 else None
    unknown = side.dim_param in _NO_SYMBOLS or side.dim_param.startswith("unk__")
    return None if unknown else side.dim_param


def _decode_all(working: onnx.GraphProto, template: onnx.ModelProto) -> None:
    """Read all names once, so that a damaged one is found here."""
    for imported in template.opset_import:
        _text(imported.domain)
    for entry in (*template.graph.input, *template.graph.output):
        for side in entry.type.tensor_type.shape.dim:
            _text(side.dim_param)
    for node in all_nodes(working.node):
        keys = (entry.name for entry in node.attribute)
        for value in (node.name, node.op_type, node.domain, *node.input, *node.output, *keys):
            _text(value)


def _text(value: str | bytes) -> str:
    """Text of a message, which protobuf hands out as bytes where it is not UTF-8."""
    return value.decode() if isinstance(value, bytes) else value

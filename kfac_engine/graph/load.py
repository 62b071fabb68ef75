"""Reads ONNX models and converts them to canonical graphs.

The steps are, in this order: separate the data of the initializers, inline functions, sort and
check the nodes, lift constants that are written as nodes, convert the operators to sets 18 to 26,
convert half precision to single precision, convert protobuf to plain values, and decompose
operators that ONNX Runtime cannot execute.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs

from kfac_engine._types import Array, DType
from kfac_engine.errors import InputError, ModelError, UnsupportedError
from kfac_engine.graph.analysis.declared_constants import declared_constants, declared_residuals
from kfac_engine.graph.files import ExternalData
from kfac_engine.graph.nodes import canonical_nodes
from kfac_engine.graph.passes.bodies import fold_constant_ifs, hoist_weights
from kfac_engine.graph.passes.canonicalize import (
    OLDEST_OPSET,
    check_nodes,
    check_versions,
    inline_functions,
    opset,
    put_steps_first,
    unify_standard_domain,
    upgrade,
)
from kfac_engine.graph.passes.constants import lift_constants, settle_statistics
from kfac_engine.graph.passes.decompose import decompose
from kfac_engine.graph.passes.expansions import check_sizes
from kfac_engine.graph.passes.newer_opsets import executable
from kfac_engine.graph.passes.order import all_nodes, refuse_repeated, sort_nodes
from kfac_engine.graph.passes.train_form import in_train_form
from kfac_engine.graph.passes.upcast import declared_halves, upcast
from kfac_engine.graph.passes.weight_places import settle_places
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.tensors import densified, element_type, is_external, nested_tensors, to_array
from kfac_engine.graph.write import MAX_BYTES, tensor, value_info
from kfac_engine.system.memory_limits import require_memory, spelled
from kfac_engine.system.reading import check_file

# Formats that users pass by mistake, by their first bytes.
_OTHER_FORMATS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"PK\x03\x04": "a ZIP archive (.npz, .pt and .keras files are such)",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x80\x02": "a Python pickle",
    b"%PDF": "a PDF document",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with 'git lfs pull'",
}


def read_model(source: "str | os.PathLike[str] | bytes | onnx.ModelProto") -> onnx.ModelProto:
    """Return the message of a model, without checks and without external data.

    ``source`` is a path, the bytes of a file, or a message. The result is new, so the caller may
    change it.
    """
    if isinstance(source, onnx.ModelProto):
        return deepcopy(source)
    if isinstance(source, bytes):
        return _parse(source, "the given bytes object")
    if isinstance(source, str | os.PathLike):
        return _parse(_read(Path(source)), f"'{os.fspath(source)}'")
    raise InputError(
        f"a model must be a path, bytes or an onnx.ModelProto, got {type(source).__name__}; export "
        f"the model to a file first."
    )


def _read(path: Path) -> bytes:
    check_file(path, ModelError)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(
                f"'{path}' is larger than 2 GB, the limit of the format; save its weights as "
                f"external data."
            )
        return path.read_bytes()
    except OSError as failure:
        raise ModelError(f"'{path}' cannot be read: {failure.strerror}.") from failure


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{what} is empty, so it contains no ONNX model.")
    for start, kind in _OTHER_FORMATS.items():
        if data.startswith(start):
            raise ModelError(f"{what} is {kind}, not an ONNX model.")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as failure:
        raise ModelError(
            f"{what} is not an ONNX model or is truncated: its {len(data)} bytes do not parse."
        ) from failure
    if not model.HasField("graph"):
        raise ModelError(f"{what} is not an ONNX model: it contains no graph.")
    return model


# How often the bytes of a model are in memory while it is read: as they are in the file and as a
# message, or as a message and as arrays.
_COPIES = 2

# Largest size of a constant that may be a shape, axes or a scale. The upgrade reads only the types
# of larger constants.
_LARGE_BYTES = 4096

_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    | {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)

# What to do about a name of two values, by the producer of the file.
_REPEATED = {
    "pytorch": "PyTorch's exporter gives a result the name of a buffer or parameter: export with "
    "optimize=True, or rename the tensor in the module"
}

# Strings that exporters write for an unknown size; they are not symbols.
_NO_SYMBOLS = frozenset({"", "?", "-1", "None"})

# A model as a path, the bytes of a file, or a protobuf message.
ModelSource: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto


@dataclass(frozen=True)
class LoadedModel:
    """A canonical graph with the message that it was read from."""

    graph: Graph  # the canonical graph
    # The message as read, without the data of its initializers; the data are in
    # ``graph.constants``.
    template: onnx.ModelProto
    # Element types in the file, for constants, inputs and outputs that are float16 or bfloat16 in
    # the file and float32 in the graph.
    stored: Mapping[str, DType] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # notes on nodes that cannot be put into training form
    # The file of the model and its external data; empty for a model from memory.
    files: tuple[Path, ...] = ()

    @property
    def float_outputs(self) -> tuple[str, ...]:
        """Names of outputs that the file declares as floating-point tensors."""
        entries = self.template.graph.output
        return tuple(e.name for e in entries if e.type.tensor_type.elem_type in _FLOATS)

    @property
    def output_shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        """Declared shapes of outputs, by name; outputs without a declared shape are absent."""
        return {
            entry.name: tuple(axis_size(dim) for dim in entry.type.tensor_type.shape.dim)
            for entry in self.template.graph.output
            if entry.type.tensor_type.HasField("shape")
        }


def load_graph(source: ModelSource) -> Graph:
    """Return the canonical graph of a model; argument and errors as in ``load_model``."""
    return load_model(source).graph


def load_model(source: ModelSource, *, train_form: bool = False) -> LoadedModel:
    """Return the canonical graph of a model, with the message of the file.

    With ``train_form``, normalizations and dropouts in the graph have their training form, and a
    model without any raises InputError. The message keeps the form of the file. A message as
    ``source`` is not changed.
    """
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    _require_room(source)
    with _decoding(path):
        return _load(read_model(source), path, train_form)


def declared_values(source: ModelSource) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    """Return the inputs and the names of the outputs of a model, as ``load_model`` does.

    Nothing else is checked, and external data are not read.
    """
    _require_room(source)
    with _decoding(Path(source) if isinstance(source, str | os.PathLike) else None):
        graph = (source if isinstance(source, onnx.ModelProto) else read_model(source)).graph
        sparse = (entry.values for entry in graph.sparse_initializer)
        constants = {entry.name for entry in (*graph.initializer, *sparse)}
        inputs = tuple(_inputs(graph.input, constants, {}))
        return inputs, tuple(_text(entry.name) for entry in graph.output)


@contextmanager
def _decoding(path: Path | None) -> Iterator[None]:
    """Return a context in which text that is not UTF-8 raises ModelError.

    Protobuf accepts any bytes as text, and raises an error when the text is read.
    """
    try:
        yield
    except UnicodeDecodeError as failure:
        raise ModelError(
            f"{path or 'the model'} contains a name or text that is not UTF-8 "
            f"({failure.object[:40]!r}); the file is damaged."
        ) from failure


def _require_room(source: ModelSource) -> None:
    """Refuse a model that does not fit into the free memory, before it is read."""
    if isinstance(source, onnx.ModelProto):
        what, size = "the model", source.ByteSize()
    elif isinstance(source, bytes):
        what, size = "the model", len(source)
    elif isinstance(source, str | os.PathLike):
        what, size = f"'{os.fspath(source)}'", _file_bytes(source)
    else:
        return  # the reader refuses it
    require_memory(
        _COPIES * size,
        f"reading {what}, of {spelled(size)},",
        "store its weights as external data (onnx.save_model with save_as_external_data=True), "
        "which take memory only where they are used",
    )


def _file_bytes(path: "str | os.PathLike[str]") -> int:
    """Return the number of bytes of a file; 0 if there is none, which the reader reports."""
    try:
        return Path(path).stat().st_size
    except (OSError, ValueError):
        return 0


def external_files(path: Path) -> Iterator[Path]:
    """Yield the paths of the external data files of a model."""
    model = read_model(path)
    functions = (node for function in model.functions for node in function.node)
    nested = nested_tensors((*functions, *model.graph.node))
    sparse = ((entry.values, entry.indices) for entry in model.graph.sparse_initializer)
    for entry in (*model.graph.initializer, *chain.from_iterable(sparse), *nested):
        if is_external(entry):
            yield from (path.parent / e.value for e in entry.external_data if e.key == "location")


def separated_model(source: ModelSource) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return the message of a model without the data of its initializers, and the data by name.

    Arguments and errors are as for ``load_model``, but nodes and versions are not checked.
    """
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    _require_room(source)
    with _decoding(path):
        return _separated(read_model(source), ExternalData(path) if path else None)


def _separated(
    model: onnx.ModelProto, external: ExternalData | None
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return ``model`` without the data of its initializers, and the data; ``model`` is emptied."""
    sparse = {entry.values.name: entry for entry in model.graph.sparse_initializer}
    names = (*(entry.name for entry in model.graph.initializer), *sparse)
    refuse_repeated(names, "initializers")
    constants = {entry.name: to_array(entry, external) for entry in model.graph.initializer}
    constants |= {name: densified(entry, external) for name, entry in sparse.items()}
    return _template(model, external), constants


def _load(model: onnx.ModelProto, path: Path | None, train_form: bool) -> LoadedModel:
    check_versions(model)
    external = ExternalData(path) if path else None
    template, constants = _separated(model, external)
    settle_statistics(template, constants, apart=train_form)
    working, filled, inner = _canonical(template, constants)
    _decode_all(working.graph, template)
    stored = declared_halves((*template.graph.input, *template.graph.output))
    stored |= upcast(working.graph, constants)
    nodes, statistics = decompose(canonical_nodes(working.graph.node), constants)
    graph = Graph(
        nodes=nodes,
        inputs=tuple(_inputs(working.graph.input, constants, stored)),
        outputs=tuple(entry.name for entry in working.graph.output),
        constants=constants,
        opset=opset(working),
        name=path.name if path else _text(model.graph.name) or "model",
        domains={entry.domain: entry.version for entry in working.opset_import if entry.domain},
        filled=filled,
        inner=inner,
        declared=declared_constants(template, constants) | statistics,
        residuals=declared_residuals(template),
    )
    graph, notes = in_train_form(graph) if train_form else (graph, ())
    files = (path, *external.files) if path and external else ()
    return LoadedModel(graph, template, stored, notes, files)


def _template(model: onnx.ModelProto, external: ExternalData | None) -> onnx.ModelProto:
    """Return ``model`` without the data of its initializers; ``model`` is emptied."""
    stubs = [
        onnx.TensorProto(name=entry.name, data_type=entry.data_type, dims=entry.dims)
        for entry in model.graph.initializer
    ]
    stubs += [
        onnx.TensorProto(name=e.values.name, data_type=e.values.data_type, dims=e.dims)
        for e in model.graph.sparse_initializer
    ]
    del model.graph.initializer[:], model.graph.sparse_initializer[:]
    model.graph.initializer.extend(stubs)
    # Protobuf does not free the memory of deleted fields, so a new message is created.
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
    """Return a copy of ``template`` after all passes.

    The other results are the names of filled constants and the names of constants in bodies.
    ``constants`` receives the constants that the file writes as nodes.
    """
    # The inputs of this graph are the data and the large constants.
    working = deepcopy(template)
    _declare_constants(working.graph, constants)
    working = inline_functions(working)
    unify_standard_domain(working)
    sort_nodes(working.graph, _REPEATED.get(template.producer_name, ""))
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
    _declare_constants(working.graph, constants)
    settle_places(working, constants)
    put_steps_first(working.graph)
    return working, filled, inner


def _declare_constants(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> None:
    """Declare small constants as initializers of ``graph`` and large constants as inputs."""
    data = [entry for entry in graph.input if entry.name not in constants]
    large = {name: a for name, a in constants.items() if a.nbytes > _LARGE_BYTES}
    declared = [value_info(Input(name, a.dtype, a.shape)) for name, a in large.items()]
    small = [tensor(a, name) for name, a in constants.items() if name not in large]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(small)
    graph.input.extend([*data, *declared])


def _inputs(
    entries: Iterable[onnx.ValueInfoProto], constants: Collection[str], stored: Mapping[str, DType]
) -> Iterator[Input]:
    for entry in entries:
        if entry.name in constants:
            continue
        if not entry.type.HasField("tensor_type"):
            kind = entry.type.WhichOneof("value") or "untyped"
            raise UnsupportedError(
                f"input '{entry.name}' is not a dense tensor ({kind}); only tensors can be fed."
            )
        form = entry.type.tensor_type
        dtype = element_type(form.elem_type, f"input '{entry.name}'")
        shape = tuple(axis_size(dim) for dim in form.shape.dim) if form.HasField("shape") else None
        yield Input(entry.name, dtype, shape, stored.get(entry.name))


def axis_size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """Return the size or the symbol of an axis.

    The result is None for a negative size and for names of an unknown size.
    """
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    unknown = dim.dim_param in _NO_SYMBOLS or dim.dim_param.startswith("unk__")
    return None if unknown else dim.dim_param


def _decode_all(working: onnx.GraphProto, template: onnx.ModelProto) -> None:
    """Decode all names, so that a damaged name raises an error during loading."""
    for imported in template.opset_import:
        _text(imported.domain)
    for entry in (*template.graph.input, *template.graph.output):
        for dim in entry.type.tensor_type.shape.dim:
            _text(dim.dim_param)
    for node in all_nodes(working.node):
        keys = (entry.name for entry in node.attribute)
        for value in (node.name, node.op_type, node.domain, *node.input, *node.output, *keys):
            _text(value)


def _text(value: str | bytes) -> str:
    """Return a string of a message; raise an error for bytes that are not UTF-8."""
    return value.decode() if isinstance(value, bytes) else value

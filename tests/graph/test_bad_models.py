"""Files that are no usable models: one error that names the culprit, whatever the damage."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from kfac_engine.errors import InputError, KfacError, ModelError, UnsupportedError
from kfac_engine.graph.analysis.trainable import trainable_parameters
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph
from tests import models

MLP = models.mlp()
BYTES = MLP.SerializeToString()
NAMED = BYTES + onnx.ModelProto(graph=onnx.GraphProto(name="a name")).SerializeToString()

Make = Callable[[Path], object]


def check(source, error, words):
    with pytest.raises(error) as caught:
        load_graph(source)
    message = str(caught.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message


# -- not a model at all ---------------------------------------------------------------------------


def written(name, data):
    def make(folder):
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def saved_arrays(folder):
    path = folder / "batch.npz"
    np.savez(path, x=np.zeros(3))
    return path


def a_pipe(folder):
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no pipes in folders")
    path = folder / "pipe.onnx"
    os.mkfifo(path)
    return path


NO_MODELS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "missing": (lambda folder: folder / "gone.onnx", ("no such file", "gone.onnx")),
    "folder": (lambda folder: folder, ("it is a folder",)),
    "pipe": (a_pipe, ("is a pipe", "pipe.onnx")),
    "empty": (written("empty.onnx", b""), ("empty.onnx", "is empty")),
    "empty_bytes": (lambda folder: b"", ("the given bytes", "is empty")),
    "random": (written("noise.onnx", random.Random(0).randbytes(4096)), ("noise.onnx",)),
    "truncated": (written("cut.onnx", BYTES[:-7]), ("cut.onnx", "truncated")),
    "text": (written("readme.onnx", b"# A model\n\nof words"), ("readme.onnx",)),
    "picture": (written("cat.onnx", b"\x89PNG\r\n\x1a\n" + bytes(64)), ("cat.onnx", "PNG")),
    "arrays": (saved_arrays, ("batch.npz", "ZIP archive")),
    "lfs_pointer": (
        written("net.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ("net.onnx", "git lfs pull"),
    ),
    "no_graph": (lambda folder: onnx.ModelProto(ir_version=8), ("no graph",)),
    "name_too_long": (lambda folder: folder / ("x" * 5000), ("cannot read",)),
}


@pytest.mark.parametrize(("make", "words"), NO_MODELS.values(), ids=NO_MODELS)
def test_invalid_model_error_names_problem(make, words, tmp_path):
    source = make(tmp_path)
    if isinstance(source, onnx.ModelProto):
        source = source.SerializeToString()
    check(source, ModelError, words)


def test_model_source_of_other_type_raises_error():
    check(3.5, InputError, ("path, bytes or an onnx.ModelProto", "float"))


# -- broken graphs --------------------------------------------------------------------------------


def changed(change):
    model = onnx.ModelProto()
    model.CopyFrom(MLP)
    change(model)
    return model


def graph_of(text):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> m {text}')


def set_opset(version):
    def change(model):
        model.opset_import[0].version = version

    return change


def sequence_input(model):
    model.graph.input.append(
        helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    )


def first_weight(**fields):
    """Overwrite fields of initializer ``fc0.weight``."""

    def change(model):
        tensor = model.graph.initializer[0]
        kept = {"name": tensor.name, "data_type": tensor.data_type, "dims": tensor.dims}
        kept["raw_data"] = tensor.raw_data
        tensor.CopyFrom(onnx.TensorProto(**{**kept, **fields}))

    return change


BROKEN: dict[str, tuple[Callable[[onnx.ModelProto], object], tuple[str, ...]]] = {
    "future_format": (lambda m: setattr(m, "ir_version", 99), ("format version 99",)),
    "future_opset": (set_opset(99), ("operator set 99", "or older")),
    "no_opset": (set_opset(0), ("operator set 0",)),
    "unknown_operator": (lambda m: setattr(m.graph.node[1], "op_type", "Tanhh"), ("Tanhh",)),
    "missing_operand": (lambda m: m.graph.node[0].input.__delitem__(slice(None)), ("Gemm",)),
    "missing_step": (lambda m: setattr(m.graph.node[1], "op_type", "Range"), ("Range",)),
    "wrong_attribute": (
        lambda m: m.graph.node[0].attribute.append(helper.make_attribute("beta", "much")),
        ("beta",)),
    "unknown_attribute": (
        lambda m: m.graph.node[0].attribute.append(helper.make_attribute("colour", 1)),
        ("colour",)),
    "dangling": (lambda m: m.graph.node[2].input.__setitem__(0, "ghost"), ("'ghost'", "node_fc1")),
    "cycle": (
        lambda m: m.graph.node[0].input.__setitem__(0, "fc1"), ("cycle", "node_fc0", "2 other")),
    "no_producer": (lambda m: setattr(m.graph.output[0], "name", "ghost"), ("output 'ghost'",)),
    "twice_made": (lambda m: m.graph.node.append(m.graph.node[0]), ("two values", "'fc0'")),
    "twice_stored": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]),
        ("two initializers", "'fc0.weight'")),
    "twice_fed": (lambda m: m.graph.input.append(m.graph.input[0]), ("two inputs", "'input'")),
    "made_and_stored": (
        lambda m: m.graph.node[4].output.__setitem__(0, "fc0.bias"), ("two values", "'fc0.bias'")),
    "made_and_stored_by_torch": (
        lambda m: (
            setattr(m, "producer_name", "pytorch"),
            m.graph.node[4].output.__setitem__(0, "fc0.bias"),
        ),
        ("two values", "'fc0.bias'", "optimize=True", "rename"),
    ),
    "no_outputs": (lambda m: m.graph.ClearField("output"), ("no output",)),
    "sides_without_data": (first_weight(dims=[10**9, 10**9]), ("'fc0.weight'", "shape")),
    "negative_side": (first_weight(dims=[-5, -6]), ("'fc0.weight'",)),
    "unknown_type": (first_weight(data_type=77), ("'fc0.weight'", "77")),
    "no_data": (first_weight(raw_data=b""), ("'fc0.weight'", "shape")),
    "text_weight": (first_weight(data_type=TensorProto.STRING), ("'fc0.weight'",)),
    "not_utf8": (
        lambda m: m.ParseFromString(BYTES.replace(b"fc1.bias", b"fc1.b\xffas")), ("UTF-8",)),
    "symbol_not_utf8": (
        lambda m: m.ParseFromString(BYTES.replace(b"batch", b"b\xfftch")), ("UTF-8",)),
    "value_not_utf8": (lambda m: m.ParseFromString(BYTES.replace(b"fc1", b"f\xff1")), ("UTF-8",)),
    "name_not_utf8": (
        lambda m: m.ParseFromString(NAMED.replace(b"a name", b"a\xffname")), ("UTF-8",)),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_invalid_graph_error_names_node(change, words):
    check(changed(change), ModelError, words)


UNSUPPORTED = {"sequence": (changed(sequence_input), ("'parts'", "sequence_type"))}


@pytest.mark.parametrize(("model", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_non_tensor_error_names_value(model, words):
    check(model, UnsupportedError, words)


FILL = """(float[2] x) => (float[] y) <int64[{}] s = {{{}}}>
    {{ w = ConstantOfShape (s)  y = Add (x, w) }}"""
FUNCTIONS = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
    m (float[2] x) => (float[2] y) {{ y = own.first (x) }}
    <domain: "own", opset_import: ["": 18, "own": 1]>
    first (a) => (b) {{ b = own.{} (a) }}
    <domain: "own", opset_import: ["": 18, "own": 1]>
    second (a) => (b) {{ b = own.first (a) }}"""
ENDLESS = {
    "a huge fill": (graph_of(FILL.format(2, "3000000000, 30000000000")), ("'w'", "3000000000")),
    "a negative fill": (graph_of(FILL.format(1, -2)), ("'w'", "-2")),
    "a function that calls itself": (parser.parse_model(FUNCTIONS.format("first")), ("function",)),
    "functions that call each other": (
        parser.parse_model(FUNCTIONS.format("second")), ("function",)),
}  # fmt: skip


@pytest.mark.parametrize(("model", "words"), ENDLESS.values(), ids=ENDLESS)
def test_fills_and_functions_without_bound_are_refused(model, words):
    check(model, ModelError, words)


# -- external data --------------------------------------------------------------------------------

NEEDED = 5 * 6 * 4  # bytes of fc0.weight


def external(location, **entries):
    """A model whose ``fc0.weight`` points to ``location``; ``weights.bin`` lies beside it."""

    def make(folder):
        home = folder / "home"
        home.mkdir()
        (home / "weights.bin").write_bytes(bytes(NEEDED))
        (folder / "secret.bin").write_bytes(bytes(NEEDED))
        (home / "empty.bin").touch()
        (home / "link.bin").symlink_to(folder / "secret.bin")
        (home / "circle.bin").symlink_to(home / "circle.bin")
        place = location.replace("ABSOLUTE", str(folder / "secret.bin"))
        model = changed(first_weight(raw_data=b""))
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": place, **entries}.items():
            tensor.external_data.add(key=key, value=str(value))
        path = home / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return make


BAD_PLACES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "missing": (external("gone.bin"), ("'gone.bin'", "missing")),
    "no_location": (external(""), ("outside",)),
    "parent": (external("../secret.bin"), ("'../secret.bin'", "outside")),
    "parent_inside": (external("x/../../secret.bin"), ("outside",)),
    "absolute": (external("ABSOLUTE"), ("secret.bin'", "outside")),
    "link_out": (external("link.bin"), ("'link.bin'", "outside")),
    "null_byte": (external("weights.bin\0.png"), ("outside",)),
    "circle": (external("circle.bin"), ("'circle.bin'",)),
    "long_name": (external("x" * 5000), ("cannot be read",)),
    "no_bytes": (external("empty.bin"), ("'empty.bin'", "has 0")),
    "itself_a_folder": (external("."), ("missing",)),
    "offset_beyond_end": (external("weights.bin", offset=10**15), (f"byte {10**15}",)),
    "offset_cuts": (external("weights.bin", offset=4), (f"needs {NEEDED} bytes", "byte 4")),
    "offset_negative": (external("weights.bin", offset=-4), ("'-4'", "offset")),
    "offset_no_number": (external("weights.bin", offset="start"), ("'start'", "offset")),
    "length_too_short": (external("weights.bin", length=8), ("8 bytes",)),
    "length_absurd": (external("weights.bin", length=10**18), (f"{10**18} bytes",)),
}


@pytest.mark.parametrize(("make", "words"), BAD_PLACES.values(), ids=BAD_PLACES)
def test_external_data_outside_folder_or_file_raises_error(make, words, tmp_path):
    check(make(tmp_path), ModelError, ("'fc0.weight'", *words))


def test_valid_external_data_is_loaded(tmp_path):
    path = external("weights.bin", offset=0, length=NEEDED)(tmp_path)
    assert not load_graph(path).constants["fc0.weight"].any()


def test_external_data_of_bytes_error_asks_for_path(tmp_path):
    check(external("weights.bin")(tmp_path).read_bytes(), ModelError, ("'fc0.weight'", "path"))


# -- damage ---------------------------------------------------------------------------------------

SOUND = [
    BYTES,
    models.resnet_block().SerializeToString(),
    models.embedding().SerializeToString(),
    graph_of(
        "(float[2] x) => (float[] y) <bool c = {1}, int64[1] s = {2}> {"
        "  w = ConstantOfShape (s)"
        "  y = If (c) <then_branch = t () => (float[] a) { a = Add (x, w) },"
        "              else_branch = e () => (float[] a) { a = Identity (x) }> }"
    ).SerializeToString(),
    changed(set_opset(11)).SerializeToString(),
]


def damaged(data, rng):
    place = rng.randrange(len(data))
    some = rng.randbytes(rng.choice([1, 3]))
    return rng.choice(
        [
            data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :],
            data[:place] + some[:1] + data[place + 1 :],
            data[:place] + data[place + len(some) :],
            data[:place] + some + data[place:],
            data[:place],
        ]
    )


def test_damaged_model_loads_or_raises_kfac_error():
    rng = random.Random(0)
    outcomes = {"graph": 0, "error": 0}
    for _ in range(1000):
        data = damaged(rng.choice(SOUND), rng)
        try:
            graph = load_graph(data)
            trainable_parameters(graph)
        except KfacError:
            outcomes["error"] += 1
        else:
            assert isinstance(graph, Graph)
            outcomes["graph"] += 1
    # Both happen, so the damage is neither always fatal nor always harmless.
    assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize(("op", "operands"), [("Max", ["x", ""]), ("Concat", ["", "x"])])
def test_missing_required_operand_raises_error(op, operands):
    """ONNX Runtime 1.31 ends the process on such a Max."""
    model = models.one_operator(op, {"x": "float[2]"}, **({"axis": 0} if op == "Concat" else {}))
    model.graph.node[0].input[:] = operands
    check(model, ModelError, (f"operand {operands.index('')}", op, "is required"))

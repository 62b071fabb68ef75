"""Notes on parameters that PyTorch's exporters changed, for files that the exporters wrote."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.graph.analysis.exporter_changes import export_changes

EXPORTS = Path(__file__).resolve().parents[2] / "exports"
KINDS = {"merged": "merged weights", "folded": "folded a norm", "generated": "computed and renamed"}
# File to the kinds of changes that its exporter made; the other files of the folder have none.
CHANGED = {
    "cnn-legacy": {"folded", "generated"},
    "cnn-dynamo": {"folded"},
    "encoder-legacy": {"merged", "generated"},
    "encoder-dynamo": {"merged", "generated"},
    "lstm-legacy": {"generated"},
    "lstm-dynamo": {"generated"},
    "tied-legacy": {"generated"},
    "tied-dynamo": {"generated"},
}


def load(source):
    """The engine of a file, and the kinds of its notes."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        engine = ke.Engine.from_onnx(source, loss="categorical")
    texts = [str(entry.message) for entry in issued if entry.category is ke.ExportWarning]
    assert [text.split(": ", 1)[1] for text in texts] == [
        f"{n}." for n in engine.export_changes.notes
    ]
    return engine, {kind for kind, words in KINDS.items() if any(words in t for t in texts)}, issued


@pytest.mark.parametrize("path", sorted(EXPORTS.glob("*.onnx")), ids=lambda path: path.stem)
def test_from_onnx_warns_of_each_change_that_the_exporter_made(path):
    _, kinds, issued = load(path)
    assert kinds == CHANGED.get(path.stem, set())
    for warning in issued:
        assert "dynamo=True, optimize=False" in str(warning.message)
        assert warning.filename == __file__


# The computation of y from three inputs of equal form, and the inputs that nothing reads.
TRIPLES = {
    "d = Sub (a, c)  y = MatMul (d, w)": ["b"],
    "d = Sub (a, a)  y = MatMul (d, w)": ["b", "c"],
    "d = Sub (a, b)  e = Sub (d, c)  y = MatMul (e, w)": [],
    # a body of a branch reads c
    "z = Identity (q)  d = If (z) <then_branch = g () => (float[N,3] p) { p = Add (a, c) },"
    " else_branch = h () => (float[N,3] r) { r = Sub (a, b) }>  y = MatMul (d, w)": [],
}


@pytest.mark.parametrize("body", TRIPLES)
@pytest.mark.parametrize(("producer", "axes"), [("pytorch", 3), ("pytorch", 4), ("other", 3)])
def test_note_names_inputs_that_the_exporter_left_without_a_reader(body, producer, axes):
    """An input of another shape cannot have been the same tensor."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (bool q, float[N,3] a, float[N,{axes}] b,'
        f" float[N,3] c) => (float[N,2] y) {{ {body} }}"
    )
    model.producer_name = producer
    weight = np.ones((3, 2), np.float32)
    changes = export_changes(model, {"w": weight}, ["w"])
    alike = [name for name in TRIPLES[body] if name != "b" or axes == 3]
    assert list(changes.unread) == (alike if producer == "pytorch" else [])
    assert any("does not read" in note for note in changes.notes) == bool(changes.unread)


def test_every_file_with_changes_is_stored():
    assert CHANGED.keys() <= {path.stem for path in EXPORTS.glob("*.onnx")}


def test_note_names_the_merged_weights_of_an_untrained_encoder():
    engine, _, _ = load(EXPORTS / "encoder-legacy.onnx")
    (note,) = (note for note in engine.export_changes.notes if "merged" in note)
    count = len(re.findall("'[^']*'", note)) + int(re.findall(r"and (\d+) more", note)[0])
    # 11 of the 26 parameters remain; the weight and the bias of the head are not shared.
    assert len(engine.parameters) == 11
    assert count == 9


def test_zero_of_a_convolution_without_bias_is_not_trained():
    engine, _, _ = load(EXPORTS / "cnn-plain.onnx")
    with np.load(EXPORTS / "cnn.npz") as arrays:
        names = {name.removeprefix("gradient/") for name in arrays if "gradient/" in name}
    assert set(engine.parameters) == names


def test_frozen_parameters_have_no_note():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = ke.Engine.from_onnx(
            EXPORTS / "encoder-legacy.onnx", loss="categorical", trainable=["head.*"]
        )
    assert engine.export_changes.notes == ()


def test_files_of_other_producers_have_no_note():
    model = onnx.load(EXPORTS / "cnn-legacy.onnx")
    model.producer_name = "other"
    assert load(model)[1] == set()


def test_weight_that_was_normalized_before_the_export_is_not_a_folded_normalization():
    model = onnx.load(EXPORTS / "cnn-legacy.onnx")
    for node in model.graph.node:
        if node.op_type == "Conv":  # as after weight_norm: the bias is that of the module
            bias = f"{node.name}.bias"
            for entry in model.graph.initializer:
                entry.name = bias if entry.name == node.input[2] else entry.name
            node.input[2] = bias
    assert load(model)[1] == {"generated"}


def test_inspect_prints_the_warning_above_its_tables(capsys):
    path = str(EXPORTS / "cnn-dynamo.onnx")
    assert main(["inspect", path, "--loss", "categorical"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("warning: the exporter folded a normalization into '0.weight'")
    assert output.err == ""
    assert main(["inspect", path, "--loss", "categorical", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["export_notes"]
    assert "'0.weight', '3.weight'" in note

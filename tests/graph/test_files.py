"""Weights that one message cannot hold lie in a second file, where onnx itself finds them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.errors import InputError, ModelError
from kfac_engine.graph.load import load_graph
from tests import models
from tests.graph.running import run_model


@pytest.fixture
def short_messages(monkeypatch):
    """A limit that the small models of the tests exceed, with weights small enough to pass it."""
    monkeypatch.setattr("kfac_engine.graph.files._MOST_INLINE", 1000)
    monkeypatch.setattr("kfac_engine.graph.files._SMALL_BYTES", 100)


@pytest.mark.usefixtures("short_messages")
def test_large_model_is_exported_as_two_files(tmp_path):
    model = models.cnn()
    engine = ke.Engine.from_onnx(model, loss="categorical")
    weight = np.full_like(engine.parameters["conv0.weight"], 0.25)
    engine.set_parameters({"conv0.weight": weight})
    path = tmp_path / "model.onnx"
    engine.export(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    onnx.checker.check_model(path, full_check=True)
    assert path.stat().st_size < (tmp_path / "model.onnx.data").stat().st_size
    written = {e.name: numpy_helper.to_array(e) for e in onnx.load(path).graph.initializer}
    for entry in model.graph.initializer:
        expected = weight if entry.name == "conv0.weight" else numpy_helper.to_array(entry)
        np.testing.assert_array_equal(written[entry.name], expected)


@pytest.mark.usefixtures("short_messages")
def test_exported_weights_are_aligned_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("kfac_engine.graph.files._MOST_COPIED", 0)
    path = tmp_path / "model.onnx"
    ke.Engine.from_onnx(models.cnn(), loss="categorical").export(path)
    weight = load_graph(path).constants["conv0.weight"]
    assert weight.ctypes.data % 64 == 0
    assert not weight.flags.owndata


@pytest.mark.usefixtures("short_messages")
def test_export_may_overwrite_files_of_model(tmp_path):
    path = tmp_path / "model.onnx"
    ke.Engine.from_onnx(models.cnn(), loss="categorical").export(path)
    engine = ke.Engine.from_onnx(path, loss="categorical")
    before = engine.parameters
    engine.set_parameters({"conv1.bias": before["conv1.bias"] + 1})
    engine.export(path)
    after = ke.Engine.from_onnx(path, loss="categorical").parameters
    np.testing.assert_array_equal(after["conv1.bias"], before["conv1.bias"] + 1)
    np.testing.assert_array_equal(after["conv1.weight"], before["conv1.weight"])
    feeds = models.random_inputs(models.cnn())
    expected = run_model(onnx.load(path).SerializeToString(), feeds)["output"]
    np.testing.assert_allclose(ke.load_model(path).run(feeds)["output"], expected, rtol=1e-5)


@pytest.mark.usefixtures("short_messages")
def test_failed_export_leaves_no_file(tmp_path):
    engine = ke.Engine.from_onnx(models.cnn(), loss="categorical")
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        engine.export(tmp_path / "model.onnx")
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".tmp"] == []


@pytest.mark.usefixtures("short_messages")
def test_large_gradient_model_is_written_as_two_files(tmp_path):
    model = models.mlp((40, 30, 3))
    path = tmp_path / "gradient.onnx"
    whole = ke.differentiate(model, "categorical", path=path)
    assert (tmp_path / "gradient.onnx.data").stat().st_size > 30 * 40 * 4
    assert onnx.load(path, load_external_data=False) == whole
    onnx.checker.check_model(path, full_check=True)
    feeds = {**models.random_inputs(model), "targets": np.arange(3)}
    found = run_model(onnx.load(path).SerializeToString(), feeds)
    truth = ke.Engine.from_onnx(model, loss="categorical").gradients(
        {"input": feeds["input"]}, feeds["targets"]
    )
    assert found["loss"] == pytest.approx(truth.loss, rel=1e-5)
    for name, gradient in truth.gradients.items():
        np.testing.assert_allclose(found[f"gradient/{name}"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("short_messages")
def test_large_gradient_model_without_path_raises_error():
    with pytest.raises(ModelError, match=r"GB of weights.*pass a path"):
        ke.differentiate(models.mlp((40, 30, 3)), "categorical")

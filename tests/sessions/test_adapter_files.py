"""Adapter files are those of ONNX Runtime, and belong to one model."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal

X = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def adapted():
    return ke.add_adapters(models.linear(), 2)


def values(model):
    """The adapters of a model, with other values."""
    rng = np.random.default_rng(1)
    return {
        entry.name: rng.normal(size=tuple(entry.dims)).astype(np.float32)
        for entry in model.graph.initializer
        if "lora" in entry.name
    }


def test_onnxruntime_runs_a_session_with_the_adapters_of_a_file(adapted, tmp_path):
    path, arrays = tmp_path / "task.onnx_adapter", values(adapted)
    ke.save_adapter(adapted, path, parameters=arrays)
    feeds = models.random_inputs(adapted)
    session = ort.InferenceSession(adapted.SerializeToString())
    assert [entry.name for entry in session.get_inputs()] == [*feeds]
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(path))
    options.add_active_adapter(adapter)
    (with_file,) = session.run(None, feeds, options)
    (with_arrays,) = session.run(None, {**feeds, **arrays})
    (without,) = session.run(None, feeds)
    np.testing.assert_array_equal(with_file, with_arrays)
    assert np.abs(with_file - without).max() > 0.1
    loaded = ke.load_adapter(adapted, path)
    (in_model,) = ort.InferenceSession(loaded.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(in_model, with_file)


def test_adapters_of_a_trained_engine_are_those_of_its_file(adapted, tmp_path):
    engine = ke.Engine.from_onnx(adapted, loss="normal", trainable="*lora*")
    engine.set_parameters(values(adapted))
    engine.export(tmp_path / "trained.onnx")
    ke.save_adapter(adapted, tmp_path / "engine.onnx_adapter", engine.parameters)
    ke.save_adapter(tmp_path / "trained.onnx", tmp_path / "file.onnx_adapter")
    contents = [(tmp_path / f"{name}.onnx_adapter").read_bytes() for name in ("engine", "file")]
    assert contents[0] == contents[1]
    loaded = ke.load_adapter(adapted, tmp_path / "file.onnx_adapter")
    arrays = {e.name: numpy_helper.to_array(e) for e in loaded.graph.initializer}
    assert_arrays_equal(arrays, values(adapted))


def changed(model, name, array):
    """A model with another value of an initializer."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for entry in result.graph.initializer:
        if entry.name == name and array is not None:
            entry.CopyFrom(numpy_helper.from_array(array, name))
    return result


def test_an_adapter_of_another_model_is_refused(adapted, tmp_path):
    path = tmp_path / "task.onnx_adapter"
    ke.save_adapter(adapted, path)
    base = next(e for e in adapted.graph.initializer if "lora" not in e.name and len(e.dims) == 2)
    other = numpy_helper.to_array(base).copy()
    other.flat[0] += 1
    with pytest.raises(ke.InputError, match="belongs to a model with other weights"):
        ke.load_adapter(changed(adapted, base.name, other), path)
    wide = ke.add_adapters(models.linear(), 3)
    with pytest.raises(ke.ShapeError, match=r"lora_.' has the shape"):
        ke.load_adapter(wide, path)
    more = ke.add_adapters(models.mlp(), 2)
    with pytest.raises(ke.UnknownNameError, match="has no adapter"):
        ke.load_adapter(more, path)
    with pytest.raises(ke.ModelError, match="add_adapters"):
        ke.load_adapter(models.linear(), path)


@pytest.mark.parametrize("contents", [b"", b"x" * 200, "half", "text"], ids=str)
def test_a_damaged_file_is_refused(adapted, tmp_path, contents):
    path = tmp_path / "task.onnx_adapter"
    ke.save_adapter(adapted, path)
    if contents == "half":
        contents = path.read_bytes()[:-40]
    path.write_bytes(contents if isinstance(contents, bytes) else b"an adapter\n" * 9)
    with pytest.raises(ke.InputError, match="is not an adapter file"):
        ke.load_adapter(adapted, path)


BAD = {
    "a missing folder": ({"path": "no/folder/a"}, ke.InputError, "no/folder"),
    "another shape": ({"parameters": {"fc.lora_A": np.ones(3)}}, ke.ShapeError, r"\(3,\)"),
    "whole numbers": ({"parameters": {"fc.lora_A": np.ones((4, 2), int)}}, ke.InputError, "real"),
    "no mapping": ({"parameters": [1]}, ke.InputError, "dictionary"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_wrong_values_are_named(adapted, tmp_path, case):
    options, error, message = case
    with pytest.raises(error, match=message):
        ke.save_adapter(adapted, **{"path": tmp_path / "a", **options})
    assert not list(tmp_path.iterdir())


def test_types_that_the_format_lacks_are_refused(tmp_path):
    model = models.linear()
    for entry in model.graph.initializer:
        array = numpy_helper.to_array(entry).astype(ml_dtypes.bfloat16)
        entry.CopyFrom(numpy_helper.from_array(array, entry.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    with pytest.raises(ke.InputError, match="bfloat16"):
        ke.save_adapter(ke.add_adapters(model, 2), tmp_path / "a")

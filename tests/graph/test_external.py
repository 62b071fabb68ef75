"""Weights beside the model are mapped, wherever links lead."""

import mmap
import os

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from kfac_engine.graph import files
from kfac_engine.graph.load import load_graph
from tests import models
from tests.graph.running import assert_same, simple_model


def save_external(model, folder):
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(
        model, path, save_as_external_data=True, location="weights.bin", size_threshold=0,
        convert_attribute=True,
    )  # fmt: skip
    return path


def file_of(array):
    """The mapped file that ``array`` is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    assert isinstance(array, mmap.mmap)
    return array


def test_external_weights_are_views_of_one_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_COPIED", 0)
    model = models.cnn()
    graph = load_graph(save_external(models.cnn(), tmp_path))
    roots = {id(file_of(array)) for array in graph.constants.values()}
    assert len(roots) == 1
    assert_same(graph.constants, load_graph(model).constants, 0)


def test_external_weights_may_be_in_double_precision(tmp_path):
    graph = load_graph(save_external(models.linear(dtype="float64"), tmp_path))
    assert {str(array.dtype) for array in graph.constants.values()} == {"float64"}


def test_unaligned_external_weight_is_copied(tmp_path):
    path = tmp_path / "model.onnx"
    model = models.linear(4, 3, bias=False)
    weight = model.graph.initializer[0]
    (tmp_path / "w.bin").write_bytes(b"\0" + weight.raw_data)
    expected = numpy_helper.to_array(weight)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    weight.external_data.add(key="offset", value="1")
    path.write_bytes(model.SerializeToString())
    found = load_graph(path).constants["fc.weight"]
    np.testing.assert_array_equal(found, expected)
    assert found.flags.aligned
    assert not found.flags.writeable


def test_external_weights_are_found_next_to_link_target(tmp_path):
    target = save_external(models.mlp(), tmp_path / "store")
    link = tmp_path / "snapshot" / "model.onnx"
    link.parent.mkdir()
    link.symlink_to(target)
    (link.parent / "weights.bin").symlink_to(target.parent / "weights.bin")
    assert_same(load_graph(link).constants, load_graph(models.mlp()).constants, 0)


def test_external_tensors_in_attributes_are_loaded(tmp_path):
    model = simple_model("c = Constant <value = float[1] {0.0}> ()  y = Identity (c)")
    value = numpy_helper.from_array(np.arange(2000, dtype=np.float32))
    model.graph.node[0].attribute[0].t.CopyFrom(value)
    path = save_external(model, tmp_path)
    assert os.path.getsize(path) < 1000 < os.path.getsize(tmp_path / "weights.bin")  # noqa: PTH202
    np.testing.assert_array_equal(load_graph(path).constants["c"], np.arange(2000))

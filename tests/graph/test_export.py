"""New weights in the user's own file, read back with onnx itself."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from kfac_engine.errors import ShapeError, UnknownNameError, UnsupportedError
from kfac_engine.graph.analysis.trainable import trainable_parameters
from kfac_engine.graph.export import export_files
from kfac_engine.graph.load import load_graph, load_model
from tests import models
from tests.comparing import assert_arrays_equal
from tests.graph.running import CARRIED, run_model


def exported_model(model, values):
    files = export_files(model, values, "weights.data")
    assert not files.tensors
    return onnx.ModelProto.FromString(files.message)


def stored(model):
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


@pytest.mark.parametrize("name", models.MODELS)
def test_export_without_new_values_equals_input(name):
    model = models.MODELS[name]()
    assert exported_model(load_model(model), {}) == model


def test_export_changes_only_named_constants():
    model = models.mlp()
    value = np.full((5, 6), 7.0, np.float32)
    exported = exported_model(load_model(model), {"fc0.weight": value})
    expected = {**stored(model), "fc0.weight": value}
    assert_arrays_equal(expected, stored(exported))
    assert list(exported.graph.node) == list(model.graph.node)


def test_export_keeps_operator_set_and_format():
    model = models.mlp()
    model.opset_import[0].version, model.ir_version = 9, 3
    declared = [
        helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        for entry in model.graph.initializer
    ]
    model.graph.input.extend(declared)
    exported = exported_model(load_model(model), {"fc0.bias": np.ones(5, np.float32)})
    assert (exported.opset_import[0].version, exported.ir_version) == (9, 3)
    assert [entry.name for entry in exported.graph.input] == [e.name for e in model.graph.input]
    onnx.checker.check_model(exported, full_check=True)


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"])
def test_exported_values_have_element_type_of_file(kind):
    code = TensorProto.DataType.Value(kind)
    graph = f"m ({kind.lower()}[2,2] x) => ({kind.lower()}[2,2] y) {{ y = MatMul (x, w) }}"
    model = models.parsed(graph, {})
    model.graph.initializer.append(helper.make_tensor("w", code, [2, 2], [1.0, 2.0, 3.0, 4.0]))
    exported = exported_model(load_model(model), {"w": np.full((2, 2), 0.5)})
    assert exported.graph.initializer[0].data_type == code
    assert (stored(exported)["w"] == 0.5).all()


SPELLINGS = {
    "constant": "w = Constant <value = float[3] {1, 2, 3}> ()",
    "floats": "w = Constant <value_floats = [1.0, 2.0, 3.0]> ()",
    "filled": "s = Constant <value = int64[1] {3}> ()  w = ConstantOfShape (s)",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_exported_constant_node_has_new_value(spelling):
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N,3] x) => (float[N,3] y)'
        f"{{ {spelling}  y = Mul (x, w) }}"
    )
    value = np.asarray([4.0, 5.0, 6.0], np.float32)
    exported = exported_model(load_model(model), {"w": value})
    x = np.ones((2, 3), np.float32)
    found = run_model(exported.SerializeToString(), {"x": x})["y"]
    np.testing.assert_array_equal(found, x * value)
    np.testing.assert_array_equal(load_graph(exported).constants["w"], value)


def test_exported_filled_weights_have_new_values():
    model = load_model(CARRIED / "light" / "light_squeezenet.onnx")
    rng = np.random.default_rng(0)
    names = trainable_parameters(model.graph)
    values = {
        name: 0.1 * rng.standard_normal(model.graph.constants[name].shape).astype(np.float32)
        for name in names
    }
    exported = exported_model(model, values)
    onnx.checker.check_model(exported)
    again = load_graph(exported)
    assert again.nodes == model.graph.nodes
    assert_arrays_equal(again.constants, values)


def test_exported_model_contains_external_weights(tmp_path):
    path, model = tmp_path / "model.onnx", models.mlp()
    onnx.save(models.mlp(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    exported = exported_model(load_model(path), {"fc0.bias": np.zeros(5, np.float32)})
    (tmp_path / "w.bin").unlink()
    expected = {**stored(model), "fc0.bias": np.zeros(5)}
    assert_arrays_equal(expected, stored(exported))


def test_unknown_constants_and_wrong_shapes_are_refused():
    with pytest.raises(UnknownNameError, match="'ghost'"):
        exported_model(load_model(models.mlp()), {"ghost": np.zeros(1)})
    with pytest.raises(ShapeError, match=r"'fc0.bias' has shape \(4,\).*\(5,\)"):
        exported_model(load_model(models.mlp()), {"fc0.bias": np.zeros(4)})


def test_export_of_constant_in_function_raises_error():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        m (float[3] x) => (float[3] y) { y = own.scale (x) }
        <domain: "own", opset_import: ["": 17]>
        scale (a) => (b) { w = Constant <value = float[3] {1, 2, 3}> ()  b = Mul (a, w) }"""
    )
    loaded = load_model(model)
    (name,) = trainable_parameters(loaded.graph)
    with pytest.raises(UnsupportedError, match="inside a function"):
        exported_model(loaded, {name: np.zeros(3, np.float32)})

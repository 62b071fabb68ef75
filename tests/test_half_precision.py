"""Models in float16 and bfloat16: computed in float32, handed out in their own types."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import kfac_engine as ke
from kfac_engine.errors import InputError, NonFiniteError, UnsupportedError
from kfac_engine.graph.load import load_graph
from tests import models, oracle
from tests.comparing import assert_arrays_equal
from tests.graph.running import run_graph

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LOSSES = {
    "mlp": "categorical",
    "layer_norm": "normal",
    "embedding": "categorical",
    "conv_linear": "normal",
    "tied": "normal",
}
BATCH = 3

# Relative to the largest gradient: float32 passes of small networks...
SINGLE = 2e-5
# ...and half a unit in the last of 11 and of 8 binary digits.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def halved(model, dtype):
    """``model`` with float16 or bfloat16 where it had float32."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.opset_import[0].version = 22  # the first with Conv in bfloat16
    code = helper.np_dtype_to_tensor_dtype(DTYPES[dtype])
    for entry in result.graph.initializer:
        array = numpy_helper.to_array(entry)
        if array.dtype == np.float32:
            entry.CopyFrom(numpy_helper.from_array(array.astype(DTYPES[dtype]), entry.name))
    for value in (*result.graph.input, *result.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = code
    onnx.checker.check_model(result, full_check=True)
    return result


def single(model):
    """The float32 model with the same weights."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for entry in result.graph.initializer:
        if entry.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            array = numpy_helper.to_array(entry).astype(np.float32)
            entry.CopyFrom(numpy_helper.from_array(array, entry.name))
    for value in (*result.graph.input, *result.graph.output):
        if value.type.tensor_type.elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return result


def batch_for(model, loss):
    """Inputs in float32 and targets."""
    inputs = models.random_inputs(single(model), batch=BATCH)
    (z,) = oracle.evaluate(single(model), inputs, "output")
    rng = np.random.default_rng(1)
    if loss == "categorical":
        return inputs, rng.integers(0, z.shape[-1], z.shape[:-1])
    return inputs, rng.standard_normal(z.shape).astype(np.float32)


def assert_close(found, truth, rtol):
    """Each entry up to a relative error, and one of float32 relative to the largest of all."""
    scale = max(np.abs(array).max() for array in truth.values())
    assert found.keys() == truth.keys()
    for name, array in truth.items():
        np.testing.assert_allclose(
            found[name].astype(np.float64), array, rtol=rtol, atol=SINGLE * scale
        )


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_gradients_have_float32_accuracy(name, dtype):
    model, loss = halved(models.MODELS[name](), dtype), LOSSES[name]
    inputs, targets = batch_for(model, loss)
    engine = ke.Engine.from_onnx(model, loss=loss, gradient_dtype="float32")
    result = engine.gradients(inputs, targets)
    value, truth = oracle.loss_and_gradient(
        single(model), inputs, "output", list(engine.parameters), loss, targets
    )
    assert result.loss == pytest.approx(value, rel=1e-5)
    assert {array.dtype.name for array in result.gradients.values()} == {"float32"}
    assert_close(result.gradients, truth, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_parameters_have_types_of_file(dtype):
    model = halved(models.cnn(), dtype)
    inputs, targets = batch_for(model, "categorical")
    engine = ke.Engine.from_onnx(model, loss="categorical", damping=1e-2)
    wide = ke.Engine.from_onnx(single(model), loss="categorical", damping=1e-2)
    found, truth = engine.step(inputs, targets), wide.step(inputs, targets)
    for arrays in (found.gradients, found.natural_gradients, engine.parameters):
        assert {array.dtype for array in arrays.values()} == {DTYPES[dtype]}
    assert_close(found.gradients, truth.gradients, ROUNDING[dtype])
    assert_close(found.natural_gradients, truth.natural_gradients, ROUNDING[dtype])
    assert_close(engine.parameters, wide.parameters, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_and_gradients_are_accepted_in_both_types(dtype):
    model = halved(models.mlp(), dtype)
    inputs, targets = batch_for(model, "categorical")
    narrow = {name: array.astype(DTYPES[dtype]) for name, array in inputs.items()}
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    engine = ke.Engine.from_onnx(model, loss="categorical", gradient_dtype="float32")
    engine.observe(wide)
    first, second = (engine.gradients(batch_inputs, targets) for batch_inputs in (narrow, wide))
    own = {name: g.astype(DTYPES[dtype]) for name, g in first.gradients.items()}
    rounded = {name: g.astype(np.float32) for name, g in own.items()}
    products = engine.precondition(own), engine.precondition(rounded)
    for name, gradient in first.gradients.items():
        np.testing.assert_array_equal(gradient, second.gradients[name])
        np.testing.assert_array_equal(products[0][name], products[1][name])


class Tensor:
    """A tensor of PyTorch in bfloat16, which NumPy cannot read."""

    dtype = "torch.bfloat16"
    requires_grad = True

    def __init__(self, array):
        self._array, self.shape = array.astype(DTYPES["bfloat16"]), array.shape

    def detach(self):
        plain = Tensor(self._array)
        plain.requires_grad = False
        return plain

    def float(self):
        assert not self.requires_grad
        return self._array.astype(np.float32)

    def data_ptr(self):
        return id(self)

    def __dlpack__(self, **options):
        raise RuntimeError("Unsupported dtype in DLTensor.")

    def __dlpack_device__(self):
        return self._array.view(np.int16).__dlpack_device__()


def test_bfloat16_tensors_are_read_wherever_arrays_are():
    model = halved(models.mlp(), "bfloat16")
    inputs, targets = batch_for(model, "categorical")
    options = {"loss": "categorical", "gradient_dtype": "float32", "damping": 0.1}
    engine = ke.Engine.from_onnx(model, **options)
    gradients = engine.gradients(inputs, targets).gradients
    found = []
    for convert in (Tensor, lambda array: array.astype(DTYPES["bfloat16"])):
        of = {n: convert(a) for n, a in inputs.items()}
        engine = ke.Engine.from_onnx(model, **options)
        engine.set_parameters({n: convert(2 * a) for n, a in engine.parameters.items()})
        step = engine.step(of, targets)
        found.append({
            "output": engine.predict(of),
            **{f"step {n}": a for n, a in step.natural_gradients.items()},
            **engine.precondition({n: convert(g) for n, g in gradients.items()}),
        })  # fmt: skip
    assert_arrays_equal(found[1], found[0])


def test_bfloat16_tensors_match_the_parameters_of_their_file_by_value():
    engine = ke.Engine.from_onnx(halved(models.mlp(), "bfloat16"), loss="categorical")
    module = {f"net.{name}": Tensor(array) for name, array in engine.parameters.items()}
    first = next(iter(module))
    matches = ke.match_parameters(engine, {**module, "alias": module[first]})
    assert matches.unmatched == ()
    assert (first, "alias") in {layout.names for layout in matches.layouts.values()}
    back = matches.to_module(engine.parameters)
    for name, tensor in module.items():
        assert back[name].dtype == np.float32  # which torch.from_dlpack reads
        np.testing.assert_array_equal(back[name], tensor.detach().float())


def test_input_of_other_type_error_names_both_types():
    engine = ke.Engine.from_onnx(halved(models.mlp(), "float16"), loss="categorical")
    with pytest.raises(InputError, match="int64, the model needs float16 or float32"):
        engine.observe({"input": np.zeros((2, 6), np.int64)})


# The parser takes half-precision numbers by their bits: 15360 is 1 and 16384 is 2.
ISLAND = """
<ir_version: 8, opset_import: ["": 18]>
m (float[batch,4] input) => (float[batch,2] output)
<float16[4,3] w, float16[3] b, float[3,2] head>
{
  low = Cast <to = 10> (input)
  product = MatMul (low, w)
  sum = Add (product, b)
  one = Constant <value = float16 {15360}> ()
  hidden = Softplus (sum)
  shape = Shape (hidden)
  ones = ConstantOfShape <value = float16[1] {15360}> (shape)
  shifted = Sub (hidden, ones)
  again = CastLike (shifted, one)
  high = Cast <to = 1> (again)
  output = MatMul (high, head)
}
"""


def island():
    """A float32 model with a float16 layer inside, as mixed precision is exported."""
    model = parser.parse_model(ISLAND)
    rng = np.random.default_rng(0)
    for name, shape, dtype in (
        ("w", (4, 3), np.float16),
        ("b", (3,), np.float16),
        ("head", (3, 2), np.float32),
    ):
        array = rng.standard_normal(shape).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(model, full_check=True)
    return model


def test_half_precision_layer_of_float32_model_computes_in_float32():
    model = island()
    inputs, targets = batch_for(model, "categorical")
    engine = ke.Engine.from_onnx(model, loss="categorical", gradient_dtype="float32")
    names = list(engine.parameters)
    assert names == ["w", "b", "head"]
    _, truth = oracle.loss_and_gradient(model, inputs, "output", names, "categorical", targets)
    assert_close(engine.gradients(inputs, targets).gradients, truth, 0)


def test_each_gradient_of_a_mixed_model_has_the_type_of_its_parameter():
    model = island()
    inputs, targets = batch_for(model, "categorical")
    found = ke.Engine.from_onnx(model, loss="categorical").gradients(inputs, targets).gradients
    dtypes = {name: array.dtype.name for name, array in found.items()}
    assert dtypes == {"w": "float16", "b": "float16", "head": "float32"}


BRANCHES = """
<ir_version: 8, opset_import: ["": 18]>
m (float16[batch,4] input, bool flag) => (float16[batch,4] output)
{
  chosen = If (flag) <
    then_branch = t () => (float16[batch,4] a) {
      k = Constant <value = float16 {16384}> ()
      a = Mul (input, k)
    },
    else_branch = e () => (float16[batch,4] b) {
      w = Cast <to = 1> (input)
      c = Cast <to = 10> (w)
      b = Neg (c)
    }
  >
  output = Identity (chosen)
}
"""


@pytest.mark.parametrize(("flag", "factor"), [(True, 2), (False, -1)], ids=["then", "else"])
def test_bodies_are_upcast_with_outer_graph(flag, factor):
    feeds = {"input": np.ones((1, 4), np.float32) / 3, "flag": np.asarray(flag)}
    found = run_graph(load_graph(parser.parse_model(BRANCHES)), feeds)
    # A third in float16 would differ in the fourth digit.
    np.testing.assert_allclose(found["output"], factor * feeds["input"], rtol=1e-6)


def test_float32_parameters_accumulate_small_steps():
    model = halved(models.linear(), "float16")
    engine = ke.Engine.from_onnx(model, loss="normal", gradient_dtype="float32")
    before = engine.parameters["fc.weight"]
    engine.set_parameters({"fc.weight": before + np.float32(1e-7)})
    np.testing.assert_array_equal(engine.parameters["fc.weight"], before + np.float32(1e-7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_export_writes_types_of_file_and_keeps_other_constants(dtype, tmp_path):
    model = halved(models.cnn(), dtype)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    path = tmp_path / "out.onnx"
    engine.export(path)
    assert onnx.load(path) == model
    engine.set_parameters({"conv0.bias": np.full(4, 1 / 3, np.float32)})
    engine.export(path)
    written = {entry.name: entry for entry in onnx.load(path).graph.initializer}
    found = numpy_helper.to_array(written["conv0.bias"])
    np.testing.assert_array_equal(found, np.full(4, 1 / 3).astype(DTYPES[dtype]))
    assert found.dtype == DTYPES[dtype]


def test_value_above_range_of_file_type_raises_error():
    model = halved(models.linear(), "float16")
    inputs, targets = batch_for(model, "normal")
    engine = ke.Engine.from_onnx(model, loss="normal", reduction="sum")
    with pytest.raises(NonFiniteError, match=r"'fc.*exceeds the range of float16.*gradient_dtype"):
        engine.gradients(inputs, targets + np.float32(1e6))
    engine.set_parameters({"fc.bias": np.full(3, 1e6, np.float32)})
    with pytest.raises(NonFiniteError, match=r"'fc.bias' reach 1e\+06"):
        _ = engine.parameters


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_reading_bits_of_half_precision_raises_error(kind):
    code = helper.np_dtype_to_tensor_dtype(DTYPES[kind])
    graph = f"g (int16[n] x) => ({kind}[n] y) {{ [bits] y = BitCast <to = {code}> (x) }}"
    model = models.parsed(graph, {}, '"": 26')
    with pytest.raises(UnsupportedError, match="BitCast node 'bits' reads the bits"):
        load_graph(model)


# -- the gradient as a model -----------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["file", "float32"])
def test_gradient_model_has_types_of_file(choice):
    model = halved(models.mlp(), "float16")
    inputs, targets = batch_for(model, "categorical")
    inputs = {name: array.astype(np.float16) for name, array in inputs.items()}
    gradient = ke.differentiate(model, "categorical", gradient_dtype=choice)
    onnx.checker.check_model(gradient, full_check=True)
    feeds = {**inputs, "targets": targets}
    names = [entry.name for entry in gradient.graph.output]
    session = ort.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    wide = {name: array.astype(np.float32) for name, array in inputs.items()}
    parameters = [name.removeprefix("gradient/") for name in names if name != "loss"]
    _, truth = oracle.loss_and_gradient(
        single(model), wide, "output", parameters, "categorical", targets
    )
    for results in (session.run(names, feeds), ReferenceEvaluator(gradient).run(names, feeds)):
        found = dict(zip(names, results, strict=True))
        assert found.pop("loss").dtype == np.float32
        found = {name.removeprefix("gradient/"): array for name, array in found.items()}
        expected = "float16" if choice == "file" else "float32"
        assert {array.dtype.name for array in found.values()} == {expected}
        assert_close(found, truth, ROUNDING["float16"] if choice == "file" else 0)
    weights = {entry.name: entry for entry in gradient.graph.initializer}
    assert weights["fc0.weight"].data_type == TensorProto.FLOAT16


def test_bfloat16_gradient_model_has_bfloat16_cotangent():
    model = halved(models.linear(), "bfloat16")
    gradient = ke.differentiate(model, wrt=["input", "fc.weight"])
    onnx.checker.check_model(gradient, full_check=True)
    x, c = (np.ones((2, side), DTYPES["bfloat16"]) for side in (4, 3))
    names = ["output", "gradient/input", "gradient/fc.weight"]
    found = ReferenceEvaluator(gradient).run(names, {"input": x, "cotangent": c})
    assert [array.dtype for array in found] == [DTYPES["bfloat16"]] * 3
    weight = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    rtol = ROUNDING["bfloat16"]
    np.testing.assert_allclose(found[1][0].astype(float), weight.sum(axis=1), rtol=rtol)
    np.testing.assert_array_equal(found[2].astype(float), np.full((4, 3), 2.0))


def test_half_precision_gradient_model_is_differentiable():
    model = halved(models.mlp((3, 2, 2)), "float16")
    first = ke.differentiate(model, wrt=["input"])
    second = ke.differentiate(first, output="gradient/input", wrt=["fc0.weight"])
    onnx.checker.check_model(second, full_check=True)
    outputs = {entry.name: entry.type.tensor_type.elem_type for entry in second.graph.output}
    assert outputs == dict.fromkeys(outputs, TensorProto.FLOAT16)

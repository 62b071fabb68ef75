"""The recipes of ARCHITECTURE.md: a row that is added is known everywhere.

Each registry gets a row "mine", made as the recipe says from an existing one. Driven through the
engine, reports, checkpoints and the command line, it gives what the row it imitates gives, and is
refused where that one is.
"""

import json
from dataclasses import asdict, replace

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.curvature.approximations import KINDS
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.curvature.schedule import POLICIES
from kfac_engine.layers import matchers
from kfac_engine.losses import LOSSES
from tests import models
from tests.comparing import assert_arrays_equal

N = 6
ROWS = [
    (kind, name)
    for kind in ("fully_connected", "conv2d", "scale_and_shift", "generic")
    for name in KINDS[kind].approximations
]
OF_EXAMPLES = [
    name for name, row in KINDS["fully_connected"].approximations.items() if row.examples_first
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def add(monkeypatch):
    """Adds a row called "mine" to a table, for one test."""

    def added(table, row):
        rows = table if isinstance(table, dict) else table._rows
        monkeypatch.setitem(rows, "mine", row)

    return added


def network():
    """Convolution, scale, slope-like product and dense layer: a layer of each kind of ``ROWS``."""
    text = """<ir_version: 8, opset_import: ["": 18]>
        net (float[batch, 2, 6, 6] input) => (float[batch, 3] output)
        <float[4, 2, 3, 3] filter, float[1, 4, 1, 1] scale, float[4] angle, float[3, 4] weight,
         float[3] bias> {
            c = Conv<pads=[1, 1, 1, 1]>(input, filter)
            s = Mul(c, scale)
            r = Relu(s)
            p = GlobalAveragePool(r)
            f = Flatten(p)
            a = Sin(angle)
            m = Mul(f, a)
            output = Gemm<transB=1>(m, weight, bias)
        }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for info in model.graph.value_info:
        dims = [side.dim_value for side in info.type.tensor_type.shape.dim]
        if dims and info.name in ("filter", "scale", "angle", "weight", "bias"):
            value = rng.normal(size=dims).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, info.name))
    return model


def driven(model, schedule=None, **options):
    """Everything that an engine and the command line say and give, for two batches."""
    options = {"loss": "categorical", "threads": 1} | options
    inputs = models.random_inputs(model, batch=N)
    targets = np.random.default_rng(1).integers(0, 3, N)
    schedule = schedule or ke.Schedule(refresh_every=2)
    engine = ke.Engine.from_onnx(model, schedule=schedule, **options)
    kinds = [(layer.kind, layer.parameters, layer.factor_shapes) for layer in engine.layers]
    found = {"memory": asdict(engine.memory(N)), "layers": kinds}
    for _ in range(2):
        engine.step(inputs, targets)
    engine.save("state.safetensors")
    resumed = ke.Engine.from_onnx(model, schedule=schedule, **options)
    resumed.load("state.safetensors")
    one, other = (each.step(inputs, targets) for each in (engine, resumed))
    assert_arrays_equal(other.natural_gradients, one.natural_gradients)
    return found | {"loss": one.loss, "natural": one.natural_gradients}


def commanded(model, *arguments):
    """What ``precondition`` writes and ``inspect`` says."""
    onnx.save(model, "m.onnx")
    np.savez("b.npz", **models.random_inputs(model, batch=N))
    np.savez("t.npz", targets=np.random.default_rng(1).integers(0, 3, N))
    files = ["--inputs", "b.npz", "--targets", "t.npz", "-o", "out.safetensors"]
    assert main(["precondition", "m.onnx", *files, "--threads", "1", *arguments]) == 0
    return load_file("out.safetensors")


def inspected(capsys, *arguments):
    """What ``inspect`` says."""
    capsys.readouterr()
    assert main(["inspect", "m.onnx", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_alike(value, other[key])
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, other[key])
        else:
            assert value == other[key], key


# -- approximations --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_added_approximation_equals_copied_row(kind, name, add, folder, capsys):
    add(KINDS[kind].approximations, KINDS[kind].approximations[name])
    model = network()
    assert kind in {layer.kind for layer in ke.Engine.from_onnx(model, loss="categorical").layers}
    own, imitated = (driven(model, approximations={kind: row}) for row in ("mine", name))
    assert_alike(own, imitated)
    options = [["--approx", f"{kind}={row}"] for row in ("mine", name)]
    assert_alike(*(commanded(model, *option) for option in options))
    mine, other = (inspected(capsys, *option) for option in options)
    assert "mine" in {layer["approximation"] for layer in mine["layers"]}
    for layer in mine["layers"]:
        layer["approximation"] = layer["approximation"].replace("mine", name)
    used = mine["approximations"][kind]["in_use"]
    mine["approximations"][kind]["in_use"] = [row.replace("mine", name) for row in used]
    assert mine == other


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_added_per_example_approximation_rejects_time_major(name, add):
    # Times and examples are as many: no other check tells them apart by their number.
    add(KINDS["fully_connected"].approximations, KINDS["fully_connected"].approximations[name])
    text = """<ir_version: 8, opset_import: ["": 18]>
        net (float[5, batch, 4] input) => (float[batch, 3] output)
        <float[4, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
            z = MatMul(input, weight)
            axis = Constant<value_ints=[0]>()
            output = ReduceSum<keepdims=0>(z, axis)
        }"""
    model = onnx.parser.parse_model(text)
    inputs = {"input": np.random.default_rng(0).normal(size=(5, 5, 4)).astype(np.float32)}
    for row in (name, "mine"):
        with pytest.raises(ke.UnsupportedError, match=f"'{row}'.*the examples lie on axis 1"):
            ke.Engine.from_onnx(
                model,
                loss="normal",
                sample_inputs=inputs,
                batch_axes={"input": 1},
                approximations={"fully_connected": row},
            )


# -- estimation modes, policies --------------------------------------------------------------------


@pytest.mark.parametrize("name", MODES)
def test_added_estimation_mode_equals_copied_row(name, add, folder, capsys):
    add(MODES, MODES[name])
    model = network()
    assert_alike(*(driven(model, estimation_mode=row) for row in ("mine", name)))
    assert_alike(*(commanded(model, "--mode", row) for row in ("mine", name)))
    assert_alike(*(inspected(capsys, "--mode", row) for row in ("mine", name)))


@pytest.mark.parametrize("name", ["exact", "exact_GGN"])
def test_added_estimation_mode_has_restrictions_of_copied_row(name, add):
    add(MODES, MODES[name])
    text = """<ir_version: 8, opset_import: ["": 18]>
        net (float[5, batch, 4] input) => (float[5, batch, 3] output)
        <float[4, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
            output = MatMul(input, weight)
        }"""
    for row in (name, "mine"):
        with pytest.raises(ke.UnsupportedError, match=f"'{row}' needs the examples alone"):
            ke.Engine.from_onnx(
                onnx.parser.parse_model(text), loss="categorical", estimation_mode=row
            )


@pytest.mark.parametrize("name", POLICIES)
def test_added_refresh_policy_equals_copied_row(name, add, folder):
    add(POLICIES, POLICIES[name])
    schedules = (ke.Schedule(refresh_every=3, policy=row) for row in ("mine", name))
    assert_alike(*(driven(network(), schedule=schedule) for schedule in schedules))


# -- losses ----------------------------------------------------------------------------------------


class Mine(ke.CategoricalLogitsNegativeLogProbLoss):
    """A loss of its own class."""


def differentiated(model, *arguments):
    onnx.save(model, "m.onnx")
    assert main(["differentiate", "m.onnx", *arguments, "-o", "gradient.onnx"]) == 0
    return onnx.load("gradient.onnx")


@pytest.mark.parametrize("own_class", [False, True])
def test_added_loss_equals_copied_row(own_class, add, folder, capsys):
    cls = Mine if own_class else ke.CategoricalLogitsNegativeLogProbLoss
    add(LOSSES, cls)
    model = network()
    assert_alike(*(driven(model, loss=row) for row in ("mine", "categorical")))
    assert_alike(*(commanded(model, "--loss", row) for row in ("mine", "categorical")))
    mine, other = (inspected(capsys, "--loss", row) for row in ("mine", "categorical"))
    assert mine["losses"][0].pop("loss") == cls.__name__
    assert other["losses"][0].pop("loss") == "CategoricalLogitsNegativeLogProbLoss"
    assert mine == other
    gradients = [differentiated(model, "--loss", row) for row in ("mine", "categorical")]
    assert gradients[0] == gradients[1]


class Branching(Mine):
    """A loss whose code reads entries of its arrays."""

    def terms_and_gradient(self, values, targets):
        scale = 1.0 if values[self.logits].max() > 0 else 2.0
        terms, gradient = super().terms_and_gradient(values, targets)
        return terms * scale, {name: array * scale for name, array in gradient.items()}


class Unknown(Mine):
    """A loss with a function that files lack."""

    def terms_and_gradient(self, values, targets):
        terms, gradient = super().terms_and_gradient(values, targets)
        return np.nextafter(terms, 1), gradient


class Listed(Mine):
    """A loss that loops over examples."""

    def terms_and_gradient(self, values, targets):
        return sum(row.sum() for row in values[self.logits]), {}


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Listed, "number of examples"),
        (Branching, "known in a run only"),
        (Unknown, r"numpy\.nextafter"),
    ],
)
def test_loss_that_cannot_be_recorded_raises_error(cls, reason, add):
    add(LOSSES, cls)
    message = f"{cls.__name__} cannot be written as ONNX operators: .*{reason}.*without a loss"
    with pytest.raises(ke.UnsupportedError, match=message):
        ke.differentiate(network(), loss="mine")


@pytest.mark.parametrize("var", [0.5, 2.0])
def test_written_loss_includes_variance(var):
    model = models.linear()
    inputs = models.random_inputs(model, batch=N)
    targets = np.random.default_rng(2).normal(size=(N, 3)).astype(np.float32)
    gradient = ke.differentiate(model, ke.NormalMeanNegativeLogProbLoss("output", var=var))
    z = ReferenceEvaluator(model).run(None, inputs)[0].astype(float)
    expected = ((z - targets) ** 2 / (2 * var) + 0.5 * np.log(2 * np.pi * var)).sum(1).mean()
    feeds = {**inputs, "targets": targets}
    found = ReferenceEvaluator(gradient).run(["loss"], feeds)[0]
    assert float(found) == pytest.approx(expected, rel=1e-5)


# -- kinds of layers -------------------------------------------------------------------------------


def test_added_layer_kind_equals_copied_row(add, folder, capsys, monkeypatch):
    model = network()
    imitated, plain = driven(model), commanded(model)
    report = inspected(capsys)
    matcher = matchers._MATCHERS["Gemm", 1]
    add(KINDS, KINDS["fully_connected"])
    monkeypatch.setitem(
        matchers._MATCHERS, ("Gemm", 1), lambda *asked: replace(matcher(*asked), kind="mine")
    )
    own = driven(model)
    assert [kind for kind, *_ in own["layers"]].count("mine") == 1
    own["layers"] = [
        (kind.replace("mine", "fully_connected"), *rest) for kind, *rest in own["layers"]
    ]
    assert_alike(own, imitated)
    assert_alike(commanded(model), plain)
    found = inspected(capsys)
    for layer in found["layers"]:
        layer["kind"] = layer["kind"].replace("mine", "fully_connected")
    found["approximations"]["fully_connected"] = found["approximations"].pop("mine")
    assert found == report
    driven(model, approximations={"mine": "diagonal"})

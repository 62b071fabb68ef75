"""A trunk with two heads, end to end: the truth is a finite difference of the weighted sum."""

import json

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from tests import models, oracle
from tests.comparing import assert_arrays_close

LOSSES = {"logits": "categorical", "mean": "normal"}
WEIGHTS = {"logits": 1.0, "mean": 0.25}
WEIGHTED = ["categorical", ke.Normal(weight=0.25)]
BATCH = 5
# Relative to the largest entry: float32 passes of a small network.
GRADIENT = 2e-5


@pytest.fixture(scope="module")
def model():
    return models.two_outputs()


@pytest.fixture(scope="module")
def inputs(model):
    return models.random_inputs(model, batch=BATCH)


@pytest.fixture(scope="module")
def targets():
    rng = np.random.default_rng(2)
    return {
        "mean": rng.standard_normal((BATCH, 2)).astype(np.float32),
        "logits": rng.integers(0, 3, BATCH),
    }


@pytest.fixture(scope="module")
def truth(model, inputs, targets):
    names = list(ke.load_model(model).parameters)
    value, total = 0.0, dict.fromkeys(names, 0.0)
    for output, loss in LOSSES.items():
        part, gradients = oracle.loss_and_gradient(
            model, inputs, output, names, loss, targets[output]
        )
        value += WEIGHTS[output] * part
        total = {name: total[name] + WEIGHTS[output] * gradients[name] for name in names}
    return value, total


def assert_gradients(found, truth):
    scale = max(np.abs(gradient).max() for gradient in truth.values())
    assert_arrays_close(found, truth, atol=GRADIENT * scale)


def test_gradient_equals_weighted_sum_of_losses(model, inputs, targets, truth):
    engine = ke.Engine.from_onnx(model, loss=WEIGHTED)
    result = engine.step(inputs, targets)
    assert result.loss == pytest.approx(truth[0], rel=1e-5)
    assert_gradients(result.gradients, truth[1])
    assert result.natural_gradients.keys() == truth[1].keys()


def test_statistics_of_head_depend_on_its_loss_only(model, inputs, targets):
    """The exact Fisher of two losses is the sum of theirs: heads see their own alone."""
    options = {"estimation_mode": "exact", "damping": 0.1}
    engine = ke.Engine.from_onnx(model, loss=["categorical", "normal"], **options)
    result = engine.step(inputs, targets)
    alone = ke.precondition(
        model, inputs, targets["logits"], "categorical", output="logits", **options
    )
    for name in ("logits.weight", "logits.bias"):
        np.testing.assert_allclose(
            result.natural_gradients[name], alone.natural_gradients[name], rtol=1e-4, atol=1e-6
        )


def test_outputs_may_have_any_order(model, inputs, targets):
    one = ke.Engine.from_onnx(model, loss=["categorical", "normal"])
    other = ke.Engine.from_onnx(model, loss=["normal", "categorical"], output=["mean", "logits"])
    assert one.gradients(inputs, targets).loss == pytest.approx(
        other.gradients(inputs, targets).loss
    )


def test_gradient_model_computes_weighted_sum(model, inputs, targets, truth):
    gradient = ke.differentiate(model, WEIGHTED)
    onnx.checker.check_model(gradient, full_check=True)
    feeds = {**inputs, **{f"targets of {name}": array for name, array in targets.items()}}
    names = [entry.name for entry in gradient.graph.output]
    found = dict(zip(names, ReferenceEvaluator(gradient).run(names, feeds), strict=True))
    assert float(found["loss"]) == pytest.approx(truth[0], rel=1e-5)
    assert_gradients({name.removeprefix("gradient/"): found[name] for name in names}, truth[1])


MISTAKES = {
    "one array for two losses": (
        lambda t: t["mean"],
        "cannot be the targets of several losses; pass a mapping with the keys logits, mean"),
    "a missing target": (lambda t: {"mean": t["mean"]}, "'targets of logits' .* are missing"),
    "an unknown output": (lambda t: {**t, "mode": t["mean"]}, "'mode', but no loss is on"),
    "a class out of range": (
        lambda t: {**t, "logits": t["logits"] + 3},
        "is not a class: 'logits' has 3 classes, 0 to 2"),
    "classes of another type": (
        lambda t: {**t, "logits": t["logits"].astype(np.float32)},
        r"integer class ids, got float32; convert them with targets.astype\('int64'\)"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_targets_error_names_output(model, inputs, targets, change, said):
    engine = ke.Engine.from_onnx(model, loss=["categorical", "normal"])
    with pytest.raises(ke.KfacError, match=said):
        engine.gradients(inputs, change(targets))


def test_loss_objects_have_factors(model, inputs, targets, truth):
    losses = [
        ke.CategoricalLogitsNegativeLogProbLoss("logits", targets="targets of logits"),
        ke.NormalMeanNegativeLogProbLoss("mean", targets="targets of mean").times(0.25),
    ]
    found = ke.Engine.from_onnx(model, loss=losses).gradients(inputs, targets)
    assert found.loss == pytest.approx(truth[0], rel=1e-5)
    assert_gradients(found.gradients, truth[1])
    with pytest.raises(ke.InputError, match="weight must be at least 0"):
        losses[0].times(-1)


# -- the command line ------------------------------------------------------------------------------

OPTIONS = ["--loss", "logits=categorical", "--loss", "mean=normal(weight=0.25)"]


@pytest.fixture
def files(tmp_path, model, inputs, targets):
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "x.npz", **inputs)
    np.savez(tmp_path / "y.npz", **targets)
    return tmp_path


def test_precondition_accepts_targets_by_output(files, truth):
    out = files / "out.safetensors"
    data = ["--inputs", str(files / "x.npz"), "--targets", str(files / "y.npz")]
    assert main(["precondition", str(files / "model.onnx"), *data, *OPTIONS, "-o", str(out)]) == 0
    saved = load_file(out)
    assert_gradients({name: saved[f"gradient/{name}"] for name in truth[1]}, truth[1])


def test_inspect_lists_both_losses(files, capsys):
    assert main(["inspect", str(files / "model.onnx"), *OPTIONS, "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    assert [loss["output"] for loss in losses] == ["logits", "mean"]
    assert main(["inspect", str(files / "model.onnx"), *OPTIONS]) == 0
    assert "mean" in capsys.readouterr().out


def test_differentiate_command_writes_weighted_sum(files, inputs, targets, truth):
    out = files / "gradient.onnx"
    assert main(["differentiate", str(files / "model.onnx"), *OPTIONS, "-o", str(out)]) == 0
    feeds = {**inputs, **{f"targets of {name}": array for name, array in targets.items()}}
    (loss,) = ReferenceEvaluator(onnx.load(out)).run(["loss"], feeds)
    assert float(loss) == pytest.approx(truth[0], rel=1e-5)

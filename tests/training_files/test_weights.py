"""Targets that do not count, and weights of targets, in training files."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.models import Net, parsed, random_inputs, two_outputs
from tests.training_files.nets import ROWS, data, names, network, unchanged, updated


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_parts_count_the_targets_of_the_whole_batch(optimizer, tmp_path):
    model = network("conv2d")
    inputs, targets = data(model)
    targets[[1, 2, 5]] = -100
    results = []
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        files = ke.export_training(model, optimizer=optimizer, path=folder, accumulate=parts)
        results.append(files.step(files.initial(), inputs, targets))
    assert_arrays_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    expected = engine.evaluate((inputs, targets), metrics=["loss", "accuracy"])
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-5)
    targets[:] = -100
    assert not files.step(files.initial(), inputs, targets)["finite"]


CLASS_ROWS = np.random.default_rng(4).dirichlet(np.ones(3), ROWS).astype("float32")
# Means of an order, so that each part has means of its own.
MEANS = np.sort(50 + np.random.default_rng(6).standard_normal((ROWS, 3)), axis=0).astype("float32")
WEIGHTS = np.where(np.arange(ROWS) % 5 == 1, 0, np.random.default_rng(5).random(ROWS))


@pytest.mark.parametrize(
    ("loss", "given", "targets"),
    [
        ("categorical", {"weights": "examples"}, None),
        ("categorical", {"weights": "targets", "probabilities": True}, CLASS_ROWS),
        ("multi_bernoulli", {"weights": "examples"}, CLASS_ROWS.round()),
        ("multi_bernoulli", {"weights": "predictions"}, CLASS_ROWS.round()),
        ("normal", {"weights": "examples"}, MEANS),
    ],
)
@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
def test_parts_have_the_weights_of_the_whole_batch(loss, given, targets, optimizer, tmp_path):
    model = network("conv2d")
    inputs, ids = data(model)
    batch = inputs, ke.Weighted(ids if targets is None else targets, WEIGHTS)
    results = []
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        files = ke.export_training(model, loss, optimizer, path=folder, accumulate=parts, **given)
        results.append(files.step(files.initial(), *batch))
        assert_arrays_close(results[-1], results[0], rtol=1e-4, atol=1e-6)
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1)
    metrics = [name for name in ("loss", "accuracy") if name in results[0]]
    expected = engine.evaluate([batch], metrics=metrics)
    for name in metrics:
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-5)
    unweighted = engine.evaluate([(inputs, batch[1].targets)], metrics=["loss"])["loss"]
    assert abs(unweighted - expected["loss"]) > 1e-3


@pytest.mark.parametrize("form", [{"weights": "examples"}, {"mask": "predictions"}])
def test_batches_without_weights_have_weights_of_one(form, tmp_path):
    files = ke.export_training(network("tokens"), "categorical", "adam", path=tmp_path, **form)
    rng, batches = np.random.default_rng(0), []
    shape = (6, 5) if "mask" in form else (6,)
    for seed, weights in enumerate([None, rng.integers(0, 2, shape), None, np.ones(shape)]):
        inputs, targets = random_inputs(network("tokens"), 6, seed), rng.integers(0, 3, (6, 5))
        batches.append((inputs, targets) if weights is None else (inputs, targets, weights))
    whole = [batch if len(batch) == 3 else (*batch, np.ones(shape)) for batch in batches]
    found, expected = (files.run(given, steps=4) for given in (batches, whole))
    assert found.losses == expected.losses


@pytest.mark.parametrize("kind", ["weights", "mask"])
def test_a_run_reads_the_weights_of_the_data(kind, tmp_path):
    model = network("conv2d")
    inputs, targets = data(model)
    weights = WEIGHTS > 0 if kind == "mask" else WEIGHTS
    form = {kind: "examples"}
    files = ke.export_training(model, "categorical", "adam", path=tmp_path / "files", **form)
    run = files.run((inputs, targets, weights), steps=4, batch_size=6, seed=3)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    history = ke.fit(
        engine, (inputs, targets, weights), optimizer=ke.Adam(engine), batch_size=6, steps=4,
        seed=3, schedule="constant", progress=False,
    )  # fmt: skip
    losses = [record["loss"] for record in history.records if "loss" in record]
    np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
    names_of_inputs, _ = names(files.folder / "training.onnx")
    assert names_of_inputs[:4] == ["input", "targets", kind, "rate"]
    assert f"| `{kind}` |" in (files.folder / "README.md").read_text()


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_a_wrong_weight_changes_nothing(wrong, tmp_path):
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files", weights="examples")
    (inputs, targets), weights = data(model), WEIGHTS.copy()
    weights[4] = wrong
    start = files.initial()
    results = files.step(start, inputs, ke.Weighted(targets, weights))
    assert not results["finite"]
    assert unchanged(results, start)
    assert files.step(start, inputs, ke.Weighted(targets, WEIGHTS))["finite"]


def test_what_lies_under_a_mask_changes_no_bit_of_a_step(tmp_path):
    model = network("tokens")
    files = ke.export_training(model, path=tmp_path / "files", mask="predictions")
    inputs, rng = random_inputs(model, 6, 0), np.random.default_rng(0)
    targets, mask = rng.integers(0, 3, (6, 5)), np.ones((6, 5), bool)
    mask[1, 2:] = mask[4] = False
    start, results = files.initial(), []
    for garbage, other in ((0, 0), (1e6, 2**40)):
        (name, array), *_ = inputs.items()
        spoiled = np.where(mask[..., None], array, np.float32(garbage))
        batch = {name: spoiled}, ke.Weighted(np.where(mask, targets, other), mask)
        results.append(files.step(start, *batch))
    assert_arrays_equal(results[1], results[0])


@pytest.mark.parametrize(
    ("given", "targets", "error", "message"),
    [
        ({}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS), ke.InputError, "no input for weights"),
        (
            {"weights": "examples"}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS[:, None]),
            ke.ShapeError, "has 1 axes",
        ),
        (
            {"mask": "examples"}, ke.Weighted(np.zeros(ROWS, int), WEIGHTS), ke.InputError,
            "other weights than 0 and 1",
        ),
    ],
)  # fmt: skip
def test_weights_without_an_input_are_refused(given, targets, error, message, tmp_path):
    model = network("dense")
    files = ke.export_training(model, path=tmp_path / "files", **given)
    with pytest.raises(error, match=message):
        files.step(files.initial(), data(model)[0], targets)


def test_an_input_of_the_model_is_no_input_for_weights(tmp_path):
    net = Net()
    net.op("Mul", "input", "mask", to="masked")
    net.dense("output", "masked", 5, 3)
    shape = ["batch", 5]
    model = net.model({"input": shape, "mask": shape}, {"output": ["batch", 3]})
    with pytest.raises(ke.InputError, match="input or a weight 'mask'"):
        ke.export_training(model, path=tmp_path / "files", mask="examples")
    assert not (tmp_path / "files").exists()
    ke.export_training(model, path=tmp_path / "files", weights="examples")


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_statistics_are_those_of_the_next_part_in_which_something_counts(kept, tmp_path):
    model = network("dense")
    options = {"statistics_part": 0.125, "statistics_every": 1, "refresh_every": 1}
    files = ke.export_training(model, path=tmp_path / "files", **options)
    inputs, targets = data(model, n=8)
    targets[np.arange(8) != kept] = -100
    x = np.append(inputs["input"][kept], 1)
    state = files.initial()
    for _ in range(3):  # the part of each step is another example
        results = files.step(state, inputs, targets)
        assert results["finite"]
        state |= updated(state, results)
        np.testing.assert_allclose(state["average/0"], np.outer(x, x), atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_a_batch_without_targets_of_one_loss_trains_the_other(optimizer, parts, tmp_path):
    """The truth is the loss of the other output alone; one task may come first or alternate."""
    model, rng = two_outputs(), np.random.default_rng(0)
    losses = ["categorical", "categorical"]
    files = ke.export_training(model, losses, optimizer, path=tmp_path / "files", accumulate=parts)
    state = files.initial()
    for step in range(4):
        inputs = random_inputs(model, ROWS, step)
        targets = {"logits": rng.integers(0, 3, ROWS), "mean": rng.integers(0, 2, ROWS)}
        left, kept = ("mean", "logits") if step % 2 == 0 else ("logits", "mean")
        targets[left][:] = -100
        z = files.predict(state, inputs)
        z = z[kept] if isinstance(z, dict) else z
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        results = files.step(state, inputs, targets)
        assert results["finite"]
        expected = -log_p[np.arange(ROWS), targets[kept]].mean()
        np.testing.assert_allclose(results["loss"], expected, rtol=1e-5)
        state |= updated(state, results)
        weights = files.read(state)
        assert all(np.isfinite(array).all() for array in weights.values())
    if optimizer == "kfac":
        averages = [state[n] for n in state if n.startswith("average/")]
        assert all(average.any() for average in averages)


HEADS = """heads (float[batch,4] x) => (float[batch,3] cls, float[batch,2] box) {
  t = MatMul(x, w)  h = Tanh(t)  cls = MatMul(h, a)
  u = MatMul(h, b)  v = Tanh(u)  box = MatMul(v, c)
}"""


def test_a_batch_without_targets_of_one_loss_leaves_its_own_layers(tmp_path):
    """Their averages are those of the steps that have its targets, whatever is in between."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 5), "a": (5, 3), "b": (5, 6), "c": (6, 2)}
    model = parsed(HEADS, {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()})
    files = ke.export_training(
        model, {"cls": "categorical", "box": "multi_bernoulli"}, path=tmp_path / "files",
        statistics_every=1, statistics_part=1.0, noise="input",
    )  # fmt: skip
    factors = files.description.factors
    x, ids = rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 3, 8)
    boxes = rng.integers(0, 2, (8, 2)).astype(np.float32)
    noise = {name: rng.random((8, *shape[1:])) for name, shape in files.description.noise.items()}
    own = [i for i, name in factors.items() if name.endswith(("(∂u)", "(v)", "(∂box)"))]
    assert len(own) == 3

    def averages(steps):
        """The averages after some steps with constant parameters."""
        state = files.initial()
        parameters = {name: state[name] for name in files.parameters}
        for has_boxes in steps:
            targets = {"cls": ids, "box": boxes if has_boxes else np.full_like(boxes, -100)}
            results = files.step(state, {"x": x, **noise}, targets, rate=0.0)
            state |= updated(state, results)
            state |= parameters
        return state

    expected = averages([True])
    for order in ([True, False], [False, True], [True, False, False, True]):
        found = averages(order)
        for i in own:
            name = f"average/{i}"
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=factors[i])

"""Parameters after steps of training files, next to those of the optimizers in Python."""

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.backend.namespace import is_recorded
from kfac_engine.losses import objective
from kfac_engine.training import adaptive_lengths, average_span, feature_bounds, kfac, weight_roles
from kfac_engine.training.adaptive_lengths import AdaptiveLengthUpdate
from kfac_engine.training.average_span import AverageSpan
from kfac_engine.training.kfac import KfacOptimizer
from kfac_engine.training_files import curvature
from tests.models import VOCABULARY, Net, mlp, random_inputs, two_outputs
from tests.nightly import nightly_but
from tests.training_files.nets import CLASSES, NETS, data, network
from tests.training_files.parity import SIZES, differences

FIRST, LAST = 1e-5, 1e-3
CASES = [
    *(("kfac", name) for name in NETS),
    *(("muon", name) for name in ("dense", "conv2d", "grouped", "gru", "attention")),
    *(("adamw", name) for name in ("dense", "gru", "batch normalization", "embedding")),
    ("adam", "dense"),
    ("sgd", "conv2d"),
]


def assert_equal_steps(*arguments, **options):
    """The first and the last step of a file are those of an optimizer."""
    found = differences(*arguments, **options)
    assert found[0] < FIRST
    assert found[-1] < LAST
    return found


def classes(positions=(), count=CLASSES):
    return lambda rng, n: rng.integers(0, count, (n, *positions))


# Of kinds that share the code of another kind.
NIGHTLY = [
    *(("kfac", name) for name in ("conv1d", "conv3d", "strided", "lstm", "slots first", "tied")),
    ("muon", "gru"),
    ("adamw", "embedding"),
]


@pytest.mark.parametrize("case", nightly_but([c for c in CASES if c not in NIGHTLY], CASES))
def test_steps_equal_those_of_the_optimizer(case, tmp_path):
    optimizer, net = case
    options = {"learning_rate": 0.02} if optimizer == "sgd" else {}
    draw = classes((5,) if net == "tokens" else ())
    assert_equal_steps(network(net), optimizer, tmp_path / "files", draw, **options)


def test_inverses_one_after_the_other_give_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "_AT_ONCE", 0)
    model = mlp((5, 6, 6, 3))
    assert_equal_steps(model, "kfac", tmp_path / "files", classes(), steps=8)
    assert b"Scan" in (tmp_path / "files" / "training.onnx").read_bytes()


def test_updates_of_few_examples_equal_those_of_the_optimizer(tmp_path):
    """Matrices with a smaller side of 24 have bounds for batches of fewer than 12 examples."""
    assert_equal_steps(mlp((24, 40, 24)), "kfac", tmp_path / "files", classes(count=24))


@pytest.mark.parametrize("most", [2, 8192])
def test_a_first_step_divides_too_large_logits_as_the_optimizer_does(most, tmp_path, monkeypatch):
    """Adam updates a head of more than ``most`` classes."""
    monkeypatch.setattr(objective, "_FEWEST", 4)
    monkeypatch.setattr(weight_roles, "_MOST_CLASSES", most)
    model = mlp((6, 5, 4, 3))
    (head,) = [array for array in model.graph.initializer if array.name == "fc2.weight"]
    large = 1000 * numpy_helper.to_array(head)
    head.CopyFrom(numpy_helper.from_array(large, head.name))
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    ke.KfacOptimizer(engine).step(*data(model))
    assert np.abs(engine.parameters["fc2.weight"]).max() < 0.1 * np.abs(large).max()
    assert_equal_steps(model, "kfac", tmp_path / "files", classes())


def test_layers_of_one_shape_take_the_steps_of_the_optimizer(tmp_path, monkeypatch):
    """A file stacks them; each of these wide layers has new directions in its own steps only."""
    monkeypatch.setattr(adaptive_lengths, "_NARROW", 20)
    model = mlp((12, 30, 30, 30, 3))
    assert_equal_steps(model, "kfac", tmp_path / "files", classes(), steps=12)
    state = ke.TrainingFiles(tmp_path / "files").description.state
    assert (2, 30, 30) in [shape for name, shape in state.items() if name.startswith("momentum/")]


def hidden(draw, value=-100, share=0.3):
    """Targets of which a share, and all of some examples, are not known."""

    def hide(rng, n):
        targets = draw(rng, n)
        targets[rng.random(targets.shape) < share] = value
        targets[n // 2] = value
        return targets

    return hide


def features(rng, n):
    return rng.integers(0, 2, (n, CLASSES)).astype("float32")


def rare(rng, n):
    return (rng.random((n, CLASSES)) < 0.1).astype("float32")


def rare_class(rng, n):
    return (rng.random(n) < 0.1).astype("int64")


def counts(rng, n):
    return rng.integers(0, 9, (n, CLASSES)).astype("float32")


WEIGHTS = [0.5, 2.0, 1.0]


def alone(rng, n):
    """Targets of which one is known, in no part but one of the batch."""
    targets = np.full(n, -100)
    targets[rng.integers(0, n)] = rng.integers(0, CLASSES)
    return targets


def normal(size, mean=0.0):
    return lambda rng, n: (size * rng.standard_normal((n, CLASSES)) + mean).astype("float32")


OPTIONS = {
    "numbers": ("mlp", "normal", normal(1.0)),
    "small numbers": ("mlp", "normal", normal(0.02)),
    "numbers far from zero": ("mlp", "normal", normal(1.0, 9.0)),
    "numbers of a sum of layers": ("wide and deep", "normal", normal(0.1, 9.0)),
    "small numbers of a sum": ("wide and deep", "normal", normal(0.02)),
    "bits": ("mlp", "multi_bernoulli", features),
    "rare bits": ("mlp", "multi_bernoulli", rare),
    "rare classes": ("mlp", "categorical", rare_class),
    "rare classes, smoothing": ("mlp", ke.Categorical(label_smoothing=0.02), rare_class),
    "all but one ignored": ("dense", "categorical", alone),
    "ignored by default": ("conv2d", "categorical", hidden(classes())),
    "ignored class": ("dense", ke.Categorical(ignore_index=2), classes()),
    "ignored positions": ("tokens", ke.Categorical(ignore_index=7), hidden(classes((5,)), 7)),
    "ignored, attention": ("attention", "categorical", hidden(classes())),
    "ignored, groups": ("grouped", "categorical", hidden(classes())),
    "ignored, recurrence": ("gru", "categorical", hidden(classes())),
    "ignored, experts": ("experts", "categorical", hidden(classes())),
    "weights of classes": ("dense", ke.Categorical(class_weights=WEIGHTS), hidden(classes())),
    "weights of classes, images": ("strided", ke.Categorical(class_weights=WEIGHTS), classes()),
    "smoothing": ("dense", ke.Categorical(label_smoothing=0.2), hidden(classes())),
    "smoothing and weights": (
        "dense", ke.Categorical(label_smoothing=0.2, class_weights=WEIGHTS), hidden(classes())),
    "binary": ("dense", "multi_bernoulli", hidden(features)),
    "binary, weights": ("dense", ke.MultiBernoulli(positive_weights=[1, 2, 3]), hidden(features)),
    "binary, smoothing": ("dense", ke.MultiBernoulli(label_smoothing=0.1), hidden(features)),
    "ignored means": ("dense", ke.Normal(ignore_index=1), features),
    "absolute errors": ("dense", ke.L1(), features),
    "errors with outliers": ("dense", ke.Huber(), counts),
    "absolute errors far from zero": ("mlp", ke.L1(), normal(1.0, 9.0)),
    "small errors with outliers": ("mlp", ke.Huber(), normal(0.02)),
    "few outliers": ("dense", ke.Huber(delta=3.0), counts),
}  # fmt: skip


def test_a_loss_whose_samples_no_file_draws_has_optimizers_without_curvature(tmp_path):
    loss = ke.Poisson(ignore_index=1)
    assert_equal_steps(network("dense"), "adamw", tmp_path / "files", counts, loss)
    with pytest.raises(ke.UnsupportedError, match=r"the loss 'poisson' on 'output'.*'adamw'"):
        ke.export_training(network("dense"), loss, "kfac", path=tmp_path / "kfac")
    assert not (tmp_path / "kfac").exists()


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_losses_count(case, optimizer, tmp_path):
    net, loss, draw = OPTIONS[case]
    model, steps = (mlp(), 20) if net == "mlp" else (network(net), 10)
    assert_equal_steps(model, optimizer, tmp_path / "files", draw, loss, steps=steps)


def weighted(draw, axes=1, mask=False, value=None):
    """Targets with weights of their first axes, some of which are zero: these have a value."""

    def weigh(rng, n):
        targets = draw(rng, n)
        weights = rng.random(targets.shape[:axes]) * (rng.random(targets.shape[:axes]) > 0.3)
        weights[n // 2] = 0
        weights[0] = 0.5
        if value is not None:
            targets[weights == 0] = value
        return ke.Weighted(targets, weights > 0 if mask else weights)

    return weigh


def rows(rng, n):
    return rng.dirichlet(np.ones(CLASSES), n).astype("float32")


TOKENS, BITS = classes((5,)), {"loss": "multi_bernoulli"}
WEIGHTED = {
    "examples": ("dense", {}, weighted(classes()), {"weights": "examples"}),
    "targets": ("conv2d", {}, weighted(hidden(classes())), {"weights": "targets"}),
    "texts": ("tokens", {}, weighted(TOKENS), {"weights": "examples"}),
    "tokens": ("tokens", {}, weighted(TOKENS, 2), {"weights": "predictions"}),
    "tokens, masked": ("tokens", {}, weighted(TOKENS, 2, mask=True), {"mask": "targets"}),
    "attention": ("attention", {}, weighted(classes(), mask=True), {"mask": "examples"}),
    "classes": (
        "dense", {"loss": ke.Categorical(class_weights=WEIGHTS, label_smoothing=0.1)},
        weighted(hidden(classes())), {"weights": "examples"}),
    "probabilities": (
        "dense", {"loss": ke.Categorical(class_weights=WEIGHTS, label_smoothing=0.1)}, rows,
        {"probabilities": True}),
    "weighted probabilities": (
        "dense", {}, weighted(rows), {"probabilities": True, "weights": "predictions"}),
    "bits": ("dense", BITS, weighted(hidden(features), 2), {"weights": "targets"}),
    "rows of bits": ("dense", BITS, weighted(features, mask=True), {"mask": "predictions"}),
    "means": (
        "dense", {"loss": "normal"}, weighted(normal(1.0, 50.0), value=1e4),
        {"weights": "examples"}),
    "masked means": (
        "dense", {"loss": "normal"}, weighted(normal(1.0, 50.0), 2, mask=True, value=np.nan),
        {"mask": "targets"}),
    "sum": ("tokens", {"reduction": "sum"}, weighted(TOKENS, 2), {"weights": "targets"}),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
@pytest.mark.parametrize("case", WEIGHTED)
def test_weights_are_inputs(case, optimizer, tmp_path):
    net, options, draw, inputs = WEIGHTED[case]
    options = {**options, **inputs}
    assert_equal_steps(network(net), optimizer, tmp_path / "files", draw, steps=10, **options)


@pytest.mark.parametrize("reduction", ["batch_mean", "sum"])
def test_reductions_of_ignored_targets_equal_those_of_the_optimizer(reduction, tmp_path):
    draw = hidden(classes((5,)))
    assert_equal_steps(
        network("tokens"), "kfac", tmp_path / "files", draw, reduction=reduction, steps=8
    )


def test_steps_of_two_losses_equal_those_of_the_optimizer(tmp_path):
    model = two_outputs()
    first, second = (output.name for output in model.graph.output)
    sides = [output.type.tensor_type.shape.dim[1].dim_value for output in model.graph.output]

    def draw(rng, n):
        return {
            name: rng.integers(0, side, n)
            for name, side in zip((first, second), sides, strict=True)
        }

    loss = ["categorical", "categorical"]
    assert_equal_steps(model, "adamw", tmp_path / "files", draw, loss)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("kfac", {"statistics_every": 3, "refresh_every": 7, "damping": 0.3, "momentum": 0.5}),
        ("kfac", {"weight_decay": 0.0, "update_length": 0.05, "adam_rate": 0.001}),
        ("adamw", {"learning_rate": 0.01, "betas": (0.8, 0.9), "epsilon": 1e-3}),
        ("adam", {"weight_decay": 0.1}),
        ("muon", {"nesterov": False, "momentum": 0.8, "weight_decay": 0.1}),
        ("sgd", {"learning_rate": 0.05, "nesterov": True, "weight_decay": 0.01}),
    ],
)
def test_options_of_optimizers_count(optimizer, options, tmp_path):
    draw = classes()
    assert_equal_steps(network("dense"), optimizer, tmp_path / "files", draw, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("net", ["dense", "tokens", "experts"])
def test_updates_of_files_are_shorter_along_rare_features(net, accumulate, tmp_path, monkeypatch):
    draw = classes((5,) if net == "tokens" else ())
    options = {"steps": 6, "accumulate": accumulate}
    free = differences(network(net), "kfac", tmp_path / "free", draw, **options)
    monkeypatch.setattr(feature_bounds, "_RARE", 0.5)  # every feature
    found = assert_equal_steps(network(net), "kfac", tmp_path / "files", draw, **options)
    assert found != free  # the bounds had an effect


@pytest.mark.parametrize(("length", "goes_back"), [(3.0, True), (0.1, False)])
def test_steps_of_files_take_updates_back(length, goes_back, tmp_path, monkeypatch):
    parts, part_back = [], AdaptiveLengthUpdate._part_back

    def noted(*arguments):
        parts.append(part_back(*arguments))
        return parts[-1]

    monkeypatch.setattr(AdaptiveLengthUpdate, "_part_back", noted)
    options = {"loss": "normal", "update_length": length}
    found = differences(network("dense"), "kfac", tmp_path / "files", normal(1.0), **options)
    assert any(part > 0 for part in parts if not is_recorded(part)) == goes_back
    assert found[-1] < LAST


def test_averages_of_files_span_more_steps_where_gradients_cancel(tmp_path, monkeypatch):
    momenta, momentum_of = [], AverageSpan.momentum_of

    def noted(*arguments):
        momenta.append(momentum_of(*arguments))
        return momenta[-1]

    monkeypatch.setattr(AverageSpan, "momentum_of", noted)
    monkeypatch.setattr(average_span, "_CANCELLED", 5.0)  # gradients of this net agree
    found = differences(network("grouped"), "kfac", tmp_path / "files", classes())
    values = [momentum for momentum in momenta if not is_recorded(momentum)]
    assert values[0] == pytest.approx(0.85)
    assert max(values) == pytest.approx(1 - 0.15 * np.exp(-0.2))
    assert found[-1] < LAST


@pytest.mark.parametrize("accumulate", [1, 2])
def test_examples_that_come_again_shrink_the_weights(accumulate, tmp_path):
    def found(different):
        arguments = network("dense"), "kfac", tmp_path / f"{different}", classes()
        return differences(*arguments, steps=12, different=different, accumulate=accumulate)

    assert found(sum(SIZES))[-1] < LAST
    with pytest.raises(AssertionError, match="DESIRED"):  # another loss than that of the optimizer
        found(np.inf)


def test_unequal_weights_shrink_the_weights_more(tmp_path, monkeypatch):
    monkeypatch.setattr(kfac, "_FEW", 50.0)  # a larger one has the largest decay of few examples
    more, decay = [], KfacOptimizer._decay

    def noted(self, facts, signal, residuals):
        more.append(residuals.unevenness())
        return decay(self, facts, signal, residuals)

    monkeypatch.setattr(KfacOptimizer, "_decay", noted)
    loss, arguments = ke.Categorical(class_weights=[9.0, 0.1, 1.0]), (tmp_path / "files", classes())
    found = differences(network("dense"), "kfac", *arguments, loss, steps=12, different=sum(SIZES))
    assert np.mean([factor for factor in more if not is_recorded(factor)]) > 1.2
    assert found[-1] < LAST


def two_tables():
    """An embedding, and a head that is its transpose in a constant of its own."""
    net = Net()
    net.weight("table", VOCABULARY, 4)
    net.op("Gather", "table", "input", to="rows", axis=0)
    net.op("Tanh", "rows", to="act")
    net.op("MatMul", "act", net.constant("head", net._constants["table"].T.copy()), to="output")
    return net.model({"input": ["batch", 6]}, {"output": ["batch", 6, VOCABULARY]}, "int64")


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_equal_weights_are_trained_as_one(optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_roles, "_FEW_FEATURES", 2)  # half the rate for four features
    model, folder = two_tables(), tmp_path / "files"

    draw = classes((6,), VOCABULARY)
    assert_equal_steps(model, optimizer, folder, draw, tie_weights=True)
    files = ke.TrainingFiles(folder, model)
    read = files.read(files.initial())
    np.testing.assert_array_equal(read["head"], read["table"].T)
    assert "head" not in files.description.state


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_of_very_many_classes_has_no_curvature(accumulate, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_roles, "_MOST_CLASSES", CLASSES - 1)
    folder = tmp_path / "files"
    assert_equal_steps(network("dense"), "kfac", folder, classes(), accumulate=accumulate)
    factors = ke.TrainingFiles(folder, network("dense")).description.factors
    assert [*factors.values()] == ["KroneckerMoment(input)", "KroneckerMoment(∂fc)"]


def two_inputs():
    net = Net()
    net.dense("left", "input", 5, 4)
    net.dense("right", "other", 3, 4)
    net.op("Mul", "left", "right", to="product")
    net.dense("output", "product", 4, CLASSES)
    return net.model({"input": ["batch", 5], "other": ["batch", 3]}, {"output": ["batch", CLASSES]})


def test_models_with_two_inputs(tmp_path):
    assert_equal_steps(two_inputs(), "kfac", tmp_path / "files", classes())


@pytest.mark.parametrize("axis", [0, 1])
def test_examples_may_lie_on_the_second_axis(axis, tmp_path):
    net = Net()
    net.op("Transpose", "input", to="batch_first", perm=[1, 0, 2] if axis else [0, 1, 2])
    net.weight("fc.weight", 3, 6)
    net.op("MatMul", "batch_first", "fc.weight", to="fc")
    net.op("Tanh", "fc", to="act")
    net.op("ReduceMean", "act", net.constant("axes", np.array([1])), to="mean", keepdims=0)
    net.dense("output", "mean", 6, CLASSES)
    shape = [4, "batch", 3] if axis else ["batch", 4, 3]
    model = net.model({"input": shape}, {"output": ["batch", CLASSES]})
    files = ke.export_training(model, optimizer="kfac", path=tmp_path / "files")
    assert files.description.inputs == {"input": axis}
    rng = np.random.default_rng(0)
    x, targets = rng.standard_normal((8, 4, 3)), rng.integers(0, CLASSES, 8)
    batch = {"input": x.swapaxes(0, 1) if axis else x}, targets
    run = files.run([batch] * 6, steps=6)
    assert run.losses[-1] < run.losses[0]
    assert run.skipped == 0


def test_other_random_numbers_give_another_step(tmp_path):
    files = ke.export_training(network("dense"), path=tmp_path / "files", noise="input")
    rng = np.random.default_rng(0)
    batch = {"input": rng.standard_normal((16, 5))}, rng.integers(0, CLASSES, 16)
    start, moved = files.initial(), []
    for seed in (0, 0, 1):
        noise = np.random.default_rng(seed).random(4)
        moved.append(files.step(start, {**batch[0], "noise": noise}, batch[1])["new fc.weight"])
    np.testing.assert_array_equal(moved[0], moved[1])
    assert np.linalg.norm(moved[2] - moved[0]) > 1e-4 * np.linalg.norm(moved[0])


def test_another_option_gives_another_step(tmp_path):
    model, rates = network("dense"), (0.01, 0.02)
    batch = {"input": np.ones((4, 5), np.float32)}
    moved = []
    for index, rate in enumerate(rates):
        folder = tmp_path / str(index)
        files = ke.export_training(model, optimizer="sgd", learning_rate=rate, path=folder)
        result = files.step(files.initial(), batch, np.array([0, 1, 2, 0]))
        moved.append(result["new fc.weight"] - files.initial()["fc.weight"])
    np.testing.assert_allclose(2 * moved[0], moved[1], atol=1e-6)


def test_a_schedule_multiplies_the_rate(tmp_path):
    model = network("dense")
    files = ke.export_training(model, optimizer="kfac", path=tmp_path / "files", weight_decay=0.0)
    batch, targets = {"input": np.ones((4, 5), np.float32)}, np.array([0, 1, 2, 0])
    start = files.initial()
    whole, half, none = (files.step(start, batch, targets, rate=r) for r in (1.0, 0.5, 0.0))
    for name in ("fc.weight", "fc.bias", "head.weight"):
        moved = whole[f"new {name}"] - start[name]
        np.testing.assert_allclose(half[f"new {name}"] - start[name], moved / 2, atol=1e-6)
        np.testing.assert_array_equal(none[f"new {name}"], start[name])


@pytest.mark.parametrize("net", ["tokens", "dense", "conv2d"])
def test_files_have_directions_as_often_as_the_optimizer(net, tmp_path, monkeypatch):
    """Iterations, 0 to 5, and directions of one step or two follow from the sizes of batches."""
    for name, value in {
        "_SMALLEST_SIDE": 4,
        "_SMALL_SIDE": 5,
        "_ROWS_OF_SMALL": 9,
        "_NARROW": 0,
    }.items():
        monkeypatch.setattr(adaptive_lengths, name, value)
    draw = classes((5,) if net == "tokens" else ())
    assert_equal_steps(network(net), "kfac", tmp_path / "files", draw)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("net", "loss", "targets"),
    [("dense", "categorical", 1), ("tokens", "categorical", 10 / 3), ("tokens", "bce", 1)],
)
def test_updates_of_files_end_with_the_residuals(net, loss, targets, accumulate, tmp_path):
    """Predictions are nearly certain: a step is shorter by the residuals of an example's classes.

    Each of the five classes of an example has an expected square of 1 − 1/3.
    """
    model = network(net)
    for array in model.graph.initializer:
        if array.name == "head.weight":
            value = 80 * numpy_helper.to_array(array)
            array.CopyFrom(numpy_helper.from_array(value, array.name))
    files = ke.export_training(model, loss, "kfac", path=tmp_path, accumulate=accumulate)
    engine = ke.Engine.from_onnx(model, loss=loss, threads=1)
    x = random_inputs(model, 8, seed=0)
    logits = engine.predict(x).astype(np.float64)
    if loss == "bce":
        t = (logits > 0).astype(np.float32)
        errors, least_certain = 1 / (1 + np.exp(-logits)) - t, logits.size / 4
    else:
        t = logits.argmax(axis=-1)
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        errors = odds / odds.sum(axis=-1, keepdims=True) - np.eye(3)[t]
        least_certain = t.size * 2 / 3
    part = 10 * targets * np.sqrt((errors**2).sum() / least_certain)
    assert part < 1
    rate = ke.KfacOptimizer(engine).step(x, t).learning_rate
    assert rate == pytest.approx(0.03 * part, rel=1e-4)
    before = files.read(state := files.initial())["fc.weight"]
    results = files.step(state, x, t)
    moved = np.linalg.norm(results["new fc.weight"] - before * (1 - 0.05 / 4 * rate))
    # The norm of an update is k · rate · √outputs, with k = 1 in the first step.
    assert moved == pytest.approx(rate * 6**0.5, rel=1e-3)

"""Careless calls: each gets one clear error that is a ``KfacError`` and names what was wrong."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.data import demo_model, digits

IMAGES, LABELS = digits()
X, Y = {"image": IMAGES[:8]}, LABELS[:8]
MODEL = demo_model("mlp")
LOSS = ke.CategoricalLogitsNegativeLogProbLoss


class Thing:
    """An object of no use; its name is the same in every process that collects these tests."""

    def __repr__(self):
        return "Thing()"


THING = Thing()


def engine_of(**options):
    return ke.Engine.from_onnx(MODEL, **{"loss": "categorical", "threads": 1} | options)


@pytest.fixture(scope="module")
def engine():
    engine = engine_of()
    engine.step(X, Y)
    return engine


@pytest.fixture(scope="module")
def gradients(engine):
    return {name: np.ones_like(array) for name, array in engine.parameters.items()}


# Option, its wrong value, what the message says.
OPTIONS = [
    ("exps", -1, "exps must be a list"),
    ("exps", None, "exps must be a list"),
    ("exps", (), "exps must name at least one power"),
    ("exps", ("-1",), "each of exps must be a finite number"),
    ("exps", (float("nan"),), "each of exps must be a finite number"),
    ("loss", None, "loss must be a name"),
    ("loss", LOSS, "loss must be a name"),
    ("loss", 3, "loss must be a name"),
    ("loss", [], "loss must be a name"),
    ("loss", [None], "loss must be a name"),
    ("loss", "hinge", "unknown loss 'hinge'"),
    ("output", 3, "output must be a list"),
    ("output", [3], "output must be a list of names"),
    ("class_axis", "1", "class_axis must be a whole number"),
    ("class_axis", None, "class_axis must be a whole number"),
    ("class_axis", 0.5, "class_axis must be a whole number"),
    ("reduction", None, "reduction must be one of"),
    ("reduction", ["mean"], "reduction must be one of"),
    ("trainable", 3, "trainable must be a list"),
    ("trainable", [3], "trainable must be a list of names"),
    ("trainable", ["nothing*"], "nothing"),
    ("freeze", 3, "freeze must be a list"),
    ("damping", "1e-3", "damping must be a positive number"),
    ("damping", None, "damping must be a positive number"),
    ("damping", [1e-3], "damping must be a positive number"),
    ("damping", 0, "damping must be a positive number"),
    ("damping", True, "damping must be a positive number"),
    ("damping", 1j, "damping must be a positive number"),
    ("ema_decay", "0.9", "ema_decay must be a finite number"),
    ("ema_decay", 1.0, "ema_decay must lie in"),
    ("estimation_mode", None, "estimation_mode must be one of"),
    ("estimation_mode", ["exact"], "estimation_mode must be one of"),
    ("estimation_mode", "exakt", "estimation_mode must be one of"),
    ("approximations", "kron", "approximations must be a dictionary"),
    ("approximations", ["kron"], "approximations must be a dictionary"),
    ("approximations", {"dense": "kron"}, "unknown kind of layer 'dense'"),
    ("approximations", {"fully_connected": None}, "not a valid approximation"),
    ("approximations", {"fully_connected": ["kron"]}, "not a valid approximation"),
    ("schedule", "round_robin", "schedule must be a kfac_engine.Schedule"),
    ("schedule", 3, "schedule must be a kfac_engine.Schedule"),
    ("schedule", ke.Schedule, "schedule must be a kfac_engine.Schedule"),
    ("threads", "2", "threads must be a whole number"),
    ("threads", 0, "threads must be a whole number"),
    ("threads", 1.5, "threads must be a whole number"),
    ("backend", None, "backend must be a name"),
    ("backend", "torch", "backend"),
    ("seed", -1, "seed must be a whole number"),
    ("seed", None, "seed must be a whole number"),
    ("seed", "0", "seed must be a whole number"),
    ("sample_inputs", IMAGES[:2], "sample_inputs must be a dictionary"),
    ("gradient_dtype", None, "gradient_dtype"),
    ("gradient_dtype", np.float32, "gradient_dtype"),
    ("tie_weights", 1, "tie_weights must be True or False"),
    ("graph_passes", "blocked_layout", "graph_passes must be a list"),
    ("graph_passes", [1], "graph_passes must be a list of names"),
    ("graph_passes", ["nchw"], "unknown graph pass 'nchw'; choose one of: blocked_layout, fused"),
    ("batch_axes", 1, "batch_axes must be a dictionary"),
    ("batch_axes", {"image": "0"}, "batch_axes"),
    ("batch_axes", {"image": 9}, "batch_axes"),
    ("batch_axes", {"other": 0}, "batch_axes"),
]


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_engine_and_precondition_report_invalid_option(name, value, message):
    with pytest.raises(ke.KfacError, match=message):
        engine_of(**{name: value})
    options = {"loss": "categorical", "threads": 1} | {name: value}
    with pytest.raises(ke.KfacError, match=message):
        ke.precondition(MODEL, X, Y, **options)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dampin", " (did you mean 'damping'?)."),
        ("exp", " (did you mean 'exps'?)."),
        ("batch_axis", " (did you mean 'batch_axes'?)."),
        ("Loss", " (did you mean 'loss'?)."),
        ("qqq", "; its options: loss, output, class_axis,"),
    ],
)
def test_unknown_option_error_suggests_nearest_name(name, hint):
    with pytest.raises(ke.UnknownNameError) as by_engine:
        ke.Engine.from_onnx(MODEL, loss="categorical", **{name: 1})
    assert str(by_engine.value).startswith(f"Engine.from_onnx has no option '{name}'{hint}")
    with pytest.raises(ke.UnknownNameError) as by_precondition:
        ke.precondition(MODEL, X, Y, "categorical", **{name: 1})
    assert str(by_precondition.value).startswith(f"precondition has no option '{name}'{hint}")


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((), {"loss": "categorical"}),
        ((), {"model": MODEL}),
        ((MODEL,), {}),
        ((MODEL,), {"seed": 1}),
        ((MODEL, "categorical"), {}),
        ((MODEL,), {"model": MODEL, "loss": "categorical"}),
    ],
    ids=["nothing", "no model", "model alone, named", "no loss", "option", "positions", "twice"],
)
def test_call_without_model_or_loss_raises_error(args, options):
    message = "Engine.from_onnx takes model, and options by keyword; the required options are: loss"
    with pytest.raises(ke.InputError, match=message):
        ke.Engine.from_onnx(*args, **options)


@pytest.mark.parametrize(("args", "options"), [((), {}), ((MODEL,), {"loss": "categorical"})])
def test_engine_without_from_onnx_raises_error(args, options):
    with pytest.raises(ke.InputError, match=r"call Engine\.from_onnx\(model, loss=\.\.\.\)"):
        ke.Engine(*args, **options)


def test_model_may_be_keyword_argument():
    engine = ke.Engine.from_onnx(loss="categorical", model=MODEL)
    assert list(engine.parameters) == list(engine_of().parameters)


def test_all_options_are_covered():
    with pytest.raises(ke.UnknownNameError) as refused:
        engine_of(qqq=1)
    listed = str(refused.value).partition("its options: ")[2].rstrip(".").split(", ")
    assert listed == [field.name for field in dataclasses.fields(ke.EngineOptions)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, value, _ in OPTIONS
        if name in ("output", "class_axis", "reduction", "loss")
        and not (name == "loss" and value is None)
    ]
    + [
        ("wrt", 3),
        ("wrt", []),
        ("wrt", [3]),
        ("sample_inputs", IMAGES[:2]),
        ("gradient_dtype", None),
        ("path", ""),
        ("path", 3),
    ],
)
def test_differentiate_reports_invalid_option(name, value):
    options = {"loss": "categorical"} | {name: value}
    with pytest.raises(ke.KfacError):
        ke.differentiate(MODEL, **options)


@pytest.mark.parametrize("model", [None, 3, [], {}, b"", "", "nowhere.onnx", Path(), 1.5, THING])
def test_invalid_model_raises_error(model):
    for call in (
        lambda: ke.Engine.from_onnx(model, loss="categorical"),
        lambda: ke.differentiate(model, "categorical"),
        lambda: ke.load_model(model),
    ):
        with pytest.raises(ke.KfacError):
            call()


RAGGED = [[1.0], [1.0, 2.0]]
MASKED = np.ma.masked_array(np.ones((8, 64), np.float32), mask=True)


@pytest.mark.parametrize(
    "inputs",
    [None, 3, "image", [X], IMAGES[:8, 0], {}, {"x": IMAGES[:8]}, {"image": None},
     {"image": "text"}, {"image": RAGGED}, {"image": MASKED}, {"image": THING}, {"image": {}},
     {"image": np.array(["a"] * 8)}, {"image": IMAGES[:0]}, {3: IMAGES[:8]}, {"image": 1.0}],
    ids=repr,
)  # fmt: skip
def test_invalid_inputs_raise_error(engine, inputs):
    for call in (engine.step, engine.gradients, engine.observe):
        with pytest.raises(ke.KfacError):
            call(inputs, Y)


WRONG_TARGETS = pytest.mark.parametrize(
    "targets",
    ["text", 3, THING, Y[:5], Y.astype(float), {}, {"nothing": Y}, RAGGED, [None] * 8,
     np.ma.masked_array(Y, mask=True), Y + 100, -Y - 1, np.array(["a"] * 8)],
    ids=repr,
)  # fmt: skip


@WRONG_TARGETS
def test_invalid_targets_raise_error(engine, targets):
    for call in (engine.step, engine.gradients):
        with pytest.raises(ke.KfacError):
            call(X, targets)


def test_missing_targets_raise_error(engine):
    for call in (engine.step, engine.gradients):
        with pytest.raises(ke.KfacError):
            call(X, None)


@WRONG_TARGETS
@pytest.mark.parametrize("mode", MODES)
def test_observe_rejects_targets_like_step(mode, targets):
    engine = engine_of(estimation_mode=mode)
    with pytest.raises(ke.KfacError) as by_step:
        engine.step(X, targets)
    with pytest.raises(type(by_step.value)) as by_observe:
        engine.observe(X, targets)
    assert str(by_observe.value) == str(by_step.value)
    assert engine.counter == 0
    assert all(factor.average.value is None for factor in engine.estimator.factors)


@pytest.mark.parametrize("mode", sorted(MODES.keys() - {"empirical"}))
def test_observe_ignores_targets_except_in_empirical_mode(mode):
    with_targets, without = (engine_of(estimation_mode=mode) for _ in range(2))
    with_targets.observe(X, Y)
    without.observe(X)
    for one, other in zip(with_targets.estimator.factors, without.estimator.factors, strict=True):
        np.testing.assert_array_equal(one.cov, other.cov)


def test_observe_rejects_targets_with_infinite_loss():
    engine = engine_of(loss="normal")
    targets = np.full((8, 10), 3e38, np.float32)
    for call in (engine.step, engine.observe):
        with pytest.raises(ke.NonFiniteError, match="the loss of the batch is inf"):
            call(X, targets)


def test_observe_rejects_targets_of_loss_without_target_name():
    engine = engine_of(loss=LOSS("logits"))
    for targets in Y, {"logits": Y}:
        with pytest.raises(ke.InputError, match="the loss on 'logits' has no targets to evaluate"):
            engine.observe(X, targets)
    engine.observe(X)


@pytest.mark.parametrize(
    ("loss", "call"),
    [
        (LOSS("logits"), "CategoricalLogitsNegativeLogProbLoss('logits', targets='…')"),
        (
            ke.NormalMeanVarianceNegativeLogProbLoss("mean", "var"),
            "NormalMeanVarianceNegativeLogProbLoss('mean', 'var', targets='…')",
        ),
    ],
)
def test_error_of_a_loss_without_targets_says_how_to_make_one_with_them(loss, call):
    with pytest.raises(ke.InputError, match=re.escape(f"in the loss object, {call}, or")):
        loss.evaluate()
    assert repr(type(loss)(*loss.inputs, targets="…")) == call


@pytest.mark.parametrize(
    "change",
    [None, 3, "text", RAGGED, THING, [], {}, np.array(["a"]), MASKED, np.ones(3), 1j,
     np.array([THING])],
    ids=repr,
)  # fmt: skip
def test_invalid_gradients_and_parameters_raise_error(engine, gradients, change):
    for call in (engine.precondition, engine.set_parameters):
        with pytest.raises(ke.KfacError):
            call(gradients | {"dense1.bias": change})
        with pytest.raises(ke.KfacError):
            call({"nothing": np.ones(3)})
        if not isinstance(change, dict):
            with pytest.raises(ke.KfacError):
                call(change)


@pytest.mark.parametrize("exp", ["-1", None, [-1], 7, float("nan"), 1j])
def test_invalid_power_raises_error(engine, gradients, exp):
    with pytest.raises(ke.KfacError):
        engine.precondition(gradients, exp=exp)


@pytest.mark.parametrize("path", [None, 3, "", "nowhere/s.safetensors", "a\0b"])
def test_invalid_path_raises_error(engine, path):
    for call in (engine.save, engine.load, engine.export):
        with pytest.raises(ke.KfacError):
            call(path)


@pytest.mark.parametrize("size", [0, -1, "8", None, 1.5])
def test_invalid_batch_size_raises_error(engine, size):
    with pytest.raises(ke.KfacError):
        engine.memory(size)


# -- the level of the specification ----------------------------------------------------------------

SHAPES = {"w": (4, 3), "b": (3,), "x": (8, 4), "s": (8, 3), "k": (3, 3, 2, 4), "i": (8, 5, 5, 2)}


def collection(**options):
    return ke.LayerCollection(graph=SHAPES, **options)


REGISTRATIONS = {
    "no parameters": lambda lc: lc.register_fully_connected(None, "x", "s"),
    "a number of parameters": lambda lc: lc.register_fully_connected(3, "x", "s"),
    "an unknown parameter": lambda lc: lc.register_conv2d("q", [1] * 4, "SAME", "i", "o"),
    "inputs without a name": lambda lc: lc.register_fully_connected("w", None, "s"),
    "outputs without a name": lambda lc: lc.register_fully_connected("w", "x", 3),
    "an approximation that is a number": lambda lc: lc.register_fully_connected(
        "w", "x", "s", approx=3
    ),
    "an approximation that is a list": lambda lc: lc.register_fully_connected(
        "w", "x", "s", approx=["kron"]
    ),
    "an unknown layout": lambda lc: lc.register_fully_connected("w", "x", "s", weight_format="ab"),
    "reuse that is a word": lambda lc: lc.register_fully_connected("w", "x", "s", reuse="yes"),
    "strides that are a number": lambda lc: lc.register_conv2d("k", 1, "SAME", "i", "o"),
    "strides that are words": lambda lc: lc.register_conv2d("k", ["a"] * 4, "SAME", "i", "o"),
    "padding that is a number": lambda lc: lc.register_conv2d("k", [1] * 4, 3, "i", "o"),
    "padding that is unknown": lambda lc: lc.register_conv2d("k", [1] * 4, "HALF", "i", "o"),
    "a batch that is nothing": lambda lc: lc.register_generic("w", None),
    "a batch of none": lambda lc: lc.register_generic("w", 0),
    "a default that is unknown": lambda lc: lc.set_default_approximation("conv2d", None),
    "a kind that is unknown": lambda lc: lc.set_default_approximation(None, "kron"),
    "a loss of a wrong class": lambda lc: lc.register_loss_function(3, "x", "loss"),
    "logits without a name": lambda lc: lc.register_categorical_predictive_distribution(3),
    "a weight that is a word": lambda lc: lc.register_categorical_predictive_distribution(
        "z", coeff="1"
    ),
    "linked nothing": lambda lc: lc.define_linked_parameters(None),
}


@pytest.mark.parametrize("call", REGISTRATIONS)
def test_invalid_registration_raises_error(call):
    with pytest.raises(ke.KfacError):
        REGISTRATIONS[call](collection())


def estimator(**options):
    lc = collection()
    lc.register_categorical_predictive_distribution("s", targets="t", name="loss")
    lc.register_fully_connected(("w", "b"), "x", "s")
    usual = {"variables": ("w", "b"), "cov_ema_decay": 0.9, "damping": 0.1, "layer_collection": lc}
    return ke.FisherEstimator(**usual | options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("variables", None), ("variables", ("w",)), ("variables", 3), ("cov_ema_decay", "0.9"),
     ("cov_ema_decay", None), ("cov_ema_decay", 2), ("cov_ema_decay", -0.1), ("damping", None),
     ("damping", "1"), ("damping", -1.0), ("exps", -1), ("exps", ("a",)), ("exps", None),
     ("estimation_mode", None), ("estimation_mode", ["exact"]), ("layer_collection", 3),
     ("batch_size", "8"), ("seed", -1), ("seed", "0")],
)  # fmt: skip
def test_invalid_estimator_call_raises_error(name, value):
    with pytest.raises(ke.KfacError):
        estimator(**{name: value})


def test_unknown_estimator_attribute_raises_error():
    with pytest.raises(ke.UnknownAttributeError, match="did you mean 'damping'"):
        estimator().dampin = 3

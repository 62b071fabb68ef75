"""The file of ``differentiate`` computes the loss of an engine, for every option of the loss."""

import numpy as np
import pytest
from onnx import parser
from scipy import special

import kfac_engine as ke
from kfac_engine.losses.base import ElementwiseLoss
from kfac_engine.losses.kinds import LossKind
from tests import models
from tests.comparing import assert_arrays_equal
from tests.graph.running import outputs

OPTIONS = {
    "ignored": ("categorical", {"ignore_index": -100}),
    "another index": ("categorical", {"ignore_index": 1}),
    "class weights": ("categorical", {"class_weights": [0.5, 2.0, 1.0]}),
    "smoothing": ("categorical", {"label_smoothing": 0.2}),
    "all of them": ("categorical", {"class_weights": [0.5, 2.0, 1.0], "label_smoothing": 0.2}),
    "binary, ignored": ("multi_bernoulli", {"ignore_index": -1}),
    "positive weights": ("multi_bernoulli", {"positive_weights": [0.5, 2.0, 1.0]}),
    "one positive weight": ("multi_bernoulli", {"positive_weights": 3.0}),
    "binary smoothing": ("multi_bernoulli", {"label_smoothing": 0.2}),
    "normal": ("normal", {"ignore_index": 7}),
}


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("name", ["mlp", "token_mlp"])
@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS)
def test_file_computes_the_loss_of_an_engine(case, name, reduction):
    loss, options = case
    model, rng = models.MODELS[name](), np.random.default_rng(0)
    inputs = models.random_inputs(model, batch=6)
    kind = LossKind(loss, **options)
    engine = ke.Engine.from_onnx(model, loss=kind, reduction=reduction, threads=1)
    z = engine.trace(inputs)["output"]
    shape = z.shape[:-1] if loss == "categorical" else z.shape
    targets = rng.integers(0, 3 if loss == "categorical" else 2, shape)
    targets[rng.random(shape) < 0.3] = options.get("ignore_index", 0)
    targets = targets if loss == "categorical" else targets.astype(np.float32)
    expected = engine.gradients(inputs, targets)
    file = ke.differentiate(model, kind, reduction=reduction)
    found = outputs(file, {**inputs, "targets": targets})
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    for key, array in expected.gradients.items():
        np.testing.assert_allclose(found[f"gradient/{key}"], array, rtol=1e-4, atol=1e-6)


# -- weights, masks and probabilities: against closed forms ----------------------------------------

N, C, T = 4, 3, 2
RNG = np.random.default_rng(0)
W = np.array([0.5, 2.0, 1.5])
Z = {(): RNG.standard_normal((N, C)), (T,): RNG.standard_normal((N, T, C))}
AXES = {(): "N", (T,): "N,T"}


def smooth(rows, part=0.2):
    return rows * (1 - part) + part / C


def of_classes(z, t, w=1.0, part=0.0):
    """The terms of softmax cross-entropy on rows, with their sum kept as one entry."""
    return -(smooth(t, part) * w * special.log_softmax(z, -1)).sum(-1, keepdims=True)


def of_bits(z, t, w=1.0, part=0.0):
    t = t * (1 - part) + part / 2
    return -(w * t * special.log_expit(z) + (1 - t) * special.log_expit(-z))


def huber(z, t, delta=0.7):
    e = abs(z - t)
    terms = np.where(e < delta, e**2 / 2, delta * (e - delta / 2))
    ends = 2 * np.exp(-(delta**2) / 2) / delta
    return terms + np.log(np.sqrt(2 * np.pi) * special.erf(delta / np.sqrt(2)) + ends)


# Name to loss, its terms, and the kind of its targets.
LOSSES = {
    "classes": (ke.Categorical(), of_classes, "ids"),
    "classes, ignored": (ke.Categorical(ignore_index=1), of_classes, "ids"),
    "classes, weights, smoothing": (
        ke.Categorical(class_weights=W, label_smoothing=0.2), lambda z, t: of_classes(z, t, W, 0.2),
        "ids"),
    "probabilities": (ke.Categorical(), of_classes, "rows"),
    "probabilities, smoothing": (
        ke.Categorical(label_smoothing=0.2), lambda z, t: of_classes(z, t, 1.0, 0.2), "rows"),
    "probabilities, weights": (
        ke.Categorical(class_weights=W), lambda z, t: of_classes(z, t, W), "rows"),
    "probabilities, weights, smoothing": (
        ke.Categorical(class_weights=W, label_smoothing=0.2), lambda z, t: of_classes(z, t, W, 0.2),
        "rows"),
    "binary": (ke.MultiBernoulli(), of_bits, "shares"),
    "binary, ignored": (ke.MultiBernoulli(ignore_index=1), of_bits, "bits"),
    "binary, positive weights, smoothing": (
        ke.MultiBernoulli(positive_weights=W, label_smoothing=0.2),
        lambda z, t: of_bits(z, t, W, 0.2), "shares"),
    "normal": (
        ke.Normal(var=0.3), lambda z, t: (z - t) ** 2 / 0.6 + 0.5 * np.log(0.6 * np.pi), "shares"),
    "L1": (ke.L1(scale=0.7), lambda z, t: abs(z - t) / 0.7 + np.log(1.4), "shares"),
    "Huber": (ke.Huber(delta=0.7), huber, "shares"),
    "Huber, ignored": (ke.Huber(delta=0.7, ignore_index=1), huber, "bits"),
    "Poisson": (ke.Poisson(), lambda z, t: np.exp(z) - t * z + special.gammaln(t + 1), "counts"),
    "Poisson, ignored": (
        ke.Poisson(ignore_index=1), lambda z, t: np.exp(z) - t * z + special.gammaln(t + 1), "bits",
    ),
}  # fmt: skip


def targets_for(kind, shape):
    draw = np.random.default_rng(1)
    return {
        "ids": lambda: draw.integers(0, C, shape[:-1]),
        "rows": lambda: draw.dirichlet(np.ones(C), shape[:-1]),
        "bits": lambda: draw.integers(0, 2, shape).astype(float),
        "shares": lambda: draw.random(shape),
        "counts": lambda: draw.integers(0, 30, shape).astype(float) ** 2,
    }[kind]()


def closed_form(case, z, targets, weights, reduction):
    """The reduced loss in float64; ``weights`` broadcast to the logits."""
    kind, terms, form = LOSSES[case]
    index, w = kind.options.get("ignore_index"), np.broadcast_to(weights, z.shape).astype(float)
    if form == "ids":
        hidden = (targets == index)[..., None]
        divisors = w * ~hidden
        if kind.options.get("class_weights") is not None:
            divisors = divisors * W[targets][..., None]
        targets = np.eye(C)[targets]
    else:
        hidden = (targets == index) & (form != "rows")
        divisors = w * ~hidden
    w = w * ~hidden
    total = terms(z, np.where(w > 0, targets, 0.5))
    total = (np.where(w > 0, total, 0) * w)[..., : total.shape[-1]].sum()
    return total / {"mean": divisors.sum() / C, "batch_mean": N, "sum": 1}[reduction]


def identity(positions):
    """A model whose output is its input."""
    axes = AXES[positions]
    return parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (double[{axes},{C}] z) => (double[{axes},{C}] y) {{ y = Identity(z) }}""")


def run(model, feeds):
    return outputs(model, {entry.name: feeds[entry.name] for entry in model.graph.input})


def given_weights(form, shape, entries):
    """Weights of a form, some of them zero, and the same as an array that broadcasts to logits."""
    own = {
        "targets": shape if entries else shape[:-1],
        "predictions": shape[:-1],
        "examples": shape[:1],
    }[form]
    weights = np.random.default_rng(2).random(own)
    weights.ravel()[1::3] = 0
    axes = len(shape) - len(own)
    return weights, weights.reshape(own + (1,) * axes)


@pytest.mark.parametrize("positions", [(), (T,)], ids=["rows", "positions"])
@pytest.mark.parametrize("form", ["targets", "predictions", "examples", None])
@pytest.mark.parametrize("case", LOSSES)
def test_file_has_weights_and_probabilities(case, form, positions):
    kind, _, targets = LOSSES[case]
    z, t = Z[positions], targets_for(targets, Z[positions].shape)
    entries = targets not in ("ids", "rows")
    weights, spread = (None, 1.0) if form is None else given_weights(form, z.shape, entries)
    for reduction in ("mean", "batch_mean", "sum") if form == "targets" else ("mean",):
        for kinds in ("weights", "mask") if form else ("",):
            given, like = weights, spread
            if kinds == "mask":
                given, like = weights > 0, spread > 0
            asked = {kinds: form} if form else {}
            file = ke.differentiate(
                identity(positions), kind, wrt="z", reduction=reduction,
                probabilities=targets == "rows", **asked,
            )  # fmt: skip
            found = run(file, {"z": z, "targets": t, kinds: given})
            expected = closed_form(case, z, t, like, reduction)
            assert found["loss"] == pytest.approx(expected, rel=1e-9)
            for index in list(np.ndindex(z.shape))[::5]:
                step = np.zeros(z.shape)
                step[index] = 1e-6
                ends = (closed_form(case, z + k * step, t, like, reduction) for k in (1, -1))
                slope = (next(ends) - next(ends)) / 2e-6
                assert found["gradient/z"][index] == pytest.approx(slope, abs=2e-7, rel=1e-6)


@pytest.mark.parametrize("case", LOSSES)
def test_file_of_a_loss_can_be_differentiated_again(case):
    kind, _, form = LOSSES[case]
    shape = Z[(T,)].shape
    z, t = Z[(T,)], targets_for(form, shape)
    direction = np.random.default_rng(3).standard_normal(shape)
    file = ke.differentiate(identity((T,)), kind, wrt="z", probabilities=form == "rows")
    feeds = {"z": z, "targets": t, "cotangent": direction}
    again = ke.differentiate(file, output="loss", wrt="z")
    found = run(again, {**feeds, "cotangent": np.ones(())})
    slopes = run(file, feeds)["gradient/z"]
    np.testing.assert_allclose(found["gradient/z_2"], slopes, atol=1e-12)
    product = run(ke.differentiate(file, output="y", wrt="z"), feeds)["gradient/z_2"]
    np.testing.assert_array_equal(product, direction)
    if "L1" not in case:  # whose second derivative is zero
        twice = run(ke.differentiate(file, output="gradient/z", wrt="z"), feeds)["gradient/z_2"]
        ends = [run(file, {**feeds, "z": z + k * direction})["gradient/z"] for k in (1e-6, -1e-6)]
        np.testing.assert_allclose(twice, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-7)


class LogCosh(ElementwiseLoss):
    """A loss of its own class: the density 1 / (π cosh(z − t))."""

    def negative_log_probs(self, values, targets):
        e = abs(values[self.inputs[0]] - targets)
        return e + np.log1p(np.exp(-2 * e)) + np.log(np.pi / 2)

    def gradient_of(self, values, targets):
        return {self.inputs[0]: np.tanh(values[self.inputs[0]] - targets)}

    def information(self, values):
        return {self.inputs[0]: np.full_like(values[self.inputs[0]], 0.5)}

    def sample(self, values, rng):
        return values[self.inputs[0]] + np.arctanh(rng.uniform(-0.9, 0.9, values["y"].shape))


def normal_nats(z, s, t):
    return (z - t) ** 2 / (2 * s) + 0.5 * np.log(2 * np.pi * s)


# Losses that read other values, or have their own class, and their terms by z.
OWN = {
    "own class": (
        LogCosh(("y",), None, None, -1), lambda z, t: np.log(np.pi * np.cosh(z - t))),
    "variance": (
        ke.NormalMeanVarianceNegativeLogProbLoss("y", "variance"),
        lambda z, t: normal_nats(z, np.exp(z), t)),
}  # fmt: skip


@pytest.mark.parametrize("dims", ["N,3", "N,T,3", "A,B,C"])
@pytest.mark.parametrize("case", OWN)
def test_file_has_losses_of_their_own_class(case, dims):
    loss, terms = OWN[case]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (double[{dims}] z) => (double[{dims}] y, double[{dims}] variance) {{
            y = Identity(z) variance = Exp(z) }}""")
    sample = {"z": np.ones((2, 3) if dims == "N,3" else (2, 4, 3))}
    form = None if dims == "A,B,C" else "targets"
    file = ke.differentiate(
        model, loss, wrt="z", weights=form, sample_inputs=sample, batch_axes={"z": 0}
    )
    rng = np.random.default_rng(0)
    shape = {"N,3": (5, 3), "N,T,3": (5, 2, 3), "A,B,C": (5, 2, 6)}[dims]
    z, t = rng.standard_normal(shape), rng.standard_normal(shape)
    w = np.ones(shape) if form is None else rng.integers(0, 3, shape) * 0.5
    found = run(file, {"z": z, "targets": t, "weights": w})

    def expected(z):
        return (w * terms(z, t)).sum() / w.sum() * shape[-1]

    assert found["loss"] == pytest.approx(expected(z), rel=1e-9)
    for index in list(np.ndindex(shape))[::3]:
        step = np.zeros(shape)
        step[index] = 1e-6
        slope = (expected(z + step) - expected(z - step)) / 2e-6
        assert found["gradient/z"][index] == pytest.approx(slope, abs=1e-8, rel=1e-6)


# Axes of which the file declares no size, the axis of the classes, and the sizes of a batch.
OPEN = {
    "positions": ("N,T,C", -1, (4, 5, 3), {}),
    "images": ("N,C,H,W", 1, (2, 3, 4, 5), {}),
    "weights": ("N,C,H,W", 1, (2, 3, 4, 1), {"class_weights": W}),
    "smoothing": ("N,T,C", 2, (4, 5, 3), {"label_smoothing": 0.2}),
    "both": ("N,C,T", 1, (4, 3, 5), {"class_weights": W, "label_smoothing": 0.2}),
    "text": ("N,T,C", -1, (4, 5, 3), {}),
}


@pytest.mark.parametrize("weights", [None, "targets", "examples"])
@pytest.mark.parametrize("case", OPEN)
def test_all_axes_of_a_file_may_have_other_sizes_than_the_sample(case, weights):
    dims, axis, shape, options = OPEN[case]
    kind = ke.CausalLM() if case == "text" else ke.Categorical(**options)
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (double[{dims}] z) => (double[{dims}] y) {{ y = Identity(z) }}""")
    sample = {"z": np.ones([3 if k == axis % len(shape) else 2 for k in range(len(shape))])}
    common = {"class_axis": axis, "sample_inputs": sample, "batch_axes": {"z": 0}}
    rng = np.random.default_rng(0)
    z, t = rng.standard_normal(shape), rng.integers(0, C, np.delete(shape, axis))
    t[0, 0] = -100
    w = rng.random(t.shape if weights == "targets" else t.shape[:1])
    for reduction in ("mean", "batch_mean"):
        file = ke.differentiate(
            model, kind, wrt="z", weights=weights, reduction=reduction, **common
        )
        found = run(file, {"z": z, "targets": t, "weights": w})
        rows, spread = np.moveaxis(z, axis, -1), w.reshape(w.shape + (1,) * (t.ndim - w.ndim))
        counts = (t != -100) * (spread if weights else 1.0)
        labels = np.where(t < 0, 0, t)
        if case == "text":
            rows, labels, counts = rows[:, :-1], labels[:, 1:], counts[:, 1:]
        of_classes_ = np.asarray(options.get("class_weights", np.ones(C)))
        terms = of_classes(rows, np.eye(C)[labels], of_classes_, options.get("label_smoothing", 0))
        divisor = (counts * of_classes_[labels]).sum() if reduction == "mean" else shape[0]
        expected = (terms[..., 0] * counts).sum() / divisor
        assert found["loss"] == pytest.approx(expected, rel=1e-9)
        # The gradient by a direction, from the file itself.
        direction = rng.standard_normal(shape)
        ends = [
            run(file, {"z": z + k * direction, "targets": t, "weights": w})["loss"]
            for k in (1e-6, -1e-6)
        ]
        slope = (ends[0] - ends[1]) / 2e-6
        assert (found["gradient/z"] * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_weights_and_masks_of_the_file_are_not_those_of_other_targets():
    z, t = Z[()], targets_for("ids", (N, C))
    file = ke.differentiate(identity(()), "categorical", wrt="z", weights="targets")
    one, other = (run(file, {"z": z, "targets": t, "weights": w})["loss"] for w in np.eye(N)[:2])
    terms = of_classes(z, np.eye(C)[t])[:, 0]
    assert (one, other) == (pytest.approx(terms[0]), pytest.approx(terms[1]))


@pytest.mark.parametrize("case", ["classes", "probabilities", "binary", "normal", "Poisson"])
def test_what_lies_under_a_mask_is_not_read(case):
    kind, _, form = LOSSES[case]
    z, t = Z[(T,)].copy(), targets_for(form, Z[(T,)].shape)
    mask = np.ones((N, T), bool)
    mask[1, 1:] = mask[3] = False
    file = ke.differentiate(
        identity((T,)), kind, wrt="z", mask="predictions", probabilities=form == "rows"
    )
    plain = run(file, {"z": z, "targets": t, "mask": mask})
    z[~mask] = 1e6
    t[~mask] = 99 if form == "ids" else np.nan
    other = run(file, {"z": z, "targets": t, "mask": mask})
    assert_arrays_equal(other, plain)
    assert not other["gradient/z"][~mask].any()


def test_the_inputs_of_several_losses_have_the_names_of_their_outputs():
    model = models.two_outputs()
    inputs, rng = models.random_inputs(model, batch=5), np.random.default_rng(0)
    engine = ke.Engine.from_onnx(
        model, loss=["categorical", "normal"], output=["logits", "mean"], threads=1
    )
    shapes = {name: engine.trace(inputs)[name].shape for name in ("logits", "mean")}
    targets = {
        "logits": rng.integers(0, 2, shapes["logits"][0]),
        "mean": rng.standard_normal(shapes["mean"]).astype("float32"),
    }
    weights = {"logits": rng.random(5), "mean": np.array([0, 1, 2, 0, 0.5])}
    file = ke.differentiate(
        model, ["categorical", "normal"], output=["logits", "mean"], weights="examples"
    )
    feeds = {f"targets of {name}": array for name, array in targets.items()}
    feeds |= {f"weights of {n}": array.astype("float32") for n, array in weights.items()}
    found = run(file, {**inputs, **feeds})
    expected = engine.gradients(inputs, ke.Weighted(targets, weights))
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    for key, array in expected.gradients.items():
        np.testing.assert_allclose(found[f"gradient/{key}"], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1.0, np.nan])
def test_a_wrong_weight_makes_the_loss_nan(wrong):
    file = ke.differentiate(identity(()), "categorical", wrt="z", weights="examples")
    weights = np.ones(N)
    weights[2] = wrong
    feeds = {"z": Z[()], "targets": targets_for("ids", (N, C)), "weights": weights}
    assert np.isnan(run(file, feeds)["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "categorical", "weights": "rows"}, "weights must be one of targets"),
        ({"loss": "categorical", "mask": True}, "mask must be one of targets"),
        (
            {"loss": "categorical", "weights": "targets", "mask": "targets"},
            "leave weights or mask out",
        ),
        ({"loss": "normal", "probabilities": True}, "leave probabilities out"),
        ({"loss": "categorical", "probabilities": 1}, "must be True or False"),
        ({"weights": "targets"}, "name a loss"),
    ],
)
def test_inputs_that_cannot_be_are_refused(options, message):
    with pytest.raises(ke.InputError, match=message):
        ke.differentiate(identity(()), wrt="z", **options)


def test_examples_among_positions_have_no_weights_of_their_own():
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (double[N,{T},{C}] z) => (double[M,{C}] y) <int64[2] s = {{-1, {C}}}> {{
            y = Reshape(z, s) }}""")
    with pytest.raises(ke.UnsupportedError, match="choose 'predictions'"):
        ke.differentiate(model, "categorical", wrt="z", weights="examples")

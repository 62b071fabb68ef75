"""Random nodes: their distributions, and equal numbers for equal seeds, passes and states."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke
from tests.comparing import assert_arrays_equal
from tests.training.interruptions import InterruptionError, interrupt_at

PASSES, WIDTH = 300, 8
# A mean over the passes lies within this many deviations of the truth; the seed is fixed.
SURE = 4.5


def model(random, dtype="float", inputs="", weights=()):
    """A network whose values ``h`` (n, 8) random nodes read; its output is ``y``."""
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    g ({dtype}[n, 4] x{inputs}) => ({dtype}[n, 8] y) {{ h = MatMul(x, W) {random} }}"""
    proto = parser.parse_model(text)
    real = np.float64 if dtype == "double" else np.float32
    rows = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(real)
    for name, array in (("W", rows), *weights):
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


DROPOUT = (
    "r = Constant<value_float = 0.3>() t = Constant<value = bool {1}>() y, k = Dropout(h, r, t)"
)
ONE_ROW = np.ones((1, 4), np.float32)
LOGITS = np.log(np.arange(1.0, 9.0, dtype=np.float32))
# Each has the nodes, the random value, and mean and deviation of an entry.
KINDS = {
    "Dropout": (DROPOUT.replace("0.3", "0.25"), "y", 0.75, 0.75**0.5 * 0.5),
    "Dropout without ratio": ("""t = Constant<value = bool {1}>() r = Identity(t)
        y, k = Dropout(h, , t)""", "y", 0.5, 0.5),
    "RandomNormal": ("""u = RandomNormal<mean = 2.0, scale = 3.0, shape = [1, 8]>()
        y = Mul(h, u)""", "u", 2.0, 3.0),
    "RandomNormalLike": ("u = RandomNormalLike<seed = 7.0>(h) y = Mul(h, u)", "u", 0.0, 1.0),
    "RandomUniform": ("""u = RandomUniform<low = -1.0, high = 2.0, shape = [8]>()
        y = Mul(h, u)""", "u", 0.5, 0.75**0.5),
    "RandomUniformLike": ("u = RandomUniformLike(h) y = Mul(h, u)", "u", 0.5, 12**-0.5),
    "Bernoulli": ("""p = Constant<value = float[1, 8] {0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2}>()
        u = Bernoulli(p) y = Mul(h, u)""", "u", 0.2, 0.4),
}  # fmt: skip


def draws(net, name, passes=PASSES, inputs=None):
    return np.stack([net.run(inputs or {"x": ONE_ROW})[name].ravel() for _ in range(passes)])


@pytest.mark.parametrize("kind", KINDS)
def test_each_entry_has_the_distribution_of_its_node_and_is_independent(kind):
    nodes, name, mean, deviation = KINDS[kind]
    values = draws(ke.load_model(model(nodes)), name)
    drawn = ((values != 0 if name == "y" else values) - mean) / deviation
    assert drawn.shape == (PASSES, WIDTH)
    bound = SURE / PASSES**0.5
    assert abs(drawn.mean(0)).max() < bound
    products = {
        "the next pass": (drawn[1:] * drawn[:-1]).mean(0),
        "the next entry": (drawn[:, 1:] * drawn[:, :-1]).mean(0),
    }
    for what, product in products.items():
        assert abs(product).max() < bound, what
    assert (drawn**2).mean() == pytest.approx(1, abs=0.1)  # 2400 entries, kurtosis below 4


def test_classes_are_drawn_with_their_probabilities():
    nodes = """u = Multinomial<sample_size = 500>(z) c = Cast<to = 1>(u)
        m = ReduceMean<keepdims = 1>(c) y = Add(h, m)"""
    proto = model(nodes, weights=[("z", LOGITS[None])])
    classes = draws(ke.load_model(proto, trainable="W"), "u", 4).ravel()
    share = np.arange(1, 9) / 36
    counts = np.bincount(classes, minlength=8)
    assert (abs(counts - 2000 * share) < SURE * (2000 * share * (1 - share)) ** 0.5).all()


def test_many_entries_are_independent_in_pairs_of_rows_columns_and_passes():
    net, x = ke.load_model(model(DROPOUT)), np.ones((700, 4), np.float32)
    kept = np.stack([net.run({"x": x})["y"] != 0 for _ in range(4)])
    z = ((kept - 0.7) / 0.21**0.5).reshape(4, -1)
    for lag in (0, 1, WIDTH, 256, 512):
        for left, right in ((z, z), (z[1:], z[:-1])):
            a, b = left[:, lag:], right[:, : z.shape[1] - lag]
            if lag or left is not right:
                assert abs((a * b).mean()) < SURE / a.size**0.5
    assert abs(z.mean()) < SURE / z.size**0.5


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_gradients_belong_to_the_mask_of_the_forward_pass(dtype):
    net = ke.load_model(model(DROPOUT, dtype))
    real = np.float64 if dtype == "double" else np.float32
    rng = np.random.default_rng(1)
    x, g = rng.standard_normal((5, 4)).astype(real), rng.standard_normal((5, 8)).astype(real)
    trace = net.run({"x": x})
    y = trace["y"].copy()
    gradient = trace.vjp({"y": g}, ["W"])["W"]
    mask = y != 0
    assert 0 < mask.sum() < mask.size
    h = x @ net.parameters["W"]
    tolerance = 1e-5 if dtype == "float" else 1e-7  # the ratio is a float32
    np.testing.assert_allclose(y, np.where(mask, h / 0.7, 0), rtol=tolerance)
    np.testing.assert_allclose(gradient, x.T @ (g * mask / 0.7), rtol=10 * tolerance, atol=1e-7)
    trace.release(["y"])  # a later pass over the batch computes it again
    np.testing.assert_array_equal(trace["y"], y)


@pytest.mark.parametrize("training", [True, False])
def test_a_training_mode_that_is_an_input_decides(training):
    net = ke.load_model(model(
        "r = Constant<value_float = 0.5>() y, k = Dropout(h, r, t)", inputs=", bool t"
    ), sample_inputs={"x": ONE_ROW, "t": np.array(True)})  # fmt: skip
    trace = net.run({"x": np.ones((40, 4), np.float32), "t": np.array(training)})
    h = np.ones((40, 4), np.float32) @ net.parameters["W"]
    expected = np.where(trace["y"] != 0, h / 0.5, 0) if training else h
    np.testing.assert_allclose(trace["y"], expected, rtol=1e-6)
    assert trace["y"].all() != training


def test_a_ratio_of_zero_keeps_all_elements():
    net = ke.load_model(model(DROPOUT.replace("0.3", "0.0")))
    trace = net.run({"x": ONE_ROW})
    np.testing.assert_array_equal(trace["y"], trace["h"])


# -- engines ---------------------------------------------------------------------------------------

X = np.random.default_rng(2).standard_normal((48, 4)).astype(np.float32)
Y = np.random.default_rng(3).integers(0, 8, 48)
NOISE = "u = RandomNormalLike(h) y = Add(h, u)"


def engine(nodes=DROPOUT, **options):
    return ke.Engine.from_onnx(model(nodes), loss="categorical", **options)


def test_the_seed_determines_the_numbers_and_parts_draw_their_own():
    losses = {seed: [engine(seed=seed).loss(X, Y) for _ in range(2)] for seed in (0, 1)}
    assert losses[0][0] == losses[0][1] != losses[1][0]
    one = engine()
    assert one.loss(X, Y) != one.loss(X, Y)
    same = X[:24], Y[:24]
    masks = [one.trace(*part)["y"] for part in (same, same)]
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("nodes", [DROPOUT, NOISE], ids=["dropout", "noise"])
def test_predictions_repeat_and_do_not_change_the_numbers_of_steps(nodes):
    first, second = engine(nodes), engine(nodes)
    outputs = [first.predict(X) for _ in range(2)]
    np.testing.assert_array_equal(*outputs)
    metrics = [first.evaluate((X, Y)) for _ in range(2)]
    assert metrics[0] == metrics[1]
    if nodes is NOISE:
        nll = np.log(np.exp(outputs[0]).sum(1)) - outputs[0][np.arange(48), Y]
        assert metrics[0]["loss"] == pytest.approx(nll.mean(), rel=1e-5)
    assert first.loss(X, Y) == second.loss(X, Y)


def test_a_refused_batch_draws_no_numbers():
    first, second = ke.AdamW(engine()), ke.AdamW(engine())
    with pytest.raises(ke.NonFiniteError):
        first.step(np.full_like(X, 3e38), Y)
    assert first.step(X, Y).loss == second.step(X, Y).loss


@pytest.mark.parametrize(
    ("optimizer", "form"), [("kfac", "training"), ("adamw", "train_form"), ("muon", "training")]
)
def test_a_resumed_run_draws_the_numbers_of_a_run_without_interruption(optimizer, form, tmp_path):
    nodes = DROPOUT if form == "training" else DROPOUT.replace(", t)", ")")

    def run(**more):
        options = {"train_form": form == "train_form", "seed": 3}
        given = {"optimizer": optimizer, "epochs": 3, "batch_size": 10, "accumulate": 2}
        return ke.fit(engine(nodes, **options), (X, Y), validation=(X, Y), **given | more)

    whole, again = run(), run()
    with pytest.raises(InterruptionError):
        run(checkpoint=tmp_path, checkpoint_every=2, callbacks=[interrupt_at(5)])
    resumed = run(checkpoint=tmp_path, resume=True)
    for other in (again, resumed):
        assert [r["loss"] for r in other.records] == [r["loss"] for r in whole.records]
        assert_arrays_equal(other.engine.parameters, whole.engine.parameters)

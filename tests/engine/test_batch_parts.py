"""A batch in parts has the losses, gradients and statistics of the whole batch."""

import itertools

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.batch_passes import BatchPasses
from tests import models
from tests.comparing import assert_arrays_near
from tests.distributed.threads import run
from tests.models import parsed
from tests.training import norm_net, softmax_net as net

N = 12
CUTS = [0, 5, 6, 12]
# Of the largest entry. ONNX Runtime has no convolution in float64.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
DTYPES = {"mlp": "float64", "token_mlp": "float64", "cnn": "float32", "layer_norm": "float32"}


def cut(inputs, targets, edges=CUTS):
    """The parts of a batch."""
    return [
        ({name: array[low:high] for name, array in inputs.items()}, targets[low:high])
        for low, high in itertools.pairwise(edges)
    ]


def engine_of(name, **options):
    model = models.MODELS[name](dtype=DTYPES[name])
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1, **options)
    return model, engine


def batch_of(model, engine, seed=0):
    inputs = models.random_inputs(model, batch=N, seed=seed)
    shape = engine.trace(inputs)["output"].shape
    return inputs, np.random.default_rng(seed).integers(0, shape[-1], shape[:-1])


def averages(engine):
    return {str(i): factor.cov for i, factor in enumerate(engine.estimator.factors)}


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("name", DTYPES)
def test_loss_and_gradients_are_those_of_the_whole_batch(name, reduction):
    model, engine = engine_of(name, reduction=reduction)
    inputs, targets = batch_of(model, engine)
    whole, parts = engine.gradients(inputs, targets), engine.gradients(cut(inputs, targets))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert engine.loss(cut(inputs, targets)) == parts.loss
    assert_arrays_near(parts.gradients, whole.gradients, TOLERANCES[DTYPES[name]])
    assert engine.gradients([(inputs, targets)]).loss == whole.loss


MODES = ["gradients", "empirical", "exact", "curvature_prop", "curvature_prop_GGN", "exact_GGN"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DTYPES)
def test_statistics_and_draws_are_those_of_the_whole_batch(name, mode):
    assert_statistics(name, estimation_mode=mode)


@pytest.mark.parametrize("reduction", ["batch_mean", "sum"])
def test_statistics_are_those_of_the_whole_batch_for_every_reduction(reduction):
    assert_statistics("mlp", reduction=reduction)


def assert_statistics(name, **options):
    _, whole = engine_of(name, **options)
    model, parts = engine_of(name, **options)
    for seed in range(3):
        inputs, targets = batch_of(model, whole, seed)
        whole.update_statistics(whole.trace(inputs, targets))
        parts.update_statistics(cut(inputs, targets))
        assert parts.estimator.rng.bit_generator.state == whole.estimator.rng.bit_generator.state
        assert_arrays_near(averages(parts), averages(whole), 2 * TOLERANCES[DTYPES[name]])
    for one, other in zip(parts.estimator.factors, whole.estimator.factors, strict=True):
        assert one.repeats == other.repeats
        assert one.average.weight == other.average.weight


@pytest.mark.parametrize("approximation", ["kron", "ekfac"])
@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact"])
def test_steps_of_an_engine_are_those_of_the_whole_batch(mode, approximation):
    options = {"estimation_mode": mode, "approximations": {"fully_connected": approximation}}
    (model, whole), (_, parts) = (engine_of("mlp", damping=0.1, **options) for _ in range(2))
    for seed in range(3):
        inputs, targets = batch_of(model, whole, seed)
        expected, result = whole.step(inputs, targets), parts.step(cut(inputs, targets))
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert_arrays_near(result.gradients, expected.gradients, 1e-12)
        assert_arrays_near(result.natural_gradients, expected.natural_gradients, 1e-10)
        for engine, batch in (whole, (inputs, targets)), (parts, (cut(inputs, targets),)):
            engine.observe(*batch)
    assert parts.counter == whole.counter == 6
    assert_arrays_near(averages(parts), averages(whole), 1e-11)


def test_products_are_those_of_the_whole_batch():
    model, engine = engine_of("token_mlp", reduction="sum")
    inputs, targets = batch_of(model, engine)
    whole = engine.curvature_products(engine.trace(inputs, targets), examples=2 * N)
    parts = engine.curvature_products(cut(inputs, targets), examples=2 * N)
    vector = {name: np.ones_like(value) for name, value in engine.parameters.items()}
    for multiply in ("multiply_fisher", "multiply_ggn", "multiply_hessian"):
        expected = getattr(whole, multiply)(vector)
        assert_arrays_near(getattr(parts, multiply)(vector), expected, 1e-12)
    np.testing.assert_allclose(parts.quadratic_forms(vector), whole.quadratic_forms(vector))


# -- parts of other lengths ------------------------------------------------------------------------

LENGTHS = ((3, 5), (2, 2), (4, 7))  # examples, positions


def sequences():
    """A dense model over positions, float64, and parts with other numbers of positions."""
    rng = np.random.default_rng(0)
    net = models.Net("float64")
    net.op("MatMul", "x", net.weight("W", 3, 4), to="y")
    model = net.model({"x": ["batch", "length", 3]}, {"y": ["batch", "length", 4]})
    parts = [
        ({"x": rng.standard_normal((n, t, 3))}, rng.integers(0, 4, (n, t))) for n, t in LENGTHS
    ]
    return model, parts


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 47), ("batch_mean", 9), ("sum", 1)])
def test_parts_of_other_lengths_are_divided_by_all_predictions(reduction, divisor):
    """The closed form of the joined positions: 3·5 + 2·2 + 4·7 = 47."""
    model, parts = sequences()
    engine = ke.Engine.from_onnx(
        model, loss="categorical", reduction=reduction, estimation_mode="exact", threads=1
    )
    W = engine.parameters["W"]
    x = np.concatenate([inputs["x"].reshape(-1, 3) for inputs, _ in parts])
    t = np.concatenate([targets.reshape(-1) for _, targets in parts])
    p = net.probabilities(x @ W)
    result = engine.gradients(parts)
    assert result.loss == pytest.approx(-np.log(p[np.arange(47), t]).sum() / divisor)
    np.testing.assert_allclose(result.gradients["W"], x.T @ (p - np.eye(4)[t]) / divisor)
    engine.update_statistics(parts)
    inputs, outputs = engine.estimator.factors
    np.testing.assert_allclose(inputs.cov, x.T @ x / 47, rtol=1e-12)
    # F of a batch of 9 examples; G is a mean over rows, of which the block has 47 / 9.
    fisher = (np.einsum("ni,ij->nij", p, np.eye(4)) - np.einsum("ni,nj->nij", p, p)).sum(0)
    weight = {"mean": 9 / 47, "batch_mean": 1, "sum": 9}[reduction]
    np.testing.assert_allclose(outputs.cov, weight * fisher / 47, rtol=1e-12)
    assert inputs.repeats == outputs.repeats == pytest.approx(47 / 9)


def test_losses_whose_counts_differ_between_parts_have_their_own_divisors():
    """One loss is on positions, the other on examples: no common factor corrects a first pass."""
    net_ = models.Net("float64")
    net_.op("MatMul", "x", net_.weight("W", 3, 4), to="y")
    net_.op("ReduceMean", "y", net_.constant("axes", np.array([1])), to="z", keepdims=0)
    model = net_.model(
        {"x": ["batch", "length", 3]}, {"y": ["batch", "length", 4], "z": ["batch", 4]}
    )
    engine = ke.Engine.from_onnx(
        model, loss=["categorical", ke.Normal(weight=0.5)], output=["y", "z"], threads=1
    )
    rng = np.random.default_rng(0)
    parts = [
        (inputs, {"y": targets, "z": rng.standard_normal((len(targets), 4))})
        for inputs, targets in sequences()[1]
    ]
    losses, gradients = 0.0, 0.0
    for inputs, targets in parts:
        share = np.array([targets["y"].size / 47, len(targets["y"]) / 9])
        kinds = {"y": "categorical", "z": ke.Normal(weight=0.5)}
        for (output, loss), factor in zip(kinds.items(), share, strict=True):
            one = ke.Engine.from_onnx(model, loss=loss, output=output, threads=1)
            result = one.gradients(inputs, targets[output])
            losses += factor * result.loss
            gradients += factor * result.gradients["W"]
    result = engine.gradients(parts)
    assert result.loss == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(result.gradients["W"], gradients, rtol=1e-12)


# -- targets that count differently ----------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_parts_are_divided_by_the_targets_that_count(reduction):
    """Closed form: the first part has no target that counts, the others one and two."""
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((6, 3)), np.array([-7, -7, 1, -7, 0, 2])
    net_ = models.Net("float64")
    net_.op("MatMul", "x", net_.weight("W", 3, 3), to="y")
    model = net_.model({"x": ["batch", 3]}, {"y": ["batch", 3]})
    loss = ke.Categorical(ignore_index=-7)
    options = {"loss": loss, "reduction": reduction, "estimation_mode": "exact", "threads": 1}
    engine, whole = (ke.Engine.from_onnx(model, **options) for _ in range(2))
    parts = cut({"x": x}, t, [0, 2, 4, 6])
    z = x @ engine.parameters["W"]
    kept = t >= 0
    p = net.probabilities(z)[kept]
    divisor = {"mean": 3, "batch_mean": 6, "sum": 1}[reduction]
    result = engine.gradients(parts)
    assert result.loss == pytest.approx(-np.log(p[np.arange(3), t[kept]]).sum() / divisor)
    expected = x[kept].T @ (p - np.eye(3)[t[kept]]) / divisor
    np.testing.assert_allclose(result.gradients["W"], expected, rtol=1e-12)
    engine.update_statistics(parts)
    whole.update_statistics(whole.trace({"x": x}, t))
    assert_arrays_near(averages(engine), averages(whole), 1e-12)
    with pytest.raises(ke.NonFiniteError, match="no target of the loss on 'y' counts"):
        engine.gradients([parts[0], parts[0]])


@pytest.mark.parametrize("mode", ["gradients", "exact"])
def test_statistics_of_padded_positions_are_those_of_the_whole_batch(mode):
    """Rows of an example that no target depends on count in no part; the first part has none."""
    model, whole = engine_of("token_mlp", estimation_mode=mode)
    _, parts = engine_of("token_mlp", estimation_mode=mode)
    inputs, targets = batch_of(model, whole)
    targets[6, 1:], targets[8] = -100, -100
    whole.update_statistics(whole.trace(inputs, targets))
    parts.update_statistics(cut(inputs, targets))
    assert_arrays_near(averages(parts), averages(whole), 1e-12)
    other = engine_of("token_mlp", estimation_mode=mode)[1]
    other.update_statistics(cut(inputs, abs(targets) % 2))
    assert any(
        abs(one - two).max() > 1e-3
        for one, two in zip(averages(parts).values(), averages(other).values(), strict=True)
    )


def test_parts_take_weights_as_a_third_entry():
    model, engine = engine_of("mlp")
    inputs, targets = batch_of(model, engine)
    weights = np.linspace(0.0, 2.0, N)
    whole = engine.gradients(inputs, ke.Weighted(targets, weights))
    parts = [
        (i, t, weights[low:high])
        for (i, t), low, high in zip(cut(inputs, targets), CUTS, CUTS[1:], strict=False)
    ]
    result = engine.gradients(parts)
    assert result.loss == pytest.approx(whole.loss, rel=1e-12)
    assert_arrays_near(result.gradients, whole.gradients, 1e-12)


# -- normalizations and dropouts -------------------------------------------------------------------


def test_running_statistics_of_a_normalization_of_inputs_are_those_of_the_whole_batch():
    x, y = norm_net.batch(n=N)
    pairs = cut({"x": x}, y, (0, 3, 5, N))  # a part of one example has no variance
    whole, parts = norm_net.engine(), norm_net.engine()
    expected = whole.gradients({"x": x}, y, update_buffers=True)
    result = parts.gradients(pairs, update_buffers=True)
    assert set(whole.buffers) == {"mean", "variance"}
    assert_arrays_near(parts.buffers, whole.buffers, 1e-6)
    # A part is normalized by its own statistics: the gradients are those of its examples alone.
    alone = norm_net.engine()
    mean = sum(len(t) / N * alone.gradients(i, t).gradients["z.weight"] for i, t in pairs)
    np.testing.assert_allclose(result.gradients["z.weight"], mean, rtol=1e-5, atol=1e-6)
    assert abs(mean - expected.gradients["z.weight"]).max() > 1e-3


def test_dropouts_draw_once_for_each_part(monkeypatch):
    """The gradient is that of the kept entries, which each evaluation of a part draws."""
    net_ = models.Net()
    net_.op(
        "Dropout", "x", net_.constant("ratio", np.float32(0.5)),
        net_.constant("training", np.array(True)), to="kept", seed=3,
    )  # fmt: skip
    net_.dense("z", "kept", 4, 3)
    model = net_.model({"x": ["batch", 4]}, {"z": ["batch", 3]})
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    x, y = np.ones((N, 4), np.float32), np.arange(N) % 3
    evaluate, traces = BatchPasses.trace, []

    def recorded(self, inputs, targets=None):
        traces.append(evaluate(self, inputs, targets))
        return traces[-1]

    monkeypatch.setattr(BatchPasses, "trace", recorded)
    result = engine.gradients(cut({"x": x}, y))
    kept, p = (np.concatenate([t[name] for t in traces]) for name in ("kept", "z"))
    assert len(kept) == N
    assert 0 < (kept == 0).mean() < 1
    expected = (net.probabilities(p) - np.eye(3)[y]).T @ kept / N
    np.testing.assert_allclose(result.gradients["z.weight"], expected, rtol=1e-5, atol=1e-6)


# -- bad input -------------------------------------------------------------------------------------


def test_errors_name_the_part():
    _, engine = engine_of("mlp")
    x, y = np.zeros((4, 6)), np.zeros(4, np.int64)
    for part, error, said in [
        (
            ({"input": x}, y + 9),
            ke.InputError,
            r"target 9 of example 0 .* in part 2 of the 2 parts",
        ),
        (({"input": x[:, :3]}, y), ke.ShapeError, "part 2 of the 2 parts"),
        (({"input": x * np.nan}, y), ke.NonFiniteError, "part 2 of the 2 parts"),
    ]:
        with pytest.raises(error, match=said):
            engine.gradients([({"input": x}, y), part])
    assert engine.buffers == {}


@pytest.mark.parametrize(
    ("parts", "targets", "said"),
    [
        ([], None, "list of the parts of a batch is empty"),
        ([("x.npy", np.zeros(4))], None, "must be a mapping"),
        ([{"input": np.zeros((4, 4))}], None, "part 1 is dict"),
        ([({"input": np.zeros((4, 4))}, np.zeros(4, np.int64))], np.zeros(4), "their own targets"),
    ],
)
def test_wrong_parts_are_refused(parts, targets, said):
    _, engine = engine_of("mlp")
    with pytest.raises(ke.InputError, match=said):
        engine.gradients(parts, targets)


def test_a_failed_part_leaves_statistics_and_draws():
    model, engine = engine_of("mlp", approximations={"fully_connected": "ekfac"})
    inputs, targets = batch_of(model, engine)
    state = engine.estimator.rng.bit_generator.state
    bad = {name: np.full_like(array, np.nan) for name, array in inputs.items()}
    with pytest.raises(ke.NonFiniteError):
        engine.update_statistics([*cut(inputs, targets), (bad, targets)])
    assert engine.estimator.rng.bit_generator.state == state
    assert all(factor.average.value is None for factor in engine.estimator.factors)


# -- memory and several processes ------------------------------------------------------------------


def test_memory_is_that_of_a_part_and_its_sums():
    _, engine = engine_of("cnn")
    part, whole, parts = engine.memory(32), engine.memory(128), engine.memory(32, accumulate=4)
    assert parts.activations == part.activations < whole.activations
    averages = 4 * sum(
        int(np.prod(shape)) for layer in engine.layers for shape in layer.factor_shapes
    )
    assert parts.total == part.total + averages
    with pytest.raises(ke.InputError, match="accumulate"):
        engine.memory(32, accumulate=0)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
@pytest.mark.parametrize("mode", ["gradients", "exact"])
@pytest.mark.parametrize("approximation", ["kron", "ekfac", "diagonal"])
@pytest.mark.parametrize("ignored", [(), [0], [1, 2]], ids=["all count", "first", "others"])
def test_parts_of_several_processes_are_those_of_one(ignored, approximation, mode, distribution):
    """Each rank has its rows of every part; parts have other lengths.

    Targets that do not count are those of some examples of the second part, and single ones of the
    third part: of one rank, of the other, or of none.
    """
    options = {"approximations": {"fully_connected": approximation}, "estimation_mode": mode}
    options["loss"] = ke.Categorical(ignore_index=-1)
    model, parts = sequences()
    parts = [parts[0], ({"x": parts[0][0]["x"][1:]}, parts[0][1][1:].copy()), parts[2]]
    for example in ignored:
        parts[1][1][example - 1] = parts[2][1][example, 3:] = -1
    alone = ke.Engine.from_onnx(model, threads=1, **options)
    expected = alone.gradients(parts)
    alone.update_statistics(parts)

    def work(communicator):
        engine = ke.Engine.from_onnx(
            model, threads=1, communicator=communicator, distribution=distribution, **options,
        )  # fmt: skip
        rows = [slice(0, 1), slice(1, None)][communicator.rank]
        own = [({"x": inputs["x"][rows]}, targets[rows]) for inputs, targets in parts]
        result = engine.gradients(own)
        engine.update_statistics(own)
        engine.synchronize()
        return result, averages(engine)

    for result, found in run(2, work):
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert_arrays_near(result.gradients, expected.gradients, 1e-12)
        if mode == "exact":  # without a whole batch, ranks draw part by part as one process does
            assert_arrays_near(found, averages(alone), 1e-12)


FORMS = {
    "loss": lambda e, x, y: e.loss(x, y),
    "trace": lambda e, x, y: e.trace(x, y)["z"],
    "gradients": lambda e, x, y: e.gradients(x, y).gradients["w1"],
    "step": lambda e, x, y: e.step(x, y).natural_gradients["w1"],
    "observe": lambda e, x, y: e.observe(x, y) or averages(e)["0"],
    "parts": lambda e, x, y: e.gradients([(x, y), (x, y)]).gradients["w1"],
    "an optimizer": lambda e, x, y: ke.SGD(e).step(x, y).loss,
    "parts of an optimizer": lambda e, x, y: ke.KfacOptimizer(e).step([(x, y), (x, y)]).loss,
}


@pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
def test_model_of_one_input_takes_its_array_alone(call):
    x, y = net.batch()
    alone, named = (call(net.engine(threads=1), inputs, y) for inputs in (x, {"x": x}))
    np.testing.assert_array_equal(alone, named)


def test_precondition_takes_the_array_of_the_only_input():
    x, y = net.batch()
    alone, named = (
        ke.precondition(net.model(), inputs, y, "categorical", threads=1)
        for inputs in (x, {"x": x})
    )
    np.testing.assert_array_equal(alone.natural_gradients["w1"], named.natural_gradients["w1"])


def test_array_alone_is_refused_for_several_inputs():
    model = parsed(
        """two (float[n,2] x, float[n,2] y) => (float[n,2] z) {
          s = MatMul (x, w)  z = Add (s, y)
        }""",
        {"w": np.eye(2, dtype=np.float32)},
    )
    engine = ke.Engine.from_onnx(model, loss="normal", threads=1)
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(ke.InputError, match=r"several inputs; give a dictionary .* for x, y"):
        engine.loss(x, x)
    engine.loss({"x": x, "y": x}, x)

"""Steps on one batch that comes again: which batches are fitted exactly, and how far."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import kfac, repeated_batch
from kfac_engine.training.repeated_batch import RepeatedBatch
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.distributed import threads
from tests.models import parsed

# The steps before the first exact one, and the exact steps that leave examples out, at most.
BEFORE, TRIAL = 10, 60
STOCHASTIC, QUADRATIC = 0.1, 1e-4  # damping of the first step
# Sums of parts, and of ranks, in another order, in float64; 75 steps multiply the roundings.
CLOSE = 1e-6


def network(widths, seed=0, activation="Tanh"):
    """A network in float64."""
    rng = np.random.default_rng(seed)
    weights, lines, last = {}, [], len(widths) - 2
    for i, sides in enumerate(pairwise(widths)):
        weights[f"W{i}"] = rng.standard_normal(sides) / np.sqrt(sides[0])
        weights[f"b{i}"] = np.zeros(sides[1])
        h = "x" if i == 0 else f"h{i - 1}"
        lines.append(f"m{i} = MatMul ({h}, W{i})")
        lines.append(f"{'y' if i == last else f's{i}'} = Add (m{i}, b{i})")
        if i < last:
            lines.append(f"h{i} = {activation} (s{i})")
    text = "\n".join(lines)
    d, k = widths[0], widths[-1]
    return parsed(f"net (double[n,{d}] x) => (double[n,{k}] y) {{\n{text}\n}}", weights)


def linear(d, outputs=1):
    return parsed(
        f"linear (double[n,{d}] x) => (double[n,{outputs}] y) {{ y = MatMul (x, w) }}",
        {"w": np.random.default_rng(5).standard_normal((d, outputs))},
    )


def linear_data(n, d, noise, seed=0, outputs=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d))
    return x, x @ rng.standard_normal((d, outputs)) + noise * rng.standard_normal((n, outputs))


def optimizer_of(model, communicator=None, **options):
    engine = ke.Engine.from_onnx(model, loss="normal", threads=1, communicator=communicator)
    return ke.KfacOptimizer(engine, **options)


def is_exact(report):
    """Whether a step moved by the quadratic model, which alone predicts a change."""
    return report.predicted_change is not None


def test_exact_steps_reach_the_least_squares_solution():
    x, y = linear_data(200, 6, noise=1.0)
    optimizer = optimizer_of(linear(6))
    reports = [optimizer.step({"x": x}, y) for _ in range(BEFORE + TRIAL + 15)]
    assert [is_exact(r) for r in reports] == [False] * BEFORE + [True] * (TRIAL + 15)
    assert (reports[0].damping, reports[BEFORE].damping) == (STOCHASTIC, QUADRATIC)
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(optimizer.engine.parameters["w"], solution, rtol=1e-6)


@pytest.mark.parametrize(
    ("n", "d", "noise", "fits"),
    [(40, 30, 3.0, False), (60, 50, 1.5, False), (40, 30, 0.0, True), (300, 30, 1.0, True)],
)
def test_a_batch_whose_minimum_fits_noise_is_not_fitted_exactly(n, d, noise, fits):
    x, y = linear_data(n, d, noise)
    optimizer = optimizer_of(linear(d))
    reports = [optimizer.step({"x": x}, y) for _ in range(BEFORE + TRIAL + 15)]
    assert is_exact(reports[BEFORE])
    assert is_exact(reports[-1]) == fits
    # The same decision by the closed form: does the minimum of four fifths predict the rest?
    cut = 4 * n // 5
    of_others = np.linalg.lstsq(x[:cut], y[:cut], rcond=None)[0]
    error = ((x[cut:] @ of_others - y[cut:]) ** 2).mean()
    assert (error < 0.2 * (y**2).mean()) == fits
    if fits:
        solution = np.linalg.lstsq(x, y, rcond=None)[0]
        np.testing.assert_allclose(optimizer.engine.parameters["w"], solution, atol=1e-4)


# Steps by the quadratic model, and in the sample space.
@pytest.mark.parametrize("make", [lambda: linear(30), lambda: network([30, 8, 1])])
def test_a_failed_trial_goes_back_to_where_exact_steps_began(make, tmp_path):
    x, y = linear_data(40, 30, noise=3.0)
    optimizer, resumed = optimizer_of(make()), optimizer_of(make())
    for step in range(BEFORE + TRIAL):
        if step == BEFORE:
            began = {name: value.copy() for name, value in optimizer.engine.parameters.items()}
        if step == BEFORE + 1:  # a checkpoint has the parameters before the trial
            assert not np.array_equal(next(iter(began.values())), first_of(optimizer))
            optimizer.save(tmp_path / "state")
            resumed.load(tmp_path / "state")
            optimizer = resumed
        optimizer.step({"x": x}, y)
        if optimizer._basis.repeated.refused:
            break
    assert BEFORE < step < BEFORE + TRIAL
    assert_arrays_equal(began, optimizer.engine.parameters)
    assert not is_exact(optimizer.step({"x": x}, y))
    assert not np.array_equal(next(iter(began.values())), first_of(optimizer))


def first_of(optimizer):
    return next(iter(optimizer.engine.parameters.values()))


X = np.linspace(-1, 1, 120)[:, None]


# Before a jump or a high frequency is learned, the loss of other points rises.
@pytest.mark.parametrize(
    ("widths", "y"),
    [
        ([1, 16, 1], np.sin(4 * X) + X**2),
        ([1, 12, 12, 1], np.sin(18 * X)),
        ([1, 12, 12, 1], np.sign(np.sin(9 * X))),
    ],
    ids=["smooth", "sine", "jumps"],
)
def test_a_function_is_fitted_far_better_by_exact_steps(widths, y):
    errors = {}
    for name, options in {"default": {}, "never exact": {"momentum": 0.85}}.items():
        optimizer = optimizer_of(network(widths), **options)
        for _ in range(150):
            optimizer.step({"x": X}, y)
        errors[name] = ((optimizer.engine.predict(X) - y) ** 2).mean()
    assert errors["default"] < 0.05 * errors["never exact"]


GRID = np.stack(np.meshgrid(*2 * [np.linspace(-1, 1, 10)]), axis=-1).reshape(-1, 2)


PLANE = np.sin(4 * GRID[:, :1]) * np.cos(3 * GRID[:, 1:])


def errors_of(activation, seed, steps):
    """Losses relative to the constant's, and whether each step was exact."""
    optimizer = optimizer_of(network([2, 16, 16, 1], seed, activation))
    reports = [optimizer.step({"x": GRID}, PLANE) for _ in range(steps)]
    least = 0.5 * np.log(np.pi)  # of a loss with the variance 1/2
    errors = np.array([report.loss for report in reports]) - least
    return errors / PLANE.var(), np.array([report.learning_rate == 1 for report in reports])


def test_other_steps_follow_where_kinks_stop_exact_ones():
    gains = []
    for seed in range(3):  # rounding decides whether a run meets a kink
        errors, exact = errors_of("Relu", seed, 800)
        if exact[BEFORE:].all():
            continue
        pause = BEFORE + int(np.argmin(exact[BEFORE:]))
        assert exact[BEFORE:pause].all()
        assert not exact[pause : pause + 300].any()
        assert exact[pause + 300]
        gains.append(errors[pause:].min() / errors[pause])
    assert min(gains) < 0.2


def test_steps_of_a_smooth_network_remain_exact():
    errors, exact = errors_of("Tanh", 1, 250)
    assert exact[BEFORE:].all()
    assert errors[-1] < 1e-4


# Parts of the fall of the loss, 1, that exact steps have missed.
@pytest.mark.parametrize(
    ("trial", "refused", "missed", "paused"),
    [(30, 0, 1e-7, True), (30, 0, 1e-9, False), (30, 0, 0.0, False), (29, 0, 1e-7, False),
     (30, 1, 1e-7, False)],
)  # fmt: skip
def test_a_missed_fall_ends_exact_steps_after_the_trial(trial, refused, missed, paused):
    state = RepeatedBatch(1.0, 40, first=3.0, trial=trial, refused=refused, rule=0)
    after = state.solved(3, missed, loss=2.0)
    assert after.paused == paused
    assert after.exact == (not (paused or refused))


def shuffled(x, y, step):
    order = np.random.default_rng(step).permutation(len(x))
    return {"x": x[order]}, y[order]


def weighted(x, y, weights):
    return {"x": x}, ke.Weighted(y, weights)


def with_another_input(x, y, step):
    return {"x": np.where(np.arange(len(x))[:, None] == 3, x + step, x)}, y


DATA = {
    "the same arrays": (lambda x, y, step: ({"x": x}, y), True),
    "another order": (shuffled, True),
    "parts": (lambda x, y, step: [({"x": x[:9]}, y[:9]), ({"x": x[9:]}, y[9:])], True),
    "weights": (lambda x, y, step: weighted(x, y, np.linspace(0.5, 2, len(y))), True),
    "one other input": (with_another_input, False),
    "other targets": (lambda x, y, step: ({"x": x}, y + 1e-3 * step), False),
    "other weights": (lambda x, y, step: weighted(x, y, np.full(len(y), 1.0 + step)), False),
    "two batches in turn": (lambda x, y, step: ({"x": x + step % 2}, y), False),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_steps_are_exact_where_all_examples_and_targets_come_again(name):
    data, exact = DATA[name]
    x, y = linear_data(40, 3, noise=0.1)
    optimizer = optimizer_of(linear(3))
    for step in range(BEFORE + 2):
        batch = data(x, y, step)
        report = optimizer.step(batch) if isinstance(batch, list) else optimizer.step(*batch)
    assert is_exact(report) == exact


OPTIONS = {
    "no option": ({}, "normal", True),
    "no decay": ({"weight_decay": 0}, "normal", True),
    "l2": ({"l2": 0.01}, "normal", True),
    "l2 above the first damping": ({"l2": 2.0}, "normal", True),
    "damping": ({"damping": 0.1}, "normal", False),
    "momentum": ({"momentum": 0.85}, "normal", False),
    "decay": ({"weight_decay": 0.05}, "normal", False),
    "absolute errors": ({}, "l1", False),
    "binary targets": ({}, "multi_bernoulli", False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_losses_decide_whether_steps_may_be_exact(name):
    options, loss, exact = OPTIONS[name]
    x, y = linear_data(40, 3, noise=0.1)
    engine = ke.Engine.from_onnx(linear(3), loss=loss, threads=1)
    optimizer = ke.KfacOptimizer(engine, **options)
    targets = (y > 0).astype(float) if loss == "multi_bernoulli" else y
    reports = [optimizer.step({"x": x}, targets) for _ in range(BEFORE + 1)]
    assert is_exact(reports[-1]) == exact


def test_other_examples_end_exact_steps_and_start_anew():
    x, y = linear_data(40, 3, noise=0.1)
    optimizer = optimizer_of(linear(3))
    for _ in range(BEFORE + 3):
        optimizer.step({"x": x}, y)
    report = optimizer.step({"x": x[:30]}, y[:30])
    assert (is_exact(report), report.damping) == (False, STOCHASTIC)
    again = [is_exact(optimizer.step({"x": x}, y)) for _ in range(BEFORE + 1)]
    assert again == [False] * BEFORE + [True]


# Steps by the quadratic model, and in the sample space.
@pytest.mark.parametrize("width", [8, 20])
def test_parts_and_ranks_take_the_exact_steps_of_the_whole_batch(width):
    # Without a symmetry, for which gradients of biases are mere rounding.
    x = np.random.default_rng(1).uniform(-1, 1.5, (48, 1))
    y, steps = np.sin(3 * x), BEFORE + TRIAL + 5

    def trained(step, communicator=None):
        optimizer = optimizer_of(network([1, width, 1]), communicator, statistics_part=1)
        for _ in range(steps):
            report = step(optimizer)
        return {**optimizer.engine.parameters, "loss": np.array(report.loss)}

    def of_rank(communicator):
        rows = slice(0, 20) if communicator.rank == 0 else slice(20, None)
        return trained(lambda optimizer: optimizer.step({"x": x[rows]}, y[rows]), communicator)

    whole = trained(lambda optimizer: optimizer.step({"x": x}, y))
    cuts = (slice(0, 17), slice(17, 18), slice(18, None))
    parts = [({"x": x[cut]}, y[cut]) for cut in cuts]
    for others in (trained(lambda optimizer: optimizer.step(parts)), *threads.run(2, of_rank)):
        assert_arrays_close(others, whole, rtol=CLOSE, atol=CLOSE)


def coupled():
    """A network whose examples depend on each other."""
    text = """n (double[n,1] x) => (double[n,1] y) {
        s = MatMul (x, V)
        h = Tanh (s)
        m = ReduceMean <keepdims = 1> (h, axes)
        c = Sub (h, m)
        y = MatMul (c, W)
    }"""
    rng = np.random.default_rng(2)
    weights = {"V": rng.standard_normal((1, 30)), "W": rng.standard_normal((30, 1))}
    return parsed(text, weights | {"axes": np.array([0])})


# A network, the number of examples, and whether exact steps are those of the sample space: for no
# fewer parameters than rows that are read, at most 256, and eight of an example at most.
FEW = {
    "fewer than parameters": (lambda: network([1, 16, 1]), 40, True),
    "as many as parameters": (lambda: network([1, 16, 1]), 49, True),
    "more than parameters": (lambda: network([1, 16, 1]), 50, False),
    "many predictions": (lambda: network([1, 100, 1]), 2001, True),
    "eight outputs": (lambda: network([1, 30, 8]), 20, True),
    "nine outputs": (lambda: network([1, 30, 9]), 20, False),
    "examples that depend on each other": (coupled, 20, False),
}


@pytest.mark.parametrize("name", FEW)
def test_few_predictions_are_fitted_by_the_whole_fisher_matrix(name):
    make, n, few = FEW[name]
    x = np.linspace(-1, 1, n)[:, None]
    optimizer = optimizer_of(make())
    y = np.sin(3 * x) * np.ones(optimizer.engine.predict(x[:1]).shape)
    reports = [optimizer.step({"x": x}, y) for _ in range(BEFORE + 2)]
    assert is_exact(reports[-1])
    # Its momentum is a constant; the quadratic model solves for the momentum.
    assert (reports[-1].momentum in (0.0, 0.5)) == few


@pytest.mark.parametrize(("frequency", "slow"), [(1, False), (60, True)])
def test_a_sample_of_rows_that_says_little_of_all_ends_steps_in_the_sample_space(
    frequency, slow, monkeypatch
):
    """Sines of high frequencies have a row of their own for each example."""
    monkeypatch.setattr(kfac, "divided", lambda *_: None)  # no trial
    rng = np.random.default_rng(3)
    weights = {
        "V": frequency * rng.standard_normal((2, 500)),
        "W": 30 * rng.standard_normal((500, 1)),
    }
    # The negation keeps the first step from dividing W by the size of the predictions.
    nodes = "m = MatMul (x, V) h = Sin (m) p = MatMul (h, W) y = Neg (p)"
    optimizer = optimizer_of(parsed(f"n (double[n,2] x) => (double[n,1] y) {{ {nodes} }}", weights))
    x = rng.uniform(-1, 1, (900, 2))
    y = np.sin(40 * x[:, :1] * x[:, 1:])
    reports = [optimizer.step({"x": x}, y) for _ in range(BEFORE + 6)]
    in_sample_space = [r.learning_rate == 1 for r in reports[BEFORE:]]
    assert in_sample_space == [True] * 4 + [not slow] * 2


@pytest.mark.parametrize(("width", "trial"), [(16, 30), (8, 60)])
def test_the_trial_leaves_examples_out(width, trial, monkeypatch):
    x = np.linspace(-1, 1.5, 40)[:, None]
    optimizer = optimizer_of(network([1, width, 1]))
    fitted = []
    update = type(optimizer._exact[width == 8].update)
    call = update.__call__

    def counted(self, step):
        fitted.append(sum(len(targets) for _, targets in step.batch))
        return call(self, step)

    monkeypatch.setattr(update, "__call__", counted)
    for _ in range(BEFORE + trial + 3):
        optimizer.step({"x": x}, np.sin(3 * x))
    assert max(fitted[:trial]) < 40
    assert fitted[trial:] == [40] * 3


def test_a_run_in_the_sample_space_continues_with_two_processes(tmp_path):
    x = np.linspace(-1, 1, 30)[:, None]
    y = np.sin(3 * x)
    optimizer = optimizer_of(network([1, 16, 1]))
    for _ in range(BEFORE + 2):
        report = optimizer.step({"x": x}, y)
    assert report.momentum == 0.5
    optimizer.save(tmp_path / "state")

    def of_rank(communicator):
        rows = slice(0, 11) if communicator.rank == 0 else slice(11, None)
        resumed = optimizer_of(network([1, 16, 1]), communicator)
        resumed.load(tmp_path / "state")
        return resumed.step({"x": x[rows]}, y[rows])

    expected = optimizer.step({"x": x}, y)
    for report in threads.run(2, of_rank):
        assert report.momentum == expected.momentum
        assert report.loss == pytest.approx(expected.loss, rel=CLOSE)
        assert report.predicted_change == pytest.approx(expected.predicted_change, rel=CLOSE)


def test_steps_in_the_sample_space_are_those_of_gauss_newton():
    x = np.linspace(-1, 1.5, 30)[:, None]
    y = np.sin(3 * x)
    optimizer = optimizer_of(network([1, 12, 1]))
    for _ in range(BEFORE + TRIAL):
        optimizer.step({"x": x}, y)
    engine = ke.Engine.from_onnx(network([1, 12, 1]), loss="normal", threads=1)
    engine.set_parameters(optimizer.engine.parameters)
    other = ke.GaussNewton(engine, damping=optimizer.damping)
    for name, array in other._slots["momentum"].items():
        array[...] = optimizer._slots["momentum"][name]
    for _ in range(5):
        reports = optimizer.step({"x": x}, y), other.step({"x": x}, y)
        assert reports[0].damping == reports[1].damping
        assert reports[0].reduction_ratio == reports[1].reduction_ratio
    assert_arrays_equal(optimizer.engine.parameters, engine.parameters)


# More parameters than examples, and fewer.
@pytest.mark.parametrize("width", [20, 8])
@pytest.mark.parametrize("steps", [3, BEFORE, BEFORE + 5, BEFORE + TRIAL + 3])
def test_a_run_is_resumed_with_equal_bits(steps, width, tmp_path):
    assert_resumed(network([1, width, 1]), steps, tmp_path)


def test_a_run_between_exact_steps_is_resumed_with_equal_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated_batch, "_MISSED", -1.0)  # each step after the trial misses
    monkeypatch.setattr(repeated_batch, "_PAUSE", 8)
    for steps in (BEFORE + 31, BEFORE + 35):
        assert_resumed(network([1, 20, 1]), steps, tmp_path)


def assert_resumed(make, steps, tmp_path):
    x, y = np.linspace(-1, 1, 48)[:, None], np.linspace(0, 1, 48)[:, None] ** 2
    whole, first, second = (optimizer_of(make) for _ in range(3))
    for _ in range(steps):
        whole.step({"x": x}, y)
        first.step({"x": x}, y)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for _ in range(6):
        assert second.step({"x": x}, y).loss == whole.step({"x": x}, y).loss
    assert_arrays_equal(second.engine.parameters, whole.engine.parameters)


@pytest.mark.parametrize("steps", [BEFORE - 1, BEFORE, BEFORE + TRIAL])
def test_a_batch_that_overflows_changes_nothing(steps):
    """The step that it interrupts may be the one that begins or ends the exact steps."""
    x, y = linear_data(40, 3, noise=0.1)
    left, right = (optimizer_of(linear(3), non_finite="skip") for _ in range(2))
    for optimizer in (left, right):
        for _ in range(steps):
            optimizer.step({"x": x}, y)
    assert left.step({"x": np.full_like(x, np.inf)}, y).skipped
    for _ in range(3):
        assert left.step({"x": x}, y).loss == right.step({"x": x}, y).loss
    np.testing.assert_array_equal(left.engine.parameters["w"], right.engine.parameters["w"])


def test_a_schedule_does_not_shorten_exact_steps():
    x, y = linear_data(200, 6, noise=1.0)
    left, right = optimizer_of(linear(6)), optimizer_of(linear(6))
    for step in range(BEFORE + 5):
        left.step({"x": x}, y)
        right.step({"x": x}, y, 1.0 if step < BEFORE else 0.1)
    np.testing.assert_array_equal(left.engine.parameters["w"], right.engine.parameters["w"])
    assert right.step({"x": x}, y, 0.0).learning_rate == 0
    np.testing.assert_array_equal(left.engine.parameters["w"], right.engine.parameters["w"])

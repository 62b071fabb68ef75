"""Statistics of batches in which no target of one of several losses counts.

The layers on which only this loss depends do not see such a batch: their averages are those of the
other batches. Layers that another loss depends on see every batch.
"""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.batch_passes import BatchPasses
from tests.distributed.threads import run
from tests.models import parsed

RNG = np.random.default_rng(0)
SHAPES = {"w": (4, 5), "a": (5, 3), "b": (5, 6), "g": (6,), "c": (6, 2)}
WEIGHTS = {name: 0.5 * RNG.standard_normal(shape) for name, shape in SHAPES.items()}
X, IDS, BOXES = RNG.standard_normal((8, 4)), RNG.integers(0, 3, 8), RNG.standard_normal((8, 2))
OWN = {"b", "g", "c"}  # parameters of the box head alone
HALVES = slice(0, 3), slice(3, 8)


def model():
    """A trunk, a head for classes, and a head of two layers and a learned factor for boxes."""
    return parsed(
        """net (double[batch,4] x) => (double[batch,3] cls, double[batch,2] box) {
          t = MatMul(x, w)  h = Tanh(t)  cls = MatMul(h, a)
          u = MatMul(h, b)  v = Tanh(u)  s = Mul(v, g)  box = MatMul(s, c)
        }""",
        WEIGHTS,
    )


def engine(**options):
    return ke.Engine.from_onnx(
        model(), loss=["categorical", "normal"], output=["cls", "box"],
        **{"threads": 1, "damping": 0.1, "schedule": ke.Schedule(refresh_every=1)} | options,
    )  # fmt: skip


def batch(rows=slice(None), boxes=None, classes=None):
    """A batch with weights of boxes and classes; all count by default."""
    boxes, classes = (np.ones(8) if w is None else w for w in (boxes, classes))
    targets = {"cls": ke.Weighted(IDS[rows], classes[rows])}
    targets["box"] = ke.Weighted(np.where(boxes[:, None] > 0, BOXES, np.nan)[rows], boxes[rows])
    return {"x": X[rows]}, targets


def only_classes(rows=slice(None)):
    return batch(rows, boxes=np.zeros(8))


def state(tested):
    """Averages by parameter and factor, with their weights and numbers of rows."""
    return {
        (name, factor.name): (factor.cov.copy(), factor.average.weight, factor.average.repeats)
        for name, block in tested.collection.fisher_blocks.items()
        for factor in block.factors
    }


def is_own(key):
    """Whether a factor belongs to the box head alone; it shares its inputs ``h``, and their basis.

    An eigenbasis has the inputs as well.
    """
    name, factor = key
    return name in OWN and not (factor.endswith("(h)") or factor == "RotatedSquare(h, ∂u)")


def owned_by_boxes(tested):
    for name, block in tested.collection.fisher_blocks.items():
        for factor in block.factors:
            yield factor, is_own((name, factor.name))


def assert_own_equal(found, expected, rtol=1e-12):
    assert {key[0] for key in expected if is_own(key)} == OWN
    for key in filter(is_own, expected):
        (cov, *numbers), (truth, *numbers_of_truth) = found[key], expected[key]
        np.testing.assert_allclose(cov, truth, rtol=rtol, atol=1e-14, err_msg=str(key))
        assert numbers == pytest.approx(numbers_of_truth), key


MODES = ["gradients", "empirical", "exact", "curvature_prop"]
APPROXIMATIONS = {
    "default": {},
    "diagonals": {
        "approximations": {"fully_connected": "kron_both_diag", "scale_and_shift": "diagonal"}
    },
    "diagonal": {"approximations": {"fully_connected": "diagonal"}},
    "ekfac": {"approximations": {"fully_connected": "ekfac"}},
}
CALLS = {
    "observe": lambda e, *parts: e.observe(parts if len(parts) > 1 else parts[0][0], *(
        () if len(parts) > 1 else (parts[0][1],)
    )),
    "step": lambda e, *parts: e.step(parts if len(parts) > 1 else parts[0][0], *(
        () if len(parts) > 1 else (parts[0][1],)
    )),
}  # fmt: skip


@pytest.mark.parametrize("form", ["whole", "parts"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_own_layers_do_not_see_a_batch_without_their_targets(mode, call, form):
    tested = engine(estimation_mode=mode)
    CALLS[call](tested, batch())
    before = state(tested)
    CALLS[call](tested, *([only_classes()] if form == "whole" else map(only_classes, HALVES)))
    after = state(tested)
    assert_own_equal(after, before, rtol=0)
    for key in before:  # the other layers see both
        assert is_own(key) or after[key][1] > before[key][1], key


@pytest.mark.parametrize("mode", ["empirical", "exact"])  # without random numbers
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_the_first_batch_may_lack_the_targets(approximation, mode, tmp_path):
    options = {"estimation_mode": mode, **APPROXIMATIONS[approximation]}
    tested, other = engine(**options), engine(**options)
    result = tested.step(*only_classes())
    assert all(np.isfinite(array).all() for array in result.natural_gradients.values())
    assert not any(result.natural_gradients[name].any() for name in OWN)
    tested.save(tmp_path / "state.safetensors")
    tested = engine(**options)
    tested.load(tmp_path / "state.safetensors")
    half = 1.0 - 0.5 * (np.arange(8) < 5)
    for found in (tested, other):
        found.step(*batch(boxes=half))
    assert_own_equal(state(tested), state(other))
    tested.step(*batch())


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
@pytest.mark.parametrize("first", ["both", "classes"])
def test_ranks_leave_out_what_one_process_leaves_out(first, distribution):
    order = [batch, only_classes] if first == "both" else [only_classes, batch]
    options = {"estimation_mode": "exact"}
    alone = engine(**options)
    for make in order:
        expected = alone.step(*make())

    def work(communicator):
        ranks = engine(communicator=communicator, distribution=distribution, **options)
        for make in order:
            result = ranks.step(*make(HALVES[communicator.rank]))
        ranks.synchronize()
        return result.natural_gradients, state(ranks)

    for natural, averages in run(2, work):
        assert_own_equal(averages, state(alone), rtol=1e-10)
        for name, array in natural.items():
            truth = expected.natural_gradients[name]
            np.testing.assert_allclose(array, truth, rtol=1e-8, atol=1e-10, err_msg=name)


def test_a_loss_without_targets_in_a_part_only_counts_in_the_batch():
    """Some parts lack boxes, the batch does not: the average is that of the whole batch."""
    boxes = np.where(np.arange(8) < 3, 1.0, 0.0)
    whole, parts = engine(estimation_mode="exact"), engine(estimation_mode="exact")
    whole.observe(*batch(boxes=boxes))
    parts.observe([batch(rows, boxes=boxes) for rows in HALVES])
    assert_own_equal(state(parts), state(whole))


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_an_optimizer_measures_a_part_of_a_batch_without_targets(form, monkeypatch):
    """The first part of a quarter is taken, as all of its losses that count in the batch count."""
    tested, sizes = engine(schedule=ke.Schedule()), []
    optimizer = ke.KfacOptimizer(tested, statistics_part=0.25)
    trace = BatchPasses.trace

    def recorded(self, inputs, targets=None):
        sizes.append(len(inputs["x"]))
        return trace(self, inputs, targets)

    monkeypatch.setattr(BatchPasses, "trace", recorded)
    optimizer.step(*only_classes()) if form == "whole" else optimizer.step(
        [only_classes(rows) for rows in HALVES]
    )
    assert sizes == ([8, 2] if form == "whole" else [3, 5, 2])
    assert all(f.average.weight == (not own) for f, own in owned_by_boxes(tested))


def test_steps_of_a_run_whose_batches_lack_boxes_are_finite_and_learn():
    tested = engine(schedule=ke.Schedule())
    batches = [only_classes(), batch(), only_classes(), batch()] * 5
    before = tested.evaluate(batch())["loss"]
    ke.fit(tested, batches, epochs=1)
    assert tested.evaluate(batch())["loss"] < before

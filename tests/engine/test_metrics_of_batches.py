"""Metrics of several batches equal those of all examples, computed in NumPy.

No row of the tables has equal batches: their sizes, the targets that count, and their weights
differ between batches.
"""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.kinds import LossKind, loss_named
from tests.engine.test_pieces import WEIGHTS, model
from tests.models import parsed

RNG = np.random.default_rng(1)
X, IDS, BOXES = RNG.standard_normal((9, 4)), RNG.integers(0, 3, 9), RNG.standard_normal((9, 2))
CUTS = [[], [4], [3, 5], [1, 6, 8]]
EVERY = np.ones(9)
FIRST, LAST = np.where(np.arange(9) < 4, 1.0, 0.0), np.where(np.arange(9) > 4, 0.5, 0.0)
NORMAL = 0.5 * np.log(np.pi)  # the variance is 1/2
HIDDEN = np.tanh(X @ WEIGHTS["w"])
LOGITS, MEANS = HIDDEN @ WEIGHTS["a"], HIDDEN @ WEIGHTS["b"]
CLASSES = np.log(np.exp(LOGITS).sum(1)) - LOGITS[np.arange(9), IDS]
SQUARES = (MEANS - BOXES) ** 2 + NORMAL


def mean(terms, weights):
    return (terms * weights).sum() / weights.sum()


def ignored(counts):
    return {"cls": np.where(counts > 0, IDS, -100)}


MISSING = np.where(FIRST[:, None] > 0, BOXES, np.nan)


# Losses, targets, weights by output, and the weights that count.
CASES = {
    "ignored in one batch": (["cls"], ignored(FIRST), {}, {"cls": FIRST}),
    "ignored in the last batch": (["cls"], ignored(LAST * 2), {}, {"cls": LAST * 2}),
    "missing in one batch": (["box"], {"box": MISSING}, {"box": FIRST > 0}, {"box": FIRST}),
    "weights of one loss": (["cls", "box"], {}, {"box": LAST}, {"cls": EVERY, "box": LAST}),
    "weights of both": (
        ["cls", "box"], {}, {"cls": FIRST, "box": LAST}, {"cls": FIRST, "box": LAST}),
    "missing and ignored": (
        ["cls", "box"], ignored(LAST * 2) | {"box": MISSING}, {"box": FIRST > 0},
        {"cls": LAST * 2, "box": FIRST}),
    "missing and weights": (
        ["cls", "box"], {"box": MISSING}, {"cls": 1 + LAST, "box": FIRST},
        {"cls": 1 + LAST, "box": FIRST}),
}  # fmt: skip
KINDS = {"cls": "categorical", "box": "normal"}
FACTORS = {"cls": 0.5, "box": 3.0}


def truth(counts, reduction):
    terms = {"cls": CLASSES, "box": SQUARES.sum(1)}
    sums = {name: FACTORS[name] * (terms[name] * w).sum() for name, w in counts.items()}
    divisors = {
        "mean": {name: w.sum() for name, w in counts.items()},
        "batch_mean": dict.fromkeys(counts, 9),
        "sum": dict.fromkeys(counts, 1),
    }[reduction]
    return sum(sums[name] / divisors[name] for name in counts)


def data(case, rows):
    outputs, targets, weights, _ = CASES[case]
    targets = {"cls": IDS, "box": BOXES} | targets
    return (
        {"x": X[rows]},
        {
            name: ke.Weighted(targets[name][rows], weights[name][rows])
            if name in weights
            else targets[name][rows]
            for name in outputs
        },
    )


def batches(case, cuts):
    return [data(case, rows) for rows in np.split(np.arange(9), cuts)]


def engine(case, reduction="mean"):
    outputs = CASES[case][0]
    return ke.Engine.from_onnx(
        model(),
        loss=[LossKind(KINDS[name], weight=FACTORS[name]) for name in outputs],
        output=outputs,
        reduction=reduction,
        threads=1,
    )


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_all_examples(case, reduction):
    tested, expected = engine(case, reduction), truth(CASES[case][3], reduction)
    for cuts in CUTS:
        found = tested.evaluate(batches(case, cuts), ["loss"])["loss"]
        assert found == pytest.approx(expected, rel=1e-12), cuts
    assert tested.loss(*data(case, slice(None))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", ["ignored in one batch", "ignored in the last batch"])
@pytest.mark.parametrize("form", ["name", "function"])
def test_shares_are_those_of_all_targets_that_count(case, form):
    tested, hits = engine(case), LOGITS.argmax(1) == IDS

    def right(outputs, targets):
        return (outputs["cls"].argmax(1) == targets["cls"]).astype(float)

    metric = {"name": "accuracy", "function": right}[form]
    for cuts in CUTS:
        (found,) = tested.evaluate(batches(case, cuts), [metric]).values()
        assert found == pytest.approx(mean(hits, CASES[case][3]["cls"]), rel=1e-12), cuts


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_data_in_which_no_target_counts_are_refused(reduction, metric):
    case = "ignored in one batch"
    nothing = [(x, {"cls": np.full_like(t["cls"], -100)}) for x, t in batches(case, [4])]
    with pytest.raises(ke.InputError, match="no target of the data counts"):
        engine(case, reduction).evaluate(nothing, [metric])


def test_validation_of_a_run_is_that_of_all_examples():
    case = "missing and ignored"
    tested = engine(case)
    before = {name: array.copy() for name, array in tested.parameters.items()}
    history = ke.fit(
        tested, batches(case, [4]), optimizer=ke.SGD(tested, 1e-300), epochs=1,
        validation=batches(case, [3, 5]),
    )  # fmt: skip
    np.testing.assert_array_equal(tested.parameters["w"], before["w"])
    found = history.records[-1]["validation_loss"]
    assert found == pytest.approx(truth(CASES[case][3], "mean"), rel=1e-12)


def test_predictions_of_texts_of_different_lengths_count_once_each():
    sequences = parsed(
        "net (double[batch,time,4] x) => (double[batch,time,3] y) { y = MatMul(x, v) }",
        {"v": RNG.standard_normal((4, 3))},
    )
    tested = ke.Engine.from_onnx(sequences, loss="categorical", threads=1)
    parts = [
        (RNG.standard_normal((n, t, 4)), RNG.integers(0, 3, (n, t))) for n, t in ((2, 6), (3, 1))
    ]
    parts[0][1][0, :2] = -100
    terms = []
    for x, ids in parts:
        z = x @ tested.parameters["v"]
        chosen = np.take_along_axis(z, ids[..., None] % 3, -1)[..., 0]
        terms.append((np.log(np.exp(z).sum(-1)) - chosen)[ids >= 0])
    expected = np.concatenate(terms).mean()
    found = tested.evaluate([({"x": x}, ids) for x, ids in parts], ["loss"])["loss"]
    assert found == pytest.approx(expected, rel=1e-12)


# -- a number for the whole batch, which the file computes -----------------------------------------

CUBES = abs(MEANS - BOXES) ** 3
ENTRY = "net (double[batch,4] x, double[batch,2] t) => (double loss"
NODES = "{ u = MatMul(x, w)  h = Tanh(u)  box = MatMul(h, b)  d = Sub(box, t)  e = Abs(d)"
FILES = {
    "mean": ("q = Pow(e, three)  loss = ReduceMean<keepdims=0>(q)", CUBES.mean(1), "mean"),
    "sum": ("q = Pow(e, three)  loss = ReduceSum<keepdims=0>(q)", CUBES.sum(1), "sum"),
    "root of a mean": (
        "q = Pow(e, three)  m = ReduceMean<keepdims=0>(q)  loss = Sqrt(m)", None, "mean"),
    "mean beside a penalty": (
        "q = Pow(e, three)  m = ReduceMean<keepdims=0>(q)  p = ReduceL1<keepdims=0>(b)  "
        "loss = Add(m, p)",
        CUBES.mean(1) + abs(WEIGHTS["b"]).sum(), "mean",
    ),
    "share of a mask": (
        "q = Pow(e, three)  g = Cast<to=11>(k)  r = Mul(q, g)  s = ReduceSum<keepdims=0>(r)  "
        "c = ReduceSum<keepdims=0>(g)  loss = Div(s, c)",
        None, "mean",
    ),
}  # fmt: skip


def file_of(name):
    more = ", int64[batch,2] k" if "mask" in name else ""
    entry = ENTRY.replace(" t)", f" t{more})") + ") "
    return parsed(
        entry + NODES + FILES[name][0] + " }",
        {"w": WEIGHTS["w"], "b": WEIGHTS["b"], "three": np.array(3.0)},
    )


def batch_of_file(name, rows):
    mask = {"k": (BOXES > -0.5).astype(np.int64)[rows]} if "mask" in name else {}
    return {"x": X[rows], "t": BOXES[rows], **mask}


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("name", FILES)
def test_numbers_of_batches_are_means_over_the_examples_or_sums(name, size):
    _, terms, kind = FILES[name]
    sample = size and {"sample_inputs": batch_of_file(name, slice(size))}
    tested = ke.Engine.from_onnx(file_of(name), loss="output", threads=1, **(sample or {}))
    for cuts in CUTS:
        rows = np.split(np.arange(9), cuts)
        parts = [(batch_of_file(name, r), None) for r in rows]
        losses = [tested.loss(*part) for part in parts]
        if terms is not None:
            for loss, r in zip(losses, rows, strict=True):
                assert loss == pytest.approx(terms[r].mean() if kind == "mean" else terms[r].sum())
        sizes = [len(r) for r in rows]
        expected = np.average(losses, weights=sizes) if kind == "mean" else sum(losses)
        assert tested.evaluate(parts) == {"loss": pytest.approx(expected, rel=1e-12)}


def test_a_number_of_the_batch_leaves_the_reduction_of_other_losses():
    """The number is a penalty in the file, beside squared errors under a mean."""
    file = parsed(
        "net (double[batch,4] x) => (double[batch,2] box, double penalty) "
        "{ u = MatMul(x, w)  h = Tanh(u)  box = MatMul(h, b)  penalty = ReduceL1<keepdims=0>(b) }",
        {"w": WEIGHTS["w"], "b": WEIGHTS["b"]},
    )
    squares, penalty = SQUARES.sum(1), abs(WEIGHTS["b"]).sum()
    for reduction, expected in {"mean": squares.mean(), "sum": squares.sum()}.items():
        tested = ke.Engine.from_onnx(
            file, loss={"box": "normal", "penalty": loss_named("output", weight=0.1)},
            reduction=reduction, threads=1,
        )  # fmt: skip
        assert tested.loss({"x": X}, {"box": BOXES}) == pytest.approx(expected + 0.1 * penalty)
        for cuts in CUTS:
            parts = [({"x": X[r]}, {"box": BOXES[r]}) for r in np.split(np.arange(9), cuts)]
            assert tested.evaluate(parts) == {"loss": pytest.approx(expected + 0.1 * penalty)}

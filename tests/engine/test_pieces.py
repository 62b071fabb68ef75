"""Pieces of data in which no target counts add nothing; data in which none counts are refused."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import parsed

RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.standard_normal(s) for n, s in {"w": (4, 5), "a": (5, 3), "b": (5, 2)}.items()}
X, IDS, BOXES = RNG.standard_normal((8, 4)), RNG.integers(0, 3, 8), RNG.standard_normal((8, 2))
PIECES = (slice(0, 3), slice(3, 5), slice(5, 8))
NONE = np.zeros(8)
# Whether the targets of each example count: no target of a loss counts in some pieces.
FIRST, LAST = np.arange(8) >= 3, np.arange(8) < 5
OUTPUTS = ["cls", "box"]


def model():
    return parsed(
        """net (double[batch,4] x) => (double[batch,3] cls, double[batch,2] box) {
          t = MatMul(x, w)  h = Tanh(t)  cls = MatMul(h, a)  box = MatMul(h, b)
        }""",
        WEIGHTS,
    )


def ids(counts, rows):
    return np.where(counts, IDS, -100)[rows]


def boxes(counts, rows):
    return ke.Weighted(np.where(counts[:, None], BOXES, np.nan)[rows], counts[rows])


LOSSES = {
    "classes": (["categorical"], ["cls"], lambda rows: ids(LAST, rows)),
    "means": (["normal"], ["box"], lambda rows: boxes(FIRST * 2.0, rows)),
    "both": (
        ["categorical", "normal"], OUTPUTS,
        lambda rows: {"cls": ids(LAST, rows), "box": boxes(FIRST * 2.0, rows)}),
    "one of both": (
        ["categorical", "normal"], OUTPUTS,
        lambda rows: {"cls": ids(FIRST, rows), "box": boxes(NONE, rows)}),
}  # fmt: skip
every_loss = pytest.mark.parametrize("loss", LOSSES)


def options(loss):
    kinds, outputs, _ = LOSSES[loss]
    return {"loss": kinds, "output": outputs, "threads": 1}


def data(loss, *pieces):
    return [({"x": X[rows]}, LOSSES[loss][2](rows)) for rows in pieces]


def engine(loss, **others):
    return ke.Engine.from_onnx(model(), **options(loss), **others)


def averages(engine):
    return {str(i): f.cov for i, f in enumerate(engine.estimator.factors)}


def stepped(make):
    def step(loss, parts):
        its = engine(loss)
        optimizer = make(its)
        for _ in range(2):
            optimizer.step(parts)
        return its.parameters

    return step


def observed(loss, parts):
    its = engine(loss)
    for _ in range(2):
        its.observe(parts)
    return averages(its)


def curvature(loss, batches, structure="kron"):
    return ke.curvature(model(), batches, structure=structure, fisher="exact", **options(loss))


def of_curvature(structure):
    def measure(loss, batches):
        found = curvature(loss, batches, structure)
        return {**found.multiply(WEIGHTS), "log p": found.log_likelihood}

    return measure


def operator(matrix):
    def multiply(loss, batches):
        product = ke.curvature_operator(model(), batches, matrix, **options(loss))
        return {"": product @ np.ones(product.shape[1])}

    return multiply


def influence(loss, batches):
    scores = ke.Influence(curvature(loss, batches), damping=0.1)
    return {"scores": scores.scores(batches, batches), "self": scores.self_scores(batches)}


CALLS = {
    "gradients": lambda loss, parts: engine(loss).gradients(parts).gradients,
    "loss": lambda loss, parts: {"": engine(loss).loss(parts)},
    "step": lambda loss, parts: engine(loss).step(parts).natural_gradients,
    "observe": observed,
    "products": lambda loss, parts: (
        engine(loss).curvature_products(parts).multiply_fisher({"w": WEIGHTS["w"]})
    ),
    "auto": stepped(lambda e: ke.KfacOptimizer(e, statistics_part=1.0)),
    "quadratic": stepped(lambda e: ke.KfacOptimizer(e, "quadratic", statistics_part=1.0)),
    "adamw": stepped(ke.AdamW),
}
OF_DATA = {
    "kron": of_curvature("kron"),
    "diagonal": of_curvature("diagonal"),
    "fisher": operator("fisher"),
    "hessian": operator("hessian"),
    "influence": influence,
}


@every_loss
@pytest.mark.parametrize("call", CALLS | OF_DATA)
def test_pieces_in_which_nothing_counts_add_nothing(call, loss):
    """The result is that of one batch with all examples."""
    compute = (CALLS | OF_DATA)[call]
    whole, found = (compute(loss, data(loss, *p)) for p in ([slice(0, 8)], PIECES))
    assert whole.keys() == found.keys()
    for name, array in whole.items():
        close = 1e-9 * np.abs(array).max()
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=close, err_msg=name)


@pytest.mark.parametrize("loss", ["classes", "both"])
@pytest.mark.parametrize("call", CALLS | OF_DATA)
def test_data_in_which_nothing_counts_are_refused(call, loss):
    nothing = [
        (
            x,
            ke.Weighted(
                t if loss == "classes" else {"cls": t["cls"], "box": BOXES[:3]}, np.zeros(3)
            ),
        )
        for x, t in data(loss, PIECES[0], PIECES[0])
    ]
    with pytest.raises(ke.NonFiniteError, match=r"no target of the loss on 'cls'.* counts"):
        (CALLS | OF_DATA)[call](loss, nothing)


def test_a_loss_without_targets_that_count_has_no_gradient():
    """The batch is that of the other loss alone."""
    both, alone = engine("one of both"), engine("classes")
    batch = data("one of both", slice(3, 8))[0]
    found = both.gradients(*batch)
    expected = alone.gradients(batch[0], batch[1]["cls"])
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    np.testing.assert_allclose(found.gradients["w"], expected.gradients["w"], rtol=1e-12)
    assert not found.gradients["b"].any()

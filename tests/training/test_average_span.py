"""The span of averages of gradients, beside gradients whose averages are known."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.average_span import AverageSpan
from tests.training import softmax_net as net

STEPS = 210


def spans(gradients, momentum=0.85):
    """The span after each step of two matrices of one and of three entries."""
    span, shapes = AverageSpan(momentum), {"a": np.empty(()), "b": np.empty(())}
    slots, found = span.new_slots(shapes), []
    averages = dict.fromkeys(shapes, 0.0)
    for step, pair in enumerate(gradients):
        new, mu = span.new_slots(shapes), span.momentum_of(slots)
        squares = [{}, {}]
        for name, g in zip(shapes, pair, strict=True):
            averages[name] = mu * averages[name] + (1 - mu) * g
            for products, vector in zip(squares, (g, averages[name]), strict=True):
                products[(name,)] = np.asarray((vector**2).sum())
        due = span.is_due(step, True)
        span.write(slots, new, squares if due else [], due)
        slots = new
        found.append(1 / (1 - span.momentum_of(slots)))
    return np.array(found)


def alternating(period):
    waves = np.cos(2 * np.pi * np.arange(STEPS) / period + 0.3)
    return [(np.array([w]), w * np.array([1.0, 2.0, -1.0])) for w in waves]


NOISE = np.random.default_rng(0).standard_normal((STEPS, 4))


@pytest.mark.parametrize("period", [2, 3, 4])
def test_gradients_that_cancel_have_the_longest_span(period):
    found = spans(alternating(period))
    assert found[0] == pytest.approx(1 / 0.15)
    assert (np.diff(found) >= 0).all()
    assert found[-1] == pytest.approx(20)
    # No measurement multiplies the span by more than exp(0.2).
    assert (np.diff(np.log(found)) <= 0.2 + 1e-12).all()


@pytest.mark.parametrize("kind", ["independent", "constant", "zero", "overflow"])
def test_other_gradients_have_the_shortest_span(kind):
    rows = {
        "independent": NOISE, "constant": np.ones((STEPS, 4)), "zero": np.zeros((STEPS, 4)),
        "overflow": np.full((STEPS, 4), np.inf),
    }[kind]  # fmt: skip
    with np.errstate(invalid="ignore"):
        found = spans([(row[:1], row[1:]) for row in rows])
    np.testing.assert_allclose(found, 1 / 0.15)


def test_a_matrix_without_gradients_does_not_count():
    rows = [(0 * first, second) for first, second in alternating(2)]
    np.testing.assert_allclose(spans(rows), spans(alternating(2)))


def test_the_span_returns_when_gradients_agree():
    rows = [*alternating(2)[:100], *[(np.ones(1), np.ones(3))] * 110]
    found = spans(rows)
    assert found[99] > 15
    assert found[-1] == pytest.approx(1 / 0.15)


def test_a_span_of_the_first_steps_above_the_bound_remains():
    np.testing.assert_allclose(spans(alternating(2), 0.97), 1 / 0.03)


def test_a_given_momentum_has_no_span():
    given, default = (ke.KfacOptimizer(net.engine(), momentum=m) for m in (0.85, None))
    assert "log_span" in default.state().arrays
    assert "log_span" not in given.state().arrays

"""The node tests that the ``onnx`` package carries: their results, and gradients of them."""

from functools import cache

import pytest

from kfac_engine.autodiff.rules import load_rules
from scripts import node_tests

# One test for each would build a list of 1884 in every worker: they are dealt out to these.
HANDS = 8


@cache
def cases():
    return node_tests.cases()


@pytest.mark.slow
@pytest.mark.parametrize("hand", range(HANDS))
def test_results_and_gradients_are_right_or_refused(hand):
    outcomes = list(node_tests.outcomes(cases()[hand::HANDS]))
    wrong = [f"{o.name}: {o.why}" for o in outcomes if o.verdict == "wrong"]
    assert not wrong
    assert any(outcome.verdict == "passed" for outcome in outcomes)


def test_a_wrong_gradient_is_noticed(monkeypatch):
    (case,) = [case for case in cases() if case.name == "test_tanh"]
    rules = load_rules()
    monkeypatch.setitem(rules._rows, "Tanh", rules["Sigmoid"])
    (outcome,) = node_tests.outcomes([case])
    assert outcome.verdict == "wrong"

"""The page of operators says what is so, and what onnx's node tests show is right."""

import re

import numpy as np
import onnx
import pytest
from onnx import defs

from kfac_engine.autodiff.lowering import LOWERINGS, load_lowerings
from kfac_engine.autodiff.rules import QUANTIZERS, REFUSED, RULES, ZERO_DERIVATIVE, load_rules
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.structure import Graph, Input, Node
from scripts import list_operators, node_tests
from tests.violations import assert_none

PAGE = list_operators.PAGE.read_text(encoding="utf-8")
STANDARD = sorted(
    {schema.name for schema in defs.get_all_schemas_with_history() if not schema.domain}
)
# How far the share of node tests that pass may fall before somebody is asked.
LEAST_SHARE = 0.95
# The gate runs one node test of so many.
EACH = 8


def test_node_tests_pass():
    assert_none(wrong(node_tests.outcomes(node_tests.cases()[::EACH])))


def wrong(outcomes):
    return [f"{o.name}: {o.why}" for o in outcomes if o.verdict == "wrong"]


@pytest.mark.nightly
def test_all_node_tests_pass_and_page_counts_them():
    outcomes = list(node_tests.outcomes(node_tests.cases()))
    assert_none(wrong(outcomes))
    passed, refused = (
        sum(outcome.verdict == verdict for outcome in outcomes) for verdict in ("passed", "refused")
    )
    assert passed >= LEAST_SHARE * (passed + refused)
    if f"with onnx {onnx.__version__} " in PAGE:
        assert list_operators.page(outcomes) == PAGE, "run python -m scripts.list_operators"


def test_standard_operators_have_rows():
    assert len(STANDARD) > 200
    assert_none(f"{name}: {how}" for name, how in handled() if how == "unknown")
    assert_none(
        f"{name}: {how}"
        for name, how in handled()
        if not re.search(rf"^\| {name} \| [\d, ]+ \| {re.escape(how)} \|", PAGE, re.M)
    )


def handled():
    return [(name, list_operators.handling(name)) for name in STANDARD]


def test_operators_are_either_refused_or_supported():
    handled = {*load_rules(), *load_lowerings(), *ZERO_DERIVATIVE, *QUANTIZERS}
    assert not handled.intersection(REFUSED)
    assert set(REFUSED) <= set(STANDARD)


def test_node_test_check_detects_wrong_gradient(monkeypatch):
    (case,) = [case for case in node_tests.cases() if case.name == "test_tanh"]
    monkeypatch.setitem(RULES._rows, "Tanh", load_rules()["Sigmoid"])
    (outcome,) = node_tests.outcomes([case])
    assert outcome.verdict == "wrong"


def test_page_examples_add_working_rules(monkeypatch):
    for table in (load_rules(), load_lowerings()):
        monkeypatch.setattr(table, "_rows", dict(table._rows))
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(code, names)  # what the reader is told to run
    rng = np.random.default_rng(0)
    node_tests.check(load_graph(names["model"]), {"x": rng.normal(size=(5, 4)).astype("f")})
    assert {"com.microsoft::CDist"} <= set(LOWERINGS)
    sides = {"x": (5, 4), "y": (5, 4), "gate": (5, 1)}
    graph = Graph(
        (Node("GatedAdd", tuple(sides), ("z",), name="n", domain="com.microsoft"),),
        tuple(Input(name, np.dtype("float32"), shape) for name, shape in sides.items()),
        ("z",),
        {},
        20,
        domains={"com.microsoft": 1},
    )
    node_tests.check(graph, {name: rng.normal(size=s).astype("f") for name, s in sides.items()})

"""Every derivative rule against finite differences."""

import numpy as np
import pytest

from kfac_engine.autodiff.rules import load_rules
from tests.autodiff.all_cases import CASES
from tests.autodiff.harness import DTYPES, bench, draw, slopes

# Facts come from a batch of two; a size baked into the graph fails at another. One is an edge:
# there each entry of the gradients is compared, and random sums of the entries at the other.
SAMPLE_BATCH = 2
BATCHES = (1, 3)
SUMS = 6

# Central differences in float64 err by step² times the third derivative, about 1e-9.
STEP = 2.0**-16
# ONNX Runtime works in float32, and sums of a hundred terms lose two digits.
TOLERANCES = {"reference": 1e-6, "ort": 1e-4}


def check(made, case, batch, cotangents, directions, truth):
    runtime = made.runtime
    feeds = pick(draw(case, DTYPES[runtime], batch), made.sample)
    found = made.gradients(feeds, typed(cotangents, DTYPES[runtime]))
    for name, expected in truth.items():
        # Absent means zero.
        actual = found.get(name, np.zeros_like(feeds[name]))
        assert actual.shape == feeds[name].shape
        scale = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(
            directions[name] @ actual.ravel(), expected, rtol=0, atol=TOLERANCES[runtime] * scale,
            err_msg=f"{name} in {runtime}, operator set {made.graph.opset}, batch {batch}",
        )  # fmt: skip


def directions_of(feeds, wrt, batch):
    """Single entries at a batch of one, else sums of the entries with random weights.

    The weights are whole, so that a step is a number that float32 holds exactly.
    """
    rng = np.random.default_rng(0)
    sizes = {name: feeds[name].size for name in wrt}
    if batch == 1:
        return {name: np.eye(size) for name, size in sizes.items()}
    weights = [-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]
    return {name: rng.choice(weights, size=(SUMS, size)) for name, size in sizes.items()}


def pick(arrays, names):
    return {name: arrays[name] for name in names}


def typed(arrays, dtype):
    return {name: array.astype(dtype) for name, array in arrays.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_equals_finite_differences(case):
    exact, *others = (
        bench(case, runtime, SAMPLE_BATCH, opset)
        for runtime, opset in dict.fromkeys(
            [("reference", case.opset), ("ort", case.opset), ("ort", case.newest)]
        )
    )
    for batch in BATCHES:
        feeds = pick(draw(case, "float64", batch), exact.sample)
        values = exact.forward(feeds, exact.outputs)(feeds)
        rng = np.random.default_rng(batch)
        cotangents = {name: rng.normal(size=value.shape) for name, value in values.items()}
        directions = directions_of(feeds, exact.wrt, batch)
        truth = slopes(exact, feeds, cotangents, STEP, directions)
        for made in (exact, *others):
            check(made, case, batch, cotangents, directions, truth)


def test_all_rules_of_standard_operators_have_cases():
    standard = {op for op in load_rules() if "::" not in op}
    assert not standard - {case.op for case in CASES}


def test_case_names_are_unique():
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)

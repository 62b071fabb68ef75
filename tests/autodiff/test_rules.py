"""Every derivative rule against finite differences."""

import numpy as np
import pytest

from kfac_engine.autodiff.rules import load_rules
from tests.autodiff.all_cases import CASES
from tests.autodiff.harness import DTYPES, bench, draw, finite_differences

# Facts come from a batch of two; a size baked into the graph fails at another. One is an edge.
SAMPLE_BATCH = 2
BATCHES = (3, 1)

# Central differences in float64 err by step² times the third derivative, about 1e-9.
STEP = 2.0**-16
# ONNX Runtime works in float32, and sums of a hundred terms lose two digits.
TOLERANCES = {"reference": 1e-6, "ort": 1e-4}


def check(case, runtime, opset, batch, cotangents, truth):
    made = bench(case, runtime, SAMPLE_BATCH, opset)
    feeds = pick(draw(case, DTYPES[runtime], batch), made.sample)
    found = made.gradients(feeds, typed(cotangents, DTYPES[runtime]))
    for name, expected in truth.items():
        # Absent means zero.
        actual = found.get(name, np.zeros_like(expected))
        scale = max(1.0, np.abs(expected).max(initial=0))
        assert actual.shape == expected.shape
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=TOLERANCES[runtime] * scale,
            err_msg=f"{name} in {runtime}, operator set {opset}",
        )  # fmt: skip


def pick(arrays, names):
    return {name: arrays[name] for name in names}


def typed(arrays, dtype):
    return {name: array.astype(dtype) for name, array in arrays.items()}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_equals_finite_differences(case, batch):
    made = bench(case, "reference", SAMPLE_BATCH)
    feeds = pick(draw(case, "float64", batch), made.sample)
    values = made.forward(feeds, made.outputs)(feeds)
    rng = np.random.default_rng(batch)
    cotangents = {name: rng.normal(size=value.shape) for name, value in values.items()}
    truth = finite_differences(made, feeds, cotangents, STEP)
    for runtime, opset in (("reference", case.opset), ("ort", case.opset), ("ort", case.newest)):
        check(case, runtime, opset, batch, cotangents, truth)


def test_all_rules_of_standard_operators_have_cases():
    standard = {op for op in load_rules() if "::" not in op}
    assert not standard - {case.op for case in CASES}


def test_case_names_are_unique():
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)

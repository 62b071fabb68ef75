"""Constants that are tables and not weights, told from their values."""

import numpy as np
import pytest

from kfac_engine.graph.analysis.computed_tables import Tables, is_mask

POSITIONS, WIDTH = 7, 6
ANGLES = np.arange(POSITIONS)[:, None] * 100.0 ** (-2 * np.arange(WIDTH // 2) / WIDTH)
SINES, COSINES = np.sin(ANGLES), np.cos(ANGLES)
WEIGHTS = np.random.default_rng(0).standard_normal((POSITIONS, WIDTH))
UNIT = WEIGHTS / np.linalg.norm(WEIGHTS, axis=-1, keepdims=True)

CIRCLES = {
    "interleaved": np.stack([SINES, COSINES], -1).reshape(POSITIONS, WIDTH),
    "halves": np.concatenate([COSINES, SINES], -1),
    "with_axes": np.concatenate([COSINES, SINES], -1)[None, :, None],
    "half_precision": np.concatenate([COSINES, SINES], -1).astype(np.float16),
}
SERIES = {
    "frequencies": 10_000.0 ** (-np.arange(8) / 8),
    "with_axes": (10_000.0 ** (-np.arange(8) / 8))[None, :, None],
    "slopes": 2.0 ** -np.arange(1.0, 9),
}
WEIGHT_LIKE = {
    "drawn": WEIGHTS,
    "unit_rows": UNIT,
    "identity": np.eye(6),
    "ones": np.ones((4, 4)),
    "vector_of_ones": np.ones(6),
    "line": np.linspace(0.1, 1, 6),
    "few": np.array([1.0, 2, 4]),
    "signs": np.array([[1.0, -1, 0, 1], [-1, 0, 0, 1]]),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_concatenated_sines_and_cosines_are_table(name):
    assert Tables({"c": CIRCLES[name]}).reason("c") == "a table of sines and cosines"


def test_separate_sines_and_cosines_are_tables_only_as_pair():
    assert Tables({"c": COSINES, "w": WEIGHTS, "s": SINES}).reason("c") == (
        "a table of sines and cosines, with 's'"
    )
    assert Tables({"c": COSINES, "w": WEIGHTS}).reason("c") is None


@pytest.mark.parametrize("name", SERIES)
def test_geometric_series_is_table(name):
    found = Tables({"c": SERIES[name]}).reason("c")
    assert found == "a geometric series, as of frequencies or slopes"


@pytest.mark.parametrize("name", WEIGHT_LIKE)
def test_possible_weights_are_not_tables(name):
    zeros = np.zeros_like(WEIGHT_LIKE[name])
    assert Tables({"c": WEIGHT_LIKE[name], "zeros": zeros}).reason("c") is None


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.tril(np.ones((3, 3))), True),
        (np.ones((3, 3)), False),
        (np.zeros((3, 3)), False),
        (np.array([0.0, 1, 1, 0]), False),
        (np.tril(np.full((3, 3), 2.0)), False),
    ],
    ids=["triangle", "ones", "zeros", "vector", "twos"],
)
def test_mask_contains_zeros_and_ones(array, expected):
    assert is_mask(array) is expected


def test_partner_of_table_is_found_among_many_constants():
    rng = np.random.default_rng(1)
    others = {f"w{i}": rng.uniform(-1, 1, SINES.shape) for i in range(200)}
    constants = {"c": COSINES, **others, "s": SINES.astype(np.float16)}
    assert Tables(constants).reason("c") == "a table of sines and cosines, with 's'"
    assert not any(Tables(constants).reason(name) for name in others)


def test_partial_match_is_not_partner():
    other = SINES.copy()
    other[3, 1] += 0.1
    assert Tables({"c": COSINES, "s": other}).reason("c") is None

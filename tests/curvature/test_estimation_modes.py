"""Second moments of the sources equal the Fisher matrix, at once or on average."""

from dataclasses import replace

import numpy as np
import pytest

from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    RegistrationError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from kfac_engine.losses import RegisteredLoss
from tests.comparing import assert_arrays_close
from tests.losses.loss_cases import (
    BERNOULLI,
    BOTH,
    CASES,
    CATEGORICAL,
    NATURAL,
    NORMAL,
    by_name,
    dense_fisher,
    flat,
)
from tests.oracle import predictive_fisher

EXACT = 1e-13  # The same few float64 operations in another order.
DRAWS = 20_000
# A mean of that many draws is normal to the eye: five standard errors happen once in a million.
STANDARD_ERRORS = 5.0
# Root mean squares over 125 means are known to 1/√250 = 6 %; four times that.
ROOT_MEAN_SQUARE = 0.25

COEFFICIENT = 3.0


def rng(seed=0):
    return np.random.default_rng(seed)


def registered(case, coefficient=1.0):
    return [RegisteredLoss("loss", case.loss, coefficient)]


def second_moment(case, sources):
    """Σ over sources of y yᵀ, ``(n, D, D)``."""
    rows = [flat(tuple(source[name] for name in case.loss.inputs)) for source in sources]
    return sum(np.einsum("ni,nj->nij", row, row) for row in rows)


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        *(pytest.param("exact", case, id=f"exact {case.name}") for case in CASES),
        *(pytest.param("exact_GGN", case, id=f"exact_GGN {case.name}") for case in NATURAL),
    ],
)
def test_sources_of_exact_sum_to_the_fisher(mode, case):
    values = case.values()
    sources = list(MODES[mode](registered(case, COEFFICIENT), values, rng()))
    assert len(sources) == np.prod(case.loss.inner_shape(values)[1:])
    expected = COEFFICIENT * dense_fisher(case, values)
    np.testing.assert_allclose(second_moment(case, sources), expected, rtol=0, atol=20 * EXACT)


@pytest.mark.rounding
@pytest.mark.parametrize("mode", ["gradients", "curvature_prop", "curvature_prop_GGN"])
@pytest.mark.parametrize(
    ("make", "name", "var"),
    [(CATEGORICAL, "categorical", 1), (NORMAL, "normal", 0.5), (BERNOULLI, "multi_bernoulli", 1)],
    ids=["categorical", "normal", "Bernoulli"],
)
def test_sampled_sources_converge_to_the_fisher_like_one_over_the_root_of_samples(
    mode, make, name, var
):
    z = np.array([0.5, -1.0, 1.5])
    F = COEFFICIENT * predictive_fisher(name, z, var)
    # One example repeated: every row is a draw of its own.
    values = {"z": np.broadcast_to(z, (DRAWS, 3))}
    (source,) = MODES[mode]([RegisteredLoss("loss", make("z"), COEFFICIENT)], values, rng())
    products = np.einsum("ni,nj->nij", source["z"], source["z"])
    standard_error = products.std(axis=0) / DRAWS**0.5
    # Some products are constant (a squared sign): their mean is off by rounding, hence the 1e-12.
    assert (abs(products.mean(axis=0) - F) <= STANDARD_ERRORS * standard_error + 1e-12).all()
    assert standard_error.max() < 0.05 * abs(F).max()  # or the bound above would say nothing
    few, many = (
        np.sqrt(np.square(products.reshape(-1, size, 3, 3).mean(axis=1) - F).mean())
        for size in (10, 160)
    )
    assert few / many == pytest.approx(160**0.5 / 10**0.5, rel=ROOT_MEAN_SQUARE)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_sources_of_gradients_are_gradients_at_the_drawn_targets(case):
    values = case.values()
    unlabelled = {name: values[name] for name in case.loss.inputs}
    sources = MODES["gradients"](
        registered(case, COEFFICIENT), unlabelled, rng(), {"loss": values["t"]}
    )
    (source,) = list(sources)
    for name, gradient in case.loss.gradient(values).items():
        np.testing.assert_allclose(source[name], COEFFICIENT**0.5 * gradient, rtol=EXACT)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_empirical_weighs_the_gradient_by_the_coefficient_itself(case):
    values = case.values()
    (source,) = list(MODES["empirical"](registered(case, COEFFICIENT), values, rng()))
    for name, gradient in case.loss.gradient(values).items():
        np.testing.assert_allclose(source[name], COEFFICIENT * gradient, rtol=EXACT)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_sources_of_curvature_prop_are_the_factor_times_the_drawn_signs(case):
    values = case.values()
    signs = rng(3).choice([-1, 1], case.loss.inner_shape(values))
    (source,) = list(
        MODES["curvature_prop"](registered(case, COEFFICIENT), values, rng(), {"loss": signs})
    )
    expected = case.loss.fisher_factor(values, COEFFICIENT**0.5 * signs)
    assert_arrays_close(source, expected, rtol=0, atol=10 * EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_same_generator_state_gives_the_same_sources(mode):
    values = CASES[0].values()
    first, again = (list(MODES[mode](registered(CASES[0]), values, rng(5))) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["z"], other["z"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_cotangents_keep_the_element_type(mode, dtype):
    for case in NATURAL:
        losses = registered(case, np.float64(COEFFICIENT))
        for source in MODES[mode](losses, case.values(dtype), rng()):
            assert source["z"].dtype == dtype


@pytest.mark.parametrize("mode", MODES)
def test_matrix_of_a_mode_is_named(mode):
    expected = {"empirical": "Empirical_Fisher"}.get(mode, "GGN" if "GGN" in mode else "Fisher")
    assert MODES[mode].mat_type == expected


# -- several losses and towers

CATEGORICAL_VALUES = {"z": CASES[0].values()["z"], "t": CASES[0].values()["t"]}
TWO_TOWERS = [RegisteredLoss("loss", CATEGORICAL(*names), COEFFICIENT) for names in ("zt", "yr")]
TWO_TOWER_VALUES = {
    **CATEGORICAL_VALUES,
    "y": -CATEGORICAL_VALUES["z"][:2],
    "r": CATEGORICAL_VALUES["t"][:2],
}


@pytest.mark.parametrize("mode", MODES)
def test_towers_go_back_together(mode):
    sources = list(MODES[mode](TWO_TOWERS, TWO_TOWER_VALUES, rng()))
    assert len(sources) == (4 if "exact" in mode else 1)
    for source in sources:
        assert {name: array.shape for name, array in source.items()} == {"z": (3, 4), "y": (2, 4)}


def test_draws_of_towers_come_as_a_tuple():
    draws = {"loss": (TWO_TOWER_VALUES["t"], TWO_TOWER_VALUES["r"])}
    (drawn,) = MODES["gradients"](TWO_TOWERS, TWO_TOWER_VALUES, rng(), draws)
    plain = [replace(tower, coefficient=1) for tower in TWO_TOWERS]
    (data,) = MODES["empirical"](plain, TWO_TOWER_VALUES, rng())
    for name in ("z", "y"):
        np.testing.assert_allclose(drawn[name], COEFFICIENT**0.5 * data[name], rtol=EXACT)


TWO_LOSS_VALUES = {**TWO_TOWER_VALUES, "u": np.zeros((2, 4))}


def test_losses_that_share_an_output_add_up():
    losses = [RegisteredLoss(name, NORMAL("y", targets="u"), 4.0) for name in ("one", "two")]
    (both,) = MODES["empirical"](losses, TWO_LOSS_VALUES, rng())
    (alone,) = MODES["empirical"](losses[:1], TWO_LOSS_VALUES, rng())
    np.testing.assert_allclose(both["y"], 2 * alone["y"], rtol=EXACT)


def test_exact_holds_one_source_at_a_time():
    values = {"z": np.zeros((1, 10**6), np.float32)}
    sources = MODES["exact"]([RegisteredLoss("wide", NORMAL("z"))], values, rng())
    for index in range(3):
        assert np.flatnonzero(next(sources)["z"]) == [index]


# -- bad input

LOSS = [RegisteredLoss("loss", CATEGORICAL("z", "t"))]
Z = {"z": np.zeros((2, 3))}


@pytest.mark.parametrize(("mode", "losses", "values", "draws", "error", "message"), [
        ("exact", [], Z, None, RegistrationError, "no loss"),
        ("exact", LOSS, {}, None, UnknownNameError, "'z'"),
        ("exact", LOSS, {"z": Z["z"] * np.nan}, None, NonFiniteError, "'z'"),
        ("empirical", LOSS, Z, None, InputError, "targets 't'"),
        ("empirical", [RegisteredLoss("loss", NORMAL("z"))], Z, None, InputError, "no targets"),
        ("gradients", LOSS, Z, {"lost": 1}, UnknownNameError, "'lost'"),
        ("gradients", LOSS, Z, {"loss": np.array([0, 3])}, InputError, "target 3 of example 1"),
        ("gradients", LOSS, Z, {"loss": np.zeros(3, int)}, ShapeError, r"\(3,\)"),
        ("gradients", LOSS, Z, {"loss": (np.zeros(2, int),) * 2}, InputError, "1 parts.*hold 2"),
        ("gradients", TWO_TOWERS, TWO_TOWER_VALUES, {"loss": Z["z"][0]}, InputError, "2 parts"),
        ("curvature_prop", LOSS, Z, {"loss": np.ones(3)}, ShapeError, r"\(3,\), expected \(2, 3\)"),
        ("curvature_prop", LOSS, Z, {"loss": Z["z"]}, InputError, "signs"),
        (
            "exact", TWO_TOWERS, {**TWO_TOWER_VALUES, "y": np.zeros((2, 5))}, None, ShapeError,
            r"\(4,\), \(5,\)"),
        *(
            (
                mode,
                [RegisteredLoss("loss", BOTH("z", "s"))],
                {"z": Z["z"], "s": Z["z"] + 1},
                None,
                UnsupportedError,
                "natural",
            )
            for mode in ("exact_GGN", "curvature_prop_GGN")
        ),
    ])  # fmt: skip
def test_wrong_batches_are_refused(mode, losses, values, draws, error, message):
    with pytest.raises(error, match=message):
        next(MODES[mode](losses, values, rng(), draws))


def test_unknown_mode_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"estimation mode 'fisher'.*curvature_prop"):
        MODES["fisher"]

"""What holds for every loss: gradients, factors, Gauss-Newton, element types, names, bad input."""

from functools import partial
from itertools import product

import numpy as np
import pytest

from kfac_engine import losses
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    RegistrationError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from kfac_engine.losses import LOSSES, RegisteredLoss
from tests.comparing import assert_arrays_equal
from tests.foreign import Foreign
from tests.losses.loss_cases import (
    BERNOULLI,
    BOTH,
    CASES,
    CATEGORICAL,
    NATURAL,
    NORMAL,
    basis,
    by_name,
    dense_fisher,
    flat,
)
from tests.oracle import derivative

EXACT = 1e-13  # The same few float64 operations in another order.
NUMERICAL = 1e-9  # Extrapolated finite differences of analytic functions.
# Central differences of the gradient: the square of the step times a third derivative.
STEP, DIFFERENCES = 2.0**-14, 1e-6
PRECISION = {"float16": 4e-3, "float32": 1e-6}  # A few roundings of numbers of order one.

every_loss = pytest.mark.parametrize("case", CASES, ids=by_name)
every_natural_loss = pytest.mark.parametrize("case", NATURAL, ids=by_name)


def inner_basis(case, values):
    shape = case.loss.inner_shape(values)
    for index in product(*map(range, shape[1:])):
        u = np.zeros(shape)
        u[(slice(None), *index)] = 1
        yield index, u


@every_loss
def test_gradient_is_the_derivative_of_the_value(case):
    values = case.values()
    gradient = case.loss.gradient(values)
    for name in case.loss.inputs:
        expected = np.zeros(case.shape)
        for index in np.ndindex(case.shape):
            expected[index] = derivative(
                lambda x, name=name: np.array(case.loss.value({**values, name: x})),
                values[name],
                index,
            )
        np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=NUMERICAL)


@every_loss
def test_hessian_is_the_derivative_of_the_gradient(case):
    values, rng = case.values(), np.random.default_rng(3)
    v = {name: rng.standard_normal(case.shape) for name in case.loss.inputs}
    found = case.loss.hessian(values, v)
    ahead, behind = (
        case.loss.gradient({**values, **{n: values[n] + step * v[n] for n in v}})
        for step in (STEP, -STEP)
    )
    for name in v:
        slope = (ahead[name] - behind[name]) / (2 * STEP)
        np.testing.assert_allclose(found[name], slope, rtol=0, atol=DIFFERENCES)


@every_loss
def test_factor_times_its_transpose_is_the_fisher(case):
    values = case.values()
    B = np.stack(
        [flat(case.loss.multiply_fisher_factor(u)(values)) for _, u in inner_basis(case, values)],
        axis=-1,
    )
    product = np.einsum("nik,njk->nij", B, B)
    np.testing.assert_allclose(product, dense_fisher(case, values), rtol=0, atol=EXACT)


@every_loss
def test_transposed_factor_is_the_adjoint_of_the_factor(case):
    values = case.values()
    for v, (_, u) in product(basis(case), list(inner_basis(case, values))):
        forward = flat(v) * flat(case.loss.multiply_fisher_factor(u)(values))
        back = u * case.loss.multiply_fisher_factor_transpose(v)(values)
        np.testing.assert_allclose(forward.sum(), back.sum(), rtol=0, atol=EXACT)


@every_loss
def test_replicated_one_hot_is_a_column_of_the_factor(case):
    values = case.values()
    for index, u in inner_basis(case, values):
        column = case.loss.multiply_fisher_factor_replicated_one_hot(index)(values)
        expected = case.loss.multiply_fisher_factor(u)(values)
        np.testing.assert_allclose(flat(column), flat(expected), rtol=0, atol=EXACT)


@every_natural_loss
def test_gauss_newton_is_the_hessian_of_the_loss(case):
    values = case.values()
    products = [case.loss.multiply_ggn(e)(values) for e in basis(case)]
    gradient = lambda x: case.loss.gradient({**values, "z": x})["z"]  # noqa: E731 (one expression)
    for column, index in zip(products, np.ndindex(case.shape[1:]), strict=True):
        for example in range(case.shape[0]):
            expected = derivative(gradient, values["z"], (example, *index))[example]
            np.testing.assert_allclose(column[example], expected, rtol=0, atol=NUMERICAL)


@every_natural_loss
def test_gauss_newton_factors_multiply_to_the_gauss_newton_matrix(case):
    values = case.values()
    v = values["z"]
    once = case.loss.multiply_ggn_factor_transpose(v)(values)
    twice = case.loss.multiply_ggn_factor(once)(values)
    np.testing.assert_allclose(twice, case.loss.multiply_ggn(v)(values), rtol=0, atol=EXACT)
    index = (0,) * (len(case.shape) - 1)
    np.testing.assert_array_equal(
        case.loss.multiply_ggn_factor_replicated_one_hot(index)(values),
        case.loss.multiply_fisher_factor_replicated_one_hot(index)(values),
    )
    assert case.loss.ggn_factor_inner_shape(values) == case.shape


@pytest.mark.parametrize(
    "use",
    [
        lambda loss, v: loss.multiply_ggn((v, v)),
        lambda loss, v: loss.multiply_ggn_factor(v),
        lambda loss, v: loss.multiply_ggn_factor_transpose((v, v)),
        lambda loss, v: loss.multiply_ggn_factor_replicated_one_hot((0,)),
        lambda loss, v: loss.ggn_factor_inner_shape({"z": v, "s": v + 1}),
    ],
    ids=["multiply", "factor", "transpose", "one-hot", "inner shape"],
)
def test_gauss_newton_of_a_predicted_variance_is_refused(use):
    with pytest.raises(UnsupportedError, match="not natural parameters") as caught:
        use(BOTH("z", "s"), np.ones((2, 3)))
    assert isinstance(caught.value, NotImplementedError)


@every_loss
@pytest.mark.parametrize("dtype", PRECISION)
def test_results_have_element_type_of_inputs(case, dtype):
    narrow, wide = case.values(dtype), case.values()
    index = (0,) * (len(case.shape) - 1)
    for name, array in narrow.items():  # the same numbers, or the comparison is of roundings
        wide[name] = array.astype(wide[name].dtype)

    def results(values):
        loss, u = case.loss, np.ones(case.loss.inner_shape(values), values["z"].dtype)
        v = {name: values[name] for name in loss.inputs}
        return [
            *loss.gradient(values).values(),
            *loss.fisher(values, v).values(),
            *loss.fisher_factor(values, u).values(),
            loss.fisher_factor_transpose(values, v),
            *loss.one_hot(values, index).values(),
        ]

    for found, expected in zip(results(narrow), results(wide), strict=True):
        assert found.dtype == dtype
        scale = max(1, abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=scale * PRECISION[dtype])


def test_losses_are_summed_in_float64():
    """A float32 sum of a million terms is off by 4e-8, what is left here is the terms' own."""
    values = {"z": np.full((1_000_000, 2), 0.1, np.float32), "t": np.zeros(1_000_000, np.int64)}
    (one,) = set(CATEGORICAL("z", "t").negative_log_probs(values, values["t"]).ravel().tolist())
    assert CATEGORICAL("z", "t").value(values) == pytest.approx(1e6 * one, rel=1e-12)


@every_loss
def test_samples_are_valid_and_reproducible(case):
    values = case.values()
    first, again, other = (
        case.loss.sample(values, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    case.loss.check_target_array(values, first)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@every_loss
def test_sampled_loss_equals_loss_on_same_targets(case):
    values = case.values()
    sample = case.loss.sample(values, np.random.default_rng(5))
    expected = case.loss.evaluate()({**values, "t": sample})
    assert case.loss.evaluate_on_sample(5)(values) == expected
    assert case.loss.evaluate_on_sample(6)(values) != expected


def test_default_seed_is_that_of_constructor():
    values = {"z": np.linspace(-1, 1, 12).reshape(3, 4)}
    seeded, unseeded = NORMAL("z", seed=4), NORMAL("z")
    assert seeded.evaluate_on_sample()(values) == unseeded.evaluate_on_sample(4)(values)
    assert seeded.evaluate_on_sample(0)(values) == unseeded.evaluate_on_sample(0)(values)
    assert unseeded.evaluate_on_sample()(values) == unseeded.evaluate_on_sample(0)(values)


@every_loss
def test_positions_counts_predictions_per_example(case):
    assert case.loss.positions(case.values()) == case.positions


@every_loss
def test_static_inner_shape_needs_only_shapes(case):
    values = case.values()
    shapes = {name: values[name].shape for name in case.loss.inputs}
    assert case.loss.static_inner_shape(shapes) == case.loss.fisher_factor_inner_shape(values)


@every_loss
def test_dlpack_values_are_accepted(case):
    values = case.values()
    foreign = {name: Foreign(array) for name, array in values.items()}
    assert case.loss.evaluate()(foreign) == case.loss.value(values)


# -- names


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "categorical": CATEGORICAL,
        "softmax_cross_entropy": CATEGORICAL,
        "cross_entropy": CATEGORICAL,
        "normal": NORMAL,
        "squared_error": NORMAL,
        "mse": NORMAL,
        "multi_bernoulli": BERNOULLI,
        "sigmoid_cross_entropy": BERNOULLI,
        "bce": BERNOULLI,
    }.items(),
)
def test_losses_table_creates_losses_by_name(name, kind):
    loss = LOSSES[name]("z", targets="t", seed=3, class_axis=1)
    assert type(loss) is kind
    assert (loss.inputs, loss.targets, loss.seed, loss.class_axis) == (("z",), "t", 3, 1)


def test_losses_by_their_common_names_have_the_values_of_the_conventions():
    z, numbers, bits = np.array([[0.5, -1.0, 2.0]]), np.array([[1.0, 0.0, 2.5]]), [[1.0, 0.0, 1.0]]
    values = {"z": z, "classes": np.array([1]), "numbers": numbers, "bits": np.array(bits)}
    p = 1 / (1 + np.exp(-z[0]))
    expected = {
        ("cross_entropy", "classes"): np.log(np.exp(z).sum()) - z[0, 1],
        # The density of a Gaussian of variance ½ has a factor π^(-½) for each of the three entries.
        ("mse", "numbers"): ((z - numbers) ** 2).sum() + 1.5 * np.log(np.pi),
        ("bce", "bits"): -np.log([p[0], 1 - p[1], p[2]]).sum(),
    }
    for (name, targets), value in expected.items():
        # Few operations in float64.
        assert LOSSES[name]("z", targets=targets).value(values) == pytest.approx(value, rel=1e-13)


def test_all_public_losses_have_cases():
    public = {name for name in losses.__all__ if name.endswith("NegativeLogProbLoss")}
    # Losses with an order of positions: tests/losses/test_causal.py and test_ctc.py.
    public -= {"CausalNegativeLogProbLoss", "CTCNegativeLogProbLoss"}
    assert public == {type(case.loss).__name__ for case in CASES}


# -- bad input

Z = np.zeros((2, 3))
V = {"z": Z}


def with_entry(value):
    z = Z.copy()
    z[1, 2] = value
    return z


@pytest.mark.parametrize(
    ("loss", "values", "error", "message"),
    [
        (CATEGORICAL("z"), {}, UnknownNameError, "'z'"),
        (CATEGORICAL("z"), {"z": with_entry(np.nan)}, NonFiniteError, r"'z'.*nan at \(1, 2\)"),
        (NORMAL("z"), {"z": with_entry(np.inf)}, NonFiniteError, r"'z'.*inf at \(1, 2\)"),
        (CATEGORICAL("z"), {"z": np.zeros(3)}, ShapeError, r"'z' has shape \(3,\).*2 non-empty"),
        (CATEGORICAL("z"), {"z": np.zeros((2, 0))}, ShapeError, r"\(2, 0\)"),
        (NORMAL("z"), {"z": np.zeros((0, 3))}, ShapeError, r"\(0, 3\)"),
        (NORMAL("z"), {"z": np.zeros(())}, ShapeError, r"\(\)"),
        (CATEGORICAL("z"), {"z": np.zeros((2, 3), int)}, InputError, "int64"),
        (CATEGORICAL("z"), {"z": np.zeros((2, 3), complex)}, InputError, "complex128"),
        (CATEGORICAL("z", class_axis=0), V, ShapeError, "class_axis=0"),
        (CATEGORICAL("z", class_axis=-2), V, ShapeError, "class_axis=-2"),
        (CATEGORICAL("z", class_axis=2), V, ShapeError, "class_axis=2.*choose 1 or -1"),
        (BOTH("z", "s"), {"z": Z, "s": np.ones((2, 1))}, ShapeError, r"'s'.*\(2, 1\).*\(2, 3\)"),
        (BOTH("z", "s"), {"z": Z, "s": Z + 1 - 2 * np.eye(2, 3)}, InputError, r"-1.0 at \(0, 0\)"),
        (BOTH("z", "s"), {"z": Z}, UnknownNameError, "'s'"),
    ],
)
def test_invalid_inputs_raise_error_before_sampling(loss, values, error, message):
    with pytest.raises(error, match=message):
        loss.evaluate_on_sample()(values)


TARGETS_OF_REALS = [
    (np.zeros((2, 4)), ShapeError, r"\(2, 4\), expected \(2, 3\)"),
    (np.zeros(2), ShapeError, r"\(2,\), expected \(2, 3\)"),
    (with_entry(np.nan), NonFiniteError, r"targets.*nan at \(1, 2\); check the data"),
    (Z.astype(complex), InputError, "complex"),
    (Z.astype(str), InputError, "real numbers"),
]


@pytest.mark.parametrize(
    ("loss", "targets", "error", "message"),
    [
        (CATEGORICAL("z", "t"), np.zeros(3, int), ShapeError, r"\(3,\), expected \(2,\)"),
        (CATEGORICAL("z", "t"), np.zeros((2, 1), int), ShapeError, r"\(2, 1\)"),
        (CATEGORICAL("z", "t"), np.zeros(2), InputError, "integer class ids, got float64"),
        (CATEGORICAL("z", "t"), np.array([0, 3]), InputError, "target 3 of example 1.*3 classes"),
        (CATEGORICAL("z", "t"), np.array([-1, 0]), InputError, "target -1 of example 0"),
        *((NORMAL("z", targets="t"), *rest) for rest in TARGETS_OF_REALS),
        *((BERNOULLI("z", "t"), *rest) for rest in TARGETS_OF_REALS),
        (BERNOULLI("z", "t"), with_entry(2), InputError, r"2.0 at \(1, 2\)"),
        (losses.OnehotCategoricalLogitsNegativeLogProbLoss("z", "t"), Z, InputError, "sum 1"),
    ],
)
def test_invalid_targets_raise_error(loss, targets, error, message):
    with pytest.raises(error, match=message):
        loss.evaluate()({"z": Z, "t": targets})


def test_invalid_class_error_names_position():
    targets = np.zeros((2, 2, 2), int)
    targets[1, 0, 1] = 9
    with pytest.raises(InputError, match=r"target 9 of example 1, position \(0, 1\)"):
        CATEGORICAL("z", "t", class_axis=1).value({"z": np.zeros((2, 3, 2, 2)), "t": targets})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *((partial(NORMAL, "z", var), InputError, "positive number")
          for var in (0, -1.0, np.nan, np.inf, "t")),
        (lambda: BOTH("z", "z"), RegistrationError, "'z'"),
        *((partial(RegisteredLoss, "head", NORMAL("z"), k), RegistrationError, "'head'.*coeffic")
          for k in (-1.0, np.nan, np.inf)),
    ],
)  # fmt: skip
def test_wrong_constants_of_a_loss_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: NORMAL("z").multiply_fisher(np.zeros((2, 4)))(V), r"\(2, 4\), expected \(2, 3\)"),
        (lambda: NORMAL("z").multiply_fisher_factor(np.zeros(3))(V), r"\(3,\)"),
        (lambda: NORMAL("z").multiply_fisher_factor_replicated_one_hot((3,))(V), r"index \(3,\)"),
        (lambda: NORMAL("z").multiply_fisher_factor_replicated_one_hot((-1,))(V), "-1"),
        (lambda: NORMAL("z").multiply_fisher_factor_replicated_one_hot((0, 0))(V), r"\(0, 0\)"),
        (lambda: BOTH("z", "s").multiply_fisher((Z,))({"z": Z, "s": Z + 1}), "2 arrays; got 1"),
    ],
    ids=["vector", "inner", "one-hot", "negative one-hot", "long one-hot", "pair"],
)
def test_invalid_vectors_raise_error(use, message):
    with pytest.raises(InputError, match=message):
        use()


@every_loss
def test_value_and_gradient_check_once_and_have_the_bits_of_both(case, monkeypatch):
    values, checked = case.values(), []
    value, gradient = case.loss.value(values), case.loss.gradient(values)
    check = type(case.loss).check_target_array
    monkeypatch.setattr(
        type(case.loss),
        "check_target_array",
        lambda self, *arrays: checked.append(self) or check(self, *arrays),
    )
    together = case.loss.value_and_gradient(values)
    assert together[0] == value
    assert_arrays_equal(together[1], gradient)
    assert len(checked) == 1


@pytest.mark.parametrize(("shape", "hint"), [((4, 8, 8), "give class_axis=1"), ((4, 8, 7), "")])
def test_targets_that_fit_another_axis_of_the_classes_name_it(shape, hint):
    """Images of classes lie on the axis of channels."""
    loss = CATEGORICAL("z", "t")
    values = {"z": np.zeros((4, 5, 8, 8)), "t": np.zeros(shape, np.int64)}
    with pytest.raises(ShapeError) as failure:
        loss.observe(values)
    assert ("class_axis" in str(failure.value)) == bool(hint)
    assert hint in str(failure.value)


@every_loss
def test_the_largest_squares_that_predictions_expect(case):
    """The trace of the Fisher matrix at equal probabilities, or of a constant one anywhere."""
    values = case.values()
    even = {**values, "z": np.zeros_like(values["z"])}
    total = sum(
        float((column**2).sum())
        for index, _ in inner_basis(case, values)
        for column in case.loss.one_hot(even, index).values()
    )
    # A Poisson rate has no bound: the present rates count.
    at = even if by_name(case) == "Poisson" else values
    assert case.loss.expected_squares(at) == pytest.approx(total, rel=1e-12)
    plain = losses.LossFunction.expected_squares(case.loss, even)
    assert plain == pytest.approx(total, rel=1e-12)

"""Losses under their names: towers, coefficients, sums over the batch, and what is refused."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError

EXACT = 1e-12  # float64 sums of a few dozen terms
N, D = 6, 3

# Register function, class, automatic name, and arguments that the class gets besides.
FUNCTIONS = {
    "categorical_predictive_distribution": (
        ke.CategoricalLogitsNegativeLogProbLoss, "categorical_predictive_distribution", {}),
    "softmax_cross_entropy_loss": (
        ke.CategoricalLogitsNegativeLogProbLoss, "sparse_softmax_cross_entropy_loss", {}),
    "normal_predictive_distribution": (
        ke.NormalMeanNegativeLogProbLoss, "normal_predictive_distribution", {"var": 0.5}),
    "squared_error_loss": (ke.NormalMeanNegativeLogProbLoss, "squared_error_loss", {"var": 0.5}),
    "multi_bernoulli_predictive_distribution": (
        ke.MultiBernoulliNegativeLogProbLoss, "multi_bernoulli_predictive_distribution", {}),
    "sigmoid_cross_entropy_loss": (
        ke.MultiBernoulliNegativeLogProbLoss, "sigmoid_cross_entropy_loss", {}),
}  # fmt: skip
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def register(lc, function, *arguments, **options):
    return getattr(lc, f"register_{function}")(*arguments, **options)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "z": rng.standard_normal((N, D)),
        "z2": rng.standard_normal((N, D)),
        "labels": rng.integers(0, D, N),
        "bits": rng.integers(0, 2, (N, D)),
        "numbers": rng.standard_normal((N, D)),
    }


TARGETS = {
    ke.CategoricalLogitsNegativeLogProbLoss: "labels",
    ke.NormalMeanNegativeLogProbLoss: "numbers",
    ke.MultiBernoulliNegativeLogProbLoss: "bits",
}


def written_out(cls, values, output="z"):
    """The loss, summed over the batch, example by example."""
    total = 0.0
    for i in range(N):
        z = values[output][i]
        if cls is ke.CategoricalLogitsNegativeLogProbLoss:
            total -= z[values["labels"][i]] - np.log(sum(np.exp(z)))
        elif cls is ke.NormalMeanNegativeLogProbLoss:
            error = values["numbers"][i] - z
            total += sum(error**2 + 0.5 * np.log(np.pi))
        else:
            total += sum(np.log1p(np.exp(z)) - values["bits"][i] * z)
    return total


# -- functions -------------------------------------------------------------------------------------


@every_function
def test_register_functions_use_own_loss_names(function):
    cls, name, more = FUNCTIONS[function]
    lc = ke.LayerCollection()
    assert register(lc, function, "z") == name
    assert register(lc, function, "z") == f"{name}_1"
    assert register(lc, function, "z") == f"{name}_2"
    for loss in lc.losses:
        assert type(loss) is cls
        assert loss.inputs == ("z",)
        for attribute, value in more.items():
            assert getattr(loss, attribute) == value


@every_function
def test_total_loss_is_sum_over_batch(function):
    cls, _, _ = FUNCTIONS[function]
    lc = ke.LayerCollection()
    register(lc, function, "z", targets=TARGETS[cls])
    values = batch()
    np.testing.assert_allclose(lc.total_loss()(values), written_out(cls, values), rtol=EXACT)


@every_function
def test_register_functions_accept_positional_arguments(function):
    cls, _, _ = FUNCTIONS[function]
    lc = ke.LayerCollection()
    more = [0.5] if function == "normal_predictive_distribution" else []
    assert register(lc, function, "z", *more, 7, TARGETS[cls], "mine") == "mine"
    (loss,) = lc.losses
    assert (loss.seed, loss.targets) == (7, TARGETS[cls])


def test_register_normal_accepts_variance():
    lc = ke.LayerCollection()
    lc.register_normal_predictive_distribution("z", var=2.0, targets="numbers")
    values = batch()
    error = values["numbers"] - values["z"]
    expected = (error**2 / 4 + 0.5 * np.log(4 * np.pi)).sum()
    np.testing.assert_allclose(lc.total_loss()(values), expected, rtol=EXACT)


# -- towers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, "VARIABLE_SCOPE"])
@every_function
def test_reuse_adds_tower_to_named_loss(function, reuse):
    lc = ke.LayerCollection()
    register(lc, function, "z", name="loss")
    register(lc, function, "z2", name="loss", reuse=reuse)
    assert [[loss.inputs[0] for loss in towers] for towers in lc.towers_by_loss] == [["z", "z2"]]
    assert lc.losses == lc.towers_by_loss[0]


def test_losses_are_listed_with_their_towers():
    lc = ke.LayerCollection()
    lc.register_squared_error_loss("a", name="first")
    lc.register_squared_error_loss("b", name="second")
    lc.register_squared_error_loss("c", name="first", reuse=True)
    assert [loss.inputs[0] for loss in lc.losses] == ["a", "c", "b"]
    assert [len(towers) for towers in lc.towers_by_loss] == [2, 1]
    assert [loss.name for loss in lc.registered_losses] == ["first", "first", "second"]


REFUSED = {
    "reuse of an unknown name": (UnknownNameError, {"name": "other", "reuse": True}),
    "a name again without reuse": (UnknownNameError, {"name": "loss", "reuse": False}),
    "reuse without a name": (RegistrationError, {"reuse": True}),
    "reuse with a seed": (RegistrationError, {"name": "loss", "reuse": True, "seed": 1}),
    "reuse with another coefficient": (
        RegistrationError, {"name": "loss", "reuse": True, "coeff": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@every_function
def test_invalid_tower_raises_error(function, case):
    error, options = REFUSED[case]
    lc = ke.LayerCollection()
    register(lc, function, "z", name="loss")
    with pytest.raises(error):
        register(lc, function, "z2", **options)
    assert len(lc.losses) == 1


# -- register_loss_function ------------------------------------------------------------------------


def test_loss_object_is_registered_with_colocation_op():
    lc = ke.LayerCollection()
    onehot = ke.OnehotCategoricalLogitsNegativeLogProbLoss("z")
    both = ke.NormalMeanVarianceNegativeLogProbLoss("mean", "variance")
    assert lc.register_loss_function(onehot, "z", "base") == "base"
    assert lc.register_loss_function(both, "mean", "base", name="mine") == "mine"
    assert lc.losses == (onehot, both)
    assert lc.loss_colocation_ops == {onehot: "z", both: "mean"}


def test_losses_are_colocated_with_inputs():
    lc = ke.LayerCollection()
    for function in FUNCTIONS:
        register(lc, function, f"input of {function}")
    beside = [lc.loss_colocation_ops[loss] for loss in lc.losses]
    assert beside == [f"input of {function}" for function in FUNCTIONS]


# -- values ----------------------------------------------------------------------------------------


def weighted():
    lc = ke.LayerCollection()
    lc.register_softmax_cross_entropy_loss("z", targets="labels", coeff=4.0)
    lc.register_squared_error_loss("z2", targets="numbers", coeff=9.0)
    return lc


@pytest.mark.parametrize(
    ("coeff_mode", "weights"), [("regular", (4, 9)), ("sqrt", (2, 3)), ("off", (1, 1))]
)
def test_coefficient_mode_determines_weights(coeff_mode, weights):
    values = batch()
    terms = (
        written_out(ke.CategoricalLogitsNegativeLogProbLoss, values),
        written_out(ke.NormalMeanNegativeLogProbLoss, values, "z2"),
    )
    expected = [k * term for k, term in zip(weights, terms, strict=True)]
    lc = weighted()
    found = [thunk(values) for thunk in lc.eval_losses(coeff_mode=coeff_mode)]
    np.testing.assert_allclose(found, expected, rtol=EXACT)
    np.testing.assert_allclose(lc.total_loss(coeff_mode)(values), sum(expected), rtol=EXACT)


def test_mean_sampled_loss_is_entropy():
    p = np.array([0.5, 0.3, 0.2])
    n = 20_000
    lc = ke.LayerCollection()
    lc.register_softmax_cross_entropy_loss("z", coeff=2.0, seed=5)
    (sampled,) = lc.eval_losses_on_samples()
    values = {"z": np.tile(np.log(p), (n, 1))}
    entropy = -(p * np.log(p)).sum()
    deviation = np.sqrt((p * np.log(p) ** 2).sum() - entropy**2)
    # A mean of n draws: five standard errors.
    np.testing.assert_allclose(sampled(values) / (2 * n), entropy, atol=5 * deviation / n**0.5)
    assert lc.total_sampled_loss()(values) == sampled(values)
    (same,) = lc.eval_losses("sample")
    assert same(values) == sampled(values)


def test_towers_draw_independent_samples():
    lc = ke.LayerCollection()
    for reuse in (False, True):
        lc.register_squared_error_loss("z", name="loss", reuse=reuse)
    first, second = (thunk(batch()) for thunk in lc.eval_losses_on_samples())
    assert first != second


def test_the_same_values_give_the_same_sample():
    lc = weighted()
    assert lc.total_sampled_loss()(batch()) == lc.total_sampled_loss()(batch())


def test_loss_without_targets_evaluates_only_on_samples():
    lc = ke.LayerCollection()
    lc.register_softmax_cross_entropy_loss("z")
    assert np.isfinite(lc.total_sampled_loss()(batch()))
    with pytest.raises(InputError, match="has no targets to evaluate"):
        lc.eval_losses()


@pytest.mark.parametrize(
    "options", [{"target_mode": "nonsense"}, {"coeff_mode": "nonsense"}], ids=str
)
def test_unknown_mode_raises_error(options):
    with pytest.raises(InputError, match="nonsense"):
        weighted().eval_losses(**options)


@pytest.mark.parametrize("method", ["total_loss", "total_sampled_loss"])
def test_total_loss_without_losses_raises_error(method):
    with pytest.raises(InputError, match="Must have at least one registered loss"):
        getattr(ke.LayerCollection(), method)()

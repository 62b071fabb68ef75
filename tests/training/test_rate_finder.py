"""``find_rate``: against the same steps in NumPy, on curves of known form, and its refusals."""

import sys

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.training.rate_finder import suggested_rate
from tests.training import norm_net
from tests.training import softmax_net as net

RATES = np.geomspace(1e-5, 10, 100)


# -- the steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["model", "engine"])
def test_losses_are_those_of_sgd_with_growing_rates(form):
    x, y = net.batch(n=50)
    source = net.model() if form == "model" else net.engine()
    result = ke.find_rate(
        source, (x, y), optimizer="sgd", batch_size=16, lowest=1e-3, highest=1.0, steps=30,
        seed=4, momentum=0.5,
    )  # fmt: skip
    rates, theta = np.geomspace(1e-3, 1.0, 30), net.weights()
    velocity = {name: np.zeros_like(value) for name, value in theta.items()}
    losses = []
    for step in range(31):
        order = np.random.default_rng([4, step // 3]).permutation(50)
        chosen = order[16 * (step % 3) : 16 * (step % 3) + 16]
        losses.append(net.loss(theta, x[chosen], y[chosen]))
        for name, gradient in net.gradients(theta, x[chosen], y[chosen]).items():
            velocity[name] = 0.5 * velocity[name] + gradient
            theta[name] = theta[name] - rates[min(step, 29)] * velocity[name]
    np.testing.assert_allclose(result.rates, rates, rtol=1e-12)
    # 30 steps in float64, whose sums are in another order.
    np.testing.assert_allclose(result.losses, losses[1:], rtol=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "kfac"])
def test_the_engine_does_not_change(optimizer, tmp_path):
    engine, (x, y) = norm_net.engine(), norm_net.batch()
    trained = ke.KfacOptimizer(engine)
    for _ in range(3):
        trained.step({"x": x}, y)
    trained.save(tmp_path / "before")
    ke.find_rate(engine, (x, y), optimizer=optimizer, batch_size=16, steps=20)
    trained.save(tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def test_the_search_begins_with_the_present_weights():
    x, y = net.batch(n=50)
    engine = net.engine()
    ke.fit(engine, (x, y), optimizer="adam", epochs=3, batch_size=16)
    theta = engine.parameters
    result = ke.find_rate(engine, (x, y), optimizer="sgd", batch_size=50, lowest=1e-12, steps=20)
    # A rate of 1e-12 does not change a loss in its first ten digits.
    assert result.losses[0] == pytest.approx(net.loss(theta, x, y), rel=1e-10)


def test_the_search_ends_when_the_loss_explodes():
    images, labels = digits()
    result = ke.find_rate(demo_model("mlp"), (images, labels), optimizer="kfac", highest=1e4)
    assert 20 < len(result.rates) < 100
    assert len(result.losses) == len(result.rates)
    assert result.losses[-1] > 4 * result.losses[0]
    assert (result.losses[:-5] < 10 * result.losses[0]).all()


# -- the suggestion --------------------------------------------------------------------------------


def curve(place, explosion=1.0):
    """A loss that falls from 2.3 by a logistic curve around a rate, and explodes at another."""
    fall = 2 / (1 + (RATES / place) ** -1.5)
    return 2.3 - fall + (RATES / explosion) ** 3


@pytest.mark.parametrize("place", [1e-3, 1e-2, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_the_suggestion_is_the_place_of_steepest_descent(place, seed):
    noise = 0.1 * np.random.default_rng(seed).standard_normal(100)
    # The Gaussian has a standard deviation of 3 rates, each 15 % above the one before.
    assert place / 2 < suggested_rate(RATES, curve(place) + noise) < 2 * place
    assert suggested_rate(RATES, curve(place)) == pytest.approx(place, rel=0.16)


@pytest.mark.parametrize("seed", range(5))
def test_losses_that_do_not_fall_have_no_suggestion(seed):
    noise = 0.1 * np.random.default_rng(seed).standard_normal(100)
    assert suggested_rate(RATES, 2.3 + noise) is None
    assert suggested_rate(RATES, 2.3 + (RATES / 0.1) ** 2 + noise) is None
    assert suggested_rate(RATES[:5], curve(1e-3)[:5]) is None


def test_rates_that_are_too_small_have_no_suggestion():
    data = digits()
    result = ke.find_rate(demo_model("mlp"), data, lowest=1e-9, highest=1e-7)
    assert result.suggestion is None
    assert len(result.rates) == 100


# -- pictures and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture_has_the_format_of_its_name(ending, tmp_path):
    result = ke.RateSearch(RATES, curve(1e-2), 1e-2)
    path = tmp_path / f"rates.{ending}"
    result.plot(path)
    signatures = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(signatures[ending])


def test_a_picture_of_another_format_is_refused(tmp_path):
    with pytest.raises(ke.InputError, match=r"must end in \.png, \.svg, \.pdf"):
        ke.RateSearch(RATES, curve(1e-2), None).plot(tmp_path / "rates.txt")


def test_a_missing_matplotlib_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ke.BackendError, match=r"pip install 'kfac-engine\[plot\]'"):
        ke.RateSearch(RATES, curve(1e-2), None).plot(tmp_path / "rates.png")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowest": 0}, "lowest must be a positive number"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest must be below highest, got 1 and 1"),
        ({"steps": 19}, "steps must be a whole number of at least 20"),
        ({"optimizer": ke.Adam}, "optimizer must be one of kfac, adam"),
        ({"learning_rate": 0.1}, "find_rate varies learning_rate"),
        ({"betas": (1.0, 0.9)}, "each of betas must lie"),
        ({"data": []}, "an epoch of the data has no batch"),
    ],
)
def test_a_wrong_argument_is_refused(changes, message):
    arguments = {"data": net.batch(), "steps": 20, **changes}
    with pytest.raises(ke.InputError, match=message):
        ke.find_rate(net.engine(), **arguments)


@pytest.mark.parametrize("name", ["nesterov", "damping"])
def test_an_unknown_option_is_refused(name):
    with pytest.raises(ke.UnknownNameError, match=f"find_rate has no option '{name}'"):
        ke.find_rate(net.engine(), net.batch(), steps=20, **{name: 1})


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ke.UnknownNameError, match="choose one of"):
        ke.find_rate(net.engine(), net.batch(), optimizer="lbfgs")


def test_a_first_batch_with_nan_is_an_error():
    x, y = net.batch()
    x[0] = np.nan
    with pytest.raises(ke.NonFiniteError):
        ke.find_rate(net.engine(), (x, y))

"""The estimate of a refresh: the operations that it counts and measures, and their scale."""

import pytest

import kfac_engine as ke
from kfac_engine.engine import time_estimates
from kfac_engine.engine.time_estimates import estimate_refresh
from tests.models import Net

RATE = 1e9


@pytest.fixture
def measured(monkeypatch):
    """Replace the clock by a rate of one operation in a nanosecond; return the measured sides."""
    calls = {}

    def measure(backend, operation, sides):
        calls[operation] = list(sides)
        return sum(side**3 for side in sides) / RATE

    monkeypatch.setattr(time_estimates, "_measure", measure)
    return calls


def chain(*sides, twice=False):
    net, x = Net(), "input"
    for i, d_out in enumerate(sides[1:]):
        x = net.op("MatMul", x, net.weight(f"w{i}", sides[i], d_out, spread=0.01), to=f"s{i}")
    outputs = {x: ["n", sides[-1]]}
    if twice:  # a second layer of the same input
        net.op("MatMul", "input", net.weight("v", sides[0], sides[-1], spread=0.01), to="t")
        x = net.op("Add", x, "t", to="sum")
        outputs = {x: ["n", sides[-1]]}
    return net.model({"input": ["n", sides[0]]}, outputs)


def estimate(model, **options):
    return estimate_refresh(ke.Engine.from_onnx(model, loss="categorical", **options))


def test_small_factors_are_all_measured(measured):
    result = estimate(chain(7, 5, 3))
    assert result.flops == 7**3 + 5**3 + 5**3 + 3**3
    assert result.seconds == pytest.approx(result.flops / RATE)
    assert measured == {time_estimates._INVERSE: [7, 5, 5, 3]}


def test_large_factors_are_cut_and_scaled(measured):
    result = estimate(chain(2000, 1500, 2), approximations={"fully_connected": "kron"})
    assert result.flops == 2000**3 + 2 * 1500**3 + 2**3
    assert result.seconds == pytest.approx(result.flops / RATE)
    assert measured == {time_estimates._INVERSE: [768]}


def test_a_shared_factor_counts_once(measured):
    alone, shared = (estimate(chain(7, 5, 3, twice=twice)).flops for twice in (False, True))
    # The second layer shares the input; its output gradients have a factor of their own.
    assert shared - alone == 3**3


def test_layers_in_an_eigenbasis_are_decomposed(measured):
    estimate(chain(7, 5, 3), approximations={"fully_connected": "ekfac"})
    assert measured == {time_estimates._EIGH: [7, 5, 5, 3]}


def test_diagonal_blocks_have_no_refresh(measured):
    result = estimate(chain(7, 5, 3), approximations={"fully_connected": "diagonal"})
    assert (result.flops, result.seconds, measured) == (0, 0, {})


@pytest.mark.parametrize("name", ["kron", "ekfac"])
def test_the_measured_time_is_positive(name):
    assert estimate(chain(40, 30, 3), approximations={"fully_connected": name}).seconds > 0

"""The advice names the faster distribution on each machine, and the reason."""

import pytest

from kfac_engine.ranks.machines import H200, SLOW
from kfac_engine.ranks.report import ranks_report
from kfac_engine.ranks.sizes import BlockSize, FactorSize, ModelSize, Periods
from tests.ranks.known_models import model_size


def test_one_rank_has_nothing_to_choose():
    assert "nothing to divide" in ranks_report(model_size("ResNet-50"), 1).advice


@pytest.mark.parametrize("ranks", [8, 64, 4096])
def test_shard_is_advised_where_each_rank_has_about_as_many_parameters(ranks):
    for name in ("ResNet-50", "GPT-2 small", "ViT-B/16"):
        advice = ranks_report(model_size(name), ranks).advice
        assert advice.startswith('choose "shard": a step is predicted to take ')
        assert "replicate" not in advice.partition("less time than")[0]


def test_replicate_is_advised_on_a_slow_network_if_one_rank_owns_a_large_table():
    model = model_size("GPT-2 small", divisible=False)
    report = ranks_report(model, 64)
    shard, replicate = report.advice.split("; ")
    assert shard.startswith('choose "shard" on H200 at 400 Gb/s')
    assert replicate.startswith('choose "replicate" on H200 at 25 Gb/s: ')
    # the table of 50257 × 768 has the name of the last layer
    assert replicate.endswith("one rank owns 31 % of the parameters, among them layer 48.")
    assert 'choose "shard":' in ranks_report(model, 64, machines=[H200]).advice
    slow = ranks_report(model, 64, machines=[SLOW]).advice
    assert slow.startswith('choose "replicate": a step is predicted to take ')
    times = report.steps[SLOW.name]
    gain = 100 * (1 - times["replicate"].total / times["shard"].total)
    assert f"take {gain:.0f} % less time" in slow


def test_the_default_is_advised_if_predictions_are_equal():
    # No factor has an inverse: nothing is divided but a diagonal.
    model = ModelSize({"one": BlockSize(4, ("F",))}, {"F": FactorSize((4,))})
    advice = ranks_report(model, 8, Periods(covariance_every=10**9)).advice
    assert advice.startswith('choose "replicate", the default')


def test_report_has_a_prediction_for_each_machine_and_distribution():
    report = ranks_report(model_size("ResNet-50"), 16, machines=[H200])
    assert report.steps.keys() == {H200.name}
    assert report.steps[H200.name].keys() == report.costs.keys() == {"sgd", "replicate", "shard"}

"""The suite ``build``: its networks are those they are named after, its chains grow."""

import numpy as np
import pytest
from rich.console import Console

from kfac_engine.bench import build
from kfac_engine.bench.networks import NETWORKS
from kfac_engine.graph.analysis.trainable import trainable_parameters
from kfac_engine.graph.load import load_graph
from tests import models
from tests.nightly import nightly_but

# As published: torchvision's ResNet-50 (25,557,032), and BERT-base without token types (two rows
# of 768 of the 109,483,778 of a classifier with two classes).
PARAMETERS = {"ResNet-50": 25_557_032, "BERT-base": 109_483_778 - 2 * 768}


@pytest.mark.parametrize("network", nightly_but(["ResNet-50"], NETWORKS))
def test_network_has_the_parameters_it_is_known_for(network):
    graph = load_graph(NETWORKS[network]())
    sizes = [graph.constants[name].size for name in trainable_parameters(graph)]
    assert sum(sizes) == PARAMETERS[network]


@pytest.mark.parametrize("power", [1, 2])
def test_exponents_of_builds_stand_beside_the_expected_ones(power, monkeypatch, capsys):
    sizes = 100, 1_000
    builds = {n: {"times": [n**power / 1e3], "peak_bytes": 5_000 * n} for n in sizes}
    monkeypatch.setattr(build, "answer_of", lambda *words, **_: builds[words[-1]])
    points = build.run_nodes(Console(width=160), "build", sizes)
    assert [point.size for point in points] == [100, 1_000]
    assert [point.exponent for point in points] == pytest.approx([power] * 2)
    assert [point.memory_exponent for point in points] == pytest.approx([1, 1])
    line = capsys.readouterr().out.splitlines()[-2].split()
    # 1000 nodes in 1 s are 1000 µs each, in 1000 s a million.
    assert line[:4] == ["1000", f"{10 ** (3 * power - 3)}.00", f"{10 ** (3 * power)}", "5"]
    assert ("!" in line) == (power == 2)


def test_stages_are_timed_for_every_round(monkeypatch):
    clock = iter(np.cumsum([0, 1, 2, 4, 5, 3, 9, 3, 6, 8, 8, 9]).astype(float))
    monkeypatch.setattr("kfac_engine.bench.build.perf_counter", lambda: next(clock))
    data = models.mlp().SerializeToString()
    rows = build.measure_build("mlp", lambda: data, rounds=2)
    assert [row.network for row in rows] == ["mlp"] * 4
    # Rounds take 1, 2, 4, 5 − 3 and 3, 6, 8, 8 − 9 (never less than nothing).
    assert [row.seconds.median for row in rows] == [2, 4, 6, 1]

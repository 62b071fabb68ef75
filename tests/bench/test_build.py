"""The networks of the suite ``build`` are those they are named after."""

import numpy as np
import pytest

from kfac_engine.bench.build import measure_build
from kfac_engine.bench.networks import NETWORKS
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.trainable import trainable_parameters
from tests import models

# As published: torchvision's ResNet-50 (25,557,032), and BERT-base without token types (two rows
# of 768 of the 109,483,778 of a classifier with two classes).
PARAMETERS = {"ResNet-50": 25_557_032, "BERT-base": 109_483_778 - 2 * 768}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_network_has_the_parameters_it_is_known_for(network: str) -> None:
    graph = load_graph(NETWORKS[network]())
    sizes = [graph.constants[name].size for name in trainable_parameters(graph)]
    assert sum(sizes) == PARAMETERS[network]


def test_stages_are_timed_for_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.cumsum([0, 1, 2, 4, 5, 3, 9, 3, 6, 8, 8, 9]).astype(float))
    monkeypatch.setattr("kfac_engine.bench.build.perf_counter", lambda: next(clock))
    data = models.mlp().SerializeToString()
    rows = measure_build("mlp", lambda: data, rounds=2)
    assert [row.network for row in rows] == ["mlp"] * 4
    # Rounds take 1, 2, 4, 5 − 3 and 3, 6, 8, 8 − 9 (never less than nothing).
    assert [row.seconds.median for row in rows] == [2, 4, 6, 1]

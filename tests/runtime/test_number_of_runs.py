"""How often a model runs before the first step: each sample run of a large model takes seconds."""

import pytest

import kfac_engine as ke
from kfac_engine.runtime.sample_run import Chain
from tests import models


def pair(first, second):
    """Two inputs, whose axes of examples have the symbols ``first`` and ``second``."""
    net = models.Net()
    left, right = (net.dense(f"of_{name}", name, 3, 4) for name in ("left", "right"))
    net.dense("output", net.op("Tanh", net.op("Add", left, right, to="sum"), to="act"), 4, 5)
    return net.model({"left": [first, 3], "right": [second, 3]}, {"output": [first, 5]})


def dropping(training):
    """A network with a Dropout, for which its lowering writes a Dropout again."""
    return models.written(
        "n,3 -> n,2",
        "w(3,8) v(8,2) ratio:0.25",
        f"training = Constant <value = bool {{{int(training)}}}> ()  s = MatMul (input, w)  "
        "kept = Dropout (s, ratio, training)  output = MatMul (kept, v)",
    )


# A run measures sizes, one tries another batch, and one reads the outputs for probabilities, which
# comparisons of changed examples read, too: two more runs where the file does not say that its
# axes are the batch. With two symbols, four runs try each axis alone, and fail.
RUNS = {
    "one_symbol": (lambda: pair("n", "n"), "categorical", 3),
    "no_probabilities": (lambda: pair("n", "n"), "normal", 2),
    "images": (models.cnn, "categorical", 3),
    "declared_size": (lambda: pair(2, 2), "categorical", 5),
    "dropout": (lambda: dropping(False), "normal", 3),
    "dropout_in_training": (lambda: dropping(True), "normal", 3),
    "two_symbols": (lambda: pair("n", "m"), "categorical", 9),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_model_runs_few_times_before_its_first_step(name, monkeypatch):
    make, loss, most = RUNS[name]
    runs, run = [], Chain.run
    monkeypatch.setattr(Chain, "run", lambda self, feeds: runs.append(feeds) or run(self, feeds))
    engine = ke.Engine.from_onnx(make(), loss=loss)
    assert 1 <= len(runs) <= most
    assert bool(engine.losses[0].coupling) == (name == "dropout_in_training")

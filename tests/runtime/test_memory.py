"""Sizes that follow from shapes alone, against those of a run on a batch of the size."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.runtime import memory
from kfac_engine.runtime.memory import value_bytes, with_examples
from kfac_engine.runtime.sample_run import SampleRun, measured_facts, open_run, sample_batch
from tests import models

NAMES = sorted(models.MODELS)
# Values that follow from constants are small, and are not counted.
SMALL = 4096


def measured(model, backward, feeds):
    known = open_run(model.graph, model.facts).facts(feeds)
    cotangents = {
        cotangent: np.zeros(known[name].shape, known[name].dtype)
        for name, cotangent in backward.cotangents.items()
    }
    facts = measured_facts(memory._joint(model, backward), {**feeds, **cotangents})
    return {name: value_bytes(fact) for name, fact in facts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_a_batch_are_those_of_a_run(name):
    output = "mean" if name == "two_outputs" else None
    engine = ke.Engine.from_onnx(models.MODELS[name](), loss="normal", output=output, threads=1)
    model, batch = engine._model, engine._task.batch
    feeds = sample_batch(model.graph, model.facts, None)
    size = batch.size if batch.fixed else 7
    feeds = feeds if batch.fixed else with_examples(feeds, batch, size)
    for backward in model.backwards():
        found = memory._sizes_at(model, backward, batch, size)
        truth = measured(model, backward, feeds)
        wrong = {n: (found.get(n), b) for n, b in truth.items() if found.get(n, b) != b}
        assert not wrong
        assert all(truth[value] <= SMALL for value in truth.keys() - found.keys())


def test_memory_of_any_batch_is_computed_without_a_run(monkeypatch):
    engine = ke.Engine.from_onnx(models.cnn(), loss="categorical", threads=1)
    monkeypatch.setattr(SampleRun, "facts", lambda *_: pytest.fail("the model has run"))
    few, many = (engine.memory(count).activations for count in (10, 10_000_000))
    assert many == pytest.approx(1e6 * few, rel=0.5)

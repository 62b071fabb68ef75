"""The memory guard stands in front of every entrance: a batch that does not fit is not begun."""

import re

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.graph import load
from kfac_engine.runtime import sample_run
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.system import memory_limits
from tests import models
from tests.training import softmax_net as net

N = 2000
X, Y = net.batch(n=N)
LOSS = {"loss": "categorical"}


def engine():
    return net.engine(threads=1)


@pytest.fixture(scope="module")
def curvature():
    return ke.curvature(net.model(), (X[:8], Y[:8]), **LOSS)


BATCH = {"x": X}, Y
ENTRANCES = {
    "Engine.step": lambda _: engine().step(*BATCH),
    "Engine.observe": lambda _: engine().observe(*BATCH),
    "Engine.gradients": lambda _: engine().gradients(*BATCH),
    "precondition": lambda _: ke.precondition(net.model(), *BATCH, **LOSS),
    "KfacOptimizer": lambda _: ke.KfacOptimizer(engine()).step(*BATCH),
    "Adam": lambda _: ke.Adam(engine()).step(*BATCH),
    "AdamW": lambda _: ke.AdamW(engine()).step(*BATCH),
    "Muon": lambda _: ke.Muon(engine()).step(*BATCH),
    "GaussNewton": lambda _: ke.GaussNewton(engine()).step(*BATCH),
    "SGD": lambda _: ke.SGD(engine(), 0.1).step(*BATCH),
    "fit": lambda _: ke.fit(net.model(), (X, Y), steps=1, batch_size=N),
    "curvature": lambda _: ke.curvature(net.model(), (X, Y), **LOSS),
    "curvature of structure full": lambda _: ke.curvature(
        net.model(), (X, Y), structure="full", **LOSS
    ),
    "curvature_operator": lambda _: (
        ke.curvature_operator(net.model(), (X, Y), **LOSS) @ np.ones(39)
    ),
    "Laplace.predict": lambda curvature: ke.Laplace(curvature).predict(X),
    "Laplace.fit_prior": lambda curvature: ke.Laplace(curvature).fit_prior(validation=(X, Y)),
    "Influence.scores": lambda curvature: ke.Influence(curvature).scores((X, Y), (X[:8], Y[:8])),
    "Influence.self_scores": lambda curvature: ke.Influence(curvature).self_scores((X, Y)),
    "example_gradients": lambda curvature: next(curvature.example_gradients(*BATCH)),
}
FITS = r"at most (\d+) examples|structure='kron'"


def test_the_parts_that_a_message_names_fit(monkeypatch):
    one, many = (engine().memory(n).on_host for n in (1, N))
    monkeypatch.setattr(memory_limits, "available_memory", lambda: (one + many) // 2)
    with pytest.raises(ke.MemoryLimitError) as error:
        engine().step(*BATCH)
    named = re.search(r"at most (\d+) examples, or accumulate=(\d+) parts", str(error.value))
    assert named
    examples, count = map(int, named.groups())
    assert engine().memory(examples).on_host <= (one + many) // 2
    engine().step({"x": X[:examples]}, Y[:examples])
    size = -(-N // count)
    assert engine().memory(size, count).on_host <= (one + many) // 2
    engine().step([({"x": X[i : i + size]}, Y[i : i + size]) for i in range(0, N, size)])


@pytest.mark.parametrize("by_step", [True, False])
def test_a_message_names_what_to_freeze_where_one_example_does_not_fit(by_step, monkeypatch):
    made = engine()
    monkeypatch.setattr(memory_limits, "available_memory", lambda: 1000)
    monkeypatch.setattr(OnnxModel, "run", lambda *_, **__: pytest.fail("the model has run"))
    largest = max(made.parameters, key=lambda name: made.parameters[name].nbytes)
    with pytest.raises(ke.MemoryLimitError) as error:
        (made.step if by_step else made.gradients)(*BATCH)
    number = (2 if by_step else 1) * made.parameters[largest].nbytes
    saved = f"freeze='{largest}' saves {memory_limits.spelled(number)} of gradients"
    assert saved in str(error.value)
    assert ("approximation 'diagonal'" in str(error.value)) == by_step


SOURCES = {
    "path": lambda path: path,
    "bytes": lambda path: path.read_bytes(),
    "message": lambda path: onnx.load(path),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(source, monkeypatch, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(net.model().SerializeToString())
    size, model = path.stat().st_size, source(path)
    monkeypatch.setattr(memory_limits, "available_memory", lambda: 2 * size - 1)
    with monkeypatch.context() as reading:
        reading.setattr(load, "read_model", lambda _: pytest.fail("the model is read"))
        with pytest.raises(ke.MemoryLimitError, match=r"reading .* needs .* are free; .*external"):
            ke.Engine.from_onnx(model, **LOSS)
    monkeypatch.setattr(memory_limits, "available_memory", lambda: 2 * size)
    assert ke.Engine.from_onnx(model, **LOSS, threads=1).parameters


def test_gradients_that_do_not_fit_are_refused_before_the_model_runs(monkeypatch, tmp_path):
    """Weights in another file are not read before they are used."""
    path, model = tmp_path / "wide.onnx", models.mlp((512, 512, 10))
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    parameters = sum(np.prod(entry.dims) * 4 for entry in model.graph.initializer)
    monkeypatch.setattr(memory_limits, "available_memory", lambda: parameters - 1)
    with monkeypatch.context() as running:
        running.setattr(sample_run.SampleRun, "facts", lambda *_: pytest.fail("the model has run"))
        with pytest.raises(ke.MemoryLimitError) as error:
            ke.Engine.from_onnx(path, **LOSS)
    largest = "fc0.weight"
    assert f"freeze='{largest}' saves {memory_limits.spelled(512 * 512 * 4)}" in str(error.value)
    assert largest not in ke.Engine.from_onnx(path, **LOSS, freeze=[largest]).parameters


@pytest.mark.parametrize("name", ENTRANCES)
def test_a_batch_that_does_not_fit_is_refused_before_it_runs(name, curvature, monkeypatch):
    """One example fits and 2,000 do not."""
    curvature.layout.assembly.checked.clear()
    one, many = (engine().memory(n).on_host for n in (1, N))
    monkeypatch.setattr(memory_limits, "available_memory", lambda: (one + many) // 2)
    monkeypatch.setattr(OnnxModel, "run", lambda *_, **__: pytest.fail("the model has run"))
    with pytest.raises(ke.MemoryLimitError, match=r"needs .* are free; ") as error:
        ENTRANCES[name](curvature)
    found = re.search(FITS, str(error.value))
    assert found
    assert found[1] is None or 0 < int(found[1]) < N

"""Steps in parts of a batch."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_close
from tests.models import Net
from tests.nightly import nightly_but
from tests.training_files.nets import data, network


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize(
    "net", nightly_but(["conv2d"], ["conv2d", "attention", "embedding", "gru"])
)
def test_parts_of_a_batch_give_the_step_of_the_batch(optimizer, net, tmp_path):
    model = network(net)
    whole, parts = (
        ke.export_training(model, optimizer=optimizer, path=tmp_path / str(n), accumulate=n)
        for n in (1, 3)
    )
    batches = [data(model, seed, n) for seed, n in enumerate((12, 7, 3, 2, 1, 12))]
    first, second = (files.run(batches, steps=6) for files in (whole, parts))
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-4)
    assert_arrays_close(second.state, first.state, rtol=1e-3, atol=1e-5)
    inputs, targets = batches[1]
    states = first.state, second.state
    a, b = (f.step(s, inputs, targets) for f, s in zip((whole, parts), states, strict=True))
    np.testing.assert_allclose(a["accuracy"], b["accuracy"], atol=1e-6)


def test_parts_with_statistics_of_the_whole_batch(tmp_path):
    model = network("conv2d")
    options = [{}, {"accumulate": 2, "statistics_part": 1.0}]
    one, many = (
        ke.export_training(model, path=tmp_path / str(i), **{"statistics_part": 1.0, **chosen})
        for i, chosen in enumerate(options)
    )
    batches = [data(model, seed) for seed in range(6)]
    first, second = (files.run(batches, steps=6) for files in (one, many))
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-4)


@pytest.mark.parametrize(("parts", "n"), [(2, 12), (3, 7), (4, 9), (4, 3)])
def test_running_statistics_after_parts_are_those_of_the_optimizer(parts, n, tmp_path):
    """They move once in a step: the variance is that of all examples, not of one of the parts."""
    model = network("batch normalization")
    folder = tmp_path / "files"
    files = ke.export_training(model, optimizer="adamw", path=folder, accumulate=parts)
    inputs, targets = data(model, n=n)
    x = inputs["input"] + np.linspace(0, 9, n, dtype="float32").reshape(-1, 1, 1, 1)  # unlike parts
    result = files.run([({"input": x}, targets)] * 2, steps=2)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    optimizer = ke.AdamW(engine)
    places = np.arange(min(parts, n) + 1) * n // min(parts, n)
    batch = [({"input": x[a:b]}, targets[a:b]) for a, b in pairwise(places)]
    losses = [optimizer.step(batch).loss for _ in range(2)]
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert list(engine.buffers) == ["bn.mean", "bn.var"]
    assert_arrays_close(result.state, engine.buffers, rtol=1e-5, atol=1e-6)


def test_a_model_of_one_batch_size_is_not_divided(tmp_path):
    net = Net()
    net.dense("fc", "input", 5, 6)
    net.op("Reshape", "fc", net.constant("shape", np.array([4, 2, 3])), to="split")
    net.op("ReduceMean", "split", net.constant("axis", np.array([1])), to="output", keepdims=0)
    model = net.model({"input": [4, 5]}, {"output": [4, 3]})
    with pytest.raises(ke.UnsupportedError, match="accumulate"):
        ke.export_training(model, path=tmp_path / "files", accumulate=2)
    files = ke.export_training(model, path=tmp_path / "files")
    run = files.run([data(model, seed, 4) for seed in range(4)], steps=8, batch_size=4)
    assert run.losses[-1] < run.losses[0]

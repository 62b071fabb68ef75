"""Engines of several ranks with arrays of CuPy equal one process, on a stand-in and on a device."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.backend import cupy_standin
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.test_distributions import CUTS, DISTRIBUTIONS, batches
from tests.distributed.threads import rows_of, run

Arrays = dict[str, np.ndarray]
SIZE = 3
# Float32 statistics summed in another order, through an inverse of condition 10.
TOLERANCE = 1e-4
OPTIONS = {"loss": "categorical", "damping": 0.1, "schedule": ke.Schedule(refresh_every=2)}
CASES = {
    "dense layers": ("mlp", {}),
    "convolutions": ("cnn", {}),
    "eigenvectors": ("mlp", {"approximations": {"fully_connected": "ekfac"}}),
    "squares": ("mlp", {"approximations": {"fully_connected": "diagonal"}}),
}


@pytest.fixture(params=cupy_standin.KINDS)
def cupy(request, monkeypatch):
    cupy_standin.begin(request.param, monkeypatch)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_steps_and_saved_states_equal_those_of_one_process(cupy, case, distribution, tmp_path):
    name, chosen = CASES[case]
    options, data = {**OPTIONS, **chosen}, list(batches(name, 3))
    model, path = models.MODELS[name](), tmp_path / "state.safetensors"
    data = [({n: a.astype(np.float32) for n, a in inputs.items()}, t) for inputs, t in data]
    alone = ke.Engine.from_onnx(model, backend="numpy", **options)
    expected = [alone.step(*batch) for batch in data]

    def work(communicator):
        rows = rows_of(communicator, CUTS)
        shards = [({n: a[rows] for n, a in inputs.items()}, t[rows]) for inputs, t in data]
        ranks = {"communicator": communicator, "distribution": distribution, "backend": "cupy"}
        engine = ke.Engine.from_onnx(model, **ranks, **options)
        results = [engine.step(*shard) for shard in shards[:2]]
        engine.save(path)
        resumed = ke.Engine.from_onnx(model, **ranks, **options)
        resumed.load(path)
        results.append(resumed.step(*shards[2]))
        resumed.synchronize()
        averages = {str(i): factor.cov.get() for i, factor in enumerate(resumed.estimator.factors)}
        steps = [(r.loss, {n: a.get() for n, a in r.natural_gradients.items()}) for r in results]
        return steps, averages

    factors = {str(i): factor.cov for i, factor in enumerate(alone.estimator.factors)}
    ranks = run(SIZE, work)
    for results, averages in ranks:
        assert_arrays_near(averages, factors, TOLERANCE)
        for (loss, natural), wanted, (_, first) in zip(results, expected, ranks[0][0], strict=True):
            assert loss == pytest.approx(wanted.loss, rel=TOLERANCE)
            assert_arrays_near(natural, wanted.natural_gradients, TOLERANCE)
            assert_arrays_equal(natural, first)

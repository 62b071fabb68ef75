"""An engine on the GPU gives what an engine on the CPU gives, on a stand-in and on a device."""

from collections.abc import Iterator

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend import cupy_device, select
from kfac_engine.errors import BackendError
from tests import models
from tests.backend import cupy_standin
from tests.cuda_on_cpu.module import compiler
from tests.test_engine import LOSSES, random_targets

# Float32 statistics summed in another order, through an inverse of condition 1e3.
TOLERANCE = 1e-3
STEPS = 3


@pytest.fixture(params=["stand-in", pytest.param("device", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    caches = select._gpu, cupy_device._cupy
    for cache in caches:
        cache.cache_clear()
    if request.param == "stand-in":
        if compiler() is None:
            pytest.skip("needs g++ to run kernels on the CPU")
        cupy_standin.install(monkeypatch)
    try:
        select.select("cupy")
    except BackendError as failure:
        pytest.skip(str(failure))
    yield request.param
    for cache in caches:
        cache.cache_clear()


def trained(name: str, backend: str, **options: object) -> list[ke.Result]:
    model, loss = models.MODELS[name](), LOSSES[name]
    engine = ke.Engine.from_onnx(model, loss=loss, damping=1e-2, backend=backend, **options)
    results = []
    for seed in range(STEPS):
        inputs = models.random_inputs(model, batch=6, seed=seed)
        targets = random_targets(model, inputs, loss, seed)
        result = engine.step(inputs, targets)
        results.append(result)
        natural = {n: host(v) for n, v in result.natural_gradients.items()}
        engine.set_parameters(
            {n: value - 0.01 * natural[n] for n, value in engine.parameters.items()}
        )
    return results


def host(array: object) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


@pytest.mark.parametrize("name", LOSSES)
def test_three_steps_are_those_of_the_cpu(gpu: str, name: str) -> None:
    for found, wanted in zip(trained(name, "cupy"), trained(name, "numpy"), strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
        for parameter, natural in wanted.natural_gradients.items():
            np.testing.assert_allclose(
                host(found.natural_gradients[parameter]),
                natural,
                rtol=0,
                atol=TOLERANCE * np.abs(natural).max(),
                err_msg=parameter,
            )


def test_factors_and_scratch_are_announced_and_taken_of_the_gpu(gpu: str) -> None:
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="cupy")
    memory = engine.memory(4)
    assert memory.device == memory.factors + memory.scratch > 0
    assert ke.Engine.from_onnx(model, loss="categorical", backend="numpy").memory(4).device == 0
    if gpu == "stand-in":
        cupy_standin.memory.limit = memory.factors - 1
        with pytest.raises(ke.MemoryLimitError, match=r"0\.00 GB and scratch 0\.54 GB on the GPU"):
            engine.observe(models.random_inputs(model, batch=4))
        assert engine.counter == 0

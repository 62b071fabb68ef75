"""The GPU suite measures what it says, on a stand-in for a GPU; without one it refuses."""

import numpy as np
import pytest
from rich.console import Console

from kfac_engine.backend import cupy_device, select
from kfac_engine.bench import gpu
from kfac_engine.bench.resnet50 import Layer, resnet50
from kfac_engine.errors import BackendError
from tests.backend import cupy_standin
from tests.cuda_on_cpu.module import compiler

RATES = gpu.GpuRates(products=1e9, copied_bytes=1e9)


@pytest.fixture(autouse=True)
def forgotten():
    caches = select._gpu, cupy_device._cupy
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_network_has_the_parameters_it_is_known_for() -> None:
    weights = sum(layer.d_in * layer.outputs for layer in resnet50())
    scales = 2 * sum(layer.outputs for layer in resnet50()[:-1])
    assert (len(resnet50()), weights + scales) == (54, 25_557_032)


def test_the_work_of_a_whole_network_is_that_of_its_definition() -> None:
    """652 GFLOP for the input factors in full; by distances of taps 353, both triangles."""
    rows = [32 * layer.out_side**2 for layer in resnet50()]
    full = sum(r * layer.d_in**2 for r, layer in zip(rows, resnet50(), strict=True))
    assert full / 1e9 == pytest.approx(652.5, abs=0.01)
    assert sum(gpu._input_products(layer, 32) for layer in resnet50()) / 1e9 < full / 1e9 / 2


def test_each_case_is_measured_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("needs g++ to run kernels on the CPU")
    cupy_standin.install(monkeypatch)
    monkeypatch.setattr(gpu, "_ROUNDS", 2)
    monkeypatch.setattr(gpu, "Layer", lambda *sides: Layer(*sides[:-1], 4))
    layers = Layer(2, 3, 3, 1, 4), Layer(3, 4, 1, 1, 4), Layer(4, 3, 1, 1, 1, True)
    rows = gpu.measure_gpu(layers, 2, RATES)
    assert len(rows) == 3 * 2 + 3 + 2
    checked = [row.error for row in rows if not np.isnan(row.error)]
    assert len(checked) == 4
    assert max(checked) < 1e-2
    rates = gpu.measure_rates(select.select("cupy"), 8)
    assert rates.floor(rates.products, 0) == 1


def test_without_a_gpu_the_suite_says_so() -> None:
    with pytest.raises(BackendError, match="backend 'numpy'"):
        gpu.run_gpu(Console(), "gpu")

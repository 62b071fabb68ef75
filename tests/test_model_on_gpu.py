"""A model that runs on the GPU gives what it gives on the CPU, and nothing comes back to the host.

On a CPU the stand-in for CuPy says where arrays lie, and ONNX Runtime's provider for the CPU works
on them by address: sessions, bindings and DLPack are those that a device has.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.autodiff import placement
from kfac_engine.autodiff.device_session import has_provider
from kfac_engine.backend import cupy_device, select
from kfac_engine.backend.cupy_place import CupyPlace
from kfac_engine.backend.place import HOST
from kfac_engine.errors import BackendError
from tests import models
from tests.backend import cupy_standin
from tests.cuda_on_cpu.module import compiler
from tests.test_engine import LOSSES
from tests.test_engine_on_gpu import TOLERANCE, chain, host, trained

CACHES = (
    select._gpu, select._gpu_place, cupy_device._cupy, placement._obstacle, placement._say,
)  # fmt: skip


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture(params=["stand-in", pytest.param("device", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    forget()
    if request.param == "stand-in":
        if compiler() is None:
            pytest.skip("needs g++ to run kernels on the CPU")
        cupy_standin.install(monkeypatch)
        monkeypatch.setattr(CupyPlace, "kind", "cpu")
    elif not has_provider("cuda"):
        pytest.skip("needs onnxruntime-gpu")
    try:
        select.select("cupy")
    except BackendError as failure:
        pytest.skip(str(failure))
    yield request.param
    forget()


def same(found: object, wanted: np.ndarray, name: str) -> None:
    atol = TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(host(found), wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_three_steps_are_those_of_the_cpu(gpu: str, name: str) -> None:
    for found, wanted in zip(trained(name, "cupy"), trained(name, "numpy"), strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
        for parameter, natural in wanted.natural_gradients.items():
            same(found.gradients[parameter], wanted.gradients[parameter], parameter)
            same(found.natural_gradients[parameter], natural, parameter)

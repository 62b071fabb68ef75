"""Names choose backends; what cannot be had is an error, what was chosen is said."""

import logging
import sys

import pytest

from kfac_engine.backend import select
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.select import choice_reason
from kfac_engine.errors import BackendError, UnknownNameError
from tests.backend import cupy_standin


@pytest.fixture
def no_gpu(monkeypatch):
    cupy_standin.forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def gpu(monkeypatch):
    cupy_standin.install(monkeypatch)


@pytest.mark.parametrize("name", ["numpy", "auto"])
def test_auto_selects_numpy_with_requested_scratch_without_gpu(no_gpu, name):
    backend = select.select(name, scratch_bytes=12345)
    assert isinstance(backend, NumpyBackend)
    assert backend.name == "numpy"
    assert backend.scratch_bytes == 12345


@pytest.mark.parametrize("name", ["cupy", "auto"])
def test_auto_selects_working_gpu(gpu, name):
    backend = select.select(name, scratch_bytes=12345)
    assert isinstance(backend, CupyBackend)
    assert backend.scratch_bytes == 12345
    assert "cupy on stand-in, compute capability 9.0, 8 GiB" in choice_reason(name)


def test_numpy_request_ignores_gpu(gpu):
    assert isinstance(select.select("numpy"), NumpyBackend)
    assert choice_reason("numpy") == "numpy, as requested"


def test_gpu_with_failing_kernel_is_unusable(gpu, monkeypatch):
    def broken(code, options=()):
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", broken)
    assert isinstance(select.select("auto"), NumpyBackend)
    with pytest.raises(BackendError, match=r"the GPU cannot be used: no compiler\. Choose"):
        select.select("cupy")


def test_old_gpu_error_names_compute_capability(gpu, monkeypatch):
    runtime = sys.modules["cupy"].cuda.runtime
    old = runtime.getDeviceProperties(0) | {"major": 6, "minor": 1}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: old)
    assert "compute capability 6.1 is below 7.0" in choice_reason("cupy")


def test_missing_cupy_raises_error_with_advice(no_gpu):
    with pytest.raises(BackendError, match=r"install kfac-engine\[cuda13\].*'numpy' or 'auto'"):
        select.select("cupy")


@pytest.mark.parametrize("call", [select.select, choice_reason])
def test_unknown_backend_error_lists_known_names(call):
    with pytest.raises(
        UnknownNameError, match=r"unknown backend 'gpu'; choose one of: auto, numpy"
    ):
        call("gpu")


def test_auto_logs_choice_with_reason(no_gpu, caplog):
    with caplog.at_level(logging.INFO, logger="kfac_engine"):
        select.select("auto")
    assert choice_reason("auto") in caplog.text


def test_selection_by_name_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="kfac_engine"):
        select.select("numpy")
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "words"), [("auto", "numpy, chosen"), ("numpy", "as requested"), ("cupy", "none: ")]
)
def test_choice_reason_names_backend_of_each_name(no_gpu, name, words):
    assert words in choice_reason(name)

"""`doctor` reports what this process really has, and warns where that is slow."""

import json
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from kfac_engine.__main__ import main
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.cli import doctor


@pytest.fixture
def report(capsys):
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_auto_names_its_backend_and_the_reason(report):
    assert report["backend"]["auto"] == "numpy"
    assert "numpy" in report["backend"]["reason"]
    assert report["backend"]["model"] == "the CPU"


def test_threads_are_those_of_an_engine(report):
    assert report["threads"] == NumpyBackend().workers.count
    with threadpool_limits(1):
        assert doctor.examine()["threads"] == 1


def library(**changes):
    settings = {"library": "openblas", "kernel": "Haswell", "threads": 2, "path": "/x/libblas.so"}
    return settings | changes


WARNINGS = {
    "nothing wrong": ({}, library(), None),
    "forced kernel": (
        {"OPENBLAS_CORETYPE": "Prescott"}, library(), "OPENBLAS_CORETYPE=Prescott overrides"),
    "another library's variable": ({"BLIS_ARCH_TYPE": "1"}, library(), None),
    "old kernel": ({}, library(kernel="Nehalem"), "Nehalem kernel although this processor"),
    "too many threads": ({}, library(threads=9), "9 threads on 2 usable cores"),
}  # fmt: skip


@pytest.mark.parametrize(("environment", "blas", "expected"), WARNINGS.values(), ids=WARNINGS)
def test_what_is_slow_is_warned_of(environment, blas, expected, monkeypatch):
    monkeypatch.setattr(doctor, "_processor_flags", lambda: frozenset({"avx2"}))
    report = {"environment": environment, "blas": [blas], "cores": {"usable": 2}, "packages": {}}
    warnings = doctor._warnings(report)
    assert len(warnings) == (expected is not None)
    assert all(expected in warning for warning in warnings)


@pytest.mark.parametrize("gpu", ["1.31.1", None])
def test_two_packages_of_one_library_are_warned_of(gpu):
    packages = {"onnxruntime": "1.31.1", "onnxruntime-gpu": gpu}
    report = {"environment": {}, "blas": [], "cores": {"usable": 2}, "packages": packages}
    warnings = doctor._warnings(report)
    assert len(warnings) == (gpu is not None)
    assert all("uninstall both" in warning for warning in warnings)


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
def test_a_gpu_is_reported_as_nvidia_smi_tells(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 550.1, 9.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert doctor._gpus()["devices"] == ["NVIDIA H200, 143771 MiB, 550.1, 9.0"]


def test_a_machine_without_nvidia_smi_has_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert doctor._gpus() == {"devices": [], "reason": "nvidia-smi was not found"}


def test_the_table_shows_what_json_shows(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert np.__version__ in out
    assert "auto picks numpy" in out

"""The GPU suite measures what it says, on a stand-in for a GPU; without one it refuses."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from kfac_engine.backend import select
from kfac_engine.backend.cuda import inverse_roots
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.bench import data, gpu, gpu_meter, gpu_tune
from kfac_engine.bench.gpu_meter import Layer, resnet50
from kfac_engine.kernels.launch import MACROS, source
from kfac_engine.kernels.tuned import BLOCKS, PATCHES, PIXELS, Choice
from scripts import bench_tables
from tests.backend import cupy_standin
from tests.cuda_on_cpu.device import ShimDevice
from tests.kernels.test_kernels_page import KERNEL


def test_the_network_has_the_parameters_it_is_known_for():
    weights = sum(layer.d_in * layer.outputs for layer in resnet50())
    scales = 2 * sum(layer.outputs for layer in resnet50()[:-1])
    assert (len(resnet50()), weights + scales) == (54, 25_557_032)


SUM = gpu_meter.Counted("a sum", 0.0, 1.0)
LAYERS = Layer(2, 3, 3, 1, 4), Layer(3, 4, 1, 1, 4), Layer(4, 3, 1, 1, 1, True)
SIZES = gpu_meter.Sizes(images=2, channels=3, side=6, matrix=140, ids=200, classes=5)


@pytest.fixture
def meter(monkeypatch):
    """On the stand-in, whose times mean nothing."""
    cupy_standin.install(monkeypatch)
    monkeypatch.setattr(inverse_roots, "LEAST_SIZES", {90: 2})
    backend = select.select("cupy")
    assert isinstance(backend, CupyBackend)
    return gpu_meter.Meter(backend, rounds=2, side=8)


def test_each_case_is_measured_and_checked(meter):
    rows = list(gpu.measure_gpu(meter, LAYERS, 2, SIZES, None))
    # For each kind of products: one layer with patches, all inputs, all outputs.
    assert [row.contender for row in rows[:9]] == [
        name for name in ("cupy", "cupy-fp32", "cupy-tf32") for _ in range(3)
    ]
    # Inverses, gradients, eigenvectors, roots; fourteen primitives, four ways of a matrix, three of
    # filters, a loss.
    assert len(rows) == 9 + 4 + 14 + 4 + 3 + 1
    assert all(row.error is not None and row.error < 1e-2 for row in rows)
    assert all(row.floor > 0 and row.host > 0 and row.ratio == 1 for row in rows)
    assert len({row.case for row in rows[9:]}) == 26
    told = json.loads(json.dumps([asdict(row) for row in rows], allow_nan=False))
    page = bench_tables.page({"machine": {}, "suites": {"gpu": told}})
    assert page.count("| stand-in, compute capability 9.0") == len(rows)
    form = gpu.FORM
    assert page.count(f"|{'---|' * len([*form.texts, *form.numbers])}") == 1


def test_every_kernel_is_launched_by_the_suite(meter):
    launched = set()
    function = meter.backend.device.function
    meter.backend.device.function = lambda code, name, *options: (
        launched.add(name) or function(code, name, *options)
    )
    list(gpu.kernel_works(meter.backend, SIZES))
    for work in gpu.kernel_works(meter.backend, SIZES):
        work.run()
    assert launched == {kernel for name in MACROS for kernel in KERNEL.findall(source(name))}


def test_ceilings_are_the_rates_that_floors_are_made_of(meter):
    rows = meter.ceiling_rows()
    assert [row.case for row in rows] == ["copy", "float32", "TF32", "float64"]
    assert {row.device for row in rows} == {
        "stand-in, compute capability 9.0, 8 GiB, driver for CUDA 13.0, CUDA 13.0, CuPy 14.2"
    }
    rates = meter.rates
    assert rates.products[gpu_meter.SPLIT] == rates.products[gpu_meter.TF32] / 3
    seconds = meter.ceilings["copy"].device.low
    assert rates.copied_bytes == pytest.approx(2 * 4 * 8**2 / seconds)
    assert rates.floor(gpu_meter.Counted("", rates.products["TF32"], 0.0), "TF32") == 1
    assert rates.floor(gpu_meter.Counted("", 0.0, rates.copied_bytes), "TF32") == 1


def test_fastest_variants_are_written_and_chosen(meter, tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"sm_80": {"a shape": [PIXELS, 4]}}))
    layers = Layer(64, 3, 3, 1, 4), Layer(3, 64, 1, 1, 4)
    times = iter(range(100, 0, -1))  # the last variant of each shape is the fastest
    timed = lambda work: gpu_meter.Times(gpu_meter.spread([float(next(times))]), 1.0)  # noqa: E731
    monkeypatch.setattr(meter, "timed", timed)
    rows = gpu_tune.tune(meter, layers, 2, path)
    # Of patches, two ways; of pixels, one: of the inputs and outputs of 3 and 64 channels.
    assert len(rows) == 3 * (2 + 1 + 1)
    assert all(row.error is not None and row.error <= gpu_tune.TOLERANCE for row in rows)
    table = json.loads(path.read_text())
    assert table["sm_80"] == {"a shape": [PIXELS, 4]}
    assert table["sm_90"] == {
        "9 taps, 64 channels, 2^6 positions": [PATCHES, BLOCKS[PATCHES][-1]],
        "1 taps, 3 channels, 2^6 positions": [PIXELS, BLOCKS[PIXELS][-1]],
        "1 taps, 64 channels, 2^6 positions": [PIXELS, BLOCKS[PIXELS][-1]],
    }
    # The choice decides what is copied as pairs.
    device, out = ShimDevice(), np.zeros((576, 576), np.float32)
    shapes, empty = [], device.empty
    device.empty = lambda shape, kind: shapes.append((kind, shape)) or empty(shape, kind)
    chosen = {key: Choice(*choice) for key, choice in table["sm_90"].items()}
    x = data.normal(2, 64, 4, 4)
    how = Accumulation(False, 1, 0)
    for known in ({}, chosen):
        moments = PatchMoments(device, 8 << 20, 3, known)
        moments.add(x, gpu.window(layers[0]), out, how)
    copied = [shape for kind, shape in shapes if kind == np.int16]
    assert copied == [(32, 2, 64), (32, 2, 576)]


def test_work_that_fails_leaves_the_rest(meter, capsys):
    def broken():
        raise RuntimeError("an illegal memory access")

    wrong = gpu_meter.Work(SUM, lambda: None, check=lambda: 2e-3, tolerance=1e-3)
    works = wrong, gpu_meter.Work(SUM, broken), gpu_meter.Work(SUM, lambda: None)
    assert [len(meter.attempt("cupy", work)) for work in works] == [0, 0, 1]
    assert meter.failures == 2 * ["a sum (cupy)"]
    printed = capsys.readouterr().out
    assert "off by 2.0e-03" in printed
    assert "illegal memory access" in printed
    assert "a sum, cupy: " in printed.splitlines()[-1]

"""Where a device is short of memory, moments are made of smaller pieces, then refused with figures.

Only a stand-in can be made to have no memory.
"""

from functools import partial

import numpy as np
import pytest

from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.threads import Task
from kfac_engine.backend.window import Window
from kfac_engine.errors import MemoryLimitError
from tests.backend import cupy_standin

# Float32 results of other orders of summation, relative to the largest entry.
TOLERANCE = 3e-6
ASKED = 8 << 20
WINDOW = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 8, 5, 5)).astype(np.float32)
SIGNALS = RNG.normal(size=(3, 4, 5, 5)).astype(np.float32)
ROWS = RNG.normal(size=(600, 7)).astype(np.float32)

# What is computed from what, into which shape.
MOMENTS = {
    "rows": ((7, 7), lambda b, x, _, out: b.second_moment(x, out), (ROWS, ROWS)),
    "patches": (
        (72, 72), lambda b, x, _, out: b.patch_second_moment(x, WINDOW, out), (IMAGES, IMAGES)),
    "groups": (
        (4, 18, 18), lambda b, x, _, out: b.patch_second_moment(x, WINDOW, out), (IMAGES, IMAGES)),
    "squares": (
        (2, 36, 2), lambda b, x, ds, out: b.squared_gradients(x, WINDOW, ds, out),
        (IMAGES, SIGNALS)),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    cupy_standin.install(monkeypatch)
    return CupyBackend(scratch_bytes=ASKED)


def computed(backend, name, before=lambda: None):
    """The moment; of one that is symmetric, a triangle."""
    shape, moment, operands = MOMENTS[name]
    x, ds, out = (backend.asarray(array) for array in (*operands, np.ones(shape, np.float32)))
    before()
    moment(backend, x, ds, out)
    found = backend.to_numpy(out)
    return np.tril(found) if shape[-1] == shape[-2] else found


@pytest.mark.parametrize("name", MOMENTS)
def test_second_moments_adapt_to_available_memory(gpu, name):
    def shorten():
        cupy_standin.memory.limit = ASKED // 3

    found, wanted = computed(gpu, name, shorten), computed(NumpyBackend(), name)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
    assert gpu.scratch_bytes == ASKED // 4
    assert cupy_standin.memory.refused == 2


@pytest.mark.parametrize("name", MOMENTS)
def test_memory_error_leaves_result_unchanged(gpu, name):
    def shorten():
        cupy_standin.memory.limit = 1000

    shape, moment, operands = MOMENTS[name]
    x, ds, out = (gpu.asarray(array) for array in (*operands, np.ones(shape, np.float32)))
    shorten()
    with pytest.raises(
        MemoryLimitError,
        match=r"the GPU has 1\.07 of 8\.59 GB free.*1 MB of scratch.*smaller batch",
    ):
        moment(gpu, x, ds, out)
    cupy_standin.memory.limit = None
    np.testing.assert_array_equal(gpu.to_numpy(out), np.ones(shape))


def test_tasks_allocate_scratch_memory_once(gpu, monkeypatch):
    asked = list[int]()
    monkeypatch.setattr(gpu.device, "affordable", lambda size: asked.append(size) or size)
    tasks = [Task(1.0, partial(computed, gpu, name)) for name in MOMENTS]
    for _ in range(2):
        gpu.run_parallel(tasks)
    assert asked == 2 * [ASKED]
    computed(gpu, "patches")
    assert len(asked) == 3


def test_reduced_scratch_size_is_remembered(gpu):
    cupy_standin.memory.limit = ASKED // 3
    computed(gpu, "rows")
    refused = cupy_standin.memory.refused
    computed(gpu, "patches")
    assert cupy_standin.memory.refused == refused

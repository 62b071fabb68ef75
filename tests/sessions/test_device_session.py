"""Sessions in a memory space: arrays are bound by address, results stay there, work is ordered.

On a CPU the memory space is a stand-in for a GPU, whose arrays never become NumPy's by themselves.
ONNX Runtime's provider for the CPU reads and writes them by address.
"""

import logging
import subprocess
import sys

import numpy as np
import pytest

from kfac_engine.backend import select
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.memory_space import CupyMemorySpace
from kfac_engine.backend.memory_space import HOST, HostMemory, stays_on_host
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import compact_model
from kfac_engine.sessions import device_session
from kfac_engine.sessions.device_session import DeviceSession, available_memory_space, has_provider
from tests.backend import cupy_standin, standin_streams

FLOAT, INT, BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
INPUTS = [Input("x", FLOAT, (None, 4)), Input("w", FLOAT, (4, None))]
NODES = (
    Node("MatMul", ("x", "w"), ("y",)),
    Node("Shape", ("y",), ("shape",)),
    Node("Greater", ("y", "zero"), ("positive",)),
)
CONSTANTS = {"zero": np.zeros((), np.float32)}
RESULTS = ("y", "shape", "positive")
# Products of four numbers in float32.
ROUNDING = 1e-6


@pytest.fixture(params=cupy_standin.KINDS)
def gpu(request, monkeypatch):
    if request.param == "device" and not has_provider("cuda"):
        pytest.skip("needs onnxruntime-gpu")
    cupy_standin.begin(request.param, monkeypatch)
    if request.param == "stand-in":
        monkeypatch.setattr(CupyMemorySpace, "kind", "cpu")
    return CupyMemorySpace(CupyBackend(), tf32=False)


def session(memory_space, nodes=NODES):
    outputs = tuple(name for node in nodes for name in node.outputs)
    model = compact_model(nodes, INPUTS, outputs, CONSTANTS, 18)
    return DeviceSession(model, threads=1, what="a test", memory_space=memory_space)


def test_results_are_on_device_and_counts_on_host(gpu):
    feeds = {"x": gpu.as_feed(X), "w": gpu.as_feed(W)}
    found = session(gpu).run(RESULTS, feeds)
    assert type(found["y"]) is type(found["positive"]) is type(feeds["x"])
    assert type(found["shape"]) is np.ndarray
    assert found["shape"].tolist() == [3, 5]
    np.testing.assert_allclose(gpu.on_host(found["y"]), X @ W, rtol=0, atol=ROUNDING)
    positive = gpu.on_host(found["positive"])
    assert positive.dtype == BOOL
    np.testing.assert_array_equal(positive, X @ W > 0)


def test_host_feeds_are_accepted(gpu):
    found = session(gpu).run(("y",), {"x": X, "w": gpu.as_feed(W)})
    np.testing.assert_allclose(gpu.on_host(found["y"]), X @ W, rtol=0, atol=ROUNDING)


def test_run_into_writes_to_arrays_of_caller(gpu):
    own = gpu.empty((3, 5), FLOAT)
    session(gpu).run_into({"y": own}, {"x": gpu.as_feed(X), "w": gpu.as_feed(W)})
    np.testing.assert_allclose(gpu.on_host(own), X @ W, rtol=0, atol=ROUNDING)
    own[...] = 0  # it can be written, unlike what a session makes itself


def test_results_keep_their_memory_alive(gpu):
    made = session(gpu)
    first = made.run(("y",), {"x": gpu.as_feed(X), "w": gpu.as_feed(W)})["y"]
    for seed in range(4):
        other = np.random.default_rng(seed).normal(size=X.shape).astype(np.float32)
        made.run(("y",), {"x": gpu.as_feed(other), "w": gpu.as_feed(W)})
    del made
    np.testing.assert_allclose(gpu.on_host(first), X @ W, rtol=0, atol=ROUNDING)


def test_empty_arrays_are_accepted(gpu):
    found = session(gpu).run(("y",), {"x": gpu.as_feed(X[:0]), "w": gpu.as_feed(W)})
    assert found["y"].shape == (0, 5)


def test_text_feeds_are_copied(gpu):
    """``size(words) · x``."""
    nodes = (
        Node("Size", ("words",), ("count",)),
        Node("CastLike", ("count", "x"), ("factor",)),
        Node("Mul", ("factor", "x"), ("y",)),
    )
    inputs = [Input("words", np.dtype(object), (None,)), INPUTS[0]]
    model = compact_model(nodes, inputs, ("y", "count"), {}, 18)
    made = DeviceSession(model, threads=1, what="a test", memory_space=gpu)
    words, x = np.array(["a", "b", "c"], object), gpu.as_feed(X)
    found = made.run(("y", "count"), {"words": gpu.as_feed(words), "x": x})
    assert type(found["y"]) is type(x)
    assert found["count"] == 3
    np.testing.assert_array_equal(gpu.on_host(found["y"]), 3 * X)


def test_result_array_of_wrong_shape_raises_error(gpu):
    with pytest.raises(BackendError, match="ONNX Runtime failed in a test"):
        session(gpu).run(("y",), {"x": gpu.as_feed(X[:, :3]), "w": gpu.as_feed(W)})


def test_runtime_work_is_ordered_before_and_after(gpu, request):
    if "device" in request.node.name:
        pytest.skip("only the stand-in tells")
    before = gpu.as_feed(X)
    with gpu._stream, pytest.raises(AssertionError, match="used unfinished"):
        abs(before)
    with gpu.ordered(), gpu._stream:
        abs(before)
        after = gpu.as_feed(W)
    abs(after)
    later = standin_streams.Stream(non_blocking=True)
    with later, pytest.raises(AssertionError, match="used unfinished"):
        abs(after)


# Splits into unequal parts read their sizes from pinned memory, long after the host has launched
# them. An exception in a callback of CUDA ends the process.
RELEASED_EARLY = """
import numpy as np
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.cuda.memory_space import CupyMemorySpace
from kfac_engine.graph.write import compact_model
from kfac_engine.graph.structure import Input, Node
from kfac_engine.sessions.device_session import DeviceSession

space = CupyMemorySpace(CupyBackend(), tf32=False)
parts = tuple(f"part{i}" for i in range(40))
nodes = (
    *(Node("MatMul", (f"x{i}", "x0"), (f"x{i + 1}",)) for i in range(30)),
    Node("Split", ("x30", "sizes"), parts, {"axis": 0}),
)
sizes = 4 * (np.arange(40) + 1)
model = compact_model(
    nodes, [Input("x0", np.dtype(np.float32), (None, None))], parts, {"sizes": sizes}, 18
)
x = space.as_feed(np.zeros((sizes.sum(), sizes.sum()), np.float32))
for _ in range(20):
    made = DeviceSession(model, threads=1, what="a test", memory_space=space)
    for _ in range(3):
        found = made.run(parts, {"x0": x})
    del made, found
made = DeviceSession(model, threads=1, what="a test", memory_space=space)
made.run(parts, {"x0": x})
print("finished")
"""


@pytest.mark.gpu
def test_programs_survive_sessions_that_are_released_early():
    if not has_provider("cuda"):
        pytest.skip("needs onnxruntime-gpu")
    program = [sys.executable, "-c", RELEASED_EARLY]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "finished\n"), ended.stderr


# -- memory and release ----------------------------------------------------------------------------


class Short(HostMemory):
    """A memory space whose memory is released once."""

    name = "a small GPU"
    released = waits = 0

    def wait(self):
        self.waits += 1

    def release(self):
        self.released += 1
        return True


def test_memory_shortage_releases_memory_then_raises_error():
    memory_space = Short()
    # An outer product that exceeds the address space: an allocation of less may succeed.
    x, w = np.ones((1 << 23, 1), np.float32), np.ones((1, 1 << 23), np.float32)
    model = compact_model(
        (Node("MatMul", ("x", "w"), ("y",)),),
        [Input("x", FLOAT, (None, 1)), Input("w", FLOAT, (1, None))], ("y",), {}, 18,
    )  # fmt: skip
    made = DeviceSession(model, threads=1, what="a test", memory_space=memory_space)
    with pytest.raises(
        MemoryLimitError, match=r"a small GPU has no memory left for a test \(.*281474976710656"
    ):
        made.run(("y",), {"x": x, "w": w})
    assert memory_space.released == 1


def test_released_session_waits_for_device():
    memory_space = Short()
    made = session(memory_space)
    made.run(("y",), {"x": X, "w": W})
    assert memory_space.waits == 0
    del made
    assert memory_space.waits == 1


# -- the choice -----------------------------------------------------------------------------------


class Elsewhere(HostMemory):
    """A memory space that is not the host's, on the host."""

    name = "a GPU"


class Cuda(Elsewhere):
    """One that needs a provider for CUDA."""

    kind = "cuda"
    index = 1
    stream = 12345


class Wrong(Elsewhere):
    """One whose results are wrong."""

    def on_host(self, array):
        return array + 1


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    cupy_standin.forget(monkeypatch)


def test_memory_space_is_used_after_successful_trial(caplog):
    memory_space = Elsewhere()
    with caplog.at_level("INFO", logger="kfac_engine"):
        assert available_memory_space(memory_space) is memory_space
        assert available_memory_space(memory_space) is memory_space
    assert [record.message for record in caplog.records] == [
        "the model runs in ONNX Runtime on a GPU"
    ]


def test_host_needs_no_trial(caplog):
    with caplog.at_level("DEBUG", logger="kfac_engine"):
        assert available_memory_space(HOST) is HOST
    assert not caplog.records


def test_missing_provider_selects_cpu_with_log(caplog):
    if has_provider("cuda"):
        pytest.skip("this ONNX Runtime has one")
    with caplog.at_level("INFO", logger="kfac_engine"):
        assert available_memory_space(Cuda()) is HOST
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "runs in ONNX Runtime on the CPU" in record.message
    assert "pinned memory: the installed package was built without CUDA" in record.message


def broken(*_, **__):
    raise BackendError("ONNX Runtime cannot load it")


@pytest.mark.parametrize(
    ("memory_space", "why"), [(Wrong(), "a trial returned"), (Elsewhere(), "cannot load it")]
)
def test_failing_provider_selects_cpu_with_warning(caplog, monkeypatch, memory_space, why):
    if why == "cannot load it":
        monkeypatch.setattr(device_session, "DeviceSession", broken)
    with caplog.at_level("INFO", logger="kfac_engine"):
        assert available_memory_space(memory_space) is HOST
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert why in record.message


def test_provider_options_have_device_stream_and_tf32():
    options = device_session._provider_options(Cuda())
    assert options["device_id"] == "1"
    assert options["user_compute_stream"] == "12345"
    assert options["use_tf32"] == "0"
    exact = Cuda()
    exact.tf32 = True
    assert device_session._provider_options(exact)["use_tf32"] == "1"


@pytest.mark.parametrize(
    ("dtype", "rank", "stays"),
    [(INT, 0, True), (INT, 1, True), (BOOL, 1, True), (INT, 2, False), (FLOAT, 0, False)],
)
def test_small_integers_stay_on_the_host(dtype, rank, stays):
    assert stays_on_host(dtype, rank) is stays


@pytest.mark.parametrize(("name", "tf32"), [("cupy", False), ("cupy-tf32", True)])
def test_tf32_option_follows_backend(monkeypatch, name, tf32):
    cupy_standin.install(monkeypatch)
    memory_space = select.memory_space_of(select.select(name))
    assert memory_space.tf32 is tf32
    assert select.memory_space_of(select.select(name)) is memory_space
    assert select.memory_space_of(select.select("numpy")) is HOST

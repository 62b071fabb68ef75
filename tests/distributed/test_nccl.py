"""Collectives of GPUs by NCCL, on a stand-in and, with the mark ``gpu``, on all devices."""

import inspect
import re
from dataclasses import dataclass
from itertools import pairwise
from threading import local
from typing import Any

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cuda import device
from kfac_engine.distributed import nccl
from kfac_engine.distributed.nccl import OverNCCL
from kfac_engine.distributed.protocol import Alone
from tests import models
from tests.backend import cupy_standin, standin_nccl
from tests.cuda_on_cpu.module import compiler
from tests.distributed.threads import run

# Sums in another order, relative to the largest entry.
ROUNDING = {"float32": 1e-6, "float64": 1e-14}
# Float32 statistics summed in another order, through an inverse of condition 10.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Devices:
    """CuPy, and a rank for each device."""

    xp: Any
    size: int
    real: bool

    def each(self, work):
        """Results of a function of the communicator, by rank."""

        def on_device(host):
            if self.real:
                self.xp.cuda.Device(host.rank).use()
            return work(OverNCCL(host))

        return run(self.size, on_device)


@pytest.fixture(params=cupy_standin.KINDS)
def devices(request, monkeypatch):
    cupy_standin.begin(request.param, monkeypatch)
    try:
        device.load_nccl()
    except ke.BackendError as failure:
        pytest.skip(str(failure))
    xp, real = device._cupy(), request.param == "device"
    return Devices(xp, xp.cuda.runtime.getDeviceCount() if real else 3, real)


@pytest.fixture
def standin(monkeypatch):
    """The stand-in for CuPy."""
    cupy_standin.install(monkeypatch)
    return device._cupy()


COUNTS = {
    "uneven": lambda size: [0 if rank % 2 else 5 - rank % 3 for rank in range(size)],
    "equal": lambda size: [4] * size,
    "one owner": lambda size: [0] * (size - 1) + [7],
}


def buffer_of(rank, length, dtype):
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("counts", COUNTS)
def test_collectives_of_devices_do_what_the_protocol_says(devices, counts, dtype):
    parts = COUNTS[counts](devices.size)
    length, edges = sum(parts), np.cumsum([0, *parts])
    calls = {
        "allreduce": lambda ranks, buffer: ranks.allreduce(buffer),
        "reduce_scatter": lambda ranks, buffer: ranks.reduce_scatter(buffer, parts),
        "allgather": lambda ranks, buffer: ranks.allgather(buffer, parts),
        "broadcast": lambda ranks, buffer: ranks.broadcast(buffer, ranks.size - 1),
    }

    def work(ranks):
        own, results = buffer_of(ranks.rank, length, dtype), {}
        for name, call in calls.items():
            around = devices.xp.asarray(np.pad(own, 2, constant_values=77))
            buffer = around[2:-2]
            returned = call(ranks, buffer)
            results[name] = (buffer if returned is None else returned).get()
            np.testing.assert_array_equal(around.get()[[0, 1, -2, -1]], 77)
        return results

    ranks = devices.each(work)
    owned = [buffer_of(rank, length, dtype) for rank in range(devices.size)]
    total = np.sum(owned, axis=0, dtype=np.float64)
    gathered = [own[slice(*edge)] for own, edge in zip(owned, pairwise(edges), strict=True)]
    for rank, results in enumerate(ranks):
        assert {array.dtype for array in results.values()} == {np.dtype(dtype)}
        close = ROUNDING[dtype] * np.abs(total).max()
        np.testing.assert_allclose(results["allreduce"], total, rtol=0, atol=close)
        np.testing.assert_array_equal(results["allreduce"], ranks[0]["allreduce"])
        part = total[slice(*edges[rank : rank + 2])]
        np.testing.assert_allclose(results["reduce_scatter"], part, rtol=0, atol=close)
        np.testing.assert_array_equal(results["allgather"], np.concatenate(gathered))
        np.testing.assert_array_equal(results["broadcast"], owned[-1])


def test_buffers_of_the_host_are_sent_by_the_other_communicator(devices):
    def work(ranks):
        ranks._host.log.clear()
        buffer, counts = np.arange(3.0 * ranks.size), [3] * ranks.size
        ranks.allreduce(buffer)
        part = ranks.reduce_scatter(buffer.copy(), counts)
        ranks.allgather(buffer, counts)
        ranks.broadcast(buffer, 0)
        assert part.shape == (3,)
        return [name for name, _ in ranks._host.log]

    names = ["allreduce", "reduce_scatter", "allgather", "broadcast"]
    assert devices.each(work) == [names] * devices.size


def engine_of(ranks, backend, **options):
    options |= {"damping": 0.1, "schedule": ke.Schedule(refresh_every=2), "backend": backend}
    return ke.Engine.from_onnx(models.mlp(), loss="categorical", communicator=ranks, **options)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_engines_of_several_devices_equal_one_process(devices, distribution):
    if not devices.real and compiler() is None:
        pytest.skip("needs g++ to run kernels on the CPU")
    inputs = [models.random_inputs(models.mlp(), batch=12, seed=seed) for seed in range(3)]
    batches = [(part, np.arange(12) % 3) for part in inputs]
    alone = engine_of(None, "numpy")
    expected = [alone.step(*batch) for batch in batches]

    def work(ranks):
        engine = engine_of(ranks, "cupy", distribution=distribution)
        rows = np.array_split(np.arange(12), 2 * ranks.size - 1)[2 * ranks.rank :][:2]
        chosen = np.concatenate(rows)
        results = []
        for part, targets in batches:
            shard = {name: array[chosen] for name, array in part.items()}
            result = engine.step(shard, targets[chosen])
            natural = {n: array.get() for n, array in result.natural_gradients.items()}
            results.append((result.loss, natural))
        return results

    ranks = devices.each(work)
    for results in ranks:
        for (loss, natural), wanted, (_, first) in zip(results, expected, ranks[0], strict=True):
            assert loss == pytest.approx(wanted.loss, rel=TOLERANCE)
            for name, array in wanted.natural_gradients.items():
                close = TOLERANCE * np.abs(array).max()
                np.testing.assert_allclose(natural[name], array, rtol=0, atol=close)
                np.testing.assert_array_equal(natural[name], first[name])


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([4] * 5, [["allReduce"], ["reduceScatter"], ["allGather"], ["broadcast"]]),
        (
            [2, 0, 1, 3, 4],
            [["allReduce"], *[["reduce"] * 2] * 2, *[["broadcast"] * 2] * 2, ["broadcast"]],
        ),
        ([0, 0, 0, 0, 4], [["allReduce"], ["reduce"], ["broadcast"], ["broadcast"]]),
    ],
    ids=["equal parts", "uneven parts", "one part"],
)
def test_parts_of_different_sizes_are_sent_in_groups(standin, monkeypatch, counts, expected):
    monkeypatch.setattr(nccl, "_LARGEST_GROUP", 2)

    def work(host):
        ranks, buffer = OverNCCL(host), standin.asarray(np.ones(sum(counts), np.float32))
        ranks.allreduce(buffer)
        ranks.reduce_scatter(buffer, counts)
        ranks.allgather(buffer, counts)
        ranks.broadcast(buffer, 3)

    run(5, work)
    for rank in range(5):
        assert [names for caller, names in standin_nccl.CALLS if caller == rank] == expected


def test_operations_are_put_on_the_current_stream(standin):
    ranks = OverNCCL(Alone())
    with standin.cuda.Stream(non_blocking=True):  # the stand-in for NCCL compares
        buffer = standin.asarray(np.arange(3.0))
        ranks.allreduce(buffer)
        ranks.broadcast(buffer, 0)
        ranks.allgather(buffer, [3])
        part = ranks.reduce_scatter(buffer, [3])
        np.testing.assert_array_equal(part.get(), np.arange(3.0))
    assert [names for _, names in standin_nccl.CALLS] == [
        ["allReduce"],
        ["broadcast"],
        ["allGather"],
        ["reduceScatter"],
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "allReduce",
        "reduce",
        "broadcast",
        "reduceScatter",
        "allGather",
        "check_async_error",
        "abort",
    ],
)
def test_stand_in_has_the_parameters_of_cupy(name):
    """Needs CuPy and NCCL, and no device."""
    library = pytest.importorskip("cupy.cuda.nccl")
    if not library.available:
        pytest.skip("CuPy finds no NCCL library")
    assert (library.NCCL_SUM, library.NCCL_FLOAT32, library.NCCL_FLOAT64) == (0, 7, 8)
    assert len(library.get_unique_id()) == standin_nccl.IDENTIFIER
    assert type(library.get_unique_id()) is bytes
    documented = getattr(library.NcclCommunicator, name).__doc__.splitlines()[0]
    parameters = re.findall(r"(\w+)[,)]", documented)
    assert parameters == [
        *inspect.signature(getattr(standin_nccl.NcclCommunicator, name)).parameters
    ]


# -- errors ---------------------------------------------------------------------------------------


def refused(host, kind):
    with pytest.raises(kind) as error:
        OverNCCL(host)
    return str(error.value)


def test_a_rank_without_nccl_is_an_error_of_all_ranks_before_any_of_them_connects(
    standin, monkeypatch
):
    here = local()

    def load():
        if here.rank == 1:
            raise ke.BackendError("there is no GPU.")
        return device.load_nccl()

    monkeypatch.setattr(nccl, "load_nccl", load)

    def work(host):
        here.rank = host.rank
        return refused(host, ke.BackendError)

    assert set(run(3, work)) == {"rank 1 of 3 refused: there is no GPU."}


def test_a_connection_that_nccl_refuses_is_an_error_of_all_ranks(standin):
    standin_nccl.REFUSED.add(2)
    (message,) = set(run(3, lambda host: refused(host, ke.RankError)))
    assert message.startswith("rank 2 of 3 refused: NCCL failed on rank 2 (NCCL_ERROR")
    assert "Each rank needs a GPU of its own" in message


@pytest.mark.parametrize("call", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
def test_an_error_on_the_device_is_raised_by_the_next_call_which_aborts(standin, call):
    ranks, buffer = OverNCCL(Alone()), standin.asarray(np.zeros(3))
    arguments = {"allreduce": (), "broadcast": (0,)}.get(call, ([3],))
    getattr(ranks, call)(buffer, *arguments)
    assert not ranks._comm.aborted
    ranks._comm.failure = standin_nccl.INVALID_USAGE
    standin_nccl.CALLS.clear()
    with pytest.raises(ke.RankError, match="NCCL failed on rank 0"):
        getattr(ranks, call)(buffer, *arguments)
    assert ranks._comm.aborted
    assert not standin_nccl.CALLS


def test_a_group_ends_when_an_operation_fails(standin, monkeypatch):
    def work(host):
        ranks, buffer = OverNCCL(host), standin.asarray(np.zeros(3))

        def fail(*_):
            raise standin_nccl.NcclError(standin_nccl.INVALID_USAGE)

        ranks._comm.reduce = fail
        with pytest.raises(ke.RankError):
            ranks.reduce_scatter(buffer, [2, 1])
        assert ranks._comm.aborted
        return standin_nccl._THREAD.depth

    assert run(2, work) == [0, 0]


def test_a_missing_library_is_named(standin, monkeypatch):
    monkeypatch.setattr(device.load_nccl(), "available", False)
    with pytest.raises(ke.BackendError, match="nvidia-nccl-cu13"):
        OverNCCL(Alone())


def test_one_rank_needs_no_nccl_and_other_objects_are_refused():
    alone = Alone()
    assert ke.over_nccl(alone) is alone
    with pytest.raises(ke.InputError, match="over_nccl takes a communicator"):
        ke.over_nccl(object())


def test_over_nccl_knows_the_ranks_of_a_node(standin):
    def work(host):
        host.local_size = 2
        ranks = ke.over_nccl(host)
        assert isinstance(ranks, ke.Communicator)
        return ranks.rank, ranks.size, ranks.local_size

    assert run(3, work) == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]

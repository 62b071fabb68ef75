"""Tasks are each done once, failures come back, and BLAS is left as it was found."""

import gc
import os
import subprocess
import sys
from threading import Barrier, Thread, active_count, get_ident
from weakref import ref

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from kfac_engine.backend.threads import (
    Workers,
    default_count,
    equal_slices,
    single_threaded_blas,
    threads_of_a_rank,
)
from kfac_engine.system.memory_limits import usable_cores

SECONDS = 20  # that a thread waits for another before it gives up


def blas_threads():
    return {entry["num_threads"] for entry in threadpool_info() if entry["user_api"] == "blas"}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_tasks_run_once(threads):
    done = []
    Workers(threads).run([lambda i=i: done.append(i) for i in range(100)])
    assert sorted(done) == list(range(100))


def test_tasks_run_simultaneously():
    meeting = Barrier(3)
    Workers(3).run([lambda: meeting.wait(SECONDS)] * 3)
    assert not meeting.broken


def test_single_thread_is_calling_thread():
    seen = set()
    Workers(1).run([lambda: seen.add(get_ident())] * 4)
    assert seen == {get_ident()}


@pytest.mark.parametrize("threads", [1, 3])
def test_exception_is_raised_and_stops_queue(threads):
    begun = []

    def fail():
        begun.append(1)
        raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        Workers(threads).run([fail] * 50)
    assert len(begun) <= threads


def test_exception_of_helper_thread_is_raised():
    meeting, caller = Barrier(2), get_ident()

    def fail_elsewhere():
        meeting.wait(SECONDS)
        if get_ident() != caller:
            raise ValueError("elsewhere")

    with pytest.raises(ValueError, match="elsewhere"):
        Workers(2).run([fail_elsewhere] * 2)


def test_concurrent_runs_are_independent():
    workers, done = Workers(3), []

    def call(name):
        for i in range(200):
            workers.run([lambda key=(name, i, j): done.append(key) for j in range(3)])

    callers = [Thread(target=call, args=(name,)) for name in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(SECONDS)
    assert sorted(done) == sorted((n, i, j) for n in range(4) for i in range(200) for j in range(3))


def test_threads_are_reused_and_release_results():
    class Kept:
        pass

    workers, before = Workers(2), active_count()
    for _ in range(3):
        kept = Kept()
        workers.run([lambda kept=kept: kept] * 4)
        alive = ref(kept)
        del kept
        gc.collect()
        assert alive() is None
    assert active_count() <= before + 1


def test_interpreter_exits_with_idle_threads():
    code = "from kfac_engine.backend.threads import Workers; Workers(3).run([lambda: None] * 9)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=False).returncode == 0
    )


def test_nested_run_uses_thread_of_its_task():
    seen = []
    workers = Workers(4)

    def outer():
        inner = set()
        workers.run([lambda: inner.add(get_ident())] * 8)
        assert workers.free == 1
        seen.append(inner == {get_ident()})

    workers.run([outer] * 4)
    assert seen == [True] * 4


def test_numpy_error_settings_apply_in_all_threads():
    meeting = Barrier(2)

    def divide():
        meeting.wait(SECONDS)
        return np.ones(2) / np.zeros(2)

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        Workers(2).run([divide] * 2)


def test_run_limits_blas_to_one_thread_and_restores_it():
    inside = []
    with threadpool_limits(2, user_api="blas"):
        with single_threaded_blas():
            Workers(2).run([lambda: inside.append(blas_threads())] * 3)
            inside.append(blas_threads())
        assert blas_threads() == {2}
    assert inside == [{1}] * 4


def test_default_count_is_number_of_blas_threads():
    with threadpool_limits(1, user_api="blas"):
        assert default_count() == Workers().count == 1
    with threadpool_limits(64, user_api="blas"):
        assert default_count() == usable_cores()
        with single_threaded_blas():
            assert default_count() == usable_cores()


# Cores of the process, ranks on the node, cores of the node, threads.
SHARES = {
    "one process": (8, 1, 8, 8),
    "all cores for all": (64, 4, 64, 16),
    "a remainder": (8, 3, 8, 2),
    "more ranks than cores": (2, 8, 2, 1),
    "bound to one core": (1, 4, 64, 1),
    "bound to a share": (8, 4, 32, 8),
    "two ranks on a socket": (32, 4, 64, 16),
    "a container": (8, 1, 64, 8),
    "an unknown node": (8, 4, None, 2),
    "a wrong count of the node": (8, 1, 2, 8),
}


@pytest.mark.parametrize(("cores", "ranks", "machine", "expected"), SHARES.values(), ids=SHARES)
def test_ranks_of_a_node_share_its_cores(cores, ranks, machine, expected):
    assert threads_of_a_rank(cores, ranks, machine) == expected


@pytest.mark.parametrize(("limit", "ranks", "expected"), [(64, 3, 4), (64, 20, 1), (2, 3, 2)])
def test_default_count_is_divided_by_the_ranks_of_a_node(limit, ranks, expected, monkeypatch):
    monkeypatch.setattr("kfac_engine.backend.threads.usable_cores", lambda: 12)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    with threadpool_limits(limit, user_api="blas"):
        assert default_count(ranks) == expected


@pytest.mark.parametrize(
    ("length", "threads", "least", "expected"),
    [
        (10, 3, 1, [(0, 3), (3, 6), (6, 10)]),
        (2, 4, 1, [(0, 1), (1, 2)]),
        (100, 4, 60, [(0, 100)]),
        (0, 4, 1, [(0, 0)]),
    ],
)
def test_slices_are_adjacent_and_long_enough(length, threads, least, expected):
    found = equal_slices(length, threads, least)
    assert [(band.start, band.stop) for band in found] == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the very thing under test
def test_forked_process_creates_new_threads():
    Workers(2).run([lambda: None] * 4)
    child = os.fork()
    if not child:
        done = []
        Workers(2).run([lambda: done.append(1)] * 4)
        os._exit(0 if len(done) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""One budget of threads: tasks side by side, each with BLAS on a thread of its own.

A BLAS with several threads keeps them spinning for a while after every product, and NumPy and SciPy
may each bring a library of their own: on two cores a product of half a millisecond then waits eight
for the threads of the other library to stop. Here BLAS runs on one thread, threads of Python share
the work (it lets go of the interpreter), and threads without work sleep.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias

import scipy.linalg  # noqa: F401  # loaded so that its BLAS is found beside NumPy's
from threadpoolctl import ThreadpoolController

_INSIDE: ContextVar[bool] = ContextVar("inside a task", default=False)

# Tasks that nobody has begun.
_Tasks: TypeAlias = "deque[Callable[[], object]]"
# What threads have ended with: a failure, or nothing to tell.
_Ends: TypeAlias = SimpleQueue[BaseException | None]


class Workers:
    """Threads that share tasks.

    Args:
        count: Threads, the caller's included; by default as many as BLAS was given, which is one a
            core unless the environment says otherwise.

    Attributes:
        count: At least one.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or default_count()

    def run(self, tasks: Iterable[Callable[[], object]]) -> None:
        """Do every task, in any order, and wait for all of them.

        Tasks of one call must not depend on each other; a task that calls ``run`` does its own
        tasks alone. Put the longest first.

        Args:
            tasks: Functions that release the interpreter for most of their time.

        Raises:
            Exception: What a task raised; tasks that nobody had begun by then are left out.
        """
        queue = deque(tasks)
        helpers = 0 if _INSIDE.get() else min(self.count, len(queue)) - 1
        with single_threaded_blas():
            if helpers > 0:
                _work_together(queue, helpers)
            else:
                _work(queue)

    def row_blocks(self, length: int, *, least: int = 1) -> list[slice]:
        """``range(length)`` in one part a thread, of equal lengths but for rounding.

        Args:
            length: Of an axis.
            least: Length below which a part is not worth a thread.

        Returns:
            At least one; one alone inside a task.
        """
        parts = 1 if _INSIDE.get() else max(1, min(self.count, length // max(least, 1)))
        edges = [length * i // parts for i in range(parts + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]


def default_count() -> int:
    """Threads that BLAS is given outside this module, at most one for each usable core."""
    with _HOLDERS.lock:
        return _HOLDERS.given if _HOLDERS.count else _given()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Holders:
    """Who wants BLAS on one thread; the first sets it, the last restores what was before."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.given = 1
        self.limit: Any = None


_HOLDERS = _Holders()


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """BLAS on one thread, for the whole process, until the last of those who asked has left."""
    with _HOLDERS.lock:
        if _HOLDERS.count == 0:
            _HOLDERS.given = _given()
            _HOLDERS.limit = _blas().limit(limits=1)
        _HOLDERS.count += 1
    try:
        yield
    finally:
        with _HOLDERS.lock:
            _HOLDERS.count -= 1
            if _HOLDERS.count == 0:
                _HOLDERS.limit.restore_original_limits()


def _work_together(queue: _Tasks, count: int) -> None:
    """Do tasks with so many threads beside this one; who wakes too late is not waited for."""
    helpers = [_idle() for _ in range(count)]
    tickets, ends = deque(helpers), _Ends()
    for helper in helpers:
        helper.calls.put(partial(copy_context().run, _help, queue, tickets, ends))
    try:
        _work(queue)
    finally:
        begun = count
        while tickets:
            with suppress(IndexError):  # a helper was quicker
                tickets.pop()
                begun -= 1
        failures = [ends.get() for _ in range(begun)]
        _IDLE.extend(helpers)
    for failure in failures:
        if failure is not None:
            raise failure


def _help(queue: _Tasks, tickets: "deque[_Helper]", ends: _Ends) -> None:
    """Do tasks, and say how it ended, unless whoever asked has finished already."""
    try:
        tickets.pop()
    except IndexError:
        return
    try:
        _work(queue)
    except BaseException as failure:  # it is raised in the thread that waits
        ends.put(failure)
    else:
        ends.put(None)


class _Helper:
    """A thread that sleeps until it is given a call, and again after it.

    A thread of a pool takes twice as long to meet: its futures and queues wake it by locks.

    Attributes:
        calls: What it does, one after the other; none raises.
    """

    def __init__(self) -> None:
        self.calls = SimpleQueue[Callable[[], None]]()
        # Nobody waits for it at exit: whoever gave it something has waited already.
        Thread(target=_serve, args=(self.calls,), name="kfac_engine", daemon=True).start()


def _serve(calls: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        calls.get()()


# Threads that nobody uses. Of one process: after a fork they are gone.
_IDLE: "deque[_Helper]" = deque()


def _idle() -> _Helper:
    try:
        return _IDLE.pop()
    except IndexError:
        return _Helper()


def _work(queue: _Tasks) -> None:
    """Do tasks until none is left; after a failure nobody begins another."""
    token = _INSIDE.set(True)
    try:
        while queue:
            try:
                task = queue.popleft()
            except IndexError:  # another thread was quicker
                break
            task()
    except BaseException:
        queue.clear()
        raise
    finally:
        _INSIDE.reset(token)


def _given() -> int:
    counts = [library["num_threads"] for library in _blas().info()]
    return max(1, min(max(counts, default=1), usable_cores()))


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def _forget() -> None:
    """In the child of a fork no thread of the parent lives on."""
    global _HOLDERS  # its lock may be held by a thread that is gone
    _HOLDERS = _Holders()
    _IDLE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

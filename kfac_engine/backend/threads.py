"""Runs tasks that call BLAS in a thread pool, and limits BLAS to one thread meanwhile.

The threads of a BLAS spin for some time after every product, and NumPy and SciPy may each load a
BLAS. On two cores, a product of half a millisecond can then wait eight milliseconds for the threads
of the other library. Therefore BLAS uses one thread, and Python threads divide the work. BLAS
releases the interpreter lock, and threads without work sleep. See ADR 8.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeAlias

import scipy.linalg  # noqa: F401  # loaded so that its BLAS is found beside NumPy's
from threadpoolctl import ThreadpoolController

from kfac_engine.system.memory_limits import usable_cores

_INSIDE: ContextVar[bool] = ContextVar("inside a task", default=False)

# Functions that have not started.
_Tasks: TypeAlias = "deque[Callable[[], object]]"
# The functions that a helper calls in order, a thread that sleeps without calls; none raises.
_Calls: TypeAlias = SimpleQueue[Callable[[], None]]
# Results of threads: an exception, or None.
_Ends: TypeAlias = SimpleQueue[BaseException | None]


class Workers:
    """A thread pool of ``count`` threads, one of which is the calling thread.

    The default is the number of BLAS threads: the processor's cores, unless the environment sets
    another number.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or default_count()

    @property
    def free(self) -> int:
        """Number of threads that an operation may use: one inside a task."""
        return 1 if _INSIDE.get() else self.count

    def run(self, tasks: Iterable[Callable[[], object]]) -> None:
        """Run all tasks in any order, and wait for them.

        Tasks must not depend on each other, and should release the interpreter lock most of the
        time. A task that calls ``run`` runs its own tasks in its own thread. The longest tasks
        should be first. If a task raises an exception, it is raised here, and tasks that had not
        started are not run.
        """
        queue = deque(tasks)
        helpers = min(self.free, len(queue)) - 1
        with single_threaded_blas():
            if helpers > 0:
                _run_with_helpers(queue, helpers)
            else:
                _run_queue(queue)


def equal_slices(length: int, count: int, least: int = 1) -> list[slice]:
    """Return at most ``count`` slices of ``range(length)``, of about equal length.

    A slice has at least ``least`` entries, unless it is the only one.
    """
    count = max(1, min(count, length // least))
    edges = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def default_count(ranks_on_node: int = 1) -> int:
    """Return the number of BLAS threads outside this module, at most the number of usable cores.

    ``ranks_on_node`` processes of one program share the cores of this node.
    """
    with _BLAS_LIMIT.lock:
        numbers = _BLAS_LIMIT.before if _BLAS_LIMIT.count else [b.num_threads for b in _blas()]
        count = max(1, min(max(numbers, default=1), usable_cores()))
    return min(count, threads_of_a_rank(usable_cores(), ranks_on_node, os.cpu_count()))


def threads_of_a_rank(cores: int, ranks_on_node: int, machine: int | None = None) -> int:
    """Return the number of threads, at least one, of a process that shares a node with others.

    A process may use all cores of the node, or those to which its launcher has bound it. In the
    first case the cores are divided. In the second case these cores are its share already, unless
    they exceed an equal share of the node. ``cores`` is the number of cores that the process may
    use, ``machine`` the number of cores of the node. None, or a smaller number, means ``cores``.
    """
    return max(1, min(cores, max(cores, machine or 0) // ranks_on_node))


class _BlasLimit:
    """The context of ``single_threaded_blas``; it takes less time than that of a generator.

    The first of several contexts sets the limit and the last removes it.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0
        self.before: list[int] = []

    def __enter__(self) -> None:
        with self.lock:
            if self.count == 0:
                self.before = [library.num_threads for library in _blas()]
                _set_threads([1] * len(self.before), self.before)
            self.count += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                _set_threads(self.before, [1] * len(self.before))


_BLAS_LIMIT = _BlasLimit()


def single_threaded_blas() -> _BlasLimit:
    """Limit BLAS to one thread for the whole process, until the last such context ends."""
    return _BLAS_LIMIT


def _run_with_helpers(queue: _Tasks, count: int) -> None:
    """Run tasks in this thread and in helpers; do not wait for a helper without a task."""
    helpers = [_idle_helper() for _ in range(count)]
    tickets, ends = deque(helpers), _Ends()
    for helper in helpers:
        helper.put(partial(copy_context().run, _help, queue, tickets, ends))
    try:
        _run_queue(queue)
    finally:
        started = count
        while tickets:
            with suppress(IndexError):  # a helper has removed the ticket
                tickets.pop()
                started -= 1
        failures = [ends.get() for _ in range(started)]
        _IDLE.extend(helpers)
    for failure in failures:
        if failure is not None:
            raise failure


def _help(queue: _Tasks, tickets: "deque[_Calls]", ends: _Ends) -> None:
    """Run tasks and report the end, unless the caller has removed the ticket."""
    try:
        tickets.pop()
    except IndexError:
        return
    try:
        _run_queue(queue)
    except BaseException as failure:  # raised again in the calling thread
        ends.put(failure)
    else:
        ends.put(None)


def _serve(calls: _Calls) -> None:
    while True:
        calls.get()()


# Threads without work. A forked process does not inherit them.
_IDLE: "deque[_Calls]" = deque()


def _idle_helper() -> _Calls:
    try:
        return _IDLE.pop()
    except IndexError:
        # The pools of Python's library take twice as long to start a task, because their futures
        # and queues wake threads by locks.
        calls = _Calls()
        # The thread may be a daemon, because every caller waits for its calls.
        Thread(target=_serve, args=(calls,), name="kfac_engine", daemon=True).start()
        return calls


def _run_queue(queue: _Tasks) -> None:
    """Run tasks until the queue is empty; an exception empties the queue."""
    token = _INSIDE.set(True)
    try:
        while queue:
            try:
                task = queue.popleft()
            except IndexError:  # another thread has removed the task
                break
            task()
    except BaseException:
        queue.clear()
        raise
    finally:
        _INSIDE.reset(token)


def _set_threads(numbers: Sequence[int], present: Sequence[int]) -> None:
    """Set the number of threads of each BLAS library where it differs from the present one."""
    for library, number, now in zip(_blas(), numbers, present, strict=True):
        if number != now:
            library.set_num_threads(number)


@cache
def _blas() -> tuple[Any, ...]:
    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


def _reset_after_fork() -> None:
    """Reset the module in a forked process, which does not inherit threads."""
    global _BLAS_LIMIT  # a thread of the parent may have locked it
    _BLAS_LIMIT = _BlasLimit()
    _IDLE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


# -- tasks, in parallel or one after the other -----------------------------------------------------
#
# An operation divides its own work among threads, unless it runs inside a task. Tasks of similar
# work are faster in parallel, because threads do not wait for each other. A task with more work
# than the others is faster if all threads divide it. The choice depends on sizes only, so equal
# inputs give bitwise equal results.

# Number of multiplications of a core in a millisecond. Waking a thread takes a tenth of this time,
# and threads wait for the interpreter. Two products of size 256, with 3e7 multiplications together,
# are not faster in two threads.
WORTH_WAKING = 8e7
# Number of multiplications in the time that one entry is read from memory.
TO_READ = 40.0
# Work below which a task mostly holds the interpreter lock.
_TINY = 4e6
# Tolerance for parts of a task whose work differs by rounding only.
_ROUNDING = 1.01


class Task(NamedTuple):
    """A function with the approximate number of its multiplications."""

    work: float
    do: Callable[[], object]


def run_parallel(tasks: Sequence[Task], workers: Workers) -> None:
    """Run independent tasks and wait for them.

    An exception of a task is raised here; then other tasks may not have run.
    """
    remaining = sum(map(attrgetter("work"), tasks))
    if remaining < WORTH_WAKING:
        _all(tasks)
        return
    ordered = deque(sorted(tasks, key=lambda task: -task.work))
    while ordered and (
        remaining < WORTH_WAKING or workers.count * ordered[0].work > _ROUNDING * remaining
    ):
        first = ordered.popleft()
        remaining -= first.work
        first.do()
    if ordered:
        tiny = [task for task in ordered if task.work < _TINY]
        large = [task.do for task in ordered if task.work >= _TINY]
        workers.run([*large, partial(_all, tiny)])


def _all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task.do()

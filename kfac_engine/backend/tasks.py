"""Runs tasks in parallel threads or one after the other, chosen by their work.

An operation divides its own work among threads, unless it runs inside a task (see ``threads``).
Tasks of similar work are faster in parallel, because threads do not wait for each other. A task
with more work than the others is faster if all threads divide it. The choice depends on sizes only,
so equal inputs give bitwise equal results.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kfac_engine.backend.threads import Workers

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
    """A function with the number of its multiplications.

    Attributes:
        work: Number of multiplications, approximately.
        do: Function that does the work.
    """

    work: float
    do: Callable[[], object]


def run_parallel(tasks: Sequence[Task], workers: Workers) -> None:
    """Run all tasks and wait for them.

    Args:
        tasks: Independent tasks, in any order.
        workers: Threads.

    Raises:
        Exception: A task raised it; other tasks may not have run.
    """
    remaining = sum(task.work for task in tasks)
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

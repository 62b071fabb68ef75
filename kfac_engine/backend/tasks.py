"""Scheduling of tasks by their work: in threads side by side, or one after the other.

An operation divides its own work among threads, unless it runs inside a task (see ``threads``).
Tasks of similar work are faster side by side, where threads do not wait for each other. A task that
outweighs the others is faster if all threads divide it. The choice depends on sizes only, so equal
inputs give equal bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kfac_engine.backend.threads import Workers

# Multiplications of a core in a millisecond. Waking a thread takes a tenth of that, and threads
# wait for the interpreter: two products of size 256, 3e7 multiplications together, gain nothing.
WORTH_WAKING = 8e7
# Multiplications in the time of reading an entry from memory.
TO_READ = 40.0
# Work below which a task is mostly interpreter time, which threads spend in turn.
_TINY = 4e6
# Tolerance for equal parts of a task, which differ by rounding.
_ROUNDING = 1.01


class Task(NamedTuple):
    """Independent work of known size.

    Attributes:
        work: Number of multiplications, approximately.
        do: Function that does the work.
    """

    work: float
    do: Callable[[], object]


def run_parallel(tasks: Sequence[Task], workers: Workers) -> None:
    """Run all tasks and wait for them.

    Args:
        tasks: In any order.
        workers: Threads.

    Raises:
        Exception: The exception of a task; other tasks may not have run.
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

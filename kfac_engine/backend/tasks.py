"""Tasks of known size: which of them threads do side by side, and which are divided among threads.

A primitive divides its own work among threads unless it runs inside a task (see ``threads``). Tasks
of like size are better done side by side, where nothing waits; one that outweighs the others is
better divided. Both follow from sizes alone, so that the same work gives the same bits every time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kfac_engine.backend.threads import Workers

# In a millisecond a core does so many multiplications of matrices. Waking a thread and waiting for
# it takes a tenth of that, and more is lost where two wait for the interpreter in turn: two
# products of side 256, 3e7 together, are no quicker on two threads.
WORTH_WAKING = 8e7
# Multiplications in the time that it takes to read a number from memory.
TO_READ = 40.0
# Smaller tasks are Python for the most part, and side by side threads would wait for it in turn.
_TINY = 4e6
# Parts of a task that was divided in equal ones differ by rounding: none of them outweighs.
_MORE = 1.01


class Task(NamedTuple):
    """Work that depends on no other task of its kind.

    Attributes:
        work: Multiplications, about.
        do: Does it.
    """

    work: float
    do: Callable[[], object]


def run_parallel(tasks: Sequence[Task], workers: Workers) -> None:
    """Do all tasks and wait for them.

    Args:
        tasks: In any order.
        workers: Threads.

    Raises:
        Exception: What a task raised; others may have been left out.
    """
    left = sum(task.work for task in tasks)
    if left < WORTH_WAKING:
        _all(tasks)
        return
    ordered = deque(sorted(tasks, key=lambda task: -task.work))
    while ordered and (left < WORTH_WAKING or workers.count * ordered[0].work > _MORE * left):
        first = ordered.popleft()
        left -= first.work
        first.do()
    if ordered:
        tiny = [task for task in ordered if task.work < _TINY]
        large = [task.do for task in ordered if task.work >= _TINY]
        workers.run([*large, partial(_all, tiny)])


def _all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task.do()

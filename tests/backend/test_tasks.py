"""Tasks are all done; those that outweigh the rest alone, the others side by side."""

import threading

import pytest

from kfac_engine.backend.threads import WORTH_WAKING, Task, Workers, run_parallel

LARGE = 3 * WORTH_WAKING
EVEN = WORTH_WAKING


class Log:
    """Who did what, and how many parts a task could have divided itself into."""

    def __init__(self, workers):
        self.workers, self.done, self.parts = workers, [], {}

    def task(self, name, work):
        return Task(work, lambda: self.do(name))

    def do(self, name):
        self.parts[name] = self.workers.free
        self.done.append(name)


WEIGHTS = {
    "nothing": [],
    "few": [1.0, 2.0, 3.0],
    "even": [EVEN] * 5,
    "one_outweighs": [EVEN, LARGE, EVEN],
    "all_outweigh": [LARGE, LARGE / 4, LARGE / 20],
    "tiny_ones_beside": [EVEN, EVEN, *[1.0] * 20],
    "without_work": [0.0, 0.0],
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_all_tasks_run_once(weights, count):
    log = Log(Workers(count))
    run_parallel([log.task(i, weight) for i, weight in enumerate(weights)], log.workers)
    assert sorted(log.done) == list(range(len(weights)))


def test_dominant_task_runs_first_with_all_threads():
    log = Log(Workers(2))
    weights = {"small": EVEN, "large": LARGE, "other": EVEN}
    run_parallel([log.task(name, weight) for name, weight in weights.items()], log.workers)
    assert log.done[0] == "large"
    assert log.parts == {"large": 2, "small": 1, "other": 1}


def test_equal_tasks_run_in_parallel():
    log = Log(Workers(3))
    run_parallel([log.task(i, LARGE / 3) for i in range(3)], log.workers)
    assert set(log.parts.values()) == {1}


def test_small_tasks_run_in_calling_thread():
    workers, seen = Workers(2), set()
    run_parallel([Task(1.0, lambda: seen.add(threading.get_ident()))] * 4, workers)
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize("weight", [1.0, EVEN, LARGE])
def test_exception_of_task_is_raised(weight):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_parallel([Task(weight, fail), Task(EVEN, lambda: None)], Workers(2))

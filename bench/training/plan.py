"""Which runs the suite makes: rates are tried with the first seed, the best one has all seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from kfac_engine.bench.training.methods import parse_method
from kfac_engine.bench.training.run import Outcome, Run
from kfac_engine.bench.training.tasks import TASKS, find_task

# Task to method to the CPU seconds of its budgets.
BUDGETS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "autoencoder": {
        "kfac": (4, 8, 15), "adam": (30, 120), "sgd": (30,), "muon": (15,), "soap": (15,),
        "torch-adam": (30,),
    },
    "autoencoder@128": {"kfac": (7.5,), "adam": (30,)},
    "autoencoder@1024": {"kfac": (7.5,), "adam": (30,)},
    "resnet": {
        "kfac": (15, 30), "adam": (15, 30), "sgd": (30,), "muon": (15,), "soap": (15,),
        "torch-adam": (30,),
    },
    "transformer": {
        "kfac": (15, 30), "adam": (15, 30), "sgd": (30,), "muon": (15,), "soap": (15,),
        "torch-adam": (30,),
    },
    "mlp": {
        "kfac": (4, 5, 8, 16), "adam": (16,), "sgd": (16,), "muon": (5,), "soap": (5,),
        "torch-adam": (16,),
    },
    "lenet": {
        "kfac": (5, 6, 12), "adam": (12,), "sgd": (12,), "muon": (6,), "soap": (6,),
        "torch-adam": (12,),
    },
    "autoencoder-relu": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
    "digits": {"kfac": (1, 2), "adam": (2,), "sgd": (2,), "muon": (2,)},
    "cnn": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
    "restorer": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
    "function": {"kfac": (2, 4), "adam": (4,), "sgd": (4,), "muon": (4,)},
    "recurrent": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of a method on a task within a budget.

    Attributes:
        task: Name of the task.
        method: Name of the method, with its options.
        seconds: CPU seconds of the budget.
    """

    task: str
    method: str
    seconds: float

    def candidates(self, seed: int) -> list[Run]:
        """Return a run for each learning rate and schedule that is tried."""
        method, _ = parse_method(self.method)
        return [
            Run(self.task, self.method, rate, schedule, seed, self.seconds)
            for schedule in method.schedules
            for rate in method.rates_of(self.task)
        ]

    def best(self, outcomes: Mapping[Run, Outcome], seed: int) -> Run | None:
        """Return the candidate with the lowest validation loss.

        Args:
            outcomes: Results so far.
            seed: The seed of the candidates.

        Returns:
            The candidate, one of those that did not die if there are any; None if a candidate has
            no result.
        """
        candidates = self.candidates(seed)
        if any(run not in outcomes for run in candidates):
            return None
        alive = [run for run in candidates if not outcomes[run].died]
        return min(alive or candidates, key=lambda run: outcomes[run].lowest)

    def chosen(self, outcomes: Mapping[Run, Outcome], seeds: Sequence[int]) -> list[Run]:
        """Return the runs of the best candidate with all seeds; none if it is not known."""
        best = self.best(outcomes, seeds[0])
        return [] if best is None else [replace(best, seed=seed) for seed in seeds]


def groups(
    tasks: Sequence[str], methods: Sequence[str], seconds: Sequence[float] = ()
) -> list[Group]:
    """Return the groups of a suite.

    Args:
        tasks: Names of tasks.
        methods: Names of methods, with options.
        seconds: Budgets in place of those of ``BUDGETS``.

    Returns:
        The groups. A task with another batch size than those of ``BUDGETS`` has the budgets of its
        usual size.
    """
    chosen = []
    for task in tasks:
        find_task(task)
        budgets = BUDGETS.get(task) or BUDGETS[task.partition("@")[0]]
        for method in methods:
            parse_method(method)
            chosen_budgets = seconds or budgets.get(method.partition(":")[0], ())
            chosen += [Group(task, method, budget) for budget in chosen_budgets]
    return chosen


def all_tasks() -> list[str]:
    """Return the tasks with budgets, in order."""
    assert {name.partition("@")[0] for name in BUDGETS} == set(TASKS)
    return list(BUDGETS)


def tuning_runs(chosen: Sequence[Group], seed: int) -> list[Run]:
    """Return the runs that tune all groups; the groups take turns."""
    return _interleaved([group.candidates(seed) for group in chosen])


def final_runs(
    chosen: Sequence[Group], outcomes: Mapping[Run, Outcome], seeds: Sequence[int]
) -> list[Run]:
    """Return the runs of the best candidates with all seeds; the groups take turns."""
    return _interleaved([group.chosen(outcomes, seeds) for group in chosen])


def _interleaved(lists: Sequence[Sequence[Run]]) -> list[Run]:
    """Return the first entries of all lists, then the second ones, and so on."""
    turns: Iterator[tuple[Run | None, ...]] = zip_longest(*lists)
    return [run for run in chain.from_iterable(turns) if run is not None]

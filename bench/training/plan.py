"""Which runs the suite makes: rates are tried with the first seed, the best one has all seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from kfac_engine.bench.training.methods import TAIL, parse_method
from kfac_engine.bench.training.run import Outcome, Point, Run
from kfac_engine.bench.training.tasks import LONG, MODERN, REPEATED, TABULAR, TASKS, find_task


@dataclass(frozen=True, slots=True)
class Collection:
    """Tasks that run together; the loss after the last step counts, not the lowest one.

    A run takes CPU seconds; further runs take ``steps``, or 0 for no further runs. ``settings`` has
    the rates that are tried for each variant of a method, with the schedule ``"tail"``.
    """

    tasks: tuple[str, ...]
    seconds: float
    steps: int
    settings: Mapping[str, Mapping[str, tuple[float | None, ...]]] = field(repr=False)


_MUON = (0.01, 0.02, 0.04)
COLLECTIONS: Mapping[str, Collection] = {
    "tables": Collection(
        tuple(TABULAR), 0.5, 300,
        {"kfac": {"kfac": (None,)}, "adam": {"adam": (0.001, 0.003, 0.01)}}),
    "modern": Collection(
        tuple(MODERN), 6, 0,
        {
            "kfac": {"kfac": (None,)},
            "adam": {"adam": (0.0003, 0.001, 0.003, 0.01)},
            "muon": {"muon": _MUON, "muon:adam_rate=0.001": _MUON},
        },
    ),
    "long": Collection(
        tuple(LONG), 120, 0,
        {
            "kfac": {"kfac": (None,)},
            "adam": {"adam": (0.0003, 0.001, 0.003, 0.01)},
            "muon": {"muon": _MUON},
            "ema-nesterov": {"ema-nesterov": _MUON, "ema-nesterov:distance=0.3": _MUON},
            "soap": {"soap": (0.001, 0.003, 0.01)},
        },
    ),
    "exact": Collection(
        tuple(REPEATED), 6, 0,
        {
            "kfac": {"kfac": (None,)},
            "quadratic": {"quadratic": (None,)},
            "adam": {"adam": (0.001, 0.003, 0.01)},
            "muon": {"muon": (0.02,)},
            "lbfgs": {"lbfgs": (None,)},
        },
    ),
}  # fmt: skip
_COLLECTION_OF = {task: c for c in COLLECTIONS.values() for task in c.tasks}

# Task to method to the CPU seconds of its budgets.
BUDGETS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "autoencoder": {
        "kfac": (4, 8, 15), "adam": (30, 120), "sgd": (30,), "muon": (15,)
    },
    "autoencoder@128": {"kfac": (7.5,), "adam": (30,)},
    "autoencoder@1024": {"kfac": (7.5,), "adam": (30,)},
    "resnet": {
        "kfac": (15, 30), "adam": (15, 30), "sgd": (30,), "muon": (15,)
    },
    "transformer": {
        "kfac": (15, 30), "adam": (15, 30), "sgd": (30,), "muon": (15,)
    },
    "mlp": {
        "kfac": (4, 5, 8, 16), "adam": (16,), "sgd": (16,), "muon": (5,)
    },
    "lenet": {
        "kfac": (5, 6, 12), "adam": (12,), "sgd": (12,), "muon": (6,)
    },
    "digits": {"kfac": (1, 2), "adam": (2,), "sgd": (2,), "muon": (2,)},
    "cnn": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
    "restorer": {"kfac": (6, 12), "adam": (12,), "sgd": (12,), "muon": (12,)},
    "function": {"kfac": (2, 4), "adam": (4,), "sgd": (4,), "muon": (4,)},
    **{task: dict.fromkeys(c.settings, (c.seconds,)) for task, c in _COLLECTION_OF.items()},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of a method on a task within CPU seconds, or within ``budget_steps`` if not 0."""

    task: str
    method: str
    seconds: float
    budget_steps: int = 0

    def candidates(self, seed: int) -> list[Run]:
        """Return a run for each learning rate, schedule and variant that is tried."""
        method, _ = parse_method(self.method)
        collection, schedules = self._collection, method.schedules
        variants = {self.method: method.rates_of(self.task)}
        if collection is not None and self.method in collection.settings:
            variants, schedules = dict(collection.settings[self.method]), (TAIL,)
        return [
            Run(self.task, variant, rate, schedule, seed, self.seconds, self.budget_steps)
            for schedule in schedules
            for variant, rates in variants.items()
            for rate in rates
        ]

    @property
    def _collection(self) -> Collection | None:
        return _COLLECTION_OF.get(self.task.partition("@")[0])

    def counted(self, outcome: Outcome) -> Point:
        """Return the evaluation of a run that counts: the lowest, or the last of a collection."""
        if self._collection is not None:
            return outcome.curve[-1]
        return min(outcome.curve, key=lambda point: point.loss)

    def best(self, outcomes: Mapping[Run, Outcome], seed: int) -> Run | None:
        """Return the candidate with the lowest validation loss that counts.

        Candidates that died count only if all have. The result is None if a candidate has no
        result.
        """
        candidates = self.candidates(seed)
        if any(run not in outcomes for run in candidates):
            return None
        alive = [run for run in candidates if not outcomes[run].died]
        return min(alive or candidates, key=lambda run: self.counted(outcomes[run]).loss)

    def chosen(self, outcomes: Mapping[Run, Outcome], seeds: Sequence[int]) -> list[Run]:
        """Return the runs of the best candidate with all seeds; none if it is not known."""
        best = self.best(outcomes, seeds[0])
        return [] if best is None else [replace(best, seed=seed) for seed in seeds]


def groups(
    tasks: Sequence[str], methods: Sequence[str], seconds: Sequence[float] = ()
) -> list[Group]:
    """Return the groups of a suite, with ``seconds`` in place of the budgets of ``BUDGETS``.

    A task with another batch size than those of ``BUDGETS`` has the budgets of its usual size.
    """
    chosen = []
    expanded = (COLLECTIONS[name].tasks if name in COLLECTIONS else (name,) for name in tasks)
    for task in dict.fromkeys(chain.from_iterable(expanded)):
        find_task(task)
        budgets = BUDGETS.get(task) or BUDGETS[task.partition("@")[0]]
        for method in methods:
            parse_method(method)
            chosen_budgets = seconds or budgets.get(method.partition(":")[0], ())
            chosen += [Group(task, method, budget) for budget in chosen_budgets]
            collection = _COLLECTION_OF.get(task.partition("@")[0])
            if collection is not None and collection.steps and chosen_budgets and not seconds:
                chosen.append(Group(task, method, 0.0, collection.steps))
    return chosen


def all_tasks() -> list[str]:
    """Return the tasks with budgets that belong to no collection, in order."""
    assert {name.partition("@")[0] for name in BUDGETS} == set(TASKS)
    return [name for name in BUDGETS if name not in _COLLECTION_OF]


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

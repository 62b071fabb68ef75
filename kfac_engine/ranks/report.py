"""The cost of one rank under each distribution, and the distribution to choose."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kfac_engine.ranks.cost import DISTRIBUTIONS, Distribution, RankCost, rank_cost
from kfac_engine.ranks.machines import MACHINES, Machine, StepPrediction, predict_step
from kfac_engine.ranks.sizes import ModelSize, Periods

# Predictions that differ by less are equal.
_LEAST_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class RanksReport:
    """The cost of one rank.

    Attributes:
        ranks: Number of ranks.
        periods: Periods of refreshes and of updates.
        costs: Distribution to traffic, memory and work of one rank; ``"sgd"`` is plain SGD.
        steps: Machine to the predicted step of each distribution.
        advice: The distribution to choose, and why, in one sentence.
    """

    ranks: int
    periods: Periods
    costs: Mapping[Distribution, RankCost]
    steps: Mapping[str, Mapping[Distribution, StepPrediction]]
    advice: str


def ranks_report(
    model: ModelSize,
    ranks: int,
    periods: Periods | None = None,
    machines: Iterable[Machine] = MACHINES,
) -> RanksReport:
    """Return the cost of one rank under each distribution.

    Args:
        model: Sizes of the model.
        ranks: Number of ranks.
        periods: Periods of refreshes and of updates; by default those of ``Schedule``.
        machines: Clusters to predict a step for.

    Returns:
        The report.

    Raises:
        InputError: The number of ranks is not a positive whole number.
    """
    periods = periods or Periods()
    costs = {name: rank_cost(model, name, ranks, periods) for name in DISTRIBUTIONS}
    steps = {
        machine.name: {
            name: predict_step(model, cost, machine, periods) for name, cost in costs.items()
        }
        for machine in machines
    }
    return RanksReport(ranks, periods, costs, steps, _advice(model, costs, steps))


def _advice(
    model: ModelSize,
    costs: Mapping[Distribution, RankCost],
    steps: Mapping[str, Mapping[Distribution, StepPrediction]],
) -> str:
    """Return the distribution to choose, and why."""
    replicate, shard = costs["replicate"], costs["shard"]
    if shard.ranks == 1:
        return "one rank has nothing to divide: both distributions are a single process."
    seconds = {name: (t["replicate"].total, t["shard"].total) for name, t in steps.items()}
    faster = _gains((name, 1 - b / a) for name, (a, b) in seconds.items())
    slower = _gains((name, 1 - a / b) for name, (a, b) in seconds.items())
    saved = 1 - shard.memory / max(replicate.memory, 1)
    memory = f"a rank stores {100 * saved:.0f} % less curvature"
    if not (faster or slower):
        return (
            f'choose "replicate", the default: predicted steps differ by less than '
            f'{100 * _LEAST_GAIN:.0f} %; with "shard" {memory}.'
        )
    both = bool(faster and slower)
    clauses = []
    if faster:
        clauses.append(
            f'choose "shard"{_on(faster, both)}: a step is predicted to take {_range(faster)} '
            f'less time than with "replicate", because a rank preconditions only the layers that '
            f"it owns, and {memory}"
        )
    if slower:
        clauses.append(
            f'choose "replicate"{_on(slower, both)}: a step is predicted to take '
            f'{_range(slower)} less time than with "shard", because one rank owns '
            f"{_largest_share(model, shard)}"
        )
    return "; ".join(clauses) + "."


def _gains(gains: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the gains that are large enough, by machine."""
    return {name: gain for name, gain in gains if gain >= _LEAST_GAIN}


def _range(gains: Mapping[str, float]) -> str:
    """Return the least and the largest gain."""
    ends = [f"{100 * gain:.0f}" for gain in (min(gains.values()), max(gains.values()))]
    return " to ".join(dict.fromkeys(ends)) + " %"


def _on(machines: Iterable[str], both: bool) -> str:
    """Return the machines of a clause, if another clause has others."""
    *first, last = machines
    names = f"{', '.join(first)} and {last}" if first else last
    return f" on {names}" if both else ""


def _largest_share(model: ModelSize, shard: RankCost) -> str:
    """Return the share of parameters of the rank that owns most, and its largest block."""
    sums, largest = Counter[int](), dict[int, tuple[float, str]]()
    for name, parts in shard.block_owners.items():
        for part in parts:
            numbers = model.blocks[name].numbers * (part.stop - part.start) // parts[-1].stop
            sums[part.owner] += numbers
            largest[part.owner] = max(largest.get(part.owner, (0, "")), (numbers, name))
    ((owner, most),) = sums.most_common(1)
    return f"{100 * most / sums.total():.0f} % of the parameters, among them {largest[owner][1]}"

"""Measure one job: check the result of every contender, then time the contenders in turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.contenders import CONTENDERS, DEFINITION, OURS
from kfac_engine.bench.jobs import Job
from kfac_engine.bench.processes import Process
from kfac_engine.bench.report import Spread, spread
from kfac_engine.bench.resource_usage import Usage
from kfac_engine.bench.roofline import Roofline
from kfac_engine.errors import BackendError

# The number of rounds follows from the duration of one: seconds for all rounds, fewest and most
# rounds, and the duration of a turn beyond which a contender has one round.
_SECONDS, _FEWEST, _MOST, _ENDLESS = 8.0, 3, 7, 20.0
# A round repeats a fast job for ``_BLOCK`` seconds, because the clock of other processes counts in
# hundredths of a second. Slow jobs need no run that warms the caches.
_BLOCK, _MOST_RUNS, _SLOW, _VERY_SLOW = 0.05, 100, 0.25, 5.0
# The threads of the previous contender spin for up to a quarter of a second.
_SETTLING = 0.3
# Share of the wall time above which the CPU time of other processes disturbs the times.
DISTURBING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """Measurement of one contender on one job."""

    case: str  # name of the job
    contender: str  # name of the contender
    seconds: Spread  # wall times; for steps, the times of each kind, weighted by its frequency
    # Mean CPU time of all threads. Other processes hardly change it for one thread; several threads
    # may wait by spinning, which counts.
    cpu_seconds: float
    ratio: float  # median of this package divided by the median of the contender
    # Part of the result to its largest difference from the definition relative to the largest
    # entry.
    errors: Mapping[str, float]
    rate: float  # multiplications of the definition a second; 0 if their number is undefined
    # Least time of the job divided by its time; more than 1 for algorithms with fewer
    # multiplications than the definition. 0 if their number is undefined.
    fraction: float
    # Largest increase of the memory during a run. Mostly that of the first run, which may compile
    # and allocate.
    peak_bytes: int
    others: float  # CPU time of other processes while this ran, as a share of the wall time
    switches: float  # number of involuntary context switches of a run
    runs: int  # number of timed runs

    @property
    def disturbed(self) -> bool:
        """Whether other processes ran during the measurement."""
        return self.others > DISTURBING_SHARE


def measure(
    job: Job, processes: Mapping[str, Process], ceiling: Roofline, repeats: int | None = None
) -> list[Row]:
    """Check the results of a job, and return a row for each timed contender.

    Contenders without this job are ignored. ``repeats`` is the number of rounds; None for as many
    as fit into the time. ``BackendError`` is raised if the result of the package differs from the
    definition.
    """
    known = {n: p for n, p in processes.items() if CONTENDERS[n].can_check(job)}
    first = {name: process.prepare(job) for name, process in known.items()}
    errors = _errors(job, {name: result for name, (result, _) in first.items()})
    timed = {n: p for n, p in known.items() if CONTENDERS[n].can_do(job)}
    usages = _in_turn(job, timed, repeats, {name: usage for name, (_, usage) in first.items()})
    times = {name: _times(job, usage) for name, usage in usages.items()}
    peaks = {n: max(u.peak_bytes for u in (first[n][1], *usages[n])) for n in timed}
    return [
        _row(job, name, times, errors[name], usages[name], ceiling, peaks[name]) for name in timed
    ]


def _errors(job: Job, results: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, float]]:
    """Return the differences from the definition by contender and part.

    ``BackendError`` is raised if the difference of the package exceeds the tolerance.
    """
    truth = results[DEFINITION]
    errors = {
        name: {part: _error(value, truth[part]) for part, value in result.items()}
        for name, result in results.items()
    }
    for part, error in errors.get(OURS, {}).items():
        if not error <= job.tolerances.get(part, job.tolerance):
            raise BackendError(
                f"the {part} of '{job.name}' is off by {error:.1e} of its largest entry, more than "
                f"{job.tolerances.get(part, job.tolerance)}; its time would mean nothing."
            )
    return errors


def _error(result: Array, truth: Array) -> float:
    return float(np.abs(result - truth).max() / np.abs(truth).max())


def _in_turn(
    job: Job, processes: Mapping[str, Process], repeats: int | None, checked: Mapping[str, Usage]
) -> dict[str, list[Usage]]:
    """Run rounds in which contenders take turns, so that other processes disturb all alike.

    ``checked`` has the runs that computed the checked results. A contender whose run took longer
    than ``_ENDLESS`` has no other run.
    """
    turn = len(job.turn)
    endless = {n: [u] for n, u in checked.items() if n in processes and sum(u.times) > _ENDLESS}
    processes = {n: p for n, p in processes.items() if n not in endless or turn > 1}
    pilots = {n: p.run(turn, warm=0, settle=_SETTLING) for n, p in processes.items()}
    seconds = {name: sum(usage.times) for name, usage in pilots.items()}
    # A slow first turn is not slow because of cold caches: it counts.
    counted = {name: seconds[name] > _SLOW for name in pilots}
    usages = {name: [pilot] if counted[name] else [] for name, pilot in pilots.items()}
    fitting = _fitting([s for s in seconds.values() if s <= _ENDLESS])
    rounds = {n: repeats or (fitting if s <= _ENDLESS else 1) for n, s in seconds.items()}
    for number in range(max(rounds.values(), default=0)):
        for name, process in processes.items():
            if not len(usages[name]) <= number < rounds[name]:
                continue
            turns = 1 if counted[name] else min(ceil(_BLOCK / seconds[name]), _MOST_RUNS)
            warm = 0 if counted[name] else turn
            usages[name].append(process.run(turns * turn, warm=warm, settle=_SETTLING))
    return endless | usages


def _fitting(seconds: Sequence[float]) -> int:
    """Return the number of rounds from the duration of each contender's turn."""
    if not seconds:
        return 1
    one = sum(_SETTLING + max(_BLOCK, s if s > _SLOW else 2 * s) for s in seconds)
    fewest = 2 if max(seconds) > _VERY_SLOW else _FEWEST
    return min(max(int(_SECONDS / one), fewest), _MOST)


def _times(job: Job, usages: Sequence[Usage]) -> Spread:
    """Return the times of a run, averaged over the kinds of runs by their frequency."""
    spreads = {s: spread(times) for s, times in _sorted(job, [u.times for u in usages]).items()}
    return Spread(
        median=sum(job.shares[sort] * spread.median for sort, spread in spreads.items()),
        low=sum(job.shares[sort] * spread.low for sort, spread in spreads.items()),
        high=sum(job.shares[sort] * spread.high for sort, spread in spreads.items()),
    )


def _sorted(job: Job, turns: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return the times of runs by the kind of the run."""
    by_sort: dict[str, list[float]] = {}
    for times in turns:
        for number, time in enumerate(times):
            by_sort.setdefault(job.turn[number % len(job.turn)], []).append(time)
    return by_sort


def _row(
    job: Job,
    name: str,
    times: Mapping[str, Spread],
    errors: Mapping[str, float],
    usages: Sequence[Usage],
    ceiling: Roofline,
    peak_bytes: int,
) -> Row:
    runs, wall = sum(len(u.times) for u in usages), sum(sum(u.times) for u in usages)
    seconds, cpu = times[name], _sorted(job, [u.cpu_times for u in usages])
    return Row(
        case=job.name,
        contender=name,
        seconds=seconds,
        cpu_seconds=sum(job.shares[sort] * mean(seconds) for sort, seconds in cpu.items()),
        ratio=times[OURS].median / seconds.median,
        errors=errors,
        rate=job.multiplications / seconds.median,
        fraction=ceiling.least_seconds(job.multiplications, job.traffic) / seconds.median,
        peak_bytes=peak_bytes,
        others=max(0.0, sum(usage.others_seconds for usage in usages)) / wall,
        switches=sum(usage.switches for usage in usages) / runs,
        runs=runs,
    )

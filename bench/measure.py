"""One job: every contender's result is checked, then they are timed in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.contenders import CONTENDERS, DEFINITION, OURS
from kfac_engine.bench.jobs import Job
from kfac_engine.bench.processes import Process
from kfac_engine.bench.resource_usage import Usage
from kfac_engine.bench.roofline import Ceiling
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.errors import BackendError

# Rounds follow from the time that one takes: enough for a median, not for an afternoon. Who needs
# half a minute for a turn has one.
_SECONDS, _FEWEST, _MOST, _ENDLESS = 8.0, 3, 7, 30.0
# A round runs quick jobs so often that the clock which tells what others ran, in hundredths of a
# second, has something to say; slow ones need no run that warms the caches.
_BLOCK, _MOST_RUNS, _SLOW, _VERY_SLOW = 0.05, 100, 0.25, 5.0
# Threads of the contender that came before spin while they wait for work, for up to a quarter of a
# second.
_SETTLING = 0.3
# Of one core for each core: above this, what others ran is felt in the times.
DISTURBING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one contender and one job.

    Attributes:
        case: Name of the job.
        contender: Who.
        seconds: Wall times; of steps, those of each sort, weighted as they come in use.
        cpu_seconds: Mean time on processors, all threads together: what remains fair where other
            processes ran, for one thread; several wait by spinning, which counts.
        ratio: The median of ours divided by this contender's: below 1 where ours is faster.
        errors: Part of the result to its largest difference from the definition relative to the
            largest entry.
        rate: Multiplications of the definition a second; 0 if nobody counts them.
        fraction: Of the machine's ceiling that this is, that of products or of copies, whichever is
            nearer; more than 1 for who needs fewer multiplications. 0 if nobody counts them.
        peak_bytes: Memory that a run takes at most beyond what it starts with: mostly the first,
            which may compile, and may keep what later ones need.
        others: CPU time of other processes while this ran, as a share of the wall time.
        switches: How often a run had to yield a core.
        runs: How many were timed.
    """

    case: str
    contender: str
    seconds: Spread
    cpu_seconds: float
    ratio: float
    errors: Mapping[str, float]
    rate: float
    fraction: float
    peak_bytes: int
    others: float
    switches: float
    runs: int

    @property
    def disturbed(self) -> bool:
        """Whether other processes ran while this was timed."""
        return self.others > DISTURBING_SHARE


def measure(
    job: Job,
    processes: Mapping[str, Process],
    ceiling: Ceiling,
    repeats: int | None = None,
) -> list[Row]:
    """Check the results of a job and time it.

    Args:
        job: What to do.
        processes: Contenders, the definition among them; those that cannot do it are passed over.
        ceiling: Of the machine.
        repeats: Rounds, in place of as many as fit.

    Returns:
        A row for each that is timed.

    Raises:
        BackendError: Our result is not that of the definition.
    """
    known = {n: p for n, p in processes.items() if CONTENDERS[n].can_check(job)}
    first = {name: process.prepare(job) for name, process in known.items()}
    errors = _errors(job, {name: result for name, (result, _) in first.items()})
    timed = {n: p for n, p in known.items() if CONTENDERS[n].can_do(job)}
    usages = _in_turn(job, timed, repeats)
    times = {name: _times(job, found) for name, found in usages.items()}
    peaks = {n: max(u.peak_bytes for u in (first[n][1], *usages[n])) for n in timed}
    return [
        _row(job, name, times, errors[name], usages[name], ceiling, peaks[name]) for name in timed
    ]


def _errors(job: Job, results: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, float]]:
    """Differences from the definition, by contender and part.

    Raises:
        BackendError: Ours is off.
    """
    truth = results[DEFINITION]
    errors = {
        name: {part: _error(found, truth[part]) for part, found in result.items()}
        for name, result in results.items()
    }
    for part, error in errors.get(OURS, {}).items():
        if not error <= job.tolerances.get(part, job.tolerance):
            raise BackendError(
                f"the {part} of '{job.name}' is off by {error:.1e} of its largest entry, more than "
                f"{job.tolerances.get(part, job.tolerance)}; its time would mean nothing."
            )
    return errors


def _error(found: Array, truth: Array) -> float:
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def _in_turn(
    job: Job, processes: Mapping[str, Process], repeats: int | None
) -> dict[str, list[Usage]]:
    """Rounds of contenders that take turns, so that a busy moment hits all of them."""
    turn = len(job.turn)
    pilots = {n: p.run(turn, warm=0, settle=_SETTLING) for n, p in processes.items()}
    seconds = {name: sum(usage.times) for name, usage in pilots.items()}
    # What is slow the first time is not so for want of caches: it counts.
    counted = {name: seconds[name] > _SLOW for name in pilots}
    usages = {name: [pilot] if counted[name] else [] for name, pilot in pilots.items()}
    fitting = _fitting([s for s in seconds.values() if s <= _ENDLESS])
    rounds = {n: repeats or (fitting if s <= _ENDLESS else 1) for n, s in seconds.items()}
    for number in range(max(rounds.values())):
        for name, process in processes.items():
            if not len(usages[name]) <= number < rounds[name]:
                continue
            turns = 1 if counted[name] else min(ceil(_BLOCK / seconds[name]), _MOST_RUNS)
            warm = 0 if counted[name] else turn
            usages[name].append(process.run(turns * turn, warm=warm, settle=_SETTLING))
    return usages


def _fitting(seconds: Sequence[float]) -> int:
    """Rounds, from the time that each contender's turn takes."""
    if not seconds:
        return 1
    one = sum(_SETTLING + max(_BLOCK, s if s > _SLOW else 2 * s) for s in seconds)
    fewest = 2 if max(seconds) > _VERY_SLOW else _FEWEST
    return min(max(int(_SECONDS / one), fewest), _MOST)


def _times(job: Job, usages: Sequence[Usage]) -> Spread:
    """Of a run as it is on average in use."""
    spreads = {s: spread(times) for s, times in _sorted(job, [u.times for u in usages]).items()}
    return Spread(
        median=sum(job.shares[sort] * found.median for sort, found in spreads.items()),
        low=sum(job.shares[sort] * found.low for sort, found in spreads.items()),
        high=sum(job.shares[sort] * found.high for sort, found in spreads.items()),
    )


def _sorted(job: Job, turns: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """What some turns took, by what each run had to do."""
    found: dict[str, list[float]] = {}
    for times in turns:
        for number, time in enumerate(times):
            found.setdefault(job.turn[number % len(job.turn)], []).append(time)
    return found


def _row(
    job: Job,
    name: str,
    times: Mapping[str, Spread],
    errors: Mapping[str, float],
    usages: Sequence[Usage],
    ceiling: Ceiling,
    peak_bytes: int,
) -> Row:
    runs, wall = sum(len(u.times) for u in usages), sum(sum(u.times) for u in usages)
    seconds, cpu = times[name], _sorted(job, [u.cpu_times for u in usages])
    return Row(
        case=job.name,
        contender=name,
        seconds=seconds,
        cpu_seconds=sum(job.shares[sort] * mean(found) for sort, found in cpu.items()),
        ratio=times[OURS].median / seconds.median,
        errors=errors,
        rate=job.multiplications / seconds.median,
        fraction=ceiling.least_seconds(job.multiplications, job.traffic) / seconds.median,
        peak_bytes=peak_bytes,
        others=max(0.0, sum(usage.others_seconds for usage in usages)) / wall,
        switches=sum(usage.switches for usage in usages) / runs,
        runs=runs,
    )

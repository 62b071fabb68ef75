"""One job: every contender's result is checked, then they are timed in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.ceiling import Ceiling
from kfac_engine.bench.contenders import CONTENDERS, DEFINITION, OURS, Process
from kfac_engine.bench.jobs import Job
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.bench.usage import Usage
from kfac_engine.errors import BackendError

# Rounds follow from the slowest contender's time: enough for a median, not for an afternoon.
_SECONDS, _FEWEST, _MOST = 2.0, 3, 15
# Of one core for each core: above this, what others ran is felt in the times.
DISTURBING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one contender and one job.

    Attributes:
        case: Name of the job.
        contender: Who.
        seconds: Wall times.
        cpu_seconds: Median of the time on processors, all threads together: what remains fair where
            other processes ran, for one thread; several wait by spinning, which counts.
        ratio: The median of ours divided by this contender's: below 1 where ours is faster.
        error: Largest difference from the definition relative to the largest entry; 0 for the
            definition itself, and for who comes first where there is none.
        rate: Multiplications of the definition a second; 0 if nobody counts them.
        fraction: Of the machine's ceiling that this is; more than 1 for who needs fewer.
        peak_bytes: Memory that a run takes beyond what it starts with.
        others: CPU time of other processes while this ran, as a share of the wall time.
        switches: How often a run had to yield a core.
    """

    case: str
    contender: str
    seconds: Spread
    cpu_seconds: float
    ratio: float
    error: float
    rate: float
    fraction: float
    peak_bytes: int
    others: float
    switches: float

    @property
    def disturbed(self) -> bool:
        """Whether other processes ran while this was timed."""
        return self.others > DISTURBING_SHARE


def measure(job: Job, processes: Mapping[str, Process], ceiling: Ceiling) -> list[Row]:
    """Check the results of a job and time it.

    Args:
        job: What to do.
        processes: Contenders; those that cannot do it are passed over.
        ceiling: Of the machine.

    Returns:
        A row for each that can.

    Raises:
        BackendError: Our result is not that of the definition.
    """
    able = {name: p for name, p in processes.items() if CONTENDERS[name].can_do(job)}
    errors = _errors(job, {name: process.prepare(job) for name, process in able.items()})
    usages = _in_turn(able)
    times = {n: spread([u.seconds / job.cycle for u in found]) for n, found in usages.items()}
    return [
        _row(job, name, times, errors[name], usages[name], ceiling.multiplications) for name in able
    ]


def _errors(job: Job, results: Mapping[str, Array]) -> dict[str, float]:
    """Differences from the definition; from whoever is first but us where there is none.

    Raises:
        BackendError: Ours is off.
    """
    others = [name for name in results if name != OURS]
    truth = results[others[0] if others else OURS]
    largest = np.abs(truth).max()
    errors = {n: float(np.abs(found - truth).max() / largest) for n, found in results.items()}
    if not errors.get(OURS, 0.0) <= job.tolerance:
        raise BackendError(
            f"'{job.name}' is off by {errors[OURS]:.1e} of its largest entry, more than "
            f"{job.tolerance}; its time would mean nothing."
        )
    return errors


def _in_turn(processes: Mapping[str, Process]) -> dict[str, list[Usage]]:
    """Runs of contenders that take turns, so that a busy moment hits all of them."""
    slowest = max(process.run().seconds for process in processes.values())
    rounds = int(min(max(_SECONDS / slowest, _FEWEST), _MOST))
    usages: dict[str, list[Usage]] = {name: [] for name in processes}
    for _ in range(rounds):
        for name, process in processes.items():
            usages[name].append(process.run())
    return usages


def _row(
    job: Job,
    name: str,
    times: Mapping[str, Spread],
    error: float,
    usages: Sequence[Usage],
    ceiling: float,
) -> Row:
    seconds = times[name]
    rate = job.multiplications / seconds.median
    return Row(
        case=job.name,
        contender=name,
        seconds=seconds,
        cpu_seconds=median(usage.cpu_seconds for usage in usages) / job.cycle,
        ratio=times[OURS].median / seconds.median,
        error=error,
        rate=rate,
        fraction=rate / ceiling,
        peak_bytes=int(median(usage.peak_bytes for usage in usages)),
        others=sum(u.others_seconds for u in usages) / sum(u.seconds for u in usages),
        switches=median(usage.switches for usage in usages) / job.cycle,
    )


def chosen(compare: Sequence[str]) -> list[str]:
    """Names of contenders: the definition, ours, and peers that are installed.

    Args:
        compare: Names of peers.

    Returns:
        All names.

    Raises:
        BackendError: One is not installed.
    """
    for name, contender in {name: CONTENDERS[name] for name in compare}.items():
        if contender.missing:
            raise BackendError(
                f"cannot compare with {name}: {', '.join(contender.missing)} is not "
                "installed here; install it, or leave it out of --compare."
            )
    return [DEFINITION, OURS, *dict.fromkeys(compare)]

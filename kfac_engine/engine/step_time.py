"""Time of a step on this machine, measured on the inputs of the sample run."""

import warnings
from dataclasses import dataclass
from time import perf_counter

from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.memory import MemoryReport
from kfac_engine.engine.refresh_time import RefreshEstimate
from kfac_engine.errors import KfacError
from kfac_engine.system.memory_limits import spelled

# Steps are measured unless their first refresh takes longer, in seconds, or they need more memory:
# of large models, a step takes several times the time and the memory of building the engine.
_LONGEST_REFRESH, _MOST_BYTES = 10.0, 500_000_000
# Steps are repeated up to this number, and within this time in seconds.
_MOST_STEPS, _ENOUGH = 5, 1.0
_NEVER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step that updates all statistics and refreshes no inverse.

    Attributes:
        examples: Number of examples of the batch.
        seconds: The least time of several steps; None if no step was measured.
        reason: Why no step was measured; ``""`` if one was.
    """

    examples: int
    seconds: float | None
    reason: str = ""


def measure_step(
    engine: Engine, examples: int, refresh: RefreshEstimate, memory: MemoryReport
) -> StepTime:
    """Measure steps of an engine, which has other statistics and another schedule afterwards.

    Args:
        engine: The engine.
        examples: Number of examples in a batch.
        refresh: Cost of a refresh; the first step refreshes all inverses.
        memory: Peak memory of a step.

    Returns:
        The time, or the reason why there is none.
    """
    if refresh.seconds > _LONGEST_REFRESH:
        return StepTime(examples, None, "its first refresh takes too long")
    if memory.total > _MOST_BYTES:
        return StepTime(examples, None, f"it needs more than {spelled(_MOST_BYTES)} of memory")
    times: list[float] = []
    try:
        inputs, targets = engine.sample_batch(examples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step(inputs, targets)  # prepares sessions and inverses
            engine.schedule = Schedule(refresh_every=_NEVER)
            while len(times) < _MOST_STEPS and sum(times) < _ENOUGH:
                start = perf_counter()
                engine.step(inputs, targets)
                times.append(perf_counter() - start)
    except KfacError as failure:
        return StepTime(examples, None, str(failure).rstrip("."))
    return StepTime(examples, min(times))

"""The description of a contender: what it computes, and what it needs."""

from dataclasses import dataclass
from importlib.util import find_spec

from kfac_engine.bench.jobs import INFLUENCE, LAPLACE, Job


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation of the jobs, in a module that defines ``OPERATIONS``.

    The table lists the ``operations`` so that no module is imported before it runs. Results of
    ``checks`` serve as the truth; they are too slow to be timed. Packages that it ``needs`` must be
    installed. ``networks`` and ``kinds`` are those of the suite ``step``; empty for all.
    """

    module: str
    operations: frozenset[str]
    checks: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    networks: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def can_do(self, job: Job) -> bool:
        """Whether the contender can be timed on a job."""
        network, kind = job.sizes.get("network"), job.sizes.get("kind")
        has_network = not self.networks or network is None or network in self.networks
        has_kind = not self.kinds or kind is None or kind in self.kinds
        return has_network and has_kind and job.operation in self.operations

    def can_check(self, job: Job) -> bool:
        """Whether the contender computes the result of a job, timed or not."""
        return job.operation in self.checks or self.can_do(job)


# Operations on single factors.
PRIMITIVES = frozenset({"dense", "patches", "depthwise", "inverse", "power", "precondition"})
# Whole training steps.
STEP = frozenset({"step"})
# Uses of curvature.
LAPLACE_USES, INFLUENCE_USES = frozenset(LAPLACE), frozenset(INFLUENCE)

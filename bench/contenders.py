"""The contenders: the package, its definition, and other libraries in a checkout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from kfac_engine.bench.jobs import INFLUENCE, LAPLACE, SELDOM, Job
from kfac_engine.errors import BackendError, InputError
from kfac_engine.registry import Registry


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


# A package of the repository that wheels leave out.
_PEERS = "kfac_engine.bench.peers"
DEFINITION, OURS, OURS_PLAIN = "definition", "ours", "ours-gradient"
_USES = LAPLACE_USES | INFLUENCE_USES
# The contenders that take part in every comparison.
_OWN = {
    DEFINITION: Contender("kfac_engine.bench.definition", PRIMITIVES, checks=STEP | _USES),
    OURS: Contender("kfac_engine.bench.ours", PRIMITIVES | STEP | _USES),
    # The plain gradient, next to the steps in which curvature should add little time.
    OURS_PLAIN: Contender("kfac_engine.bench.ours_gradient", STEP, kinds=frozenset({SELDOM})),
}
ALWAYS = tuple(_OWN)


def peers() -> Mapping[str, Contender]:
    """Return the table of peers, which is empty in an installed package."""
    if find_spec(_PEERS) is None:
        return {}
    table: Mapping[str, Contender] = import_module(_PEERS).PEERS
    return table


CONTENDERS: Mapping[str, Contender] = Registry("contender", {**_OWN, **peers()})
PEERS = tuple(name for name in CONTENDERS if name not in ALWAYS)


def select_contenders(compare: Sequence[str]) -> list[str]:
    """Return the names of the contenders of a run: our own and the requested peers."""
    table = Registry("peer", peers())
    if compare and not table:
        raise InputError(
            f"cannot compare with {', '.join(compare)}: the installed package holds no peers; run "
            "'python -m kfac_engine bench' in a checkout of the repository, or leave out --compare."
        )
    for name, contender in {name: table[name] for name in compare}.items():
        if missing := contender.missing:
            raise BackendError(
                f"cannot compare with {name}: {', '.join(missing)} is not "
                "installed here; install it, or leave it out of --compare."
            )
    return list(dict.fromkeys([*ALWAYS, *compare]))

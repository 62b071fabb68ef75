"""The contenders: the package, its definition, and other libraries in a checkout."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from kfac_engine.bench.jobs import INFLUENCE_USES, LAPLACE_USES, PRIMITIVES, SELDOM, STEP, Contender
from kfac_engine.errors import BackendError, InputError
from kfac_engine.registry import Registry

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

"""Other implementations of the jobs, for comparisons in a checkout; wheels leave them out."""

from collections.abc import Mapping

from kfac_engine.bench.jobs import (
    INFLUENCE_USES,
    LAPLACE_USES,
    PLAIN,
    PRIMITIVES,
    STEP,
    STEPS,
    Contender,
)

# Kinds of steps with curvature: the plain gradients of these contenders are those of another.
_CURVATURE = frozenset(STEPS) - {PLAIN}
PEERS: Mapping[str, Contender] = {
    "torch": Contender(f"{__name__}.torch_primitives", PRIMITIVES | STEP, needs=("torch",)),
    "torch-by-example": Contender(
        f"{__name__}.torch_by_example", frozenset({"patches", "step"}), needs=("torch",),
        networks=frozenset({"resnet20"}), kinds=_CURVATURE),
    "jax": Contender(f"{__name__}.jax_primitives", PRIMITIVES, needs=("jax",)),
    "kfac-jax": Contender(f"{__name__}.kfac_jax_step", STEP, needs=("jax", "kfac_jax")),
    "curvlinops": Contender(
        f"{__name__}.curvlinops_step", STEP, needs=("torch", "curvlinops"), kinds=_CURVATURE),
    "laplace-torch": Contender(
        f"{__name__}.laplace_torch", LAPLACE_USES, needs=("torch", "laplace")),
    "kronfluence": Contender(
        f"{__name__}.kronfluence_scores", INFLUENCE_USES, needs=("torch", "kronfluence")),
}  # fmt: skip

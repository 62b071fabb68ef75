"""The jobs that are measured: each is one result, which the contenders compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any, TypeAlias

from kfac_engine.backend.window import Window
from kfac_engine.registry import Registry

# Computes the result of a job: an array or a list of arrays of any library, or several by name. The
# next run may overwrite it.
Run: TypeAlias = Callable[[], Any]

DECAY = 0.95
DAMPING = 1e-3

_FLOAT = 4  # bytes of a float32
# Kind of the runs of a job that are all alike.
_ALL = "all"
# Parts of the result of a step. Gradients are computed in single precision through a whole network,
# natural gradients through inverses too, which magnify directions of low curvature. A ReLU whose
# input rounds to the other side of zero changes the third digit.
GRADIENT, NATURAL = "gradient", "natural gradient"
_STEP_TOLERANCES = {GRADIENT: 5e-3, NATURAL: 2e-2}

# Shapes of the 54 layers of a ResNet-50 as (d_in, d_out, number of layers).
RESNET50 = (
    (147, 64, 1), (64, 64, 1), (576, 64, 3), (64, 256, 4), (256, 64, 2), (256, 128, 1),
    (1152, 128, 4), (128, 512, 4), (256, 512, 1), (512, 128, 3), (512, 256, 1), (2304, 256, 6),
    (256, 1024, 6), (512, 1024, 1), (1024, 256, 5), (1024, 512, 1), (4608, 512, 3),
    (512, 2048, 3), (1024, 2048, 1), (2048, 512, 2), (2049, 1000, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A computation that several contenders run, with its sizes and tolerances."""

    operation: str  # name of the function of every contender
    name: str  # sizes as text, for the table
    sizes: Mapping[str, Any] = field(repr=False)  # arguments of the function
    multiplications: float = 0.0  # multiplications of the definition, for a rate; 0 if undefined
    traffic: float = 0.0  # bytes that every algorithm reads or writes at least once
    # Largest accepted difference from the definition, relative to its largest entry.
    tolerance: float = 2e-5
    # Parts of the result with another tolerance.
    tolerances: Mapping[str, float] = field(default_factory=dict, repr=False)
    # Kind of each run of a contender's turn. It starts with the second run of all; the first run is
    # only checked.
    turn: tuple[str, ...] = (_ALL,)
    # Frequency of each kind in training, as a share of all runs.
    shares: Mapping[str, float] = field(default_factory=lambda: {_ALL: 1.0}, repr=False)


def dense(rows: int, d: int) -> Job:
    """Return the job: second moment of the inputs of a dense layer with bias, averaged in place."""
    name, sizes, side = f"{rows} rows of {d}", {"rows": rows, "d": d}, d + 1.0
    # An average is read and written.
    return Job("dense", name, sizes, rows * side**2, _FLOAT * (rows * d + 2 * side**2))


def patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Job:
    """Return the job: second moment of the patches of a 2-d convolution, averaged in place."""
    count, d = patch_count(shape, kernel, stride, pad), shape[1] * kernel**2
    sizes = {"shape": shape, "kernel": kernel, "stride": stride, "pad": pad}
    name = f"{'×'.join(map(str, shape))}, {kernel}×{kernel}, stride {stride}"
    return Job(
        "patches", name, sizes, count * float(d) ** 2, _FLOAT * (prod(shape) + 2 * float(d) ** 2)
    )


def depthwise(shape: tuple[int, ...], kernel: int, pad: int) -> Job:
    """Return the job: second moments of the patches of each channel, averaged in place."""
    count = patch_count(shape, kernel, 1, pad)
    sizes = {"shape": shape, "kernel": kernel, "stride": 1, "pad": pad}
    name = f"{'×'.join(map(str, shape))}, {kernel}×{kernel}, depthwise"
    size = shape[1] * float(kernel) ** 4
    return Job("depthwise", name, sizes, count * size, _FLOAT * (prod(shape) + 2 * size))


def patch_count(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> int:
    """Return the number of patches of a convolution over images of this shape."""
    return shape[0] * prod(square_window(kernel, stride, pad).output_shape(shape[2:]))


def square_window(kernel: int, stride: int, pad: int) -> Window:
    """Return the window of a 2-d convolution with equal settings for both axes."""
    return Window((kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2, (pad,) * 2)


def inverse(d: int) -> Job:
    """Return the job: damped inverse of a factor."""
    return Job("inverse", f"{d} × {d}", {"d": d}, float(d) ** 3, _FLOAT * 2 * float(d) ** 2)


def power(d: int, exp: float) -> Job:
    """Return the job: power of a damped factor; algorithms differ in multiplications: no rate."""
    # Powers near −1 magnify single-precision rounding by the condition, which is about 10 here.
    return Job("power", f"{d} × {d} to the {exp:g}", {"d": d, "exp": exp}, tolerance=1e-4)


def precondition(name: str, layers: tuple[tuple[int, int, int], ...]) -> Job:
    """Return the job: gradients multiplied by the inverses of both factors of their layers."""
    work = sum(k * (a * float(g) * (a + g)) for a, g, k in layers)
    # Factors are read, gradients read and written.
    traffic = _FLOAT * sum(k * (a**2 + g**2 + 2.0 * a * g) for a, g, k in layers)
    # Inverses of averages in single precision, whose rank is far below the number of rows.
    return Job("precondition", name, {"layers": layers}, work, traffic, tolerance=5e-4)


def step(network: str, batch: int, kind: str) -> Job:
    """Return the job: training steps of a kind of ``STEPS``."""
    sizes = {"network": network, "batch": batch, "kind": kind}
    name, periods = f"{network}, batch {batch}, {kind}", STEPS[kind]
    if periods is None:
        return Job("step", name, sizes, tolerances=_STEP_TOLERANCES)
    return Job(
        "step", name, sizes, tolerances=_STEP_TOLERANCES, turn=periods.turn, shares=periods.shares
    )


def use(operation: str, network: str, examples: int, queries: int) -> Job:
    """Return the job: a use of the curvature of a network on so many examples."""
    sizes = {"network": network, "examples": examples, "queries": queries}
    name = f"{operation}, {network}, {examples} examples, {queries} queries"
    # Gradients in single precision through a network with kinks.
    return Job(operation, name, sizes, tolerance=2e-3)


@dataclass(frozen=True, slots=True)
class Periods:
    """Periods of the updates of factors and inverses.

    A step updates inverses and factors, or factors only, or neither. A hundred steps of every
    contender would take an hour: each kind is timed in a shorter period (``measured``) and weighted
    by its frequency in training (``used``).
    """

    measured: tuple[int, int]
    used: tuple[int, int]

    @property
    def turn(self) -> tuple[str, ...]:
        """Kind of each step of a period; step 0 is last."""
        factors, inverses = self.measured
        kinds = (
            "inverses" if step == inverses else "gradient" if step % factors else "factors"
            for step in range(1, inverses + 1)
        )
        return tuple(kinds)

    @property
    def shares(self) -> Mapping[str, float]:
        """Frequency of each kind of step in training."""
        factors, inverses = self.used
        return {
            "inverses": 1 / inverses,
            "factors": 1 / factors - 1 / inverses,
            "gradient": 1 - 1 / factors,
        }


PLAIN, SELDOM = "gradient", "factors 10, inverses 100"
# Kind of step to its periods; None for gradients alone.
STEPS: Mapping[str, Periods | None] = {
    PLAIN: None,
    "factors 1, inverses 10": Periods(measured=(1, 3), used=(1, 10)),
    SELDOM: Periods(measured=(3, 6), used=(10, 100)),
}

# Network to the numbers of examples and queries, and operations of the suite ``uses``.
USES = {"mlp": (512, 32), "cnn": (128, 16)}
LAPLACE = ("Laplace fit", "variance", "evidence")
INFLUENCE = ("EKFAC fit", "scores", "self-influence")

SUITES: Mapping[str, tuple[Job, ...]] = Registry(
    "suite",
    {
        "dense": (
            dense(64, 512), dense(256, 1024), dense(4096, 1024), dense(256, 2048),
            dense(4096, 2048), dense(128, 4096)),
        "conv": (
            patches((32, 64, 56, 56), 3, 1, 1), patches((32, 128, 28, 28), 3, 1, 1),
            patches((32, 256, 14, 14), 3, 1, 1), patches((32, 512, 7, 7), 3, 1, 1),
            patches((32, 64, 56, 56), 3, 2, 1), patches((8, 3, 224, 224), 7, 2, 3),
            patches((32, 64, 56, 56), 1, 1, 0), patches((32, 1024, 14, 14), 1, 1, 0),
            patches((32, 16, 28, 28), 5, 1, 2), depthwise((32, 96, 56, 56), 3, 1)),
        "inverse": tuple(inverse(d) for d in (64, 256, 512, 1024, 2048, 4096)),
        "power": tuple(power(d, exp) for d in (256, 1024) for exp in (-0.5, -0.25)),
        "precondition": (
            precondition("ResNet-50, 54 layers", RESNET50),
            precondition("MLP 784-1024-512-256-10",
                         ((785, 1024, 1), (1025, 512, 1), (513, 256, 1), (257, 10, 1))),
            precondition("64 layers 64 × 64", ((64, 64, 64),)),
        ),
        "step": tuple(
            step(network, batch, kind)
            for network, batch in (("mlp", 512), ("resnet20", 128), ("transformer", 32))
            for kind in STEPS
        ),
        "uses": tuple(
            use(operation, network, *sizes)
            for network, sizes in USES.items()
            for operation in (*LAPLACE, *INFLUENCE)
        ),
    },
)  # fmt: skip


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

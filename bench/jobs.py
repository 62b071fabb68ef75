"""What is measured: each job is one result, which several contenders compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from kfac_engine.backend.window import Window
from kfac_engine.registry import Registry

# A way to a job's result: an array or a list of them of any library, or several by name, which the
# next run may overwrite.
Run: TypeAlias = Callable[[], Any]

DECAY = 0.95
DAMPING = 1e-3

_FLOAT = 4  # bytes of a float32
# What runs have to do that are all alike.
_ALL = "all"
# What a step results in. Gradients have gone through a whole network in single precision; natural
# ones through inverses besides, which magnify what lies along directions of little curvature. One
# ReLU whose input rounds to the other side of zero is felt in the third digit.
GRADIENT, NATURAL = "gradient", "natural gradient"
_STEP_TOLERANCES = {GRADIENT: 5e-3, NATURAL: 2e-2}

# Factor sides of the 54 layers of a ResNet-50 as (d_in, d_out, how many layers).
RESNET50 = (
    (147, 64, 1), (64, 64, 1), (576, 64, 3), (64, 256, 4), (256, 64, 2), (256, 128, 1),
    (1152, 128, 4), (128, 512, 4), (256, 512, 1), (512, 128, 3), (512, 256, 1), (2304, 256, 6),
    (256, 1024, 6), (512, 1024, 1), (1024, 256, 5), (1024, 512, 1), (4608, 512, 3),
    (512, 2048, 3), (1024, 2048, 1), (2048, 512, 2), (2049, 1000, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One result.

    Attributes:
        operation: What every contender has a function for.
        name: Its sizes, for the table.
        sizes: The function's arguments.
        multiplications: Of the definition done in full, for a rate; 0 if nobody counts them.
        traffic: Bytes that are read or written at least once, whoever does it.
        tolerance: Largest difference from the definition relative to its largest entry.
        tolerances: Parts of the result that have another one.
        turn: What each run of a contender's turn has to do, from the second run of all on: the
            first is only checked.
        shares: How often each of these comes in use, as a share of all runs.
    """

    operation: str
    name: str
    sizes: Mapping[str, Any] = field(repr=False)
    multiplications: float = 0.0
    traffic: float = 0.0
    tolerance: float = 2e-5
    tolerances: Mapping[str, float] = field(default_factory=dict, repr=False)
    turn: tuple[str, ...] = (_ALL,)
    shares: Mapping[str, float] = field(default_factory=lambda: {_ALL: 1.0}, repr=False)


def dense(rows: int, d: int) -> Job:
    """Second moment of the inputs of a dense layer with bias, averaged in place."""
    name, sizes, side = f"{rows} rows of {d}", {"rows": rows, "d": d}, d + 1.0
    # An average is read and written.
    return Job("dense", name, sizes, rows * side**2, _FLOAT * (rows * d + 2 * side**2))


def patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Job:
    """Second moment of the patches that a 2-d convolution sees, averaged in place."""
    count, d = patch_count(shape, kernel, stride, pad), shape[1] * kernel**2
    sizes = {"shape": shape, "kernel": kernel, "stride": stride, "pad": pad}
    name = f"{'×'.join(map(str, shape))}, {kernel}×{kernel}, stride {stride}"
    return Job(
        "patches", name, sizes, count * float(d) ** 2, _FLOAT * (prod(shape) + 2 * float(d) ** 2)
    )


def depthwise(shape: tuple[int, ...], kernel: int, pad: int) -> Job:
    """Second moments of the patches of each channel, averaged in place."""
    count = patch_count(shape, kernel, 1, pad)
    sizes = {"shape": shape, "kernel": kernel, "stride": 1, "pad": pad}
    name = f"{'×'.join(map(str, shape))}, {kernel}×{kernel}, depthwise"
    size = shape[1] * float(kernel) ** 4
    return Job("depthwise", name, sizes, count * size, _FLOAT * (prod(shape) + 2 * size))


def patch_count(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> int:
    """Patches that a convolution over images of this shape sees."""
    return shape[0] * prod(square_window(kernel, stride, pad).output_shape(shape[2:]))


def square_window(kernel: int, stride: int, pad: int) -> Window:
    """The window of a 2-d convolution that treats both axes alike."""
    return Window((kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2, (pad,) * 2)


def inverse(d: int) -> Job:
    """Damped inverse of a factor."""
    return Job("inverse", f"{d} × {d}", {"d": d}, float(d) ** 3, _FLOAT * 2 * float(d) ** 2)


def power(d: int, exp: float) -> Job:
    """A power of a damped factor; no rate, as each way counts differently."""
    # Powers near −1 magnify single-precision rounding by the condition, which is about 10 here.
    return Job("power", f"{d} × {d} to the {exp:g}", {"d": d, "exp": exp}, tolerance=1e-4)


def precondition(name: str, layers: tuple[tuple[int, int, int], ...]) -> Job:
    """Gradients of many layers between the inverses of their factors: two products each."""
    work = sum(k * (a * float(g) * (a + g)) for a, g, k in layers)
    # Factors are read, gradients read and written.
    traffic = _FLOAT * sum(k * (a**2 + g**2 + 2.0 * a * g) for a, g, k in layers)
    # Inverses of averages in single precision, whose rank is far below their side.
    return Job("precondition", name, {"layers": layers}, work, traffic, tolerance=5e-4)


def step(network: str, batch: int, kind: str) -> Job:
    """Steps of training; the kinds are those of ``STEPS``."""
    sizes = {"network": network, "batch": batch, "kind": kind}
    name, periods = f"{network}, batch {batch}, {kind}", STEPS[kind]
    if periods is None:
        return Job("step", name, sizes, tolerances=_STEP_TOLERANCES)
    return Job(
        "step", name, sizes, tolerances=_STEP_TOLERANCES, turn=periods.turn, shares=periods.shares
    )


@dataclass(frozen=True, slots=True)
class Periods:
    """How often factors and inverses move.

    A step has inverses to make, or factors alone, or neither. A hundred steps of every contender
    would take an hour: each sort is timed in a shorter period, and counts as often as in use.

    Attributes:
        measured: Steps between factors, and between inverses, as they are timed.
        used: The same as it is in use.
    """

    measured: tuple[int, int]
    used: tuple[int, int]

    @property
    def turn(self) -> tuple[str, ...]:
        """What is due in each step of a period, of which step 0 comes last."""
        factors, inverses = self.measured
        sorts = (
            "inverses" if step == inverses else "gradient" if step % factors else "factors"
            for step in range(1, inverses + 1)
        )
        return tuple(sorts)

    @property
    def shares(self) -> Mapping[str, float]:
        """How often each sort of step comes in use."""
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

SUITES: Mapping[str, tuple[Job, ...]] = Registry(
    "suite",
    {
        "dense": (
            dense(64, 512), dense(256, 1024), dense(4096, 1024), dense(256, 2048),
            dense(4096, 2048), dense(128, 4096),
        ),
        "conv": (
            patches((32, 64, 56, 56), 3, 1, 1),
            patches((32, 128, 28, 28), 3, 1, 1),
            patches((32, 256, 14, 14), 3, 1, 1),
            patches((32, 512, 7, 7), 3, 1, 1),
            patches((32, 64, 56, 56), 3, 2, 1),
            patches((8, 3, 224, 224), 7, 2, 3),
            patches((32, 64, 56, 56), 1, 1, 0),
            patches((32, 1024, 14, 14), 1, 1, 0),
            patches((32, 16, 28, 28), 5, 1, 2),
            depthwise((32, 96, 56, 56), 3, 1),
        ),
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
    },
)  # fmt: skip

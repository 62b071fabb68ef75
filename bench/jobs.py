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
        cycle: How many equal parts one run has; times are those of one.
        period: How many runs it takes until everything that happens now and then has happened: in
            the last of them.
        rarity: How many runs that would be in use: the last of a period counts once, the others for
            all the rest.
    """

    operation: str
    name: str
    sizes: Mapping[str, Any] = field(repr=False)
    multiplications: float = 0.0
    traffic: float = 0.0
    tolerance: float = 2e-5
    tolerances: Mapping[str, float] = field(default_factory=dict, repr=False)
    cycle: int = 1
    period: int = 1
    rarity: int = 1


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
    return shape[0] * prod(square_window(kernel, stride, pad).output_sides(shape[2:]))


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


def step(network: str, batch: int, kind: str, cycle: int) -> Job:
    """Steps of training; the kinds are those of ``STEPS``."""
    sizes = {"network": network, "batch": batch, "kind": kind, "cycle": cycle}
    rare = kind == SELDOM
    return Job(
        "step", f"{network}, batch {batch}, {kind}", sizes, tolerances=_STEP_TOLERANCES,
        cycle=cycle, period=_MEASURED_PERIOD // cycle if rare else 1,
        rarity=_USED_PERIOD // cycle if rare else 1,
    )  # fmt: skip


# Steps between inverses where they are rare: as they are measured, and as they count. So many steps
# of every contender would take most of an hour.
_MEASURED_PERIOD, _USED_PERIOD = 30, 100
PLAIN, SELDOM = "gradient", f"factors 10, inverses {_USED_PERIOD}"
# Kind of step to how often factors and inverses move; None for gradients alone.
STEPS: Mapping[str, tuple[int, int] | None] = {
    PLAIN: None,
    "factors 1, inverses 10": (1, 10),
    SELDOM: (10, _MEASURED_PERIOD),
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
            step(network, batch, kind, 10)
            for network, batch in (("mlp", 512), ("resnet20", 128), ("transformer", 32))
            for kind in STEPS
        ),
    },
)  # fmt: skip

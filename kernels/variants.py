"""Every way in which a kernel source is compiled."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

# Source to the macros it reads and their values.
MACROS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "patch_products": {
        "TILE": (64, 128),
        "SPLIT": (0, 1, 3),
        "ALIGNED": (0, 1),
        "INPUT": (0, 1, 2),
    },
    "moment": {"TILE": (64, 128)},
    "patch_sums": {"SQUARED": (0, 1), "ACROSS": (0, 1), "INPUT": (0, 1, 2)},
    "patches": {"INPUT": (0, 1, 2, 3)},
    "finite": {"INPUT": (0, 3)},
    "symmetric": {"INPUT": (0, 3)},
    "averages": {"INPUT": (0, 1, 2)},
    "group_products": {"SQUARE": (0, 1), "SIDE": (16, 64), "INPUT": (0, 1, 2)},
    "few_products": {"ROWS": (5, 10), "INPUT": (0, 1, 2)},
    "example_sums": {"ACROSS": (0, 1), "INPUT": (0, 1, 2)},
    "classes": {"LANES": (1, 32), "INPUT": (0, 1, 2)},
}


def options(**macros: int) -> tuple[str, ...]:
    """Macros as options of the compiler."""
    return tuple(f"-D{name}={value}" for name, value in macros.items())


def variants(name: str) -> Iterator[tuple[str, ...]]:
    """All sets of options that a source is compiled with."""
    macros = MACROS[name]
    for values in product(*macros.values()):
        yield options(**dict(zip(macros, values, strict=True)))

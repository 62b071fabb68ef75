"""Every way in which a kernel source is compiled."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

# How a kernel reads images, by their element type: the macro INPUT of prelude.cuh.
INPUTS = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}

_IMAGES = (0, 1, 2)  # INPUT of kernels that compute in float32

# Source to its macros and their values. Launches take their options from this table alone.
MACROS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "patch_products": {
        "SPLIT": (0, 1, 3),
        "ALIGNED": (0, 1),
        "INPUT": _IMAGES,
    },
    "moment": {},
    "patch_sums": {"SQUARED": (0, 1), "ACROSS": (0, 1), "INPUT": _IMAGES},
    "patches": {"INPUT": tuple(INPUTS.values())},
    "finite": {"INPUT": (0, 3)},
    "symmetric": {"INPUT": (0, 3)},
    "averages": {"INPUT": _IMAGES},
    "group_products": {"SQUARE": (0, 1), "SIDE": (16, 64), "INPUT": _IMAGES},
    "few_products": {"ROWS": (5, 10), "INPUT": _IMAGES},
    "example_sums": {"ACROSS": (0, 1), "INPUT": _IMAGES},
    "classes": {"LANES": (1, 32), "INPUT": _IMAGES},
}


def options(name: str, **macros: int) -> tuple[str, ...]:
    """The macros of a source as options of the compiler, with values from the table."""
    listed = MACROS[name]
    assert macros.keys() == listed.keys(), (name, macros)
    assert all(macros[macro] in values for macro, values in listed.items()), (name, macros)
    return tuple(f"-D{macro}={macros[macro]}" for macro in listed)


def variants(name: str) -> Iterator[tuple[str, ...]]:
    """All sets of options that a source is compiled with."""
    macros = MACROS[name]
    for values in product(*macros.values()):
        yield options(name, **dict(zip(macros, values, strict=True)))

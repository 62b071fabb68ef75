"""The variants of the kernel sources, as sets of compiler options."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

# Values of the macro INPUT of prelude.cuh, by the element type of images.
INPUTS = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}

_IMAGES = (0, 1, 2)  # input types for which kernels accumulate in float32

# Macros of each source with their values. All launches use options of this table.
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
    """Return macros of a source as compiler options; they must be values of ``MACROS``."""
    listed = MACROS[name]
    assert macros.keys() == listed.keys(), (name, macros)
    assert all(macros[macro] in values for macro, values in listed.items()), (name, macros)
    return tuple(f"-D{macro}={macros[macro]}" for macro in listed)


def variants(name: str) -> Iterator[tuple[str, ...]]:
    """Yield all sets of compiler options of a source."""
    macros = MACROS[name]
    for values in product(*macros.values()):
        yield options(name, **dict(zip(macros, values, strict=True)))

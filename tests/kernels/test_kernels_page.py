"""The page about kernels speaks of every kernel there is."""

import re
from pathlib import Path

import pytest

from kfac_engine.kernels.launch import source
from kfac_engine.kernels.variants import MACROS

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
KERNEL = re.compile(r"__global__ void\s*(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


@pytest.mark.parametrize("name", MACROS)
def test_every_kernel_of_a_source_has_a_row(name: str) -> None:
    assert f"`{name}.cu`" in PAGE
    kernels = set(KERNEL.findall(source(name)))
    assert kernels
    assert all(f"| `{kernel}` |" in PAGE for kernel in kernels)


def test_no_kernel_is_said_to_spill() -> None:
    assert "spilled" not in PAGE

"""The page about kernels describes the present kernels."""

import re
from pathlib import Path

import pytest

from kfac_engine.kernels.launch import MACROS, source
from scripts import kernel_report
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.module import ORDERS, compiler

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
KERNEL = re.compile(r"__global__ void\s*(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")
TAKEN, EXACT = (
    PAGE.split(head)[1].split("\n## ")[0] for head in ("## Resources of a block\n", "## Errors\n")
)


def rows(table):
    """Cells of a table's rows, the head first."""
    lines = [line for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_page_describes_every_source():
    described = set(re.findall(r"`(\w+)\.cu`", PAGE))
    assert described == set(MACROS)


def test_page_lists_resources_of_all_kernels():
    (_, *architectures), *found = rows(TAKEN)
    assert architectures == list(nvrtc.ARCHITECTURES)
    kernels = [kernel for name in MACROS for kernel in KERNEL.findall(source(name))]
    # A source may hold a kernel twice, for one macro or another.
    assert sorted(row[0] for row in found) == sorted(f"`{kernel}`" for kernel in set(kernels))
    assert all(re.fullmatch(r"\d+ \(\d+\.\d\)|–", cell) for row in found for cell in row[1:])


def test_page_resources_equal_compiled_table():
    assert "\n".join(kernel_report.resources()) in PAGE


def test_page_lists_errors_of_all_cases():
    (_, _, *orders), *found = rows(EXACT)
    assert orders == list(ORDERS)
    assert [row[:2] for row in found] == [
        [kernel, case] for kernel, case, _ in kernel_report.cases()
    ]


@pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")
def test_page_errors_equal_computed_errors():
    listed = {tuple(row[:2]): row[2:] for row in rows(EXACT)}
    for kernel, case, error in kernel_report.cases():
        if kernel.startswith("`example_sums`"):
            assert listed[kernel, case] == [f"{error(order):.1e}" for order in ORDERS]

"""Writes docs/operators.md, with the derivative of each operator and the results of node tests.

Run from the repository root: ``python -m scripts.list_operators``. ``--failures`` prints the node
tests that are wrong or refused, and does not write the page; names or parts of names select tests.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import onnx
import onnxruntime
from onnx import defs

from kfac_engine.autodiff.lowering import load_lowerings
from kfac_engine.autodiff.rules import QUANTIZERS, REFUSED, ZERO_DERIVATIVE, load_rules
from kfac_engine.graph.passes.decompose import DECOMPOSITIONS
from scripts import node_tests

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "operators.md"
WIDTH = 100
EXAMPLE = "## Add your own"

UNROLLED = frozenset({"GRU", "If", "LSTM", "Loop", "RNN", "Scan", "SequenceMap"})
# Operators on sequences, whose readers are traced to the arrays in the sequence.
SEQUENCES = frozenset(
    ["Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"]
)
# Operators of old operator sets, which loading replaces.
REPLACED = {"Scatter": "ScatterElements", "Upsample": "Resize"}
FLOATS = {f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")}


@dataclass(frozen=True, slots=True)
class Row:
    """An operator, the operator sets that changed it, and how it is differentiated.

    ``tests`` has the numbers of passed and of applicable node tests.
    """

    name: str
    versions: str
    how: str
    tests: str


def standard_rows(outcomes: Sequence[node_tests.Outcome]) -> Iterator[Row]:
    """Return a row for each operator of the standard set."""
    versions: dict[str, list[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain:
            versions.setdefault(schema.name, []).append(schema.since_version)
    for name in sorted(versions):
        listed = ", ".join(str(version) for version in sorted(versions[name]))
        yield Row(name, listed, handling(name), counted(name, outcomes))


def handling(name: str) -> str:
    """Return the method of differentiation of a standard operator."""
    schema = defs.get_schema(name)
    defined = schema.has_function or schema.has_context_dependent_function
    handlings = [
        ("unrolled", name in UNROLLED),
        ("rewritten", name in load_lowerings()),
        ("rule", name in load_rules()),
        ("derivative is zero", name in ZERO_DERIVATIVE),
        ("refused: it rounds to whole numbers", name in QUANTIZERS),
        (f"refused: {REFUSED.get(name)}", name in REFUSED),
        ("traced to the arrays it holds", name in SEQUENCES),
        (f"loaded as {REPLACED.get(name)}", name in REPLACED),
        ("by its definition", defined),
    ]
    return next((how for how, holds in handlings if holds), "unknown")


def counted(name: str, outcomes: Sequence[node_tests.Outcome]) -> str:
    """Return ``passed / applicable`` of the tests whose model has the operator."""
    counts = Counter(outcome.verdict for outcome in outcomes if name in outcome.ops)
    applicable = counts["passed"] + counts["refused"] + counts["wrong"]
    return f"{counts['passed']} / {applicable}" if applicable else ""


def other_rows() -> Iterator[str]:
    """Return the operators of other domains that have a derivative."""
    table = {
        **dict.fromkeys(load_rules(), "rule"),
        **dict.fromkeys(load_lowerings(), "rewritten"),
        **dict.fromkeys(ZERO_DERIVATIVE, "derivative is zero"),
        **dict.fromkeys(DECOMPOSITIONS, "read as standard operators"),
    }
    by_name = {name: how for name, how in table.items() if not defs.has(name)}
    return (f"| `{name}` | {by_name[name]} |" for name in sorted(by_name))


def page(outcomes: Sequence[node_tests.Outcome]) -> str:
    """Return the page."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    applicable = len(outcomes) - counts["not applicable"]
    rows = list(standard_rows(outcomes))
    kinds = Counter(row.how.split(":")[0] for row in rows)
    operators = [f"| {row.name} | {row.versions} | {row.how} | {row.tests} |" for row in rows]
    refused = [
        f"| `{outcome.name}` | {' '.join(outcome.why.split())} |"
        for outcome in outcomes
        if outcome.verdict in {"refused", "wrong"}
    ]
    reasons = Counter(
        outcome.why.split(": ")[0].split(" at ")[0]
        for outcome in outcomes
        if outcome.verdict == "not applicable"
    )
    return "\n".join([
        HEAD.format(
            onnx=onnx.__version__,
            runtime=onnxruntime.__version__,
            count=len(rows),
            kinds=fill(", ".join(f"{n} {kind}" for kind, n in kinds.most_common()), WIDTH),
        ),
        *operators, OTHERS, *other_rows(),
        TESTS.format(
            count=len(outcomes),
            applicable=applicable,
            passed=counts["passed"],
            share=100 * counts["passed"] / applicable,
            refused=counts["refused"],
            wrong=counts["wrong"],
        ),
        *refused, REASONS,
        *(f"| {count} | {reason} |" for reason, count in sorted(reasons.items(), key=_by_count)),
        "", written_by_hand(),
    ])  # fmt: skip


def _by_count(entry: tuple[str, int]) -> tuple[int, str]:
    return -entry[1], entry[0]


def written_by_hand() -> str:
    """Return the last section of the page, which is written by hand."""
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition(EXAMPLE)
    return mark + rest


HEAD = """# How each operator is differentiated

Written by `scripts/list_operators.py` with onnx {onnx} and ONNX Runtime {runtime}; the last
section is written by hand.

| how | meaning |
|---|---|
| rule | a function in `kfac_engine/autodiff/rules` writes its derivative |
| rewritten | a function in `kfac_engine/autodiff/lowering` replaces it by operators with rules |
| unrolled | a copy of its body for each step replaces it |
| by its definition | ONNX defines it by other operators, which replace it |
| traced to the arrays it holds | operators that read the sequence read the arrays of its elements |
| derivative is zero | its result changes in jumps, or its operands are not real numbers |
| loaded as … | another operator replaces this old form when the file is read |
| refused | an error names it if its derivative is needed |

## Standard operators

{count} operators:
{kinds}.

The column *versions* lists the operator sets that changed an operator. The column *tests* contains
two numbers of node tests with the operator: the tests that pass, and the tests that apply.

| operator | versions | how | tests |
|---|---|---|---|"""
OTHERS = """
## Operators of other domains

An operator without a row is refused by name, even if ONNX Runtime executes it on the CPU. Attention
operators are differentiated if they have no shared cache. Quantized operators are refused. Linear
models of `ai.onnx.ml` store their weights in attributes; the engine reads them as parameters.

| operator | how |
|---|---|"""
TESTS = """
## Node tests of the onnx package

The onnx package has {count} models of one operator, or of the definition of an operator. Each model
is read, rewritten and run. Its results must equal the expected results of the package. Its gradient
must agree with central differences of ONNX Runtime's kernels along random directions.

{applicable} models apply.
**{passed} pass ({share:.1f} %)**, {refused} are refused, {wrong} are wrong.

| refused | why |
|---|---|"""
REASONS = """
The other models do not apply:

| tests | why |
|---|---|"""


def print_failures(parts: Sequence[str]) -> None:
    """Print the wrong and the refused cases whose names contain one of ``parts``."""
    chosen = [
        case for case in node_tests.cases() if not parts or any(p in case.name for p in parts)
    ]
    outcomes = list(node_tests.outcomes(chosen))
    for outcome in outcomes:
        if outcome.verdict in {"refused", "wrong"}:
            print(f"{outcome.verdict:8} {outcome.name}: {outcome.why}")
    print(dict(Counter(outcome.verdict for outcome in outcomes)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/operators.md.")
    parser.add_argument("--failures", nargs="*", metavar="NAME", help="only print what fails")
    failures = parser.parse_args().failures
    if failures is None:
        PAGE.write_text(page(list(node_tests.outcomes(node_tests.cases()))), encoding="utf-8")
        print(f"written to {PAGE}")
    else:
        print_failures(failures)

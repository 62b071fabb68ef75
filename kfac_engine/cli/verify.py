"""``verify``: check gradients, curvature, inverses and export on a model and a batch."""

from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, command, count_option
from kfac_engine.cli.display import print_json, print_table, say, working
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.options import json_option, labeled_data

if TYPE_CHECKING:
    from kfac_engine.verification.checks import Verification

# Exit status if a check fails: neither wrong input nor an error of the command.
FAILED = 3


@command(
    "Check gradients, curvature, inverses and export against definitions.",
    "kfac-engine verify mlp.onnx --inputs images.npy --targets labels.npy",
    MODEL,
    count_option(
        "Checks", "--examples", default=8, help="Largest number of examples that the checks read."
    ),
    count_option("Checks", "--parameters", default=12,
        help="Largest number of parameters, and of layers, that are checked one by one."),
    json_option,
    files=labeled_data("--inputs"),
    options=engine_options(),
)  # fmt: skip
def run_verify(
    model: Path,
    files: SimpleNamespace,
    examples: int,
    parameters: int,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_data

    with working("reading"):
        sample, data = read_data(files.inputs, files.targets, model)
    result = ke.verify(
        model,
        data,
        examples=examples,
        parameters=parameters,
        progress=True,
        sample_inputs=sample,
        **options,
    )
    if as_json:
        print_json(_report(result))
    else:
        _print(result)
    if not result.passed:
        click.get_current_context().exit(FAILED)


def _print(result: "Verification") -> None:
    say(f"examples: {result.examples}; parameters one by one: {', '.join(result.parameters)}")
    print_table(
        "checks",
        ("check", "result", " error", " tolerance", "largest error at"),
        [
            (check.name, check.outcome, f"{m.error:.2g}", f"{m.tolerance:.2g}", m.subject)
            if (m := check.worst)
            else (check.name, check.outcome, "", "", "")
            for check in result.checks
        ],
        sentences="largest error at",
    )
    for check in result.checks:
        if check.detail:
            say(f"{check.name}: {check.detail}")
    for check in result.checks:
        for subject, reason in check.skipped.items():
            say(f"skipped: {check.name}{f' of {subject}' if subject else ''}: {reason}")
    for check in result.checks:
        for failure in check.failures:
            say(
                f"FAIL: {check.name} of {failure.subject}: error {failure.error:.2g}, tolerance "
                f"{failure.tolerance:.2g}. What to do: {check.remedy}."
            )


def _report(result: "Verification") -> dict[str, object]:
    return {
        "passed": result.passed,
        "examples": result.examples,
        "parameters": list(result.parameters),
        "checks": [
            {
                "name": check.name,
                "outcome": check.outcome,
                "detail": check.detail,
                "remedy": check.remedy if check.failures else "",
                "skipped": dict(check.skipped),
                "measurements": [
                    {
                        "subject": m.subject,
                        # JSON lacks infinity.
                        "error": m.error if isfinite(m.error) else None,
                        "tolerance": m.tolerance,
                        "passed": m.passed,
                    }
                    for m in check.measurements
                ],
            }
            for check in result.checks
        ],
    }

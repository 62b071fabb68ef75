"""The summary of a run: what the corpus gave, by family and exporter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.exporters.summary import Row, page, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporters.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Writing the page is a choice: a run on a part of the corpus must not."""
    parser.addoption("--write-page", action="store_true", help=f"write the results into {PAGE}")


@pytest.fixture(autouse=True)
def quiet_cores() -> None:
    """One thread each: the tests run side by side."""
    torch.set_num_threads(1)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print the table; with ``--write-page`` put it into the documentation, too."""
    rows = [row for row in map(_row, _reports(terminalreporter)) if row]
    if not rows:
        return
    terminalreporter.section("exporters")
    terminalreporter.write_line(table(rows))
    whole = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if whole and config.getoption("--write-page"):
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    for outcome in ("passed", "failed"):
        yield from terminalreporter.stats.get(outcome, [])


def _row(report: pytest.TestReport) -> Row | None:
    known = dict(report.user_properties)
    if "family" not in known:
        return None
    return Row(
        family=str(known["family"]),
        exporter=str(known["exporter"]),
        name=str(known["case"]),
        outcome="failed" if report.failed else str(known["outcome"]),
        worst=float(str(known.get("worst", 0.0))),
        reason=str(known.get("reason", "")),
    )

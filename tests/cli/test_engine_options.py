"""An option of the engine is written once: the command line and its page follow from the record."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import click
import pytest

from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.cli.app import app
from kfac_engine.cli.command import Group
from kfac_engine.cli.engine_options import CURVATURE_TEXTS, ROWS, EngineCommand, Row, options_of
from kfac_engine.cli.options import keywords
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.options import EngineOptions
from scripts import list_options

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Extended(EngineOptions):
    """Options and one more of each type."""

    dummy: float = 0.25
    colour: Literal["red", "blue"] = "red"
    quiet: bool = False
    open: bool = True
    sizes: Sequence[float] | None = None
    sorts: str | Sequence[str] | None = None
    axes: Mapping[str, int] | None = None


@pytest.fixture
def command(monkeypatch):
    """A command with the extended record; it returns what it was given."""
    monkeypatch.setattr("kfac_engine.engine.options.EngineOptions", Extended)
    for name in {field.name for field in fields(Extended)} - set(ROWS):
        monkeypatch.setitem(ROWS, name, Row(Group.MODEL, f"Weight of the {name}; for the test."))

    @click.command(cls=EngineCommand, example="")
    @keywords()
    def given(options):
        return options

    return given


def test_a_new_field_is_an_option_with_its_help_and_a_row_of_the_page(command):
    assert command.main(["--dummy", "0.5"], standalone_mode=False)["dummy"] == 0.5
    assert command.main([], standalone_mode=False)["dummy"] == 0.25
    page = command.get_help(click.Context(command))
    assert "--dummy FLOAT" in page
    assert "Weight of the dummy; for the test. [default: 0.25]" in " ".join(page.split())
    row = "| `--dummy` | `0.25` | Weight of the dummy; for the test. |\n"
    assert row in list_options.table(options_of(Extended))


def test_the_type_of_a_field_decides_how_its_option_is_read(command):
    words = ["--colour=blue", "--quiet", "--no-open", "--sizes=1", "--sizes=2.5"]
    options = command.main([*words, "--sorts=a", "--axes=x=-1"], standalone_mode=False)
    expected = {
        "colour": "blue", "quiet": True, "open": False, "sizes": (1.0, 2.5), "sorts": "a",
        "axes": {"x": -1},
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert command.main([], standalone_mode=False)["sorts"] is None
    with pytest.raises(click.BadParameter, match="'green' is not one of 'red', 'blue'"):
        command.main(["--colour", "green"], standalone_mode=False)


@pytest.mark.parametrize("record", [EngineOptions, CurvatureOptions])
def test_defaults_of_the_command_line_are_those_of_the_record(record):
    command = click.Command("none", callback=lambda **values: values)
    command.params = options_of(record)
    values = command.main([], standalone_mode=False)
    # A record needs a loss; the command line has a default.
    assert asdict(record(**values)) == asdict(record(loss="categorical"))


def test_every_field_has_a_text_and_every_row_a_field():
    records = EngineOptions, Schedule, CurvatureOptions
    names = {field.name for record in records for field in fields(record)}
    assert set(CURVATURE_TEXTS) <= set(ROWS) <= names
    assert all(
        option.help.startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        for record in records
        for option in options_of(record, names & set(ROWS))
    )


# Prints the help of the program and of each command.
PAGES = """
import click
from kfac_engine.cli.app import app
for name, command in {"": app, **app.commands}.items():
    settings = {**app.context_settings, "terminal_width": 80}
    print(command.get_help(click.Context(command, info_name=name, **settings)))
"""


def test_the_help_is_the_same_without_docstrings():
    pages = io.StringIO()
    with contextlib.redirect_stdout(pages):
        exec(PAGES, {})
    run = [sys.executable, "-X", "utf8", "-OO", "-c", PAGES]
    found = subprocess.run(run, check=True, capture_output=True, encoding="utf-8", cwd=ROOT).stdout
    assert found == pages.getvalue()
    assert len(found) > 10_000


def test_an_accepted_name_is_in_the_help():
    page = app.commands["precondition"].get_help(click.Context(app.commands["precondition"]))
    for name in ("multi_bernoulli", "curvature_prop_GGN", "cupy-tf32", "weight_gradients"):
        assert name in page

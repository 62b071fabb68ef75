"""The options of the command line have the fields and the defaults of the records."""

import contextlib
import io
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import click
import pytest

from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.cli.app import app
from kfac_engine.cli.curvature import OPTIONS as CURVATURE
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.engine.options import EngineOptions

ROOT = Path(__file__).resolve().parents[2]
# Record to its options and the fields that a command sets itself or that no command computes.
RECORDS = {
    EngineOptions: (
        engine_options(),
        {"exps", "schedule", "sample_inputs", "draws", "ema_decay", "compute_cholesky"}
        | {"compute_cholesky_inverse", "communicator", "distribution"},
    ),
    CurvatureOptions: (CURVATURE, {"biases", "sample_inputs", "draws"}),
}


@pytest.mark.parametrize("record", RECORDS)
def test_options_have_the_names_and_the_defaults_of_the_record(record):
    options, elsewhere = RECORDS[record]
    command = click.Command("none", callback=lambda **values: values, params=list(options))
    values = command.main([], standalone_mode=False)
    assert set(values) == {field.name for field in fields(record)} - elsewhere
    # A record needs a loss; the command line has a default.
    needed = {"loss": "categorical"} if "loss" in values else {}
    assert asdict(record(**values)) == asdict(record(**needed))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--output=a"], "output", "a"),
        (["--output=a", "--output=b"], "output", ("a", "b")),
        (["--approx=conv2d=kron=x", "--approx=scale=full"], "approximations",
         {"conv2d": "kron=x", "scale": "full"}),
        (["--batch-axis=a=b=-1"], "batch_axes", {"a=b": -1}),
        (["--graph-passes=none"], "graph_passes", ()),
        (["--graph-passes=a,b"], "graph_passes", ("a", "b")),
        (["--tie-weights"], "tie_weights", True),
    ],
)  # fmt: skip
def test_values_of_options_are_those_of_the_library(words, name, value):
    command = click.Command("none", callback=lambda **values: values, params=engine_options())
    assert command.main(words, standalone_mode=False)[name] == value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--approx=conv2d", "expected KIND=NAME, such as conv2d=kron; got 'conv2d'."),
        ("--approx==kron", "expected KIND=NAME, such as conv2d=kron; got '=kron'."),
        ("--batch-axis=x=last", "expected INPUT=AXIS, such as x=1; got 'x=last'."),
    ],
)
def test_a_pair_of_another_form_is_refused(word, message):
    command = click.Command("none", params=engine_options())
    with pytest.raises(click.BadParameter) as failure:
        command.main([word], standalone_mode=False)
    assert failure.value.message == message


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

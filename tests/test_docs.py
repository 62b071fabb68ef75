"""What the documentation says is so: examples run, options exist, links lead somewhere."""

import contextlib
import re
import shlex
from functools import partial
from pathlib import Path

import click
import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.app import app
from kfac_engine.cli.options import engine_options
from kfac_engine.data import digits

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("kfac_engine/**/*.md"),
    ]
)
COMMAND_LINE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
SHARED = "Options of the engine"


def blocks(page, *languages):
    """Code blocks of a page as (language, code), in order."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    return [(language, code) for language, code in found if language in languages]


def section(title):
    """The text under a heading of the command-line page."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", COMMAND_LINE, re.M | re.S)
    return text


def options_of(command):
    return {
        name
        for option in command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name not in {"--help", "-h"}
    }


@pytest.mark.slow
def test_the_examples_of_the_readme_run_in_order(tmp_path, capsys):
    names = {}
    with contextlib.chdir(tmp_path):
        for language, code in blocks(ROOT / "README.md", "python", "console"):
            if language == "python":
                exec(compile(code, "README.md", "exec"), names)
                continue
            for line in code.splitlines():
                prompt, program, *arguments = shlex.split(line)
                assert (prompt, program) == ("$", "kfac-engine")
                assert main(arguments) == 0, capsys.readouterr().err
    assert (tmp_path / "trained.onnx").exists()


def test_the_examples_of_the_building_blocks_run_in_order():
    names = {}
    examples = blocks(ROOT / "docs" / "building_blocks.md", "python")
    assert len(examples) >= 3
    for _, code in examples:
        exec(compile(code, "building_blocks.md", "exec"), names)


def first_block(page, containing):
    """The first example in Python of a page that contains a text."""
    return next(code for _, code in blocks(page, "python") if containing in code)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_training_example_halves_the_loss_for_each_seed(page, seed, tmp_path, monkeypatch):
    # The seed shuffles the data and draws the sampled targets.
    make = ke.Engine.from_onnx
    monkeypatch.setattr(ke.Engine, "from_onnx", partial(make, seed=seed))
    drawn = np.random.default_rng(seed).permutation(len(digits()[1]))
    shuffled = tuple(array[drawn] for array in digits())
    monkeypatch.setattr("kfac_engine.data.digits", lambda: shuffled)
    names = {}
    with contextlib.chdir(tmp_path):
        exec(compile(first_block(ROOT / page, "losses.append"), page, "exec"), names)
    losses = names["losses"]
    assert losses[-1] < losses[0] / 2
    assert max(losses) < 1.5 * losses[0]


def test_the_readme_has_examples():
    languages = [language for language, _ in blocks(ROOT / "README.md", "python", "console")]
    assert languages.count("console") >= 3
    assert languages.count("python") >= 4


def test_make_targets_named_in_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    for page in PAGES:
        for _, code in blocks(page, "sh"):
            assert set(re.findall(r"^make (\w+)", code, re.M)) <= targets


def test_contributing_names_the_commands_of_the_gate():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = re.findall(r"^(?:lint|test):.*\n((?:\t.*\n)+)", makefile, re.M)
    commands = "\n".join(line.strip() for recipe in recipes for line in recipe.splitlines())
    for name, value in {"BIN": ".venv/bin", "WORKERS": "2", "MAKE": "make"}.items():
        commands = commands.replace(f"$({name})", value)
    assert commands in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_option_of_a_command_is_documented(name):
    command = app.commands[name]
    arguments = [
        param.name.upper() for param in command.params if isinstance(param, click.Argument)
    ]
    text = section("`" + " ".join([name, *arguments]) + "`")
    if SHARED.lower() in text.lower().replace("\n", " "):
        text += section(SHARED)
    documented = set(re.findall(r"^\|[^|]*\|", text, re.M))
    assert options_of(command) == set(re.findall(r"`(-[-\w]+)`", " ".join(documented)))


def test_the_shared_options_are_documented():
    command = click.command(engine_options(lambda: None))
    assert options_of(command) == set(re.findall(r"^\| `(--[-\w]+)`", section(SHARED), re.M))


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            assert anchor in {slug(heading) for heading in headings}, target

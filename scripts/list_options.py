"""Writes the tables of options in docs/command_line.md from the options of the commands.

Run from the repository root after a change of an option: ``python -m scripts.list_options``; a test
compares the tables with the commands.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from kfac_engine.cli.app import app
from kfac_engine.cli.engine_options import engine_options

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command_line.md"
HEAD = "| option | default | meaning |\n|---|---|---|\n"
# Field of an engine's options to the section that explains it.
SECTIONS = {
    "loss": "conventions.md#losses",
    "batch_axes": "conventions.md#losses",
    "reduction": "conventions.md#gradients",
    "gradient_dtype": "types.md",
    "damping": "conventions.md#damping",
    "estimation_mode": "conventions.md#estimation-modes",
    "approximations": "approximations.md",
    "backend": "gpu.md",
    "train_form": "conventions.md#normalizations-in-training-form",
    "graph_passes": "performance.md#graph-passes",
}


def page(text: str) -> str:
    """Return the page with the tables that follow from the commands.

    Args:
        text: The page, with a table of options in the section of each command.

    Returns:
        The page; everything outside the tables is unchanged.
    """
    for heading, options in _sections():
        pattern = rf"(^## {re.escape(heading)}\n(?:(?!## ).*\n)*?)\| option \|.*\n(?:\|.*\n)+"
        text, count = re.subn(
            pattern, lambda match, rows=options: match[1] + table(rows), text, flags=re.M
        )
        assert count == 1, f"the section '{heading}' needs one table of options"
    return text


def table(options: Iterable[click.Option]) -> str:
    """Return the rows of options as a table in Markdown."""
    return HEAD + "".join(map(_row, options))


def _sections() -> Iterator[tuple[str, list[click.Option]]]:
    """Yield the heading of each table and its options."""
    shared = engine_options()
    yield "Options of the engine", shared
    for name, command in app.commands.items():
        arguments = [p.name.upper() for p in command.params if isinstance(p, click.Argument)]
        options = [p for p in command.params if isinstance(p, click.Option)]
        # The page tells once what all commands with an engine have; others share some of it.
        has_engine = any(option.name == "estimation_mode" for option in options)
        yield (
            "`" + " ".join([name, *arguments]) + "`",
            [option for option in options if not (has_engine and option in shared)],
        )


def _row(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    meaning = (option.help or "").replace("|", "\\|")
    if section := SECTIONS.get(option.name or ""):
        meaning += f" See [{section.partition('.')[0]}]({section})."
    return f"| {flags} | {_default(option)} | {meaning} |\n"


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    value = option.default
    if isinstance(value, bool):
        # Versions of click differ in the default of a flag without an opposite.
        return "on" if value else "off" if option.secondary_opts else ""
    shown = ", ".join(map(str, value)) if isinstance(value, tuple | list) else value
    return f"`{shown}`" if option.show_default and shown is not None else ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

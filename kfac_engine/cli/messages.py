"""Messages on stderr: a label, which has a colour in a terminal, and a text."""

import sys
from typing import Literal, TypeAlias

import click

Label: TypeAlias = Literal["error", "warning", "note"]
_COLOURS: dict[Label, str] = {"error": "red", "warning": "yellow", "note": "cyan"}


def tell(label: Label, text: str) -> None:
    """Print a message on stderr.

    The label has a colour if stderr is a terminal that shows colours, and the user does not refuse
    them by ``NO_COLOR`` (https://no-color.org).
    """
    from rich.console import Console

    console = Console(stderr=True)
    plain = console.no_color or console.color_system is None
    shown = f"{label}:" if plain else click.style(f"{label}:", fg=_COLOURS[label])
    # A bar that is shown replaces sys.stderr, and writes lines above itself; click.echo passes by.
    print(f"{shown} {text}", file=sys.stderr, flush=True)

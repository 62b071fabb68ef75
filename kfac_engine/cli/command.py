"""Defines commands with groups of options, and with an example at the end of their help."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from kfac_engine.cli.interruption import Interruption
from kfac_engine.system.writing import checked_path


class _FilePath(click.Path):
    """The type of a path; paths with a zero byte or a lone surrogate are refused."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Return the path that an argument of the command line names."""
        return checked_path(super().convert(str(checked_path(value)), param, ctx))


file_path = _FilePath()
MODEL = click.Argument(["model"], type=file_path)


class Group(Enum):
    """The headings of a help page, in their order."""

    DATA = "Data"
    MEASUREMENTS = "Measurements"
    TRAINING_SUITE = "The suite train"
    OUTPUT = "Output"
    OPTIMIZER = "Optimizer"
    LENGTH = "Length of the run"
    VALIDATION = "Validation"
    CHECKPOINTS = "Checkpoints"
    CHECKS = "Checks"
    LOSS = "Loss"
    MODEL = "Model"
    CURVATURE = "Curvature"
    POSTERIOR = "Posterior"
    PRUNING = "Pruning"
    REFRESHES = "Refreshes of the inverses"
    KFAC_REFRESHES = "Refreshes of the inverses, with --optimizer kfac"
    MACHINE = "Machine"
    GENERAL = "General"

    def option(self, *flags: str, **settings: Any) -> "Option":
        """Return an option of this group; see ``Option``."""
        return Option(flags, group=self, **settings)

    def file(self, *flags: str, **settings: Any) -> "Option":
        """Return an option whose value is a path."""
        return self.option(*flags, type=file_path, **settings)

    def count(self, *flags: str, least: int = 1, **settings: Any) -> "Option":
        """Return an option whose value is a whole number."""
        return self.option(*flags, type=click.IntRange(min=least), **settings)


class Option(click.Option):
    """An option of a group.

    Args:
        flags: Names of the option.
        group: The group.
        names: The values that the option accepts, for the help page and for shells, or their places
            in the package, such as ``"losses.LOSSES"``. These are imported when a page or a shell
            needs the names, because that takes time.
        table: Heading and rows of a section below the group's options.
        settings: Arguments of ``click.Option``.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        group: Group,
        names: Sequence[str] = (),
        table: tuple[str, Callable[[], Sequence[tuple[str, str]]]] | None = None,
        **settings: Any,
    ) -> None:
        self.group, self.table, self._sources = group, table, names
        if settings.get("default") not in (None, "") and not settings.get("is_flag"):
            settings.setdefault("show_default", True)
        if settings.get("multiple") and "repeated" not in settings["help"]:
            settings["help"] += " May be repeated."
        super().__init__(list(flags), **settings)

    def _names(self) -> Iterator[str]:
        for source in self._sources:
            module, _, attribute = source.rpartition(".")
            place = getattr(import_module(f"kfac_engine.{module}"), attribute) if module else source
            yield from [place] if isinstance(place, str) else get_args(place) or place

    @property
    def help(self) -> str:
        """Help text, followed by the names."""
        names = ", ".join(self._names())
        return f"{self.text} Names: {names}." if names else self.text

    @help.setter
    def help(self, text: str | None) -> None:
        self.text = text or ""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the typed text."""
        names = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return names or super().shell_complete(ctx, incomplete)


@dataclass
class Invocation:
    """State of one run of the program."""

    # Whether a failure shows its traceback; ``--debug`` sets it at any position.
    debug: bool = False
    command: click.Command | None = None  # the command that runs; None before its options are read
    # Reaction of the program to signals.
    interruption: Interruption = field(default_factory=Interruption)


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.ensure_object(Invocation).debug |= value


debug_option = Group.GENERAL.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


def command(
    example: str,
    *parameters: click.Argument | Option,
    options: Iterable[Option] = (),
    **gathered: Iterable[Option],
) -> Callable[[Callable[..., Any]], "Command"]:
    """Return the decorator of a command, which the example names.

    Args:
        example: A command line, with a backslash at the end of each line but the last.
        parameters: Arguments and options that the function receives each by its name.
        options: Options that it receives as a dictionary ``options``. Each has the name of the
            keyword argument of the library that receives its value.
        gathered: Options that it receives as one object, with an attribute for each option.
    """
    keywords, objects = list(options), {key: list(several) for key, several in gathered.items()}

    def decorate(function: Callable[..., Any]) -> Command:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            def taken(several: Iterable[Option]) -> dict[str, Any]:
                return {str(option.name): values.pop(str(option.name)) for option in several}

            arguments: dict[str, Any] = {k: SimpleNamespace(**taken(o)) for k, o in objects.items()}
            return function(
                **arguments, **({"options": taken(keywords)} if keywords else {}), **values
            )

        places = [p for p in parameters if isinstance(p, click.Argument)]
        alone = [p for p in parameters if isinstance(p, Option)]
        return Command(
            example.split()[1],
            callback=call,
            params=[*places, *chain(*objects.values()), *alone, *keywords, debug_option],
            example=example,
        )

    return decorate


class Command(click.Command):
    """A command with groups of options and an example."""

    def __init__(self, *args: Any, example: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.example = example

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, whose options messages name."""
        if ctx.obj is not None:
            ctx.obj.command = self
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below the headings of their groups."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        for group in Group:
            # click adds --help, which has no group.
            members = [o for o in options if getattr(o, "group", Group.GENERAL) is group]
            records = [record for o in members if (record := o.get_help_record(ctx))]
            if records:
                with formatter.section(group.value):
                    formatter.write_dl(records)
            for table in (o.table for o in members if isinstance(o, Option) and o.table):
                with formatter.section(table[0]):
                    formatter.write_dl(table[1]())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        del ctx
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

"""A command whose help has a heading for each group of options, and an example at its end."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from kfac_engine.errors import suggestion
from kfac_engine.system.writing import checked_path

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


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

    def option(self, *flags: str, **settings: Any) -> Callable[[Decorated], Decorated]:
        """Return the decorator of an option of this group; see ``Option``."""
        return click.option(*flags, cls=Option, group=self, **settings)

    def file(self, *flags: str, **settings: Any) -> Callable[[Decorated], Decorated]:
        """Return the decorator of an option whose value is a path."""
        return self.option(*flags, type=file_path, **settings)

    def count(
        self, *flags: str, least: int = 1, **settings: Any
    ) -> Callable[[Decorated], Decorated]:
        """Return the decorator of an option whose value is a whole number."""
        return self.option(*flags, type=click.IntRange(min=least), **settings)


class Option(click.Option):
    """An option of a group.

    Args:
        group: The group.
        names: The values that the option accepts, for the help page and for shells, or their places
            in the package, such as ``"losses.LOSSES"``. These are imported when a page or a shell
            needs the names, because that takes time.
        settings: Arguments of ``click.Option``.

    Attributes:
        group: The group.
        text: Help text without the names.
    """

    def __init__(
        self,
        *args: Any,
        group: Group,
        names: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.group, self._sources = group, names
        if settings.get("default") and not settings.get("is_flag"):
            settings.setdefault("show_default", True)
        super().__init__(*args, **settings)

    def _names(self) -> Iterator[str]:
        for source in self._sources:
            module, _, attribute = source.rpartition(".")
            place = getattr(import_module(f"kfac_engine.{module}"), attribute) if module else source
            yield from [place] if isinstance(place, str) else get_args(place) or place

    @property
    def help(self) -> str:
        """Help text with the names."""
        names = ", ".join(self._names())
        return f"{self.text} Names: {names}." if names else self.text

    @help.setter
    def help(self, text: str | None) -> None:
        self.text = text or ""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the typed text."""
        names = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return names or super().shell_complete(ctx, incomplete)


class Command(click.Command):
    """A command with groups of options and an example.

    All options are of a group. The command line of the example has a backslash at the end of each
    line but the last.
    """

    def __init__(
        self,
        name: str | None,
        *,
        example: str,
        params: list[click.Parameter] | None = None,
        **settings: Any,
    ) -> None:
        bare = [p.name for p in params or () if type(p) is click.Option]
        assert not bare, f"options without a group: {bare}; define them by Group.….option"
        super().__init__(name, params=params, **settings)
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
            for heading, rows in self.notes(members):
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def notes(
        self, options: Sequence[click.Option]
    ) -> Iterable[tuple[str, Sequence[tuple[str, str]]]]:
        """Return the sections that follow the options of a group, each a heading with rows."""
        del options
        return ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        del ctx
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Choice(click.Choice):  # type: ignore[type-arg] # click is generic since 8.2
    """One of several names; the error for another name suggests the nearest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name; for another value raise ``BadParameter`` with the nearest name."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = suggestion(value, [str(choice) for choice in self.choices])
            message = f"{error.message.rstrip('.')}{near}."
            raise click.BadParameter(message, ctx, param) from error

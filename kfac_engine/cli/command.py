"""A command whose help has a heading for each group of options, and an example at its end."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kfac_engine.suggestions import suggestion

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Group(Enum):
    """The headings of a help page, in their order."""

    DATA = "Data"
    MEASUREMENTS = "Measurements"
    TRAINING_SUITE = "The suite train"
    OUTPUT = "Output"
    OPTIMIZER = "Optimizer"
    LENGTH = "Length of the run"
    SEARCH = "Rates"
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


class Option(click.Option):
    """An option of a group.

    Args:
        group: The group.
        names: Return the values that the option accepts, for the help page and for shells. It is
            not called before, because it may import much.
        settings: Arguments of ``click.Option``.

    Attributes:
        group: The group.
        text: Help text without the names.
    """

    def __init__(
        self,
        *args: Any,
        group: Group,
        names: Callable[[], Iterable[str]] = tuple,
        **settings: Any,
    ) -> None:
        self.group, self._names = group, names
        super().__init__(*args, **settings)

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

    Args:
        name: Name of the command.
        example: Command line, with a backslash at the end of each line but the last.
        params: The arguments and options; all options are of a group.
        settings: Arguments of ``click.Command``.

    Attributes:
        example: The command line.
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
        """Return sections to follow the options of a group: heading and rows."""
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
        """Return the name.

        Raises:
            BadParameter: The value is none of the names.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = suggestion(value, [str(choice) for choice in self.choices])
            message = f"{error.message.rstrip('.')}{near}."
            raise click.BadParameter(message, ctx, param) from error

"""Defines commands with groups of options, and with an example at the end of their help."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import click
from click.shell_completion import CompletionItem

from kfac_engine.cli.interruption import Interruption
from kfac_engine.distributed.job import launched_by_mpi
from kfac_engine.system.reading import exists
from kfac_engine.system.writing import check_outputs, checked_path, is_stdout


class _FilePath(click.Path):
    """The type of a path; paths with a zero byte or a lone surrogate are refused."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        return checked_path(value)


file_path = _FilePath()
MODEL = click.Argument(["model"], type=file_path)


# What a command writes to a path: a file, a model with a second file for its weights if they are
# large, a file that is appended to, or a folder.
Written: TypeAlias = Literal["file", "model", "log", "folder"]


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
        """Return an option whose value is a path that the command reads."""
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
        writes: What the command writes to the path that is the value; None if the command reads it.
        table: Heading and rows of a section below the group's options.
        settings: Arguments of ``click.Option``.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        group: Group,
        names: Sequence[str] = (),
        writes: Written | None = None,
        table: tuple[str, Callable[[], Sequence[tuple[str, str]]]] | None = None,
        **settings: Any,
    ) -> None:
        self.group, self.writes, self.table, self._sources = group, writes, table, names
        settings["show_default"] = settings.get("default") not in (None, "")
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


def output(*flags: str, writes: Written = "file", **settings: Any) -> Option:
    """Return an option whose value is a path that the command writes."""
    return Group.OUTPUT.file(*flags, writes=writes, **settings)


@dataclass
class Invocation:
    """State of one run of the program."""

    # Whether a failure shows its traceback; ``--debug`` sets it at any position.
    debug: bool = False
    command: click.Command | None = None  # the command that runs; None before its options are read
    # Reaction of the program to signals.
    interruption: Interruption = field(default_factory=Interruption)


def _remember(context: click.Context, _: click.Parameter, debug: bool) -> None:
    invocation = context.ensure_object(Invocation)
    invocation.debug |= debug
    invocation.command = context.command


debug_option = Group.GENERAL.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember,
    help="Show the traceback of an error.",
)


def command(
    text: str,
    example: str,
    *parameters: click.Argument | Option,
    options: Sequence[Option] = (),
    **gathered: Sequence[Option],
) -> Callable[[Callable[..., Any]], "Command"]:
    """Return the decorator of a command, which the example names.

    Args:
        text: What the command does; not a docstring, because ``python -OO`` removes these.
        example: A command line, with a backslash at the end of each line but the last.
        parameters: Arguments and options that the function receives each by its name.
        options: Options that it receives as a dictionary ``options``. Each has the name of the
            keyword argument of the library that receives its value.
        gathered: Options that it receives as one object, with an attribute for each option.
    """

    def decorate(function: Callable[..., Any]) -> Command:
        def call(**values: Any) -> Any:
            def taken(several: Sequence[Option]) -> dict[str, Any]:
                return {str(option.name): values.pop(str(option.name)) for option in several}

            objects = {key: SimpleNamespace(**taken(group)) for key, group in gathered.items()}
            chosen, context = taken(options), click.get_current_context()
            with _divided_among_processes(chosen), _checked_files(context):
                keywords = {"options": chosen} if options else {}
                return function(**objects, **keywords, **values)

        return Command(
            example.split()[1],
            callback=call,
            help=text,
            params=[*chain(*gathered.values()), *parameters, *options, debug_option],
            epilog=example,
        )

    return decorate


@contextmanager
def _checked_files(context: click.Context) -> Iterator[None]:
    """Return a context in which the files that a command writes to are neither read nor unusable.

    ``InputError`` is raised as by ``check_outputs``, before anything is computed. The files with a
    model's weights are read with it. If a file is the standard output, the command prints on
    stderr.
    """
    read: dict[str, list[Path]] = {}
    written: dict[str, Path] = {}
    logs = []
    for option in context.command.params:
        value, writes = context.params.get(str(option.name)), getattr(option, "writes", None)
        name = max(option.opts, key=len) if isinstance(option, Option) else f"the {option.name}"
        for path in value if isinstance(value, tuple) else [value]:
            if not isinstance(path, Path) or writes == "folder":
                continue
            if writes is None:
                read.setdefault(name, []).append(path)
                continue
            written[name] = path
            if writes == "log":
                logs.append(name)
            elif writes == "model" and path.name:
                written[f"the weights of {name}"] = path.with_name(f"{path.name}.data")
    if any(map(exists, written.values())):
        from kfac_engine.graph.load import external_files

        for model in read.get("the model") or read.get("the models") or ():
            read |= {f"the weights '{path.name}'": [path] for path in external_files(model)}
    check_outputs(written, read, logs)
    with redirect_stdout(sys.stderr) if any(map(is_stdout, written.values())) else nullcontext():
        yield


@contextmanager
def _divided_among_processes(options: dict[str, Any]) -> Iterator[None]:
    """Return a context in which a command is one of the processes of an MPI job.

    An error of one process becomes an error of all. Only the first process prints. ``options`` has
    the distribution and receives the communicator.
    """
    divisible = "distribution" in options
    distribution = options.pop("distribution", None)
    if distribution is None and not (divisible and launched_by_mpi()):
        yield
        return
    from kfac_engine.distributed.agreement import Agreement
    from kfac_engine.distributed.mpi import over_mpi

    communicator = over_mpi()
    options |= {"communicator": communicator, "distribution": distribution or "replicate"}
    with Agreement(communicator).operation("command"), ExitStack() as silence:
        if communicator.rank:
            silence.enter_context(redirect_stdout(None))
            silence.enter_context(redirect_stderr(None))
        yield


class Command(click.Command):
    """A command with groups of options and an example."""

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
        """Write the example as it is."""
        del ctx
        with formatter.section("Example"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

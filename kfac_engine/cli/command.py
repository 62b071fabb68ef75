"""Defines commands whose help has headings of options, and an example at the end."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import click
from click.shell_completion import CompletionItem

from kfac_engine.cli.interruption import Invocation
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


class Option(click.Option):
    """An option below a heading of the help page.

    Args:
        heading: The heading.
        flags: Names of the option.
        names: The values that the option accepts, for the help page and for shells, or their places
            in the package, such as ``"losses.LOSSES"``. These are imported when a page or a shell
            needs the names, because that takes time.
        writes: What the command writes to the path that is the value; None if the command reads it.
        settings: Arguments of ``click.Option``.
    """

    def __init__(
        self,
        heading: str,
        *flags: str,
        names: Sequence[str] = (),
        writes: Written | None = None,
        **settings: Any,
    ) -> None:
        self.heading, self.writes, self._sources = heading, writes, names
        settings["show_default"] = settings.get("default") not in (None, "")
        if settings.get("multiple") and "repeated" not in settings["help"]:
            settings["help"] += " May be repeated."
        super().__init__(flags, **settings)

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


def file_option(heading: str, *flags: str, **settings: Any) -> Option:
    """Return an option whose value is a path."""
    return Option(heading, *flags, type=file_path, **settings)


def output(*flags: str, writes: Written = "file", **settings: Any) -> Option:
    """Return an option whose value is a path that the command writes."""
    return file_option("Output", *flags, writes=writes, **settings)


def count_option(heading: str, *flags: str, least: int = 1, **settings: Any) -> Option:
    """Return an option whose value is a whole number."""
    return Option(heading, *flags, type=click.IntRange(min=least), **settings)


def _remember(context: click.Context, _: click.Parameter, debug: bool) -> None:
    invocation = context.ensure_object(Invocation)
    invocation.debug |= debug
    invocation.command = context.command


debug_option = Option(
    "General",
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
    around: Callable[[dict[str, Any]], AbstractContextManager[object]] = nullcontext,
    **gathered: Sequence[Option],
) -> Callable[[Callable[..., Any]], "Command"]:
    """Return the decorator of a command, which the example names.

    Args:
        text: What the command does; not a docstring, because ``python -OO`` removes these.
        example: A command line, with a backslash at the end of each line but the last.
        parameters: Arguments and options that the function receives each by its name.
        options: Options that it receives as a dictionary ``options``. Each has the name of the
            keyword argument of the library that receives its value.
        around: Returns a context for the whole command, and may change the values of ``options``.
        gathered: Options that it receives as one object, with an attribute for each option.
    """

    def decorate(function: Callable[..., Any]) -> Command:
        def call(**values: Any) -> Any:
            def taken(several: Sequence[Option]) -> dict[str, Any]:
                return {str(option.name): values.pop(str(option.name)) for option in several}

            objects = {key: SimpleNamespace(**taken(group)) for key, group in gathered.items()}
            chosen = taken(options)
            with around(chosen), _checked_files(click.get_current_context()):
                keywords = {"options": chosen} if options else {}
                return function(**objects, **keywords, **values)

        return Command(
            example.split()[1],
            callback=call,
            help=text,
            short_help=text,
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


class Command(click.Command):
    """A command whose options have headings, with an example."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = isinstance(option, click.Option) and option.get_help_record(ctx)
            if record:  # click adds --help, which has no heading
                sections.setdefault(getattr(option, "heading", "General"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example as it is."""
        del ctx
        with formatter.section("Example"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

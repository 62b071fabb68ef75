"""Options that several commands share, in one place."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import click

Command: TypeAlias = Callable[..., Any]
file_path = click.Path(path_type=Path)


@dataclass
class Invocation:
    """One run of the program; changed by ``--debug`` alone, wherever it stands.

    Attributes:
        debug: Whether a failure shows its traceback.
    """

    debug: bool = False


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.ensure_object(Invocation).debug |= value


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for programs to read."
)

sample_option = click.option(
    "--inputs",
    type=file_path,
    help="Batch to find shapes and lengths of sequences with: .npz by input name, or one .npy.",
)


def one_or_all(
    _: click.Context, __: click.Parameter, values: tuple[Any, ...]
) -> str | tuple[Any, ...] | None:
    """The only name, several, or None where the option was not given."""
    return values[0] if len(values) == 1 else values or None


def _all_or_none(
    _: click.Context, __: click.Parameter, values: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    return values or None


def _megabytes(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    return None if value is None else value * 1_000_000


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...] | None:
    words: dict[str, tuple[str, ...] | None] = {"all": None, "none": ()}
    return words[value] if value in words else tuple(value.split(","))


def _parse_approximations(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for kind, _equals, name in pairs:
        if not kind or not name:
            raise click.BadParameter(f"expected KIND=NAME, such as conv2d=kron; got '{kind}'.")
    return {kind: name for kind, _equals, name in pairs}


def _parse_axes(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> dict[str, int] | None:
    pairs = [value.rpartition("=") for value in values]
    for name, _equals, axis in pairs:
        if not name or not axis.removeprefix("-").isdecimal():
            raise click.BadParameter(f"expected INPUT=AXIS, such as x=1; got '{name or axis}'.")
    return {name: int(axis) for name, _equals, axis in pairs} or None


# What is differentiated, besides losses and outputs, and in which form gradients come.
objective_options = (
    click.option(
        "--freeze",
        multiple=True,
        callback=_all_or_none,
        metavar="PATTERN",
        help="Exclude parameters whose name matches; may be repeated.",
    ),
    click.option(
        "--loss-weight",
        "loss_weights",
        type=float,
        multiple=True,
        callback=_all_or_none,
        help="Weight of each loss; one by default.",
    ),
    click.option(
        "--find-logits/--no-find-logits",
        default=True,
        show_default=True,
        help="Whether a loss on probabilities reads the logits before them.",
    ),
    click.option(
        "--class-axis", default=-1, show_default=True, help="Axis of classes or features."
    ),
    click.option(
        "--batch-axis",
        "batch_axes",
        multiple=True,
        metavar="INPUT=AXIS",
        callback=_parse_axes,
        help="Axis of an input that holds the examples; found by running the model by default.",
    ),
    click.option(
        "--reduction",
        type=click.Choice(["mean", "batch_mean", "sum"]),
        default="mean",
        show_default=True,
        help="How the loss runs over examples and positions.",
    ),
    click.option(
        "--gradient-dtype",
        type=click.Choice(["file", "float32"]),
        default="file",
        show_default=True,
        help="Type of the gradients of float16 and bfloat16 weights: their own, or float32.",
    ),
)


_ENGINE_OPTIONS = (
    click.option(
        "--loss",
        multiple=True,
        default=("categorical",),
        show_default=True,
        callback=one_or_all,
        help="Loss, by name; repeated, one an output.",
    ),
    click.option(
        "--output",
        multiple=True,
        callback=one_or_all,
        help="Output that the loss is put on; the model's own by default. One for each loss.",
    ),
    *objective_options,
    click.option(
        "--trainable",
        multiple=True,
        callback=_all_or_none,
        metavar="PATTERN",
        help="Only parameters whose name matches; may be repeated.",
    ),
    click.option(
        "--tie-weights", is_flag=True, help="Train weights that are equal in the file as one."
    ),
    click.option("--damping", default=1e-3, show_default=True, help="Added to the curvature."),
    click.option(
        "--mode",
        "estimation_mode",
        default="gradients",
        show_default=True,
        help="Estimation mode of the Fisher matrix.",
    ),
    click.option(
        "--approx",
        "approximations",
        multiple=True,
        metavar="KIND=NAME",
        callback=_parse_approximations,
        help="Approximation for a kind of layer; may be repeated.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "numpy", "cupy", "cupy-tf32", "cupy-fp32"]),
        default="auto",
        show_default=True,
        help="Array library.",
    ),
    click.option(
        "--threads", type=click.IntRange(min=1), help="Threads; the processor's cores by default."
    ),
    click.option(
        "--scratch",
        "scratch_bytes",
        callback=_megabytes,
        type=click.IntRange(min=1),
        metavar="MB",
        help="Bound of working memory, in MB; 64 on a CPU by default.",
    ),
    click.option(
        "--graph-passes",
        callback=_names,
        default="all",
        show_default=True,
        metavar="NAMES",
        help="Graph passes for speed and memory: names separated by commas, 'all' or 'none'.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Seed of sampled targets.",
    ),
)


def engine_options(command: Command) -> Command:
    """The command with the options of an engine: see ``keywords``."""
    return keywords(_ENGINE_OPTIONS)(command)


def keywords(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, handed over as ``options``, a dictionary.

    Args:
        options: click's decorators, in the order of the help page. Each is named after the keyword
            argument of the library that takes its value.

    Returns:
        The decorator; every value that the command has no parameter for goes into ``options``.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def call(**values: Any) -> Any:
            taken = {name: value for name, value in values.items() if name not in own}
            rest = {name: value for name, value in values.items() if name in own}
            return command(**rest, options=taken)

        return _decorated(call, options)

    return decorate


def gathered(
    keyword: str, record: type[Any], options: tuple[Callable[[Command], Command], ...]
) -> Callable[[Command], Command]:
    """A decorator that adds options to a command and hands their values over as one record.

    Args:
        keyword: The argument of the command that takes the record.
        record: A dataclass with one field for each option.
        options: click's decorators, in the order of the help page.

    Returns:
        The decorator.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            taken = {field.name: values.pop(field.name) for field in fields(record)}
            return command(**values, **{keyword: record(**taken)})

        return _decorated(call, options)

    return decorate


def _decorated(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command

"""Defines the options of an engine on the command line.

Each has the name and the default of its field of ``EngineOptions`` or ``CurvatureOptions``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from kfac_engine.cli.command import Option
from kfac_engine.cli.options import chosen_losses, one_or_all

LOSSES = "losses.LOSSES", "losses.kinds.OUTPUT"


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...] | None:
    words: dict[str, tuple[str, ...] | None] = {"all": None, "none": ()}
    return words[value] if value in words else tuple(value.split(","))


def _pairs(example: str, pattern: str, convert: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a callback that reads values ``KEY=VALUE``, each of which matches a pattern."""

    def read(
        _: click.Context, parameter: click.Parameter, values: Sequence[str]
    ) -> dict[str, Any] | None:
        pairs = {}
        for value in values:
            pair = re.fullmatch(pattern, value, re.S)
            if pair is None:
                raise click.BadParameter(
                    f"expected {parameter.metavar}, such as {example}; got '{value}'."
                )
            pairs[pair[1]] = convert(pair[2])
        return pairs or None

    return read


_ALL = (
    Option("Loss", "--loss", metavar="[OUTPUT=]LOSS", multiple=True, default=("categorical",),
        names=LOSSES,
        callback=chosen_losses,
        help="The loss, with options such as 'categorical(ignore_index=255, label_smoothing=0.1)'; "
        "'box*=normal(weight=2)' puts it on the outputs that match box*."),
    Option("Loss", "--output", metavar="NAME", multiple=True, callback=one_or_all,
        help="Output that a loss by name reads; by default the output from which no other output "
        "is computed."),
    Option("Loss", "--class-axis", type=int, default=-1,
        help="Axis of the classes or features in that output; -1 finds the axis of classes, and "
        "is else the last axis."),
    Option("Loss", "--reduction", type=click.Choice(("mean", "batch_mean", "sum")), default="mean",
        help="Reduction of the loss over examples and positions."),
    Option("Model", "--trainable", metavar="PATTERN", multiple=True, callback=one_or_all,
        help="Pattern of the names of trainable parameters; by default every constant that the "
        "graph uses like a parameter."),
    Option("Model", "--freeze", metavar="PATTERN", multiple=True, callback=one_or_all,
        help="Pattern of the names of parameters to exclude."),
    Option("Curvature", "--damping", type=float, default=0.001,
        help="Damping λ > 0, added to the Fisher matrix."),
    Option("Curvature", "--mode", "estimation_mode", metavar="NAME", default="gradients",
        names=("curvature.estimation_modes.MODES",), help="Estimation mode of the Fisher matrix."),
    Option("Curvature", "--approx", "approximations", metavar="KIND=NAME", multiple=True,
        callback=_pairs("conv2d=kron", "(.+?)=(.+)", str),
        names=("curvature.approximations.KINDS",),
        help="Approximation of a kind of layer, in place of the default; inspect shows the kinds "
        "in a model with their approximations."),
    Option("Machine", "--threads", type=int,
        help="Number of threads, also of ONNX Runtime; by default as many as BLAS has."),
    Option("Machine", "--backend", metavar="NAME", default="auto",
        names=("backend.select.BackendName",),
        help="Array library."),
    Option("Curvature", "--seed", type=int, default=0,
        help="Seed of sampled targets, and of random operators."),
    Option("Model", "--gradient-dtype", type=click.Choice(("file", "float32")), default="file",
        help="Element type of the gradients and parameters of a half-precision model: file for "
        "the type in the file, or float32."),
    Option("Model", "--tie-weights", is_flag=True,
        help="Train weights that are equal in the file as one parameter."),
    Option("Model", "--batch-axis", "batch_axes", metavar="INPUT=AXIS", multiple=True,
        callback=_pairs("x=1", r"(.+)=(-?\d{1,9})", int),
        help="Axis of the examples of an input; by default detected by running the model."),
    Option("Model", "--train-form", is_flag=True,
        help="Put the normalizations and dropouts of a model that was exported for inference into "
        "training form."),
    Option("Machine", "--graph-passes", metavar="NAMES", default="all", callback=_names,
        names=("all", "none", "runtime.cpu.graph_passes.PASSES"),
        help="Graph passes that make sessions faster or smaller."),
)  # fmt: skip


def engine_options(*names: str, without: Iterable[str] = ()) -> list[Option]:
    """Return the options of an engine, or those with some names."""
    return [o for o in _ALL if (o.name in names or not names) and o.name not in without]

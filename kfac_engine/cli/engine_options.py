"""The options of an engine on the command line, derived from the fields of ``EngineOptions``.

A field gives its option the name, the type and the default. ``ROWS`` has its group, its help text
and what differs on the command line. The record is imported when a command runs or shows its help,
not before.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from kfac_engine.cli.command import Choice, Command, Group, Option
from kfac_engine.cli.options import chosen_losses, one_or_all, one_or_more

HEADING = "Options of the engine"
# Fields that a command has as an option of its own (--exp, --refresh-every, --inputs) or sets
# itself, and fields for products that no command computes.
_ELSEWHERE = frozenset(
    {"exps", "schedule", "sample_inputs", "draws", "compute_cholesky", "compute_cholesky_inverse"}
    | {"communicator", "distribution"}
)
# Fields that the gradient of a model depends on, besides losses and outputs.
OBJECTIVE = (
    "class_axis", "reduction", "freeze", "gradient_dtype", "batch_axes",
)  # fmt: skip

# Example values by field, for messages.
_EXAMPLES = {"approximations": "conv2d=kron", "batch_axes": "x=1"}


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...] | None:
    words: dict[str, tuple[str, ...] | None] = {"all": None, "none": ()}
    return words[value] if value in words else tuple(value.split(","))


def _pairs(
    _: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str] | None:
    pairs = [value.partition("=") for value in values]
    for key, _equals, name in pairs:
        if not key or not name:
            raise _unlike(parameter, key)
    return {key: name for key, _equals, name in pairs} or None


def _axes(
    _: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, int] | None:
    pairs = [value.rpartition("=") for value in values]
    for name, _equals, axis in pairs:
        if not name or not re.fullmatch(r"-?\d{1,9}", axis):
            raise _unlike(parameter, name or axis)
    return {name: int(axis) for name, _equals, axis in pairs} or None


def _unlike(parameter: click.Parameter, text: str) -> click.BadParameter:
    example = _EXAMPLES.get(parameter.name or "")
    such = f", such as {example}" if example else ""
    return click.BadParameter(f"expected {parameter.metavar or 'KEY=VALUE'}{such}; got '{text}'.")


class Row:
    """The part of a command-line option that does not follow from its field.

    Args:
        group: Group of the option.
        text: Help text. It is no docstring, because ``python -OO`` removes docstrings.
        flag: Name of the option; by default the name of the field, with hyphens.
        names: The values that the option accepts: see ``Option``.
        settings: Arguments of ``click.Option`` that replace what follows from the type.
    """

    def __init__(
        self, group: Group, text: str, flag: str = "", names: Sequence[str] = (), **settings: Any
    ) -> None:
        self.group, self.text, self.flag = group, text, flag
        self.names, self.settings = names, settings


LOSSES = "losses.LOSSES", "losses.kinds.OUTPUT"
ROWS: Mapping[str, Row] = {
    "loss": Row(Group.LOSS, "The loss, with options such as "
        "'categorical(ignore_index=255, label_smoothing=0.1)'; 'box*=normal(weight=2)' puts it on "
        "the outputs that match box*.", names=LOSSES, metavar="[OUTPUT=]LOSS",
        default=("categorical",), callback=chosen_losses, type=str),
    "output": Row(Group.LOSS, "Output that a loss by name reads; by default the output from "
        "which no other is computed.", metavar="NAME"),
    "class_axis": Row(Group.LOSS, "Axis of the classes or features in that output; -1 is found "
        "for classes, and else the last."),
    "reduction": Row(Group.LOSS, "Reduction of the loss over examples and positions."),
    "trainable": Row(Group.MODEL, "Pattern of the names of parameters to train; by default "
        "every constant that the graph uses like a parameter.", metavar="PATTERN"),
    "freeze": Row(Group.MODEL, "Pattern of the names of parameters to exclude from training.",
        metavar="PATTERN"),
    "gradient_dtype": Row(Group.MODEL, "Element type of the gradients and parameters of a "
        "half-precision model: file for the type in the file, or float32."),
    "tie_weights": Row(Group.MODEL, "Train weights that are equal in the file as one "
        "parameter."),
    "batch_axes": Row(Group.MODEL, "Axis of the examples of an input; by default detected by "
        "running the model.", flag="--batch-axis", metavar="INPUT=AXIS"),
    "train_form": Row(Group.MODEL, "Put the normalizations and dropouts of a model that was "
        "exported for inference into training form."),
    "damping": Row(Group.CURVATURE, "Damping λ > 0, added to the Fisher matrix."),
    "ema_decay": Row(Group.CURVATURE, "Decay of the moving averages, in [0, 1)."),
    "estimation_mode": Row(Group.CURVATURE, "Estimation mode of the Fisher matrix.", flag="--mode",
        names=("curvature.estimation_modes.MODES",), metavar="NAME"),
    "approximations": Row(Group.CURVATURE, "Approximation of a kind of layer, in place of the "
        "default.", flag="--approx", metavar="KIND=NAME"),
    "seed": Row(Group.CURVATURE, "Seed of sampled targets, and of random operators."),
    "structure": Row(Group.CURVATURE, "Structure of the matrix.",
        names=("analysis.fisher_matrix.options.STRUCTURES",), metavar="NAME"),
    "fisher": Row(Group.CURVATURE, "Which Fisher matrix: exact, an estimate from one sampled "
        "target for each prediction, or the empirical matrix of the targets of the data.",
        names=("analysis.fisher_matrix.options.FISHERS",), metavar="NAME"),
    "biases": Row(Group.CURVATURE, "Blocks of biases: joint for a block of the weight with its "
        "bias, separate for a block of the weight and a block of the bias.",
        names=("analysis.fisher_matrix.options.BIASES",), metavar="NAME"),
    "layers": Row(Group.CURVATURE, "Layers that are measured: all, or last for the last layer "
        "before each loss.", names=("analysis.fisher_matrix.options.LAYERS",), metavar="NAME"),
    "covariance_every": Row(Group.REFRESHES, "Number of calls from one update of the "
        "covariances to the next: they are updated when counter % covariance_every == 0."),
    "refresh_every": Row(Group.REFRESHES, "Number of calls from one refresh of a factor to the "
        "next."),
    "policy": Row(Group.REFRESHES, "Which factors a call refreshes.", flag="--refresh-policy",
        names=("curvature.schedule.POLICIES",), metavar="NAME"),
    "threads": Row(Group.MACHINE, "Number of threads, also of ONNX Runtime; by default as "
        "many as BLAS has."),
    "backend": Row(Group.MACHINE, "Array library.", names=("backend.select.BackendName",),
        metavar="NAME"),
    "graph_passes": Row(Group.MACHINE, "Graph passes that make sessions faster or smaller.",
        names=("all", "none", "runtime.cpu.graph_passes.PASSES"), metavar="NAMES", callback=_names,
        multiple=False, default="all"),
}  # fmt: skip
# Help texts that differ for a measurement of curvature.
CURVATURE_TEXTS: Mapping[str, str] = {
    "trainable": "Pattern of the names of parameters to include; by default every constant that "
    "the graph uses like a parameter.",
    "freeze": "Pattern of the names of parameters to exclude.",
    "approximations": "Approximation of a kind of layer, in place of the default of the structure.",
}


def engine_record() -> type[Any]:
    """Return the record of the options of an engine."""
    from kfac_engine.engine.options import EngineOptions

    return EngineOptions


def curvature_record() -> type[Any]:
    """Return the record of the options of a measurement of curvature."""
    from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions

    return CurvatureOptions


class EngineCommand(Command):
    """A command with the options of an engine, or of another record, next to its own.

    Args:
        names: Fields of the record; empty for all.
        without: Fields that the command sets itself.
        record: Returns the record; it is not called before the options are needed.
        settings: Arguments of ``Command``.
    """

    def __init__(
        self,
        *args: Any,
        names: Sequence[str] = (),
        without: Sequence[str] = (),
        record: Callable[[], type[Any]] = engine_record,
        **settings: Any,
    ) -> None:
        self._names, self._without, self._record = names, without, record
        self._shared: list[click.Option] = []
        super().__init__(*args, **settings)

    @property
    def params(self) -> list[click.Parameter]:
        """All parameters, the options of the engine last; click extends this list."""
        if not self._shared:
            options = options_of(self._record(), self._names)
            self._shared = [option for option in options if option.name not in self._without]
            self._params += self._shared
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params = params
        self._shared = []

    @property
    def takes_all(self) -> bool:
        """Whether the command has all options of an engine, except options that it sets itself."""
        return self._record is engine_record and not self._names

    def notes(
        self, options: Sequence[click.Option]
    ) -> Iterable[tuple[str, Sequence[tuple[str, str]]]]:
        """Return a section with the kinds and names of --approx after its group."""
        if any(option.name == "approximations" for option in options):
            yield "Kinds and names of --approx, the default first", _kinds()


def _kinds() -> list[tuple[str, str]]:
    """Return kinds of layer with several approximations, each with their names."""
    from kfac_engine.curvature.approximations import KINDS, accepted

    kinds: dict[str, list[str]] = {}
    for kind in KINDS:
        if len(accepted(kind)) > 1:
            kinds.setdefault(", ".join(accepted(kind)), []).append(kind)
    return [(", ".join(alike), names) for names, alike in kinds.items()]


def options_of(record: type[Any], names: Sequence[str] = ()) -> list[Option]:
    """Return an option for each field of a dataclass that has rows in ``ROWS``, in their order.

    ``names`` selects fields; if it is empty, all are selected except those for which commands have
    options of their own.
    """
    types = get_type_hints(record)
    other = CURVATURE_TEXTS if record.__name__ == "CurvatureOptions" else {}
    chosen = names or [f.name for f in fields(record) if f.name not in _ELSEWHERE]
    return [
        _option(f, types[f.name], other.get(f.name)) for f in fields(record) if f.name in chosen
    ]


def _option(record_field: "Field[Any]", annotation: Any, text: str | None) -> Option:
    name, default = record_field.name, record_field.default
    row = ROWS[name]
    settings = {**_settings(annotation), **row.settings}
    if default is not MISSING and default is not None:
        settings.setdefault("default", default)
    flag = row.flag or f"--{name.replace('_', '-')}"
    if settings.get("is_flag") and default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    repeated = " May be repeated." if settings.get("multiple") else ""
    settings |= {"help": (text or row.text) + repeated, "show_default": "default" in settings}
    return Option([flag, name], group=row.group, names=row.names, **settings)


def _settings(annotation: Any) -> dict[str, Any]:
    """Return the arguments of ``click.Option`` that follow from the type of a field."""
    members = [member for member in _members(annotation) if member is not NoneType]
    generics = {get_origin(member): get_args(member) for member in members}
    if bool in members:
        return {"is_flag": True}
    if Literal in generics:
        return {"type": Choice(generics[Literal])}
    if Mapping in generics:
        axes = generics[Mapping][1] is int
        return {"multiple": True, "callback": _axes if axes else _pairs}
    if Sequence in generics:
        item = float if generics[Sequence][0] is float else str
        single = str in members
        return {
            "multiple": True, "type": item, "callback": one_or_all if single else one_or_more,
        }  # fmt: skip
    return {"type": next(kind for kind in (int, float, str) if kind in members)}


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) not in {Union, UnionType}:
        return [annotation]
    return [inner for member in get_args(annotation) for inner in _members(member)]

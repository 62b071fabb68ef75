"""The options of an engine on the command line, derived from the fields of ``EngineOptions``.

A field gives its option the name, the type and the default, and ``TEXTS`` the help text.
``SPELLINGS`` has its group, and where the command line differs the rest. The record is imported
when a command runs or shows its help, not before.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from kfac_engine.cli.command import Choice, Command, Group, Option
from kfac_engine.cli.engine_texts import CURVATURE_TEXTS, TEXTS
from kfac_engine.cli.options import one_or_all, one_or_more

HEADING = "Options of the engine"
# Fields that a command has as an option of its own (--exp, --refresh-every, --inputs) or sets
# itself, and fields for products that no command computes.
_ELSEWHERE = frozenset(
    {"exps", "schedule", "sample_inputs", "draws", "compute_cholesky", "compute_cholesky_inverse"}
    | {"communicator", "distribution", "layer_owners"}
)
# Fields that the gradient of a model depends on, besides losses and outputs.
OBJECTIVE = (
    "class_axis", "find_logits", "loss_weights", "ignore_index", "class_weights",
    "positive_weights", "label_smoothing", "reduction", "freeze", "gradient_dtype", "batch_axes",
)  # fmt: skip

# Field to a value, for messages.
_EXAMPLES = {"approximations": "conv2d=kron", "batch_axes": "x=1", "periods": "conv*=20"}


def _megabytes(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    return None if value is None else value * 1_000_000


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


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> Any:
    from kfac_engine.datasets.files import numbers_in

    return None if value is None else numbers_in(value)


def _unlike(parameter: click.Parameter, text: str) -> click.BadParameter:
    example = _EXAMPLES.get(parameter.name or "")
    such = f", such as {example}" if example else ""
    return click.BadParameter(f"expected {parameter.metavar or 'KEY=VALUE'}{such}; got '{text}'.")


def losses() -> Collection[str]:
    """Return the names of the losses."""
    from kfac_engine.losses import LOSSES
    from kfac_engine.losses.kinds import OUTPUT

    return (*LOSSES, OUTPUT)


def _modes() -> Collection[str]:
    from kfac_engine.curvature.estimation_modes import MODES

    return MODES


def _passes() -> Collection[str]:
    from kfac_engine.runtime.cpu.passes import PASSES

    return ("all", "none", *PASSES)


def _policies() -> Collection[str]:
    from kfac_engine.curvature.schedule import ADAPTIVE, POLICIES

    return (*POLICIES, *ADAPTIVE)


def _structures() -> Collection[str]:
    from kfac_engine.curvature_result.options import STRUCTURES

    return STRUCTURES


def _fishers() -> Collection[str]:
    from kfac_engine.curvature_result.options import FISHERS

    return FISHERS


def _biases() -> Collection[str]:
    from kfac_engine.curvature_result.options import BIASES

    return BIASES


def _layers() -> Collection[str]:
    from kfac_engine.curvature_result.options import LAYERS

    return LAYERS


def _backends() -> Collection[str]:
    from kfac_engine.backend.select import BackendName

    return get_args(BackendName)


@dataclass(frozen=True, slots=True)
class Spelling:
    """The differences between an option of the command line and its field.

    Attributes:
        group: Group of the option.
        flag: Name of the option; by default that of the field, with hyphens.
        settings: Arguments of ``click.Option``, in place of those that follow from the type.
        names: Return the values that the option accepts, for its help text and for shells.
    """

    group: Group
    flag: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: Callable[[], Collection[str]] = tuple


# An option whose value is a file with a list of numbers.
_NUMBERS = {"metavar": "FILE", "callback": _numbers, "multiple": False, "type": str}

SPELLINGS: Mapping[str, Spelling] = {
    "loss": Spelling(
        Group.LOSS, settings={"metavar": "NAME", "default": ("categorical",)}, names=losses
    ),
    "output": Spelling(Group.LOSS, settings={"metavar": "NAME"}),
    "class_axis": Spelling(Group.LOSS),
    "find_logits": Spelling(Group.LOSS),
    "loss_weights": Spelling(Group.LOSS, "--loss-weight"),
    "ignore_index": Spelling(Group.LOSS),
    "class_weights": Spelling(Group.LOSS, settings=_NUMBERS),
    "positive_weights": Spelling(Group.LOSS, settings=_NUMBERS),
    "label_smoothing": Spelling(Group.LOSS),
    "reduction": Spelling(Group.LOSS),
    "trainable": Spelling(Group.MODEL, settings={"metavar": "PATTERN"}),
    "freeze": Spelling(Group.MODEL, settings={"metavar": "PATTERN"}),
    "gradient_dtype": Spelling(Group.MODEL),
    "tie_weights": Spelling(Group.MODEL),
    "batch_axes": Spelling(Group.MODEL, "--batch-axis", {"metavar": "INPUT=AXIS"}),
    "train_form": Spelling(Group.MODEL),
    "damping": Spelling(Group.CURVATURE),
    "ema_decay": Spelling(Group.CURVATURE),
    "estimation_mode": Spelling(Group.CURVATURE, "--mode", {"metavar": "NAME"}, _modes),
    "approximations": Spelling(Group.CURVATURE, "--approx", {"metavar": "KIND=NAME"}),
    "seed": Spelling(Group.CURVATURE),
    "structure": Spelling(Group.CURVATURE, settings={"metavar": "NAME"}, names=_structures),
    "fisher": Spelling(Group.CURVATURE, settings={"metavar": "NAME"}, names=_fishers),
    "biases": Spelling(Group.CURVATURE, settings={"metavar": "NAME"}, names=_biases),
    "layers": Spelling(Group.CURVATURE, settings={"metavar": "NAME"}, names=_layers),
    "covariance_every": Spelling(Group.REFRESHES),
    "refresh_every": Spelling(Group.REFRESHES),
    "policy": Spelling(Group.REFRESHES, "--refresh-policy", {"metavar": "NAME"}, _policies),
    "drift": Spelling(Group.REFRESHES, "--refresh-drift"),
    "budget": Spelling(Group.REFRESHES, "--refresh-budget"),
    "periods": Spelling(Group.REFRESHES, "--refresh-period", {"metavar": "PATTERN=CALLS"}),
    "threads": Spelling(Group.MACHINE),
    "scratch_bytes": Spelling(
        Group.MACHINE, "--scratch", {"metavar": "MB", "callback": _megabytes}
    ),
    "backend": Spelling(Group.MACHINE, settings={"metavar": "NAME"}, names=_backends),
    "graph_passes": Spelling(
        Group.MACHINE,
        settings={"metavar": "NAMES", "callback": _names, "multiple": False, "default": "all"},
        names=_passes,
    ),
}


def engine_record() -> type[Any]:
    """Return the record of the options of an engine."""
    from kfac_engine.engine.options import EngineOptions

    return EngineOptions


def curvature_record() -> type[Any]:
    """Return the record of the options of a measurement of curvature."""
    from kfac_engine.curvature_result.options import CurvatureOptions

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
        """All parameters, those of the engine last; click extends this list."""
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
        """Whether the command has all options of an engine, but those that it sets itself."""
        return self._record is engine_record and not self._names

    def notes(
        self, options: Sequence[click.Option]
    ) -> Iterable[tuple[str, Sequence[tuple[str, str]]]]:
        """Return a section with the kinds and names of --approx after its group."""
        if any(option.name == "approximations" for option in options):
            yield "Kinds and names of --approx, the default first", _kinds()


def _kinds() -> list[tuple[str, str]]:
    """Return the kinds of layer with several approximations, and the names of these."""
    from kfac_engine.curvature.approximations import KINDS, accepted

    kinds: dict[str, list[str]] = {}
    for kind in KINDS:
        if len(accepted(kind)) > 1:
            kinds.setdefault(", ".join(accepted(kind)), []).append(kind)
    return [(", ".join(alike), names) for names, alike in kinds.items()]


def options_of(record: type[Any], names: Sequence[str] = ()) -> list[Option]:
    """Return an option for each field of a record.

    Args:
        record: A dataclass; ``TEXTS`` has a text for each of its fields.
        names: The fields; empty for all but those that the commands have as their own.

    Returns:
        The options, in the order of the fields.
    """
    types = get_type_hints(record)
    texts = {**TEXTS, **(CURVATURE_TEXTS if record.__name__ == "CurvatureOptions" else {})}
    chosen = names or [f.name for f in fields(record) if f.name not in _ELSEWHERE]
    return [_option(f, types[f.name], texts[f.name]) for f in fields(record) if f.name in chosen]


def _option(record_field: "Field[Any]", annotation: Any, text: str) -> Option:
    name, default = record_field.name, record_field.default
    spelling = SPELLINGS[name]
    settings = {**_settings(annotation), **spelling.settings}
    if default is not MISSING and default is not None:
        settings.setdefault("default", default)
    flag = _flag(name)
    if settings.get("is_flag") and default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    words = [text]
    if settings.get("multiple"):
        words.append("May be repeated.")
    return Option(
        [flag, name],
        group=spelling.group,
        names=spelling.names,
        help=" ".join(words),
        show_default="default" in settings,
        **settings,
    )


def _flag(name: str) -> str:
    """Return the option of a field."""
    return SPELLINGS[name].flag or f"--{name.replace('_', '-')}"


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

"""Defines ``EngineOptions``, which ``Engine.from_onnx`` and the commands fill."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, cast

from kfac_engine._types import Array
from kfac_engine.arguments import (
    MOST_THREADS,
    check_bool,
    check_choice,
    check_int,
    check_list,
    check_mapping,
    check_number,
    check_patterns,
    check_positive,
    check_seed,
)
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone, Communicator
from kfac_engine.engine.batch_shards import check_communicator
from kfac_engine.engine.loss_bindings import LossChoices, LossOptions
from kfac_engine.errors import InputError, UnknownNameError, suggestion
from kfac_engine.graph.passes.upcast import GradientDType
from kfac_engine.losses.objective import REDUCTIONS, Reduction
from kfac_engine.runtime.cpu.graph_passes import chosen_passes

# What dictionaries among the options look like, for messages.
_DICTIONARIES = {
    "approximations": "{'conv2d': 'diagonal'}",
    "batch_axes": "{'input': 1}",
    "sample_inputs": "{'input': array}",
}

Distribution: TypeAlias = Literal["replicate", "shard"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("replicate", "shard")
# The gradients of a step that a process receives, under the distribution "shard".
Gathering: TypeAlias = Literal["owned", "all"]
GATHERINGS: tuple[Gathering, ...] = ("owned", "all")

Options = ParamSpec("Options")
Owner = TypeVar("Owner")
Source = TypeVar("Source")
Record = TypeVar("Record")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is differentiated, measured and preconditioned: the options of an engine.

    Attributes:
        loss: Name of the loss; ``"output"`` for a file that computes its loss itself. A loss with
            options, such as ``Categorical(ignore_index=255, weight=0.5)``, and a loss object are
            accepted too, and a list with a loss for each output. A dictionary puts losses on
            outputs by name or pattern, such as ``{"box*": "normal", "class*": "multi_bernoulli"}``.
        output: Output that a loss by name reads; by default the output from which no other output
            is computed. With several losses, a list.
        class_axis: Axis of the classes or features in that output. -1 is the axis of the softmax,
            of the channels or of the columns of the operator that computes the classes, and where
            there is no such operator, the last axis.
        reduction: Reduction of the loss over examples and positions. ``"mean"`` is the mean over
            both, weighted if targets have weights; ``"batch_mean"`` is the sum over positions and
            the mean over examples.
        trainable: Pattern of the names of parameters to train; by default every constant that the
            graph uses like a parameter. A list may have several patterns. A name, or a pattern
            without such matches, selects other floating-point constants.
        freeze: Pattern of the names of parameters to exclude from training. A list may have several
            patterns.
        damping: Damping λ > 0, added to the Fisher matrix.
        ema_decay: Decay of the moving averages, in [0, 1).
        estimation_mode: Estimation mode of the Fisher matrix. ``"gradients"`` samples targets from
            the model. A loss that the file computes for each example has no distribution of
            targets; its part of the matrix is that of ``"empirical"``.
        exps: Powers of the Fisher matrix to precondition with. ``step`` uses the first.
        compute_cholesky: Store Cholesky factors for ``multiply_cholesky``.
        compute_cholesky_inverse: Store inverse factors for ``multiply_cholesky_inverse``.
        approximations: Approximation by kind of layer, in place of the default.
        schedule: Schedule of the updates of statistics and inverses.
        threads: Number of threads, also of ONNX Runtime; by default as many as BLAS uses.
        backend: Array library.
        seed: Seed of sampled targets, and of the random operators of the model.
        sample_inputs: Batch from which shapes are inferred, for models whose inputs cannot be
            generated.
        gradient_dtype: Element type of the gradients and parameters of a half-precision model: the
            type of the file, or float32. The model is computed in float32 in both cases.
        tie_weights: Train weights that are equal in the file as one parameter. See ``ties``.
        batch_axes: Axis of the examples of an input; by default detected by running the model.
            All inputs with examples must be named.
        train_form: Put the normalizations and dropouts of a model that was exported for inference
            into training form. The file of ``export`` has the form of the model's file.
        graph_passes: Graph passes that make sessions faster or smaller. The table is in
            ``docs/performance.md``; all by default, none for an empty list.
        communicator: The processes among which each batch is divided, such as ``over_mpi()``; None
            for a single process. Each process passes its part of the batch, and all receive the
            results of the whole batch.
        distribution: Division of the work among the processes. With ``"replicate"``, all of them
            store all inverses, and each computes some. With ``"shard"``, each layer has an owner,
            which stores its inverses and preconditions its gradient; a step returns the gradients
            of the layers that the process owns.
    """

    loss: LossChoices
    output: str | Sequence[str] | None = None
    class_axis: int = -1
    reduction: Reduction = "mean"
    trainable: str | Sequence[str] | None = None
    freeze: str | Sequence[str] | None = None
    damping: float = 1e-3
    ema_decay: float = 0.95
    estimation_mode: str = "gradients"
    exps: Sequence[float] = (-1,)
    compute_cholesky: bool = False
    compute_cholesky_inverse: bool = False
    approximations: Mapping[str, str] | None = None
    schedule: Schedule | None = None
    threads: int | None = None
    backend: str = "auto"
    seed: int = 0
    sample_inputs: Mapping[str, Array] | None = None
    gradient_dtype: GradientDType = "file"
    tie_weights: bool = False
    batch_axes: Mapping[str, int] | None = None
    train_form: bool = False
    graph_passes: Sequence[str] | None = None
    communicator: Communicator | None = None
    distribution: Distribution = "replicate"

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("reduction", self.reduction, REDUCTIONS)
        self.losses  # noqa: B018 (they check themselves)
        self._check_curvature()
        for name in ("trainable", "freeze"):
            check_patterns(name, getattr(self, name))
        if self.threads is not None:
            check_int("threads", self.threads, least=1, most=MOST_THREADS)
        check_seed(self.seed)
        check_communicator(self.communicator)
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        for name in ("tie_weights", "train_form", "compute_cholesky", "compute_cholesky_inverse"):
            check_bool(name, getattr(self, name))
        chosen_passes(self.graph_passes)
        for name, like in _DICTIONARIES.items():
            check_mapping(name, getattr(self, name), like)
        for name, axis in (self.batch_axes or {}).items():
            check_int(f"batch_axes['{name}']", axis, least=None)
        if not isinstance(self.backend, str):
            raise InputError(f"backend must be a name, such as 'numpy', got {self.backend!r}.")

    def _check_curvature(self) -> None:
        for exp in check_list("exps", self.exps, "(-1,)"):
            check_number("each of exps", exp)
        if not self.exps:
            raise InputError("exps must name at least one power, such as (-1,).")
        check_damping(self.damping, self.exps)
        check_number("ema_decay", self.ema_decay, "[0, 1)")
        check_choice("estimation_mode", self.estimation_mode, MODES)
        if self.schedule is not None:
            check_schedule(self.schedule)

    @property
    def losses(self) -> LossOptions:
        """The options that choose the losses."""
        return LossOptions(self.loss, self.output, self.class_axis, self.batch_axes)


def check_damping(damping: float, exps: Sequence[float]) -> None:
    """Refuse a damping that is not a positive number, or whose powers ``exps`` overflow."""
    check_positive("damping", damping)
    for exp in exps:
        try:
            power = float(damping) ** exp
        except OverflowError:
            power = inf
        if power == inf:
            raise InputError(
                f"damping {damping} to the power {exp} is more than a number can hold; choose "
                f"another damping, or another power in exps."
            )


def check_schedule(schedule: object) -> None:
    """Refuse an object that is not a schedule, with an InputError."""
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule must be a kfac_engine.Schedule, such as Schedule(refresh_every=10, "
            f"policy='round_robin'), got {schedule!r}."
        )


def check_names(call: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuse options that a call does not have; the message names the nearest known name."""
    for name in names:
        if name not in known:
            near = suggestion(name, known) or f"; its options: {', '.join(known)}"
            raise UnknownNameError(f"{call} has no option '{name}'{near}.")


def _agreement(communicator: object) -> Agreement:
    """Return the operations of a communicator's processes; of this one for another value."""
    return Agreement(communicator if isinstance(communicator, Communicator) else Alone())


def by_keyword(
    record: Callable[Options, Record],
) -> Callable[
    [Callable[[Owner, Source, Record], Made]], Callable[Concatenate[Owner, Source, Options], Made]
]:
    """Return a decorator that replaces the last argument, a record, by keywords for its fields.

    The decorator is for functions of two arguments and the record. The fields of the class
    ``record`` appear in their signatures, by keyword only.
    """
    options = inspect.signature(record).parameters
    new_record: Callable[..., Record] = record
    needed = [name for name, field in options.items() if field.default is field.empty]

    def decorate(
        function: Callable[[Owner, Source, Record], Made],
    ) -> Callable[Concatenate[Owner, Source, Options], Made]:
        shown = inspect.signature(function)
        record_name = list(shown.parameters)[-1]
        leading = list(shown.parameters.values())[:-1]
        names = [parameter.name for parameter in leading]

        @wraps(function)
        def call(*args: Any, **fields: Any) -> Made:
            by_name = {name: fields.pop(name) for name in names[len(args) :] if name in fields}
            with _agreement(fields.get("communicator")).operation(function.__qualname__):
                check_names(function.__qualname__, [n for n in fields if n not in names], options)
                counted = len(args) + len(by_name) == len(names) and not fields.keys() & {*names}
                if not counted or not fields.keys() >= {*needed}:
                    wanted = " and ".join(name for name in names if name != "cls")
                    raise InputError(
                        f"{function.__qualname__} takes {wanted}, and options by keyword; the "
                        f"required options are: {', '.join(needed)}."
                    )
                return function(*args, **by_name, **{record_name: new_record(**fields)})

        call.__signature__ = shown.replace(parameters=[*leading, *options.values()])  # type: ignore[attr-defined] # read by inspect
        return cast("Callable[Concatenate[Owner, Source, Options], Made]", call)

    return decorate

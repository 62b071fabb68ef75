"""The options of an engine: one frozen record, filled by ``Engine.from_onnx``, and the commands."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.graph.widen import GradientDType
from kfac_engine.heads import LossChoice, LossOptions
from kfac_engine.objective import Reduction, check_reduction
from kfac_engine.scheduler import Schedule

Options = ParamSpec("Options")
Owner = TypeVar("Owner")
Source = TypeVar("Source")
Record = TypeVar("Record")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is differentiated, measured and preconditioned: the options of an engine.

    Attributes:
        loss: A name (``"categorical"``, ``"normal"``, ``"multi_bernoulli"``), a loss object, or a
            list of them.
        output: The output a loss by name is put on, or a list; needed where it is not clear.
        class_axis: Axis of the classes in that output.
        find_logits: Whether a loss by name on an output of probabilities reads the logits that the
            model makes them of.
        loss_weights: What each loss is multiplied by; ones by default.
        reduction: ``"mean"`` over batch and positions, ``"batch_mean"`` or ``"sum"``.
        trainable: Patterns of parameter names; by default what the graph uses like parameters.
        freeze: Patterns of names that are not trained even so.
        damping: λ > 0, added to the Fisher matrix.
        ema_decay: Decay of the moving averages, in [0, 1).
        estimation_mode: ``"gradients"`` (targets sampled from the model), ``"empirical"``, ….
        exps: Powers to precondition with; the first is used by ``step``.
        approximations: Kind of layer to approximation, in place of the defaults.
        schedule: When statistics and inverses move.
        threads: That compute at a time, ONNX Runtime's too; by default as many as BLAS has.
        scratch_bytes: Bound of the working memory of a statistic, or of gradients of kernels; by
            default 64 MiB, 256 MiB on a GPU. Less is slower, once few images' patches fit.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``; see ``docs/gpu.md`` for others.
        seed: Of sampled targets.
        sample_inputs: A batch to find shapes with, where none can be made up.
        gradient_dtype: Element type of gradients and parameters of a half-precision model, which
            is computed in float32: ``"file"`` for the file's own, or ``"float32"``.
        batch_axes: Input name to the axis that holds its examples; found by running the model when
            left out. All inputs that have examples must be named.
        tie_weights: Whether weights that are equal in the file (see ``ties``) stay equal: they are
            then one parameter, and their gradients are its own.
    """

    loss: LossChoice | Sequence[LossChoice]
    output: str | Sequence[str] | None = None
    class_axis: int = -1
    find_logits: bool = True
    loss_weights: Sequence[float] | None = None
    reduction: Reduction = "mean"
    trainable: Sequence[str] | None = None
    freeze: Sequence[str] | None = None
    damping: float = 1e-3
    ema_decay: float = 0.95
    estimation_mode: str = "gradients"
    exps: Sequence[float] = (-1,)
    approximations: Mapping[str, str] | None = None
    schedule: Schedule | None = None
    threads: int | None = None
    scratch_bytes: int | None = None
    backend: str = "auto"
    seed: int = 0
    sample_inputs: Mapping[str, Array] | None = None
    gradient_dtype: GradientDType = "file"
    tie_weights: bool = False
    batch_axes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: An option is outside its range.
        """
        if not (np.isfinite(self.damping) and self.damping > 0):
            raise InputError(f"damping must be a positive number, got {self.damping}.")
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"ema_decay must lie in [0, 1), got {self.ema_decay}.")
        if not self.exps or not all(np.isfinite(exp) for exp in self.exps):
            raise InputError(f"exps must be one or more numbers, got {self.exps}.")
        for name in ("threads", "scratch_bytes"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, got {count}.")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}.")
        check_reduction(self.reduction)

    @property
    def losses(self) -> LossOptions:
        """The options that choose the losses."""
        return LossOptions(
            self.loss,
            self.output,
            self.class_axis,
            self.find_logits,
            self.loss_weights,
            self.batch_axes,
        )


def by_keyword(
    record: Callable[Options, Record],
) -> Callable[
    [Callable[[Owner, Source, Record], Made]], Callable[Concatenate[Owner, Source, Options], Made]
]:
    """A decorator: the last argument, a record, is given by its fields as keywords instead.

    Args:
        record: The class of the record; its fields appear in the signature.

    Returns:
        The decorator, for functions of two arguments and the record.
    """

    def decorate(
        function: Callable[[Owner, Source, Record], Made],
    ) -> Callable[Concatenate[Owner, Source, Options], Made]:
        @wraps(function)
        def call(
            owner: Owner, source: Source, /, *args: Options.args, **fields: Options.kwargs
        ) -> Made:
            return function(owner, source, record(*args, **fields))

        shown = inspect.signature(function)
        leading = list(shown.parameters.values())[:-1]
        fields = inspect.signature(record).parameters.values()
        call.__signature__ = shown.replace(parameters=[*leading, *fields])  # type: ignore[attr-defined] # read by inspect
        return call

    return decorate

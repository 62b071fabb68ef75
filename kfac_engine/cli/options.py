"""Options that several commands share, in one place."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine._types import Array

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

# What is differentiated, besides losses and outputs, and in which form gradients come.
objective_options = (
    click.option(
        "--loss-weight", type=float, multiple=True, help="Weight of each loss; one by default."
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


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is differentiated and preconditioned: the arguments of ``Engine.from_onnx``."""

    loss: tuple[str, ...]
    output: tuple[str, ...]
    loss_weight: tuple[float, ...]
    find_logits: bool
    class_axis: int
    reduction: Literal["mean", "batch_mean", "sum"]
    gradient_dtype: Literal["file", "float32"]
    trainable: tuple[str, ...]
    tie_weights: bool
    damping: float
    mode: str
    approx: Mapping[str, str]
    backend: str
    threads: int | None
    scratch: int | None
    seed: int

    def engine(
        self,
        model: Path,
        *,
        exp: float = -1,
        refresh_every: int = 1,
        sample_inputs: "Mapping[str, Array] | None" = None,
    ) -> "ke.Engine":
        """The engine for a model file.

        Args:
            model: Path of the file.
            exp: The power of the Fisher that it must offer.
            refresh_every: Batches between two computations of inverses.
            sample_inputs: A batch to find shapes with.

        Returns:
            The engine.
        """
        import kfac_engine as ke

        return ke.Engine.from_onnx(
            model,
            loss=self.loss if len(self.loss) > 1 else self.loss[0],
            output=self.output or None,
            loss_weights=self.loss_weight or None,
            find_logits=self.find_logits,
            class_axis=self.class_axis,
            reduction=self.reduction,
            gradient_dtype=self.gradient_dtype,
            trainable=self.trainable or None,
            tie_weights=self.tie_weights,
            damping=self.damping,
            estimation_mode=self.mode,
            exps=(exp,),
            schedule=ke.Schedule(refresh_every=refresh_every),
            approximations=self.approx or None,
            backend=self.backend,
            threads=self.threads,
            scratch_bytes=None if self.scratch is None else self.scratch * 1_000_000,
            seed=self.seed,
            sample_inputs=sample_inputs,
        )


def _parse_approximations(
    _: click.Context, __: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for kind, _equals, name in pairs:
        if not kind or not name:
            raise click.BadParameter(f"expected KIND=NAME, such as conv2d=kron; got '{kind}'.")
    return {kind: name for kind, _equals, name in pairs}


_ENGINE_OPTIONS = (
    click.option(
        "--loss",
        multiple=True,
        default=("categorical",),
        show_default=True,
        help="Loss, by name; repeated, one an output.",
    ),
    click.option(
        "--output",
        multiple=True,
        help="Output that the loss is put on; the model's own by default. One for each loss.",
    ),
    *objective_options,
    click.option(
        "--trainable",
        multiple=True,
        metavar="PATTERN",
        help="Only parameters whose name matches; may be repeated.",
    ),
    click.option(
        "--tie-weights", is_flag=True, help="Train weights that are equal in the file as one."
    ),
    click.option("--damping", default=1e-3, show_default=True, help="Added to the curvature."),
    click.option(
        "--mode", default="gradients", show_default=True, help="How the Fisher is estimated."
    ),
    click.option(
        "--approx",
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
        type=click.IntRange(min=1),
        metavar="MB",
        help="Bound of working memory, in MB; 64 on a CPU by default.",
    ),
    click.option("--seed", default=0, show_default=True, help="Of sampled targets."),
)


def engine_options(command: Command) -> Command:
    """The command with the options of ``EngineOptions``, handed over as ``options``."""
    return gathered("options", EngineOptions, _ENGINE_OPTIONS)(command)


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

        decorated: Command = call
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate

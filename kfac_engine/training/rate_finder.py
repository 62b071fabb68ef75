"""Search for a learning rate: steps with growing rates on a copy of a model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from itertools import count
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter1d

from kfac_engine._types import Array
from kfac_engine.arguments import check_seed, flag, positive, whole
from kfac_engine.datasets.examples import TARGETS, Batch
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import Data, refuse_separate_targets
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.errors import (
    BackendError,
    DivergenceWarning,
    InputError,
    NonFiniteError,
    UnsupportedError,
)
from kfac_engine.graph.load import ModelSource
from kfac_engine.system.writing import checked_path, write_rendered
from kfac_engine.training.bars import stages
from kfac_engine.training.batches import Batches, run_data
from kfac_engine.training.fit import optimizer_by_name
from kfac_engine.training.optimizer import Optimizer

_LEAST_STEPS = 20
# The loss has exploded when its mean over the latest steps exceeds the lowest such mean by so many
# times the first loss.
_EXPLOSION, _RECENT = 3.0, 5
# Standard deviation of the Gaussian that smooths the losses, in parts of the steps.
_SMOOTHING = 0.03
# The fall of the smoothed loss must exceed the noise of the losses so many times.
_CLEAR_FALL = 3.0
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, eq=False)
class RateSearch:
    """The result of ``find_rate``.

    Attributes:
        rates: Learning rates of the steps, ascending.
        losses: Loss of the batch after the step of each rate.
        suggestion: Rate at which the smoothed loss falls most steeply against the logarithm of the
            rate; None where no rate lowers the loss clearly.
    """

    rates: Array
    losses: Array
    suggestion: float | None

    def plot(self, path: str | Path) -> None:
        """Draw the losses against the rates.

        Args:
            path: File that ends in ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            InputError: The file has another ending, or cannot be written.
            BackendError: matplotlib is not installed.
        """
        file = check_plot(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="C0", alpha=0.35, label="batch")
        axes.plot(self.rates, smoothed(self.losses), color="C0", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion {self.suggestion:.3g}"
            axes.axvline(self.suggestion, color="C1", label=label)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss after the step")
        axes.legend()
        write_rendered(file, partial(figure.savefig, format=file.suffix[1:].lower(), dpi=120))


def check_plot(path: str | Path) -> Path:
    """Return the file of a plot, after a check that it can be drawn.

    Its ending is ``.png``, ``.svg`` or ``.pdf``.
    """
    file = checked_path(path)
    if file.suffix.lower() not in _FORMATS:
        raise InputError(f"'{file}' must end in {', '.join(_FORMATS)}; name such a file.")
    try:
        import matplotlib.figure  # noqa: F401 # whether it is installed
    except ModuleNotFoundError:
        raise BackendError("plot needs matplotlib: pip install 'kfac-engine[plot]'.") from None
    return file


def find_rate(  # noqa: PLR0913 (the options of a run)
    model_or_engine: ModelSource | Engine,
    data: Data,
    loss: LossChoices = "categorical",
    optimizer: str = "adam",
    batch_size: int = 128,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    seed: int = 0,
    progress: bool = False,
    **options: Any,
) -> RateSearch:
    """Return a learning rate for an optimizer, from a short run whose rate grows exponentially.

    The run ends before ``steps`` if the loss explodes. It trains a copy: the engine, its state and
    the file do not change. ``KfacOptimizer`` and ``fit`` with ``"kfac"`` need no learning rate; for
    ``optimizer="kfac"``, the result is for ``KfacOptimizer(engine, learning_rate)``.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3 (range
    test); here the rates grow exponentially.

    Args:
        model_or_engine: Path, bytes or ``ModelProto`` of a model, or an engine.
        data: Training data, as for ``fit``.
        loss: Loss of a model; an engine has its own.
        optimizer: Name of an optimizer of ``fit``.
        batch_size: Examples in a batch, where ``data`` are no batches.
        lowest: Rate of the first step.
        highest: Rate of the last step.
        steps: Number of rates, at least 20.
        seed: Seed of the order of the examples.
        progress: Whether to show a bar on stderr; there is none if stderr is no terminal.
        options: Further arguments of the class of the optimizer, such as ``momentum``.

    Returns:
        The rates, the losses and the suggestion.

    Raises:
        InputError: An argument is wrong, or does not fit the others.
        UnknownNameError: An optimizer has no such name.
        UnsupportedError: The engine has a communicator of several processes.
        NonFiniteError: The first batch yields NaN or infinity.
    """
    refuse_separate_targets(loss, "find_rate(model, (inputs, targets), …)")
    positive("lowest", lowest)
    positive("highest", highest)
    if not lowest < highest:
        raise InputError(f"lowest must be below highest, got {lowest:g} and {highest:g}.")
    whole("steps", steps, least=_LEAST_STEPS)
    whole("batch_size", batch_size, least=1)
    check_seed(seed)
    flag("progress", progress)
    rates = np.geomspace(lowest, highest, steps)
    with _copy(model_or_engine, data, loss, seed) as engine:
        trained = _optimizer(engine, optimizer, rates, options)
        batches = run_data(data, None, engine.example_axes, batch_size, seed).train
        with stages(progress, steps + 1) as begin:
            losses = _losses(trained, _announced(_endless(batches), rates, begin))
    tried = rates[: len(losses) - 1]
    return RateSearch(tried, losses[1:], suggested_rate(tried, losses[1:]))


def smoothed(losses: Array, order: int = 0) -> Array:
    """Return losses, or their derivative by the index, smoothed by a Gaussian."""
    width = max(1.0, _SMOOTHING * len(losses))
    return np.asarray(gaussian_filter1d(losses, width, order=order, mode="reflect"))


def suggested_rate(rates: Array, losses: Array) -> float | None:
    """Return the rate at which the smoothed loss falls most steeply.

    The rates are a geometric sequence, ``(n,)``. The result is None where the smoothed loss does
    not fall by three times the noise of the losses.
    """
    if len(losses) < _LEAST_STEPS // 2:
        return None
    curve = smoothed(losses)
    bottom = int(np.argmin(curve))
    noise = float(np.std((losses - curve)[: bottom + 1]))
    if curve[: bottom + 1].max() - curve[bottom] <= _CLEAR_FALL * noise or not bottom:
        return None
    return float(rates[int(np.argmin(smoothed(losses, order=1)[: bottom + 1]))])


@contextmanager
def _copy(
    source: ModelSource | Engine, data: Data, loss: LossChoices, seed: int
) -> Iterator[Engine]:
    """Return a context with an engine of its own for a model or for the model of an engine."""
    if not isinstance(source, Engine):
        _, sample = with_first_examples(source, data)
        yield Engine.from_onnx(
            source, loss=loss, seed=seed, gradient_dtype="float32", sample_inputs=sample
        )
        return
    if not source.agreement.alone:
        raise UnsupportedError(
            "find_rate searches in one process; pass the file of the model instead of an engine "
            "with a communicator, and all processes make the same search."
        )
    options = {field.name: getattr(source.options, field.name) for field in fields(source.options)}
    with TemporaryDirectory(prefix="kfac-engine-rate-") as folder:
        file = Path(folder) / "model.onnx"
        source.export(file)
        yield Engine.from_onnx(file, **options)


def _optimizer(engine: Engine, name: str, rates: Array, options: dict[str, Any]) -> Optimizer:
    """Return an optimizer that takes the learning rate of each step from ``rates``."""
    if "learning_rate" in options:
        raise InputError("find_rate varies learning_rate; leave it out, or set lowest and highest.")
    rate = {"learning_rate": lambda step: float(rates[min(step, len(rates) - 1)])}
    others = signature(find_rate).parameters
    return optimizer_by_name(name, {**options, **rate}, "find_rate", others)(engine)


def _endless(batches: Batches) -> Iterator[list[Batch]]:
    """Yield the batches of one epoch after the other."""
    for number in count():
        epoch = batches.steps(number)
        first = next(epoch, None)
        if first is None:
            raise InputError("an epoch of the data has no batch; give one batch at least.")
        yield first
        yield from epoch


def _announced(
    batches: Iterator[list[Batch]], rates: Array, begin: Callable[[str], None]
) -> Iterator[list[Batch]]:
    """Show each rate and yield a batch for it; yield another batch for the last loss."""
    for rate, batch in zip([*rates, rates[-1]], batches, strict=False):
        begin(f"rate {rate:.2e}")
        yield batch


def _losses(optimizer: Optimizer, batches: Iterator[list[Batch]]) -> Array:
    """Return the losses of batches, each before the step with it, up to an explosion."""
    losses: list[float] = []
    lowest = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # the run diverges on purpose
        for batch in batches:
            try:
                losses.append(optimizer.step(batch).loss)
            except NonFiniteError as error:
                if not losses or (error.place and error.place[0] == TARGETS):
                    raise
                break
            if not isfinite(losses[-1]):
                return np.array(losses[:-1])
            recent = float(np.mean(losses[-_RECENT:]))
            lowest = min(lowest, recent)
            if recent - lowest > _EXPLOSION * abs(losses[0]):
                break
    return np.array(losses)

"""The summary of an engine, for ``repr`` and notebooks."""

from collections.abc import Iterable, Sequence
from itertools import islice

from kfac_engine.curvature.config import show_damping
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.loss_bindings import LossBinding
from kfac_engine.engine.report import LayerReport
from kfac_engine.losses import LOSSES
from kfac_engine.text.summary import Summary, Table, counted, dimensions

# Losses and parameters of a layer that are listed.
_MOST_LISTED = 4


def engine_summary(
    name: str,
    assembly: Assembly,
    settings: tuple[float, Schedule],
    counter: int,
    layers: Iterable[LayerReport],
) -> Summary:
    """Return the summary of an engine.

    Args:
        name: Name of the model.
        assembly: The model, its losses and its layers.
        settings: Damping and schedule.
        counter: Number of calls of ``observe`` and ``step``.
        layers: Reports of the layers; those of the first rows are read.

    Returns:
        Facts, and a table of the layers.
    """
    damping, schedule = settings
    values = assembly.model.parameters.values()
    generic = sum(layer.kind == "generic" for layer in assembly.discovery.layers)
    count = len(assembly.discovery.layers)
    without = f", {counted(generic, 'parameter')} without a layer" if generic else ""
    facts = {
        "loss": listed([_loss(head) for head in assembly.task.heads]),
        "parameters": f"{counted(sum(v.size for v in values), 'number')} in "
        f"{counted(len(values), 'array')}",
        "layers": f"{count - generic:,}{without}",
        "backend": assembly.collection.backend.name,
        "damping": show_damping(damping),
        "schedule": f"statistics {_period(schedule.covariance_every)}, inverses "
        f"{_period(schedule.refresh_every)} ({schedule.policy})",
        "calls": f"{counter:,} of step and observe",
    }
    heads = ("parameters", "kind", "block", "factors")
    return Summary(f"Engine of '{name}'", facts, Table(heads, map(_row, layers), count, "layers"))


def listed(texts: Sequence[str]) -> str:
    """Return the first texts of a list, and the number of the others."""
    more = len(texts) - _MOST_LISTED
    shown = ", ".join(islice(texts, _MOST_LISTED))
    return f"{shown}, {more:,} more" if more > 0 else shown


def _loss(head: LossBinding) -> str:
    kind: type = type(head.loss)
    names = (name for name, factory in LOSSES.items() if factory is kind)  # type: ignore[comparison-overlap]
    return f"{next(names, kind.__name__)} on '{head.output}'"


def _period(calls: int) -> str:
    return "every call" if calls == 1 else f"every {calls:,} calls"


def _row(layer: LayerReport) -> tuple[str, str, str, str]:
    names = [name + part for name, part in zip(layer.parameters, layer.parts, strict=True)]
    factors = ", ".join(dimensions(shape) for shape in layer.factor_shapes)
    return listed(names), layer.kind, layer.formula, factors

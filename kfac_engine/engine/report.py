"""Reports the blocks, factor sizes and costs of an engine before its first step.

Notes name the factors whose refreshes or bytes dominate, with a cheaper approximation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from kfac_engine._types import Array, Params
from kfac_engine.curvature.approximations import KINDS, row
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.config import show_damping
from kfac_engine.curvature.refreshes import averaged_shapes, refresh_cost
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.loss_bindings import LossBinding
from kfac_engine.engine.parameter_entries import ParameterEntries
from kfac_engine.graph.passes.train_form import inference_nodes, listed_names
from kfac_engine.layers.match import LayerMatch, Tensors
from kfac_engine.losses import LOSSES
from kfac_engine.runtime.batch_axis import Batch, find_coupling
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.summary import Summary, Table, counted, dimensions


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A layer with its block, or a parameter without a layer.

    Attributes:
        kind: Kind of layer; ``"generic"`` for parameters without a layer.
        parameters: Names of its parameters in the file.
        parts: The entries of each parameter that the layer uses, such as ``[0:4, :]``; empty for
            all entries.
        key: Its parameters as its block calls them, a name or a tuple: the key in
            ``collection.fisher_blocks``.
        approximation: Row of the table of approximations.
        formula: The block in a few symbols.
        numbers: Number of entries of its parameters.
        inputs: Name of the layer's input, or a name for each use; empty if generic.
        outputs: Name of its output, likewise; empty if generic.
        factor_shapes: Shapes of the factors' averages.
        symbols: Symbol of each factor: ``"A"``, ``"G"``, ``"s"`` or ``"F"``.
        factor_bytes: Bytes of averages and stored powers together.
        inverse_flops: Cost of one refresh.
        reason: Why a parameter is generic; empty for layers.
    """

    kind: str
    parameters: tuple[str, ...]
    parts: tuple[str, ...]
    key: Params
    approximation: str
    formula: str
    numbers: int
    inputs: Tensors
    outputs: Tensors
    factor_shapes: tuple[tuple[int, ...], ...]
    symbols: tuple[str, ...]
    factor_bytes: int
    inverse_flops: float
    reason: str


@dataclass(frozen=True, slots=True)
class LossReport:
    """A loss, the value that it reads, and the axis of the examples."""

    loss: str  # class of the predictive distribution
    output: str  # the output on which the loss is put
    reads: str  # the value that the loss reads
    how: str  # why the loss reads another value than the output; empty if it reads the output
    batch_axis: int  # axis of the examples in the output
    # Axes of the examples, by input name; inputs without such an axis are absent.
    input_axes: Mapping[str, int]
    positions: int  # positions of each example that are folded into this axis; 1 for none
    fixed_batch: str  # why the model runs with one batch size only; empty where any will do
    joint_batch: str  # why some examples of a batch are not a batch; empty where they are
    # The node that makes results of one example depend on the others; empty if none was found.
    # Curvature takes examples for independent.
    coupling: str
    # Sentences about assumptions on the output and on the batch that may be wrong.
    doubts: tuple[str, ...]
    examples: int  # examples in the batch of the sample run; 1 for generated inputs


def layer_reports(
    entries: ParameterEntries, collection: LayerCollection, model: OnnxModel, exps: Sequence[float]
) -> Iterator[LayerReport]:
    """Yield a report for each block, in the order of the graph.

    ``collection`` has the blocks, ``model`` the shapes of the parameters, and ``exps`` the powers
    that are stored.
    """
    for layer in entries.layers:
        yield _report(layer, entries, collection, model, exps)


def loss_reports(
    heads: Sequence[LossBinding], batch: Batch, model: OnnxModel, inputs: Mapping[str, Array] | None
) -> tuple[LossReport, ...]:
    """Return a report for each loss; runs the model to find examples that depend on each other.

    ``inputs`` are the batch of the sample run; None for generated inputs.
    """
    # A single number for the whole batch, which the file computes, has no place of the examples.
    heads = [head for head in heads if head.output in batch.places]
    outputs = [head.output for head in heads]
    coupling = find_coupling(model.graph, model.facts, outputs, batch, inputs)
    return tuple(
        LossReport(
            loss=type(head.loss).__name__,
            output=head.output,
            reads=head.logits.value if head.logits else head.output,
            how=head.logits.how if head.logits else "",
            batch_axis=batch.places[head.output].axis,
            input_axes=dict(batch.inputs),
            positions=batch.places[head.output].repeats,
            fixed_batch=batch.fixed,
            joint_batch=batch.joint,
            coupling=coupling,
            doubts=tuple(filter(None, (head.doubt, batch.note))),
            examples=batch.examples(inputs) if inputs else 1,
        )
        for head in heads
    )


def _report(
    layer: LayerMatch,
    entries: ParameterEntries,
    collection: LayerCollection,
    model: OnnxModel,
    exps: Sequence[float],
) -> LayerReport:
    key, names = layer.key, entries.names(layer)
    block = collection.fisher_blocks[key]
    approximation = collection.approximation_of(key)
    item = max(model.parameters[names[0]].dtype.itemsize, 4)
    packed = [collection.require_shape(name) for name in layer.parameters]
    shapes = block.factor_shapes(packed)
    stored = [f.stored_numbers(shape) for f, shape in zip(block.factors, shapes, strict=True)]
    refreshed = (
        shape
        for averages, numbers in zip(averaged_shapes(block.factors, shapes), stored, strict=True)
        if numbers
        for shape in averages
    )
    return LayerReport(
        kind=layer.kind,
        parameters=names,
        parts=entries.extents(layer),
        key=key,
        approximation=approximation,
        formula=row(layer.kind, approximation).formula,
        numbers=sum(map(prod, packed)),
        inputs=layer.inputs,
        outputs=layer.outputs,
        factor_shapes=shapes,
        symbols=block.symbols,
        factor_bytes=item * (sum(map(prod, shapes)) + sum(stored)),
        inverse_flops=sum(map(refresh_cost, refreshed)),
        reason=layer.reason,
    )


def inference_notes(model: OnnxModel) -> Iterator[str]:
    """Yield notes on normalizations and dropouts that are in the form of inference.

    The notes are clauses with the names of the nodes.
    """
    nodes = inference_nodes(model.loaded.graph)
    if nodes.normalizations:
        yield (
            f"{listed_names(nodes.normalizations)}: normalization in the form of inference, its "
            f"running statistics do not change; train_form trains it with those of the batch"
        )
    if nodes.dropouts:
        names = listed_names(nodes.dropouts)
        yield f"{names}: dropout in the form of inference; train_form drops elements in training"


# -- the summary for repr and notebooks ------------------------------------------------------------

# Losses and parameters of a layer that are listed.
_MOST_LISTED = 4


def engine_summary(
    name: str,
    assembly: Assembly,
    settings: tuple[float, Schedule],
    counter: int,
    layers: Iterable[LayerReport],
) -> Summary:
    """Return the summary of an engine: facts, and a table of the layers.

    ``settings`` are damping and schedule, and ``counter`` is the number of calls of ``observe`` and
    ``step``. Only the reports of the first rows are read from ``layers``.
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
    """Return the first texts of a list, and the number of further texts."""
    more = len(texts) - _MOST_LISTED
    shown = ", ".join(islice(texts, _MOST_LISTED))
    return f"{shown}, {more:,} more" if more > 0 else shown


def _loss(head: LossBinding) -> str:
    kind: type = type(head.loss)
    names = (name for name, factory in LOSSES.items() if factory is kind)
    return f"{next(names, kind.__name__)} on '{head.output}'"


def _period(calls: int) -> str:
    return "every call" if calls == 1 else f"every {calls:,} calls"


def _row(layer: LayerReport) -> tuple[str, str, str, str]:
    names = [name + part for name, part in zip(layer.parameters, layer.parts, strict=True)]
    factors = ", ".join(dimensions(shape) for shape in layer.factor_shapes)
    return listed(names), layer.kind, layer.formula, factors


# -- notes on large factors ------------------------------------------------------------------------

# Largest number of rows of a factor without a note: its refresh takes less than a second on a core.
_LARGE = 2048
# From this number of rows on, a refresh takes longer than anything else in a step.
_VERY_LARGE = 4096
# Shares of all refreshes and of the peak memory that a layer with a large factor may have.
_MOST_OF_REFRESHES, _MOST_OF_MEMORY = 0.5, 0.25


def large_factor_notes(layers: Sequence[LayerReport], peak: int | None = None) -> Iterator[str]:
    """Yield notes on layers whose factors are too large; equal layers share a note.

    A layer has a note if a factor has more than 4096 rows; or if a factor has more than 2048 rows,
    and the layer takes more than half of the operations of all refreshes or more than a quarter of
    the peak memory of a step, in bytes (None if unknown). A note is a clause with the cost, and
    with the approximation that has smaller factors.
    """
    refreshes = sum(layer.inverse_flops for layer in layers)
    alike: dict[object, list[LayerReport]] = {}
    for layer in layers:
        large = [shape[-1] for shape in layer.factor_shapes if _is_large(shape)]
        if large and (
            max(large) > _VERY_LARGE
            or layer.inverse_flops > _MOST_OF_REFRESHES * refreshes
            or (peak and layer.factor_bytes > _MOST_OF_MEMORY * peak)
        ):
            alike.setdefault((layer.kind, *large), []).append(layer)
    for group in alike.values():
        yield f"{_cost(group, refreshes, peak)}; {_advice(group[0])}"


def _cost(group: Sequence[LayerReport], refreshes: float, peak: int | None) -> str:
    """Return the cost of layers with large factors of equal sizes."""
    large = [shape for shape in group[0].factor_shapes if _is_large(shape)]
    names = ", ".join(group[0].parameters)
    more = f" and of {len(group) - 1} more layers" if len(group) > 1 else ""
    sides = " and ".join(f"{shape[-1]}×{shape[-1]}" for shape in large)
    flops = sum(map(refresh_cost, large))
    shares = []
    if refreshes:
        part = sum(layer.inverse_flops for layer in group) / refreshes
        shares.append(f"{100 * part:.0f} % of the operations of all refreshes")
    if peak:
        part = sum(layer.factor_bytes for layer in group) / peak
        shares.append(f"{100 * part:.0f} % of the peak memory")
    return (
        f"each refresh of {names}{more} inverts {sides}, {flops / 1e9:.3g} GFLOP; their factors "
        f"take {' and '.join(shares)}"
    )


def _advice(layer: LayerReport) -> str:
    """Return the approximation without large factors."""
    kind, better = layer.kind, KINDS[layer.kind].large
    if not better:
        return f"{kind} has no approximation without them, so refresh them less often"
    return f"'{better}' (--approx {kind}={better}) has smaller ones"


def _is_large(shape: tuple[int, ...]) -> bool:
    """Return whether an average is a matrix of many rows, or a stack of such matrices."""
    return len(shape) > 1 and shape[-1] > _LARGE

"""The sizes of a model from which ``ranks.cost`` computes the cost of a rank."""

from collections.abc import Iterator, Sequence
from math import prod

from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor
from kfac_engine.curvature.factors.lagged import LaggedFactor
from kfac_engine.curvature.refreshes import factor_shapes, refresh_cost, refreshed_shapes
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.report import LayerReport
from kfac_engine.ranks.sizes import BlockSize, Divisible, FactorSize, ModelSize


def model_size(assembly: Assembly, layers: Sequence[LayerReport], examples: int = 1) -> ModelSize:
    """Return the sizes of a model.

    Args:
        assembly: The model with its blocks.
        layers: Reports of all blocks.
        examples: Number of examples in the batch of one rank.

    Returns:
        The sizes; the blocks have the order of the layers. Operations of nodes between layers, such
        as products of queries and keys, are not counted.
    """
    collection = assembly.collection
    names, blocks = dict[int, str](), dict[str, BlockSize]()
    for layer in layers:
        label = ", ".join(
            f"{name} {part}".rstrip()
            for name, part in zip(layer.parameters, layer.parts, strict=True)
        )
        block = collection.fisher_blocks[layer.key]
        factors, divisible = block.factors, _divisible(assembly, layer, block)
        for symbol, factor in zip(layer.symbols, factors, strict=True):
            names.setdefault(id(factor), f"{label}: {symbol}")
        rows = _rows(assembly, layer) * examples
        blocks[label] = BlockSize(
            numbers=layer.numbers,
            parameters=layer.parameters,
            factors=tuple(dict.fromkeys(names[id(factor)] for factor in factors)),
            rows=rows,
            # An embedding copies rows of its table.
            forward=0.0 if layer.kind.startswith("embedding") else 2 * rows * layer.numbers,
            products=2 * layer.numbers * _multiplications(layer, factors),
            divisible=divisible,
            extent=layer.factor_shapes[0 if divisible == "rows" else -1][-1] if divisible else 1,
            most_owners=assembly.options.layer_owners,
        )
    # Half precision is sent as float32.
    itemsize = max(4, *(array.dtype.itemsize for array in assembly.model.parameters.values()))
    sizes = dict(_factor_sizes(collection, names, itemsize))
    return ModelSize(blocks, sizes, itemsize, _sources(assembly))


def _factor_sizes(
    collection: LayerCollection, names: dict[int, str], itemsize: int
) -> Iterator[tuple[str, FactorSize]]:
    """Yield the name and the sizes of each factor, for parameters of a given itemsize."""
    shapes, refreshed = factor_shapes(collection), refreshed_shapes(collection)
    for factor in collection.get_factors():
        shape = shapes[id(factor)]
        yield (
            names[id(factor)],
            FactorSize(
                shape,
                stored=factor.stored_numbers(shape),
                refresh=sum(map(refresh_cost, refreshed.get(id(factor), ()))),
                symmetric=_is_symmetric(factor),
                divided=factor.only_refreshes_read,
                needed=isinstance(factor, EigenbasisFactor),
                wide=isinstance(factor, EigenbasisFactor),
                precise=factor.narrowest.itemsize > itemsize,
            ),
        )


def _divisible(assembly: Assembly, layer: LayerReport, block: FisherBlock) -> Divisible | None:
    """Return the parts of a product that several ranks can compute.

    The parameters of the block must be whole parameters of the model, in the same shapes.
    """
    parts, parameters = assembly.discovery.parts, assembly.model.parameters
    names = dict(zip(layer.parameters, uses(layer.key), strict=True))
    whole = all(
        len(parts[name]) == 1
        and parts[name][0].index is None
        and assembly.model.facts[of_block].shape == parameters[name].shape
        for name, of_block in names.items()
    )
    return block.divisible if whole else None


def _is_symmetric(factor: FisherFactor) -> bool:
    """Return whether average and inverses are symmetric matrices; a lagged average is not."""
    return isinstance(factor, DenseSquareMatrixFactor) and not isinstance(factor, LaggedFactor)


def _rows(assembly: Assembly, layer: LayerReport) -> float:
    """Return the number of rows of each example: positions times uses."""
    facts, batch = assembly.model.facts, assembly.task.batch
    if not layer.outputs:
        return 0.0
    entries = sum(prod(facts[name].shape) for name in uses(layer.outputs))
    shapes = dict(zip(layer.symbols, layer.factor_shapes, strict=True))
    outputs = prod(shapes["G"][:-1]) if "G" in shapes else layer.factor_shapes[-1][-1]
    return entries / outputs / batch.size


def _multiplications(layer: LayerReport, factors: Sequence[FisherFactor]) -> float:
    """Return the number of multiplications for each entry of a gradient."""
    sides = (
        shape[-1]
        for factor, shape in zip(factors, layer.factor_shapes, strict=True)
        if isinstance(factor, DenseSquareMatrixFactor)
    )
    # Into the basis of eigenvectors and back.
    return sum(sides) * (1 + row(layer.kind, layer.approximation).eigenvectors)


def _sources(assembly: Assembly) -> float:
    """Return the number of backward passes that statistics need in addition to the gradient's."""
    mode, facts = MODES[assembly.options.estimation_mode], assembly.model.facts
    if mode.needs_targets:
        return 0.0
    if mode.one_source:
        return 1.0
    entries = sum(prod(facts[name].shape) for name in assembly.task.objective.inputs)
    return entries / assembly.task.batch.size

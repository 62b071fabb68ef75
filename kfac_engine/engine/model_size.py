"""The sizes of a model from which ``distributed.cost`` computes the cost of a rank."""

from collections.abc import Iterator, Sequence

from kfac_engine.curvature.approximations import row
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.refreshes import factor_shapes, refresh_cost, refreshed_shapes
from kfac_engine.distributed.sizes import BlockSize, Divisible, FactorSize, ModelSize
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.report import LayerReport


def model_size(assembly: Assembly, layers: Sequence[LayerReport]) -> ModelSize:
    """Return the sizes of a model; the blocks have the order of their reports in ``layers``."""
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
        blocks[label] = BlockSize(
            numbers=layer.numbers,
            parameters=layer.parameters,
            factors=tuple(dict.fromkeys(names[id(factor)] for factor in factors)),
            products=2 * layer.numbers * _multiplications(layer, factors),
            divisible=divisible,
            extent=layer.factor_shapes[0 if divisible == "rows" else -1][-1] if divisible else 1,
            most_owners=assembly.options.layer_owners,
        )
    # Half precision is sent as float32.
    itemsize = max(4, *(array.dtype.itemsize for array in assembly.model.parameters.values()))
    sizes = dict(_factor_sizes(collection, names, itemsize))
    return ModelSize(blocks, sizes, itemsize)


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
                symmetric=factor.is_symmetric,
                divided=factor.only_refreshes_read,
                needed=factor.measures_with_results,
                wide=factor.measures_with_results,
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


def _multiplications(layer: LayerReport, factors: Sequence[FisherFactor]) -> float:
    """Return the number of multiplications for each entry of a gradient."""
    pairs = zip(factors, layer.factor_shapes, strict=True)
    sides = (factor.multiplications(shape) for factor, shape in pairs)
    # Into the basis of eigenvectors and back.
    return sum(sides) * (1 + row(layer.kind, layer.approximation).eigenvectors)

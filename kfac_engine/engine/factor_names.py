"""Names of factors for reports and logs."""

from collections.abc import Iterator

from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.engine.engine import Engine


def factor_names(engine: Engine) -> dict[str, str]:
    """Return the names of the factors of an engine, such as ``"fc0.weight: A"``.

    Args:
        engine: The engine.

    Returns:
        Key of a factor in ``engine.estimator.refreshes`` to the first parameter of its layer with
        the symbol of the factor. A factor of several layers has the name of the first one, and
        factors of equal names have numbers.
    """
    names: dict[int, str] = {}
    for factor, name in _named(engine):
        if id(factor) not in names:
            count = sum(other.partition(" #")[0] == name for other in names.values())
            names[id(factor)] = f"{name} #{count + 1}" if count else name
    return {str(i): names[id(f)] for i, f in enumerate(engine.collection.get_factors())}


def _named(engine: Engine) -> Iterator[tuple[FisherFactor, str]]:
    for layer in engine.layers:
        block = engine.collection.fisher_blocks[layer.key]
        for symbol, factor in zip(block.symbols, block.factors, strict=True):
            yield factor, f"{layer.parameters[0]}{layer.parts[0]}: {symbol}"

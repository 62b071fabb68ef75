"""Names of factors for reports and logs."""

from collections import Counter

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
    counts: Counter[str] = Counter()
    for view in engine.factors.views():
        if id(view.factor) not in names:
            counts[view.name] += 1
            count = counts[view.name]
            names[id(view.factor)] = f"{view.name} #{count}" if count > 1 else view.name
    return {str(i): names[id(f)] for i, f in enumerate(engine.collection.get_factors())}

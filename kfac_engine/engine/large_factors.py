"""Notes on factors whose refreshes or bytes dominate a model, with a cheaper approximation."""

from collections.abc import Iterator, Sequence

from kfac_engine.curvature.approximations import KINDS
from kfac_engine.curvature.refreshes import refresh_cost
from kfac_engine.engine.report import LayerReport

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
    the peak memory.

    Args:
        layers: All layers of an engine.
        peak: Peak memory of a step in bytes; None if it is unknown.

    Yields:
        Clauses with the cost, and with the approximation that has smaller factors.
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
    """Whether an average is a matrix, or a stack of them, of many rows."""
    return len(shape) > 1 and shape[-1] > _LARGE

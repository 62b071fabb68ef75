"""The tables below the layers of ``inspect``: notation, totals, and approximations to choose."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kfac_engine.cli.display import show_bytes, show_flops, show_seconds
from kfac_engine.cli.tables import print_table
from kfac_engine.summary import counted

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.engine.memory import MemoryReport
    from kfac_engine.engine.time_estimates import RefreshEstimate, StepTime


def print_legend(formulas: Iterable[str]) -> None:
    """Print the meaning of the symbols in formulas of blocks."""
    from kfac_engine.curvature.approximations import explained

    rows = list(explained(formulas).items())
    print_table("symbols of the blocks", ("symbol", "meaning"), rows, sentences="meaning")


def print_totals(engine: "ke.Engine", refresh: "RefreshEstimate", step: "StepTime") -> None:
    """Print the numbers of parameters, the bytes of factors, and the costs of a step."""
    total, covered = parameter_counts(engine)
    factors = sum(layer.factor_bytes for layer in engine.layers)
    seconds = f", {show_seconds(refresh.seconds)} on this machine (estimate)"
    rows = [
        ("parameters", f"{total:,}"),
        ("in Kronecker blocks", f"{covered:,} ({_percent(covered, total)})"),
        ("factors", show_bytes(factors)),
        (
            "refresh of all factors",
            show_flops(refresh.flops) + (seconds if refresh.flops else ""),
        ),
        (
            f"step of {counted(step.examples, 'example')}",
            f"not measured: {step.reason}"
            if step.seconds is None
            else f"{show_seconds(step.seconds)} on this machine, without a refresh",
        ),
    ]
    print_table("totals", ("quantity", "value"), rows, sentences="value")


def print_choices(layers: "Sequence[ke.LayerReport]") -> None:
    """Print the other approximations of each kind of layer that has others."""
    rows = [
        (kind, ", ".join(used), ", ".join(name for name in names if name not in used))
        for kind, (used, names) in choices(layers).items()
        if len(names) > len(used)
    ]
    if rows:
        heads = ("KIND", "in use", "other choices of NAME")
        print_table("approximations: --approx KIND=NAME", heads, rows, sentences=heads[-1])


def print_memory(memory: "MemoryReport", batch: int) -> None:
    """Print the parts of the peak memory of a step."""
    parts = {**asdict(memory), "total": memory.total}
    on_device, _ = parts.pop("device"), parts.pop("optimizer")
    if on_device:
        parts["of it on the GPU"] = on_device
    rows = [(part, show_bytes(count)) for part, count in parts.items()]
    print_table(f"peak memory, batch of {batch}", ("part", " bytes"), rows)


def parameter_counts(engine: "ke.Engine") -> tuple[int, int]:
    """Return the number of all parameters, and of parameters in Kronecker-factored blocks."""
    return (
        sum(array.size for array in engine.parameters.values()),
        sum(layer.numbers for layer in engine.layers if "A" in layer.symbols),
    )


def choices(layers: "Sequence[ke.LayerReport]") -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Return the approximations of each kind of layer: those in use, and all."""
    from kfac_engine.curvature.approximations import accepted

    used: dict[str, list[str]] = {}
    for layer in layers:
        names = used.setdefault(layer.kind, [])
        if layer.approximation not in names:
            names.append(layer.approximation)
    return {kind: (names, accepted(kind)) for kind, names in used.items()}


def summary(engine: "ke.Engine", refresh: "RefreshEstimate", step: "StepTime") -> dict[str, object]:
    """Return the numbers of the tables as values that JSON can hold."""
    total, covered = parameter_counts(engine)
    return {
        "parameters": total,
        "parameters_in_kronecker_blocks": covered,
        "factor_bytes": sum(layer.factor_bytes for layer in engine.layers),
        "refresh_estimate": asdict(refresh),
        "step": asdict(step),
        "approximations": {
            kind: {"in_use": used, "choices": names}
            for kind, (used, names) in choices(engine.layers).items()
        },
    }


def _percent(part: int, total: int) -> str:
    """Return a share in percent as text; rounding yields neither 0 % nor 100 %."""
    share = 100 * part / total if total else 0.0
    if part not in (0, total):
        share = min(max(share, 0.1), 99.9)
    return f"{share:.3g} %"

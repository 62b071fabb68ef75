"""The table of ``inspect --ranks``: traffic, memory and work of one of several processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kfac_engine.cli.display import print_lines, say, show_bytes, show_flops
from kfac_engine.cli.tables import print_table
from kfac_engine.text.summary import counted

if TYPE_CHECKING:
    from kfac_engine.ranks.cost import RankCost
    from kfac_engine.ranks.report import RanksReport

_NAMES = {"sgd": " SGD"}
_NONE = "–"


def print_ranks(report: "RanksReport", batch: int) -> None:
    """Print a column for each distribution, and the advice.

    Args:
        report: The cost of one rank.
        batch: Number of examples in the part of the batch that a rank has.
    """
    title = f"one of {counted(report.ranks, 'rank')}, {counted(batch, 'example')} each"
    heads = ("quantity", *(_NAMES.get(name, f" {name}") for name in report.costs))
    print_table(title, heads, list(_rows(report)))
    every = counted(report.periods.refresh_every, "call")
    say(
        f"Bytes and times are those of a step, the mean over a refresh every {every}. The times "
        f"are predictions, which have not been compared with a cluster."
    )
    say(f"{report.advice[:1].upper()}{report.advice[1:]}")
    print_lines([""])


def ranks_as_values(report: "RanksReport") -> dict[str, object]:
    """Return a report as values that JSON can hold."""
    return {
        "ranks": report.ranks,
        "distributions": {
            name: {
                "handed_over_bytes": cost.handed_over,
                "traffic_bytes": cost.traffic,
                "curvature_bytes": cost.memory,
                "refresh_multiplications": cost.refresh,
                "product_operations": cost.products,
                "predicted_seconds": {
                    machine: steps[name].total for machine, steps in report.steps.items()
                },
            }
            for name, cost in report.costs.items()
        },
        "advice": report.advice,
    }


def _rows(report: "RanksReport") -> Iterator[list[str]]:
    """Yield the rows of the table."""
    costs = report.costs.values()
    yield ["handed to collectives", *_cells(costs, lambda cost: cost.handed_over, show_bytes)]
    yield ["traffic", *_cells(costs, lambda cost: cost.traffic, show_bytes)]
    yield ["averages and inverses", *_cells(costs, lambda cost: cost.memory, show_bytes)]
    yield ["refresh, slowest rank", *_cells(costs, lambda cost: cost.refresh, show_flops)]
    yield ["products, slowest rank", *_cells(costs, lambda c: c.products, show_flops)]
    for machine, steps in report.steps.items():
        times = (_milliseconds(steps[name].total) for name in report.costs)
        yield [f"predicted, {machine}", *times]


def _cells(
    costs: "Iterable[RankCost]",
    measure: "Callable[[RankCost], float]",
    show: Callable[[float], str],
) -> Iterator[str]:
    return (show(measure(cost)) if measure(cost) else _NONE for cost in costs)


def _milliseconds(seconds: float) -> str:
    return f"{float(f'{1e3 * seconds:.2g}'):,g} ms"

"""The table of ``inspect --ranks``: traffic, memory and work of one of several processes."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kfac_engine.cli.display import print_lines, say, show_bytes, show_flops
from kfac_engine.cli.tables import print_table
from kfac_engine.text.summary import counted

if TYPE_CHECKING:
    from kfac_engine.distributed.cost import Distribution, RankCost

# Row of the table, field of a cost, and how it is shown.
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("handed to collectives", "handed_over", show_bytes),
    ("traffic", "traffic", show_bytes),
    ("averages and inverses", "memory", show_bytes),
    ("refresh, slowest rank", "refresh", show_flops),
    ("products, slowest rank", "products", show_flops),
)
# Field of a cost to its name in JSON.
_VALUES = {
    "handed_over": "handed_over_bytes",
    "traffic": "traffic_bytes",
    "memory": "curvature_bytes",
    "refresh": "refresh_multiplications",
    "products": "product_operations",
}
_NAMES = {"sgd": " SGD"}
_NONE = "–"


def print_ranks(costs: "Mapping[Distribution, RankCost]", refresh_every: int) -> None:
    """Print a column for each distribution.

    Args:
        costs: The cost of one rank, by distribution.
        refresh_every: Number of calls from one refresh to the next.
    """
    heads = ("quantity", *(_NAMES.get(name, f" {name}") for name in costs))
    rows = [
        [
            title,
            *(
                show(getattr(cost, field)) if getattr(cost, field) else _NONE
                for cost in costs.values()
            ),
        ]
        for title, field, show in _ROWS
    ]
    print_table(f"one of {counted(costs['sgd'].ranks, 'rank')}", heads, rows)
    every = counted(refresh_every, "call")
    say(f"Bytes are those of a step, the mean over a refresh every {every}.")
    print_lines([""])


def ranks_as_values(costs: "Mapping[Distribution, RankCost]") -> dict[str, object]:
    """Return costs as values that JSON can hold."""
    return {
        "ranks": costs["sgd"].ranks,
        "distributions": {
            name: {title: getattr(cost, field) for field, title in _VALUES.items()}
            for name, cost in costs.items()
        },
    }

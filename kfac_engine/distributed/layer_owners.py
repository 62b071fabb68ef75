"""The ranks that own each layer under the distribution ``"shard"``.

A layer has one owner, unless it exceeds the share of a rank and its product can be divided:

- The rows of the gradient of a table are independent of each other. Each owner receives its rows
  only, so that the bytes of a table are divided, too. Owners are added while the copies of the
  other factor, which all of them receive, have at most 2 % of the bytes of the table.
- An owner of some columns of the product ``A⁻¹ V G⁻¹`` needs the whole gradient ``V``. Each further
  owner of a dense layer or a convolution adds the bytes of its gradient to a step, so that an
  option bounds their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from kfac_engine.distributed.owners import Load, owners, together
from kfac_engine.distributed.sizes import ModelSize

# Bytes of the copies of a factor, as a share of the bytes of the table that is divided.
_MOST_COPIED = 0.02


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows or columns of the gradient of a layer, which one rank preconditions.

    Attributes:
        owner: The rank.
        start: First row or column.
        stop: Row or column behind the last one.
    """

    owner: int
    start: int
    stop: int


def layer_owners(
    model: ModelSize, ranks: int, refresh_every: int = 10
) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each layer with their owners, the same on all ranks.

    The load of a layer is its preconditioning, and the share of its refresh in one step. Blocks
    that share a factor or a parameter have one owner.

    Args:
        model: Sizes of the model.
        ranks: Number of ranks.
        refresh_every: Number of calls from one refresh to the next.

    Returns:
        Name of a block to its parts, in the order of their rows or columns.

    Raises:
        InputError: As for ``owners``.
    """
    members = {
        key: [*block.factors, *(f"parameter {name}" for name in block.parameters)]
        for key, block in model.blocks.items()
    }
    groups = {group[0]: _Group(model, group, refresh_every) for group in together(members)}
    counts = _counts(groups, ranks)
    works = {
        f"{key} {index:09d}": groups[key].part(count)
        for key, count in counts.items()
        for index in range(count)
    }
    assigned = owners(works, ranks)
    parts: dict[str, tuple[Part, ...]] = {}
    for key, count in counts.items():
        ordered = sorted(assigned[f"{key} {index:09d}"] for index in range(count))
        for member in groups[key].members:
            parts[member] = _cut(model.blocks[member].extent, ordered)
    return {key: parts[key] for key in model.blocks}


class _Group:
    """Layers with one owner, or one layer that several ranks may own.

    Args:
        model: Sizes of the model.
        members: Names of the blocks.
        refresh_every: Number of calls from one refresh to the next.
    """

    def __init__(self, model: ModelSize, members: Sequence[str], refresh_every: int) -> None:
        blocks = [model.blocks[key] for key in members]
        factors = dict.fromkeys(name for block in blocks for name in block.factors)
        self.members = members
        self.refresh = sum(model.factors[name].refresh for name in factors) / refresh_every
        # A multiplication of a refresh counts as one of a product, with the addition after it.
        self.products = sum(block.products for block in blocks) / 2
        self.bytes = model.itemsize * sum(block.numbers for block in blocks)
        self.divisible = blocks[0].divisible if len(blocks) == 1 else None
        copied = sum(model.divided_bytes.get(name, 0) for name in factors) / refresh_every
        limits = {
            None: 1,
            "columns": blocks[0].most_owners,
            "rows": 1 + int(_MOST_COPIED * self.bytes / max(copied, 1)),
        }
        self.most = min(limits[self.divisible], blocks[0].extent)

    def part(self, count: int) -> Load:
        """Return the load of one of several equal parts; each owner refreshes the factors."""
        return Load(self.refresh + self.products / count, self.bytes // count)


def _counts(groups: Mapping[str, _Group], ranks: int) -> dict[str, int]:
    """Return the number of parts of each group.

    A part is not smaller than the share of a rank, nor than the largest group with one owner, which
    the others would wait for: in its work, and for rows in its bytes.
    """
    loads = {key: group.part(1) for key, group in groups.items()}
    whole = [load for key, load in loads.items() if groups[key].most == 1]
    cost = max([sum(load.cost for load in loads.values()) / ranks, *(w.cost for w in whole)])
    size = max([sum(load.bytes for load in loads.values()) / ranks, *(w.bytes for w in whole)])
    counts = {}
    for key, group in groups.items():
        parts = [ceil(loads[key].cost / cost)] if cost else [1]
        if group.divisible == "rows":
            parts.append(ceil(loads[key].bytes / size))
        counts[key] = max(1, min(group.most, ranks, max(parts)))
    return counts


def _cut(extent: int, ordered: Sequence[int]) -> tuple[Part, ...]:
    """Divide rows or columns into equal parts; the parts of one owner are joined."""
    parts, start = [], 0
    for owner, same in groupby(ordered):
        stop = start + len(list(same))
        edges = (extent * edge // len(ordered) for edge in (start, stop))
        parts.append(Part(owner, *edges))
        start = stop
    return tuple(parts)

"""Gradients that ONNX Runtime leaves to us: it hands over what they are products of.

In its operators, the gradient of a convolution's kernel is made of copies of whole batches, which
go through memory; here the copies of a few images stay in a cache. So a backward session on a CPU
ends before such products, and they are done side by side.

A gradient is computed here if it is a kernel gradient (see ``autodiff.weight_gradients``), a sum of
a few, or a transposed or reshaped one, and if no node reads it or its terms. The session computes
all other gradients as the graph says.
"""

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.autodiff.weight_gradients import KernelGradient
from kfac_engine.backend.cpu.conv_weight_grad import Scratch, add_weight_gradient
from kfac_engine.backend.tasks import TO_READ, Task, run_parallel
from kfac_engine.backend.threads import Workers
from kfac_engine.graph.structure import Node
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session

# Loops that were unrolled use a weight many times: the operands of all uses would be kept.
_MOST_USES = 8
# A chain of sums and moves that is longer has too many uses, or comes from no rule.
_LONGEST_CHAIN = 64


class Move(NamedTuple):
    """A rearrangement of numbers: of axes, or to another shape.

    Attributes:
        perm: As ``np.transpose`` takes it; empty for another shape.
        shape: Of the result.
    """

    perm: tuple[int, ...]
    shape: tuple[int, ...]


class ProductTerm(NamedTuple):
    """A product, rearranged.

    Attributes:
        leaf: The product.
        moves: From the first to the last.
    """

    leaf: KernelGradient
    moves: tuple[Move, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what comes out."""
        return self.moves[-1].shape if self.moves else self.leaf.shape


# What a gradient is the sum of.
Parts: TypeAlias = tuple[ProductTerm, ...]


@dataclass(frozen=True, slots=True)
class Divided:
    """A backward graph in two parts.

    Attributes:
        session: What ONNX Runtime computes; its gradients are its results, by their own names.
        finished: Gradients made of what that reads and computes, by name.
    """

    session: Backward
    finished: Mapping[str, Parts]


def divided(backward: Backward, *, apart: bool = True) -> Divided:
    """A backward graph, divided into the part of a session and the products outside it.

    Args:
        backward: The graph.
        apart: Whether products are computed outside the session; False leaves all to the session.

    Returns:
        The two parts.
    """
    reader = _Reader(backward if apart else replace(backward, leaves={}))
    handed = dict.fromkeys(backward.gradients.values())
    finished = {name: parts for name in handed if (parts := reader.parts(name, handed=True))}
    computed = {name for node in backward.nodes for name in node.outputs}
    results = [
        name
        for name in dict.fromkeys((*handed, *_operands(finished)))
        if name in computed and name not in finished
    ]
    session = replace(
        backward,
        nodes=needed(backward.nodes, results),
        gradients={name: name for name in results},
        leaves={},
    )
    return Divided(session, finished)


class FinishingSession:
    """A backward session on the CPU, and the products that it leaves out.

    Args:
        session: Computes ``parts.session``; None where nothing is left to compute.
        parts: The two parts.
        constants: Values that are fed to no session.
        workers: Threads for the products.
        scratch_bytes: Bound of their working memory.
    """

    def __init__(
        self,
        session: Session | DeviceSession | None,
        parts: Divided,
        constants: Mapping[str, Array],
        workers: Workers,
        scratch_bytes: int,
    ) -> None:
        self._session, self._parts = session, parts
        self._constants, self._workers = constants, workers
        self._scratch_bytes = scratch_bytes

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate gradients.

        Args:
            outputs: Names of gradients.
            feeds: One array for each input of the backward graph.

        Returns:
            Name to array; some are read-only.

        Raises:
            BackendError: An operator failed.
        """
        return self.run_into({}, feeds, outputs)

    def run_into(
        self,
        results: Mapping[str, Array],
        feeds: Mapping[str, Array],
        others: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Evaluate gradients into arrays of the caller's own.

        Args:
            results: Name of a gradient to a contiguous array of its shape and element type.
            feeds: One array for each input of the backward graph.
            others: Further gradients.

        Returns:
            Name to array, for ``others``; some are read-only.

        Raises:
            BackendError: An operator failed, or a result has another shape than its array.
        """
        finished = self._parts.finished
        mine = {name: finished[name] for name in (*results, *others) if name in finished}
        into = {name: array for name, array in results.items() if name not in mine}
        computed = self._parts.session.gradients
        requested = dict.fromkeys(
            name for name in (*others, *_operands(mine)) if name in computed and name not in into
        )
        known = ChainMap(
            self._computed(into, tuple(requested), feeds), into, dict(feeds), dict(self._constants)
        )
        gradients = self._finished(mine, results, known)
        return {name: gradients[name] if name in gradients else known[name] for name in others}

    def _computed(
        self, into: Mapping[str, Array], requested: Sequence[str], feeds: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Run the session; return the requested values, without those written to ``into``."""
        if self._session is None or not (into or requested):
            return {}
        if into:
            return self._session.run_into(into, feeds, requested)
        return self._session.run(requested, feeds)

    def _finished(
        self, mine: Mapping[str, Parts], given: Mapping[str, Array], known: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Compute the gradients outside the session, in arrays of the caller where given."""
        scratch, tasks = Scratch(self._scratch_bytes), list[Task]()
        gradients: dict[str, Array] = {}
        for name, parts in mine.items():
            operands = [[known[value] for value in part.leaf.operands] for part in parts]
            gradients[name] = (
                given[name] if name in given else np.empty(parts[0].shape, operands[0][0].dtype)
            )
            tasks.append(_task(parts, operands, gradients[name], self._workers, scratch))
        run_parallel(tasks, self._workers)
        return gradients


def _task(
    parts: Parts,
    operands: Sequence[Sequence[Array]],
    out: Array,
    workers: Workers,
    scratch: Scratch,
) -> Task:
    """The task of a gradient: its parts are added in their order."""

    def write() -> None:
        out[...] = 0
        for (leaf, moves), given in zip(parts, operands, strict=True):
            product = _before(out, leaf.shape, moves)
            if product is not None:
                _add(leaf, given, product, workers, scratch)
                continue
            product = np.zeros(leaf.shape, out.dtype)
            _add(leaf, given, product, workers, scratch)
            out[...] += _after(product, moves)

    work = (_work(part.leaf, given) for part, given in zip(parts, operands, strict=True))
    return Task(sum(work), write)


def _work(gradient: KernelGradient, operands: Sequence[Array]) -> float:
    """Multiplications of a product; copies count as the multiplications of equal time."""
    x, g = operands
    return g.size * gradient.ins * gradient.window.taps + TO_READ * (x.size + g.size)


def _add(
    gradient: KernelGradient,
    operands: Sequence[Array],
    out: Array,
    workers: Workers,
    scratch: Scratch,
) -> None:
    """Add the gradient to ``out``, of any strides."""
    x, g = operands
    window = gradient.window.resolved(x.shape[2:])
    add_weight_gradient(x, g, window, out, workers, scratch=scratch)


def _after(product: Array, moves: Sequence[Move]) -> Array:
    for move in moves:
        product = product.transpose(move.perm) if move.perm else product.reshape(move.shape)
    return product


def _before(out: Array, shape: tuple[int, ...], moves: Sequence[Move]) -> Array | None:
    """``out`` as it is before the moves; None where that is not a view."""
    view = out
    shapes = [shape, *(move.shape for move in moves)]
    for move, sides in zip(reversed(moves), reversed(shapes[:-1]), strict=True):
        view = view.transpose(np.argsort(move.perm)) if move.perm else view.reshape(sides)
    return view if np.may_share_memory(view, out) else None


def _operands(gradients: Mapping[str, Parts]) -> list[str]:
    return [name for parts in gradients.values() for part in parts for name in part.leaf.operands]


class _Reader:
    """Reads backward from a gradient to the products that it is made of."""

    def __init__(self, backward: Backward) -> None:
        self._leaves, self._constants = backward.leaves, backward.constants
        self._makers = {name: node for node in backward.nodes for name in node.outputs}
        self._readers = Counter(
            name for node in backward.nodes for name in (*node.inputs, *node.captures)
        )
        self._handed = frozenset(backward.gradients.values())

    def parts(self, name: str, *, handed: bool = False, depth: int = 0) -> Parts:
        """What a value is the sum of; nothing where that is not leaves which nobody else reads.

        Args:
            name: The value.
            handed: Whether it is a gradient; else it stands in between and has one reader.
            depth: Sums and moves between the gradient and the value.

        Returns:
            Parts, in the order of their sum.
        """
        alone = (self._readers[name], name in self._handed) == (int(not handed), handed)
        if not alone or name not in self._makers or depth > _LONGEST_CHAIN:
            return ()
        if name in self._leaves:
            return (ProductTerm(self._leaves[name]),)
        node = self._makers[name]
        if node.qualified_op in _SUMS:
            return self._sum(node, depth)
        parts = self.parts(node.inputs[0], depth=depth + 1) if node.qualified_op in _MOVES else ()
        moved = [self._moved(part, node) for part in parts]
        return tuple(part for part in moved if part) if all(moved) else ()

    def _sum(self, node: Node, depth: int) -> Parts:
        parts: Parts = ()
        for name in node.inputs:
            term = self.parts(name, depth=depth + 1)
            parts += term
            if not term or len(parts) > _MOST_USES:
                return ()
        return parts

    def _moved(self, part: ProductTerm, node: Node) -> ProductTerm | None:
        """A part behind another move; None where its shape depends on the batch."""
        if node.op == "Transpose":
            perm = integers(node, "perm", tuple(reversed(range(len(part.shape)))))
            move = Move(perm, tuple(part.shape[axis] for axis in perm))
        else:
            sides = self._constants.get(node.inputs[1])
            if sides is None or min(sides, default=0) < 1:
                return None
            move = Move((), tuple(map(int, sides)))
        return ProductTerm(part.leaf, (*part.moves, move))


_SUMS = frozenset({"Add", "Sum"})  # of equal shapes: those of one weight
_MOVES = frozenset({"Reshape", "Transpose"})

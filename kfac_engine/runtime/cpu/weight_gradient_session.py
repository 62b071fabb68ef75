"""Computes weight gradients of convolutions by BLAS, outside ONNX Runtime.

ONNX Runtime copies the patches of a whole batch through memory for the gradient of a kernel. This
module copies the patches of a few images, which stay in the cache. A backward session on the CPU
therefore returns the operands of these products, and threads compute the products.

BLAS computes a gradient that is a sum of transposed or reshaped kernel gradients (see
``autodiff.vjp_builder``), if no node reads the gradient or a term of the sum. ONNX Runtime
computes all other gradients.
"""

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward, needed
from kfac_engine.autodiff.rules.attributes import integers
from kfac_engine.autodiff.vjp_builder import KernelGradient
from kfac_engine.backend.cpu.conv_weight_grad import Scratch, add_weight_gradient
from kfac_engine.backend.threads import TO_READ, Task, Workers, run_parallel
from kfac_engine.graph.structure import Node
from kfac_engine.sessions.device_session import DeviceSession
from kfac_engine.sessions.session import Session

# Largest number of uses of a weight. An unrolled loop uses a weight many times, and the operands of
# all uses would remain in memory.
_MOST_USES = 8
# Length of the longest chain of sums and moves that derivative rules write for so few uses.
_LONGEST_CHAIN = 64


class MovedAxes(NamedTuple):
    """A transposition or a change of the shape."""

    # Order of the axes, as for ``np.transpose``; empty for a change of the shape.
    perm: tuple[int, ...]
    shape: tuple[int, ...]  # shape of the result


class ProductTerm(NamedTuple):
    """A term of a gradient: a kernel gradient and the moves that are applied to it, in order."""

    gradient: KernelGradient
    moves: tuple[MovedAxes, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the term."""
        return self.moves[-1].shape if self.moves else self.gradient.shape


# The terms whose sum is a gradient.
Terms: TypeAlias = tuple[ProductTerm, ...]


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """A backward graph without its weight gradients, and their terms."""

    # The graph that ONNX Runtime computes. Its results are the other gradients and the operands of
    # the terms, by name.
    session: Backward
    finished: Mapping[str, Terms]  # map from each weight gradient to its terms


def split_backward(backward: Backward, *, apart: bool = True) -> SplitBackward:
    """Return a backward graph without the weight gradients that BLAS computes, and their terms.

    Without ``apart``, BLAS computes no gradient.
    """
    reader = _Reader(backward if apart else replace(backward, leaves={}))
    gradient_names = dict.fromkeys(backward.gradients.values())
    finished = {
        name: terms for name in gradient_names if (terms := reader.terms(name, is_gradient=True))
    }
    computed = {name for node in backward.nodes for name in node.outputs}
    results = [
        name
        for name in dict.fromkeys((*gradient_names, *_operands(finished)))
        if name in computed and name not in finished
    ]
    session = replace(
        backward,
        nodes=needed(backward.nodes, results),
        gradients={name: name for name in results},
        leaves={},
    )
    return SplitBackward(session, finished)


class WeightGradientSession:
    """A backward session on the CPU that computes weight gradients by BLAS.

    The session is None if the graph of the terms is empty. The constants are not inputs of it.
    """

    def __init__(
        self,
        session: Session | DeviceSession | None,
        terms: SplitBackward,
        constants: Mapping[str, Array],
        workers: Workers,
        scratch_bytes: int,
    ) -> None:
        self._session, self._parts = session, terms
        self._constants, self._workers = constants, workers
        self._scratch_bytes = scratch_bytes

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients ``outputs`` as arrays that may be read-only.

        ``feeds`` has an array for each input of the backward graph.
        """
        return self.run_into({}, feeds, outputs)

    def run_into(
        self, results: Mapping[str, Array], feeds: Mapping[str, Array], others: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Write gradients to the contiguous arrays ``results``, and return ``others``.

        The returned arrays may be read-only. ``BackendError`` is raised if an operator failed, or
        if a gradient has another shape than its array.
        """
        finished = self._parts.finished
        selected = {name: finished[name] for name in (*results, *others) if name in finished}
        into = {name: array for name, array in results.items() if name not in selected}
        computed = self._parts.session.gradients
        requested = dict.fromkeys(
            name
            for name in (*others, *_operands(selected))
            if name in computed and name not in into
        )
        computed_now = self._computed(into, tuple(requested), feeds)
        known = ChainMap(computed_now, into, feeds, self._constants)  # type: ignore[arg-type] # which nobody changes
        gradients = self._finished(selected, results, known)
        return {name: gradients[name] if name in gradients else known[name] for name in others}

    def _computed(
        self, into: Mapping[str, Array], requested: Sequence[str], feeds: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Run the session; return the requested values that are not written to ``into``."""
        if self._session is None or not (into or requested):
            return {}
        if into:
            return self._session.run_into(into, feeds, requested)
        return self._session.run(requested, feeds)

    def _finished(
        self,
        selected: Mapping[str, Terms],
        results: Mapping[str, Array],
        known: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Compute gradients by BLAS, in the arrays of ``results`` or in new arrays."""
        scratch, tasks = Scratch(self._scratch_bytes), list[Task]()
        gradients: dict[str, Array] = {}
        for name, terms in selected.items():
            operands = [[known[value] for value in term.gradient.operands] for term in terms]
            gradients[name] = (
                results[name] if name in results else np.empty(terms[0].shape, operands[0][0].dtype)
            )
            tasks.append(_task(terms, operands, gradients[name], self._workers, scratch))
        run_parallel(tasks, self._workers)
        return gradients


def _task(
    terms: Terms,
    operands: Sequence[Sequence[Array]],
    out: Array,
    workers: Workers,
    scratch: Scratch,
) -> Task:
    """Return a task that computes a gradient as the sum of its terms, in their order."""

    def write() -> None:
        out[...] = 0
        for (gradient, moves), pair in zip(terms, operands, strict=True):
            product = _before(out, gradient.shape, moves)
            if product is not None:
                _add(gradient, pair, product, workers, scratch)
                continue
            product = np.zeros(gradient.shape, out.dtype)
            _add(gradient, pair, product, workers, scratch)
            out[...] += _after(product, moves)

    work = (_work(term.gradient, pair) for term, pair in zip(terms, operands, strict=True))
    return Task(sum(work), write)


def _work(gradient: KernelGradient, operands: Sequence[Array]) -> float:
    """Return the cost of a product and of the copies of its operands, in multiplications."""
    x, g = operands
    return g.size * gradient.ins * gradient.window.taps + TO_READ * (x.size + g.size)


def _add(
    gradient: KernelGradient,
    operands: Sequence[Array],
    out: Array,
    workers: Workers,
    scratch: Scratch,
) -> None:
    """Add a kernel gradient to ``out``, which may have any strides."""
    x, g = operands
    window = gradient.window.resolved(x.shape[2:])
    add_weight_gradient(x, g, window, out, workers, scratch=scratch)


def _after(product: Array, moves: Sequence[MovedAxes]) -> Array:
    """Return a product after its moves."""
    for move in moves:
        product = product.transpose(move.perm) if move.perm else product.reshape(move.shape)
    return product


def _before(out: Array, shape: tuple[int, ...], moves: Sequence[MovedAxes]) -> Array | None:
    """Return the view of ``out`` that the moves convert to ``out``; None if it needs a copy."""
    view = out
    shapes = [shape, *(move.shape for move in moves)]
    for move, before in zip(reversed(moves), reversed(shapes[:-1]), strict=True):
        view = view.transpose(np.argsort(move.perm)) if move.perm else view.reshape(before)
    return view if np.may_share_memory(view, out) else None


def _operands(gradients: Mapping[str, Terms]) -> list[str]:
    """Return the names of the operands of all terms."""
    return [
        name for terms in gradients.values() for term in terms for name in term.gradient.operands
    ]


class _Reader:
    """Searches the terms of a gradient backwards in the graph."""

    def __init__(self, backward: Backward) -> None:
        self._leaves, self._constants = backward.leaves, backward.constants
        self._makers = {name: node for node in backward.nodes for name in node.outputs}
        self._readers = Counter(
            name for node in backward.nodes for name in (*node.inputs, *node.captures)
        )
        self._gradient_names = frozenset(backward.gradients.values())

    def terms(self, name: str, *, is_gradient: bool = False, depth: int = 0) -> Terms:
        """Return the kernel gradients whose sum is a value of the graph, in the order of the sum.

        There are none if the value is not such a sum, or if another node reads a term. A value that
        is not a gradient must have one reader. ``depth`` is the number of sums and moves between
        the gradient and the value.
        """
        alone = (self._readers[name], name in self._gradient_names) == (
            int(not is_gradient),
            is_gradient,
        )
        if not alone or name not in self._makers or depth > _LONGEST_CHAIN:
            return ()
        if name in self._leaves:
            return (ProductTerm(self._leaves[name]),)
        node = self._makers[name]
        if node.qualified_op in _SUMS:
            return self._sum(node, depth)
        terms = self.terms(node.inputs[0], depth=depth + 1) if node.qualified_op in _MOVES else ()
        moved = [self._moved(term, node) for term in terms]
        return tuple(term for term in moved if term) if all(moved) else ()

    def _sum(self, node: Node, depth: int) -> Terms:
        """Return the terms of a sum; empty if an operand has no terms, or if there are too many."""
        terms: Terms = ()
        for name in node.inputs:
            term = self.terms(name, depth=depth + 1)
            terms += term
            if not term or len(terms) > _MOST_USES:
                return ()
        return terms

    def _moved(self, term: ProductTerm, node: Node) -> ProductTerm | None:
        """Return a term with a further move; None if the shape depends on the batch."""
        if node.op == "Transpose":
            perm = integers(node, "perm", tuple(reversed(range(len(term.shape)))))
            move = MovedAxes(perm, tuple(term.shape[axis] for axis in perm))
        else:
            shape = self._constants.get(node.inputs[1])
            if shape is None or min(shape, default=0) < 1:
                return None
            move = MovedAxes((), tuple(map(int, shape)))
        return ProductTerm(term.gradient, (*term.moves, move))


_SUMS = frozenset({"Add", "Sum"})  # their operands are gradients of one weight, in one shape
_MOVES = frozenset({"Reshape", "Transpose"})

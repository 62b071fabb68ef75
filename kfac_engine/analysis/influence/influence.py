"""Computes influence functions: how training examples change the loss of queries."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, Spectrum, checked_damping
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, Damping, checked_curvature
from kfac_engine.analysis.fisher_matrix.example_gradients import (
    Sources,
    block_tiles,
    gradient_sources,
)
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.forms import Data, batches_of
from kfac_engine.engine.layer_gradients import Gradients
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.errors import InputError, NonFiniteError
from kfac_engine.losses.objective import BatchSize, Objective


@dataclass(slots=True, eq=False)
class Products:
    """Vectors of a block whose inner products with gradients are computed.

    The vectors are in the basis of the eigenvectors of the block. At first, the gradients are
    rotated into this basis. When the gradients so far have had more rows than the vectors, the
    vectors are rotated back once, and later gradients are not rotated.
    """

    vectors: Float  # ``(q, g, d_in, d_out)``
    rows: int = 0  # number of rows of gradients so far
    is_back: bool = False  # whether the vectors are rotated back

    def of(self, gradients: Gradients, spectrum: Spectrum) -> Float:
        """Return the inner products with gradients that are not rotated, ``(q, m)``.

        ``spectrum`` has the eigenvectors of their block. Products are summed over the cotangents of
        an example.
        """
        self.rows += gradients.rows
        if not self.is_back and self.rows > self.vectors[..., 0, :].size:
            self.vectors, self.is_back = spectrum.back(self.vectors), True
        rotated = gradients if self.is_back else gradients.into(spectrum)
        products: Float = rotated.products(self.vectors).sum(axis=2)
        return products


# The default damping in units of the mean eigenvalue of a block.
_RELATIVE = 0.1
_BYTES = 8


class Influence:
    """Scores ``g_qᵀ (F + λI)⁻¹ g_i`` of examples of the training data for queries.

    ``g_q`` and ``g_i`` are the gradients of the negative log-likelihood of a query and of an
    example, in nats, and ``F`` is the mean Fisher matrix. The model minimizes the mean loss of
    ``n`` examples. If the weight of example ``i`` in this mean grows from ``1/n`` to ``1/n + ε``,
    the loss of the query changes by ``−ε`` times the score, to first order (Koh & Liang 2017;
    Grosse et al. 2023, arXiv:2308.03296). A positive score means that the example lowers the loss
    of the query; without the example, that loss would be higher by the score divided by ``n``.

    Args:
        curvature: The curvature at the parameters of a trained model.
        damping: λ ≥ 0, or λ of each parameter; by default a tenth of the mean eigenvalue of each
            block.

    Attributes:
        curvature: The curvature.
        damping: The argument ``damping``.

    Raises:
        InputError: The damping is negative, a damped block is singular, or ``curvature`` is another
            object.
        UnknownNameError: A name is not a parameter.
    """

    def __init__(self, curvature: Curvature, damping: Damping | None = None) -> None:
        self.curvature = checked_curvature(curvature, "influence")
        names = tuple(curvature.vector.shapes)
        self.damping = None if damping is None else checked_damping(damping, names)
        self._inverses = {id(block): self._inverse(block) for block in curvature.blocks}

    def __repr__(self) -> str:
        """Return the curvature and the damping."""
        damping = "a tenth of the mean eigenvalues" if self.damping is None else self.damping
        return f"Influence({self.curvature!r}, damping {damping})"

    def scores(self, queries: Data, train: Data) -> Array:
        """Return the score of each example for each query.

        The method holds the gradients of a group of queries, as many as fit into 64 MiB, and reads
        the training data once for each group.

        Args:
            queries: Data as for ``fit``.
            train: The training data, as for ``fit``; they are read several times.

        Returns:
            ``(queries, examples)`` in float64.

        Raises:
            InputError: A batch is wrong, there is no example or no target, or the training data
                change from one reading to the next.
            NonFiniteError: A gradient is not finite.
            UnsupportedError: The examples of a parameter without a layer cannot be separated.
        """
        batches = self._batches_of(train, 2)
        rows: list[Float] = []
        with single_threaded_blas(), ignore_overflow():
            for query in self._gradients(self._batches_of(queries, 1), "queries"):
                for vectors in self._preconditioned(query):
                    products = {key: Products(vector) for key, vector in vectors.items()}
                    rows.append(self._against(products, batches))
                    if len(rows[-1][0]) != len(rows[0][0]):
                        raise InputError(
                            f"the training data had {len(rows[0][0])} examples and then "
                            f"{len(rows[-1][0])}; give data that do not change."
                        )
        return np.concatenate(rows)

    def self_scores(self, train: Data) -> Array:
        """Return ``g_iᵀ (F + λI)⁻¹ g_i`` of each example.

        A large score means that the model depends on this example alone for its own prediction: the
        example is unusual, or its target is wrong.

        Args:
            train: The training data, as for ``fit``.

        Returns:
            ``(examples,)`` in float64.

        Raises:
            InputError: A batch is wrong, or there is no example or no target.
            NonFiniteError: A gradient is not finite.
            UnsupportedError: The examples of a parameter without a layer cannot be separated.
        """
        parts: list[Float] = []
        with single_threaded_blas(), ignore_overflow():
            for batch in self._gradients(self._batches_of(train, 1), "training data"):
                total = np.zeros(self._examples(batch))
                for block, examples, gradients in self._tiles(batch):
                    gram = gradients.gram(self._inverses[id(block)])
                    total[examples] += gram.sum(axis=(1, 2))
                parts.append(_finite(total))
        return np.concatenate(parts)

    # -- private ----------------------------------------------------------------------------------

    def _inverse(self, block: Block) -> Float:
        """Return ``1/(s + λ)`` of all eigenvalues of a block."""
        if self.damping is not None:
            return block.powers(self.damping, -1.0)
        values = block.spectrum.eigenvalues
        levels = np.empty((1, values.shape[1], 1))
        for part in block.parts:
            levels[:, part.rows] = _RELATIVE * values[:, part.rows].mean()
        damped: Float = values + levels
        if block.is_unused:  # it has no gradients
            return np.ones_like(damped)
        if not damped.all():
            raise InputError(
                f"the curvature of {', '.join(block.parameters)} is zero on these data; give a "
                f"damping."
            )
        return 1.0 / damped

    def _batches_of(self, data: Data, passes: int) -> Iterable[Batch]:
        return batches_of(data, self.curvature.model.example_axes, passes=passes)

    def _gradients(self, batches: Iterable[Batch], noun: str) -> Iterator[Sources]:
        """Yield the gradients of each batch.

        Raises:
            InputError: There is no example or no target.
            NonFiniteError: No target of any batch counts.
        """
        number, objective = 0, self._objective
        totals = (0.0,) * len(objective.terms)
        for number, (inputs, targets) in enumerate(batches, 1):
            if targets is None and objective.targeted:
                raise InputError(
                    f"batch {number} of the {noun} has no targets; influence needs the targets of "
                    f"all examples."
                )
            batch = gradient_sources(self.curvature.layout, inputs, targets)
            of_batch = objective.observe(batch[0]).size.totals
            totals = tuple(map(sum, zip(totals, of_batch, strict=True)))
            yield batch
        if not number:
            raise InputError(f"the {noun} have no examples; pass at least one batch.")
        objective.require_counts(BatchSize(1, totals))

    def _tiles(self, batch: Sources) -> Iterator[tuple[Block, slice, Gradients]]:
        return block_tiles(self.curvature.layout, self.curvature.blocks, batch)

    def _examples(self, batch: Sources) -> int:
        return self._objective.examples(batch[0])

    @property
    def _objective(self) -> Objective:
        return self.curvature.layout.assembly.task.objective

    def _preconditioned(self, query: Sources) -> Iterator[dict[int, Float]]:
        """Yield ``(F + λI)⁻¹ g`` of groups of queries by ``id`` of a block, in its eigenbasis."""
        curvature, count = self.curvature, self._examples(query)
        scratch_bytes = curvature.layout.assembly.collection.backend.scratch_bytes
        step = max(1, scratch_bytes // (_BYTES * max(curvature.vector.size, 1)))
        for start in range(0, count, step):
            stop = min(start + step, count)
            vectors: dict[int, Float] = {}
            for block, examples, gradients in self._tiles(query):
                rows = range(max(start, examples.start), min(stop, examples.stop))
                if rows:
                    shape = (stop - start, *block.places.shape)
                    group = vectors.setdefault(id(block), np.zeros(shape))
                    tile = gradients.matrices()[rows.start - examples.start :][: len(rows)]
                    group[rows.start - start : rows.stop - start] = tile.sum(axis=1)
            yield {key: group * self._inverses[key] for key, group in vectors.items()}

    def _against(self, products: Mapping[int, Products], train: Iterable[Batch]) -> Float:
        """Return the inner products of vectors with the gradients of all examples."""
        layout, blocks = self.curvature.layout, self.curvature.blocks
        count = len(next(iter(products.values())).vectors)
        parts: list[Float] = []
        for batch in self._gradients(train, "training data"):
            total = np.zeros((count, self._examples(batch)))
            for block, examples, gradients in block_tiles(layout, blocks, batch, rotated=False):
                total[:, examples] += products[id(block)].of(gradients, block.spectrum)
            parts.append(_finite(total))
        return np.concatenate(parts, axis=1)


def _finite(scores: Float) -> Float:
    """Return scores; a NonFiniteError names the first example whose score is not finite."""
    bad = np.argwhere(~np.isfinite(scores))
    if len(bad):
        raise NonFiniteError(
            f"the score of example {bad[0][-1]} of a batch is not finite; look at its loss and "
            f"inputs."
        )
    return scores

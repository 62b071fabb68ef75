"""Computes a slice of a batch's Fisher matrix from the Jacobian matrix of the losses' inputs.

The Jacobian matrix has a row for each entry of these values. Its rows are backward passes with one
cotangent of one; its columns are differences of the values. Both are independent of the products
of the engine, which propagate tangents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.observed import times
from kfac_engine.verification.differences import differentiate_along
from kfac_engine.verification.specimen import Floats, Specimen

# Backward passes for the rows of a Jacobian matrix.
MOST_ROWS = 256
# Entries of the columns of a Jacobian matrix.
_MOST_ENTRIES = 20_000_000
# A doubt about a column, relative to the column.
_DOUBT = 1e-4
# Differences of order four of derivatives of a loss in float64. At this step, the errors of
# differences of probabilities are below CURVED_ERROR.
CURVED_ERROR = 1e-12
_STEP = 2.0**-9
_STENCIL = {1: 2 / 3, 2: -1 / 12}
# Relative difference of two Hessian matrices of a loss that is not a rounding error.
_OTHER = 1e-6


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of parameters: the rows and columns of a slice."""

    # Ascending indices of the flattened entries, by parameter name.
    positions: Mapping[str, Sequence[int]]

    @classmethod
    def draw(
        cls, parameters: Mapping[str, Floats], names: Sequence[str], most: int, seed: int
    ) -> "Entries":
        """Draw ``most`` entries of parameters, about equally many of each and at least one."""
        rng = np.random.default_rng(seed)
        share = max(1, most // len(names))
        positions = {}
        for name in names:
            size = parameters[name].size
            chosen = rng.choice(size, min(share, size), replace=False)
            positions[name] = tuple(sorted(chosen.tolist()))
        return cls(positions)

    def __len__(self) -> int:
        return sum(len(indices) for indices in self.positions.values())

    def of(self, vector: Mapping[str, Floats]) -> Floats:
        """Return the entries of a vector over the parameters."""
        return np.concatenate(
            [vector[n].reshape(-1)[list(indices)] for n, indices in self.positions.items()]
        )


@dataclass(frozen=True)
class DenseFisher:
    """A slice of rows of the Fisher matrix, and its products with vectors."""

    specimen: Specimen  # the model and the batch
    entries: Entries  # the rows of the slice
    method: str  # how the Jacobian matrix was computed
    # By value of a loss, the columns of its Jacobian matrix that belong to the entries, in the
    # shape ``(value size, entries)``.
    jacobian: Mapping[str, Floats]
    # For each vector, its products with the Jacobian matrices, by value of a loss.
    changes: Sequence[Mapping[str, Floats]]

    def products(self) -> list[Floats]:
        """Return the slice of the Fisher matrix times each vector, by entry."""
        return [self._transposed(self._curved(change)) for change in self.changes]

    def diagonal(self) -> Floats:
        """Return the diagonal of the Fisher matrix, by entry."""
        columns = self._columns()
        curved = [self._curved(column) for column in columns]
        return np.array(
            [
                sum(float(column[name] @ part[name]) for name in column)
                for column, part in zip(columns, curved, strict=True)
            ]
        )

    def product_errors(self, unit: float) -> list[Floats]:
        """Return the error of each entry of ``products`` if each probability is off by ``unit``."""
        return [self._errors(change, unit) for change in self.changes]

    def diagonal_errors(self, unit: float) -> Floats:
        """Return the error of each entry of ``diagonal`` if each probability is off by ``unit``."""
        return np.array([self._errors(c, unit)[k] for k, c in enumerate(self._columns())])

    @cached_property
    def other_parameters(self) -> tuple[str, ...]:
        """The loss classes that wrongly claim ``ggn_equals_fisher``.

        The Hessian matrix of such a loss depends on the targets, so it is not the Fisher matrix:
        the inputs of the loss are not natural parameters.
        """
        values, objective = loss_values(self.specimen), self.specimen.engine.objective
        terms = zip(objective.terms, objective.observe(values).terms, strict=True)
        return tuple(
            type(term).__name__
            for term, seen in terms
            if term.ggn_equals_fisher and _reads_targets(term, values, seen.targets)
        )

    def _errors(self, change: Mapping[str, Floats], unit: float) -> Floats:
        """Return the sizes of errors of a product; they are independent of the probabilities."""
        total = np.zeros(len(self.entries))
        for name, weight in self.specimen.probability_weights.items():
            size = weight * unit * float(abs(change[name]).max(initial=0.0))
            total += size * np.linalg.norm(self.jacobian[name], axis=0)
        return total

    def _columns(self) -> list[dict[str, Floats]]:
        return [
            {name: matrix[:, index] for name, matrix in self.jacobian.items()}
            for index in range(len(self.entries))
        ]

    def _transposed(self, cotangents: Mapping[str, Floats]) -> Floats:
        parts = (self.jacobian[name].T @ cotangents[name] for name in cotangents)
        return np.asarray(sum(parts))

    def _curved(self, change: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return the Fisher matrix of the losses with respect to their values, times a change."""
        values, objective = loss_values(self.specimen), self.specimen.engine.objective
        moves = {name: change[name].reshape(values[name].shape) for name in objective.inputs}
        declared = all(term.ggn_equals_fisher for term in objective.terms)
        if declared and not self.other_parameters:
            # The Fisher matrix of natural parameters is the derivative of the gradient.
            size = max(float(abs(move).max(initial=0.0)) for move in moves.values()) or 1.0
            step = _STEP / size
            total = {name: np.zeros_like(move) for name, move in moves.items()}
            for places, weight in _STENCIL.items():
                ahead, behind = (
                    objective.cotangents({**values, **{n: values[n] + s * moves[n] for n in moves}})
                    for s in (places * step, -places * step)
                )
                for name in total:
                    total[name] += weight / step * (ahead[name] - behind[name])
            return {name: array.reshape(-1) for name, array in total.items()}
        total = {name: np.zeros_like(move) for name, move in moves.items()}
        seen = objective.observe(values)
        weights = objective.weights(seen.whole)
        for weight, term, one in zip(weights, objective.terms, seen.terms, strict=True):
            for name, part in term.fisher(term.read(values), moves).items():
                total[name] += weight * times(part, one.weights)
        return {name: array.reshape(-1) for name, array in total.items()}


def _reads_targets(term: LossFunction, values: Values, targets: Array | None) -> bool:
    """Return whether the derivative of the gradient of a loss depends on the targets."""
    read, rng = term.read(values), np.random.default_rng(0)
    moves = {name: rng.choice([-1.0, 1.0], read[name].shape) for name in term.inputs}
    changes, largest = [], 0.0
    for observed in (targets, term.sample(read, rng)):
        if observed is None:
            return False
        ahead, behind = (
            term.gradient_of({**read, **{n: read[n] + s * moves[n] for n in moves}}, observed)
            for s in (_STEP, -_STEP)
        )
        changes.append({name: (ahead[name] - behind[name]) / (2 * _STEP) for name in moves})
        largest = max(largest, *(float(abs(ahead[name]).max(initial=0.0)) for name in moves))
    first, second = changes
    distance = max(float(abs(first[n] - second[n]).max(initial=0.0)) for n in moves)
    size = max(float(abs(part[n]).max(initial=0.0)) for part in changes for n in moves)
    rounding = 16 * float(np.finfo(np.float64).eps) * largest / _STEP
    return distance > _OTHER * size + rounding


def loss_values(specimen: Specimen) -> dict[str, Floats]:
    """Return the values and the targets that the losses read; floats in float64."""
    objective, model = specimen.engine.objective, specimen.model
    names = [*objective.inputs, *([objective.batch] if objective.batch else [])]
    host = {name: model.memory_space.on_host(specimen.trace[name]) for name in names}
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in host.items()}
    return wide | dict(objective.named_targets(specimen.targets))


def dense_fisher(
    specimen: Specimen, entries: Entries, vectors: Sequence[Mapping[str, Floats]]
) -> "DenseFisher | str":
    """Compute a slice of the Fisher matrix, or return why it cannot be computed.

    ``entries`` are the rows of the slice. Parameters that a vector lacks count as zeros.
    """
    names = specimen.engine.objective.inputs
    count = sum(specimen.trace[name].size for name in names)
    if count <= MOST_ROWS:
        jacobian, changes = _by_rows(specimen, entries, vectors)
        return DenseFisher(specimen, entries, f"{count} backward passes", jacobian, changes)
    if not specimen.copy.is_double:
        return (
            f"the losses read {count} numbers, more than {MOST_ROWS}, and float64 is not available"
        )
    if count * len(entries) > _MOST_ENTRIES:
        return f"the losses read {count} numbers, whose Jacobian matrix is too large"
    measured: list[dict[str, Floats]] = []
    for vector in (*_units(specimen, entries), *vectors):
        slopes = _along(specimen, vector)
        if slopes is None:
            return "the values of the losses are not smooth enough there: differences disagree"
        measured.append(slopes)
    columns, changes = measured[: len(entries)], measured[len(entries) :]
    jacobian = {n: np.stack([column[n] for column in columns], axis=1) for n in names}
    method = f"{len(measured)} differences in float64"
    return DenseFisher(specimen, entries, method, jacobian, changes)


def _by_rows(
    specimen: Specimen, entries: Entries, vectors: Sequence[Mapping[str, Floats]]
) -> tuple[dict[str, Floats], list[dict[str, Floats]]]:
    space, trace = specimen.model.memory_space, specimen.trace
    names = tuple(dict.fromkeys((*entries.positions, *(n for v in vectors for n in v))))
    jacobian: dict[str, Floats] = {}
    changes: list[dict[str, Floats]] = [{} for _ in vectors]
    for value in specimen.engine.objective.inputs:
        like = space.on_host(trace[value])
        rows, products = [], []
        for index in range(like.size):
            one = np.zeros(like.size, like.dtype)
            one[index] = 1
            gradients = trace.vjp({value: space.to_device(one.reshape(like.shape))}, names)
            wide = {n: space.on_host(g).astype(np.float64) for n, g in gradients.items()}
            rows.append(entries.of(wide))
            products.append([sum(float(np.vdot(wide[n], v[n])) for n in v) for v in vectors])
        jacobian[value] = np.array(rows)
        for number, change in enumerate(changes):
            change[value] = np.array([product[number] for product in products])
    return jacobian, changes


def _units(specimen: Specimen, entries: Entries) -> Iterator[dict[str, Floats]]:
    for name, indices in entries.positions.items():
        for index in indices:
            unit = np.zeros(specimen.parameters[name].size)
            unit[index] = 1.0
            yield {name: unit.reshape(specimen.parameters[name].shape)}


def _along(specimen: Specimen, vector: Mapping[str, Floats]) -> dict[str, Floats] | None:
    """Return the derivatives of loss inputs along a vector; None if differences disagree."""
    copy, names = specimen.copy, specimen.engine.objective.inputs
    shapes = {name: specimen.trace[name].size for name in names}
    scale = _entry_size(specimen, vector)
    direction = {name: scale * array for name, array in vector.items()}
    function = partial(_stacked, specimen)
    measured = differentiate_along(copy, function, specimen.parameters, direction, relative=_DOUBT)
    if measured.doubt > _DOUBT * float(np.linalg.norm(measured.value)) + 1e-12:
        return None
    ends = np.cumsum(list(shapes.values()))[:-1]
    return dict(zip(names, np.split(measured.value / scale, ends), strict=True))


def _entry_size(specimen: Specimen, vector: Mapping[str, Floats]) -> float:
    """Return the factor that makes a vector as large as the parameters."""
    squares = sum(float(np.sum(np.square(specimen.parameters[n]))) for n in vector)
    count = sum(specimen.parameters[n].size for n in vector)
    size = float(np.sqrt(squares / count)) or 1e-2
    return size / max(float(abs(array).max(initial=0.0)) for array in vector.values())


def _stacked(specimen: Specimen, parameters: Mapping[str, Floats]) -> Floats:
    outputs = specimen.copy.outputs(parameters)
    return np.concatenate([outputs[name].reshape(-1) for name in specimen.engine.objective.inputs])

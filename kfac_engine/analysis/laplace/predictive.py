"""Predicts the distribution of a model's outputs for normally distributed parameters.

The model is linearized at its parameters θ: the outputs of an example have the mean ``f(x, θ)`` and
the covariance ``J P⁻¹ Jᵀ`` for the Jacobian ``J`` of the outputs (Immer, Korzepa & Bauer 2021).

The logits ``z`` of a prediction have the mean ``μ`` and the covariance ``Σ``. The probabilities are
approximations of the mean of ``softmax(z)``, or of ``sigmoid(z)`` for independent targets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod

import numpy as np
from scipy.special import expit, logsumexp, softmax

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float
from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.analysis.fisher_matrix.example_gradients import (
    Sources,
    block_tiles,
    jacobian_sources,
)
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.engine.layer_gradients import Gradients
from kfac_engine.engine.validation import batch_size
from kfac_engine.errors import NonFiniteError, UnsupportedError
from kfac_engine.registry import Registry
from kfac_engine.system import memory_limits


@dataclass(frozen=True, slots=True, eq=False)
class LogitPrediction:
    """Normal distributions of logits."""

    mean: Float  # ``(n, k)``
    covariance: Float  # ``(n, k, k)``
    # Whether one of the classes is right (softmax), or any number of them (sigmoid).
    exclusive: bool

    @property
    def variances(self) -> Float:
        """Diagonals of the covariances, ``(n, k)``."""
        return np.diagonal(self.covariance, axis1=1, axis2=2)

    def probabilities(self, z: Float) -> Float:
        """Return the softmax of logits ``(…, k)``, or the sigmoid for independent classes."""
        result: Float = softmax(z, axis=-1) if self.exclusive else expit(z)
        return result


# Logits, number of samples and generator to probabilities (n, k).
Link = Callable[[LogitPrediction, int, np.random.Generator], Float]


def _probit(logits: LogitPrediction, *_: object) -> Float:
    """Return ``softmax(μ / √(1 + π/8 diag Σ))`` (MacKay 1992; Gibbs 1997)."""
    return logits.probabilities(logits.mean / np.sqrt(1 + np.pi / 8 * logits.variances))


def _monte_carlo(logits: LogitPrediction, samples: int, generator: np.random.Generator) -> Float:
    """Return the mean of the probabilities of samples."""
    values, vectors = np.linalg.eigh(logits.covariance)
    root = vectors * np.sqrt(values.clip(min=0.0))[:, None]
    total = np.zeros_like(logits.mean)
    for _ in range(samples):
        noise = generator.standard_normal((*logits.mean.shape, 1))
        total += logits.probabilities(logits.mean + (root @ noise)[:, :, 0])
    return total / samples


def _dirichlet_mean(logits: LogitPrediction, *_: object, normalized: bool) -> Float:
    """Return the mean of the Dirichlet distribution of the Laplace bridge, ``(n, k)``.

    The logits are conditioned on ``Σ_i z_i = 0``. With ``normalized``, mean and variances are
    divided so that the mean variance is ``√(k/2)`` (Hobbhahn, Kristiadi & Hennig 2022, "Fast
    predictive uncertainty for classification with Bayesian deep networks"). Classes that are not
    exclusive raise an UnsupportedError.
    """
    if not logits.exclusive:
        raise UnsupportedError(
            "the links 'bridge' and 'bridge_norm' are defined for exclusive classes; use 'probit' "
            "or 'monte_carlo'."
        )
    k = logits.mean.shape[1]
    if k == 1:
        return np.ones_like(logits.mean)
    sums = logits.covariance.sum(axis=2)
    shares = sums / sums.sum(axis=1)[:, None]
    mean = logits.mean - shares * logits.mean.sum(axis=1, keepdims=True)
    variances = logits.variances - sums * shares
    # A difference below the rounding error of the variance is unknown.
    rounding = k * np.finfo(np.float64).eps * logits.variances
    variances = np.where(variances > rounding, variances, np.nan)
    if normalized:
        ratio = variances.mean(axis=1, keepdims=True) / np.sqrt(k / 2)
        mean, variances = mean / np.sqrt(ratio), variances / ratio
    # α = (1 − 2/k + exp(μ)/k² Σ exp(−μ)) / variances, in logarithms, which do not overflow.
    with np.errstate(divide="ignore"):  # 1 − 2/k is zero for two classes
        constant = np.log1p(-2 / k)
    powers = mean + logsumexp(-mean, axis=1, keepdims=True) - 2 * np.log(k)
    result: Float = softmax(np.logaddexp(constant, powers) - np.log(variances), axis=1)
    return result


LINKS: Mapping[str, Link] = Registry(
    "link",
    {
        "probit": _probit,
        "bridge": partial(_dirichlet_mean, normalized=False),
        "bridge_norm": partial(_dirichlet_mean, normalized=True),
        "monte_carlo": _monte_carlo,
    },
)


_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Predictive:
    """Predictions with their uncertainty.

    Attributes:
        mean: Outputs of the model that the loss reads, ``(n, k)``, or ``(n, …, k)`` with positions.
        variance: Covariance of the outputs of each example because of the uncertain parameters,
            ``(n, k, k)``; with positions, over all outputs of an example in row-major order.
        probabilities: Probabilities of the classes in the shape of ``mean``; None for a loss
            without classes.
        covariance: Covariance of the outputs of all examples, ``(nk, nk)``; None unless it was
            requested.
    """

    mean: Array
    variance: Array
    probabilities: Array | None = None
    covariance: Array | None = None

    def check(self) -> None:
        """Raise a NonFiniteError that names an array with NaN or infinity."""
        for name in ("mean", "variance", "probabilities", "covariance"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                raise NonFiniteError(
                    f"the {name} of the predictions has NaN or infinity; raise prior_precision, "
                    f"choose another link, or check the inputs."
                )

    def __repr__(self) -> str:
        """Return the number of predictions and the shapes."""
        joint = "" if self.covariance is None else f", covariance {self.covariance.shape}"
        return f"Predictive(mean {self.mean.shape}, variance {self.variance.shape}{joint})"


@dataclass(frozen=True, slots=True)
class Linearization:
    """Computes means and covariances of outputs."""

    curvature: Curvature  # the curvature whose blocks the parameters have

    def variances(
        self, inputs: Mapping[str, Array], powers: Sequence[Mapping[int, Float]]
    ) -> tuple[Float, Float]:
        """Return means, and covariances for several distributions of the parameters.

        For each distribution, ``powers`` map the ``id`` of a block to the eigenvalues of ``P⁻¹``.
        Means are ``(n, …, k)``, and covariances of all outputs of an example ``(p, n, K, K)``.
        """
        means, covariances = [], []
        self._require_variances(inputs, len(powers))
        for chunk in self._chunks(inputs):
            batch = jacobian_sources(self.curvature.layout, chunk)
            mean = self._mean(batch)
            total = np.zeros((len(powers), len(mean), len(batch[1]), len(batch[1])))
            for block, examples, gradients in self._tiles(batch):
                for row, values in zip(total, powers, strict=True):
                    row[examples] += gradients.gram(values[id(block)])
            means.append(mean)
            covariances.append(total)
        return np.concatenate(means), np.concatenate(covariances, axis=1)

    def covariance(self, inputs: Mapping[str, Array], powers: Mapping[int, Float]) -> Float:
        """Return the covariance of the outputs of all examples, ``(nK, nK)``.

        ``powers`` map the ``id`` of a block to the eigenvalues of ``P⁻¹``. A MemoryLimitError says
        that the Jacobians of a block do not fit into the memory.
        """
        batch = jacobian_sources(self.curvature.layout, inputs)
        rows = len(self._mean(batch)) * len(batch[1])
        self._require_memory(rows)
        total = np.zeros((rows, rows))
        for block, tiles in groupby(self._tiles(batch), key=lambda tile: tile[0]):
            whole = [gradients.matrices() for _, _, gradients in tiles]
            flat = np.concatenate(whole).reshape(rows, -1)
            total += (flat * powers[id(block)].reshape(-1)) @ flat.T
        return total

    # -- private ----------------------------------------------------------------------------------

    def _tiles(self, batch: Sources) -> Iterator[tuple[Block, slice, Gradients]]:
        return block_tiles(self.curvature.layout, self.curvature.blocks, batch)

    def _mean(self, batch: Sources) -> Float:
        task = self.curvature.layout.assembly.task
        (name,) = task.objective.inputs
        to_numpy = self.curvature.layout.assembly.collection.backend.to_numpy
        return np.asarray(to_numpy(batch[0][name]), np.float64)

    def _chunks(self, inputs: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
        """Yield examples whose derivatives of layer outputs fit into the scratch memory."""
        assembly = self.curvature.layout.assembly
        batch, facts = assembly.task.batch, assembly.model.facts
        arrays = {}
        if isinstance(inputs, Mapping):
            arrays = {n: np.asarray(a) for n, a in self.curvature.on_host(inputs).items()}
        axes = {name: axis for name, axis in batch.inputs.items() if name in arrays}
        refused = not axes or any(arrays[name].ndim <= axis for name, axis in axes.items())
        if batch.fixed or refused:  # by the model
            yield inputs
            return
        (value,) = assembly.task.objective.inputs[:1]
        layers = [layer for layer in assembly.discovery.layers if layer.outputs]
        names = [name for layer in layers for name in uses(layer.outputs)]
        entries = sum(prod(facts[name].shape) for name in (value, *names)) // batch.size
        outputs = prod(facts[value].shape) // batch.size
        scratch = assembly.collection.backend.scratch_bytes
        step = max(1, scratch // max(1, _BYTES * entries * outputs))
        count = max(arrays[name].shape[axis] for name, axis in axes.items())
        for start in range(0, max(count, 1), step):
            yield {
                name: array[(slice(None),) * axes[name] + (slice(start, start + step),)]
                if name in axes
                else array
                for name, array in arrays.items()
            }

    def _require_memory(self, rows: int) -> None:
        entries = max(prod(block.places.shape) for block in self.curvature.blocks)
        memory_limits.require_memory(
            _BYTES * rows * (3 * entries + 2 * rows),
            f"the joint covariance of {rows} outputs",
            "pass fewer examples",
        )

    def _require_variances(self, inputs: Mapping[str, Array], several: int) -> None:
        """Refuse covariances of the outputs of all examples that do not fit.

        The memory holds the cotangents of a batch, the covariances of its examples and the
        covariance of all examples at the same time.
        """
        assembly = self.curvature.layout.assembly
        batch, (value, *_) = assembly.task.batch, assembly.task.objective.inputs
        count = batch_size(batch, inputs) or batch.size
        outputs = prod(assembly.model.facts[value].shape) // batch.size
        each = 2 * several * _BYTES * outputs**2
        fitting = memory_limits.available_memory() // each
        memory_limits.require_memory(
            count * each,
            f"the covariance of {outputs} outputs of each of {count} examples",
            f"pass at most {fitting} examples at a time" if fitting else "one example is too many",
        )

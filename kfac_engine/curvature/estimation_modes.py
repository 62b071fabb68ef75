"""Defines estimation modes: vectors to propagate, whose second moment is the Fisher matrix.

A mode turns the losses of a batch into *sources*, one after the other: mappings from loss input to
cotangent, for ``Trace.vjp``. Statistics sum over sources and average over examples.

Cotangents are gradients of negative log-likelihood, per example, of the sum over the batch: they
are never divided by the batch (factors do that). With k a loss's coefficient and ``B Bᵀ = F``:

===================  ================  =========================================================
mode                 matrix            sources
===================  ================  =========================================================
gradients            Fisher            √k · gradient at sampled targets; one
empirical            Empirical_Fisher  k · gradient at the data's targets; one
curvature_prop       Fisher            √k · B ε with random signs ε; one
curvature_prop_GGN   GGN               the same with the factor of the Gauss–Newton matrix
exact                Fisher            √k · B e_i; one per coordinate i of each loss
exact_GGN            GGN               the same with the factor of the Gauss–Newton matrix
===================  ================  =========================================================

Source: Martens & Grosse 2015, arXiv:1503.05671, section 5; Martens, Sutskever & Swersky 2012,
arXiv:1206.6464 (curvature propagation).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import sqrt
from typing import Any, Literal, TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, recordable
from kfac_engine.distributed.shards import AnyGenerator, generator_of
from kfac_engine.errors import InputError, RegistrationError, ShapeError, UnknownNameError
from kfac_engine.losses.base import RegisteredLoss
from kfac_engine.losses.checks import Named, require_shape
from kfac_engine.registry import Registry

MatType: TypeAlias = Literal["Fisher", "Empirical_Fisher", "GGN"]
Cotangents: TypeAlias = dict[str, Array]
# What fixes the randomness: loss name to targets or signs; several parts have a tuple of them.
Draws: TypeAlias = Mapping[str, Array | tuple[Array, ...]]
Sources: TypeAlias = Callable[
    [Sequence[RegisteredLoss], Values, AnyGenerator, Draws], Iterator[Cotangents]
]


@dataclass(frozen=True, slots=True)
class EstimationMode:
    """A way to estimate a curvature matrix; call it to get the sources of a batch."""

    mat_type: MatType  # the matrix that the second moment of the sources estimates
    sources: Sources  # the generator of the sources, without checks
    needs_targets: bool = False  # whether it reads the targets of the batch
    # Whether there is always one source. Several sources are summed up before an average moves,
    # which takes memory for the sums.
    one_source: bool = False
    # Whether it numbers the entries of a loss input after the first axis, which must then hold the
    # examples alone.
    examples_first: bool = False

    def __call__(
        self,
        losses: Sequence[RegisteredLoss],
        values: Named,
        rng: AnyGenerator,
        draws: Draws | None = None,
    ) -> Iterator[Cotangents]:
        """Return the sources of a batch, computed one at a time; the batch is checked first.

        Args:
            losses: The losses.
            values: The loss inputs of the batch by name, and targets where the mode needs them.
            rng: Generator of sampled targets and signs, of the batch or of some of its rows.
            draws: Draws that replace random ones for some losses: targets in mode ``gradients``, ±1
                signs of the inner shape in ``curvature_prop``. Modes without randomness do not read
                them.

        Returns:
            Iterator over mappings from loss input to cotangent, in that input's shape.

        Raises:
            RegistrationError: There is no loss.
            UnknownNameError: ``draws`` names an unknown loss, or a loss input is missing.
            InputError: The values, targets or draws of the batch are wrong.
            UnsupportedError: A loss has no Gauss–Newton matrix and the mode needs one.
        """
        if not losses:
            raise RegistrationError("no loss is registered; register one before estimating.")
        for name in draws or {}:
            if name not in (known := [loss.name for loss in losses]):
                raise UnknownNameError(f"draws for unknown loss '{name}'; losses are: {known}.")
        arrays: dict[str, Array] = {}
        for term in (loss.function for loss in losses):
            if self.mat_type == "GGN":
                term.require_ggn()
            arrays |= term.read(values, targets=self.needs_targets)
        return self.sources(losses, arrays, rng, draws or {})


@recordable
def _sampled_gradients(
    losses: Sequence[RegisteredLoss], values: Values, rng: AnyGenerator, draws: Draws
) -> Iterator[Cotangents]:
    source: Cotangents = {}
    for loss, draw in _with_draws(losses, draws):
        term = loss.function
        if draw is None:
            gradient = term.sampled_gradient(values, generator_of(rng, loss.name))
        else:
            targets = array_module(values[term.inputs[0]]).asarray(draw)
            term.check_target_array(values, targets)
            gradient = term.gradient_of(values, targets)
        _add(source, gradient, sqrt(loss.coefficient))
    yield source


def _data_gradients(
    losses: Sequence[RegisteredLoss], values: Values, rng: AnyGenerator, draws: Draws
) -> Iterator[Cotangents]:
    source: Cotangents = {}
    for loss in losses:
        # k, not √k: the specification lets the coefficient enter this mode squared.
        targets = loss.function.observe(values).targets
        assert targets is not None, "observe requires targets"
        _add(source, loss.function.gradient_of(values, targets), loss.coefficient)
    yield source


def _random_signs(
    losses: Sequence[RegisteredLoss], values: Values, rng: AnyGenerator, draws: Draws
) -> Iterator[Cotangents]:
    source: Cotangents = {}
    for loss, draw in _with_draws(losses, draws):
        term = loss.function
        shape = term.inner_shape(values)
        if draw is None:
            draw = generator_of(rng, loss.name).integers(0, 2, shape) * 2 - 1
        like = values[term.inputs[0]]
        signs = array_module(like).asarray(draw, dtype=like.dtype)
        _check_signs(loss.name, signs, shape)
        _add(source, term.fisher_factor(values, signs), sqrt(loss.coefficient))
    yield source


def _every_coordinate(
    losses: Sequence[RegisteredLoss], values: Values, rng: AnyGenerator, draws: Draws
) -> Iterator[Cotangents]:
    for name, parts in _by_name(losses):
        for index in product(*map(range, _coordinates(name, parts, values))):
            source: Cotangents = {}
            for loss in parts:
                _add(source, loss.function.one_hot(values, index), sqrt(loss.coefficient))
            yield source


MODES: Registry[EstimationMode] = Registry(
    "estimation mode",
    {
        "gradients": EstimationMode("Fisher", _sampled_gradients, one_source=True),
        "empirical": EstimationMode(
            "Empirical_Fisher", _data_gradients, needs_targets=True, one_source=True
        ),
        "curvature_prop": EstimationMode("Fisher", _random_signs, one_source=True),
        # The Gauss–Newton matrix is the Fisher matrix wherever it is defined; so are its factors.
        "curvature_prop_GGN": EstimationMode("GGN", _random_signs, one_source=True),
        "exact": EstimationMode("Fisher", _every_coordinate, examples_first=True),
        "exact_GGN": EstimationMode("GGN", _every_coordinate, examples_first=True),
    },
)


def _add(source: Cotangents, gradient: Mapping[str, Array], weight: float) -> None:
    """``source += weight · gradient``; losses that share an input add up."""
    for name, array in gradient.items():
        scaled = float(weight) * array
        source[name] = source[name] + scaled if name in source else scaled


def _by_name(losses: Sequence[RegisteredLoss]) -> Iterator[tuple[str, list[RegisteredLoss]]]:
    """Yield the losses of each name, one for each part of the batch."""
    for name, parts in groupby(losses, lambda loss: loss.name):
        yield name, list(parts)


def _with_draws(
    losses: Sequence[RegisteredLoss], draws: Draws
) -> list[tuple[RegisteredLoss, Array | None]]:
    """Return the losses, each with its fixed draw or None."""
    if not draws:
        return [(loss, None) for loss in losses]
    pairs: list[tuple[RegisteredLoss, Array | None]] = []
    for name, parts in _by_name(losses):
        draw: Any = draws.get(name)
        single = draw is None or (len(parts) == 1 and not isinstance(draw, tuple))
        per_part = [draw] * len(parts) if single else [*draw]
        if len(per_part) != len(parts):
            raise InputError(
                f"loss '{name}' has {len(parts)} parts, but draws hold {len(per_part)}."
            )
        pairs += zip(parts, per_part, strict=True)
    return pairs


def _coordinates(name: str, parts: Sequence[RegisteredLoss], values: Values) -> tuple[int, ...]:
    """Return the inner shape without the batch axis, the same for all parts of a batch."""
    shapes = {loss.function.inner_shape(values)[1:] for loss in parts}
    if len(shapes) != 1:
        raise ShapeError(
            f"the parts of loss '{name}' have examples of different shapes: {sorted(shapes)}."
        )
    return shapes.pop()


def _check_signs(loss: str, signs: Array, shape: tuple[int, ...]) -> None:
    require_shape(f"draws for loss '{loss}'", signs.shape, shape, "one sign per inner coordinate")
    if not (abs(signs) == 1).all():
        raise InputError(f"draws for loss '{loss}' must be signs, +1 or -1.")

"""Defines the base class of blocks, which multiply by the Fisher matrix without forming it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, prod
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from kfac_engine._types import Array, Params, Rows, Vector
from kfac_engine.curvature.config import LEAST_EIGENVALUE, RelativeDamping, as_damping
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor
from kfac_engine.curvature.factors.owner import Factor, FactorOwner
from kfac_engine.curvature.factors.refresh import Damping, Level
from kfac_engine.curvature.factors.row_weights import LayerRows
from kfac_engine.curvature.factors.statistics import Statistic, Uses
from kfac_engine.errors import InputError, NotReadyError, RegistrationError, UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.layers.packing import Packing
from kfac_engine.printable import shortened
from kfac_engine.summary import dimensions

Found = TypeVar("Found", covariant=True)

# The tensors of a layer for a part of the batch: a name, or names over uses.
Names: TypeAlias = str | Sequence[str]
# grads_list[source][part] for layers, grads_list[source] for generic blocks.
GradsList: TypeAlias = Sequence[Sequence[Names]] | Sequence[Names]

_MOST_NAMES, _MOST_CHARACTERS = 4, 80


class Decomposition(Protocol[Found]):
    """A result that is computed from the eigenvalues of a block, for each form of a block."""

    def product(self, A: FisherFactor, G: FisherFactor, scale: float) -> Found:
        """Return the result for ``scale · A ⊗ G``."""

    def rotated(self, factor: EigenbasisFactor) -> Found:
        """Return the result for measured eigenvalues along eigenvectors of a Kronecker product."""

    def matrix(self, F: FisherFactor) -> Found:
        """Return the result for a single matrix over the parameters."""


class ExampleReader(Protocol[Found]):
    """A result that is computed from the gradients of single examples, for each form of a layer."""

    def rows(self, form: LayerForm) -> Found:
        """Return the result for ``Σ_t a_t ds_tᵀ`` over uses and positions."""

    def sums(self, form: ScaleShiftForm) -> Found:
        """Return the result for ``[Σ x∘ds, Σ ds]``."""

    def one_by_one(self) -> Found:
        """Return the result for gradients that do not follow from the tensors of the layer."""


class FisherBlock(ABC):
    """One block of a block-diagonal Fisher matrix.

    Args:
        collection: Owner of the factors, the backend and the configuration.

    Attributes:
        params: The parameters; set at registration.
        symbols: The symbol of each factor.
        is_product: Whether a power is a number times the same power of two factors, ``A ⊗ G``.
        selects_rows: Whether the inputs are token ids, which select rows of a table.
        of_parameters: Whether statistics read gradients of parameters instead of gradients of a
            layer.
    """

    symbols: ClassVar[tuple[str, ...]] = ("F",)
    is_product: ClassVar[bool] = False
    selects_rows: ClassVar[bool] = False
    of_parameters: ClassVar[bool] = False

    def __init__(self, collection: FactorOwner) -> None:
        self._collection = collection
        # Names of inputs and outputs over uses, for each part of the batch.
        self._parts: list[tuple[Uses, Uses]] = []
        self.params: Params | None = None
        self._damping: Callable[[], float] | None = None

    def __repr__(self) -> str:
        """Return class, parameters and shapes of the factors."""
        names = () if self.params is None else uses(self.params)
        shown = [shortened(name, _MOST_CHARACTERS) for name in names[:_MOST_NAMES]]
        more = ["…"] if len(names) > _MOST_NAMES else []
        return f"<{type(self).__name__} of {', '.join(shown + more) or '?'}: {self._shapes()}>"

    # -- registration ---------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Number of registered parts of the batch."""
        return len(self._parts)

    def add_part(self, inputs: Names, outputs: Names) -> None:
        """Add a part of the batch.

        Args:
            inputs: Name of the layer's input, or a list with a name for each use.
            outputs: Name of the layer's output before any nonlinearity, or a list likewise.

        Raises:
            RegistrationError: Inputs and outputs have different numbers of uses.
        """
        x, s = uses(inputs), uses(outputs)
        if len(x) > 1 and len(s) > 1 and len(x) != len(s):
            raise RegistrationError(
                f"a layer with {len(x)} inputs has {len(s)} outputs: one of each for every use."
            )
        self._parts.append((x, s))

    def tensors_to_compute_grads(self) -> tuple[Names, ...]:
        """Return the names of tensors whose gradients the block reads, for each part."""
        return tuple(names if len(names) > 1 else names[0] for _, names in self._parts)

    def layer_rows(self) -> tuple[LayerRows, ...]:
        """Return the inputs and outputs of each part; their rows correspond."""
        return ()

    def instantiate_factors(
        self, grads_list: GradsList, damping: float | Callable[[], float]
    ) -> None:
        """Create the factors, or use factors with equal statistics.

        Args:
            grads_list: Names of the gradients with respect to ``tensors_to_compute_grads``:
                ``[source][part]`` for layers, ``[source]`` for generic blocks.
            damping: λ; ``λ·I`` is approximately added to the block. A callable is evaluated at each
                refresh.

        Raises:
            InputError: The damping is negative or not finite.
            NotReadyError: No part of the batch was registered.
        """
        if not self.num_parts:
            raise NotReadyError(f"register tensors of the block of {self.params} first.")
        if not callable(damping):
            fixed = self._checked_damping(damping)
            damping = lambda: fixed  # noqa: E731 (a closure over a number, nothing to name)
        self._damping = damping
        self._make_factors(grads_list)
        for factor in self.factors:
            factor.partners = tuple(dict.fromkeys((*factor.partners, *self.factors)))

    @abstractmethod
    def _make_factors(self, grads_list: GradsList) -> None:
        """Create the factors for gradients ``[source][part]`` or ``[source]``."""

    def _layer_rows(self, form: LayerForm) -> tuple[LayerRows, ...]:
        """Return the tensors of each part of a layer with this form."""
        views = form.output_view, form.input_view
        return tuple(LayerRows(x, s, *views, form.num_uses) for x, s in self._parts)

    def _make_factor(
        self,
        cls: type[Factor],
        statistic: Callable[[Uses, Uses], Statistic],
        grads_list: GradsList,
        *args: object,
    ) -> Factor:
        """Return the factor of a statistic of a layer.

        Args:
            cls: Class of the factor.
            statistic: Returns the statistic of an input and of gradients, given by names over uses.
            grads_list: Names of the gradients, ``[source][part]``.
            *args: Arguments of ``cls`` after the statistic.

        Raises:
            InputError: There is no source, or the entries of a source do not fit the parts.
        """
        count = len(self._parts)
        if not grads_list or any(isinstance(s, str) or len(s) != count for s in grads_list):
            raise InputError(
                f"grads_list needs, for each source, a list of {count} entries, one a part; "
                f"got {grads_list!r}."
            )
        sources = dict.fromkeys(
            tuple(statistic(x, uses(ds)) for (x, _), ds in zip(self._parts, source, strict=True))
            for source in grads_list
        )
        return self._make_from(cls, tuple(sources), *args)

    def _make_from(
        self, cls: type[Factor], sources: tuple[tuple[Statistic, ...], ...], *args: object
    ) -> Factor:
        """Return the factor that sums statistics over sources, and averages each over parts."""
        first, several = sources[0][0], len(sources) > 1 or len(sources[0]) > 1
        make = self._collection.make_or_get_factor
        return make(cls, (first, *args), sources if several else ())

    # -- factors --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def factors(self) -> tuple[FisherFactor, ...]:
        """The factors of the block, the input factor first."""

    @property
    def basis(self) -> EigenbasisFactor | None:
        """The factor that measures in the eigenvectors of ``A ⊗ G``; None for other blocks."""
        return None

    def decompose(self, decomposition: Decomposition[Found]) -> Found:
        """Call the method of ``decomposition`` for this form of block, and return its result.

        Raises:
            UnsupportedError: The eigenvalues have no closed form.
        """
        del decomposition
        raise UnsupportedError(f"the block of {self.params} has no eigenvalues in closed form.")

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        """Call the method of ``reader`` for this form of layer, and return its result."""
        return reader.one_by_one()

    @property
    def packing(self) -> Packing | None:
        """The packing of the layer's weight and bias; None for a block of concatenated vectors."""
        return None

    @abstractmethod
    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each factor's average, computed from the parameters' shapes."""

    @property
    def damping(self) -> float:
        """The damping of the block without its scale: λ divided by the number of uses × positions.

        Raises:
            NotReadyError: The factors were not instantiated.
            InputError: The damping is negative or not finite.
        """
        level = self._level()
        return level.of(self.mean_eigenvalue()) if isinstance(level, RelativeDamping) else level

    def mean_eigenvalue(self) -> float:
        """Return the mean eigenvalue of the undamped block; at least ``LEAST_EIGENVALUE``.

        Raises:
            NotReadyError: No batch was measured.
        """
        mean = 1.0
        for factor in self.factors:
            mean *= max(factor.trace() / factor.side, LEAST_EIGENVALUE)
        return mean

    def factor_dampings(self) -> tuple[Level | None, ...]:
        """Return the damping that is added to each factor; None for a factor without damping.

        A factor of several groups has a damping for each group.
        """
        return (self.damping,)

    @abstractmethod
    def _damped_factors(self) -> Iterable[tuple[FisherFactor, Damping]]:
        """Return the factors whose powers are registered, each with its damping."""

    def register_matpower(self, exp: float) -> None:
        """Register a power, which each refresh computes."""
        for factor, damping in self._damped_factors():
            factor.register_matpower(exp, damping)

    def register_inverse(self) -> None:
        """Register the inverse, which each refresh computes."""
        self.register_matpower(-1)

    def register_cholesky(self) -> None:
        """Register the Cholesky factor, which each refresh computes."""
        for factor, damping in self._damped_factors():
            factor.register_cholesky(damping)

    def register_cholesky_inverse(self) -> None:
        """Register the inverse Cholesky factor, which each refresh computes."""
        for factor, damping in self._damped_factors():
            factor.register_cholesky_inverse(damping)

    # -- products -------------------------------------------------------------------------------

    @property
    def work(self) -> float:
        """Approximate number of multiplications of a product; small before the first batch."""
        return float(sum(prod(shape_of(factor)) for factor in self.factors))

    @property
    def multiplies_rows(self) -> bool:
        """Whether several processes can compute the product: each for some ``Rows``."""
        return False

    @abstractmethod
    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        """Multiply the damped block to the power ``exp`` by a vector.

        Args:
            vector: An array in the shape of the parameter, or a tuple with an array for each
                parameter.
            exp: 1, or a registered power.

        Returns:
            New arrays in the form of ``vector``.
        """

    def multiply_weight(self, weight: Array, exp: float) -> Array:
        """Return the first array of a product with a vector whose other arrays are zero.

        Args:
            weight: The first array of the vector, of the backend.
            exp: 1, or a registered power.

        Returns:
            A new array.
        """
        product = self.multiply_matpower(self._with_zeros(weight), exp)
        return product[0] if isinstance(product, tuple) else product  # type: ignore[return-value] # no rows

    def multiply(self, vector: Vector) -> Vector:
        """Return the product of the damped block, from the current averages, and a vector."""
        return self.multiply_matpower(vector, 1)

    def multiply_inverse(self, vector: Vector) -> Vector:
        """Return the product of the damped inverse of the last refresh and a vector."""
        return self.multiply_matpower(vector, -1)

    def multiply_cholesky(self, vector: Vector, transpose: bool = False) -> Vector:
        """Return ``B`` or ``Bᵀ`` times a vector, where ``B Bᵀ`` is the damped block."""
        return self._multiply_root(vector, transpose=transpose, inverse=False)

    def multiply_cholesky_inverse(self, vector: Vector, transpose: bool = False) -> Vector:
        """Return ``B⁻¹`` or ``B⁻ᵀ`` times a vector.

        ``B⁻ᵀ`` times white noise is a sample of N(0, F⁻¹).
        """
        return self._multiply_root(vector, transpose=transpose, inverse=True)

    @abstractmethod
    def _multiply_root(self, vector: Vector, *, transpose: bool, inverse: bool) -> Vector:
        """Return ``B`` times a vector, or the product with the transpose, the inverse or both."""

    @abstractmethod
    def full_fisher_block(self) -> Array:
        """Return the undamped block as a dense matrix, in the order of the packed parameters."""

    # -- parts of the batch by their name in TensorFlow's K-FAC -----------------------------------

    @property
    def num_registered_towers(self) -> int:
        """Number of registered parts of the batch."""
        return self.num_parts

    def register_additional_tower(self, inputs: Names, outputs: Names) -> None:
        """Add a part of the batch; see ``add_part``."""
        self.add_part(inputs, outputs)

    # -- private ----------------------------------------------------------------------------------

    def _shapes(self) -> str:
        """Return the shapes of the averages, such as ``A 10×10, G 16×16``."""
        if self._damping is None:
            return "without factors"
        if any(factor.average.value is None for factor in self.factors):
            return "without statistics"
        pairs = zip(self.symbols, map(shape_of, self.factors), strict=True)
        return ", ".join(f"{symbol} {dimensions(shape)}" for symbol, shape in pairs)

    def _operand(self, vector: Vector) -> Vector:
        """Return a vector of any library as floating-point arrays of the backend."""
        arrays = map(self._collection.backend.asarray, parts(vector))
        # A product of integers would be truncated.
        wide = tuple([a.astype("float64") if a.dtype.kind in "biu" else a for a in arrays])
        return wide if isinstance(vector, tuple | list) else wide[0]

    def _with_zeros(self, weight: Array) -> Vector:
        """Return a vector of the block whose arrays after the first are zero."""
        collection, others = self._collection, uses(self.params or ())[1:]
        shapes = map(collection.require_shape, others)
        zeros = [collection.backend.xp.zeros(shape, weight.dtype) for shape in shapes]
        return (weight, *zeros) if zeros else weight

    def _level(self) -> float:
        """Return the damping that the owner of the block has set, after a check."""
        if self._damping is None:
            raise NotReadyError(f"call instantiate_factors of the block of {self.params} first.")
        return self._checked_damping(self._damping())

    def _checked_damping(self, damping: float) -> float:
        value = as_damping(damping)
        if not (isfinite(value) and value >= 0):
            raise InputError(
                f"the damping of the block of {self.params} must not be negative and must be "
                f"finite, got {value}."
            )
        return value.of_block(self.params) if isinstance(value, RelativeDamping) else value


def parts(vector: Vector) -> tuple[Array, ...]:
    """Return a vector as a tuple with an array for each parameter; refuse rows."""
    if isinstance(vector, Rows):
        raise UnsupportedError("this block multiplies whole arrays, not rows of them.")
    return tuple(vector) if isinstance(vector, tuple | list) else (vector,)


def shape_of(factor: FisherFactor) -> tuple[int, ...]:
    """Return the shape of a factor's average; empty before the first batch."""
    return () if factor.average.value is None else factor.average.value.shape


def uses(names: Names) -> Uses:
    """Return names over uses as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)

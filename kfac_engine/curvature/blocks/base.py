"""What every block is: the Fisher matrix of some parameters, multiplied without being formed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isfinite, prod
from typing import Protocol, TypeAlias, TypeVar

from kfac_engine._types import Array, Params, Rows, Vector
from kfac_engine.backend.protocol import Backend
from kfac_engine.compat.mixins.blocks import InverseProducts
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.statistics import Tensors, Uses
from kfac_engine.errors import InputError, NotReadyError, RegistrationError, UnsupportedError

Factor = TypeVar("Factor", bound=FisherFactor)

# What a caller may write for the tensors of one tower: a name, or names over uses.
TowerNames: TypeAlias = str | Sequence[str]
# grads_list[source][tower] for layers, grads_list[source] for generic blocks.
GradsList: TypeAlias = Sequence[Sequence[TowerNames]] | Sequence[TowerNames]


class FactorOwner(Protocol):
    """What a block asks of the collection it belongs to."""

    backend: Backend
    config: CollectionConfig

    @property
    def batch_value(self) -> str | None:
        """Name of a value whose first axis is the batch, if one is known."""

    @property
    def batch_is_exact(self) -> bool:
        """Whether that axis is known to hold examples alone, no positions."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The declared shape of a tensor; None where it is not known before a batch."""

    def require_shape(self, name: str) -> tuple[int, ...]:
        """The declared shape of a tensor; an error where it is not known."""

    def make_or_get_factor(self, cls: type[Factor], args: tuple[object, ...]) -> Factor:
        """The factor ``cls(*args)``, made once and shared."""


class FisherBlock(InverseProducts, ABC):
    """One block of a block-diagonal Fisher matrix.

    Args:
        collection: Owner of the factors, the backend and the configuration.

    Attributes:
        params: The parameters, set when the block is registered.
    """

    def __init__(self, collection: FactorOwner) -> None:
        self._collection = collection
        self.params: Params | None = None
        self._damping: Callable[[], float] | None = None

    # -- registration ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_registered_towers(self) -> int:
        """Mini-batch shards registered so far."""

    @abstractmethod
    def tensors_to_compute_grads(self) -> tuple[TowerNames, ...]:
        """Names of what the loss is differentiated with respect to, one entry a tower."""

    def instantiate_factors(
        self, grads_list: GradsList, damping: float | Callable[[], float]
    ) -> None:
        """Make (or share) the factors.

        Args:
            grads_list: Names of gradients of the loss with respect to ``tensors_to_compute_grads``:
                ``[source][tower]`` for layers, ``[source]`` for generic blocks.
            damping: λ; ``λ·I`` is approximately added to the block. A callable is read at refresh.

        Raises:
            InputError: The damping is negative or not finite.
            NotReadyError: No tower was registered.
        """
        if not self.num_registered_towers:
            raise NotReadyError(f"register a tower of the block of {self.params} first.")
        if not callable(damping):
            fixed = self._checked_damping(damping)
            damping = lambda: fixed  # noqa: E731 (a closure over a number, nothing to name)
        self._damping = damping
        self._make_factors(grads_list)

    @abstractmethod
    def _make_factors(self, grads_list: GradsList) -> None:
        """Make the factors for these gradients."""

    # -- factors --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def factors(self) -> tuple[FisherFactor, ...]:
        """The block's factors, input side first."""

    @abstractmethod
    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the factors' averages, from the shapes of the parameters."""

    @property
    def damping(self) -> float:
        """λ, divided by what the block's own coefficient multiplies back in.

        Raises:
            NotReadyError: The factors were not instantiated.
            InputError: The damping has become negative or is not finite.
        """
        if self._damping is None:
            raise NotReadyError(f"call instantiate_factors of the block of {self.params} first.")
        return self._checked_damping(self._damping())

    @abstractmethod
    def register_matpower(self, exp: float) -> None:
        """Have the power computed at each refresh."""

    @abstractmethod
    def register_cholesky(self) -> None:
        """Have the Cholesky factor computed at each refresh."""

    @abstractmethod
    def register_cholesky_inverse(self) -> None:
        """Have the inverse Cholesky factor computed at each refresh."""

    # -- products -------------------------------------------------------------------------------

    @property
    def work(self) -> float:
        """Multiplications of a product with the block, about; few before the first batch."""
        return float(sum(prod(shape_of(factor)) for factor in self.factors))

    @abstractmethod
    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        """The damped block to the power ``exp``, times a vector.

        Args:
            vector: An array, or one for each parameter of a tuple, in their shapes.
            exp: 1, or a registered power.

        Returns:
            In the form of ``vector``; new arrays.
        """

    @abstractmethod
    def multiply_cholesky(self, vector: Vector, transpose: bool = False) -> Vector:
        """``B`` or ``Bᵀ`` times a vector, where ``B Bᵀ`` is the damped block."""

    @abstractmethod
    def multiply_cholesky_inverse(self, vector: Vector, transpose: bool = False) -> Vector:
        """``B⁻¹`` or ``B⁻ᵀ`` times a vector; ``B⁻ᵀ`` of white noise is a sample of N(0, F⁻¹)."""

    @abstractmethod
    def full_fisher_block(self) -> Array:
        """The undamped block as a dense matrix, in the order of the packed parameters."""

    # -- private ----------------------------------------------------------------------------------

    def _operand(self, vector: Vector) -> Vector:
        """A vector, from any library, as floating-point arrays of the backend."""
        arrays = tuple(self._collection.backend.asarray(part) for part in parts(vector))
        # A product in whole numbers would be cut off.
        arrays = tuple(a.astype("float64") if a.dtype.kind in "biu" else a for a in arrays)
        return arrays if isinstance(vector, tuple | list) else arrays[0]

    def _checked_damping(self, damping: float) -> float:
        value = float(damping)
        if not (isfinite(value) and value >= 0):
            raise InputError(
                f"the damping of the block of {self.params} must not be negative and must be "
                f"finite, got {value}."
            )
        return value


class Towers:
    """Names of inputs and outputs of one layer, tower by tower."""

    def __init__(self) -> None:
        self.inputs: list[Uses] = []
        self.outputs: list[Uses] = []

    def add(self, inputs: TowerNames, outputs: TowerNames) -> None:
        """Append a tower.

        Raises:
            RegistrationError: Inputs and outputs list different numbers of uses.
        """
        x, s = uses(inputs), uses(outputs)
        if len(x) > 1 and len(s) > 1 and len(x) != len(s):
            raise RegistrationError(
                f"a tower with {len(x)} inputs has {len(s)} outputs: one of each for every use."
            )
        self.inputs.append(x)
        self.outputs.append(s)

    def gradients(self, grads_list: GradsList) -> Tensors:
        """Names of output gradients, ``[source][tower]``, each a tuple over uses.

        Args:
            grads_list: As ``FisherBlock.instantiate_factors`` takes it.

        Returns:
            The same, in tuples.

        Raises:
            InputError: There is no source, or one has not one entry a tower.
        """
        if not grads_list or any(isinstance(s, str) or len(s) != len(self) for s in grads_list):
            raise InputError(
                f"grads_list needs, for each source, a list of {len(self)} entries, one a tower; "
                f"got {grads_list!r}."
            )
        return tuple(tuple(uses(tower) for tower in source) for source in grads_list)

    def __len__(self) -> int:
        return len(self.inputs)


def parts(vector: Vector) -> tuple[Array, ...]:
    """A vector over a block as a tuple, one array a parameter; an UnsupportedError for rows."""
    if isinstance(vector, Rows):
        raise UnsupportedError("this block multiplies whole arrays, not rows of them.")
    return tuple(vector) if isinstance(vector, tuple | list) else (vector,)


def shape_of(factor: FisherFactor) -> tuple[int, ...]:
    """Shape of a factor's average; empty before the first batch."""
    return () if factor.average.value is None else factor.average.value.shape


def uses(names: TowerNames) -> Uses:
    """Names over uses as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)

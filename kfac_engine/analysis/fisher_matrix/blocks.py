"""The blocks of a curvature: eigenvalues with their places among the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from kfac_engine._types import Params
from kfac_engine.analysis.fisher_matrix.parameter_vector import Places
from kfac_engine.analysis.fisher_matrix.spectrum import Float, Spectrum
from kfac_engine.arguments import number
from kfac_engine.errors import InputError, UnknownNameError

# The formula of a block of entries that the loss does not depend on.
UNUSED = "0"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of a block whose eigenvectors are zero in all its other rows.

    Attributes:
        parameters: Names of the parameters of the rows.
        key: Name of the parameter, or of the slice of it, that has the rows; a tuple for several.
        rows: Rows of the packed matrices.
    """

    parameters: tuple[str, ...]
    key: Params
    rows: slice


@dataclass(frozen=True, slots=True, eq=False)
class InputMoment:
    """The second moment of the inputs of a layer, in the eigenvectors of its block.

    Attributes:
        eigenvalues: Eigenvalues of the mean of ``a aᵀ`` over examples and positions, ``(g, d_in)``.
        positions: Mean number of uses × positions of an example.
    """

    eigenvalues: Float
    positions: float


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of the Fisher matrix.

    Attributes:
        parts: Its parameters, with the rows of each.
        places: Place of each entry of a packed vector among all parameters, ``(g, d_in, d_out)``.
        spectrum: Eigenvalues and eigenvectors.
        formula: The block in a few symbols.
        inputs: Second moment of the inputs; None where it was not measured.
    """

    parts: tuple[Part, ...]
    places: Places
    spectrum: Spectrum
    formula: str = ""
    inputs: InputMoment | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the block."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.parameters))

    @property
    def is_unused(self) -> bool:
        """Whether the loss depends on no entry of the block."""
        return self.formula == UNUSED

    def levels(self, damping: float | Mapping[str, float]) -> Float:
        """Return the damping of each row, ``(1, d_in, 1)``, or of all rows, ``(1, 1, 1)``."""
        if not isinstance(damping, Mapping):
            return np.full((1, 1, 1), damping)
        levels = np.empty((1, self.places.shape[1], 1))
        for part in self.parts:
            numbers = {damping[name] for name in part.parameters}
            if len(numbers) > 1:
                raise InputError(
                    f"{', '.join(part.parameters)} share a block, which has one damping, got "
                    f"{', '.join(str(damping[name]) for name in part.parameters)}."
                )
            levels[:, part.rows] = numbers.pop()
        return levels

    def powers(self, damping: float | Mapping[str, float], power: float) -> Float:
        """Return ``(s + λ)^power`` of all eigenvalues.

        Args:
            damping: λ, or λ of each parameter.
            power: Any real number.

        Returns:
            ``(g, d_in, d_out)``.

        Raises:
            InputError: An eigenvalue of the damped block is zero and the power negative, or the
                result overflows.
        """
        with np.errstate(divide="ignore", over="ignore"):
            powers = (self.spectrum.eigenvalues + self.levels(damping)) ** power
        if not np.isfinite(powers).all():
            raise InputError(
                f"the block of {', '.join(self.parameters)} has eigenvalues down to "
                f"{self.spectrum.eigenvalues.min():.3g}: with damping {damping} it has no power "
                f"{power:g}; raise the damping."
            )
        return powers

    def log_eigenvalues(self, damping: float | Mapping[str, float]) -> Float:
        """Return ``log(s + λ)``; an InputError if the damped block is singular."""
        self.powers(damping, -1.0)
        logarithms: Float = np.log(self.spectrum.eigenvalues + self.levels(damping))
        return logarithms


def checked_damping(
    damping: float | Mapping[str, float], names: Sequence[str]
) -> float | Mapping[str, float]:
    """Return a damping after a check.

    Args:
        damping: λ ≥ 0, or λ of each parameter.
        names: Names of all parameters.

    Returns:
        The damping.

    Raises:
        InputError: A number is negative or not finite, or a parameter has none.
        UnknownNameError: A name is not a parameter.
    """
    numbers = damping if isinstance(damping, Mapping) else {"": damping}
    for name, value in numbers.items():
        if name and name not in names:
            raise UnknownNameError(
                f"damping is given for '{name}', which is not a parameter of this curvature; they "
                f"are: {', '.join(names)}."
            )
        where = f"damping of '{name}'" if name else "damping"
        number(where, value)
        if not 0 <= value < inf:
            raise InputError(f"{where} must not be negative, got {value}.")
    missing = [name for name in names if name not in numbers] if "" not in numbers else []
    if missing:
        raise InputError(f"damping has no number for {', '.join(missing)}.")
    # NumPy does not compute with whole numbers of more than 64 bits.
    floats = {name: float(value) for name, value in numbers.items()}
    return floats.get("", floats)

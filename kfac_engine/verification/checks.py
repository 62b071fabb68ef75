"""Stores the results of a verification: checks with measured errors and remedies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["pass", "fail", "skip"]


# Errors of results that one rounding changes more, relative to the results, are not measured.
MOST_TOLERANCE = 0.5
FAINT = "the predictions are so certain that rounding errors exceed the result"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The error of one subject of a check.

    Attributes:
        subject: Name of a parameter, of a layer or of a vector.
        error: The error, relative to the size of the correct result.
        tolerance: Largest error of a correct result.
    """

    subject: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a verification.

    Attributes:
        name: Name of the check.
        measurements: The subjects with their errors; empty if the check was skipped.
        detail: The method, and the size of the slice that was checked.
        skipped: Why the check, or a part of it, was skipped; by subject, ``""`` for the whole.
        remedy: What to do if the check fails.
    """

    name: str
    measurements: tuple[Measurement, ...]
    detail: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    @classmethod
    def without(cls, name: str, reason: str) -> "Check":
        """Return a check that was skipped as a whole."""
        return cls(name, (), "", {"": reason})

    @property
    def failures(self) -> tuple[Measurement, ...]:
        """The measurements whose error exceeds the tolerance."""
        return tuple(m for m in self.measurements if not m.passed)

    @property
    def outcome(self) -> Outcome:
        """``"skip"`` without measurements, ``"fail"`` if a measurement failed, else ``"pass"``."""
        if not self.measurements:
            return "skip"
        return "fail" if self.failures else "pass"

    @property
    def worst(self) -> Measurement | None:
        """The measurement with the largest error relative to its tolerance; None without any."""

        def excess(measurement: Measurement) -> float:
            ratio = measurement.error / measurement.tolerance
            return inf if isnan(ratio) else ratio

        return max(self.measurements, key=excess, default=None)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``kfac_engine.verify``.

    Attributes:
        checks: The checks, in the order in which they ran.
        examples: Number of examples of the batch that the checks read.
        parameters: Names of the parameters that were checked one by one.
    """

    checks: tuple[Check, ...]
    examples: int
    parameters: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; skipped checks do not count."""
        return all(check.outcome != "fail" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        """Return a check by name."""
        return next(check for check in self.checks if check.name == name)

"""Which part of a batch a convolution's input statistic looks at."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sampling:
    """A random part of the examples, of the patches, or both; the default is everything.

    Attributes:
        input_fraction: ParameterSlice of the examples that patches are taken from; None takes all.
        max_patches: At most so many patches; None takes all.
        max_patches_per_feature: At most so many patches for each feature of one.
    """

    input_fraction: float | None = None
    max_patches: int | None = None
    max_patches_per_feature: float = 1.0

    @property
    def active(self) -> bool:
        """Whether anything is left out."""
        return self.input_fraction is not None or self.max_patches is not None

    def examples(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp] | None:
        """Indices of the examples to keep, ascending; None for all of ``count``."""
        if self.input_fraction is None:
            return None
        return _choose(count, ceil(self.input_fraction * count), rng)

    def patches(
        self, counts: Sequence[int], features: int, rng: np.random.Generator
    ) -> list[npt.NDArray[np.intp]] | None:
        """Indices of the patches to keep in each of some tensors, ascending.

        Args:
            counts: Patches in each tensor.
            features: Features of a patch, without the one.
            rng: Source of randomness.

        Returns:
            One array a tensor, drawn from all patches alike; None where all are kept.
        """
        if self.max_patches is None:
            return None
        limit = min(self.max_patches, ceil(self.max_patches_per_feature * features))
        total = sum(counts)
        if limit >= total:
            return None
        ends = np.cumsum(counts)
        chosen = _choose(total, limit, rng)
        pieces = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        return [piece - start for piece, start in zip(pieces, ends - counts, strict=True)]


EVERYTHING = Sampling()


def _choose(count: int, kept: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """``kept`` different indices below ``count``, ascending: images lie in memory in that order."""
    return np.sort(rng.choice(count, kept, replace=False))

"""Random subsets of the examples and patches that the input statistic of a convolution reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How large a random subset of the examples and patches is; by default all of them.

    Attributes:
        input_fraction: Fraction of the examples whose patches are read; None for all.
        max_patches: Largest number of patches; None for all.
        max_patches_per_feature: Largest number of patches for each feature of a patch.
    """

    input_fraction: float | None = None
    max_patches: int | None = None
    max_patches_per_feature: float = 1.0

    @property
    def active(self) -> bool:
        """Whether the subset may be smaller than the batch."""
        return self.input_fraction is not None or self.max_patches is not None

    def examples(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp] | None:
        """Draw the indices of the examples to read, ascending; None for all of ``count``."""
        if self.input_fraction is None:
            return None
        return _choose(count, ceil(self.input_fraction * count), rng)

    def patches(
        self, counts: Sequence[int], features: int, rng: np.random.Generator
    ) -> list[npt.NDArray[np.intp]] | None:
        """Draw the ascending indices of the patches to read from each tensor; None for all patches.

        ``counts`` has the number of patches in each tensor, and ``features`` is the length of a
        patch without the homogeneous coordinate. The draw is uniform over the patches of all
        tensors.
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


def _choose(count: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return ``size`` different random indices below ``count``, ascending as images in memory."""
    return np.sort(rng.choice(count, size, replace=False))

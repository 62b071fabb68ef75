"""Second moments of patches in PyTorch, by a product for each example.

No K-FAC library uses this method, although PyTorch offers it: nothing is transposed, and 1 × 1
kernels need no patches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import unfold

from kfac_engine._types import Array
from kfac_engine.bench import data
from kfac_engine.bench.jobs import DECAY, Run
from kfac_engine.bench.peers.torch_primitives import with_taps_first
from kfac_engine.bench.peers.torch_step import step_by_example


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, taps, channels = torch.from_numpy(data.normal(*shape)), kernel**2, shape[1]
    average = torch.from_numpy(data.zeros(channels * taps, channels * taps))

    def run() -> Array:
        whole = kernel == stride == 1 and not pad
        z = x.flatten(2) if whole else unfold(x, kernel, padding=pad, stride=stride)
        alpha = (1 - DECAY) / (len(z) * z.shape[2])
        average.addbmm_(z, z.transpose(1, 2), beta=DECAY, alpha=alpha)
        result: Array = average.numpy()
        return result

    return with_taps_first(run, channels, taps)


OPERATIONS: Mapping[str, Callable[..., Any]] = {"patches": _patches, "step": step_by_example}

"""The work of the GPU suite in torch, on the same device."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kfac_engine._types import Array
from kfac_engine.bench.gpu_meter import Layer

_Tensor = Any


class TorchOnDevice:
    """The work of the suite in float32 without TF32, torch's default."""

    def __init__(self, device: str = "cuda") -> None:
        self._torch = import_module("torch")
        self._device = device

    def tensor(self, host: Array) -> _Tensor:
        """Return a copy of a host array on the device."""
        return self._torch.from_numpy(host).to(self._device)

    def input_factor(self, x: Array, layer: Layer) -> Callable[[], _Tensor]:
        """Return the update of the second moment of unfolded patches, in place."""
        torch, data = self._torch, self.tensor(x)
        A = torch.zeros(layer.d_in, layer.d_in, device=self._device)

        def update() -> _Tensor:
            z = torch.nn.functional.unfold(
                data, layer.kernel, stride=layer.stride, padding=layer.pad
            )
            rows = z.transpose(1, 2).reshape(-1, z.shape[1])
            if layer.homogeneous:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            return A.mul_(0.5).add_(rows.T @ rows)

        return update

    def output_factor(self, ds: Array) -> Callable[[], _Tensor]:
        """Return the update of the second moment of pixels, in place."""
        torch, data = self._torch, self.tensor(ds)
        G = torch.zeros(ds.shape[1], ds.shape[1], device=self._device)

        def update() -> _Tensor:
            rows = data.movedim(1, -1).reshape(-1, data.shape[1])
            return G.mul_(0.5).add_(rows.T @ rows)

        return update

    def inverses(self, matrices: Sequence[Array], damping: float) -> dict[str, Callable[[], Any]]:
        """Return damped inverses by Cholesky factorization and by elimination."""
        torch = self._torch
        data = [self.tensor(m) for m in matrices]
        eyes = {len(m): damping * torch.eye(len(m), device=self._device) for m in data}
        return {
            "torch cholesky_inverse": lambda: [
                torch.cholesky_inverse(torch.linalg.cholesky(m + eyes[len(m)])) for m in data
            ],
            "torch inv": lambda: [torch.linalg.inv(m + eyes[len(m)]) for m in data],
        }

    def eigenvectors(self, matrices: Sequence[Array]) -> Callable[[], Any]:
        """Return the computation of the eigenvectors of all matrices."""
        data = [self.tensor(m) for m in matrices]
        return lambda: [self._torch.linalg.eigh(m) for m in data]

    def precondition(self, triples: Sequence[tuple[Array, Array, Array]]) -> Callable[[], Any]:
        """Return the computation of ``A V G`` for all triples."""
        data = [tuple(map(self.tensor, triple)) for triple in triples]
        return lambda: [A @ V @ G for A, V, G in data]


def torch_on_device() -> TorchOnDevice | None:
    """Return torch's implementation, or None if torch is not installed or sees no GPU."""
    if find_spec("torch") is None:
        return None
    return TorchOnDevice() if import_module("torch").cuda.is_available() else None

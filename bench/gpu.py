"""The suite ``gpu``: rates of the device, each kernel, and the curvature of a ResNet-50.

``gpu_kernels`` and ``gpu_network`` define the measurements, ``gpu_meter`` takes them. In a
checkout, ``peers.torch_gpu`` does the same work where torch is installed and sees the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.backend.select import select
from kfac_engine.bench.gpu_counts import Layer, Sizes, resnet50
from kfac_engine.bench.gpu_kernels import kernel_works
from kfac_engine.bench.gpu_meter import GpuRow, Meter
from kfac_engine.bench.gpu_network import Peer, factor_works, refresh_works
from kfac_engine.bench.report import Form

_BATCH = 32
# Backends by kind of products; the first also does the work that does not depend on it.
_BACKENDS = ("cupy", "cupy-fp32", "cupy-tf32")


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = row["seconds"]
    return [
        row["case"], row["contender"], f"{1e3 * times['median']:.3f}",
        f"{1e3 * times['low']:.3f} – {1e3 * times['high']:.3f}", f"{1e3 * row['floor']:.3f}",
        f"{row['fraction']:.0%}", f"{row['ratio']:.2f}",
        "" if row["error"] is None else f"{row['error']:.0e}",
        f"{row['pool_bytes'] / 1e6:.0f}", row["device"],
    ]  # fmt: skip


FORM = Form(
    ("case", "contender"),
    ("ms", "quartiles", "floor ms", "of floor", "ours ÷ this", "error", "pool MB", "device"),
    _cells,
)


def run_gpu(console: Console, name: str) -> list[GpuRow]:
    """Measure the GPU and print a table."""
    meter = Meter(_on_gpu(_BACKENDS[0]))
    peer = _peer()
    console.print(f"{meter.device}; torch {'takes' if peer else 'does not take'} part")
    for kind, rate in meter.rates.products.items():
        console.print(f"ceiling: {2e-12 * rate:.1f} TFLOP/s in {kind}")
    console.print(f"ceiling: {1e-12 * meter.rates.copied_bytes:.2f} TB/s (copy)")
    rows = [*meter.ceiling_rows(), *measure_gpu(meter, resnet50(), _BATCH, Sizes(), peer)]
    FORM.show(console, f"Suite {name}", rows)
    return rows


def measure_gpu(
    meter: Meter, layers: Sequence[Layer], batch: int, sizes: Sizes, peer: Peer
) -> Iterator[GpuRow]:
    """Measure all factors with each kind of products, then inverses, gradients and kernels."""
    for number, name in enumerate(_BACKENDS):
        others = None if number else peer
        for work in factor_works(_on_gpu(name), name, layers, batch, others):
            yield from meter.rows(name, work)
    first = _BACKENDS[0]
    for work in refresh_works(meter.backend, layers, peer):
        yield from meter.rows(first, work)
    for work in kernel_works(meter.backend, sizes):
        yield from meter.rows(first, work)


def _peer() -> Peer:
    """Return torch on the device, if this is a checkout and torch sees the device."""
    package = "kfac_engine.bench.peers"
    if find_spec(package) is None:
        return None
    peer: Peer = import_module(f"{package}.torch_gpu").torch_on_device()
    return peer


def _on_gpu(name: str) -> CupyBackend:
    backend = select(name)
    assert isinstance(backend, CupyBackend)  # or select has raised
    return backend

"""What the GPU suite times and checks with: a device, its ceilings, one piece of work at a time.

A floor is the least time that work can take: its products at the measured rate of cuBLAS, or its
bytes at the measured rate of copies, whichever takes longer. Products that cannot be avoided are
counted: of a symmetric matrix one triangle.

The images of the ResNet-50 have 224 × 224 pixels. One triangle of a symmetric matrix is multiplied.
Data are read once, results are written once, and moving averages are read too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.bench.report import Spread, spread
from kfac_engine.errors import BackendError

_FLOAT, _DOUBLE = 4, 8


class Layer(NamedTuple):
    """A convolution over square images, or the last, dense layer on one pixel."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    side: int
    homogeneous: bool = False

    @property
    def pad(self) -> int:
        """Padding at each end."""
        return self.kernel // 2

    @property
    def out_side(self) -> int:
        """Output positions an axis."""
        return (self.side + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def d_in(self) -> int:
        """Number of rows of the input factor."""
        return self.inputs * self.kernel**2 + self.homogeneous


# Stage by stage: blocks, channels inside a block, channels after it.
_STAGES = ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048))


def resnet50() -> tuple[Layer, ...]:
    """Return all 54 layers, in order.

    Source: He et al. 2016, arXiv:1512.03385, with the stride in the 3 × 3 filters.
    """
    return (Layer(3, 64, 7, 2, 224), *_blocks(), Layer(2048, 1000, 1, 1, 1, True))


def _blocks() -> Iterator[Layer]:
    before, side = 64, 56
    for stage, (blocks, inside, after) in enumerate(_STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            yield Layer(before, inside, 1, 1, side)
            yield Layer(inside, inside, 3, stride, side)
            yield Layer(inside, after, 1, 1, side // stride)
            if not block:
                yield Layer(before, after, 1, stride, side)
            before, side = after, side // stride


class Counted(NamedTuple):
    """Least numbers of multiplications and of moved bytes of a work."""

    case: str
    products: float
    moved: float


class Sizes(NamedTuple):
    """Sizes of the data of each kernel.

    ``ids`` are counted, of a vocabulary of a twentieth of them. Each image has 64 draws of a class.
    """

    images: int = 32
    channels: int = 64
    side: int = 56
    matrix: int = 4608
    ids: int = 1 << 20
    classes: int = 1000

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
        return self.ids // 20

    @property
    def draws(self) -> int:
        """Number of draws."""
        return 64 * self.images


def input_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of patches of layers."""
    one = layers[0]
    size = f"{batch}×{one.inputs}×{one.side}², {one.kernel}×{one.kernel}/{one.stride}"
    return Counted(
        f"A of {len(layers)} layers" if len(layers) > 1 else f"A: {size}",
        sum(_input_products(layer, batch) for layer in layers),
        _FLOAT * sum(batch * x.inputs * x.side**2 + 2 * x.d_in**2 for x in layers),
    )


def output_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of pixels."""
    pixels = {layer: batch * layer.out_side**2 for layer in set(layers)}
    return Counted(
        f"G of {len(layers)} layers",
        sum(0.5 * pixels[x] * x.outputs**2 for x in layers),
        _FLOAT * sum(pixels[x] * x.outputs + 2 * x.outputs**2 for x in layers),
    )


def inverses(layers: Sequence[Layer]) -> Counted:
    """Return the cost of the inverses of all factors, ``d³`` flops each."""
    sides = [side for layer in layers for side in (layer.d_in, layer.outputs)]
    squares = sum(side * side for side in sides)
    return Counted(
        f"{len(sides)} inverses", sum(0.5 * side**3 for side in sides), 2 * _FLOAT * squares
    )


def gradients(layers: Sequence[Layer]) -> Counted:
    """Return the cost of multiplying gradients by two matrices each."""
    return Counted(
        f"gradients of {len(layers)} layers, preconditioned",
        sum(float(x.d_in * x.outputs) * (x.d_in + x.outputs) for x in layers),
        _FLOAT * sum(x.d_in**2 + 2 * x.d_in * x.outputs + x.outputs**2 for x in layers),
    )


def kernels(sizes: Sizes) -> Mapping[str, Counted]:
    """Return the cost of each kernel by name."""
    n, channels, side, matrix, *_ = sizes
    rows, d, square = n * side**2, 9 * channels, matrix**2
    x, size = _FLOAT * rows * channels, f"{n}×{channels}×{side}², 3×3"
    half = _FLOAT * square // 2  # one triangle
    filters, layers = _FLOAT * FILTERS * d * channels, f"{FILTERS} filters {d} × {channels}"
    return {
        "moment": Counted(f"A with its border, {size}", 13.0 * rows * channels**2,
                          x + 2 * _FLOAT * (d + 1) ** 2),
        "units": Counted(f"A with its border on FP32 units, {size}", 13.0 * rows * channels**2,
                         x + 2 * _FLOAT * (d + 1) ** 2),
        "pixels": Counted(f"G, {n}×{channels}×{side}²", 0.5 * rows * channels**2,
                          x + 2 * _FLOAT * channels**2),
        "groups": Counted(f"A of each channel, {size}", 45.0 * rows * channels,
                          x + 2 * _FLOAT * 81 * channels),
        "squares": Counted(f"squared gradients, {size}", float(rows * d * channels),
                           2 * x + 2 * _FLOAT * d * channels),
        "channels": Counted(f"squared gradients of each channel, {size}", 9.0 * rows * channels,
                            2 * x + 2 * _FLOAT * d),
        "diagonal": Counted(f"squares of patches, {size}", 0.0, x + 2 * _FLOAT * d),
        "patches": Counted(f"patches written out, {size}", 0.0, 10 * x),
        "sums": Counted(f"sums of examples, {size}", 0.0, 2 * x + 2 * _FLOAT * n * channels),
        "classes": Counted(f"{sizes.draws} classes of {sizes.classes}", 0.0,
                           sizes.draws * (_FLOAT * sizes.classes + 2 * _DOUBLE)),
        "entropy": Counted(f"cross-entropy of {sizes.draws} classes of {sizes.classes}", 0.0,
                           2.0 * _FLOAT * sizes.draws * sizes.classes),
        "ids": Counted(f"{sizes.ids} identifiers of {sizes.words}", 0.0,
                       _DOUBLE * sizes.ids + _FLOAT * sizes.words),
        "average": Counted(f"average of {matrix}²", 0.0, 3 * _FLOAT * square),
        "combined": Counted(f"sums of two, {layers}", 0.0, 3.0 * filters),
        "between": Counted(f"{layers}, preconditioned",
                           float(FILTERS * d * channels * (d + channels)),
                           2 * filters + _FLOAT * (d * d + channels**2)),
        "orthogonal": Counted(f"{layers}, orthogonalized",
                              float(FILTERS * ITERATIONS * channels**2 * (2 * d + channels)),
                              2.0 * filters),
        "norms": Counted(f"sum of squares of {matrix}²", 0.0, _FLOAT * square),
        "finite": Counted(f"whether {matrix}² is finite", 0.0, _FLOAT * square),
        "inverse": Counted(f"inverse, {matrix}²", 0.5 * matrix**3, 2 * _FLOAT * square),
        "mirror": Counted(f"mirror, {matrix}²", 0.0, 2 * half),
        "widen": Counted(f"widened, damped and described, {matrix}²", 0.0,
                         half + _DOUBLE * square),
        "narrow": Counted(f"narrowed, {matrix}²", 0.0, _DOUBLE * square // 2 + 2 * half),
    }  # fmt: skip


def _input_products(layer: Layer, batch: int) -> float:
    """Return the multiplications of a lower triangle, by distances of taps if these are fewer."""
    rows, k = batch * layer.out_side**2, layer.kernel
    if layer.stride == 1 and k > 1:
        return float(rows * layer.inputs**2 * ((2 * k - 1) ** 2 + 1) / 2)
    return float(rows * layer.d_in**2 / 2)


# Larger than the caches of devices: a run finds no data of an earlier run in them.
_FLUSH_BYTES = 256 << 20
_ROUNDS = 10
# Number of filters that are updated together, and of their Newton–Schulz iterations.
FILTERS, ITERATIONS = 20, 5
# Runs on an idle device, for the time of the host.
_LAUNCHES = 3
# Time by which the launch of a fill is shorter than the fill, at 4 TB/s, and the least number of
# fills.
_FILL_SECONDS = 40e-6
_LEAST_FILLS = 32
# CUBLAS_TF32_TENSOR_OP_MATH
_TF32_MODE = 3
FLOAT32, TF32, SPLIT, FLOAT64 = "float32", "TF32", "3 × TF32", "float64"


@dataclass(frozen=True, slots=True)
class Work:
    """Work to be timed, and the same work by peers.

    ``kind`` is a row of ``GpuRates.products``. ``check`` returns the largest difference from the
    definition relative to its largest entry; None without a definition.
    """

    counted: Counted
    run: Callable[[], object]
    kind: str = FLOAT32
    check: Callable[[], float] | None = None
    tolerance: float = 1e-5
    usual: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Best rates of a device: bytes read and written a second, and multiplications by kind."""

    copied_bytes: float
    products: Mapping[str, float]

    def floor(self, counted: Counted, kind: str) -> float:
        """Return the least time in which a GPU can do this work, in seconds."""
        multiplied: float = counted.products / self.products[kind]
        moved: float = counted.moved / self.copied_bytes
        return max(multiplied, moved)


class Times(NamedTuple):
    """Times of work on the device, and the seconds until an idle device has all its launches.

    The seconds of the host contain the waiting of work that reads the device.
    """

    device: Spread
    host: float


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One measurement; ``error`` is the difference from the definition, None if unchecked.

    ``seconds`` and ``host`` are those of ``Times``. ``fraction`` is the least time divided by the
    median, ``ratio`` the time of this package divided by the time of the contender. ``pool_bytes``
    is the size of the memory pool after the work.
    """

    case: str
    contender: str
    seconds: Spread
    host: float
    floor: float
    fraction: float
    ratio: float
    error: float | None
    pool_bytes: int
    device: str


class Meter:
    """Measures the time of work on a device, and its best rates if they are not given.

    Attributes:
        failures: The cases of work that ``attempt`` could not measure.
    """

    def __init__(
        self,
        backend: CupyBackend,
        rates: GpuRates | None = None,
        *,
        rounds: int = _ROUNDS,
        side: int = 8192,
        tell: Callable[[str], object] = print,
    ) -> None:
        self.backend = backend
        self.failures: list[str] = []
        self._tell = tell
        self.device = describe(backend)
        self._rounds = rounds
        self._flush = backend.xp.zeros(min(_FLUSH_BYTES, 4 * side * side), np.uint8)
        self.ceilings = {} if rates else dict(self._ceilings(side))
        self.rates = rates or _rates(self.ceilings, side)

    def ceiling_rows(self) -> list[GpuRow]:
        """Return the best rates as rows, each with its own time as the floor."""
        return [
            GpuRow(case, "ceiling", times, host, times.low, times.low / times.median, 1.0, None, 0,
                   self.device)
            for case, (times, host) in self.ceilings.items()
        ]  # fmt: skip

    def attempt(self, contender: str, work: Work) -> list[GpuRow]:
        """Return the rows of a work and print its time; or print why it has none, and note it."""
        try:
            rows = self.rows(contender, work)
        except (BackendError, RuntimeError, MemoryError) as failure:  # RuntimeError is CuPy's
            self.failures.append(f"{work.counted.case} ({contender})")
            self._tell(f"error: {contender}: {failure}")
            return []
        row, *_ = rows
        ms = 1e3 * row.seconds.median
        self._tell(f"{row.case}, {contender}: {ms:.3f} ms, {row.fraction:.0%} of the floor")
        return rows

    def rows(self, contender: str, work: Work) -> list[GpuRow]:
        """Check work, and time it next to its peers."""
        error = None if work.check is None else work.check()
        if error is not None and not error <= work.tolerance:
            raise BackendError(
                f"{work.counted.case}: the GPU's result is off by {error:.1e}, "
                f"not {work.tolerance:.0e}."
            )
        floor, ours = self.rates.floor(work.counted, work.kind), self.timed(work.run)
        pool = int(self.backend.xp.get_default_memory_pool().total_bytes())
        timed = [(contender, ours, error)]
        timed += [(name, self.timed(run), None) for name, run in work.usual.items()]
        case, median = work.counted.case, ours.device.median
        return [
            GpuRow(case, name, times, host, floor, floor / times.median, median / times.median,
                   deviation, pool, self.device)
            for name, (times, host), deviation in timed
        ]  # fmt: skip

    def timed(self, work: Callable[[], object]) -> Times:
        """Return times between events on the device, and apart from them the time of the host.

        All work runs on the default stream or synchronizes with it. The device fills memory while
        the host launches the work, so that it never waits for a launch.
        """
        cuda = self.backend.xp.cuda
        work()  # compiles and plans
        host = min(self._launched(work) for _ in range(_LAUNCHES))
        fills = max(_LEAST_FILLS, ceil(host / _FILL_SECONDS))
        times = []
        for _ in range(self._rounds):
            begun, ended = cuda.Event(), cuda.Event()
            for _ in range(fills):
                self._flush.fill(0)
            begun.record()
            work()
            ended.record()
            ended.synchronize()
            times.append(1e-3 * cuda.get_elapsed_time(begun, ended))
        return Times(spread(times), host)

    # -- private ----------------------------------------------------------------------------------

    def _launched(self, work: Callable[[], object]) -> float:
        """Return the seconds until an idle device has all launches of a work."""
        self.backend.xp.cuda.Device().synchronize()
        begun = perf_counter()
        work()
        return perf_counter() - begun

    def _ceilings(self, side: int) -> Iterator[tuple[str, Times]]:
        xp = self.backend.xp
        a, b = (xp.ones((side, side), np.float32) for _ in range(2))
        c = xp.empty((side, side), np.float32)
        yield "copy", self.timed(lambda: xp.copyto(c, a))
        yield FLOAT32, self.timed(lambda: xp.cublas.gemm("N", "N", a, b, out=c))
        if self.backend.device.tensor_cores:
            handle = xp.cuda.device.get_cublas_handle()
            mode = xp.cuda.cublas.getMathMode(handle)
            xp.cuda.cublas.setMathMode(handle, _TF32_MODE)
            yield TF32, self.timed(lambda: xp.cublas.gemm("N", "N", a, b, out=c))
            xp.cuda.cublas.setMathMode(handle, mode)
        wide, product = a.astype(np.float64), b.astype(np.float64)
        yield FLOAT64, self.timed(lambda: xp.cublas.gemm("N", "N", wide, wide, out=product))


def describe(backend: CupyBackend) -> str:
    """Return the names of the device, its driver and the libraries."""
    runtime = backend.xp.cuda.runtime
    versions = {"driver for CUDA": runtime.driverGetVersion(), "CUDA": runtime.runtimeGetVersion()}
    packages = [
        f"{name} {number // 1000}.{number % 1000 // 10}" for name, number in versions.items()
    ]
    return ", ".join([backend.device.name, *packages, f"CuPy {backend.xp.__version__}"])


def difference(result: Array, wanted: Array) -> float:
    """Return the largest difference of two host arrays relative to the largest entry."""
    largest = float(np.abs(wanted).max())
    return float(np.abs(result.astype(np.float64) - wanted).max()) / largest if largest else 0.0


def kind_of(backend: CupyBackend, name: str) -> str:
    """Return the kind of products of a backend of this name."""
    kinds: Mapping[str, Any] = {"cupy": SPLIT, "cupy-tf32": TF32}
    return str(kinds.get(name, FLOAT32)) if backend.device.tensor_cores else FLOAT32


def _rates(ceilings: Mapping[str, Times], side: int) -> GpuRates:
    """Return the rates that follow from the times of square matrices."""
    least = {name: times.device.low for name, times in ceilings.items()}
    copied = 2 * 4 * side**2 / least.pop("copy")
    products = {name: side**3 / seconds for name, seconds in least.items()}
    if TF32 in products:
        products[SPLIT] = products[TF32] / 3
    return GpuRates(copied, products)

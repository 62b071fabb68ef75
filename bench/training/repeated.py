"""Tasks whose data come again in every step: functions, images by coordinates, equations.

The residuals of an equation are those of ``ke.equation`` at points inside a box and on its edge.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from scipy.integrate import solve_ivp

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench.training.data import Data, Images
from kfac_engine.bench.training.models import INPUT, OUTPUT, Model, ModelBuilder, perceptron
from kfac_engine.graph.write import serialize
from kfac_engine.losses.observed import Targets

_HELD_OUT = 2_000
# Weight of the squared errors at the edge, whose numbers are smaller than those of derivatives.
EDGE_WEIGHT = 100.0
INSIDE, EDGE = "inside", "edge"
Function: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Points:
    """Points inside and on the edge, with the solution there; other points validate.

    ``x`` are the points inside, ``y`` the residuals there, and ``edge_x`` and ``edge_y`` those of
    the edge.
    """

    x: Array
    y: Array
    held_x: Array
    held_y: Array
    edge_x: Array
    edge_y: Array

    def batches(self, size: int, seed: int) -> Iterator[tuple[dict[str, Array], Targets]]:
        """Yield all points, without end."""
        del size, seed
        inputs = {f"{INSIDE} {INPUT}": self.x, f"{EDGE} {INPUT}": self.edge_x}
        while True:
            yield inputs, {INSIDE: self.y, EDGE: self.edge_y}

    def held_batches(self, size: int) -> Iterator[tuple[dict[str, Array], Array]]:
        """Yield the points that validate, as points of the edge: the network's values are read."""
        for start in range(0, len(self.held_x), size):
            part = slice(start, start + size)
            inputs = {f"{INSIDE} {INPUT}": self.x[:1], f"{EDGE} {INPUT}": self.held_x[part]}
            yield inputs, self.held_y[part]


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation in a box, by its residual and its solution.

    ``residual`` is that of ``ke.equation``, and ``solution`` a function of points ``(n, d)``. The
    box has the corners ``low`` and ``high``. ``sides`` are the parts of its boundary on which u is
    given, each the number of a coordinate and its value; all parts if there are none. ``inside``
    and ``edge`` are numbers of points.
    """

    residual: Callable[[Any], Any] = field(repr=False)
    solution: Function = field(repr=False)
    low: tuple[float, ...]
    high: tuple[float, ...]
    sides: tuple[tuple[int, float], ...] = ()
    inside: int = 1_000
    edge: int = 300

    def data(self) -> Points:
        """Return fixed points inside and on the edge; u at other points validates."""
        rng, d = np.random.default_rng(17), len(self.low)
        inside, edge, others = (
            rng.uniform(self.low, self.high, (count, d))
            for count in (self.inside, self.edge, _HELD_OUT)
        )
        every = ((i, value) for i in range(d) for value in (self.low[i], self.high[i]))
        sides = self.sides or tuple(every)
        for number, (axis, place) in enumerate(sides):
            edge[number :: len(sides), axis] = place
        arrays = (
            inside, np.zeros((self.inside, 1)), others, self.solution(others), edge,
            self.solution(edge),
        )  # fmt: skip
        return Points(*(array.astype(np.float32) for array in arrays))

    def model(self, widths: Sequence[int], seed: int) -> Model:
        """Return the residuals of a tanh network; ``widths`` are those of the hidden layers."""
        plain = perceptron((len(self.low), *widths, 1), "Tanh", seed)
        residuals = {INSIDE: self.residual, EDGE: lambda u: u.value}
        return Model(serialize(ke.equation(plain.data, residuals)), plain.weights)


def _sines(a: float, b: float) -> Callable[[Any], Any]:
    """Return a product of sines of two coordinates, of arrays or of what a file records."""
    return lambda x: np.sin(a * np.pi * x[:, :1]) * np.sin(b * np.pi * x[:, 1:])


def _cosines(x: Any) -> Any:
    return np.cos(np.pi * x).sum(axis=1, keepdims=True)


def _cooling(x: Array) -> Array:
    values: Array = np.exp(-0.1 * np.pi**2 * x[:, :1]) * np.sin(np.pi * x[:, 1:])
    return values


_VISCOSITY = 0.01 / np.pi


def _shock(x: Array) -> Array:
    """Return the solution of Burgers' equation that begins as ``−sin πx``.

    Source: Cole 1951 and Hopf 1950; their integrals over η by the formula of Gauss and Hermite.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    y = x[:, 1:] - nodes * np.sqrt(4 * _VISCOSITY * x[:, :1])
    exponents = -np.cos(np.pi * y) / (2 * np.pi * _VISCOSITY)
    terms = weights * np.exp(exponents - exponents.max(axis=1, keepdims=True))
    values: Array = -(np.sin(np.pi * y) * terms).sum(axis=1) / terms.sum(axis=1)
    return values[:, None]


_DIFFUSION, _CHEBYSHEV = 0.001, 160


@cache
def _layers() -> Function:
    """Return the solution of the Allen–Cahn equation at Chebyshev's points, as a function of t."""
    places = np.cos(np.pi * np.arange(_CHEBYSHEV + 1) / _CHEBYSHEV)
    signs = (-1.0) ** np.arange(_CHEBYSHEV + 1)
    signs[[0, -1]] *= 2
    gaps = places[:, None] - places + np.eye(_CHEBYSHEV + 1)
    first = np.outer(signs, 1 / signs) / gaps
    first -= np.diag(first.sum(axis=1))
    second = first @ first

    def change(t: float, inner: Array) -> Array:
        del t
        u = np.concatenate([[-1.0], inner, [-1.0]])
        values: Array = (_DIFFUSION * second @ u + 5 * (u - u**3))[1:-1]
        return values

    def slopes(t: float, inner: Array) -> Array:
        del t
        values: Array = _DIFFUSION * second[1:-1, 1:-1] + np.diag(5 - 15 * inner**2)
        return values

    start = (places**2 * np.cos(np.pi * places))[1:-1]
    solved = solve_ivp(
        change, (0, 1), start, method="BDF", jac=slopes, dense_output=True, rtol=1e-9, atol=1e-10
    )
    inner: Function = solved.sol
    return inner


def _phases(x: Array) -> Array:
    """Return the solution of the Allen–Cahn equation, by Chebyshev's interpolation."""
    places = np.cos(np.pi * np.arange(_CHEBYSHEV + 1) / _CHEBYSHEV)
    weights = (-1.0) ** np.arange(_CHEBYSHEV + 1)
    weights[[0, -1]] /= 2
    values = np.full((len(x), _CHEBYSHEV + 1), -1.0)
    values[:, 1:-1] = _layers()(x[:, 0]).T
    gaps = x[:, 1:] - places
    gaps[gaps == 0] = 1e-300
    terms: Array = weights / gaps
    means: Array = (terms * values).sum(axis=1, keepdims=True) / terms.sum(axis=1, keepdims=True)
    return means


# The first coordinate of heat, burgers and allen-cahn is time.
EQUATIONS: Mapping[str, Equation] = {
    "poisson": Equation(
        lambda u: u.laplacian() + 2 * np.pi**2 * _sines(1, 1)(u.x), _sines(1, 1), (0, 0), (1, 1)),
    "poisson-5d": Equation(
        lambda u: u.laplacian() + np.pi**2 * _cosines(u.x), _cosines, (0,) * 5, (1,) * 5),
    "heat": Equation(
        lambda u: u.d(0) - 0.1 * u.d(1, 1), _cooling, (0, 0), (1, 1), ((0, 0), (1, 0), (1, 1))),
    "helmholtz": Equation(
        lambda u: u.laplacian() + 36 * u.value - (36 - 5 * np.pi**2) * _sines(1, 2)(u.x),
        _sines(1, 2), (0, 0), (1, 1)),
    "burgers": Equation(
        lambda u: u.d(0) + u.value * u.d(1) - _VISCOSITY * u.d(1, 1), _shock, (0, -1), (1, 1),
        ((0, 0), (1, -1), (1, 1)), inside=2_000),
    "allen-cahn": Equation(
        lambda u: u.d(0) - _DIFFUSION * u.d(1, 1) - 5 * (u.value - u.value**3), _phases, (0, -1),
        (1, 1), ((0, 0), (1, -1), (1, 1)), inside=2_000),
}  # fmt: skip


def sine_network(widths: Sequence[int], frequency: float, seed: int) -> Model:
    """Return a network of sines of a frequency; Sitzmann et al. 2020, arXiv:2006.09661."""
    net = ModelBuilder(seed)
    net.constant("frequency", np.float32(frequency))
    h = INPUT
    for layer in range(len(widths) - 1):
        d_in, d_out = widths[layer : layer + 2]
        bound = 1 / d_in if layer == 0 else np.sqrt(6 / d_in) / frequency
        weight = net.weight(f"W{layer}", net.rng.uniform(-bound, bound, (d_in, d_out)))
        bias = net.weight(f"b{layer}", net.rng.uniform(-bound, bound, d_out))
        last = layer == len(widths) - 2
        product = net.op("MatMul", h, weight, to=f"product {layer}")
        h = net.op("Add", product, bias, to=OUTPUT if last else f"sum {layer}")
        if not last:
            scaled = net.op("Mul", h, "frequency", to=f"scaled {layer}")
            h = net.op("Sin", scaled, to=f"sine {layer}")
    return net.model((widths[0],), (widths[-1],))


def _of_all(x: Array, y: Array) -> Data:
    """Return examples that are trained on and validated, with targets of mean 0 and deviation 1."""
    y = (y - y.mean(axis=0)) / y.std(axis=0)
    return Data(*(array.astype(np.float32) for array in (x, y, x, y)))


def image(channels: int) -> Data:
    """Return the pixels of a spiral with a step, by their coordinates in ``[-1, 1]²``."""
    axis = np.linspace(-1, 1, 36)
    x = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    radius, angle = np.hypot(*x.T), np.arctan2(x[:, 1], x[:, 0])
    planes = (
        np.sin(12 * radius + 3 * angle) * np.exp(-radius) + 0.3 * (x[:, 0] > 0.2),
        np.sin(5 * x[:, 0] * x[:, 1]),
        np.cos(9 * x[:, 0] + x[:, 1]),
    )
    return _of_all(x, np.stack(planes[:channels], axis=1))


def chirp() -> Data:
    """Return ``sin(20 x³) + |x|`` at 256 points."""
    x = np.linspace(-1, 1, 256)[:, None]
    return _of_all(x, np.sin(20 * x**3) + np.abs(x))


def surface() -> Data:
    """Return ``sin(3x) y + z²`` at 400 random points of a cube."""
    x = np.random.default_rng(23).uniform(-1, 1, (400, 3))
    return _of_all(x, np.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:] ** 2)


def compressed(images: Images) -> Data:
    """Return the flat training images as inputs and targets."""
    x = images.pixels[: images.training].reshape(images.training, -1)
    return Data(x, x, x, x)

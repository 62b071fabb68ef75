"""Tasks whose data come again in every step: functions, images by coordinates, equations.

The network of an equation carries value, first and second derivatives forward together. A point has
its two coordinates and a flag. The output is the residual of the equation where the flag is 1, and
the value of the network where it is 0, as on the boundary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.training.data import Data, Images
from kfac_engine.bench.training.models import INPUT, OUTPUT, Model, ModelBuilder, uniform

_INSIDE, _BOUNDARY, _HELD_OUT = 500, 500, 2_000
_COORDINATES = 2


@dataclass(frozen=True, slots=True)
class Equation:
    """The equation ``c u + Σ bᵢ ∂ᵢu + Σ wᵢ ∂ᵢ²u = f`` on the unit square, by its solution.

    ``solution`` and ``source`` are u and f of points ``(n, 2)``. ``sides`` are the parts of the
    boundary on which u is given, each the number of a coordinate and its value.
    """

    solution: Callable[[Array], Array] = field(repr=False)
    source: Callable[[Array], Array] = field(repr=False)
    second: tuple[float, float]
    first: tuple[float, float] = (0.0, 0.0)
    value: float = 0.0
    sides: tuple[tuple[int, float], ...] = ((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0))

    def data(self) -> Data:
        """Return fixed points inside and on the boundary; u at other points validates."""
        rng = np.random.default_rng(17)
        inside, edge = rng.random((_INSIDE, 2)), rng.random((_BOUNDARY, 2))
        which = rng.integers(0, len(self.sides), _BOUNDARY)
        for number, (axis, place) in enumerate(self.sides):
            edge[which == number, axis] = place
        others = rng.random((_HELD_OUT, 2))
        x = np.concatenate([_flagged(inside, 1.0), _flagged(edge, 0.0)])
        y = np.concatenate([self.source(inside), self.solution(edge)])
        return _in_float32(x, y, _flagged(others, 0.0), self.solution(others))

    def model(self, widths: Sequence[int], seed: int) -> Model:
        """Return a tanh network with its residual; ``widths`` are those of the hidden layers."""
        net = ModelBuilder(seed)
        net.constant("flag", np.array([_COORDINATES], np.int64))
        net.constant("places", np.arange(_COORDINATES))
        net.constant("one", np.float32(1))
        net.constant("minus two", np.float32(-2))
        value = net.op("Gather", INPUT, "places", to="point", axis=1)
        inside = net.op("Gather", INPUT, "flag", to="inside", axis=1)
        tangents = [_unit_rows(net, value, axis) for axis in range(_COORDINATES)]
        curved: dict[int, str] = {}  # the second derivatives that are not zero
        sizes = (_COORDINATES, *widths, 1)
        for layer in range(len(sizes) - 1):
            last = layer == len(sizes) - 2
            value, tangents, curved = _dense(net, layer, sizes, value, tangents, curved)
            if not last:
                value, tangents, curved = _tanh(net, layer, value, tangents, curved)
        terms = [(self.value, value)]
        terms += [(self.first[i], tangents[i]) for i in range(_COORDINATES)]
        terms += [(self.second[i], curved[i]) for i in range(_COORDINATES)]
        scaled = [_scaled(net, factor, name) for factor, name in terms if factor]
        residual = scaled[0] if len(scaled) == 1 else net.op("Sum", *scaled, to="residual")
        outside = net.op("Sub", "one", inside, to="outside")
        left = net.op("Mul", inside, residual, to="of points inside")
        right = net.op("Mul", outside, value, to="of the boundary")
        net.op("Add", left, right, to=OUTPUT)
        return net.model((_COORDINATES + 1,), (1,))


def _flagged(points: Array, flag: float) -> Array:
    return np.concatenate([points, np.full((len(points), 1), flag)], axis=1)


def _in_float32(x: Array, y: Array, held_x: Array, held_y: Array) -> Data:
    return Data(*(array.astype(np.float32) for array in (x, y, held_x, held_y)))


def _unit_rows(net: ModelBuilder, like: str, axis: int) -> str:
    """Append rows of the derivative of the point by a coordinate."""
    zero = net.constant(f"zero {axis}", np.float32(0))
    row = net.constant(f"unit {axis}", np.eye(_COORDINATES, dtype=np.float32)[axis])
    zeros = net.op("Mul", like, zero, to=f"zeros {axis}")
    rows: str = net.op("Add", zeros, row, to=f"tangent {axis}")
    return rows


def _scaled(net: ModelBuilder, factor: float, name: str) -> str:
    if factor == 1:
        return name
    constant = net.constant(f"factor of {name}", np.float32(factor))
    scaled: str = net.op("Mul", constant, name, to=f"scaled {name}")
    return scaled


def _dense(
    net: ModelBuilder,
    layer: int,
    sizes: Sequence[int],
    value: str,
    tangents: Sequence[str],
    curved: Mapping[int, str],
) -> tuple[str, list[str], dict[int, str]]:
    """Append a layer that multiplies value and derivatives by one weight."""
    d_in, d_out = sizes[layer : layer + 2]
    weight = net.weight(f"W{layer}", uniform(net.rng, (d_in, d_out), d_in, d_out))
    bias = net.weight(f"b{layer}", uniform(net.rng, (d_out,), d_in, d_out))

    def times_weight(name: str, to: str) -> str:
        multiplied: str = net.op("MatMul", name, weight, to=to)
        return multiplied

    product = times_weight(value, f"product {layer}")
    return (
        net.op("Add", product, bias, to=f"sum {layer}"),
        [times_weight(t, f"tangent {layer} {i}") for i, t in enumerate(tangents)],
        {i: times_weight(name, f"second {layer} {i}") for i, name in curved.items()},
    )


def _tanh(
    net: ModelBuilder, layer: int, value: str, tangents: Sequence[str], curved: Mapping[int, str]
) -> tuple[str, list[str], dict[int, str]]:
    """Append ``t = tanh s``, its tangents ``t' ∂s`` and ``t' ∂²s − 2 t t' (∂s)²``."""
    t = net.op("Tanh", value, to=f"tanh {layer}")
    square = net.op("Mul", t, t, to=f"square {layer}")
    slope = net.op("Sub", "one", square, to=f"slope {layer}")
    product = net.op("Mul", t, slope, to=f"bend by two {layer}")
    bend = net.op("Mul", product, "minus two", to=f"bend {layer}")
    new_tangents, new_curved = [], {}
    for i, tangent in enumerate(tangents):
        new_tangents.append(net.op("Mul", slope, tangent, to=f"moved {layer} {i}"))
        squared = net.op("Mul", tangent, tangent, to=f"squared {layer} {i}")
        new_curved[i] = net.op("Mul", bend, squared, to=f"bent {layer} {i}")
        if i in curved:
            straight = net.op("Mul", slope, curved[i], to=f"straight {layer} {i}")
            new_curved[i] = net.op("Add", new_curved[i], straight, to=f"curved {layer} {i}")
    return t, new_tangents, new_curved


def _sines(a: float, b: float) -> Callable[[Array], Array]:
    def product(x: Array) -> Array:
        values: Array = np.sin(a * np.pi * x[:, :1]) * np.sin(b * np.pi * x[:, 1:])
        return values

    return product


def _multiple(factor: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: factor * function(x)


def _cooling(x: Array) -> Array:
    values: Array = np.exp(-0.1 * np.pi**2 * x[:, :1]) * np.sin(np.pi * x[:, 1:])
    return values


EQUATIONS: Mapping[str, Equation] = {
    "poisson": Equation(
        _sines(1, 1), _multiple(-2 * np.pi**2, _sines(1, 1)), second=(1.0, 1.0)
    ),
    # The coordinates are time and place.
    "heat": Equation(
        _cooling, lambda x: np.zeros((len(x), 1)), second=(0.0, -0.1), first=(1.0, 0.0),
        sides=((0, 0.0), (1, 0.0), (1, 1.0)),
    ),
    "helmholtz": Equation(
        _sines(1, 2), _multiple(36 - 5 * np.pi**2, _sines(1, 2)), second=(1.0, 1.0), value=36.0
    ),
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
    return _in_float32(x, y, x, y)


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

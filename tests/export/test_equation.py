"""Residuals of equations at sets of points, against differences of the plain network."""

import re
import warnings
from itertools import pairwise

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import oracle
from tests.models import with_constants

POINTS = {"x": ("t", "x")}


def network(hidden="Tanh", widths=(2, 7, 5, 1), dtype="float", inputs="", first="x", seed=0):
    """A dense network from points x to u; ``inputs`` and ``first`` change what its layers read."""
    rng, nodes = np.random.default_rng(seed), []
    for i in range(len(widths) - 1):
        last = i == len(widths) - 2
        nodes.append(f"m{i} = MatMul({first if i == 0 else f'h{i - 1}'}, W{i})")
        nodes.append(f"{'u' if last else f'z{i}'} = Add(m{i}, b{i})")
        nodes += [] if last else [f"h{i} = {hidden}(z{i})"]
    arrays = {}
    for i, shape in enumerate(pairwise(widths)):
        arrays[f"W{i}"], arrays[f"b{i}"] = rng.normal(size=shape) * 0.7, rng.normal(size=shape[1])
    declared = inputs or f"{dtype}[n,{widths[0]}] x"
    return model(declared, f"{dtype}[n,{widths[-1]}] u", nodes, arrays, dtype)


def model(inputs, outputs, nodes, arrays, dtype="float"):
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        net ({inputs}) => ({outputs}) {{ {chr(10).join(nodes)} }}"""
    parsed = onnx.parser.parse_model(text)
    kind = {"double": np.float64, "float": np.float32}[dtype]
    for name, array in arrays.items():
        real = np.asarray(array).dtype.kind == "f"
        stored = np.asarray(array, kind if real else np.int64)
        parsed.graph.initializer.append(onnx.numpy_helper.from_array(stored, name))
    return parsed


def convolutions():
    rng = np.random.default_rng(3)
    shapes = {"W": (4, 6), "F": (2, 1, 3), "V": (8, 1), "b": (2,)}
    arrays = {name: rng.normal(size=shape) * 0.6 for name, shape in shapes.items()}
    nodes = [
        "m = MatMul(x, W)  h = Tanh(m)  l = Unsqueeze(h, one)",
        "c = Conv(l, F, b)  s = Softplus(c)  f = Flatten(s)  u = MatMul(f, V)",
    ]
    arrays = {**arrays, "one": np.array([1])}
    return model("float[n,4] x", "float[n,1] u", nodes, arrays)


def two_inputs():
    return network(inputs="float[n,1] t, float[n,2] x, float[1] k", first="p", widths=(3, 6, 1))


def joined(parsed):
    """The same network, whose first layer reads a product of k and both inputs."""
    nodes = onnx.parser.parse_graph(
        "g (float[n,1] t, float[n,2] x, float[1] k) => (float[n,3] p)"
        "{ c = Concat<axis = 1>(t, x)  p = Mul(c, k) }"
    ).node
    old = list(parsed.graph.node)
    del parsed.graph.node[:]
    parsed.graph.node.extend([*nodes, *old])
    return parsed


class Differences:
    """The field of a residual by differences of a function of the points, in float64."""

    step = 1e-3

    def __init__(self, function, x, names):
        self.function, self.x, self.names, self.value = function, x, names, function(x)

    def _along(self, function, i):
        """The first derivative to the fourth order of the step."""

        def derivative(x):
            move = self.step * np.eye(x.shape[1])[i]
            far = function(x - 2 * move) - function(x + 2 * move)
            return (far + 8 * (function(x + move) - function(x - move))) / (12 * self.step)

        return derivative

    def d(self, *features):
        function = self.function
        for feature in features:
            function = self._along(function, self.names.index(str(feature)))
        return function(self.x)

    def laplacian(self, *features):
        return sum(self.d(name, name) for name in features or self.names)


def burgers(u):
    forcing = np.sin(np.pi * u.x[:, :1]) * np.exp(-(u.x[:, 1:] ** 2))
    return u.d("t") + u.value * u.d("x") - 0.1 * u.d("x", "x") + forcing


def coefficients(u):
    t, x = u.x[:, :1], u.x[:, 1:]
    wave = np.where(x > 0.1, np.cos(t), np.sqrt(1 + x**2)) * u.d("t", "x")
    return np.concatenate([wave, np.arctan(u.laplacian("x")), u.d("x") ** 3], axis=1)


def stokes(u):
    velocity, pressure = u.value[:, :2], u.value[:, 2:]
    along = velocity[:, :1] * u.d("0")[:, :2] + velocity[:, 1:] * u.d(1)[:, :2]
    momentum = along - u.laplacian()[:, :2] + np.stack([u.d(0)[:, 2], u.d(1)[:, 2]], axis=1)
    divergence = u.d(0)[:, :1] + u.d(1)[:, 1:2]
    return np.concatenate([momentum, divergence, pressure * 0 + np.tanh(u.x[:, :1])], axis=1)


def single(u):
    return u.laplacian()[:, 0] - np.linalg.norm(u.x, axis=1)


# Networks with the names of their features and the residual of each set of points.
CASES = {
    "Burgers": (network(), POINTS, {"inside": burgers, "edge": lambda u: u.value - u.x[:, 1:]}),
    "coefficients": (
        network("Softplus"), POINTS, {"inside": coefficients, "flux": lambda u: u.d("x")}),
    "system": (
        network("Sin", (2, 6, 3)), None, {"inside": stokes, "wall": lambda u: u.value[:, :2]}),
    "one axis": (network(), "x", {"inside": single}),
    "convolutions": (convolutions(), None, {"inside": lambda u: u.laplacian() + u.d(3, 1)}),
    "inputs": (
        joined(two_inputs()), {"t": ("t",), "x": ("x", "y")},
        {"inside": lambda u: u.d("t") - u.laplacian("x", "y") + u.x[:, 2:],
         "start": lambda u: u.value},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_residuals_equal_those_by_differences(name):
    plain, wrt, residuals = CASES[name]
    result = ke.equation(plain, residuals, wrt)
    onnx.checker.check_model(result)
    onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True)
    rng, features = np.random.default_rng(1), [*(wrt or {})] if isinstance(wrt, dict) else ["x"]
    sizes = {e.name: e.type.tensor_type.shape.dim[1].dim_value for e in plain.graph.input[:2]}
    other = {"k": np.array([1.3])} if name == "inputs" else {}
    labels = [label for names in wrt.values() for label in names] if isinstance(wrt, dict) else None
    fed, fields = dict(other), {}
    for number, point_set in enumerate(residuals):
        parts = {x: rng.uniform(-1, 1, (4 + number, sizes[x])) for x in features}
        fed |= {f"{point_set} {x}": array for x, array in parts.items()}
        ends = np.cumsum([array.shape[1] for array in parts.values()])[:-1]

        def u(points, ends=ends):
            split = dict(zip(features, np.split(points, ends, axis=1), strict=True))
            return oracle.evaluate(plain, {**split, **other}, "u")[0]

        x = np.concatenate([*parts.values()], axis=1)
        fields[point_set] = Differences(u, x, labels or [str(i) for i in range(x.shape[1])])
    found = dict(zip(residuals, oracle.evaluate(result, fed, *residuals), strict=True))
    for point_set, residual in residuals.items():
        expected = residual(fields[point_set])
        assert found[point_set].shape == expected.shape
        # A second derivative by differences of the fourth order has an error of 1e-3⁴ times the
        # sixth derivative, and of 1e-16 / 1e-3² by rounding.
        np.testing.assert_allclose(found[point_set], expected, rtol=1e-7, atol=2e-8)


# -- training --------------------------------------------------------------------------------------

SETS = {"inside": lambda u: u.laplacian(), "edge": lambda u: u.value, "flux": lambda u: u.d(0)}
NORMAL = dict.fromkeys(SETS, "normal")
COUNTS = {"inside": 9, "edge": 4, "flux": 4}  # two are equal by chance


def points(counts=COUNTS, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {f"{name} x": rng.uniform(-1, 1, (n, 2)).astype(dtype) for name, n in counts.items()}


def jacobians(result, data, parameters):
    """The Jacobian matrix of each set's residuals by all parameters, by central differences."""
    step, found = 1e-6, {name: [] for name in SETS}
    for name, array in parameters.items():
        for index in np.ndindex(array.shape):
            moved = []
            for sign in (1, -1):
                changed = {k: v.copy() for k, v in parameters.items()}
                changed[name][index] += sign * step
                moved.append(oracle.evaluate(with_constants(result, changed), data, *SETS))
            for point_set, plus, minus in zip(SETS, *moved, strict=True):
                found[point_set].append((plus - minus).ravel() / (2 * step))
    return {name: np.stack(columns, axis=1) for name, columns in found.items()}


def flat(arrays):
    return np.concatenate([np.asarray(array).ravel() for array in arrays.values()])


@pytest.fixture(scope="module")
def small():
    """An equation of a small network, a batch, and the Jacobian matrices of its sets."""
    result = ke.equation(network(widths=(2, 3, 1), dtype="double"), SETS)
    data = points()
    engine = ke.Engine.from_onnx(result, loss=NORMAL, estimation_mode="exact")
    parameters = {name: np.array(array) for name, array in engine.parameters.items()}
    return result, data, parameters, jacobians(result, data, parameters)


def test_gradient_and_fisher_products_are_those_of_the_sets(small):
    result, data, parameters, slopes = small
    weights = {"inside": 1.0, "edge": 5.0, "flux": 0.5}
    losses = {name: ke.Normal(weight=weight) for name, weight in weights.items()}
    engine = ke.Engine.from_onnx(result, loss=losses)
    targets = {"edge": np.linspace(0, 1, 4)[:, None]}  # those of the others are zero
    residuals = dict(zip(SETS, oracle.evaluate(result, data, *SETS), strict=True))
    residuals["edge"] = residuals["edge"] - targets["edge"]
    # The loss "normal" is the squared error plus a constant, so its Fisher matrix is twice JᵀJ.
    gradient = sum(
        k * 2 * slopes[s].T @ residuals[s].ravel() / COUNTS[s] for s, k in weights.items()
    )
    found = engine.gradients(data, targets).gradients
    assert flat(found) == pytest.approx(gradient, rel=1e-6, abs=1e-7)  # differences of step 1e-6
    vector = {name: np.cos(np.arange(a.size)).reshape(a.shape) for name, a in parameters.items()}
    fisher = sum(k * 2 * slopes[s].T @ slopes[s] / COUNTS[s] for s, k in weights.items())
    product = engine.curvature_products(data).multiply_fisher(vector)
    assert flat(product) == pytest.approx(fisher @ flat(vector), rel=1e-6, abs=1e-6)


def test_blocks_of_shifts_are_gauss_newton_matrices_of_all_sets(small):
    result, data, parameters, slopes = small
    engine = ke.Engine.from_onnx(result, loss=NORMAL, estimation_mode="exact")
    engine.observe(data)
    start = 0
    for name, array in parameters.items():
        columns = slice(start, start + array.size)
        start += array.size
        if name.startswith("b"):
            dense = sum(
                2 * slopes[s][:, columns].T @ slopes[s][:, columns] / COUNTS[s] for s in SETS
            )
            block = engine.collection.fisher_blocks[name].full_fisher_block()
            assert block == pytest.approx(dense, rel=1e-5, abs=1e-6), name


def test_block_of_the_last_weight_is_exact_for_sums(small):
    # Each residual reads one row of the last layer, with the gradient 1, so that A ⊗ G is exact.
    result, data, parameters, _ = small
    first_order = {name: SETS[name] for name in ("edge", "flux")}
    result = ke.equation(network(widths=(2, 3, 1), dtype="double"), first_order)
    losses = dict.fromkeys(first_order, "normal")
    engine = ke.Engine.from_onnx(result, loss=losses, estimation_mode="exact", reduction="sum")
    engine.observe({name: data[name] for name in ("edge x", "flux x")})
    weight, bias, last = (parameters[name] for name in ("W0", "b0", "W1"))
    h = np.tanh(data["edge x"] @ weight + bias)
    slope = 1 - np.tanh(data["flux x"] @ weight + bias) ** 2
    rows = np.concatenate([h, slope * weight[0]])
    block = engine.collection.fisher_blocks["W1"].full_fisher_block()
    assert block == pytest.approx(2 * rows.T @ rows, rel=1e-6)
    assert last.shape == (3, 1)


def test_factors_of_a_hidden_weight_are_means_over_all_uses_of_all_sets(small):
    result, data, parameters, _ = small
    engine = ke.Engine.from_onnx(result, loss=NORMAL, estimation_mode="exact")
    engine.observe(data)
    weight, bias, last = parameters["W0"], parameters["b0"], parameters["W1"][:, 0]
    x, edge, flux = data.values()
    t = {name: np.tanh(array @ weight + bias) for name, array in data.items()}
    first, second, third = {}, {}, {}
    for name, h in t.items():
        first[name] = 1 - h**2
        second[name] = -2 * h * first[name]
        third[name] = (6 * h**2 - 2) * first[name]
    n = sum(COUNTS.values())
    inside = np.sqrt(2 * n / COUNTS["inside"])
    # The rows of x, and of its derivatives by both features, with the gradients of v·Δ tanh(s),
    # v·tanh(s) and v·∂₀ tanh(s) with respect to s and its derivatives.
    a = [x, edge, flux, *(np.tile(e, (len(x), 1)) for e in np.eye(2)), np.tile([1.0, 0.0], (4, 1))]
    ds = [
        inside * last * third["inside x"] * (weight**2).sum(axis=0),
        np.sqrt(2 * n / 4) * last * first["edge x"],
        np.sqrt(2 * n / 4) * last * second["flux x"] * weight[0],
        *(inside * last * 2 * second["inside x"] * weight[i] for i in range(2)),
        np.sqrt(2 * n / 4) * last * first["flux x"],
    ]
    a, ds = np.concatenate(a), np.concatenate(ds)
    block = np.kron(a.T @ a / len(a), ds.T @ ds / len(a)) * len(a) / n
    found = engine.collection.fisher_blocks["W0"].full_fisher_block()
    assert found == pytest.approx(block, rel=1e-6, abs=1e-9)


def sines(x):
    return np.sin(np.pi * x[:, :1]) * np.sin(np.pi * x[:, 1:])


def test_fit_solves_an_equation_with_sets_of_different_sizes_exactly():
    plain = network(widths=(2, 16, 16, 1), dtype="float", seed=4)
    result = ke.equation(
        plain,
        {
            "inside": lambda u: u.laplacian() + 2 * np.pi**2 * sines(u.x),
            "edge": lambda u: u.value,
        },
    )  # fmt: skip
    rng = np.random.default_rng(0)
    inside, edge = rng.random((90, 2), "float32"), rng.random((40, 2), "float32")
    edge[np.arange(40), np.arange(40) % 2] = np.arange(40) // 2 % 2
    data = {"inside x": inside, "edge x": edge}
    history = ke.fit(
        result, (data, None), loss={"inside": "normal", "edge": ke.Normal(weight=100)}, steps=200
    )
    solved = ke.Engine.from_onnx(plain, loss="normal")
    solved.set_parameters(history.engine.parameters)
    others = rng.random((500, 2), "float32")
    error = solved.predict(others) - sines(others)
    error = np.linalg.norm(error) / np.linalg.norm(sines(others))
    assert error < 0.02  # .2 without exact steps


# -- bad input -------------------------------------------------------------------------------------

RELU = network("Relu")
WHOLE = model("int64[n,2] x", "float[n,1] u", ["c = Cast<to = 1>(x)  u = MatMul(c, W)"],
              {"W": np.ones((2, 1))})  # fmt: skip


@pytest.mark.parametrize(
    ("residual", "kind", "message"),
    [
        (lambda u: u.d("y"), ke.UnknownNameError, "'inside' names the feature 'y'"),
        (lambda u: u.d(2), ke.UnknownNameError, "feature 2; the features are: t, x"),
        (lambda u: u.laplacian("z"), ke.UnknownNameError, "feature 'z'"),
        (lambda u: u.d(), ke.InputError, "derivative by 0 features"),
        (lambda u: u.d(0, 0, 1), ke.InputError, "derivative by 3 features"),
        (lambda u: 0.0, ke.InputError, "residual of 'inside' is float"),
        (lambda u: (u.value, u.d(0)), ke.InputError, "join several residuals"),
        (lambda u: u.value > 0, ke.InputError, "entries of bool"),
        (lambda u: u.value * u.x[:, 0], ke.ShapeError, re.escape("shape (n, n)")),
        (lambda u: (u.value**2).mean(), ke.ShapeError, re.escape("shape ()")),
        (lambda u: u.value.T, ke.ShapeError, re.escape("shape (1, n)")),
        (lambda u: u.x, ke.InputError, "does not depend on the network"),
        (lambda u: u.value if u.value > 0 else u.d(0), ke.UnsupportedError, "without branches"),
        (lambda u: np.bincount(u.value), ke.UnsupportedError, "'inside': .*bincount"),
        (lambda u, v: u.value, ke.InputError, "output of the network, u, but .* argument: 'v'"),
        ("u.value", ke.InputError, "not a function"),
    ],
)
def test_wrong_residuals_are_one_clear_error(residual, kind, message):
    with pytest.raises(kind, match=message):
        ke.equation(network(), {"inside": residual}, POINTS)


@pytest.mark.parametrize(
    ("plain", "residuals", "wrt", "kind", "message"),
    [
        (network(), {}, None, ke.InputError, "a function for each set of points"),
        (network(), {"W0": lambda u: u.value}, None, ke.InputError, "name of a value"),
        (network(), {1: lambda u: u.value}, None, ke.InputError, "name of a set of points"),
        (network(), {"a": lambda u: u.value}, "y", ke.UnknownNameError, "no input"),
        (network(), {"a": lambda u: u.value}, {"x": ("t",)}, ke.ShapeError, "2 different names"),
        (joined(two_inputs()), {"a": lambda u: u.value}, None, ke.InputError, "name the one"),
        (WHOLE, {"a": lambda u: u.d(0)}, None, ke.InputError, "whole numbers"),
        (RELU, {"a": lambda u: u.laplacian()}, None, ke.UnsupportedError, "almost everywhere"),
    ],
)
def test_wrong_equations_are_one_clear_error(plain, residuals, wrt, kind, message):
    with pytest.raises(kind, match=message):
        ke.equation(plain, residuals, wrt)


def test_functions_that_are_differentiable_are_not_refused():
    linear = model("float[n,2] x", "float[n,1] u", ["u = MatMul(x, W)"], {"W": np.ones((2, 1))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ke.equation(RELU, {"a": lambda u: u.d(0)})  # one derivative of Relu exists
        ke.equation(linear, {"a": lambda u: u.laplacian() + u.value})  # zero, and no kink


def test_calls_with_sets_of_examples_are_right_or_refused(tmp_path):
    result = ke.equation(network(widths=(2, 3, 1)), SETS)
    data = points(dtype="float32")
    engine = ke.Engine.from_onnx(result, loss=NORMAL)
    with pytest.raises(ke.ShapeError, match=r"targets has shape \(5, 1\), expected \(4, 1\)"):
        engine.loss(data, {"edge": np.zeros((5, 1), "float32")})
    with pytest.raises(ke.InputError, match="'edge x' is missing"):
        engine.loss({"inside x": data["inside x"]})
    with pytest.raises(ke.InputError, match="batch_mean"):
        ke.Engine.from_onnx(result, loss=NORMAL, reduction="batch_mean")
    with pytest.raises(ke.InputError, match=r"make an Engine .* with curvature_products"):
        ke.curvature(result, [(data, None)], loss=NORMAL)
    with pytest.raises(ke.UnsupportedError, match="one number of examples, but 'inside x'"):
        ke.export_training(result, loss=NORMAL, path=tmp_path)
    weights = {name: np.linspace(0.5, 1, n) for name, n in COUNTS.items()}
    zeros = {name: np.zeros((n, 1), "float32") for name, n in COUNTS.items()}
    with pytest.raises(ke.UnsupportedError, match="multiply a residual by the roots"):
        engine.step(data, ke.Weighted(zeros, weights))
    # Masks are weights of 0 and 1: the points that do not count may as well be absent.
    mask = {name: np.arange(n) < n - 2 for name, n in COUNTS.items()}
    few = {f"{name} x": data[f"{name} x"][: n - 2] for name, n in COUNTS.items()}
    assert engine.loss(data, ke.Weighted(zeros, mask)) == pytest.approx(engine.loss(few), rel=1e-6)
    assert engine.loss(data, zeros) == engine.loss(data)
    assert engine.evaluate((data, None))["loss"] == pytest.approx(engine.loss(data), rel=1e-9)
    assert {name: u.shape for name, u in engine.predict(data).items()} == {
        name: (n, 1) for name, n in COUNTS.items()
    }


def test_parameters_without_a_layer_have_the_gradients_of_single_points(small):
    # An exponent of the network is neither a weight nor a scale.
    plain = model(
        "double[n,2] x", "double[n,1] u", ["p = Pow(x, e)  q = Exp(p)  u = MatMul(q, W)"],
        {"e": np.array([1.5, 2.5]), "W": np.ones((2, 1))}, "double",
    )  # fmt: skip
    sets = {"inside": lambda u: u.d(0), "edge": lambda u: u.value}
    losses = dict.fromkeys(sets, "normal")
    engine = ke.Engine.from_onnx(
        ke.equation(plain, sets), loss=losses, estimation_mode="exact", trainable=["e"]
    )
    data = {"inside x": np.array([[0.3, 0.7], [0.5, 0.2], [0.9, 0.4]])}
    data["edge x"] = np.array([[0.2, 0.8], [0.6, 0.1]])
    engine.observe(data)
    x, y = data["inside x"], data["edge x"]
    e, found = np.array([1.5, 2.5]), {}
    p = y**e
    found["edge"] = np.exp(p) * p * np.log(y)
    p, slope = x**e, e * x ** (e - 1)
    inner = np.exp(p) * (p * np.log(x) * slope + x ** (e - 1) + slope * np.log(x))
    found["inside"] = inner * [1, 0]  # the derivative by feature 0
    dense = sum(2 * (g**2).mean(axis=0) for g in found.values())
    block = engine.collection.fisher_blocks["e"].full_fisher_block()
    assert np.diag(block) == pytest.approx(dense, rel=1e-6)

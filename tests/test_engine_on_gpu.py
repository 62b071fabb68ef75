"""An engine on the GPU gives what an engine on the CPU gives, on a stand-in and on a device."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cuda import inverse_roots
from tests import models
from tests.backend import cupy_standin
from tests.engine.test_engine import LOSSES, random_targets

# Float32 statistics summed in another order, through an inverse of condition 1e3.
TOLERANCE = 1e-3
STEPS = 3


@pytest.fixture(params=cupy_standin.KINDS)
def gpu(request, monkeypatch):
    cupy_standin.begin(request.param, monkeypatch)
    return request.param


def trained(name, backend, **options):
    model, loss = models.MODELS[name](), LOSSES[name]
    engine = ke.Engine.from_onnx(model, loss=loss, damping=1e-2, backend=backend, **options)
    results = []
    for seed in range(STEPS):
        inputs = models.random_inputs(model, batch=6, seed=seed)
        targets = random_targets(model, inputs, loss, seed)
        result = engine.step(inputs, targets)
        results.append(result)
        natural = result.natural_gradients
        engine.set_parameters(
            {n: value - 0.01 * natural[n] for n, value in engine.parameters.items()}
        )
    return results


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def same(found, wanted, name):
    atol = TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(host(found), wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_three_steps_equal_cpu(gpu, name):
    for found, wanted in zip(trained(name, "cupy"), trained(name, "numpy"), strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
        for parameter, natural in wanted.natural_gradients.items():
            same(found.natural_gradients[parameter], natural, parameter)


# They have kernels of their own: grouped filters, squared gradients, sums for scales.
OTHERS = {
    "depthwise": (lambda: convolution(8, groups=8), {}),
    "grouped": (lambda: convolution(8, groups=2), {}),
    "squares of groups": (lambda: convolution(8, groups=2), {"grouped_convolution": "diagonal"}),
    "squares of a filter": (models.cnn, {"conv2d": "diagonal", "fully_connected": "diagonal"}),
    "scales, in full": (models.layer_norm, {"scale_and_shift": "full"}),
    "scales, their squares": (models.layer_norm, {"scale_and_shift": "diagonal"}),
    "an eigenbasis": (models.mlp, {"fully_connected": "ekfac"}),
}


def convolution(channels, groups):
    """Images through a grouped filter, its bias, and a mean over pixels."""
    body = f"""c = Conv <group = {groups}, pads = [1, 1, 1, 1]> (x, w, b)  t = Tanh (c)
      p = GlobalAveragePool (t)  y = Flatten (p)"""
    shapes = {"w": (channels, channels // groups, 3, 3), "b": (channels,)}
    return made(f"(float[n,{channels},6,6] x) => (float[n,{channels}] y) {{ {body} }}", shapes)


def made(graph, shapes):
    """A model from text, with random weights."""
    rng = np.random.default_rng(0)
    weights = {n: (rng.normal(size=s) / 2).astype(np.float32) for n, s in shapes.items()}
    return models.parsed(f"made {graph}", weights)


@pytest.mark.parametrize("name", OTHERS)
def test_other_approximations_equal_cpu(gpu, name):
    make, approximations = OTHERS[name]
    model = make()
    inputs = models.random_inputs(model, batch=6)
    targets = np.arange(6) % 3
    found, wanted = (
        ke.precondition(
            model, inputs, targets, "categorical",
            backend=backend, damping=1e-2, approximations=approximations,
        )
        for backend in ("cupy", "numpy")
    )  # fmt: skip
    for parameter, natural in wanted.natural_gradients.items():
        same(found.natural_gradients[parameter], natural, parameter)


def test_engine_returns_and_accepts_device_arrays(gpu):
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="cupy")
    inputs = models.random_inputs(model, batch=4)
    result = engine.step(inputs, np.arange(4) % 3)
    library = engine.collection.backend.xp.ndarray
    for arrays in (result.gradients, result.natural_gradients, engine.parameters):
        assert {type(array) for array in arrays.values()} == {library}
    again = engine.precondition(result.gradients)
    for name, natural in result.natural_gradients.items():
        np.testing.assert_array_equal(host(again[name]), host(natural))
    moved = {name: value + 1 for name, value in engine.parameters.items()}
    engine.set_parameters(moved)
    for name, value in engine.parameters.items():
        np.testing.assert_array_equal(host(value), host(moved[name]))
    engine.set_parameters({name: host(value) for name, value in moved.items()})


def test_device_choice_is_logged_once(gpu, caplog, monkeypatch):
    cupy_standin.forget(monkeypatch)
    with caplog.at_level("INFO", logger="kfac_engine"):
        for _ in range(2):
            ke.Engine.from_onnx(models.mlp(), loss="categorical", backend="cupy")
    assert caplog.text.count("curvature on ") == 1
    assert caplog.text.count("the model runs in ONNX Runtime on ") == 1


@pytest.mark.parametrize("width", [1, 4])
def test_step_reads_gpu_four_times_for_any_number_of_layers(monkeypatch, width):
    """Whether batch and result are finite, the largest numbers, and norms of gradients."""
    cupy_standin.install(monkeypatch)
    model = chain(layers=3 * width)
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="cupy", damping=1e-2)
    inputs = models.random_inputs(model, batch=6)
    engine.step(inputs, np.arange(6) % 3)
    cupy_standin.COUNTS.clear()
    engine.step(inputs, np.arange(6) % 3)
    counts, layers = cupy_standin.COUNTS, 3 * width
    assert counts["downloads"] + counts["reads"] <= 4
    # Inputs, output gradients and gradients: each once; two tables of addresses, and for each 32
    # second moments one of the moments and one of their bias rows.
    assert counts["uploads"] == 4 * layers + 3 + 2 * -(-2 * layers // 32)


def chain(layers):
    """Dense layers of four features."""
    nodes = [f"s{i} = Gemm (x{i}, w{i}, b{i})  x{i + 1} = Tanh (s{i})" for i in range(layers - 1)]
    last = layers - 1
    nodes.append(f"y = Gemm (x{last}, w{last}, b{last})")
    shapes = {f"w{i}": (4, 4) for i in range(layers)} | {f"b{i}": (4,) for i in range(layers)}
    return made(f"(float[n,4] x0) => (float[n,4] y) {{ {'  '.join(nodes)} }}", shapes)


POWERS_AND_BLOCKS = {
    "roots": ("mlp", {"exps": (-0.5,)}),
    "fourth roots": ("cnn", {"exps": (-0.25,)}),
    "powers": ("cnn", {"exps": (-0.75, -1)}),
    "uncorrelated": ("cnn", {"approximations": {"conv2d": "kron_sua"}}),
    "reduced": ("cnn", {"approximations": {"conv2d": "kron_reduce"}}),
}


@pytest.mark.parametrize("case", POWERS_AND_BLOCKS)
def test_powers_and_blocks_equal_cpu(gpu, case, monkeypatch):
    # Roots of small matrices, too, take the way of large ones.
    monkeypatch.setattr(inverse_roots, "LEAST_SIZES", dict.fromkeys((80, 90, 100), 2))
    name, options = POWERS_AND_BLOCKS[case]
    pairs = zip(trained(name, "cupy", **options), trained(name, "numpy", **options), strict=True)
    for found, wanted in pairs:
        for parameter, natural in wanted.natural_gradients.items():
            same(found.natural_gradients[parameter], natural, parameter)


def test_reserved_gpu_memory_equals_report(gpu):
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="cupy")
    memory = engine.memory(4)
    assert memory.device >= memory.factors + memory.scratch > 0
    assert ke.Engine.from_onnx(model, loss="categorical", backend="numpy").memory(4).device == 0
    if gpu == "stand-in":
        cupy_standin.memory.limit = memory.factors - 1
        with pytest.raises(ke.MemoryLimitError, match=r"0\.00 GB and scratch 0\.27 GB on the GPU"):
            engine.observe(models.random_inputs(model, batch=4))
        assert engine.counter == 0


OPTIMIZERS = {
    "auto": ke.KfacOptimizer,
    "rate": lambda engine: ke.KfacOptimizer(engine, 0.02),
    "sgd": lambda engine: ke.SGD(engine, 0.02),
    "adam": ke.Adam,
    "muon": ke.Muon,
}


def stepped(optimizer, first, last):
    model, loss = models.MODELS["layer_norm"](), LOSSES["layer_norm"]
    for seed in range(first, last):
        inputs = models.random_inputs(model, batch=8, seed=seed)
        optimizer.step(inputs, random_targets(model, inputs, loss, seed))
    return {name: host(value) for name, value in optimizer.engine.parameters.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_and_resume_on_the_gpu(name, gpu, tmp_path):
    def optimizer(backend):
        options = {"backend": backend, "estimation_mode": "exact"}
        model, loss = models.MODELS["layer_norm"](), LOSSES["layer_norm"]
        return OPTIMIZERS[name](ke.Engine.from_onnx(model, loss=loss, **options))

    on_gpu, resumed = optimizer("cupy"), optimizer("cupy")
    expected = stepped(optimizer("numpy"), 0, 6)
    stepped(on_gpu, 0, 3)
    on_gpu.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    for one in (on_gpu, resumed):
        for parameter, value in stepped(one, 3, 6).items():
            # Float32 sums in another order, through inverses.
            np.testing.assert_allclose(value, expected[parameter], rtol=TOLERANCE, atol=1e-4)


def test_regression_in_its_own_units_equals_cpu(gpu):
    """Inputs are damped by feature, predictions move by the spread, and matrices form a stack."""
    rng = np.random.default_rng(0)
    units = np.array([1000, 1, 1, 0.01, 1, 1], np.float32)
    x = {"input": (rng.standard_normal((160, 6)) * units).astype(np.float32)}
    targets = (300 * rng.standard_normal((160, 2)) + 150).astype(np.float32)

    def run(backend):
        model = models.mlp((6, 64, 64, 64, 2))
        options = {"backend": backend, "estimation_mode": "exact"}
        optimizer = ke.KfacOptimizer(ke.Engine.from_onnx(model, loss="normal", **options))
        losses = [optimizer.step(x, targets).loss for _ in range(5)]
        return losses, {n: host(value) for n, value in optimizer.engine.parameters.items()}

    (found, on_gpu), (wanted, on_cpu) = run("cupy"), run("numpy")
    assert found == pytest.approx(wanted, rel=TOLERANCE)
    # Adam, which moves the biases, divides the rounding of a gradient near zero by its size.
    for name in (name for name in on_cpu if name.endswith("weight")):
        same(on_gpu[name], on_cpu[name], name)


@pytest.mark.parametrize("optimizer", ["kfac", "muon"])
def test_fit_trains_and_resumes_on_the_gpu(optimizer, gpu, tmp_path):
    model, loss = models.MODELS["layer_norm"](), LOSSES["layer_norm"]
    inputs = models.random_inputs(model, batch=40)
    data = inputs, random_targets(model, inputs, loss)

    def run(backend, others, **options):
        engine = ke.Engine.from_onnx(model, loss=loss, backend=backend, estimation_mode="exact")
        callbacks = [ke.WeightAverage(0.5), ke.BestWeights(), ke.EarlyStop(), *others]
        ke.fit(
            engine, data, optimizer=optimizer, epochs=3, batch_size=8, validation=0.2,
            callbacks=callbacks, **options,
        )  # fmt: skip
        return {name: host(value) for name, value in engine.parameters.items()}

    def stop(record, _):
        return record["step"] == 6

    expected, whole = run("numpy", []), run("cupy", [])
    run("cupy", [stop], checkpoint=tmp_path)
    resumed = run("cupy", [], checkpoint=tmp_path, resume=True)
    for name, value in whole.items():
        # Float32 sums in another order, through inverses.
        np.testing.assert_allclose(value, expected[name], rtol=TOLERANCE, atol=1e-4)
        assert np.array_equal(resumed[name], value)


@pytest.mark.parametrize("approximation", ["kron", "ekfac", "diagonal"])
def test_factors_and_summaries_are_those_of_a_cpu(gpu, approximation):
    model = models.mlp()
    inputs = models.random_inputs(model, 12)
    engines, results = [], []
    for backend in ("numpy", "cupy"):
        options = {"approximations": {"fully_connected": approximation}, "backend": backend}
        engine = ke.Engine.from_onnx(model, loss="categorical", **options)
        results.append(engine.step(inputs, np.arange(12) % 3))
        engines.append(engine)
    pairs = list(zip(*(engine.factors.views() for engine in engines), strict=True))
    assert len(pairs) == {"kron": 6, "ekfac": 9, "diagonal": 3}[approximation]
    for ours, theirs in pairs:
        assert not isinstance(theirs.value, np.ndarray)
        expected = ours.eigenvalues()
        atol = 1e-5 * expected[-1]  # float32 averages
        np.testing.assert_allclose(theirs.eigenvalues(), expected, rtol=0, atol=atol)
        assert theirs.trace == pytest.approx(ours.trace, rel=1e-5)
        assert theirs.damping == (ours.damping and pytest.approx(ours.damping, rel=1e-5))
    assert "backend     cupy" in repr(engines[1])
    norms = [float(repr(result).rpartition("norm ")[2]) for result in results]
    assert norms[1] == pytest.approx(norms[0], rel=TOLERANCE)
    assert "fc1.weight" in results[1]._repr_html_()

"""A model that runs on the GPU gives what it gives on the CPU, and nothing comes back to the host.

On a CPU the stand-in for CuPy says where arrays lie, and ONNX Runtime's provider for the CPU works
on them by address: sessions, bindings and DLPack are those that a device has.
"""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.backend import select
from kfac_engine.backend.cuda import backend as cuda_backend
from kfac_engine.backend.cuda.memory_space import CupyMemorySpace
from kfac_engine.backend.memory_space import HOST
from kfac_engine.bench.step_networks import resnet20
from kfac_engine.sessions import device_session
from kfac_engine.sessions.device_session import has_provider
from tests import models
from tests.backend import cupy_standin
from tests.engine.test_buffers import normalised
from tests.engine.test_engine import LOSSES
from tests.engine.test_recurrent_engine import batch, classifier
from tests.test_engine_on_gpu import TOLERANCE, chain, host, same, trained


@pytest.fixture(params=cupy_standin.KINDS)
def gpu(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch)
    elif not has_provider("cuda"):
        pytest.skip("needs onnxruntime-gpu")
    cupy_standin.begin(request.param, monkeypatch)
    return request.param


def stand_in(patch):
    cupy_standin.install(patch)
    patch.setattr(CupyMemorySpace, "kind", "cpu")


@pytest.mark.parametrize("name", LOSSES)
def test_three_steps_equal_cpu(gpu, name):
    for found, wanted in zip(trained(name, "cupy"), trained(name, "numpy"), strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
        for parameter, natural in wanted.natural_gradients.items():
            same(found.gradients[parameter], wanted.gradients[parameter], parameter)
            same(found.natural_gradients[parameter], natural, parameter)


def begun(model, **options):
    """An engine after its first step, and a batch."""
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="cupy", damping=1e-2, **options)
    assert engine._model.memory_space is not HOST
    inputs = models.random_inputs(model, batch=6)
    targets = np.arange(6) % 3
    engine.step(inputs, targets)
    return engine, inputs, targets


def library(engine):
    return engine.collection.backend.xp.ndarray


# -- what crosses over ----------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [3, 12])
def test_step_transfers_only_batch_and_few_numbers(monkeypatch, layers):
    """Up: inputs, targets, uniforms, five tables of addresses. Down: checks, norms and the loss."""
    stand_in(monkeypatch)
    engine, inputs, targets = begun(chain(layers))
    counts = cupy_standin.COUNTS
    counts.clear()
    engine.step(inputs, targets)
    assert counts["uploads"] == 8
    assert counts["reads"] + counts["downloads"] == 3
    counts.clear()
    engine.set_parameters({name: value + 1 for name, value in engine.parameters.items()})
    assert counts["uploads"] == 1  # a table of addresses
    assert counts["reads"] + counts["downloads"] == 1


def test_device_reads_are_independent_of_number_of_layers(gpu, monkeypatch):
    found = []
    for layers in (3, 12):
        engine, inputs, targets = begun(chain(layers))
        device = engine.collection.backend.device
        found.append(0)

        def counted(array, read=device.download):
            found[-1] += 1
            return read(array)

        with monkeypatch.context() as patch:
            patch.setattr(device, "download", counted)
            engine.step(inputs, targets)
    assert found[0] == found[1] <= 5


OPTIMIZERS = {
    "auto": ke.KfacOptimizer,
    "adamw": ke.AdamW,
    "sgd": lambda engine: ke.SGD(engine, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reads_of_optimizers_are_independent_of_number_of_layers(monkeypatch, name):
    stand_in(monkeypatch)
    found = []
    for layers in (3, 12):
        engine, inputs, targets = begun(chain(layers))
        optimizer = OPTIMIZERS[name](engine)
        for _ in range(3):
            cupy_standin.COUNTS.clear()
            optimizer.step(inputs, targets)
        found.append(cupy_standin.COUNTS["reads"] + cupy_standin.COUNTS["downloads"])
    assert found[0] == found[1] <= 20  # a step with statistics


# What a step of KfacOptimizer may start on a device, read from it and copy to it. A launch takes
# the host 20 microseconds, and a read stops the device.
BUDGETS = {
    "plain": {"launches": 72, "reads": 4, "uploads": 17},
    "statistics": {"launches": 94, "reads": 4, "uploads": 25},
}


def test_steps_of_resnet20_equal_cpu_within_budgets(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(cuda_backend, "_PRODUCTS", 0)  # the fastest on a CPU
    network, batch = resnet20(side=8), 192  # as many Newton-Schulz iterations as large batches
    model = onnx.load_from_string(network.data)
    optimizers = [
        ke.KfacOptimizer(
            ke.Engine.from_onnx(model, loss="categorical", backend=backend),
            weight_decay=0.05,
            statistics_part=1 / 16,
        )
        for backend in ("cupy", "numpy")
    ]
    found = {}
    # Updates of the curvature are due at the step 100, then the statistics alone at 110.
    for steps, kind in ((100, ""), (101, "plain"), (110, "statistics")):
        for optimizer in optimizers:
            optimizer.steps = steps
            before = {n: host(value).copy() for n, value in optimizer.engine.parameters.items()}
            counts = cupy_standin.COUNTS
            counts.clear()
            report = optimizer.step(network.inputs(batch), network.targets(batch))
            if optimizer is optimizers[0]:
                found[kind] = {
                    "launches": counts["launches"] + counts["calls"],
                    "reads": counts["reads"] + counts["downloads"],
                    "uploads": counts["uploads"],
                }
        on_device, wanted = (optimizer.engine.parameters for optimizer in optimizers)
        for name, value in wanted.items():
            moved = np.linalg.norm(value - before[name])
            # Float32 sums in another order, which statistics of few examples magnify. A ReLU at its
            # kink takes either branch then: single biases moved by 0.4 to 9 percent more or less in
            # trials with other decays.
            assert np.linalg.norm(host(on_device[name]) - value) < 2e-2 * moved, (steps, name)
    assert not report.refreshed
    for kind, budget in BUDGETS.items():
        assert all(found[kind][name] <= most for name, most in budget.items()), found


# -- what users give and get ----------------------------------------------------------------------


def test_batch_may_be_on_gpu(gpu):
    engine, inputs, targets = begun(models.mlp())
    wanted = engine.gradients(inputs, targets)
    asarray = engine.collection.backend.asarray
    device_inputs = {name: asarray(array) for name, array in inputs.items()}
    found = engine.gradients(device_inputs, asarray(targets))
    assert found.loss == pytest.approx(wanted.loss)
    for name, gradient in wanted.gradients.items():
        assert type(found.gradients[name]) is library(engine)
        np.testing.assert_array_equal(host(found.gradients[name]), host(gradient))


def test_precondition_accepts_batch_on_gpu(gpu):
    model = models.mlp()
    inputs, targets = models.random_inputs(model, batch=6), np.arange(6) % 3
    asarray = select.select("cupy").asarray
    device_inputs = {name: asarray(array) for name, array in inputs.items()}
    found, wanted = (
        ke.precondition(model, batch, targets, "categorical", backend="cupy")
        for batch in (device_inputs, inputs)
    )
    assert found.loss == wanted.loss


def test_nonfinite_batch_on_gpu_raises_error(gpu):
    engine, inputs, targets = begun(models.mlp())
    (name,) = inputs
    bad = inputs[name].copy()
    bad[2, 1] = np.inf
    with pytest.raises(
        ke.NonFiniteError, match=r"contains NaN or infinity, first at index \(2, 1\)"
    ):
        engine.step({name: engine.collection.backend.asarray(bad)}, targets)


def test_parameters_stay_on_the_gpu(gpu):
    engine, _, _ = begun(models.mlp())
    moved = {name: value + 1 for name, value in engine.parameters.items()}
    engine.set_parameters(moved)
    for name, value in engine._model.parameters.items():
        assert type(value) is library(engine)
        np.testing.assert_array_equal(host(value), host(moved[name]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_parameters_raise_error(gpu, bad):
    engine, _, _ = begun(models.mlp())
    before = {name: host(value) for name, value in engine.parameters.items()}
    moved = dict(engine.parameters)
    name = next(iter(moved))
    moved[name] = moved[name] * bad
    with pytest.raises(ke.NonFiniteError, match=f"the new value of parameter '{name}'"):
        engine.set_parameters(moved)
    # Squares of these overflow, they themselves do not.
    engine.set_parameters({name: np.full(before[name].shape, 1e30, np.float32)})


def test_engine_on_gpu_is_saved_loaded_and_exported(gpu, tmp_path):
    engine, inputs, targets = begun(models.mlp())
    engine.set_parameters({name: value * 0.5 for name, value in engine.parameters.items()})
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "model.onnx")
    wanted = engine.step(inputs, targets)
    other, _, _ = begun(models.mlp())
    other.load(tmp_path / "state")
    found = other.step(inputs, targets)
    assert found.loss == wanted.loss
    for name, natural in wanted.natural_gradients.items():
        np.testing.assert_array_equal(host(found.natural_gradients[name]), host(natural))
    exported = ke.Engine.from_onnx(tmp_path / "model.onnx", loss="categorical", backend="numpy")
    for name, value in engine.parameters.items():
        np.testing.assert_array_equal(exported.parameters[name], host(value))


def test_running_statistics_are_updated_on_gpu(gpu, tmp_path):
    model = normalised()
    engine, inputs, targets = begun(model)
    beside = ke.Engine.from_onnx(model, loss="categorical", backend="numpy", damping=1e-2)
    beside.step(inputs, targets)
    for name, value in beside.buffers.items():
        same(engine.buffers[name], value, name)
    engine.save(tmp_path / "state")
    other = ke.Engine.from_onnx(model, loss="categorical", backend="cupy", damping=1e-2)
    other.load(tmp_path / "state")
    for name, value in engine.buffers.items():
        np.testing.assert_array_equal(host(other.buffers[name]), host(value))


def test_tied_weights_stay_equal_on_the_gpu(gpu):
    model = models.tied()
    engine, inputs, targets = begun(model, tie_weights=True)
    result = engine.step(inputs, targets)
    engine.set_parameters({n: v - result.gradients[n] for n, v in engine.parameters.items()})
    assert engine.ties == ke.Engine.from_onnx(model, loss="categorical", tie_weights=True).ties


def test_recurrent_layers_equal_cpu(gpu):
    """Their matrices are slices of an array, whose entries are told by number."""
    model, (x, t) = classifier("LSTM"), batch()
    found, wanted = (
        ke.precondition(model, {"x": x}, t, "categorical", backend=backend, damping=1e-2)
        for backend in ("cupy", "numpy")
    )
    for name, natural in wanted.natural_gradients.items():
        same(found.natural_gradients[name], natural, name)


def test_invalid_target_error_names_output(gpu):
    engine, inputs, targets = begun(models.mlp())
    with pytest.raises(ke.InputError, match=r"target 9 of example 0 is not a class"):
        engine.step(inputs, np.full_like(targets, 9))


# -- what a step refuses ---------------------------------------------------------------------------

# Changes of a batch, or of the weights before it, that a step refuses; ``w`` is the last weight.
FAULTS = {
    "input": lambda x, y, w: x.__setitem__((2, 1), np.nan),
    "prediction": lambda x, y, w: w.__imul__(3e38),
    "loss": lambda x, y, w: y.__imul__(1e30),
    "target": lambda x, y, w: y.__setitem__((3, 1), np.inf),
    "class": lambda x, y, w: y.__setitem__(4, 9),
}


def refused(name, backend, move):
    """The error of a step with a fault, and the loss of the next step, which no fault changes."""
    loss = "categorical" if name == "class" else "normal"
    messages = []
    for make in (None, ke.KfacOptimizer, ke.AdamW):
        engine = ke.Engine.from_onnx(models.mlp(), loss=loss, backend=backend, damping=1e-2)
        step = (make(engine) if make else engine).step
        (key,) = inputs = models.random_inputs(models.mlp(), batch=6)
        targets = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
        targets = np.arange(6) % 3 if name == "class" else targets
        step(inputs, targets)
        before = {n: host(value).copy() for n, value in engine.parameters.items()}
        x, y = inputs[key].copy(), targets.copy()
        last = [n for n, value in before.items() if value.ndim == 2][-1]
        weights = before[last].copy()
        FAULTS[name](x, y, weights)
        engine.set_parameters({last: weights})
        with pytest.raises(ke.KfacError) as error:
            step({key: move(engine, x)}, move(engine, y))
        messages.append(f"{type(error.value).__name__}: {error.value}")
        for parameter, value in engine.parameters.items():
            wanted = weights if parameter == last else before[parameter]
            np.testing.assert_array_equal(host(value), wanted)
        engine.set_parameters(before)
        step(inputs, targets)
        messages.append(f"{engine.loss(inputs, targets):.4g}")
    return messages


@pytest.mark.parametrize("given", ["host", "device"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_batch_raise_errors_of_cpu(gpu, name, given):
    def moved(engine, array):
        return engine.collection.backend.asarray(array) if given == "device" else array

    assert refused(name, "cupy", moved) == refused(name, "numpy", lambda engine, array: array)


# Optimizers whose step 101 fails after its gradients, arrays that are infinite before it, and what
# the error says of them.
LATE_FAULTS = {
    "natural gradient": (
        ke.KfacOptimizer,
        lambda o: [power for factor in o.engine.fisher.factors for power in factor.stored.values()],
        "the gradient of 'fc0.weight' times the Fisher matrix to the power -1 overflows",
    ),
    "second moment": (
        ke.KfacOptimizer,
        lambda o: o.state().arrays["second_moment"].values(),
        "the second moment of the optimizer overflows",
    ),
    "parameters": (
        lambda engine: ke.SGD(engine, lambda step: 1e39 * (step > 100)),
        lambda o: (),
        "the new value of parameter 'fc0.weight' contains NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", LATE_FAULTS)
def test_late_faults_change_neither_parameters_nor_state(gpu, name):
    make, infinite, message = LATE_FAULTS[name]
    engine = ke.Engine.from_onnx(models.mlp(), loss="normal", backend="cupy")
    optimizer, inputs = make(engine), models.random_inputs(models.mlp(), batch=6)
    targets = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    optimizer.steps = 100  # the curvature is updated in this step only
    optimizer.step(inputs, targets)
    for array in infinite(optimizer):
        array *= np.inf

    def state():
        slots = optimizer.state().arrays.values()
        arrays = [*engine.parameters.values(), *(a for slot in slots for a in slot.values())]
        return [host(array).copy() for array in arrays]

    before = state()
    with pytest.raises(ke.NonFiniteError, match=message):
        optimizer.step(inputs, targets)
    for found, wanted in zip(state(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("given", ["host", "device"])
@pytest.mark.parametrize("loss", ["categorical", "normal"])
def test_targets_that_do_not_count_may_be_anything(gpu, loss, given):
    inputs = models.random_inputs(models.mlp(), batch=6)
    targets, weights = np.arange(6) % 3, np.array([1, 0, 1, 1, 0, 1], np.float32)
    if loss == "normal":
        targets = np.where(weights[:, None] > 0, np.eye(3)[targets], np.nan).astype(np.float32)
    else:
        targets[weights == 0] = -100
    found = []
    for backend in ("cupy", "numpy"):
        engine = ke.Engine.from_onnx(models.mlp(), loss=loss, backend=backend, damping=1e-2)
        both = targets, weights
        if given == "device":
            both = tuple(map(engine.collection.backend.asarray, both))
        found.append(engine.step([(inputs, *both)]))
    assert found[0].loss == pytest.approx(found[1].loss, rel=TOLERANCE)
    for name, natural in found[1].natural_gradients.items():
        same(found[0].natural_gradients[name], natural, name)


MODES = ("empirical", "curvature_prop", "exact")


@pytest.mark.parametrize("mode", MODES)
def test_estimation_modes_equal_cpu(gpu, mode):
    options = {"estimation_mode": mode}
    pairs = zip(trained("mlp", "cupy", **options), trained("mlp", "numpy", **options), strict=True)
    for found, wanted in pairs:
        for name, natural in wanted.natural_gradients.items():
            same(found.natural_gradients[name], natural, name)


def test_jacobian_products_equal_cpu(gpu):
    engine, inputs, targets = begun(models.mlp())
    beside = ke.Engine.from_onnx(models.mlp(), loss="categorical", backend="numpy")
    rng = np.random.default_rng(0)
    tangents = {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in beside.parameters.items()
    }
    found, wanted = (
        e._model.run(inputs, targets).jvp(tangents, e.objective.inputs) for e in (engine, beside)
    )
    for name, change in wanted.items():
        assert type(found[name]) is library(engine)
        same(found[name], change, name)


def test_memory_report_includes_model_on_gpu(gpu):
    engine, _, _ = begun(models.mlp())
    memory = engine.memory(4)
    assert memory.device == memory.total - memory.sessions > memory.factors + memory.scratch


def test_model_memory_space_is_logged_once(gpu, caplog):
    with caplog.at_level("INFO", logger="kfac_engine"):
        for _ in range(2):
            ke.Engine.from_onnx(models.mlp(), loss="categorical", backend="cupy")
    name = select._gpu().name
    assert caplog.text.count(f"the model runs in ONNX Runtime on {name}") == 1


def test_gpu_without_provider_computes_curvature_only(gpu, monkeypatch):
    monkeypatch.setattr(device_session, "has_provider", lambda kind: False)
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical", backend="cupy")
    assert engine._model.memory_space is HOST
    inputs = models.random_inputs(models.mlp(), batch=4)
    device_inputs = {
        name: engine.collection.backend.asarray(array) for name, array in inputs.items()
    }
    found, wanted = (engine.gradients(batch, np.arange(4) % 3) for batch in (device_inputs, inputs))
    assert found.loss == wanted.loss

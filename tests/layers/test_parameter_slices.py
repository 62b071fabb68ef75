"""Weights kept in another form by the file: the same numbers as where they are written plainly."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import kfac_engine as ke
from kfac_engine.layers import parameter_slices
from kfac_engine.layers.parameter_slices import ParameterSlice, describe, join, split
from tests import models
from tests.backend import cupy_standin

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
BATCH, WIDTH = 6, 4
SIDES = ["batch", WIDTH]


def whole(net):
    """Two dense layers and their product, all weights and biases written plainly."""
    x, y = (
        net.op("Tanh", net.op("Gemm", "input", f"w{i}", f"b{i}", to=f"s{i}"), to=f"t{i}")
        for i in range(2)
    )
    net.op("Add", x, y, to="output")


def cut(net, value, axis, start, end, to):
    bounds = [net.constant(f"{to} {k}", np.array([v])) for k, v in
              (("start", start), ("end", end), ("axis", axis))]  # fmt: skip
    return net.op("Slice", value, *bounds, to=to)


def by_slices(net):
    w, b = net.weight("w", WIDTH, 2 * WIDTH), net.weight("b", 2 * WIDTH)
    for i in range(2):
        cut(net, w, 1, i * WIDTH, (i + 1) * WIDTH, f"w{i}")
        cut(net, b, -1, i * WIDTH, (i + 1) * WIDTH, f"b{i}")


def by_split(net):
    w, b = net.weight("w", 2 * WIDTH, WIDTH), net.weight("b", 2 * WIDTH)
    net.several("Split", w, to=("u0", "u1"), axis=0, num_outputs=2)
    net.several("Split", b, to=("b0", "b1"), num_outputs=2)
    for i in range(2):
        net.op("Transpose", f"u{i}", to=f"w{i}")


def stacked(net):
    w, b = net.weight("w", 2, WIDTH, WIDTH), net.weight("b", 2, WIDTH)
    for i in range(2):
        at = net.constant(f"at{i}", np.array(i))
        net.op("Gather", w, at, to=f"w{i}")
        net.op("Gather", b, at, to=f"b{i}")


def flat(net):
    """All weights in one vector, as optimisers of flat parameters leave them."""
    w, b = net.weight("w", 2 * WIDTH**2), net.weight("b", 2 * WIDTH)
    square = net.constant("square", np.array([WIDTH, WIDTH]))
    for i in range(2):
        part = cut(net, w, 0, i * WIDTH**2, (i + 1) * WIDTH**2, f"part{i}")
        net.op("Reshape", part, square, to=f"w{i}")
        cut(net, b, 0, i * WIDTH, (i + 1) * WIDTH, f"b{i}")


def relayed(net):
    one = net.constant("one", np.array([0]))
    for i in range(2):
        net.op("Squeeze", net.weight(f"w {i}", 1, WIDTH, WIDTH), one, to=f"w{i}")
        net.op("Identity", net.weight(f"b {i}", WIDTH), to=f"b{i}")


def interleaved(net):
    """Even columns make one layer, odd ones the other."""
    w, b = net.weight("w", WIDTH, 2 * WIDTH), net.weight("b", 2 * WIDTH)
    two, end = net.constant("two", np.array([2])), net.constant("end", np.array([2**62]))
    for i in range(2):
        start = net.constant(f"start{i}", np.array([i]))
        for name, axis in ((w, 1), (b, 0)):
            at = net.constant(f"axis {name}{i}", np.array([axis]))
            net.op("Slice", name, start, end, at, two, to=f"{name}{i}")


def by_computed_bounds(net):
    """Bounds that operators compute of constants, as exporters write them."""
    w, b = net.weight("w", WIDTH, 2 * WIDTH), net.weight("b", 2 * WIDTH)
    line = net.constant("line", np.array([-1]))
    for i in range(2):
        bounds = []
        for name, value in (("start", i * WIDTH), ("end", (i + 1) * WIDTH), ("axis", -1)):
            number = net.constant(f"{name}{i}", np.array(value // 2))
            scalar = net.op(
                "Add",
                number,
                net.constant(f"{name}{i} rest", np.array(value - value // 2)),
                to=f"{name}{i} sum",
            )
            bounds.append(net.op("Reshape", scalar, line, to=f"{name}{i} line"))
        for name in (w, b):
            part = net.op("Slice", name, *bounds, to=f"{name}{i} cut")
            net.op("CastLike", part, "input", to=f"{name}{i}")


class PartsNet(models.Net):
    """A net whose nodes may have several results."""

    def several(self, op, *inputs, to, **attributes):
        self._nodes.append(helper.make_node(op, inputs, to, name=f"node_{to[0]}", **attributes))


CASES = (by_slices, by_split, stacked, flat, relayed, interleaved, by_computed_bounds)


def finished(net):
    whole(net)
    return net.model({"input": SIDES}, {"output": SIDES})


def step(model, **options):
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact", **options)
    feeds = models.random_inputs(model, BATCH)
    return engine, engine.step(feeds, np.zeros((BATCH, WIDTH), np.float32))


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_sliced_weights_have_natural_gradients_of_separate_weights(build):
    net = PartsNet()
    build(net)
    model = finished(net)
    values = ["w0", "b0", "w1", "b1"]
    trace = ke.load_model(model).run(models.random_inputs(model, BATCH))
    plain = models.Net()
    for name in values:
        plain.constant(name, np.array(trace[name]))
    expected = step(finished(plain))[1]
    engine, found = step(model)
    assert [layer.kind for layer in engine.layers] == ["fully_connected"] * 2
    # What the graph makes of natural gradients in place of the weights: theirs, moved about.
    moved = ke.load_model(model).run(
        models.random_inputs(model, BATCH), parameters=found.natural_gradients
    )
    for name in values:
        wanted = expected.natural_gradients[name]
        np.testing.assert_allclose(
            moved[name], wanted, atol=SINGLE * np.abs(wanted).max(), err_msg=name
        )


def test_report_lists_slices_of_parameters():
    net = PartsNet()
    by_slices(net)
    engine = ke.Engine.from_onnx(finished(net), loss="normal")
    assert [(layer.parameters, layer.parts, layer.key) for layer in engine.layers] == [
        (("w", "b"), ("[:, 0:4]", "[0:4]"), ("w0", "b0")),
        (("w", "b"), ("[:, 4:8]", "[4:8]"), ("w1", "b1")),
    ]


def test_unread_entries_are_divided_by_damping():
    net = models.Net()
    cut(net, net.weight("w", WIDTH, WIDTH + 2), 1, 0, WIDTH, "cut")
    net.op("MatMul", "input", "cut", to="output")
    engine, result = step(net.model({"input": SIDES}, {"output": SIDES}), damping=0.5)
    assert not result.natural_gradients["w"][:, WIDTH:].any()
    ones = np.ones((WIDTH, WIDTH + 2), np.float32)
    np.testing.assert_array_equal(engine.precondition({"w": ones})["w"][:, WIDTH:], 2)


def test_parameter_with_overlapping_slices_is_generic():
    net = models.Net()
    w = net.weight("w", WIDTH, WIDTH + 1)
    for i in range(2):
        net.op("MatMul", "input", cut(net, w, 1, i, WIDTH + i, f"w{i}"), to=f"s{i}")
    net.op("Add", "s0", "s1", to="output")
    engine = ke.Engine.from_onnx(net.model({"input": SIDES}, {"output": SIDES}), loss="normal")
    (layer,) = engine.layers
    assert (layer.kind, layer.reason) == ("generic", "read in parts that overlap")


def test_slice_without_layer_is_generic():
    net = models.Net()
    w = net.weight("w", 2, WIDTH, WIDTH)
    first, second = (
        net.op("Gather", w, net.constant(f"at{i}", np.array(i)), to=f"w{i}") for i in range(2)
    )
    net.op("MatMul", "input", first, to="s")
    net.op("Mul", net.op("ReduceSum", second, to="sum", keepdims=0), "s", to="output")
    engine, result = step(net.model({"input": SIDES}, {"output": SIDES}), damping=0.5)
    dense, rest = engine.layers
    assert (dense.kind, dense.parts) == ("fully_connected", ("[0:1, :, :]",))
    assert (rest.kind, rest.parts, rest.parameters) == ("generic", ("[1:2, :, :]",), ("w",))
    found, g = result.natural_gradients["w"][1], result.gradients["w"][1]
    # Every entry of the sum has the same gradient, hence the same curvature.
    np.testing.assert_allclose(found / g, (found / g)[0, 0], rtol=SINGLE)
    assert 0 < found[0, 0] / g[0, 0] < 2


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (np.s_[:2], "[0:2, :]"),
        (np.s_[:, 1:4:2], "[:, 1:4:2]"),
        (np.s_[1, 2:3], "[1:2, 2:3]"),
        (np.s_[[0, 1], [0, 1]], "[2 of 20 entries]"),
        (np.s_[:, [0, 1, 4]], "[12 of 20 entries]"),
    ],
)
def test_boxes_are_described_as_slices(part, text):
    index = np.arange(20).reshape(4, 5)[part]
    assert describe(index, (4, 5)) == text


def test_join_is_inverse_of_split():
    array = np.arange(12.0).reshape(3, 4)
    numbers = np.arange(12).reshape(3, 4)
    parts = [ParameterSlice("left", numbers[:, :2].T), ParameterSlice("right", numbers[:, 3:])]
    arrays = split({"w": parts}, {"w": array})
    np.testing.assert_array_equal(arrays["left"], array[:, :2].T)
    expected = array.copy()
    expected[:, 2] *= 7
    np.testing.assert_array_equal(join(parts, arrays, array, rest=7), expected)


def test_slice_copies_index_to_device_once(monkeypatch):
    uploads = []

    class Module:
        @staticmethod
        def asarray(value):
            uploads.append(value)
            return cupy_standin.ndarray(value)

    monkeypatch.setattr(parameter_slices, "array_module", lambda array: Module)
    index = np.array([[4, 1], [0, 3]])
    part, values = ParameterSlice("part", index), np.arange(6.0) ** 2
    for factor in (1, 2):
        array = cupy_standin.ndarray(factor * values)
        np.testing.assert_array_equal(part.read(array).get(), factor * values[index])
        part.write(array, cupy_standin.ndarray(-np.ones((2, 2))))
        expected = factor * values
        expected[index] = -1
        np.testing.assert_array_equal(array.get(), expected)
    assert len(uploads) == 1


def test_whole_slice_used_several_times_keeps_name():
    net = models.Net()
    w = cut(net, net.weight("w", WIDTH, WIDTH), 0, 0, 2**40, "all")
    x = net.op("Tanh", net.op("MatMul", "input", w, to="s"), to="t")
    net.op("MatMul", x, w, to="output")
    engine, _ = step(net.model({"input": SIDES}, {"output": SIDES}))
    (layer,) = engine.layers
    assert (layer.kind, layer.key, layer.parts) == ("fully_connected_multi", "w", ("",))


def recurrence(op, gates, **attributes):
    """A recurrence over five steps and a dense layer on its last state."""
    net = PartsNet()
    x = net.op("Transpose", "input", to="steps", perm=[1, 0, 2])
    w, r = net.weight("W", 1, gates * 3, WIDTH), net.weight("R", 1, gates * 3, 3)
    b = net.weight("B", 1, 6 * gates)
    net.several(op, x, w, r, b, to=("all", "last"), hidden_size=3, **attributes)
    flat = net.op("Flatten", "last", to="flat", axis=2)
    state = net.op("Reshape", flat, net.constant("sides", np.array([-1, 3])), to="state")
    net.op("Gemm", state, net.weight("w", 3, 2), net.weight("b", 2), to="output")
    return net.model({"input": ["batch", 5, WIDTH]}, {"output": ["batch", 2]})


RECURRENCES = {
    "LSTM": ("LSTM", 4, {}),
    "GRU": ("GRU", 3, {}),
    "GRU, reset after": ("GRU", 3, {"linear_before_reset": 1}),
    "RNN": ("RNN", 1, {}),
}


@pytest.mark.parametrize("approximation", ["kron_indep", "kron_series_1"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrence_weights_have_one_use_per_step(name, approximation):
    op, gates, attributes = RECURRENCES[name]
    model = recurrence(op, gates, **attributes)
    engine = ke.Engine.from_onnx(
        model, loss="normal", damping=1.0, approximations={"fully_connected_multi": approximation}
    )
    recurrent = [layer for layer in engine.layers if layer.parameters[0] in ("W", "R")]
    assert {len(layer.inputs) for layer in recurrent} == {5}
    assert {layer.kind for layer in engine.layers} == {"fully_connected_multi", "fully_connected"}
    assert {name for layer in recurrent for name in layer.parameters} == {"W", "R", "B"}
    result = engine.step(models.random_inputs(model, BATCH), np.zeros((BATCH, 2), np.float32))
    back = engine.precondition(result.natural_gradients, exp=1)
    for key, gradient in result.gradients.items():
        # Multiplying and inverting loses digits by the condition of the block: λ = 1.
        np.testing.assert_allclose(back[key], gradient, atol=1e-4 * np.abs(gradient).max())


def unrolled(op):
    """The same recurrence step by step, of plain dense layers with a bias each."""
    source = recurrence(*RECURRENCES[op][:2])
    initializers = {entry.name: numpy_helper.to_array(entry) for entry in source.graph.initializer}
    net = models.Net()
    names = {
        "W": initializers["W"][0],
        "R": initializers["R"][0],
        "w": initializers["w"],
        "b": initializers["b"],
    }
    names |= dict(zip(("Wb", "Rb"), np.split(initializers["B"][0], 2), strict=True))
    for name, values in names.items():
        net.constant(name, values)
    net.constant("nothing", np.zeros((WIDTH, 3), np.float32))
    h = c = ""
    for t in range(5):
        at = net.constant(f"at {t}", np.array(t))
        x = net.op("Gather", "input", at, to=f"x {t}", axis=1)
        h = h or net.op("MatMul", x, "nothing", to="zero")
        both = [net.op("Gemm", x, "W", "Wb", to=f"W {t}", transB=1),
                net.op("Gemm", h, "R", "Rb", to=f"R {t}", transB=1)]  # fmt: skip
        s = net.op("Add", *both, to=f"s {t}")
        h, c = _STEPS[op](net, s, c, t)
    net.op("Gemm", h, "w", "b", to="output")
    return net.model({"input": ["batch", 5, WIDTH]}, {"output": ["batch", 2]})


def _plain_step(net, s, c, t):
    return net.op("Tanh", s, to=f"h {t}"), c


def _gated_step(net, s, c, t):
    """Gates in the order of ONNX: input, output, forget, cell."""
    cuts = [net.op("Slice", s, *(net.constant(f"{name} {t} {k}", np.array([v])) for name, v in
            (("from", 3 * k), ("to", 3 * k + 3), ("along", 1))), to=f"gate {t} {k}")
            for k in range(4)]  # fmt: skip
    i, o, f = (net.op("Sigmoid", cut, to=f"{cut} open") for cut in cuts[:3])
    new = net.op("Mul", i, net.op("Tanh", cuts[3], to=f"cell {t}"), to=f"new {t}")
    c = net.op("Add", net.op("Mul", f, c, to=f"kept {t}"), new, to=f"c {t}") if c else new
    return net.op("Mul", o, net.op("Tanh", c, to=f"bent {t}"), to=f"h {t}"), c


_STEPS = {"RNN": _plain_step, "LSTM": _gated_step}


@pytest.mark.parametrize("op", _STEPS)
def test_recurrence_has_natural_gradients_of_unrolled_dense_layers(op):
    options = {"approximations": {"fully_connected_multi": "kron_indep"}}
    targets = np.random.default_rng(1).standard_normal((BATCH, 2)).astype(np.float32)
    found, plain = (
        ke.precondition(
            model,
            models.random_inputs(model, BATCH),
            targets,
            "normal",
            estimation_mode="empirical",
            damping=0.1,
            trainable=trainable,
            **options,
        ).natural_gradients
        for model, trainable in (
            (recurrence(*RECURRENCES[op][:2]), None),
            (unrolled(op), ["W", "R", "Wb", "Rb", "w", "b"]),
        )
    )
    expected = {name: plain[name] for name in ("w", "b")}
    expected |= {name: plain[name][None] for name in ("W", "R")}
    expected["B"] = np.concatenate([plain["Wb"], plain["Rb"]])[None]
    for name, gradient in expected.items():
        atol = SINGLE * np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)

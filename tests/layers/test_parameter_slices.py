"""Weights kept in another form by the file: the same numbers as where they are written plainly."""

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.layers import parameter_slices
from kfac_engine.layers.parameter_slices import ParameterSlice, describe_part, join, split
from tests import models
from tests.backend import cupy_standin

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
BATCH, WIDTH = 6, 4


# Two dense layers and their sum, and the nodes that make their weights of what the file keeps.
WHOLE = """s0 = Gemm(input, w0, b0)  t0 = Tanh(s0)  s1 = Gemm(input, w1, b1)  t1 = Tanh(s1)
    output = Add(t0, t1)"""
CASES = {
    "by slices": (
        "w(4,8) b(8) last=-1 one=1 zero=0 four=4 eight=8",
        """w0 = Slice(w, zero, four, one)  b0 = Slice(b, zero, four, last)
           w1 = Slice(w, four, eight, one)  b1 = Slice(b, four, eight, last)""",
    ),
    "by split": (
        "w(8,4) b(8)",
        """u0, u1 = Split<axis=0, num_outputs=2>(w)  b0, b1 = Split<num_outputs=2>(b)
           w0 = Transpose(u0)  w1 = Transpose(u1)""",
    ),
    "stacked": (
        "w(2,4,4) b(2,4) zero:0 one:1",
        """w0 = Gather(w, zero)  b0 = Gather(b, zero)
           w1 = Gather(w, one)  b1 = Gather(b, one)""",
    ),
    # All weights in one vector, as optimisers of flat parameters leave them.
    "flat": (
        "w(32) b(8) square=4,4 zero=0 four=4 eight=8 half=16 end=32",
        """u0 = Slice(w, zero, half, zero)  w0 = Reshape(u0, square)
           u1 = Slice(w, half, end, zero)  w1 = Reshape(u1, square)
           b0 = Slice(b, zero, four, zero)  b1 = Slice(b, four, eight, zero)""",
    ),
    "relayed": (
        "u(1,4,4) v(4) x(1,4,4) y(4) zero=0",
        """w0 = Squeeze(u, zero)  b0 = Identity(v)  w1 = Squeeze(x, zero)  b1 = Identity(y)""",
    ),
    # Even columns make one layer, odd ones the other.
    "interleaved": (
        f"w(4,8) b(8) zero=0 one=1 two=2 end={2**62}",
        """w0 = Slice(w, zero, end, one, two)  b0 = Slice(b, zero, end, zero, two)
           w1 = Slice(w, one, end, one, two)  b1 = Slice(b, one, end, zero, two)""",
    ),
    # Bounds that operators compute of constants, as exporters write them.
    "by computed bounds": (
        "w(4,8) b(8) line=-1 less:-1 zero:0 two:2 four:4",
        """u = Add(zero, zero)  v = Add(two, two)  x = Add(four, four)  y = Add(less, zero)
           from = Reshape(u, line)  middle = Reshape(v, line)
           to = Reshape(x, line)  last = Reshape(y, line)
           w2 = Slice(w, from, middle, last)  b2 = Slice(b, from, middle, last)
           w3 = Slice(w, middle, to, last)  b3 = Slice(b, middle, to, last)
           w0 = CastLike(w2, input)  b0 = CastLike(b2, input)
           w1 = CastLike(w3, input)  b1 = CastLike(b3, input)""",
    ),
}


def sliced(name):
    constants, nodes = CASES[name]
    return models.written("batch,4", constants, f"{nodes} {WHOLE}")


def step(model, **options):
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact", **options)
    feeds = models.random_inputs(model, BATCH)
    return engine, engine.step(feeds, np.zeros((BATCH, WIDTH), np.float32))


@pytest.mark.parametrize("name", CASES)
def test_sliced_weights_have_natural_gradients_of_separate_weights(name):
    model = sliced(name)
    values = ["w0", "b0", "w1", "b1"]
    trace = ke.load_model(model).run(models.random_inputs(model, BATCH))
    plain = models.written("batch,4", "", WHOLE)
    plain.graph.initializer.extend(numpy_helper.from_array(trace[v], v) for v in values)
    expected = step(plain)[1]
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
    engine = ke.Engine.from_onnx(sliced("by slices"), loss="normal")
    assert [(layer.parameters, layer.parts, layer.key) for layer in engine.layers] == [
        (("w", "b"), ("[:, 0:4]", "[0:4]"), ("w0", "b0")),
        (("w", "b"), ("[:, 4:8]", "[4:8]"), ("w1", "b1")),
    ]


def test_unread_entries_are_divided_by_damping():
    nodes = "cut = Slice(w, zero, four, one)  output = MatMul(input, cut)"
    model = models.written("batch,4", "w(4,6) zero=0 four=4 one=1", nodes)
    engine, result = step(model, damping=0.5)
    assert not result.natural_gradients["w"][:, WIDTH:].any()
    ones = np.ones((WIDTH, WIDTH + 2), np.float32)
    np.testing.assert_array_equal(engine.precondition({"w": ones})["w"][:, WIDTH:], 2)


def test_parameter_with_overlapping_slices_is_generic():
    model = models.written(
        "batch,4",
        "w(4,5) zero=0 one=1 four=4 five=5",
        """w0 = Slice(w, zero, four, one)  s0 = MatMul(input, w0)
           w1 = Slice(w, one, five, one)  s1 = MatMul(input, w1)  output = Add(s0, s1)""",
    )
    (layer,) = ke.Engine.from_onnx(model, loss="normal").layers
    assert (layer.kind, layer.reason) == ("generic", "read in parts that overlap")


def test_slice_without_layer_is_generic():
    model = models.written(
        "batch,4",
        "w(2,4,4) zero:0 one:1",
        """first = Gather(w, zero)  s = MatMul(input, first)  second = Gather(w, one)
           sum = ReduceSum<keepdims=0>(second)  output = Mul(sum, s)""",
    )
    engine, result = step(model, damping=0.5)
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
    assert describe_part(index, (4, 5)) == text


@pytest.mark.parametrize(
    "part",
    [
        np.s_[:, 1:4],
        np.s_[1::2, ::3],
        np.s_[2:3, 4],
        np.s_[1, 2],
        np.s_[::-1],
        np.s_[:, [0, 1, 4]],
        np.s_[:0],
    ],
    ids=str,
)
def test_entries_are_those_of_their_positions(part):
    array = np.arange(20.0).reshape(4, 5)
    for index in (np.arange(20).reshape(4, 5)[part], np.arange(20).reshape(4, 5)[part].T):
        read = ParameterSlice("w", index).read(array)
        np.testing.assert_array_equal(read, array.reshape(-1)[index], strict=True)
        assert read.strides == array.reshape(-1)[index].strides
        read[...] = -1  # a copy
        flat, expected = array.copy().reshape(-1), array.copy().reshape(-1)
        expected[index] = 7 * index
        ParameterSlice("w", index).write(flat, 7 * index)
        np.testing.assert_array_equal(flat, expected)
    assert array.min() == 0


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
    nodes = """all = Slice(w, zero, end, zero)  s = MatMul(input, all)  t = Tanh(s)
        output = MatMul(t, all)"""
    engine, _ = step(models.written("batch,4", f"w(4,4) zero=0 end={2**40}", nodes))
    (layer,) = engine.layers
    assert (layer.kind, layer.key, layer.parts) == ("fully_connected_multi", "w", ("",))


def recurrence(op, gates, options=""):
    """A recurrence over five steps and a dense layer on its last state."""
    return models.written(
        f"batch,5,{WIDTH} -> batch,2",
        f"W(1,{3 * gates},{WIDTH}) R(1,{3 * gates},3) B(1,{6 * gates}) w(3,2) b(2) sides=-1,3",
        f"""steps = Transpose<perm=[1, 0, 2]>(input)
            all, last = {op}<hidden_size=3{options}>(steps, W, R, B)
            flat = Flatten<axis=2>(last)  state = Reshape(flat, sides)
            output = Gemm(state, w, b)""",
    )


RECURRENCES = {
    "LSTM": ("LSTM", 4),
    "GRU": ("GRU", 3),
    "GRU, reset after": ("GRU", 3, ", linear_before_reset=1"),
    "RNN": ("RNN", 1),
}


@pytest.mark.parametrize("approximation", ["kron_indep", "kron_series_1"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrence_weights_have_one_use_per_step(name, approximation):
    model = recurrence(*RECURRENCES[name])
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


# Of the sums of step {t}, its state and, of the LSTM, its cell. Gates in the order of ONNX: input,
# output, forget, cell.
STEPS = {
    "RNN": "h{t} = Tanh(s{t})  ",
    "LSTM": """i{t}, o{t}, f{t}, a{t} = Split<axis=1, num_outputs=4>(s{t})
        i_{t} = Sigmoid(i{t})  o_{t} = Sigmoid(o{t})  f_{t} = Sigmoid(f{t})  a_{t} = Tanh(a{t})
        new{t} = Mul(i_{t}, a_{t})  kept{t} = Mul(f_{t}, c{before})  c{t} = Add(kept{t}, new{t})
        bent{t} = Tanh(c{t})  h{t} = Mul(o_{t}, bent{t})  """,
}


def unrolled(op):
    """The same recurrence step by step, of plain dense layers with a bias each."""
    arrays = {
        e.name: numpy_helper.to_array(e) for e in recurrence(*RECURRENCES[op]).graph.initializer
    }
    arrays["Wb"], arrays["Rb"] = np.split(arrays.pop("B")[0], 2)
    arrays |= {"W": arrays["W"][0], "R": arrays["R"][0], "nothing": np.zeros((WIDTH, 3), "f4")}
    steps = """x{t} = Gather<axis=1>(input, at{t})  w{t} = Gemm<transB=1>(x{t}, W, Wb)
        r{t} = Gemm<transB=1>(h{before}, R, Rb)  s{t} = Add(w{t}, r{t})  """
    nodes = "first = Gather<axis=1>(input, at1)  h0 = MatMul(first, nothing)  c0 = Identity(h0)  "
    for t in range(1, 6):
        nodes += (steps + STEPS[op]).format(t=t, before=t - 1)
    model = models.written(
        f"batch,5,{WIDTH} -> batch,2",
        "at1:0 at2:1 at3:2 at4:3 at5:4",
        nodes + "output = Gemm(h5, w, b)",
    )
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items())
    return model


@pytest.mark.parametrize("op", STEPS)
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
            (recurrence(*RECURRENCES[op]), None),
            (unrolled(op), ["W", "R", "Wb", "Rb", "w", "b"]),
        )
    )
    expected = {name: plain[name] for name in ("w", "b")}
    expected |= {name: plain[name][None] for name in ("W", "R")}
    expected["B"] = np.concatenate([plain["Wb"], plain["Rb"]])[None]
    for name, gradient in expected.items():
        atol = SINGLE * np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)

"""Inputs in other types than the file declares: what is converted, and what is refused."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke

RNG = np.random.default_rng(0)


def model(kind, nodes):
    proto = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 20, "ai.onnx.ml": 3]>
    g ({kind} x) => (float[n, 3] y) {{ {nodes} y = MatMul(h, W) }}""")
    rows = RNG.standard_normal((4, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(rows, "W"))
    return proto


NUMBERS = model("float[n, 4]", "h = Relu(x)")
DOUBLES = model("double[n, 4]", "d = Relu(x) h = Cast<to = 1>(d)")
IDS = model("int64[n]", "h = Gather(T, x)")
SHORT = model("int32[n]", "h = Gather(T, x)")
TEXTS = model("string[n, 1]", """k = ai.onnx.ml.LabelEncoder<
    keys_strings = ["a", "bb", "ccc"], values_int64s = [0, 1, 2]>(x)
    s = Reshape(k, flat) h = Gather(T, s)""")  # fmt: skip
for proto in (IDS, SHORT, TEXTS):
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "T"))
TEXTS.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "flat"))

REAL = RNG.standard_normal((6, 4)).astype(np.float32)
WHOLE = np.array([0, 3, 1, 2, 2, 0])
WORDS = np.array([["a"], ["bb"], ["ccc"], ["a"], ["bb"], ["a"]])
# Each has the model, the declared form of the input, and the same values in other types.
CONVERTED = {
    "float64 for float32": (NUMBERS, REAL, REAL.astype(np.float64)),
    "float16 for float32": (
        NUMBERS, REAL.astype(np.float16).astype(np.float32), REAL.astype(np.float16)),
    "float32 for float64": (DOUBLES, REAL.astype(np.float64), REAL),
    "int32 for int64": (IDS, WHOLE, WHOLE.astype(np.int32)),
    "uint8 for int64": (IDS, WHOLE, WHOLE.astype(np.uint8)),
    "int64 for int32": (SHORT, WHOLE.astype(np.int32), WHOLE),
    "text of NumPy": (TEXTS, WORDS.astype(object), WORDS),
}  # fmt: skip
Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("case", CONVERTED)
def test_the_same_values_in_another_type_give_the_same_results(case):
    proto, declared, other = CONVERTED[case]
    assert declared.dtype != other.dtype
    engine = ke.Engine.from_onnx(proto, loss="categorical", sample_inputs={"x": other})
    np.testing.assert_array_equal(engine.predict(other), engine.predict(declared))
    first, second = (engine.step(x, Y) for x in (declared, other))
    assert first.loss == second.loss
    np.testing.assert_array_equal(first.gradients["W"], second.gradients["W"])
    runs = [
        ke.fit(proto, (x, Y), epochs=2, batch_size=3, optimizer="adam").records
        for x in (declared, other)
    ]
    assert [r["loss"] for r in runs[0]] == [r["loss"] for r in runs[1]]


REFUSED = {
    "ids with fractions": (IDS, WHOLE.astype(np.float32), "float32, the model needs int64"),
    "whole numbers for real ones": (NUMBERS, np.ones((6, 4), np.int64), "the model needs float32"),
    "masks for ids": (IDS, WHOLE > 0, "bool, the model needs int64"),
    "numbers for text": (TEXTS, WHOLE[:, None], "the model needs object"),
    "text for numbers": (NUMBERS, np.full((6, 4), "1"), "the model needs float32"),
    "a number beyond int32": (SHORT, np.array([0, 1, 2**40]), r"1099511627776 at index \(2,\)"),
    "a number beyond float32": (NUMBERS, REAL.astype(np.float64) * 1e300, "beyond the range"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_type_that_would_change_values_is_refused(case):
    proto, x, message = REFUSED[case]
    engine = ke.Engine.from_onnx(proto, loss="categorical")
    with pytest.raises(ke.InputError, match=message):
        engine.gradients(x, Y[: len(x)])


def test_infinity_remains_infinity():
    engine = ke.Engine.from_onnx(NUMBERS, loss="categorical")
    x = REAL.astype(np.float64)
    x[0, 0] = -np.inf  # Relu returns 0
    declared = x.astype(np.float32)
    assert engine.loss(x, Y) == engine.loss(declared, Y)

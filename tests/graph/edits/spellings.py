"""A small file for each spelling of a dense layer before an output, and runs of files."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper, parser

D, OLD, NEW = 6, 10, 4
MICROSOFT = ', "com.microsoft": 1'


def softmax(z: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(z - z.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@dataclass(frozen=True)
class Row:
    """A file of a body (a dense layer and Tanh to ``h``) and a head."""

    nodes: str  # text of the nodes after ``h``
    weights: dict[str, tuple[int, ...]]  # shapes of float constants
    tail: Callable[[np.ndarray], np.ndarray] = lambda z: z  # what follows the head, in NumPy
    flipped: bool = False  # whether the head's weight has its outputs first
    whole: dict[str, np.ndarray] | None = None  # integer constants
    old: int = OLD  # number of outputs of the old head

    @property
    def model(self) -> onnx.ModelProto:
        model = parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 18{MICROSOFT}]> '
            f"m (float[N,5] x) => (float[N,{self.old}] y) "
            f"{{ first = MatMul (x, body)  h = Tanh (first)  {self.nodes} }}"
        )
        rng = np.random.default_rng(0)
        for name, shape in {"body": (5, D), **self.weights}.items():
            array = rng.normal(size=shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        for name, array in (self.whole or {}).items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return model


def ints(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


MATMUL, GEMM = "y = MatMul (h, w)", "y = Gemm (h, w, b)"
INTEGERS = np.random.default_rng(1).integers(-9, 9, (D, OLD)).astype(np.int8)
ROWS = {
    "MatMul": Row(MATMUL, {"w": (D, OLD)}),
    "MatMul and Add": Row("z = MatMul (h, w)  y = Add (z, b)", {"w": (D, OLD), "b": (OLD,)}),
    "Add, bias first": Row("z = MatMul (h, w)  y = Add (b, z)", {"w": (D, OLD), "b": (1, OLD)}),
    "Gemm": Row(GEMM, {"w": (D, OLD), "b": (OLD,)}),
    "Gemm of torch": Row(
        "y = Gemm <transB = 1> (h, w, b)", {"w": (OLD, D), "b": (OLD,)}, flipped=True),
    "Gemm without bias": Row("y = Gemm <transB = 1> (h, w)", {"w": (OLD, D)}, flipped=True),
    "Transpose of a weight": Row(
        "t = Transpose <perm = [1, 0]> (w)  y = MatMul (h, t)", {"w": (OLD, D)}),
    "Softmax": Row("z = Gemm (h, w, b)  y = Softmax (z)", {"w": (D, OLD), "b": (OLD,)}, softmax),
    "Softmax in parts": Row(
        "z = MatMul (h, w)  m = ReduceMax (z, last)  c = Sub (z, m)  e = Exp (c) "
        "t = ReduceSum (e, last)  y = Div (e, t)",
        {"w": (D, OLD)}, softmax, whole={"last": ints(-1)},
    ),
    "Softmax of JAX": Row(
        "z = MatMul (h, w)  m = ReduceMax <keepdims = 0> (z, last)  c = Max (least, m) "
        "q = Shape <end = 1> (x)  r = Concat <axis = 0> (q, one)  column = Cast <to = 7> (r) "
        "a = Reshape (c, column)  k = Expand (a, column)  d = Sub (z, k)  e = Exp (d) "
        "t = ReduceSum <keepdims = 0> (e, last)  u = Reshape (t, column) "
        "f = Concat <axis = 0> (q, n)  v = Expand (u, f)  y = Div (e, v)",
        {"w": (D, OLD)}, softmax,
        whole={"last": ints(-1), "one": ints(1), "n": ints(OLD), "least": np.float32(-np.inf)},
    ),
    "Softmax at a temperature": Row(
        "z = MatMul (h, w)  c = Mul (z, two)  y = Softmax (c)", {"w": (D, OLD)},
        lambda z: softmax(2 * z), whole={"two": np.float32(2)}),
    "Reshape": Row(
        "z = MatMul (h, w)  y = Reshape (z, to)", {"w": (D, OLD)}, whole={"to": ints(-1, OLD)}),
    "Reshape with Concat": Row(
        "z = MatMul (h, w)  q = Shape <end = 1> (x)  to = Concat <axis = 0> (q, n) "
        "y = Reshape (z, to)", {"w": (D, OLD)}, whole={"n": ints(OLD)},
    ),
    "convolution": Row(
        "i = Reshape (h, to)  z = Conv (i, w, b)  p = GlobalAveragePool (z)  y = Flatten (p)",
        {"w": (OLD, D, 1, 1), "b": (OLD,)}, whole={"to": ints(-1, D, 1, 1)}, flipped=True),
    "convolution and Add": Row(
        "i = Reshape (h, to)  z = Conv (i, w)  a = Add (z, b)  y = Reshape (a, flat)",
        {"w": (OLD, D, 1, 1), "b": (OLD, 1, 1)},
        whole={"to": ints(-1, D, 1, 1), "flat": ints(0, OLD)}, flipped=True),
    "transposed convolution": Row(
        "i = Reshape (h, to)  z = ConvTranspose (i, w, b)  p = GlobalAveragePool (z)  "
        "y = Flatten (p)",
        {"w": (D, OLD, 1, 1), "b": (OLD,)}, whole={"to": ints(-1, D, 1, 1)},
    ),
    "dequantized": Row(
        "v = DequantizeLinear <axis = 1> (q, s)  z = MatMul (h, v)  y = Add (z, b)",
        {"s": (OLD,), "b": (OLD,)}, whole={"q": INTEGERS}),
    "rounded results": Row(
        "v = DequantizeLinear (q, s)  z = MatMul (h, v)  r = QuantizeLinear (z, s, o) "
        "y = DequantizeLinear (r, s, o)",
        {"s": ()}, whole={"q": INTEGERS, "o": np.int8(0)},
    ),
    "four bits": Row(
        f"y = com.microsoft.MatMulNBits <K = {D}, N = {OLD}, bits = 4, block_size = 16> (h, q, s)",
        {"s": (OLD,)}, whole={"q": np.zeros((OLD, 1, 8), np.uint8)}),
    "eight bits, bias": Row(
        f"y = com.microsoft.MatMulNBits <K = {D}, N = {OLD}, bits = 8, block_size = 16>"
        " (h, q, s, , , b)",
        {"s": (OLD,), "b": (OLD,)}, whole={"q": np.zeros((OLD, 1, 16), np.uint8)},
    ),
    "dynamic integers": Row(
        "r, k, o = DynamicQuantizeLinear (h)  i = MatMulInteger (r, q, o, p)  "
        "c = Cast <to = 1> (i)  m = Mul (k, s)  z = Mul (c, m)  y = Add (z, b)",
        {"s": (), "b": (OLD,)},
        whole={"q": INTEGERS, "p": np.int8(0)},
    ),
    "columns of dynamic integers": Row(
        "r, k, o = DynamicQuantizeLinear (h)  i = MatMulInteger (r, q, o, p)  "
        "c = Cast <to = 1> (i)  m = Mul (s, k)  z = Mul (m, c)  y = Add (z, b)",
        {"s": (OLD,), "b": (OLD,)},
        whole={"q": INTEGERS, "p": np.arange(OLD, dtype=np.int8)},
    ),
    "dynamic product": Row(
        "y = com.microsoft.DynamicQuantizeMatMul (h, q, s, p, b)", {"s": (), "b": (OLD,)},
        whole={"q": INTEGERS, "p": np.int8(0)}),
    "fused": Row(
        "y = com.microsoft.FusedMatMul <transB = 1> (h, w)", {"w": (OLD, D)}, flipped=True),
    "tied": Row(
        "i = ArgMax <axis = 1, keepdims = 0> (h)  f = Gather (w, i)  g = Add (h, f) "
        "t = Transpose (w)  y = MatMul (g, t)",
        {"w": (OLD, D)},
    ),
    "one probability": Row("z = MatMul (h, w)  y = Sigmoid (z)", {"w": (D, 1)}, old=1),
    "several probabilities": Row(
        "z = MatMul (h, w)  y = Sigmoid (z)", {"w": (D, OLD)}, lambda z: 1 / (1 + np.exp(-z))),
}  # fmt: skip


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *names: str) -> list[np.ndarray]:
    """Outputs, and inner values by name."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    declared = {entry.name for entry in shown.graph.output}
    shown.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in declared
    )
    session = ort.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names) or None, feeds)


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


def shape(model: onnx.ModelProto, output: str) -> tuple[str | int, ...]:
    entry = next(entry for entry in model.graph.output if entry.name == output)
    dims = entry.type.tensor_type.shape.dim
    return tuple(dim.dim_param or dim.dim_value for dim in dims)


X = np.random.default_rng(2).normal(size=(7, 5)).astype(np.float32)

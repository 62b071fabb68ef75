"""Models with one to three faults: each keeps to the schema of ONNX, but not to its meaning."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from tests import models
from tests.fuzz.graphs import random_model

Mutation = Callable[[np.random.Generator, onnx.ModelProto], None]

# Graphs with what the models of the tests lack: functions, bodies, old operator sets, quantizers.
_SQUARE = "float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}"
_NARROW = "float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[3] b = {1,2,3}"


def _tenths(count: int) -> str:
    return ", ".join(["0.1"] * count)


_TEXTS = {
    "loop": f"""18
        g (float[n,4] input) => (float[n,4] output) <{_SQUARE}, int64 k = {{3}}, bool go = {{1}}> {{
          output = Loop <body = b (int64 i, bool on, float[n,4] a) => (bool more, float[n,4] c) {{
            more = Identity(on)  m = MatMul(a, w)  c = Tanh(m) }}> (k, go, input) }}""",
    "scan": """18
        g (float[n,4] input) => (float[n,4] output)
        <float[4] w = {1,2,3,4}, float[4] s = {0,0,0,0}> {
          last, output = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] a)
            => (float[4] t, float[4] u) { m = Mul(a, w)  t = Add(h, m)  u = Tanh(t) }> (s, input) }
        """,
    "if": f"""18
        g (float[n,4] input) => (float[n,4] output) <{_SQUARE}, bool go = {{1}}> {{
          m = MatMul(input, w)
          output = If <then_branch = t () => (float[n,4] a) {{ a = Tanh(m) }},
                       else_branch = e () => (float[n,4] c) {{ c = Neg(m) }}> (go) }}""",
    "function": f"""18
        g (float[n,4] input) => (float[n,4] output) <{_SQUARE}> {{
          m = local.dense <alpha = 2.0> (input, w)  output = local.dense <alpha = 1.0> (m, w) }}
        <domain: "local", opset_import: ["": 18]>
        dense <alpha> (x, w) => (y) {{
          m = MatMul(x, w)  a = Constant <value_float : float = @alpha> ()  y = Mul(m, a) }}""",
    "old": f"""9
        g (float[n,4] input) => (float[n,3] output) <{_NARROW}> {{
          m = MatMul(input, w)  a = Add(m, b)  u = Unsqueeze <axes = [1]> (a)
          s = Squeeze <axes = [1]> (u)  output = LogSoftmax <axis = 1> (s) }}""",
    "oldest": f"""6
        g (float[2,4] input) => (float[2,3] output) <{_NARROW}> {{
          output = Gemm <broadcast = 1> (input, w, b) }}""",
    "quantized": f"""18
        g (float[n,4] input) => (float[n,4] output)
        <{_SQUARE}, float s = {{0.1}}, uint8 z = {{128}}> {{
          q = QuantizeLinear(input, s, z)  d = DequantizeLinear(q, s, z)
          m = MatMul(d, w)  output = Relu(m) }}""",
    "recurrent": f"""18
        g (float[5,n,4] input) => (float[5,1,n,2] output)
        <float[1,8,4] w = {{{_tenths(32)}}}, float[1,8,2] r = {{{_tenths(16)}}}> {{
          output, h, c = LSTM <hidden_size = 2> (input, w, r) }}""",
    "resized": """18
        g (float[n,1,4,4] input) => (float[n,1,8,8] output)
        <float[1,1,1,1] w = {2}, float[4] s = {1,1,2,2}> {
          c = Conv(input, w)  output = Resize <mode = "linear"> (c, "", s) }""",
}


def _parsed(text: str) -> onnx.ModelProto:
    opset, _, graph = text.partition("\n")
    header = f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]>'
    return onnx.parser.parse_model(f"{header}\n{graph}")


BASES: dict[str, Callable[[int], onnx.ModelProto]] = {
    **{name: lambda _, make=make: make() for name, make in models.MODELS.items()},
    **{name: lambda _, text=text: _parsed(text) for name, text in _TEXTS.items()},
    "random": random_model,
}

_NUMBERS = (0, 1, -1, 2, 3, 7, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, 1e38, 1e-45, float("nan"), float("inf"))
_TEXT = ("", "input", "output", "\x1b[2J", "é\n", "x" * 70_000)
_OPERATORS = """
    Add MatMul Gemm Conv ConvTranspose Relu Softmax Reshape Transpose Concat Slice Gather Squeeze
    Unsqueeze Resize LayerNormalization BatchNormalization MaxPool AveragePool ReduceSum ReduceMax
    Einsum Expand Tile Pad Split TopK LSTM GRU Loop Scan If Constant ConstantOfShape Range Cast
    Where QuantizeLinear DequantizeLinear Attention Dropout GridSample RoiAlign DFT STFT OneHot
    Identity SequenceConstruct StringConcat NonZero Shape Size CumSum Nothing
""".split()  # noqa: SIM905 (a list literal would be twenty lines)


def mutated(seed: int, base: str | None = None) -> onnx.ModelProto:
    """A model of ``BASES``, or the named one, with a few faults; the seed decides."""
    rng = np.random.default_rng(seed)
    model = onnx.ModelProto()
    model.CopyFrom(BASES[base or str(rng.choice(list(BASES)))](seed))
    for _ in range(int(rng.integers(1, 4))):
        mutation = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        try:
            mutation(rng, model)
        except (ValueError, TypeError, LookupError):  # it has nothing of the kind, or not any more
            continue
    return model


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    found = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    for node in list(found):
        for entry in node.attribute:
            found += entry.g.node
    return found


def _one(rng: np.random.Generator, entries: Sequence[object]) -> object:
    return entries[int(rng.integers(len(entries)))]


def _values(model: onnx.ModelProto) -> list[str]:
    names = [name for node in _nodes(model) for name in (*node.input, *node.output)]
    return [*names, *(entry.name for entry in model.graph.initializer), "", "input"]


def _rewire(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    node = _one(rng, _nodes(model))
    operands = _one(rng, [node.input, node.output])
    operands[int(rng.integers(len(operands)))] = str(_one(rng, _values(model)))


def _more_or_fewer_operands(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    node = _one(rng, _nodes(model))
    operands = _one(rng, [node.input, node.output])
    if rng.random() < 0.5:
        operands.append(str(_one(rng, _values(model))))
    else:
        del operands[int(rng.integers(len(operands)))]


def _other_operator(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    node = _one(rng, _nodes(model))
    node.op_type = str(_one(rng, _OPERATORS))
    node.domain = str(_one(rng, ["", "", "", "com.microsoft", "local", "ai.onnx"]))


def _fewer_or_more_nodes(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    nodes = model.graph.node
    index = int(rng.integers(len(nodes)))
    if rng.random() < 0.5:
        del nodes[index]
    else:
        nodes.append(nodes[index])


def _attribute(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    entries = [entry for node in _nodes(model) for entry in node.attribute]
    entry = _one(rng, entries)
    if entry.type == AttributeProto.INT:
        entry.i = int(_one(rng, _NUMBERS))
    elif entry.type == AttributeProto.FLOAT:
        entry.f = float(_one(rng, _FLOATS))
    elif entry.type == AttributeProto.STRING:
        entry.s = str(_one(rng, _TEXT)).encode()[: int(rng.integers(1, 99))]
    elif entry.type == AttributeProto.INTS:
        entry.ints[int(rng.integers(len(entry.ints)))] = int(_one(rng, _NUMBERS))
    elif entry.type == AttributeProto.GRAPH:
        body = _one(rng, [entry.g.input, entry.g.output, entry.g.node])
        del body[int(rng.integers(len(body)))]
    if rng.random() < 0.2:
        entry.type = int(rng.integers(15))


def _new_attribute(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    node = _one(rng, _nodes(model))
    name = str(_one(rng, ["axis", "axes", "perm", "alpha", "to", "group", "strides", "equation"]))
    value = _one(rng, [3, -1, 2**40, [0, 1], [1, -7, 2**33], 0.5, "ij,jk", [0.5]])
    node.attribute.append(helper.make_attribute(name, value))


def _tensor(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    tensor = _one(rng, model.graph.initializer)
    kind = int(rng.integers(6))
    if kind == 0:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = int(_one(rng, _NUMBERS))
    elif kind == 1:
        tensor.dims.append(int(_one(rng, _NUMBERS)))
    elif kind == 2:
        tensor.data_type = int(rng.integers(30))
    elif kind == 3:
        tensor.raw_data = bytes(tensor.raw_data[: int(rng.integers(9))])
    elif kind == 4:
        tensor.data_location = TensorProto.EXTERNAL
        for key in ("location", "offset", "length"):
            value = str(_one(rng, ["../x", "/etc/passwd", "9" * 30, "-1", "0", ""]))
            tensor.external_data.add(key=key, value=value)
    else:
        del tensor.dims[int(rng.integers(len(tensor.dims)))]


def _numbers(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    tensor = _one(rng, model.graph.initializer)
    array = onnx.numpy_helper.to_array(tensor).copy()
    values = _FLOATS if array.dtype.kind == "f" else (0, 1, 127)
    array.flat[int(rng.integers(array.size))] = _one(rng, values)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _declaration(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    graph = model.graph
    entry = _one(rng, [*graph.input, *graph.output, *graph.value_info])
    form = entry.type.tensor_type
    kind = int(rng.integers(5))
    if kind == 0:
        form.elem_type = int(rng.integers(30))
    elif kind == 1:
        form.shape.dim[int(rng.integers(len(form.shape.dim)))].dim_value = int(_one(rng, _NUMBERS))
    elif kind == 2:
        form.shape.dim.add(dim_param=str(_one(rng, _TEXT)))
    elif kind == 3:
        form.ClearField("shape")
    else:
        entry.name = str(_one(rng, [*_values(model), *_TEXT]))


def _border(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    border = _one(rng, [model.graph.input, model.graph.output])
    if rng.random() < 0.5:
        del border[int(rng.integers(len(border)))]
    else:
        name = str(_one(rng, _values(model)))
        border.append(helper.make_tensor_value_info(name, int(rng.integers(17)), ["n", 4]))


def _versions(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    kind = int(rng.integers(4))
    if kind == 0:
        model.opset_import[0].version = int(_one(rng, [*range(30), *_NUMBERS]))
    elif kind == 1:
        model.ir_version = int(_one(rng, [1, 3, 7, 99, -1]))
    elif kind == 2:
        del model.opset_import[:]
    else:
        model.opset_import.append(helper.make_opsetid("", int(rng.integers(30))))


MUTATIONS: tuple[Mutation, ...] = (
    _rewire, _rewire, _more_or_fewer_operands, _other_operator, _other_operator,
    _fewer_or_more_nodes, _attribute, _attribute, _new_attribute, _tensor, _numbers, _declaration,
    _border, _versions,
)  # fmt: skip

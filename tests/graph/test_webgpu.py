"""Convolutions in groups that WebGPU computes wrongly are written otherwise, with equal results."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.graph.passes.order import all_nodes
from kfac_engine.graph.webgpu import for_webgpu
from tests.comparing import assert_arrays_close
from tests.models import parsed

RNG = np.random.default_rng(0)
BRANCHES = "then_branch", "else_branch"


def convolution(groups, width, *, constant=True, bias=True, inside=False):
    """One convolution of eight channels, in the graph or in a branch."""
    shape = groups * width, 8 // groups, 3, 3
    weights = {"w": RNG.standard_normal(shape).astype(np.float32)}
    if bias:
        weights["b"] = RNG.standard_normal(shape[0]).astype(np.float32)
    conv = f"Conv <group = {groups}, pads = [1, 1, 1, 1]> ({', '.join(['x', *weights])})"
    nodes = f"[conv] y = {conv}"
    if inside:
        branches = (f"{n} = {n} () => (float[] z) {{ z = {conv} }}" for n in BRANCHES)
        nodes = f"y = If <{', '.join(branches)}> (go)"
    inputs = ["float[n,8,5,6] x"]
    if not constant:
        inputs += [f"float[{','.join(map(str, a.shape))}] {n}" for n, a in weights.items()]
    graph = f"g ({', '.join(inputs)}) => (float[a,b,c,d] y) {{ {nodes} }}"
    constants = (weights if constant else {}) | ({"go": True} if inside else {})
    return parsed(graph, constants), {} if constant else weights


def groups_of(graph, known=()):
    """Number of groups and outputs of each convolution whose filters are constants."""
    known = {**dict(known), **{e.name: e.dims[0] for e in graph.initializer if e.dims}}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from groups_of(attribute.g, known)
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type == "Conv" and group > 1 and node.input[1] in known:
            yield group, known[node.input[1]] // group


def run(model, feeds):
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)


@pytest.mark.parametrize("options", [{}, {"constant": False}, {"bias": False}, {"inside": True}])
@pytest.mark.parametrize(("groups", "width"), [(2, 5), (4, 9), (8, 6), (2, 4), (4, 8), (8, 1)])
def test_results_are_equal_and_widths_are_right(groups, width, options):
    model, weights = convolution(groups, width, **options)
    x = {"x": RNG.standard_normal((3, 8, 5, 6)).astype(np.float32), **weights}
    expected = run(model, x)[0]
    before = model.SerializeToString()
    found = for_webgpu(model)
    onnx.checker.check_model(found, full_check=True)
    np.testing.assert_allclose(run(found, x)[0], expected, rtol=1e-5, atol=1e-5)
    assert all(w <= 4 or w % 4 == 0 for _, w in groups_of(found.graph))
    wrong = width > 4 and width % 4
    assert bool(wrong) == (found.SerializeToString() != before)


@pytest.mark.parametrize(("count", "inside"), [(7, False), (8, False), (12, True), (60, False)])
def test_splits_have_few_parts_and_equal_results(count, inside):
    sizes = np.random.default_rng(count).integers(0, 3, count)
    parts = [f"y{k}" for k in range(count)]
    back = f"Concat<axis=1>({', '.join(parts[::-1])})"
    split = f"{', '.join(parts)} = Split<axis=1>(x, sizes)"
    nodes = f"{split}  y = {back}"
    if inside:
        branches = (f"{n} = {n} () => (float[a,b] z) {{ {split}  z = {back} }}" for n in BRANCHES)
        nodes = f"y = If <{', '.join(branches)}> (go)"
    graph = f"g (float[n,{sizes.sum()}] x) => (float[a,b] y) {{ {nodes} }}"
    model = parsed(graph, {"sizes": sizes} | ({"go": True} if inside else {}))
    x = {"x": RNG.standard_normal((3, sizes.sum())).astype(np.float32)}
    expected = run(model, x)[0]
    found = for_webgpu(model)
    onnx.checker.check_model(found, full_check=True)
    np.testing.assert_array_equal(run(found, x)[0], expected)
    splits = [len(n.output) for n in all_nodes(found.graph.node) if n.op_type == "Split"]
    assert max(splits) <= 7
    assert sum(splits) - len(splits) == (count - 1) * (2 if inside else 1)


def test_a_split_of_unknown_sizes_does_not_change():
    outputs = ", ".join(f"y{k}" for k in range(8))
    declared = ", ".join(f"float[a,b] y{k}" for k in range(8))
    graph = f"g (float[n,k] x) => ({declared}) {{ {outputs} = Split<axis=1, num_outputs=8>(x) }}"
    model = parsed(graph, {})
    before = model.SerializeToString()
    assert for_webgpu(model).SerializeToString() == before


def test_filters_of_unknown_shape_are_refused():
    model, _ = convolution(2, 5, constant=False)
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "outputs"
    model.graph.input[1].type.tensor_type.shape.dim[0].ClearField("dim_value")
    with pytest.raises(ke.UnsupportedError, match="conv"):
        for_webgpu(model)


def test_gradients_of_a_cnn_are_written_for_webgpu():
    images, labels = digits()
    feeds = {"image": images[:16], "targets": labels[:16]}
    plain, other = (
        ke.differentiate(demo_model("cnn"), "categorical", provider=provider)
        for provider in ("any", "webgpu")
    )
    assert any(w > 4 and w % 4 for _, w in groups_of(plain.graph))
    assert all(w <= 4 or w % 4 == 0 for _, w in groups_of(other.graph))
    for a, b in zip(run(plain, feeds), run(other, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)


def test_training_files_are_written_for_webgpu(tmp_path):
    images, labels = digits()
    results = []
    for provider in ("any", "webgpu"):
        files = ke.export_training(demo_model("cnn"), path=tmp_path / provider, provider=provider)
        results.append(files.run([({"image": images[:32]}, labels[:32])] * 3, steps=3))
        model = onnx.load(files.folder / "training.onnx")
        wrong = [w for _, w in groups_of(model.graph) if w > 4 and w % 4]
        assert bool(wrong) == (provider == "any")
    assert_arrays_close(results[1].state, results[0].state, rtol=1e-3, atol=1e-5)

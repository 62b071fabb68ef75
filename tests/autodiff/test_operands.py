"""Each operand of a fused operator changes the results as in its kernel, or is refused."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import defs
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

import kfac_engine as ke
from kfac_engine.autodiff.lowering import find_lowering, load_lowerings
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.linear_algebra import matmul_n_bits
from kfac_engine.graph.structure import Fact, Input
from kfac_engine.graph.write import build_model, serialize
from kfac_engine.runtime.lower import lowered
from tests.autodiff.test_microsoft import CASES, DOMAIN, HEADS, K, Q, V, case, real, whole
from tests.graph.running import assert_same, run_model

# Float32 kernels that sum in another order.
TOLERANCE = 2e-5
# Operands whose values decide the graph that is written; they are constants of a file.
CONSTANT = {"axis", "size", "frame_step", "frame_length"}
# ONNX Runtime refuses any other value than the number of keys.
DETERMINED = {("GroupQueryAttention", "total_sequence_length")}
# Standard operators with a definition instead of a rewrite, which are newer than opset 20.
RECENT = ("Attention", "RotaryEmbedding")
# Rewritten for another level of accuracy only: its derivative rule reads its operands.
RULES = {"com.microsoft::MatMulNBits"}
# Operands are any number of values or sequences, or they are read in training only.
WITHOUT_OPERANDS = {
    "If", "Loop", "Scan", "SequenceAt", "ConcatFromSequence", "SequenceLength",
    "OptionalGetElement", "SplitToSequence", "SequenceMap", "Dropout",
}  # fmt: skip


def standard(op, label, *operands, **attributes):
    return case(op, label, *operands, domain="", **attributes)


def recurrent(op, gates, *extra):
    parameters = real(1, gates * 4, 3), real(1, gates * 4, 4), real(1, gates * 8)
    return standard(op, "all", real(5, 2, 3), *parameters, whole([5, 3]), *extra, hidden_size=4)


BOXES = real(2, 4, low=0.5, high=1.5) + np.float32([0, 0, 3, 3])
MORE = (
    case("Trilu", "above", real(3, 3), whole(1, "int64")),
    case("MultiHeadAttention", "all", Q, K, V, real(24), whole([4, 2]), real(2, 2, 3, 4),
         num_heads=2),
    recurrent("LSTM", 4, real(1, 2, 4), real(1, 2, 4), real(1, 12)),
    recurrent("GRU", 3, real(1, 2, 4)),
    recurrent("RNN", 1, real(1, 2, 4)),
    standard("GridSample", "linear", real(1, 2, 4, 4), real(1, 3, 3, 2, low=-0.7, high=0.7)),
    standard("AffineGrid", "plane", real(2, 2, 3), whole([2, 1, 3, 4], "int64")),
    standard("DeformConv", "all", real(1, 2, 5, 5), real(2, 2, 2, 2), real(1, 8, 4, 4), real(2),
             real(1, 4, 4, 4), kernel_shape=(2, 2)),
    standard("RoiAlign", "average", real(2, 1, 6, 6), BOXES, whole([0, 1], "int64"),
             output_height=2, output_width=2),
    standard("MaxRoiPool", "whole", real(2, 1, 6, 6),
             np.float32([[0, 0, 0, 3.4, 3.4], [1, 0.4, 1, 5, 5]]), pooled_shape=(2, 2)),
    standard("STFT", "all", real(1, 16, 1), whole(4, "int64"), real(8), whole(8, "int64")),
    standard("Attention", "all", real(2, 2, 3, 4), real(2, 2, 3, 4), real(2, 2, 3, 4),
             real(3, 5), real(2, 2, 2, 4), real(2, 2, 2, 4), results=HEADS),
    standard("Attention", "lengths", real(2, 2, 3, 4), real(2, 2, 3, 4), real(2, 2, 3, 4), None,
             None, None, whole([3, 1], "int64")),
    standard("RotaryEmbedding", "all", real(2, 2, 3, 4), real(6, 2), real(6, 2),
             whole([[0, 1, 2], [3, 4, 5]], "int64")),
)  # fmt: skip


def declared():
    """Names of the operands of each operator that is rewritten, from its schema."""
    fused = {s.name: s for s in runtime.get_all_operator_schema() if s.domain == DOMAIN}
    result = {}
    for op in (op for op in (*load_lowerings(), *RECENT) if op not in RULES):
        domain, _, name = op.rpartition("::")
        if domain == DOMAIN and name in fused:
            result[op] = tuple(operand.name for operand in fused[name].inputs)
        elif not domain and defs.has(name) and name not in WITHOUT_OPERANDS:
            result[op] = tuple(operand.name for operand in defs.get_schema(name).inputs)
    return result


DECLARED = declared()


def qualified(fused):
    return f"{fused.domain}::{fused.op}" if fused.domain else fused.op


def present(fused):
    """Index and name of each operand that a case has."""
    names = DECLARED.get(qualified(fused), ())
    return (
        (i, name)
        for i, name in enumerate(names[: len(fused.operands)])
        if fused.operands[i] is not None
    )


def graph_of(fused):
    """The node of a case, with all operands as inputs but those of ``CONSTANT``."""
    names = dict(present(fused))
    fixed = {f"operand_{i}" for i, name in names.items() if name in CONSTANT}
    arrays = {f"operand_{i}": np.asarray(fused.operands[i]) for i in names}
    return replace(
        fused.graph,
        inputs=tuple(Input(n, a.dtype, a.shape) for n, a in arrays.items() if n not in fixed),
        constants={name: arrays[name] for name in fixed},
        opset=24 if qualified(fused) in RECENT else 20,
    )


def results(graph, feeds):
    model = build_model(
        graph.nodes, graph.inputs, graph.outputs, graph.constants, graph.opset,
        domains=graph.domains,
    )  # fmt: skip
    return run_model(serialize(model), feeds)


def altered(array):
    """Another valid operand of the same shape."""
    if array.dtype.kind == "f":
        waves = 0.3 * np.cos(np.arange(array.size)).reshape(array.shape)
        return (array + waves).astype(array.dtype)
    moved = np.roll(array, 1)
    if (moved == array).all():
        moved.flat[0] += -1 if moved.flat[0] > 0 else 1
    return moved


EVERY = [fused for fused in (*CASES, *MORE) if qualified(fused) in DECLARED]


@pytest.mark.parametrize("fused", EVERY, ids=str)
def test_every_operand_changes_the_results_as_the_kernel_does(fused):
    graph = graph_of(fused)
    feeds = {entry.name: np.asarray(fused.operands[int(entry.name[8:])]) for entry in graph.inputs}
    wrt = [entry.name for entry in graph.inputs if entry.dtype.kind == "f"]
    rewritten, _ = lowered(graph, wrt, feeds)
    assert qualified(fused) not in {node.qualified_op for node in rewritten.nodes}
    before = results(graph, feeds)
    assert_same(results(rewritten, feeds), before, TOLERANCE)
    for index, operand in present(fused):
        if (fused.op, operand) in DETERMINED or operand in CONSTANT:
            continue
        moved = {**feeds, f"operand_{index}": altered(feeds[f"operand_{index}"])}
        truth = results(graph, moved)
        assert any((truth[name] != before[name]).any() for name in before), operand
        assert_same(results(rewritten, moved), truth, TOLERANCE)


def test_operands_without_a_case_are_refused_by_name():
    for op, names in DECLARED.items():
        cases = [fused for fused in EVERY if qualified(fused) == op]
        covered = {name for fused in cases for _, name in present(fused)}
        for name in set(names) - covered:
            graph = graph_of(cases[0])
            facts = {n: Fact(np.asarray(o).dtype, np.shape(o)) for n, o in cases[0].feeds.items()}
            facts |= {n: Fact(a.dtype, a.shape) for n, a in cases[0].graph.constants.items()}
            facts["more"] = Fact(np.dtype("float32"), (2,))
            inputs = [*graph.nodes[0].inputs, *[""] * len(names)][: len(names)]
            inputs[names.index(name)] = "more"
            node = replace(graph.nodes[0], inputs=tuple(inputs))
            rewrite = find_lowering(node, graph)
            with pytest.raises(ke.UnsupportedOpError, match=f"'{name}'"):
                rewrite(LoweringBuilder(graph, facts, "new "), node)


# Number of results that each operator may have, with a case in which ONNX Runtime computes them.
RESULTS = {
    "EmbedLayerNormalization-segments": 3,
    "SkipLayerNormalization-plain": 4,
    "SkipSimplifiedLayerNormalization-all": 4,
    "Attention-other-sides": 2,
    "MultiHeadAttention-plain": 3,
    "GroupQueryAttention-plain": 4,
    "LSTM-all": 3,
    "GRU-all": 2,
}


@pytest.mark.parametrize("fused", [f for f in EVERY if str(f) in RESULTS], ids=str)
def test_results_that_nothing_reads_change_nothing(fused):
    graph = graph_of(fused)
    names = tuple(f"result_{i}" for i in range(RESULTS[str(fused)]))
    (node,) = graph.nodes
    graph = replace(graph, nodes=(replace(node, outputs=names),), outputs=names[:1])
    feeds = {entry.name: np.asarray(fused.operands[int(entry.name[8:])]) for entry in graph.inputs}
    wrt = [entry.name for entry in graph.inputs if entry.dtype.kind == "f"]
    rewritten, _ = lowered(graph, wrt, feeds)
    assert qualified(fused) not in {node.qualified_op for node in rewritten.nodes}
    assert_same(results(rewritten, feeds), results(graph, feeds), TOLERANCE)


def test_an_order_of_the_blocks_of_a_weight_has_no_derivative():
    (fused, *_) = (case for case in CASES if qualified(case) in RULES)
    (node,) = fused.graph.nodes
    node = replace(node, inputs=(*[*node.inputs, "", "", ""][:4], "order"))
    with pytest.raises(ke.UnsupportedOpError, match="g_idx"):
        matmul_n_bits(None, node, ("g",), {0})  # refused before the builder is used

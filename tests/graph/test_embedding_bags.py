"""Loops over bags of entries, as exporters of PyTorch write ``EmbeddingBag``."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.embedding_bags import without_bag_loops
from tests.comparing import assert_arrays_close

RNG = np.random.default_rng(0)
WEIGHTS = {
    "W": RNG.standard_normal((10, 4)).astype(np.float32),
    "V": RNG.standard_normal((4, 3)).astype(np.float32),
}
CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "true": np.array(True),
    "first": np.array([0]), "second": np.array([1]), "flat": np.array([-1]),
    "last": np.array([2**63 - 1]), "none": np.zeros((1, 4), np.float32), "width": np.array(5),
    "ones": np.ones(1, np.float32), "size": np.array(10), "padding": np.array(4),
    "nothing": np.array([], np.int64),
}  # fmt: skip

# The torchscript exporter: an iteration gathers the rows of a bag; a loop stacks the results.
STACKED = """
  number = Shape(ids) ends = Concat<axis = 0>(offsets, number)
  stops = Slice(ends, second, last, first, second)
  many = Shape(stops) bags = Gather<axis = 0>(many, zero)
  bag = Loop(bags, true) <body = iteration (int64 i, bool c) => (bool more, float[d] row) {
    a = Gather<axis = 0>(ends, i) b = Gather<axis = 0>(stops, i)
    start = Unsqueeze(a, first) stop = Unsqueeze(b, first)
    some = Slice(ids, start, stop, first) rows = Gather<axis = 0>(W, some)
    row = REDUCE<keepdims = 0>(rows, first) more = Identity(c)
  }>
  y = MatMul(bag, V)"""

# torch.onnx.export with dynamo: an iteration slices all rows; a loop inserts into a sequence.
SEQUENCE = """
  gathered = Gather(W, ids) all = Shape(ids) filled = Expand(ones, all)
  factor = Unsqueeze(filled, second) rows = Mul(gathered, factor)
  bags = Size(offsets) ends = Concat<axis = 0>(offsets, all)
  empty = SequenceEmpty() going = Less(zero, bags)
  index, results = Loop(, going, zero, empty) <body = iteration
    (int64 k, bool c, int64 i, seq(float[m, d]) before)
    => (bool more, int64 next, seq(float[m, d]) after) {
    at = Reshape(i, flat) after_at = Add(at, one) later = Add(at, two)
    start = Slice(ends, at, after_at) stop = Slice(ends, after_at, later)
    is_empty = Equal(start, stop)
    row = If(is_empty) <
      then_branch = nothing () => (float[m, d] r) { r = Identity(none) },
      else_branch = something () => (float[m, d] r) { BRANCH }>
    after = SequenceInsert(before, row) next = Add(i, one) more = Less(next, bags)
  }>
  bag = ConcatFromSequence<axis = 0>(results) y = MatMul(bag, V)"""
LAST = """final = Sub(bags, one) is_last = Equal(i, final)"""
BRANCHES = {
    "sum": "s = Slice(rows, start, stop) r = ReduceSum(s, first)",
    "mean": f"""s = Slice(rows, start, stop) {LAST} r = If(is_last) <
      then_branch = g1 () => (float[m, d] q) {{
        t = ReduceSum(s, first) n = Shape<start = 0, end = 1>(ids) e = Sub(n, start)
        full = Greater(e, zero) q = If(full) <
          then_branch = g2 () => (float[m, d] p) {{ f = Cast<to = 1>(e) p = Div(t, f) }},
          else_branch = g3 () => (float[m, d] p) {{ p = Identity(t) }}>
      }},
      else_branch = g4 () => (float[m, d] q) {{ q = ReduceMean(s, first) }}>""",
    "max": f"""{LAST} s = If(is_last) <
      then_branch = g1 () => (float[m, d] q) {{ q = Slice(rows, start, all) }},
      else_branch = g2 () => (float[m, d] q) {{ q = Slice(rows, start, stop) }}>
      r = ReduceMax(s, first)""",
}
# With padding_idx: a loop in the loop lists the entries of a bag whose ids are not 4.
PADDED = """
  gathered = Gather(W, ids) all = Size(ids) other_ids = Neg(ids)
  rows = Identity(gathered) bags = Size(offsets) number = Reshape(all, flat)
  ends = Concat<axis = 0>(offsets, number)
  empty = SequenceEmpty() going = Less(zero, bags)
  index, results = Loop(, going, zero, empty) <body = iteration
    (int64 k, bool c, int64 i, seq(float[m, d]) before)
    => (bool more, int64 next, seq(float[m, d]) after) {
    start = Gather(ends, i) next = Add(i, one) stop = Gather(ends, next)
    some = Less(start, stop)
    behind, chosen = Loop(, some, start, nothing) <body = entries
      (int64 k2, bool c2, int64 j, int64[e] listed) => (bool again, int64 then, int64[e2] longer) {
      id = Gather(ids, j) negative = Less(id, zero)
      known = If(negative) <
        then_branch = b1 () => (int64 x) { x = Add(id, size) },
        else_branch = b2 () => (int64 x) { x = Identity(id) }>
      is_padding = Equal(known, padding) counts = Not(is_padding)
      longer = If(counts) <
        then_branch = b3 () => (int64[e2] x) { at = Reshape(j, flat)
          x = Concat<axis = 0>(listed, at) },
        else_branch = b4 () => (int64[e2] x) { x = Identity(listed) }>
      then = Add(j, one) again = Less(then, stop)
    }>
    many = Size(chosen) is_empty = Equal(many, zero)
    row = If(is_empty) <
      then_branch = g1 () => (float[m, d] r) { r = Identity(none) },
      else_branch = g2 () => (float[m, d] r) { s = Gather(rows, chosen) r = REDUCE(s, first) }>
    after = SequenceInsert(before, row) more = Less(next, bags)
  }>
  bag = ConcatFromSequence<axis = 0>(results) y = MatMul(bag, V)"""
OPERATORS = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax"}


def written(form, kind):
    if form != "sequence":
        return {"stacked": STACKED, "padded": PADDED}[form].replace("REDUCE", OPERATORS[kind])
    return SEQUENCE.replace("BRANCH", BRANCHES[kind])


def model(nodes, inputs="int64[k] ids, int64[n] offsets"):
    proto = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => (float[n, 3] y) {{ {nodes} }}'
    )
    for name, array in (WEIGHTS | CONSTANTS).items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


MATRIX = {
    "stacked": """total = Shape(m) entries = ReduceProd<keepdims = 0>(total)
        sides = Shape(m) side = Gather<axis = 0>(sides, one)
        offsets = Range(zero, entries, side) ids = Reshape(m, flat)""",
    "sequence": """examples = Shape<start = 0, end = 1>(m) scalar = Squeeze(examples)
        entries = Mul(scalar, width) offsets = Range(zero, entries, width)
        ids = Reshape(m, flat)""",
}


def of_matrix(form, kind):
    """The same for bags of five ids, which are the rows of a matrix."""
    return model(MATRIX[form] + written(form, kind), "int64[n, 5] m")


def predicted(kind, bags, weights):
    """The output by a loop over the bags, in float64."""
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[kind]
    table, head = (weights[name].astype(np.float64) for name in ("W", "V"))
    rows = [reduce(table[bag], axis=0) if len(bag) else np.zeros(4) for bag in bags]
    return np.stack(rows) @ head


def differences(kind, bags, targets, step=1e-6):
    """The gradient of the mean cross entropy by central differences in float64."""

    def loss(weights):
        z = predicted(kind, bags, weights)
        return (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), targets]).mean()

    found = {}
    for name, array in WEIGHTS.items():
        found[name] = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = array.astype(np.float64)
                moved[index] += sign * step
                ends.append(loss({**WEIGHTS, name: moved}))
            found[name][index] = (ends[0] - ends[1]) / (2 * step)
    return found


IDS = np.array([1, 2, 4, 5, 4, 3, 9])
OFFSETS = np.array([0, 3, 3, 6, 7])  # the second and the last bag are empty
TARGETS = np.array([0, 2, 1, 0, 2])
KINDS = [(form, kind) for form in ("stacked", "sequence") for kind in OPERATORS]


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_bags_have_the_outputs_and_gradients_of_a_loop_over_them(form, kind):
    engine = ke.Engine.from_onnx(model(written(form, kind)), loss="categorical")
    assert sorted(engine.parameters) == ["V", "W"]
    inputs = {"ids": IDS, "offsets": OFFSETS}
    bags = np.split(IDS, OFFSETS[1:])
    np.testing.assert_allclose(engine.predict(inputs), predicted(kind, bags, WEIGHTS), atol=1e-6)
    found = engine.gradients(inputs, TARGETS).gradients
    assert_arrays_close(found, differences(kind, bags, TARGETS), atol=1e-6)
    whole = engine.loss(inputs, TARGETS)
    parts = [
        ({"ids": IDS[:6], "offsets": OFFSETS[:3]}, TARGETS[:3]),
        ({"ids": IDS[6:], "offsets": np.array([0, 1])}, TARGETS[3:]),
    ]
    assert engine.loss(parts) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_bags_of_equal_sizes_are_an_embedding_layer(form, kind):
    engine = ke.Engine.from_onnx(of_matrix(form, kind), loss="categorical")
    assert {layer.kind for layer in engine.layers} == {"embedding", "fully_connected"}
    matrix = RNG.permuted(np.tile(np.arange(10), (5, 1)), axis=1)[:, :5]
    truth = predicted(kind, matrix, WEIGHTS)
    np.testing.assert_allclose(engine.predict(matrix), truth, atol=1e-6)
    found = engine.gradients(matrix, TARGETS).gradients
    assert_arrays_close(found, differences(kind, matrix, TARGETS), atol=1e-6)


@pytest.mark.parametrize("kind", OPERATORS)
def test_ids_of_the_padding_do_not_count(kind):
    engine = ke.Engine.from_onnx(model(written("padded", kind)), loss="categorical")
    ids, offsets = np.array([1, 4, -6, 5, 4, 3, 9, 4]), np.array([0, 3, 3, 6, 7])  # -6 is 4, too
    bags = [np.array([1]), [], np.array([5, 3]), np.array([9]), []]
    inputs = {"ids": ids, "offsets": offsets}
    np.testing.assert_allclose(engine.predict(inputs), predicted(kind, bags, WEIGHTS), atol=1e-6)
    found = engine.gradients(inputs, TARGETS).gradients
    assert_arrays_close(found, differences(kind, bags, TARGETS), atol=1e-6)


@pytest.mark.parametrize("form", ["stacked", "sequence", "padded"])
def test_kfac_trains_bags(form):
    batches = [({"ids": IDS, "offsets": OFFSETS}, TARGETS)] * 4
    history = ke.fit(model(written(form, "mean")), batches, epochs=8)
    assert history.records[-1]["loss"] < 0.6 * history.records[0]["loss"]


# Each differs from a loop over bags in one place: the old text, the new one.
OTHERS = {
    "stacked": [
        ("Gather<axis = 0>(stops, i)", "Gather<axis = 0>(ends, i)"),  # empty bags
        ("number = Shape(ids)", "number = Shape(offsets)"),
        ("(rows, first)", "(rows, second)"),
        ("row = REDUCE<keepdims = 0>(rows, first)", "s = REDUCE<keepdims = 0>(rows, first) "
         "row = Neg(s)"),
        ("REDUCE", "ReduceMin"),
    ],
    "sequence": [
        ("Identity(none)", "Identity(other)"),  # an empty bag that is no zero
        ("Add(i, one)", "Add(i, two)"),  # every second bag
        ("Slice(rows, start, stop)", "Slice(rows, start, all)"),
        ("Slice(ends, after_at, later)", "Slice(ends, at, after_at)"),
        ("SequenceInsert(before, row)", "SequenceInsert(before, row, zero)"),  # reversed
        ("Loop(, going, zero, empty)", "Loop(, going, one, empty)"),
        ("ConcatFromSequence<axis = 0>", "ConcatFromSequence<axis = 1>"),
    ],
    "padded": [
        ("x = Identity(listed)", "x = Concat<axis = 0>(listed, flat)"),  # -1 in place of padding
        ("Not(is_padding)", "Identity(is_padding)"),
        ("then = Add(j, one)", "then = Add(j, two)"),  # every second entry
        ("again = Less(then, stop)", "again = Less(then, all)"),
        ("Loop(, some, start, nothing)", "Loop(, some, start, first)"),  # entry 0 in each bag
        ("Loop(, some, start, nothing)", "Loop(, some, zero, nothing)"),
        ("Gather(ids, j)", "Gather(other_ids, j)"),
        ("x = Add(id, size)", "x = Add(j, size)"),
        ("Equal(known, padding)", "Equal(known, size)"),  # no id
        ("Concat<axis = 0>(listed, at)", "Concat<axis = 0>(at, listed)"),
        ("Gather(rows, chosen)", "Gather(rows, first)"),
        ("Equal(many, zero)", "Equal(many, one)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "old", "new"), [(form, *change) for form in OTHERS for change in OTHERS[form]]
)
def test_a_loop_that_differs_is_left_as_it_is(form, old, new):
    nodes = written(form, "sum")
    old, new = (text.replace("REDUCE", "ReduceSum") for text in (old, new))
    assert nodes.count(old)
    nodes = nodes.replace(old, new)
    proto = model(nodes)
    other = numpy_helper.from_array(np.full((1, 4), 2, np.float32), "other")
    proto.graph.initializer.append(other)
    graph = load_graph(proto)
    assert without_bag_loops(graph) is graph

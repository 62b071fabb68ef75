"""Models with more than one axis of examples: graphs with nodes and edges, pairs of examples."""

import numpy as np

from tests.models import parsed

F, H, C = 4, 6, 3  # features of a node, hidden features, outputs

# Messages along edges, a dense layer for nodes, sums over the nodes of a graph, and a dense layer
# for graphs.
POOLED = """
    zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()
    from = Gather (edges, zero)  to = Gather (edges, one)
    messages = Gather (feat, from)  last = Constant <value_ints = [1]> ()
    to1 = Unsqueeze (to, last)  of_messages = Shape (messages)  places = Expand (to1, of_messages)
    read = ScatterElements <axis = 0, reduction = "add"> (feat, places, messages)
    h = MatMul (read, w)  a = Tanh (h)
    columns = Shape <start = 1> (a)  shape = Concat <axis = 0> (count, columns)
    empty = ConstantOfShape (shape)  none = CastLike (empty, a)
    graph1 = Unsqueeze (graph, last)  of_nodes = Shape (a)  rows = Expand (graph1, of_nodes)
    pooled = ScatterElements <axis = 0, reduction = "add"> (none, rows, a)
    y = MatMul (pooled, v)
"""
# Where the number of graphs comes from: a further input, and nodes that compute it.
COUNTS = {
    "slots": ("float[{graphs}] slots", "count = Shape (slots)"),
    "number": (
        "int64 number",
        "start = Constant <value_ints = [0]> ()  count = Unsqueeze (number, start)",
    ),
    "largest": (
        "",
        """most = ReduceMax <keepdims = 0> (graph)  more = Constant <value_int = 1> ()
        graphs = Add (most, more)  start = Constant <value_ints = [0]> ()
        count = Unsqueeze (graphs, start)""",
    ),
}


def weights(seed=0, head=1.0):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((F, H)) * 0.5, "v": head * rng.standard_normal((H, C)) * 0.5}


def graph_network(nodes="nodes", edges="edges", graphs="graphs", count="slots", head=1.0):
    """Predictions for graphs, whose number is a row of ``COUNTS``."""
    entry, counting = COUNTS[count]
    more = entry and f", {entry.format(graphs=graphs)}"
    return parsed(
        f"""net (double[{nodes}, {F}] feat, int64[2, {edges}] edges, int64[{nodes}] graph{more})
        => (double[{graphs}, {C}] y) {{ {counting} {POOLED} }}""",
        weights(head=head),
    )


def graphs(sizes, seed=0, count="slots"):
    """The inputs of graphs with so many nodes, and a target for each graph."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *sizes[:-1]])
    edges = [
        start + rng.integers(0, size, (2, 2 * size))
        for start, size in zip(starts, sizes, strict=True)
    ]
    inputs = {
        "feat": rng.standard_normal((sum(sizes), F)),
        "edges": np.concatenate(edges, axis=1),
        "graph": np.repeat(np.arange(len(sizes)), sizes),
    }
    counts = {"slots": np.zeros(len(sizes), np.float32), "number": np.int64(len(sizes))}
    inputs |= {name: array for name, array in counts.items() if name == count}
    return inputs, rng.standard_normal((len(sizes), C))


def joined(*batches):
    """The graphs of several batches as one batch."""
    parts = [inputs for inputs, _ in batches]
    nodes = np.cumsum([0, *(len(part["feat"]) for part in parts)])
    numbers = np.cumsum([0, *(len(part["slots"]) for part in parts)])
    return {
        "feat": np.concatenate([part["feat"] for part in parts]),
        "edges": np.concatenate(
            [p["edges"] + n for p, n in zip(parts, nodes, strict=False)], axis=1
        ),
        "graph": np.concatenate([p["graph"] + n for p, n in zip(parts, numbers, strict=False)]),
        "slots": np.concatenate([part["slots"] for part in parts]),
    }, np.concatenate([targets for _, targets in batches])


def predictions(theta, inputs):
    """The outputs of the graph network, and the inputs and results of its layer for nodes."""
    read = inputs["feat"].copy()
    np.add.at(read, inputs["edges"][1], inputs["feat"][inputs["edges"][0]])
    a = np.tanh(read @ theta["w"])
    pooled = np.zeros((inputs["graph"].max() + 1, H))
    np.add.at(pooled, inputs["graph"], a)
    return pooled @ theta["v"], read, a


def adjacency(nodes=("N", "N", "N")):
    """A class for each node of one graph, with a dense adjacency matrix."""
    of_nodes, rows, columns = nodes
    return parsed(
        f"""net (double[{of_nodes}, {F}] x, double[{rows}, {columns}] adj)
        => (double[{of_nodes}, {C}] y) {{
            r = MatMul (adj, x)  s = MatMul (r, w)  h = Tanh (s)
            q = MatMul (adj, h)  y = MatMul (q, v)
        }}""",
        weights(),
    )


def one_graph(nodes, seed=0):
    rng = np.random.default_rng(seed)
    links = (rng.random((nodes, nodes)) < 0.4) + np.eye(nodes)
    adj = links / links.sum(axis=1, keepdims=True)
    return {"x": rng.standard_normal((nodes, F)), "adj": adj}, rng.integers(0, C, nodes)


def contrastive():
    """Logits of each pair of an image and a text."""
    return parsed(
        f"""net (double[N, {F}] image, double[N, {F}] text) => (double[N, N] logits) {{
            i = MatMul (image, w)  t = MatMul (text, u)  k = Transpose <perm = [1, 0]> (t)
            logits = MatMul (i, k)
        }}""",
        {"w": weights()["w"], "u": weights(1)["w"]},
    )


def pairs(count, seed=0):
    """Images with their texts, which are a linear function of them."""
    image = np.random.default_rng(seed).standard_normal((count, F))
    text = image @ np.random.default_rng(100).standard_normal((F, F))
    return {"image": image, "text": text}, np.arange(count)

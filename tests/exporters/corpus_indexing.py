"""Embeddings, gathering and scattering, reductions, shapes, functions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exporters.case import Case, chain, floats, function, together, tokens


def _embedded(name: str, forward, sides=(4,), **options) -> Case:  # type: ignore[no-untyped-def]
    """A table of 9 embeddings with 6 features, then whatever ``forward`` makes of it."""
    inputs = tokens(9, *sides)
    return function(name, forward, inputs, "head(6,3)", table=lambda: nn.Embedding(9, 6), **options)


def _bag(mode: str):  # type: ignore[no-untyped-def]
    return lambda: nn.EmbeddingBag(9, 6, mode=mode)


def _put(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = x[:, 4:6] * 2
    return x


def _reversed(x: Tensor, y: Tensor) -> Tensor:
    """The pieces of one, each times that of the other from behind."""
    pairs = zip(x.chunk(3, -1), y.split([2, 2, 2], -1)[::-1], strict=True)
    return torch.cat([b * a for a, b in pairs], -1)


def _all(*results: Tensor) -> Tensor:
    return torch.cat(results, -1)


def _roots(x: Tensor) -> Tensor:
    root = (x.square() + 1).sqrt().reciprocal()
    return _all(root, (x.abs() + 1).log(), x.erf(), (x.square() + 1) ** -1.3)


ROW, ROWS = floats(5), floats(4, 5)
CASES = (
    _embedded("embedding", lambda m, ids: m.head(m.table(ids))),
    _embedded("embedding-mean", lambda m, ids: m.head(m.table(ids).mean(1))),
    _embedded("embedding-grid", lambda m, ids: m.head(m.table(ids)), (2, 3)),
    _embedded("embedding-positions", lambda m, ids: m.head(m.table(ids) + m.table.weight[:4])),
    _embedded(
        "embedding-one-hot",
        lambda m, ids: m.head(F.one_hot(ids, 9).to(m.table.weight) @ m.table.weight)),
    Case(
        "embedding-padding", lambda: chain(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 3)),
        lambda batch: (torch.randint(1, 9, (batch, 4)),)),
    *(
        function(
            name,
            lambda m, ids: m.head(m.bag(ids)),
            tokens(9, 4),
            "head(6,3)",
            bag=_bag(mode),
            static=True,
        )
        for name, mode in (("embedding-bag", "mean"), ("embedding-bag-sum", "sum"))
    ),
    function(
        "scalar-scale",
        lambda m, x: m.a(x) * m.scale.exp() + m.shift,
        ROW,
        "a(5,4)",
        scale=lambda: torch.tensor(0.3),
        shift=lambda: torch.tensor(0.2),
        constant=("scale", "shift"),  # one number in arithmetic is not trained unless asked for
    ),
    _embedded("index-select", lambda m, ids: m.head(m.table.weight.index_select(0, ids.flatten()))),
    _embedded("index-two-axes", lambda m, ids: m.head(m.table.weight[ids])[:, [0, 2]][..., [1, 0]]),
    function(
        "index-gather", lambda m, x, at: m.a(x).gather(1, at), together(ROW, tokens(6, 2)), "a(5,6)"
    ),
    function(
        "index-scatter", lambda m, x, at: m.b(x.new_zeros(x.shape[0], 7).scatter(1, at, m.a(x))),
        together(ROW, lambda batch: (torch.stack([torch.randperm(7)[:2] for _ in range(batch)]),)),
        "a(5,2) b(7,3)"),
    function(
        "index-scatter-add",
        lambda m, x, at: m.b(x.new_zeros(x.shape[0], 7).scatter_add(1, at, m.a(x))),
        together(ROW, tokens(7, 4)), "a(5,4) b(7,3)"),
    function(  # legacy overwrites where an index repeats
        "index-add",
        lambda m, x: m.b(x.new_zeros(len(x), 4).index_add(1, torch.tensor([0, 2, 2]), m.a(x))),
        ROW,
        "a(5,3) b(4,3)",
        exporters=("dynamo",),
    ),
    function("index-put", lambda m, x: _put(m.a(x)), ROW, "a(5,6)"),
    function("index-roll-flip", lambda m, x: m.a(x).roll(2, 1).flip(0, 2), ROWS, "a(5,6)"),
    function(
        "index-masked-fill", lambda m, x: m.b(m.a(x).masked_fill(x > 0.5, -1.0)), ROW,
        "a(5,5) b(5,3)"),
    function(
        "index-where-clamp",
        lambda m, x: torch.where(x > 0, m.a(x).clamp(-0.5, 0.4), m.b(x).clamp_min(0)), ROW,
        "a(5,5) b(5,5)"),
    function(
        "index-maximum", lambda m, x: torch.maximum(m.a(x), torch.minimum(m.b(x), x)), ROW,
        "a(5,5) b(5,5)"),
    function("index-top", lambda m, x: m.a(x).topk(3, -1).values, ROW, "a(5,6)"),
    function(
        "index-sort", lambda m, x: m.a(x).sort(-1, descending=True).values * torch.arange(6), ROW,
        "a(5,6)"),
    function("index-pieces", lambda m, x: _reversed(m.a(x), m.a(x)), ROW, "a(5,6)"),
    function(
        "index-stack", lambda m, x: torch.stack([m.a(x), m.b(x)], 1).unbind(-1)[1], ROW,
        "a(5,6) b(5,6)"),
    function("index-strided", lambda m, x: m.a(x)[:, ::2, 1:5:3], ROWS, "a(5,6)"),
    function("index-triangle", lambda m, x: m.a(x).tril(-1) + m.a(x).triu(1), ROWS, "a(5,4)"),
    function(
        "reduce-statistics", lambda m, x: _all(m.a(x).std(1), m.a(x).var(1, correction=0)), ROWS,
        "a(5,4)"),
    function(
        "reduce-extremes", lambda m, x: _all(m.a(x).amax(1), m.a(x).min(1).values), ROWS, "a(5,4)"),
    function(
        "reduce-norms", lambda m, x: _all(m.a(x).norm(dim=1), m.a(x).norm(p=1, dim=1)), ROWS,
        "a(5,4)"),
    function(
        "reduce-products", lambda m, x: _all(m.a(x).prod(1), m.a(x).logsumexp(1)), ROWS, "a(5,4)"),
    function("reduce-running", lambda m, x: m.a(x).cumsum(1), ROWS, "a(5,4)"),
    function(
        "shape-expand-tile", lambda m, x: m.a(x).unsqueeze(1).expand(-1, 3, -1).repeat(1, 1, 2),
        ROW, "a(5,4)"),
    function("shape-squeeze", lambda m, x: m.a(x.squeeze(1)), floats(1, 5), "a(5,4)"),
    function(
        "shape-class-token",
        lambda m, x: m.a(torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1)), floats(3, 5),
        "token[1,1,5] a(5,4)", static=True),
    function(
        "function-waves",
        lambda m, x: m.b(_all(m.a(x).sin(), m.a(x).cos(), m.a(x).atan(), m.a(x).exp())), ROW,
        "a(5,4) b(16,3)"),
    function("function-roots", lambda m, x: m.b(_roots(m.a(x))), ROW, "a(5,4) b(16,3)"),
    function(
        "function-hyperbolic",
        lambda m, x: m.b(_all(m.a(x).sinh(), m.a(x).cosh(), m.a(x).asinh(), m.a(x).tan())), ROW,
        "a(5,4) b(16,3)", exporters=("dynamo",)),
)  # fmt: skip

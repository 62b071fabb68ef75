"""Embeddings, gathering and scattering, reductions, shapes, functions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exporters.case import Case, Function, chain, floats, together, tokens


def _embedded(name: str, forward, sides=(4,), **options) -> Case:  # type: ignore[no-untyped-def]
    """A table of 9 embeddings with 6 features, then whatever ``forward`` makes of it."""
    return Case(
        name,
        lambda: Function(forward, table=nn.Embedding(9, 6), head=nn.Linear(6, 3)),
        tokens(9, *sides),
        **options,
    )


def _put(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = x[:, 4:6] * 2
    return x


CASES = (
    _embedded("embedding", lambda m, ids: m.head(m.table(ids))),
    _embedded("embedding-mean", lambda m, ids: m.head(m.table(ids).mean(1))),
    _embedded("embedding-grid", lambda m, ids: m.head(m.table(ids)), (2, 3)),
    _embedded("embedding-positions", lambda m, ids: m.head(m.table(ids) + m.table.weight[:4])),
    _embedded(
        "embedding-one-hot",
        lambda m, ids: m.head(F.one_hot(ids, 9).to(m.table.weight) @ m.table.weight),
    ),
    Case(
        "embedding-padding",
        lambda: chain(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 3)),
        lambda batch: (torch.randint(1, 9, (batch, 4)),),
    ),
    Case(
        "embedding-bag",
        lambda: Function(
            lambda m, ids: m.head(m.bag(ids)),
            bag=nn.EmbeddingBag(9, 6, mode="mean"),
            head=nn.Linear(6, 3),
        ),
        tokens(9, 4),
        static=True,
    ),
    Case(
        "embedding-bag-sum",
        lambda: Function(
            lambda m, ids: m.head(m.bag(ids)),
            bag=nn.EmbeddingBag(9, 6, mode="sum"),
            head=nn.Linear(6, 3),
        ),
        tokens(9, 4),
        static=True,
    ),
    Case(
        "scalar-scale",
        lambda: Function(
            lambda m, x: m.a(x) * m.scale.exp() + m.shift,
            a=nn.Linear(5, 4),
            scale=torch.tensor(0.3),
            shift=torch.tensor(0.2),
        ),
        floats(5),
        constant=("scale", "shift"),  # one number in arithmetic is not trained unless asked for
    ),
    _embedded("index-select", lambda m, ids: m.head(m.table.weight.index_select(0, ids.flatten()))),
    _embedded("index-two-axes", lambda m, ids: m.head(m.table.weight[ids])[:, [0, 2]][..., [1, 0]]),
    Case(
        "index-gather",
        lambda: Function(lambda m, x, at: m.a(x).gather(1, at), a=nn.Linear(5, 6)),
        together(floats(5), tokens(6, 2)),
    ),
    Case(
        "index-scatter",
        lambda: Function(
            lambda m, x, at: m.b(x.new_zeros(x.shape[0], 7).scatter(1, at, m.a(x))),
            a=nn.Linear(5, 2),
            b=nn.Linear(7, 3),
        ),
        together(
            floats(5), lambda batch: (torch.stack([torch.randperm(7)[:2] for _ in range(batch)]),)
        ),
    ),
    Case(
        "index-scatter-add",
        lambda: Function(
            lambda m, x, at: m.b(x.new_zeros(x.shape[0], 7).scatter_add(1, at, m.a(x))),
            a=nn.Linear(5, 4),
            b=nn.Linear(7, 3),
        ),
        together(floats(5), tokens(7, 4)),
    ),
    Case(
        "index-add",
        lambda: Function(
            lambda m, x: m.b(
                x.new_zeros(x.shape[0], 4).index_add(1, torch.tensor([0, 2, 2]), m.a(x))
            ),
            a=nn.Linear(5, 3),
            b=nn.Linear(4, 3),
        ),
        floats(5),
        exporters=("dynamo",),
    ),  # legacy overwrites where an index repeats
    Case("index-put", lambda: Function(lambda m, x: _put(m.a(x)), a=nn.Linear(5, 6)), floats(5)),
    Case(
        "index-roll-flip",
        lambda: Function(lambda m, x: m.a(x).roll(2, 1).flip(0, 2), a=nn.Linear(5, 6)),
        floats(4, 5),
    ),
    Case(
        "index-masked-fill",
        lambda: Function(
            lambda m, x: m.b(m.a(x).masked_fill(x > 0.5, -1.0)),
            a=nn.Linear(5, 5),
            b=nn.Linear(5, 3),
        ),
        floats(5),
    ),
    Case(
        "index-where-clamp",
        lambda: Function(
            lambda m, x: torch.where(x > 0, m.a(x).clamp(-0.5, 0.4), m.b(x).clamp_min(0)),
            a=nn.Linear(5, 5),
            b=nn.Linear(5, 5),
        ),
        floats(5),
    ),
    Case(
        "index-maximum",
        lambda: Function(
            lambda m, x: torch.maximum(m.a(x), torch.minimum(m.b(x), x)),
            a=nn.Linear(5, 5),
            b=nn.Linear(5, 5),
        ),
        floats(5),
    ),
    Case(
        "index-top",
        lambda: Function(lambda m, x: m.a(x).topk(3, -1).values, a=nn.Linear(5, 6)),
        floats(5),
    ),
    Case(
        "index-sort",
        lambda: Function(
            lambda m, x: m.a(x).sort(-1, descending=True).values * torch.arange(6),
            a=nn.Linear(5, 6),
        ),
        floats(5),
    ),
    Case(
        "index-pieces",
        lambda: Function(
            lambda m, x: torch.cat(
                [
                    b * a
                    for a, b in zip(
                        m.a(x).chunk(3, -1), m.a(x).split([2, 2, 2], -1)[::-1], strict=True
                    )
                ],
                -1,
            ),
            a=nn.Linear(5, 6),
        ),
        floats(5),
    ),
    Case(
        "index-stack",
        lambda: Function(
            lambda m, x: torch.stack([m.a(x), m.b(x)], 1).unbind(-1)[1],
            a=nn.Linear(5, 6),
            b=nn.Linear(5, 6),
        ),
        floats(5),
    ),
    Case(
        "index-strided",
        lambda: Function(lambda m, x: m.a(x)[:, ::2, 1:5:3], a=nn.Linear(5, 6)),
        floats(4, 5),
    ),
    Case(
        "index-triangle",
        lambda: Function(lambda m, x: m.a(x).tril(-1) + m.a(x).triu(1), a=nn.Linear(5, 4)),
        floats(4, 5),
    ),
    Case(
        "reduce-statistics",
        lambda: Function(
            lambda m, x: torch.cat([m.a(x).std(1), m.a(x).var(1, correction=0)], -1),
            a=nn.Linear(5, 4),
        ),
        floats(4, 5),
    ),
    Case(
        "reduce-extremes",
        lambda: Function(
            lambda m, x: torch.cat([m.a(x).amax(1), m.a(x).min(1).values], -1), a=nn.Linear(5, 4)
        ),
        floats(4, 5),
    ),
    Case(
        "reduce-norms",
        lambda: Function(
            lambda m, x: torch.cat([m.a(x).norm(dim=1), m.a(x).norm(p=1, dim=1)], -1),
            a=nn.Linear(5, 4),
        ),
        floats(4, 5),
    ),
    Case(
        "reduce-products",
        lambda: Function(
            lambda m, x: torch.cat([m.a(x).prod(1), m.a(x).logsumexp(1)], -1), a=nn.Linear(5, 4)
        ),
        floats(4, 5),
    ),
    Case(
        "reduce-running",
        lambda: Function(lambda m, x: m.a(x).cumsum(1), a=nn.Linear(5, 4)),
        floats(4, 5),
    ),
    Case(
        "shape-expand-tile",
        lambda: Function(
            lambda m, x: m.a(x).unsqueeze(1).expand(-1, 3, -1).repeat(1, 1, 2), a=nn.Linear(5, 4)
        ),
        floats(5),
    ),
    Case(
        "shape-squeeze",
        lambda: Function(lambda m, x: m.a(x.squeeze(1)), a=nn.Linear(5, 4)),
        floats(1, 5),
    ),
    Case(
        "shape-class-token",
        lambda: Function(
            lambda m, x: m.a(torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1)),
            token=torch.randn(1, 1, 5),
            a=nn.Linear(5, 4),
        ),
        floats(3, 5),
        static=True,
    ),
    Case(
        "function-waves",
        lambda: Function(
            lambda m, x: m.b(
                torch.cat([m.a(x).sin(), m.a(x).cos(), m.a(x).atan(), m.a(x).exp()], -1)
            ),
            a=nn.Linear(5, 4),
            b=nn.Linear(16, 3),
        ),
        floats(5),
    ),
    Case(
        "function-roots",
        lambda: Function(
            lambda m, x: m.b(
                torch.cat(
                    [
                        (m.a(x).square() + 1).sqrt().reciprocal(),
                        (m.a(x).abs() + 1).log(),
                        m.a(x).erf(),
                        (m.a(x).square() + 1) ** -1.3,
                    ],
                    -1,
                )
            ),
            a=nn.Linear(5, 4),
            b=nn.Linear(16, 3),
        ),
        floats(5),
    ),
    Case(
        "function-hyperbolic",
        lambda: Function(
            lambda m, x: m.b(
                torch.cat([m.a(x).sinh(), m.a(x).cosh(), m.a(x).asinh(), m.a(x).tan()], -1)
            ),
            a=nn.Linear(5, 4),
            b=nn.Linear(16, 3),
        ),
        floats(5),
        exporters=("dynamo",),
    ),
)

"""Multilayer perceptrons with every activation, parametrisations, sharing, and odd products."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.exporters.case import EXPORTERS, Case, Function, chain, floats, together

ACTIVATIONS = (
    nn.CELU(0.7),
    nn.ELU(0.8),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Hardshrink(0.1),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardtanh(-0.4, 0.6),
    nn.LeakyReLU(0.1),
    nn.LogSigmoid(),
    nn.LogSoftmax(-1),
    nn.Mish(),
    nn.PReLU(),
    nn.PReLU(16),
    nn.ReLU(),
    nn.ReLU6(),
    nn.SELU(),
    nn.SiLU(),
    nn.Sigmoid(),
    nn.Softmax(-1),
    nn.Softmin(-1),
    nn.Softplus(2.0),
    nn.Softshrink(0.1),
    nn.Softsign(),
    nn.Tanh(),
    nn.Tanhshrink(),
    nn.Threshold(0.1, 0.2),
)


def _label(activation: nn.Module) -> str:
    counts = {"PReLU(16)": "PReLU-channels", "GELU('tanh')": "GELU-tanh"}
    text = repr(activation).replace("num_parameters=", "").replace("approximate=", "")
    return counts.get(text, type(activation).__name__)


def _activated(activation: nn.Module) -> Case:
    return Case(
        f"mlp-{_label(activation)}",
        lambda: chain(nn.Linear(7, 16), activation, nn.Linear(16, 4)),
        floats(7),
        exporters=("dynamo",) if isinstance(activation, nn.Threshold) else EXPORTERS,
    )


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class _Experts(nn.Module):
    """All experts on every token, mixed by a gate: weights with an axis of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(torch.einsum("btd,edf->betf", x, self.up))
        each = torch.einsum("betf,efd->betd", inner, self.down)
        return torch.einsum("bte,betd->btd", self.gate(x).softmax(-1), each)


class _TopExperts(nn.Module):
    """The best two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, at = self.gate(x).topk(2, -1)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        picked = each.gather(1, at.unsqueeze(-1).expand(-1, -1, 5))
        return (best.softmax(-1).unsqueeze(-1) * picked).sum(1)


class _Tied(nn.Module):
    """An embedding that is the last layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(ids)))


class _RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


CASES = (
    *map(_activated, ACTIVATIONS),
    Case("mlp-gated", lambda: chain(nn.Linear(7, 16), nn.GLU(), nn.Linear(8, 4)), floats(7)),
    Case(
        "mlp-classes",
        lambda: chain(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)),
        floats(7),
        "categorical",
    ),
    Case("mlp-dropout", lambda: chain(nn.Linear(7, 9), nn.Dropout(), nn.Linear(9, 5)), floats(7)),
    Case(
        "mlp-no-bias",
        lambda: chain(nn.Linear(7, 9, bias=False), nn.Linear(9, 5, bias=False)),
        floats(7),
    ),
    Case("mlp-tokens", lambda: chain(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5)), floats(4, 7)),
    Case("mlp-images", lambda: chain(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5)), floats(2, 4, 7)),
    Case(
        "mlp-flatten",
        lambda: chain(
            nn.Flatten(), nn.Linear(28, 9), nn.Tanh(), nn.Linear(9, 6), nn.Unflatten(1, (2, 3))
        ),
        floats(4, 7),
    ),
    Case("mlp-residual", lambda: chain(nn.Linear(5, 6), _Residual(), _Residual()), floats(5)),
    Case(
        "mlp-layer-norm",
        lambda: chain(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)),
        floats(5),
    ),
    Case(
        "mlp-layer-norm-no-affine",
        lambda: chain(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)),
        floats(5),
    ),
    Case(
        "mlp-rms-norm",
        lambda: chain(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 3)),
        floats(5),
        exporters=("dynamo",),
    ),
    Case(
        "mlp-rms-norm-written-out",
        lambda: chain(nn.Linear(5, 6), _RMSNorm(), nn.Linear(6, 3)),
        floats(5),
    ),
    Case(
        "mlp-batch-norm",
        lambda: chain(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        floats(5),
        folded=False,
    ),
    Case(
        "mlp-batch-norm-training",
        lambda: chain(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        floats(5),
        training=True,
        exporters=("legacy",),
    ),
    Case(
        "mlp-bilinear",
        lambda: Function(lambda m, x, y: m.pair(x, y), pair=nn.Bilinear(4, 5, 3)),
        together(floats(4), floats(5)),
        exporters=("dynamo",),
    ),
    Case(
        "mlp-two-inputs",
        lambda: Function(
            lambda m, x, y: m.head(torch.cat([m.a(x), m.b(y)], -1)),
            a=nn.Linear(4, 3),
            b=nn.Linear(5, 2),
            head=nn.Linear(5, 3),
        ),
        together(floats(4), floats(5)),
    ),
    Case(
        "mlp-same-layer-twice",
        lambda: Function(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Linear(6, 6)),
        floats(6),
    ),
    Case(
        "mlp-normalised",
        lambda: Function(
            lambda m, x: m.b(F.normalize(m.a(x), dim=-1)), a=nn.Linear(6, 5), b=nn.Linear(5, 3)
        ),
        floats(6),
    ),
    Case(
        "mlp-cosine",
        lambda: Function(
            lambda m, x: F.cosine_similarity(m.a(x).unsqueeze(1), m.keys, dim=-1),
            a=nn.Linear(6, 5),
            keys=torch.randn(4, 5),
        ),
        floats(6),
        folded=False,
    ),
    Case(
        "mlp-distances",
        lambda: Function(
            lambda m, x: torch.cdist(m.a(x), m.centres),
            a=nn.Linear(6, 5),
            centres=torch.randn(4, 5),
        ),
        floats(6),
        exporters=("legacy",),
    ),
    Case(
        "weight-norm",
        lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
        floats(6),
        folded=False,
    ),
    Case(
        "weight-norm-folded",
        lambda: chain(nn.Linear(5, 6), nn.Tanh(), parametrizations.weight_norm(nn.Linear(6, 4))),
        floats(5),
        constant=("2.parametrizations.*",),
    ),
    Case(
        "spectral-norm",
        lambda: parametrizations.spectral_norm(nn.Linear(6, 4)),
        floats(6),
        folded=False,
        exporters=("dynamo",),
    ),
    Case("tied-embedding", _Tied, lambda batch: (torch.randint(0, 11, (batch, 3)),), "categorical"),
    Case("experts", _Experts, floats(3, 6)),
    Case("experts-top-two", _TopExperts, floats(6)),
    Case("product-left", lambda: Function(lambda m, x: m.w @ x, w=torch.randn(4, 6)), floats(6, 3)),
    Case(
        "product-vector",
        lambda: Function(
            lambda m, x: (m.a(x) @ m.w).unsqueeze(-1), a=nn.Linear(5, 6), w=torch.randn(6)
        ),
        floats(5),
    ),
    Case(
        "product-transposed",
        lambda: Function(lambda m, x: x @ m.w.T + m.b, w=torch.randn(4, 6), b=torch.randn(4)),
        floats(6),
    ),
    Case(
        "product-batched",
        lambda: Function(
            lambda m, x: torch.bmm(m.q(x), m.k(x).transpose(1, 2)),
            q=nn.Linear(6, 4),
            k=nn.Linear(6, 4),
        ),
        floats(3, 6),
    ),
    Case(
        "product-addmm",
        lambda: Function(
            lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
            w=torch.randn(6, 4),
            b=torch.randn(4),
        ),
        floats(6),
    ),
    Case(
        "product-baddbmm",
        lambda: Function(
            lambda m, x: torch.baddbmm(m.b(x), m.q(x), m.k(x).transpose(1, 2), beta=0.3, alpha=0.7),
            b=nn.Linear(6, 3),
            q=nn.Linear(6, 4),
            k=nn.Linear(6, 4),
        ),
        floats(3, 6),
    ),
    Case(
        "product-outer",
        lambda: Function(
            lambda m, x: torch.einsum("bi,bj->bij", m.a(x), m.b(x)),
            a=nn.Linear(6, 4),
            b=nn.Linear(6, 3),
        ),
        floats(6),
    ),
    Case(
        "product-scaled-weight",
        lambda: Function(
            lambda m, x: F.linear(x, m.w * 0.5, m.b * 2), w=torch.randn(4, 6), b=torch.randn(4)
        ),
        floats(6),
        folded=False,
    ),
    Case(
        "product-sliced-weight",
        lambda: Function(
            lambda m, x: F.linear(F.linear(x, m.w[:4]), m.w[4:, :4]), w=torch.randn(7, 6)
        ),
        floats(6),
        folded=False,
    ),
    Case(
        "product-summed-weight",
        lambda: Function(
            lambda m, x: F.linear(x, m.w + m.down @ m.up),
            w=torch.randn(4, 6),
            down=torch.randn(4, 2),
            up=torch.randn(2, 6),
        ),
        floats(6),
        folded=False,
    ),
    Case(
        "einsum-linear",
        lambda: Function(lambda m, x: torch.einsum("bti,oi->bto", x, m.w), w=torch.randn(4, 6)),
        floats(3, 6),
    ),
    Case(
        "einsum-heads",
        lambda: Function(
            lambda m, x: torch.einsum("bhtd,hdo->bto", torch.einsum("bti,ihd->bhtd", x, m.q), m.o),
            q=torch.randn(6, 2, 3),
            o=torch.randn(2, 3, 5),
        ),
        floats(4, 6),
    ),
    Case(
        "einsum-scores",
        lambda: Function(
            lambda m, x: torch.einsum("bqd,bkd->bqk", m.q(x), m.k(x)),
            q=nn.Linear(6, 4),
            k=nn.Linear(6, 4),
        ),
        floats(3, 6),
    ),
)

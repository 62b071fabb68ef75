"""Multilayer perceptrons with every activation, parametrisations, sharing, and odd products."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.exporters.case import EXPORTERS, Case, chain, floats, function, together

ACTIVATIONS = (
    *(nn.CELU(0.7), nn.ELU(0.8), nn.GELU("tanh"), nn.Hardshrink(0.1), nn.Hardtanh(-0.4, 0.6)),
    *(nn.LeakyReLU(0.1), nn.LogSoftmax(-1), nn.PReLU(16), nn.Softmax(-1), nn.Softmin(-1)),
    *(nn.Softplus(2.0), nn.Softshrink(0.1), nn.Threshold(0.1, 0.2)),
    *(nn.GELU(), nn.Hardsigmoid(), nn.Hardswish(), nn.LogSigmoid(), nn.Mish(), nn.PReLU()),
    *(nn.ReLU(), nn.ReLU6(), nn.SELU(), nn.SiLU(), nn.Sigmoid(), nn.Softsign(), nn.Tanh()),
    nn.Tanhshrink(),
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


def _between(name: str, *middle, **options) -> Case:  # type: ignore[no-untyped-def]
    """What functions make between two dense layers."""
    ends = (5, 6), (6, 3)
    return Case(
        f"mlp-{name}",
        lambda: chain(nn.Linear(*ends[0]), *(make() for make in middle), nn.Linear(*ends[1])),
        floats(5),
        **options,
    )


def _norm() -> nn.Module:
    return nn.BatchNorm1d(6)


LEGACY, DYNAMO = {"exporters": ("legacy",)}, {"exporters": ("dynamo",)}
PAIR = together(floats(4), floats(5))
CASES = (
    *map(_activated, ACTIVATIONS),
    Case("mlp-gated", lambda: chain(nn.Linear(7, 16), nn.GLU(), nn.Linear(8, 4)), floats(7)),
    Case(
        "mlp-classes", lambda: chain(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)), floats(7),
        "categorical"),
    Case("mlp-dropout", lambda: chain(nn.Linear(7, 9), nn.Dropout(), nn.Linear(9, 5)), floats(7)),
    function("mlp-no-bias", lambda m, x: m.b(m.a(x)), floats(7), "a(7,9,0) b(9,5,0)"),
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
    _between("layer-norm", lambda: nn.LayerNorm(6), nn.ReLU),
    _between("layer-norm-no-affine", lambda: nn.LayerNorm(6, elementwise_affine=False)),
    _between("rms-norm", lambda: nn.RMSNorm(6), **DYNAMO),
    _between("rms-norm-written-out", _RMSNorm),
    _between("batch-norm", _norm, nn.ReLU, folded=False),
    _between("batch-norm-training", _norm, nn.ReLU, training=True, **LEGACY),
    function(
        "mlp-bilinear", lambda m, x, y: m.a(x, y), PAIR, a=lambda: nn.Bilinear(4, 5, 3), **DYNAMO),
    function(
        "mlp-two-inputs", lambda m, x, y: m.head(torch.cat([m.a(x), m.b(y)], -1)), PAIR,
        "a(4,3) b(5,2) head(5,3)"),
    function("mlp-same-layer-twice", lambda m, x: m.a(torch.tanh(m.a(x))), floats(6), "a(6,6)"),
    function(
        "mlp-normalised", lambda m, x: m.b(F.normalize(m.a(x), dim=-1)), floats(6), "a(6,5) b(5,3)"
    ),
    function(
        "mlp-cosine", lambda m, x: F.cosine_similarity(m.a(x).unsqueeze(1), m.keys, dim=-1),
        floats(6), "a(6,5) keys[4,5]", folded=False),
    function(
        "mlp-distances", lambda m, x: torch.cdist(m.a(x), m.centres), floats(6),
        "a(6,5) centres[4,5]", **LEGACY),
    Case(
        "weight-norm", lambda: parametrizations.weight_norm(nn.Linear(6, 4)), floats(6),
        folded=False),
    Case(
        "weight-norm-folded",
        lambda: chain(nn.Linear(5, 6), nn.Tanh(), parametrizations.weight_norm(nn.Linear(6, 4))),
        floats(5), constant=("2.parametrizations.*",)),
    Case(
        "spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), floats(6),
        folded=False, **DYNAMO),
    Case("tied-embedding", _Tied, lambda batch: (torch.randint(0, 11, (batch, 3)),), "categorical"),
    Case("experts", _Experts, floats(3, 6)),
    Case("experts-top-two", _TopExperts, floats(6)),
    function("product-left", lambda m, x: m.w @ x, floats(6, 3), "w[4,6]"),
    function("product-vector", lambda m, x: (m.a(x) @ m.w).unsqueeze(-1), floats(5), "a(5,6) w[6]"),
    function("product-transposed", lambda m, x: x @ m.w.T + m.b, floats(6), "w[4,6] b[4]"),
    function(
        "product-batched", lambda m, x: torch.bmm(m.q(x), m.k(x).transpose(1, 2)), floats(3, 6),
        "q(6,4) k(6,4)"),
    function(
        "product-addmm", lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), floats(6),
        "w[6,4] b[4]"),
    function(
        "product-baddbmm",
        lambda m, x: torch.baddbmm(m.b(x), m.q(x), m.k(x).transpose(1, 2), beta=0.3, alpha=0.7),
        floats(3, 6), "b(6,3) q(6,4) k(6,4)"),
    function(
        "product-outer", lambda m, x: torch.einsum("bi,bj->bij", m.a(x), m.b(x)), floats(6),
        "a(6,4) b(6,3)"),
    function(
        "product-scaled-weight", lambda m, x: F.linear(x, m.w * 0.5, m.b * 2), floats(6),
        "w[4,6] b[4]", folded=False),
    function(
        "product-sliced-weight", lambda m, x: F.linear(F.linear(x, m.w[:4]), m.w[4:, :4]),
        floats(6), "w[7,6]", folded=False),
    function(
        "product-summed-weight", lambda m, x: F.linear(x, m.w + m.down @ m.up), floats(6),
        "w[4,6] down[4,2] up[2,6]", folded=False),
    function(
        "einsum-linear", lambda m, x: torch.einsum("bti,oi->bto", x, m.w), floats(3, 6), "w[4,6]"),
    function(
        "einsum-heads",
        lambda m, x: torch.einsum("bhtd,hdo->bto", torch.einsum("bti,ihd->bhtd", x, m.q), m.o),
        floats(4, 6), "q[6,2,3] o[2,3,5]"),
    function(
        "einsum-scores", lambda m, x: torch.einsum("bqd,bkd->bqk", m.q(x), m.k(x)), floats(3, 6),
        "q(6,4) k(6,4)"),
)  # fmt: skip

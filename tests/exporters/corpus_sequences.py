"""Recurrent networks and attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exporters.case import Case, Function, floats, function, together


def _recurrent(name: str, cell: type[nn.Module], **options) -> Case:  # type: ignore[no-untyped-def]
    """A recurrent net over four steps with a dense layer after it."""
    exporters = options.pop("exporters", ("legacy", "dynamo"))

    def build() -> nn.Module:
        body = cell(5, 4, batch_first=True, **options)
        width = 4 * (2 if options.get("bidirectional") else 1)
        return Function(lambda m, x: m.head(m.body(x)[0]), body=body, head=nn.Linear(width, 3))

    return Case(name, build, floats(4, 5), exporters=exporters)


class _Stepped(nn.Module):
    """Cells called step by step."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = cell(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(3):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class _States(nn.Module):
    """Learned initial states, and the last states as features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.start = nn.LSTM(5, 4), nn.Parameter(torch.randn(2, 1, 1, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.start.expand(-1, -1, x.shape[0], -1)
        _, (h, c) = self.body(x.transpose(0, 1), (h.contiguous(), c.contiguous()))
        return self.head(torch.cat([h[-1], c[-1]], -1))


class _Rotary(nn.Module):
    """Attention with rotated queries and keys, and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.o = nn.Linear(8, 8)
        angles = torch.arange(5)[:, None] / 100 ** (torch.arange(0, 4, 2) / 4)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (layer(x).view(n, t, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(n, t, 8))


def _attention(name: str, forward=None, **options) -> Case:  # type: ignore[no-untyped-def]
    forward = forward or (lambda m, x: m.a(x, x, x, need_weights=False)[0])
    options = {"batch_first": True, **options}
    return Case(
        name, lambda: Function(forward, a=nn.MultiheadAttention(8, 2, **options)), floats(5, 8)
    )


def _encoder(**options) -> nn.Module:  # type: ignore[no-untyped-def]
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)


def _decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)


ONE = floats(5, 8)
TWO = together(ONE, floats(4, 8))
RECURRENT = (
    _recurrent("lstm", nn.LSTM),
    _recurrent("lstm-bidirectional", nn.LSTM, bidirectional=True),
    _recurrent("lstm-two-layers", nn.LSTM, num_layers=2),
    _recurrent("lstm-two-layers-bidirectional", nn.LSTM, num_layers=2, bidirectional=True),
    _recurrent("lstm-no-bias", nn.LSTM, bias=False),
    # Initial states are zeros in most files, and not trained unless they are asked for.
    Case("lstm-states", _States, floats(4, 5), constant=("start",)),
    _recurrent("gru", nn.GRU),
    _recurrent("gru-bidirectional", nn.GRU, bidirectional=True),
    _recurrent("gru-two-layers", nn.GRU, num_layers=2),
    _recurrent("rnn-tanh", nn.RNN),
    _recurrent("rnn-relu", nn.RNN, nonlinearity="relu"),
    _recurrent("rnn-bidirectional", nn.RNN, bidirectional=True),
    Case("lstm-cell", lambda: _Stepped(nn.LSTMCell), floats(3, 5)),
    Case("gru-cell", lambda: _Stepped(nn.GRUCell), floats(3, 5)),
    Case("rnn-cell", lambda: _Stepped(nn.RNNCell), floats(3, 5)),
)

ATTENTION = (
    _attention("attention"),
    _attention("attention-weights", lambda m, x: m.a(x, x, x)[0]),
    _attention("attention-no-bias", bias=False),
    _attention("attention-bias-kv", add_bias_kv=True),
    _attention(
        "attention-steps-first",
        lambda m, x: m.a(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(
            0, 1
        ),
        batch_first=False,
    ),
    _attention(
        "attention-causal",
        lambda m, x: m.a(x, x, x, attn_mask=torch.ones(5, 5).tril().log(), need_weights=False)[0]),
    function(
        "attention-cross", lambda m, x, y: m.a(x, y, y, need_weights=False)[0],
        together(ONE, floats(4, 6)),
        a=lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)),
    function(
        "attention-masked",
        lambda m, x, y: m.a(x, x, x, key_padding_mask=y > 6, need_weights=False)[0],
        together(ONE, lambda batch: (torch.randint(0, 9, (batch, 5)) * (torch.arange(5) > 0),)),
        a=lambda: nn.MultiheadAttention(8, 2, batch_first=True)),
    function(
        "attention-sdpa", lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)),
        floats(5, 6), "q(6,4) k(6,4) v(6,3)", exporters=("legacy",)),
    Case("attention-rotary", _Rotary, floats(5, 8)),
    function("transformer-encoder", lambda m, x: m.b(m.a(x)), ONE, a=_encoder, b=_encoder),
    function(
        "transformer-encoder-gelu-norm-first", lambda m, x: m.a(x), ONE,
        a=lambda: _encoder(activation="gelu", norm_first=True)),
    function("transformer-decoder", lambda m, x, y: m.a(x, y), TWO, a=_decoder),
    function(
        "transformer-decoder-causal",
        lambda m, x, y: m.a(x, y, tgt_mask=torch.ones(5, 5).tril().log()), TWO, a=_decoder),
    Case(
        "transformer", lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True), TWO,
        exporters=("dynamo",)),
)  # fmt: skip

CASES = (*RECURRENT, *ATTENTION)

"""Convolutions, pooling, norms and resizing, in one to three dimensions."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.exporters.case import Case, Function, chain, floats

IMAGE, SIGNAL, VOLUME = floats(3, 9, 8), floats(3, 11), floats(2, 5, 6, 7)


def _on(name: str, layer, sides=IMAGE, **options) -> Case:  # type: ignore[no-untyped-def]
    """A layer, or several, between two convolutions of the input's dimension."""
    probe = sides(1)[0]
    channels, rank = probe.shape[1], probe.ndim - 2
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]

    def build() -> nn.Module:
        middle = layer()
        after = nn.Sequential(conv(channels, 4, 3, padding=1), middle)(sides(2)[0]).shape[1]
        return chain(conv(channels, 4, 3, padding=1), middle, conv(after, 2, 1), nn.Flatten())

    return Case(name, build, sides, **options)


def _alone(name: str, layer, sides=IMAGE, **options) -> Case:  # type: ignore[no-untyped-def]
    return Case(name, lambda: chain(layer(), nn.Tanh(), nn.Flatten()), sides, **options)


class _Block(nn.Module):
    """A residual block with norms and a strided shortcut."""

    def __init__(self, norm) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(4, 8, 1, 2, bias=False)
        self.norm1, self.norm2 = norm(8), norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.short(x))


class _Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squeezed = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(torch.relu(self.down(squeezed))))


CONVOLUTIONS = (
    _alone("conv1d", lambda: nn.Conv1d(3, 4, 3), SIGNAL),
    _alone("conv1d-strided", lambda: nn.Conv1d(3, 4, 4, 2, 1, 2), SIGNAL),
    _alone("conv1d-same", lambda: nn.Conv1d(3, 4, 4, padding="same"), SIGNAL),
    _alone("conv2d", lambda: nn.Conv2d(3, 4, 3)),
    _alone("conv2d-1x1", lambda: nn.Conv2d(3, 4, 1)),
    _alone("conv2d-1x1-strided", lambda: nn.Conv2d(3, 4, 1, 2)),
    _alone("conv2d-strided", lambda: nn.Conv2d(3, 4, (3, 2), (2, 3), (1, 0))),
    _alone("conv2d-dilated", lambda: nn.Conv2d(3, 4, 3, padding=2, dilation=2)),
    _alone("conv2d-grouped", lambda: nn.Conv2d(3, 6, 3, groups=3)),
    _alone("conv2d-depthwise", lambda: nn.Conv2d(3, 3, 3, 2, 1, groups=3)),
    _alone("conv2d-no-bias", lambda: nn.Conv2d(3, 4, 5, bias=False)),
    _alone("conv2d-whole-image", lambda: nn.Conv2d(3, 4, (9, 8))),
    _alone("conv3d", lambda: nn.Conv3d(2, 3, 3, padding=1), VOLUME),
    _alone("conv3d-strided", lambda: nn.Conv3d(2, 4, 2, 2, groups=2), VOLUME),
    *(
        _alone(f"conv2d-{mode}", lambda m=mode: nn.Conv2d(3, 4, 3, padding=1, padding_mode=m))
        for mode in ("reflect", "replicate", "circular")
    ),
    _alone("transposed1d", lambda: nn.ConvTranspose1d(3, 4, 3, 2), SIGNAL),
    _alone("transposed2d", lambda: nn.ConvTranspose2d(3, 4, 3)),
    _alone("transposed2d-strided", lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1)),
    _alone("transposed2d-dilated", lambda: nn.ConvTranspose2d(3, 4, 3, dilation=2)),
    _alone("transposed2d-grouped", lambda: nn.ConvTranspose2d(3, 6, 3, 2, groups=3)),
    _alone("transposed3d", lambda: nn.ConvTranspose3d(2, 3, 2, 2), VOLUME),
    _on(
        "conv-separable", lambda: chain(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Conv2d(4, 6, 1))
    ),
    _on("conv-weight-norm", lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), folded=False),
    _on("conv-unfold", lambda: chain(nn.Unfold(3), nn.Unflatten(2, (7, 6)))),
    _on(
        "conv-fold",
        lambda: Function(
            lambda m, x: F.fold(F.unfold(m.c(x), 2, stride=2), (10, 8), 2, stride=2),
            c=nn.Conv2d(4, 4, (2, 1), padding=(1, 0)),
        ),
        exporters=("dynamo",),
    ),
)

POOLS = (
    _on("pool-max", lambda: nn.MaxPool2d(2)),
    _on("pool-max-overlapping", lambda: nn.MaxPool2d(3, 2, 1)),
    _on("pool-max-ceil", lambda: nn.MaxPool2d(2, ceil_mode=True)),
    _on("pool-max-dilated", lambda: nn.MaxPool2d(2, 1, dilation=2)),
    _on("pool-max-1d", lambda: nn.MaxPool1d(3), SIGNAL),
    _on("pool-max-3d", lambda: nn.MaxPool3d(2), VOLUME),
    _on("pool-average", lambda: nn.AvgPool2d(2)),
    _on("pool-average-padded", lambda: nn.AvgPool2d(3, 2, 1)),
    _on("pool-average-without-pads", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    _on("pool-average-ceil", lambda: nn.AvgPool2d(2, ceil_mode=True)),
    _on("pool-average-1d", lambda: nn.AvgPool1d(3, 2), SIGNAL),
    _on("pool-average-3d", lambda: nn.AvgPool3d(2), VOLUME),
    _on("pool-lp", lambda: chain(nn.Softplus(), nn.LPPool2d(3.0, 2))),
    _on("pool-adaptive-average-1", lambda: nn.AdaptiveAvgPool2d(1)),
    _on("pool-adaptive-average-3", lambda: nn.AdaptiveAvgPool2d((3, 4))),
    _on(
        "pool-adaptive-average-uneven", lambda: nn.AdaptiveAvgPool2d((4, 3)), exporters=("dynamo",)
    ),
    _on("pool-adaptive-max-1", lambda: nn.AdaptiveMaxPool2d(1)),
    _on("pool-adaptive-max-3", lambda: nn.AdaptiveMaxPool2d((3, 4))),
    _on("pool-global-mean", lambda: Function(lambda m, x: x.mean((2, 3), keepdim=True))),
    _on("pool-global-max", lambda: Function(lambda m, x: x.amax((2, 3), keepdim=True))),
)

NORMS = (
    *(
        _on(f"norm-batch-{rank + 1}d", lambda n=norm: chain(n(4), nn.ReLU()), sides, folded=False)
        for rank, (norm, sides) in enumerate(
            ((nn.BatchNorm1d, SIGNAL), (nn.BatchNorm2d, IMAGE), (nn.BatchNorm3d, VOLUME))
        )
    ),
    _on(
        "norm-batch-folded", lambda: chain(nn.BatchNorm2d(4), nn.ReLU()), constant=("0.*", "1.0.*")
    ),
    _on(
        "norm-batch-training", lambda: chain(nn.BatchNorm2d(4), nn.ReLU()), training=True,
        exporters=("legacy",)),
    _on("norm-batch-no-affine", lambda: nn.BatchNorm2d(4, affine=False), folded=False),
    _on("norm-group", lambda: nn.GroupNorm(2, 4)),
    _on("norm-group-no-affine", lambda: nn.GroupNorm(2, 4, affine=False)),
    _on("norm-instance", lambda: nn.InstanceNorm2d(4, affine=True)),
    _on("norm-instance-no-affine", lambda: nn.InstanceNorm2d(4)),
    _on("norm-instance-1d", lambda: nn.InstanceNorm1d(4, affine=True), SIGNAL),
    _on("norm-layer-image", lambda: nn.LayerNorm((4, 9, 8))),
    _on(
        "norm-layer-channels",
        lambda: Function(
            lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(4)
        ),
    ),
    _on("norm-local-response", lambda: nn.LocalResponseNorm(3, 0.1, 0.6, 1.5)),
)  # fmt: skip

RESIZES = (
    _on("resize-nearest", lambda: nn.Upsample(scale_factor=2)),
    _on("resize-nearest-uneven", lambda: nn.Upsample(scale_factor=(1.5, 2.5))),
    _on("resize-nearest-size", lambda: nn.Upsample(size=(13, 11))),
    _on("resize-bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    _on(
        "resize-bilinear-corners",
        lambda: nn.Upsample(size=(14, 11), mode="bilinear", align_corners=True),
    ),
    _on("resize-bilinear-down", lambda: nn.Upsample(scale_factor=0.5, mode="bilinear")),
    _on("resize-bicubic", lambda: nn.Upsample(scale_factor=2, mode="bicubic")),
    _on("resize-linear-1d", lambda: nn.Upsample(scale_factor=2, mode="linear"), SIGNAL),
    _on("resize-trilinear", lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    _on(
        "resize-antialias",
        lambda: Function(
            lambda m, x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True)
        ),
        exporters=("dynamo",),
    ),
    _on("pixel-shuffle", lambda: nn.PixelShuffle(2)),
    _on("pixel-unshuffle", lambda: chain(nn.ZeroPad2d((0, 0, 0, 1)), nn.PixelUnshuffle(2))),
    _on("channel-shuffle", lambda: nn.ChannelShuffle(2), exporters=("dynamo",)),
    _on(
        "grid-sample",
        lambda: Function(
            lambda m, x: F.grid_sample(
                x, m.grid.tanh().expand(x.shape[0], -1, -1, -1), align_corners=False
            ),
            grid=torch.randn(1, 4, 5, 2),
        ),
        folded=False,
    ),
    _on(
        "affine-grid",
        lambda: Function(
            lambda m, x: F.grid_sample(
                x,
                F.affine_grid(
                    m.theta.expand(x.shape[0], -1, -1), [x.shape[0], 4, 6, 5], align_corners=False
                ),
                align_corners=False,
            ),
            theta=torch.tensor([[[0.7, 0.1, 0.0], [-0.2, 0.8, 0.1]]]),
        ),
    ),
    *(
        _on(f"pad-{mode}", lambda m=mode: Function(lambda _, x: F.pad(x, (1, 2, 0, 3), mode=m)))
        for mode in ("constant", "reflect", "replicate", "circular")
    ),
    _on("pad-negative", lambda: Function(lambda _, x: F.pad(x, (-1, 2, -2, 0)))),
)


def _residual(name: str, norm, **options) -> Case:  # type: ignore[no-untyped-def]
    def build() -> nn.Module:
        conv, block = nn.Conv2d(3, 4, 3), _Block(norm)
        return chain(conv, block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    return Case(f"net-residual-{name}", build, IMAGE, "categorical", **options)


NETWORKS = (
    Case(
        "net-lenet",
        lambda: chain(
            *(nn.Conv2d(1, 4, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6, 10)),
        ),
        floats(1, 12, 12),
        "categorical",
    ),
    _residual("batch-norm", nn.BatchNorm2d, folded=False),
    _residual("batch-norm-training", nn.BatchNorm2d, training=True, exporters=("legacy",)),
    _residual("group-norm", lambda c: nn.GroupNorm(2, c)),
    Case(
        "net-squeeze-excite",
        lambda: chain(nn.Conv2d(3, 4, 3), _Squeeze(), nn.Flatten(), nn.Linear(168, 5)),
        IMAGE,
        "categorical",
    ),
    Case(
        "net-autoencoder",
        lambda: chain(
            nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid()
        ),
        floats(1, 8, 8),
    ),
    Case(
        "net-segmentation",
        lambda: Function(
            lambda m, x: m.head(torch.cat([x, m.up(m.down(x))], 1)),
            down=chain(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU()),
            up=nn.Upsample(scale_factor=2),
            head=nn.Conv2d(7, 2, 1),
        ),
        floats(3, 8, 8),
    ),
)

CASES = (*CONVOLUTIONS, *POOLS, *NORMS, *RESIZES, *NETWORKS)

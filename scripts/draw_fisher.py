"""Write docs/pictures/fisher.png: the Fisher matrix of a small network, its blocks, and K-FAC.

Run: ``python -m scripts.draw_fisher``. The matrices are computed from their definitions in NumPy.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kfac_engine.data import digits

Array = npt.NDArray[np.float64]
PICTURE = Path(__file__).resolve().parent.parent / "docs/pictures/fisher.png"
_HIDDEN, _CLASSES, _STEPS, _RATE = 8, 10, 300, 0.5
_GREY = "#808080"  # legible on white and on black


class Network(NamedTuple):
    """Weights of ``softmax(tanh(x W₁) W₂)``; the last row of each matrix is the bias."""

    first: Array
    second: Array


class Matrices(NamedTuple):
    """The Fisher matrix of a network, its diagonal blocks, and ``A ⊗ G`` for each."""

    fisher: Array
    blocks: Array
    kronecker: Array


def inputs() -> tuple[Array, npt.NDArray[np.int64]]:
    """Return 500 digits of 4×4 pixels with a one appended, ``(500, 17)``, and their classes."""
    images, labels = digits()
    pixels = images[:500, 0].reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)
    return _with_one(pixels.astype(np.float64)), labels[:500]


def trained(a: Array, labels: npt.NDArray[np.int64]) -> Network:
    """Return a network after some steps of gradient descent on all examples."""
    generator = np.random.default_rng(0)
    network = Network(
        generator.normal(scale=0.5, size=(a.shape[1], _HIDDEN)),
        generator.normal(scale=0.5, size=(_HIDDEN + 1, _CLASSES)),
    )
    for _ in range(_STEPS):
        hidden, probabilities = forward(network, a)
        ds = probabilities - np.eye(_CLASSES)[labels]
        gradients = (
            a.T @ ((ds @ network.second[:-1].T) * (1 - hidden[:, :-1] ** 2)),
            hidden.T @ ds,
        )
        network = Network(
            *(w - _RATE * g / len(a) for w, g in zip(network, gradients, strict=True))
        )
    return network


def matrices(network: Network, a: Array) -> Matrices:
    """Return the Fisher matrix of a network and its approximations.

    The Fisher matrix is the mean over examples of ``Σ_c p_c g_c g_cᵀ``, with the gradient ``g_c``
    of ``−log p_c``. The factors of K-FAC are those of Martens & Grosse (2015), equation 1.
    """
    hidden, probabilities = forward(network, a)
    cotangents = probabilities - np.eye(_CLASSES)[:, None]  # of −log p_c, (classes, 500, classes)
    weighted = np.sqrt(probabilities.T)[:, :, None] * cotangents
    first = (weighted @ network.second[:-1].T) * (1 - hidden[:, :-1] ** 2)
    layers = [(a, first), (hidden, weighted)]
    gradients = np.concatenate(
        [np.einsum("ni,cno->cnio", rows, ds).reshape(_CLASSES * len(a), -1) for rows, ds in layers],
        axis=1,
    )
    fisher = gradients.T @ gradients / len(a)
    kronecker = np.zeros_like(fisher)
    blocks = np.zeros_like(fisher)
    start = 0
    for rows, ds in layers:
        size = rows.shape[1] * ds.shape[2]
        inside = (slice(start, start + size),) * 2
        output = np.einsum("cno,cnp->op", ds, ds) / len(a)
        kronecker[inside] = np.kron(rows.T @ rows / len(a), output)
        blocks[inside] = fisher[inside]
        start += size
    return Matrices(fisher, blocks, kronecker)


def forward(network: Network, a: Array) -> tuple[Array, Array]:
    """Return the hidden values with a one, ``(500, 9)``, and the probabilities ``(500, 10)``."""
    hidden = _with_one(np.tanh(a @ network.first))
    logits = hidden @ network.second
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def _with_one(rows: Array) -> Array:
    return np.hstack([rows, np.ones((len(rows), 1))])


def draw(picture: Matrices, path: Path) -> None:
    """Draw three matrices next to each other, on a logarithmic scale of colours."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    largest = picture.fisher.max()
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    panels = {
        "Fisher matrix": picture.fisher,
        "blocks of its two layers": picture.blocks,
        "K-FAC: $A \\otimes G$ for each layer": picture.kronecker,
    }
    for axis, (title, matrix) in zip(axes, panels.items(), strict=True):
        axis.imshow(
            np.maximum(np.abs(matrix), 1e-4 * largest),
            norm=LogNorm(1e-4 * largest, largest),
            cmap="viridis",
            interpolation="nearest",
        )
        axis.set_title(title, color=_GREY, fontsize=11)
        axis.set_xticks([])
        axis.set_yticks([])
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, transparent=True)
    pyplot.close(figure)


if __name__ == "__main__":
    rows, labels = inputs()
    result = matrices(trained(rows, labels), rows)
    draw(result, PICTURE)
    error = np.linalg.norm(result.blocks - result.kronecker) / np.linalg.norm(result.blocks)
    share = np.linalg.norm(result.blocks) / np.linalg.norm(result.fisher)
    print(f"{len(result.fisher)} parameters: the blocks have {share:.1%} of the norm,")
    print(f"the error of K-FAC is {error:.1%} of the norm of the blocks")

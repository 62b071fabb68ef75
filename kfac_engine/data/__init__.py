"""Provides the demo's data and models; README.md in this folder names their sources."""

from importlib.resources import files

import numpy as np
import numpy.typing as npt

from kfac_engine.errors import UnknownNameError, suggestion

MODELS = ("mlp", "cnn")
_WHITE = 16  # largest pixel: the number of black dots in a 4×4 cell of the scan


def digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return images ``(1797, 1, 8, 8)`` of digits, in [0, 1], and their classes ``(1797,)``."""
    with (files(__name__) / "digits.npz").open("rb") as file, np.load(file) as stored:
        images, labels = stored["images"], stored["labels"]
    return (images[:, None] / np.float32(_WHITE)).astype(np.float32), labels.astype(np.int64)


def demo_model(name: str) -> bytes:
    """Return an untrained classifier of the digits as a serialized ONNX model.

    Args:
        name: ``"mlp"`` (three dense layers) or ``"cnn"`` (three convolutions, two dense layers).

    Returns:
        The content of an ``.onnx`` file: input ``image`` ``(batch, 1, 8, 8)``, output ``logits``
        ``(batch, 10)``.

    Raises:
        UnknownNameError: ``name`` is neither.
    """
    if name not in MODELS:
        raise UnknownNameError(
            f"unknown demo model '{name}'{suggestion(name, MODELS)}; choose one of: "
            f"{', '.join(MODELS)}."
        )
    return (files(__name__) / f"{name}.onnx").read_bytes()

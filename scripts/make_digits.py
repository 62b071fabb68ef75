"""Writes the digits of scikit-learn, on which the demo trains.

Run from the repository root: ``python -m scripts.make_digits``.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).resolve().parent.parent / "kfac_engine" / "data" / "digits.npz"


def write(path: Path = TARGET) -> None:
    """Write images and labels as bytes to one compressed file."""
    digits = load_digits()
    np.savez_compressed(
        path, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8)
    )


if __name__ == "__main__":
    write()
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")

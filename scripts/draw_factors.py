"""Write docs/pictures/factors.svg: spectra of the factors of two layers next to the damping.

Run: ``python -m scripts.draw_factors``.
"""

from pathlib import Path

from matplotlib.figure import Figure

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from scripts.pictures import grey_svg

PICTURE = Path(__file__).resolve().parent.parent / "docs/pictures/factors.svg"
_LAYERS = ("conv3.weight", "dense2.weight")


def drawing() -> Figure:
    """Return the spectra of the factors of the bundled network after a batch of 256 digits."""
    engine = ke.Engine.from_onnx(demo_model("cnn"), loss="categorical", damping=1e-3)
    engine.observe({"image": digits()[0][:256]})
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    for name, axes in zip(_LAYERS, figure.subplots(1, len(_LAYERS)), strict=True):
        engine.factors[name].plot(ax=axes)
    return figure


if __name__ == "__main__":
    PICTURE.write_text(grey_svg(drawing()), encoding="utf-8")

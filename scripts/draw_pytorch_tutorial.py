"""Write docs/tutorials/pictures/pytorch.svg: the curves of the tutorial on PyTorch.

Run: ``python -m scripts.draw_pytorch_tutorial``, where torch and onnxscript are installed.
"""

import re
from pathlib import Path

from scripts.pictures import grey_svg

FOLDER = Path(__file__).resolve().parent.parent / "docs/tutorials"
PICTURE = FOLDER / "pictures/pytorch.svg"
_COLOURS = ("#d1495b", "#3b8ea5", "#c08a00")  # legible on white and on black


def curves() -> dict[str, tuple[list[float], list[float]]]:
    """Return the CPU seconds and the losses of the runs of the page, after an execution of it."""
    import torch

    torch.set_num_threads(1)
    names: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    text = (FOLDER / "pytorch.md").read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(compile(code, "pytorch.md", "exec"), names)
    return names["curves"]


def draw(path: Path) -> None:
    """Draw a curve for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2))
    axes = figure.subplots()
    for (name, (seconds, losses)), colour in zip(curves().items(), _COLOURS, strict=True):
        axes.plot(seconds, losses, label=name, color=colour)
    axes.set_xlabel("CPU seconds")
    axes.set_ylabel("test loss")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    path.write_text(grey_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    draw(PICTURE)

"""Write docs/pictures/uncertainty.svg, and print the table of docs/laplace.md.

Run: ``python -m scripts.draw_uncertainty``. It reads the lines that ``scripts.measure_uncertainty``
writes, and trains the network of the page for the pictures.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.data import demo_model, digits
from scripts import markdown
from scripts.measure_pruning import Task, read_results
from scripts.measure_uncertainty import RESULTS, ROOT, Predicted, entropy
from scripts.pictures import GREY, grey_svg

PICTURE = ROOT / "docs/pictures/uncertainty.svg"
_COLOURS = {"upright": "#3b8ea5", "turned": "#d1495b"}


def table(entries: list[Predicted]) -> Iterator[str]:
    """Return the lines of the table of the page."""
    cells = []
    for key in dict.fromkeys((entry.data, entry.method) for entry in entries):
        rows = [entry for entry in entries if (entry.data, entry.method) == key]
        numbers = (
            ", ".join(f"{getattr(row, field):.2f}" for row in rows)
            for field in ("auroc", "log_loss", "accuracy")
        )
        cells.append((*key, *numbers))
    heads = "data", "prediction", "AUROC of turned images", "log loss", "accuracy"
    return markdown.table(heads, cells)


def draw() -> Any:
    """Return histograms of the entropy of upright and turned digits, plain and with a posterior."""
    from matplotlib.figure import Figure

    images, labels = digits()
    job = Task(demo_model("cnn"), images, labels, 1400, 1400, None)
    engine, key = job.trained(seed=0)
    posterior = ke.Laplace(job.curvature(engine, key, labeled=True)).fit_prior()
    pictures = {"upright": images[1400:], "turned": np.rot90(images[1400:], axes=(2, 3)).copy()}
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = {"the model alone": plain(engine), "with the posterior": of(posterior)}
    for axes, (title, predict) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, colour in _COLOURS.items():
            values = entropy(predict(pictures[name]))
            axes.hist(values, np.linspace(0, np.log(10), 24), color=colour, alpha=0.6, label=name)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("entropy of the prediction in nats")
        axes.grid(alpha=0.3, color=GREY)
    figure.axes[0].set_ylabel("images")
    figure.axes[0].legend()
    return figure


def plain(engine: ke.Engine) -> Any:
    """Return the probabilities of the model alone as a function of images."""
    from scipy.special import softmax

    return lambda images: softmax(engine.predict({"image": images}), axis=1)


def of(posterior: ke.Laplace) -> Any:
    """Return the probabilities of a posterior as a function of images."""

    def predict(images: Array) -> Array:
        probabilities = posterior.predict({"image": images}).probabilities
        assert probabilities is not None, "the loss has classes"
        return probabilities

    return predict


def main() -> None:
    """Write the picture, and print the table."""
    PICTURE.write_text(grey_svg(draw()), encoding="utf-8")
    print("\n".join(table(read_results(RESULTS, Predicted))))


if __name__ == "__main__":
    main()

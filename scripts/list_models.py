"""Writes docs/models.md, with the result of one step for each model of the ``onnx`` package.

Run from the repository root: ``python -m scripts.list_models``. A step computes gradients,
statistics, inverses and natural gradients, for targets of zero. The networks take minutes and
gigabytes; ``--small`` keeps their rows of the page.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from scripts import markdown

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
SMALL = ("pytorch-converted", "pytorch-operator", "simple")
NOTHING_TO_TRAIN = "has no trainable parameter"
# The first dense layers of these networks read 25,088 and 18,432 features. Full input factors and
# their inverses would take gigabytes and minutes, so the factors are diagonal.
CHOICES = {
    "light_vgg19": {"fully_connected": "kron_in_diag"},
    "light_zfnet512": {"fully_connected": "kron_in_diag"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """A model and its result: ``"runs"``, or the error."""

    name: str
    layers: str
    reasons: str
    result: str


def try_model(name: str, path: Path) -> Row:
    """Return the row of a model, after one step."""
    layers = reasons = ""
    try:
        engine = ke.Engine.from_onnx(path, loss="normal", approximations=CHOICES.get(name))
        layers, reasons = describe(engine)
        engine.set_parameters(draw_weights(engine.parameters))
        inputs = make_inputs(path)
        output = ke.load_model(path).run(inputs)[load_graph(path).outputs[0]]
        result = engine.step(inputs, np.zeros_like(output))
    except ke.KfacError as error:
        return Row(name, layers, reasons, " ".join(str(error).split()))
    finite = all(np.isfinite(array).all() for array in result.natural_gradients.values())
    return Row(name, layers, reasons, "runs" if finite else "gives NaN")


def make_inputs(path: Path) -> dict[str, np.ndarray]:
    """Return random floats or zero integers in the declared shapes; open axes have size two."""
    rng = np.random.default_rng(0)
    feeds = {}
    for entry in load_graph(path).inputs:
        shape = [side if isinstance(side, int) else 2 for side in entry.shape or ()]
        numbers = rng.uniform(0.1, 0.9, shape) if entry.dtype.kind == "f" else np.zeros(shape)
        feeds[entry.name] = numbers.astype(entry.dtype)
    return feeds


def draw_weights(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return random weights of variance 2 / fan-in; the networks of the package are constant."""
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.standard_normal(value.shape) * np.sqrt(2 / max(1, np.prod(value.shape[1:])))
        ).astype(value.dtype)
        for name, value in parameters.items()
        if value.ndim >= 2
    }


def describe(engine: ke.Engine) -> tuple[str, str]:
    """Return texts such as ``53 conv2d, 106 generic`` and ``53 × scale of …``."""
    kinds = Counter(layer.kind for layer in engine.layers)
    reasons = Counter(layer.reason for layer in engine.layers if layer.reason)
    return (
        ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)),
        ", ".join(f"{count} × {reason}" for reason, count in reasons.items()),
    )


def small_models() -> Iterator[Row]:
    """Return the models of one or a few operators."""
    for folder in SMALL:
        for path in sorted((DATA / folder).glob("*/model.onnx")):
            yield try_model(f"{folder}/{path.parent.name}", path)


def networks() -> Iterator[Row]:
    """Return the well-known networks, whose weights are constants."""
    for path in sorted((DATA / "light").glob("*.onnx")):
        yield try_model(path.stem, path)


def networks_of_the_page() -> list[Row]:
    """Return the rows of the first table of the page."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition("## Networks")
    lines, _, _ = after.partition("## Small models")
    cells = [line.strip("|").split("|") for line in lines.splitlines() if line.startswith("| `")]
    return [Row(name.strip(" `"), *(cell.strip() for cell in rest)) for name, *rest in cells]


def real_size() -> str:
    """Return the section of the page that ``bench --suite models`` wrote, which is kept."""
    _, head, section = PAGE.read_text(encoding="utf-8").partition("## Real size")
    return head + section


def table(rows: list[Row]) -> str:
    """Return a Markdown table."""
    cells = [(f"`{row.name}`", f"{row.layers}", row.reasons, row.result) for row in rows]
    return "\n".join(markdown.table(("model", "layers", "generic because", "result"), cells))


def page(large: list[Row], small: list[Row]) -> str:
    """Return the page."""
    trained = [row for row in small if NOTHING_TO_TRAIN not in row.result]
    runs = sum(row.result == "runs" for row in trained)
    return f"""# Which models run

This page lists the result of one step for each model that the `onnx` package contains for its
tests. A step computes gradients, statistics, inverses and natural gradients, from random weights.
Look here for a network, or for an operator and the error that it raises. `kfac-engine inspect`
gives the same information for a model of your own.

`scripts/list_models.py` wrote the page with onnx {onnx.__version__}. The column *generic because*
gives the reasons why parameters belong to no layer ([layers](layers.md)).

## Networks

{table(large)}

VGG-19 and ZFNet-512 have `approximations={{"fully_connected": "kron_in_diag"}}`. Without it, the
input factors of their first dense layers would have 25,089 and 18,433 rows.

## Small models

The package has {len(small)} models of one or a few operators.
{len(small) - len(trained)} of them have no parameter. Of the other {len(trained)}, {runs} run.

{table(trained)}

{real_size()}"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/models.md.")
    parser.add_argument("--small", action="store_true", help="keep the networks' rows")
    large = networks_of_the_page() if parser.parse_args().small else list(networks())
    PAGE.write_text(page(large, list(small_models())), encoding="utf-8")
    print(f"written to {PAGE}")

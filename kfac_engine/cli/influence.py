"""``influence``: score training examples by their influence on queries."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, Option, command, file_option, output
from kfac_engine.cli.display import print_json, print_table, say, working
from kfac_engine.cli.options import (
    batch_option,
    curvature_option,
    json_option,
    labeled_data,
    read_curvature,
)
from kfac_engine.errors import InputError

if TYPE_CHECKING:
    from kfac_engine._types import Array
    from kfac_engine.cli.files import ShownBatches

# Numbers of queries that have a row in the table, and of examples in a row.
_MOST_QUERIES, _MOST_EXAMPLES = 20, 5


_FILES = (
    curvature_option,
    *labeled_data("--inputs", "Training data"),
    file_option("Data", "--queries",
        help="Queries, as for --inputs; without queries, each example is scored for itself."),
    file_option(
        "Data", "--query-targets", help="Targets of the queries in a separate file, .npz or .npy."),
    output("-o", "--out", required=True,
        help="File of the scores (.npz): scores (queries, examples), or self_scores (examples)."),
)  # fmt: skip


@command(
    "Score the examples of the training data for queries, or for themselves.",
    "kfac-engine influence mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --inputs images.npy --targets labels.npy \\\n"
    "  --queries queries.npy --query-targets answers.npy -o scores.npz",
    MODEL,
    batch_option,
    Option("Curvature", "--damping", type=click.FloatRange(min=0),
        help="Damping λ, added to the Fisher matrix; by default a tenth of the mean eigenvalue of "
        "each block."),
    json_option,
    files=_FILES,
)  # fmt: skip
def influence(
    model: Path,
    files: SimpleNamespace,
    batch_size: int | None,
    damping: float | None,
    as_json: bool,
) -> None:
    import numpy as np

    import kfac_engine as ke
    from kfac_engine.cli.files import ShownBatches, read_data
    from kfac_engine.system.writing import write_rendered

    if files.queries is None and files.query_targets is not None:
        raise InputError("--query-targets needs --queries, the inputs of the same examples.")
    curvature = read_curvature(files.curvature, model, files.inputs)
    with working("decomposing"):
        scores = ke.Influence(curvature, damping)

    def batches(inputs: Path, targets: Path | None) -> "ShownBatches":
        _, data = read_data(inputs, targets, model, mapped=True)
        return ShownBatches(curvature.layout.assembly, data, batch_size, labeled=True)

    train = batches(files.inputs, files.targets)
    if files.queries is not None:
        queries = batches(files.queries, files.query_targets)
        name, result = "scores", scores.scores(queries, train)
    else:
        name, result = "self_scores", scores.self_scores(train)
    with working("writing"):
        write_rendered(files.out, lambda stream: np.savez(stream, **dict[str, Any]({name: result})))
    _report(name, result, files.out, as_json)


def _report(name: str, scores: "Array", out: Path, as_json: bool) -> None:
    import numpy as np

    rows = np.atleast_2d(scores)
    if as_json:
        highest, lowest = zip(*(highest_scores(row, _MOST_EXAMPLES) for row in rows), strict=True)
        shape = list(scores.shape)
        print_json({"shape": shape, "highest": highest, "lowest": lowest, "out": str(out)})
        return
    if name == "self_scores":
        pairs = [(str(i), f"{scores[i]:.4g}") for i in highest_scores(scores, _MOST_EXAMPLES)[0]]
        print_table("examples with the largest self scores", ("example", " score"), pairs)
    else:
        heads = ("query", "highest scores: examples", "lowest scores: examples")
        entries = [
            (
                str(query),
                *(", ".join(map(str, places)) for places in highest_scores(row, _MOST_EXAMPLES)),
            )
            for query, row in enumerate(rows[:_MOST_QUERIES])
        ]
        print_table("influence on the queries", heads, entries)
        if len(rows) > _MOST_QUERIES:
            say(f"{len(rows) - _MOST_QUERIES} more queries are in the file")
    say(f"written to {out}")


def highest_scores(scores: "Array", count: int) -> tuple[list[int], list[int]]:
    """Return the places of the ``count`` highest scores, descending, and lowest, ascending."""
    import numpy as np

    order = np.argsort(-scores, kind="stable")
    return order[:count].tolist(), order[::-1][:count].tolist()

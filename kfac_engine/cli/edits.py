"""``replace-head`` and the adapter commands: edit a model and keep the form of its file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac_engine.cli.command import MODEL, Option, command, count_option, file_option, output
from kfac_engine.cli.display import say, working
from kfac_engine.cli.options import one_or_all

if TYPE_CHECKING:
    from kfac_engine.graph.write import ModelProto

model_option = output("-o", "--out", writes="model", required=True, help="The new model (.onnx).")

_HEAD = (
    count_option("Model", "--classes", default=None, help="Number of classes of the new head."),
    count_option("Model", "--outputs", default=None,
        help="Number of real outputs, in place of --classes; Softmax and Sigmoid after the head "
        "are removed."),
    Option("Model", "--at", metavar="VALUE",
        help="The value that the head reads, or its result; by default the last dense layer."),
    count_option("Model", "--seed", default=0, least=0, help="Seed of the new weights."),
)  # fmt: skip


@command(
    "Write a model whose last dense layer has new weights, for other classes.",
    "kfac-engine replace-head mlp.onnx --classes 5 -o new.onnx",
    MODEL,
    model_option,
    options=_HEAD,
)
def run_replace_head(model: Path, options: dict[str, Any], out: Path) -> None:
    import kfac_engine as ke

    with working("replacing the head"):
        edited = ke.replace_head(model, **options, path=out)
    _report(edited, "head.", out)


_ADAPTERS = (
    count_option("Model", "--rank", default=8, help="Rank of the adapters."),
    Option("Model", "--layers", metavar="PATTERN", multiple=True, callback=one_or_all,
        help="Name or pattern of weights or nodes; by default all dense layers and 1 × 1 "
        "convolutions that are wide enough."),
    count_option("Model", "--seed", default=0, least=0, help="Seed of the new weights."),
)  # fmt: skip


@command(
    "Write a model with low-rank updates of its layers, to be trained.",
    "kfac-engine add-adapters mlp.onnx --rank 4 -o adapted.onnx",
    MODEL,
    model_option,
    options=_ADAPTERS,
)
def run_add_adapters(model: Path, options: dict[str, Any], out: Path) -> None:
    import kfac_engine as ke

    with working("adding adapters"):
        edited = ke.add_adapters(model, **options, path=out)
    _report(edited, "lora", out)


@command(
    "Write a model whose weights contain its adapters.",
    "kfac-engine merge-adapters adapted.onnx -o merged.onnx",
    MODEL,
    file_option(
        "Data", "--adapter", help="File of save-adapter, whose adapters replace those of the model."
    ),
    model_option,
)
def run_merge_adapters(model: Path, adapter: Path | None, out: Path) -> None:
    import kfac_engine as ke

    with working("merging"):
        source = model if adapter is None else ke.load_adapter(model, adapter)
        edited = ke.merge_adapters(source, path=out)
    _report(edited, "lora", out)


@command(
    "Write the adapters of a model as a file that ONNX Runtime loads.",
    "kfac-engine save-adapter adapted.onnx -o task.onnx_adapter",
    MODEL,
    output("-o", "--out", required=True, help="File for ONNX Runtime (.onnx_adapter)."),
)
def run_save_adapter(model: Path, out: Path) -> None:
    import kfac_engine as ke

    ke.save_adapter(model, out)
    say(f"written to {out}")


def _report(edited: "ModelProto", part: str, out: Path) -> None:
    """Print the new weights, whose names contain a text, and the outputs of a model."""
    from kfac_engine.summary import dimensions

    for entry in edited.graph.initializer:
        if part in entry.name:
            say(f"{entry.name}: {dimensions(entry.dims)}")
    say(f"outputs: {', '.join(entry.name for entry in edited.graph.output)}")
    say(f"written to {out}")

"""``find-rate``: suggest a learning rate for a model and a data set."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import Choice, Group, file_path
from kfac_engine.cli.display import print_json, say, shown_warnings, working
from kfac_engine.cli.engine_options import EngineCommand
from kfac_engine.cli.options import (
    Options,
    data_sample_option,
    debug_option,
    gathered,
    json_option,
    keywords,
    labeled_data,
)
from kfac_engine.cli.train import OPTIMIZERS, SET_HERE

if TYPE_CHECKING:
    import kfac_engine as ke


_FILES: Options = (
    *labeled_data("--data"),
    data_sample_option,
    Group.OUTPUT.file("--plot", help="Picture of the losses (.png, .svg, .pdf)."),
)  # fmt: skip
_SEARCH = (
    Group.OPTIMIZER.option(
        "--optimizer", type=Choice(OPTIMIZERS), default="adam",
        help="The optimizer."),
    Group.OPTIMIZER.count(
        "--batch-size", default=128,
        help="Examples in a batch."),
    Group.SEARCH.option(
        "--lowest", default=1e-6, help="Rate of the first step."),
    Group.SEARCH.option(
        "--highest", default=10.0, help="Rate of the last step."),
    Group.SEARCH.option("--steps", default=100, help="Number of rates."),
)  # fmt: skip


@click.command(
    "find-rate",
    cls=EngineCommand,
    example="kfac-engine find-rate mlp.onnx --data digits.npz --optimizer adam",
    without=SET_HERE,
)
@click.argument("model", type=file_path)
@gathered("files", *_FILES)
@gathered("search", *_SEARCH)
@keywords()
@json_option
@debug_option
def find_rate(
    model: Path,
    files: SimpleNamespace,
    search: SimpleNamespace,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    """Suggest a learning rate, from a short run whose rate grows."""
    import kfac_engine as ke
    from kfac_engine.cli.files import check_files, data_of, read_sample
    from kfac_engine.training.rate_finder import check_plot

    read = {"--data": files.data, "--targets": files.targets, "--inputs": files.inputs}
    check_files({"--plot": files.plot}, read, model)
    if files.plot is not None:
        check_plot(files.plot)
    with working("preparing the model"), shown_warnings():
        sample = read_sample(files, model, options)
        engine = ke.Engine.from_onnx(
            model, sample_inputs=sample, gradient_dtype="float32", **options
        )
    with shown_warnings():
        result = ke.find_rate(
            engine, data_of(files), **vars(search), seed=options["seed"], progress=True
        )
        if files.plot is not None:
            result.plot(files.plot)
    _report(result, search.optimizer, as_json)


def _report(result: "ke.RateSearch", optimizer: str, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "suggestion": result.suggestion,
                "rates": result.rates.tolist(),
                "losses": result.losses.tolist(),
            }
        )
        return
    if result.suggestion is None:
        say("no rate lowers the loss clearly; try other rates (--lowest, --highest) or more steps")
    else:
        say(f"suggestion for {optimizer}: --learning-rate {result.suggestion:.3g}")
    if optimizer == "kfac":
        say("train with kfac needs no --learning-rate, and adapts the length of its steps")

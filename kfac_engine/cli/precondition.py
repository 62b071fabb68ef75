"""``precondition``: write the gradients and natural gradients of a batch."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from kfac_engine.cli.command import MODEL, Group, command, output
from kfac_engine.cli.display import (
    print_json,
    print_table,
    say,
    shown_warnings,
    tell,
    working,
)
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.options import json_option
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.errors import InputError
from kfac_engine.printable import printable
from kfac_engine.summary import dimensions

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine._types import Array
    from kfac_engine.losses.observed import Targets


_FILES = (
    Group.DATA.file(
        "--inputs", required=True,
        help="Batch: .npz with the inputs by name and 'targets', or a folder of such files, which "
        "are one batch. With --targets: the inputs, .npz or .npy."),
    Group.DATA.file(
        "--targets",
        help="Targets in a separate file, .npz or .npy. With --gradients, targets are "
        "optional."),
    Group.DATA.file(
        "--gradients", help="Gradients to precondition in place of the model's own (.safetensors)."
    ),
    output("--state", help="Moving averages, loaded if the file exists, then saved."),
    output("-o", "--out", required=True, help="File of the result (.safetensors)."),
)  # fmt: skip


# Name, shape, gradient norm and natural gradient norm of a parameter.
Norms: TypeAlias = tuple[str, tuple[int, ...], float, float]


@command(
    "Write the gradients of a batch and the preconditioned gradients.",
    "kfac-engine precondition mlp.onnx --inputs images.npy \\\n"
    "  --targets labels.npy -o gradients.safetensors",
    MODEL,
    Group.CURVATURE.option("--exp", default=-1.0, help="Power of the Fisher matrix."),
    Group.REFRESHES.option(
        "--refresh-every", type=int, default=10,
        help="Number of calls from one refresh of a factor to the next."),
    json_option,
    files=_FILES,
    options=engine_options(),
)  # fmt: skip
def run_precondition(
    model: Path,
    files: SimpleNamespace,
    exp: float,
    refresh_every: int,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli import files as reading
    from kfac_engine.datasets.forms import whole_batch
    from kfac_engine.system.reading import exists

    with working("reading"):
        inputs, data = reading.read_data(files.inputs, files.targets, model)
    with working("preparing the model"), shown_warnings():
        engine = ke.Engine.from_onnx(
            model, exps=(exp,), sample_inputs=inputs, **options,
            schedule=Schedule(refresh_every=refresh_every),
        )  # fmt: skip
        if files.state is not None and exists(files.state):
            # The parameters come from the model's file, not from the state.
            with warnings.catch_warnings(record=True) as issued:
                warnings.simplefilter("always")
                engine.load(files.state, parameters=False)
            for warning in issued:
                tell("warning", printable(str(warning.message)))
        gradients = (
            None
            if files.gradients is None
            else reading.read_gradients(files.gradients, engine.parameters)
        )
    with working("preconditioning"):
        batch = whole_batch(data, engine.example_axes, labeled=False)
        loss, *pair = _precondition(engine, *batch, gradients, exp)
        reading.write_result(files.out, *pair)
    if files.state is not None:
        engine.save(files.state)
    _report(loss, norm_rows(*pair), files.out, as_json)


def _precondition(
    engine: "ke.Engine",
    inputs: "Mapping[str, Array]",
    targets: "Targets",
    gradients: "dict[str, Array] | None",
    exp: float,
) -> "tuple[float | None, dict[str, Array], dict[str, Array]]":
    """Return the loss and both kinds of gradients; the loss is None for gradients of the user."""
    if gradients is not None:
        engine.observe(inputs, targets)
        return None, gradients, engine.precondition(gradients, exp=exp)
    if targets is None and engine.objective.targeted:
        raise InputError("the gradient needs targets: give --targets, or bring --gradients.")
    result = engine.step(inputs, targets)
    return result.loss, result.gradients, result.natural_gradients


def _report(loss: float | None, rows: list[Norms], path: Path, as_json: bool) -> None:
    if as_json:
        parameters = {
            name: {"shape": list(shape), "gradient_norm": g, "natural_gradient_norm": v}
            for name, shape, g, v in rows
        }
        print_json({"loss": loss, "parameters": parameters, "out": str(path)})
        return
    if loss is not None:
        say(f"loss {loss:.6g}")
    print_norms(rows)
    say(f"written to {path}")


def norm_rows(gradients: "dict[str, Array]", natural_gradients: "dict[str, Array]") -> list[Norms]:
    """Return the norms of each parameter."""
    import numpy as np

    # In half precision the squares would overflow.
    def norm(array: "Array") -> float:
        return float(np.linalg.norm(array.astype(np.float64)))

    return [
        (name, gradient.shape, norm(gradient), norm(natural_gradients[name]))
        for name, gradient in gradients.items()
    ]


def print_norms(rows: list[Norms]) -> None:
    """Print the rows of ``norm_rows`` as a table."""
    print_table(
        "gradients",
        ("parameter", "shape", " |gradient|", " |natural gradient|"),
        [(name, dimensions(shape), f"{g:.4g}", f"{v:.4g}") for name, shape, g, v in rows],
    )

"""``precondition``: write the gradients and natural gradients of a batch."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from kfac_engine.cli.command import MODEL, Option, command, file_option, output
from kfac_engine.cli.display import (
    print_json,
    print_table,
    say,
    shown_warnings,
    working,
)
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.options import json_option
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.errors import InputError, UnknownNameError, suggestion
from kfac_engine.summary import dimensions
from kfac_engine.system.reading import exists

if TYPE_CHECKING:
    from kfac_engine._types import Array


_FILES = (
    file_option("Data", "--inputs", required=True,
        help="Batch: .npz with the inputs by name and 'targets', or a folder of such files, which "
        "are one batch. With --targets: the inputs, .npz or .npy."),
    file_option("Data", "--targets",
        help="Targets in a separate file, .npz or .npy. With --gradients, targets are "
        "optional."),
    file_option("Data", "--gradients",
        help="Gradients to precondition in place of the model's own (.safetensors)."),
    output("--state", help="Moving averages, loaded if the file exists, then saved."),
    output("-o", "--out", required=True, help="File of the result (.safetensors)."),
)  # fmt: skip


# Name, shape, gradient norm and natural gradient norm of a parameter.
Norms: TypeAlias = tuple[str, tuple[int, ...], float, float]

# Beginnings of the keys in the files of gradients.
GRADIENT = "gradient/"
NATURAL_GRADIENT = "natural_gradient/"


@command(
    "Write the gradients of a batch and the preconditioned gradients.",
    "kfac-engine precondition mlp.onnx --inputs images.npy \\\n"
    "  --targets labels.npy -o gradients.safetensors",
    MODEL,
    Option("Curvature", "--exp", default=-1.0, help="Power of the Fisher matrix."),
    Option("Refreshes of the inverses", "--refresh-every", type=int, default=10,
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
    from kfac_engine.cli.files import read_data
    from kfac_engine.datasets.forms import whole_batch
    from kfac_engine.system.state_files import write_tensors

    with working("reading"):
        inputs, data = read_data(files.inputs, files.targets, model)
    with working("preparing the model"), shown_warnings():
        engine = ke.Engine.from_onnx(
            model, exps=(exp,), sample_inputs=inputs, **options,
            schedule=Schedule(refresh_every=refresh_every),
        )  # fmt: skip
        if files.state is not None and exists(files.state):
            # The parameters come from the model's file, not from the state.
            engine.load(files.state, parameters=False)
    with working("preconditioning"):
        batch, targets = whole_batch(data, engine.example_axes, labeled=False)
        loss: float | None = None
        if files.gradients is not None:
            gradients = read_gradients(files.gradients, engine.parameters)
            engine.observe(batch, targets)
            natural_gradients = engine.precondition(gradients, exp=exp)
        elif targets is None and engine.objective.targeted:
            raise InputError("the gradient needs targets: give --targets, or bring --gradients.")
        else:
            result = engine.step(batch, targets)
            loss, gradients = result.loss, result.gradients
            natural_gradients = result.natural_gradients
        write_tensors(
            files.out,
            {GRADIENT + name: array for name, array in gradients.items()}
            | {NATURAL_GRADIENT + name: array for name, array in natural_gradients.items()},
        )
    if files.state is not None:
        engine.save(files.state)
    _report(loss, norm_rows(gradients, natural_gradients), files.out, as_json)


def read_gradients(path: Path, known: "Mapping[str, Array]") -> "dict[str, Array]":
    """Return the gradients in a safetensors file by parameter.

    Keys are ``<parameter>`` or ``gradient/<parameter>``. Natural gradients, which ``precondition``
    writes into the same file, are ignored. ``known`` are the parameters of the model.
    """
    from kfac_engine.system.state_files import read_tensors

    arrays = read_tensors(path, f"'{path}' as safetensors")[1]
    gradients = {}
    for key, array in arrays.items():
        if key.startswith(NATURAL_GRADIENT):
            continue
        name = key if key in known else key.removeprefix(GRADIENT)
        if name not in known:
            raise UnknownNameError(
                f"'{key}'{suggestion(name, known)} in '{path}' is not a trainable parameter; they "
                f"are: {', '.join(known)}."
            )
        if name in gradients:
            raise InputError(
                f"'{path}' holds two gradients of '{name}', under '{name}' and '{GRADIENT}{name}'; "
                f"leave one out."
            )
        gradients[name] = array
    if not gradients:
        raise InputError(f"'{path}' holds no gradient; its keys must be the parameters' names.")
    return gradients


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

"""Modules out to ONNX files, through either exporter of torch."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tests.exporters.case import Case

# Unlike each other and unlike any other side in the corpus: a mistaken axis shows.
EXPORT_BATCH, BATCH = 3, 7


def distinct_parameters(module: nn.Module) -> None:
    """Give every parameter element a value of its own, near the one it had.

    An element is then recognised wherever an exporter puts it, and norms are off their all-ones
    start.
    """
    parameters = list(module.parameters())
    with torch.no_grad():
        flat = torch.cat([p.detach().flatten() for p in parameters])
        noisy = flat + 0.05 * torch.randn_like(flat)
        while len(repeated := _repeated(noisy)):
            noisy[repeated] = flat[repeated] + 0.05 * torch.randn(len(repeated))
        for parameter, values in zip(
            parameters, noisy.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))


def _repeated(values: torch.Tensor) -> torch.Tensor:
    order = values.argsort()
    return order[1:][values[order].diff() == 0]


def export(case: Case, module: nn.Module, exporter: str, folder: Path) -> Path:
    """Write ``module`` with inputs called ``x0``, ``x1``, …; the first axis is the batch."""
    path = folder / f"{case.name}-{exporter}.onnx"
    torch.manual_seed(1)
    examples = case.inputs(BATCH if case.static else EXPORT_BATCH)
    WRITERS[exporter](case, module, examples, path)
    return path


def _legacy(case: Case, module: nn.Module, examples: tuple[torch.Tensor, ...], path: Path) -> None:
    inputs = [f"x{i}" for i in range(len(examples))]
    mode = torch.onnx.TrainingMode
    torch.onnx.export(
        module,
        examples,
        str(path),
        dynamo=False,
        input_names=inputs,
        dynamic_axes=None if case.static else {name: {0: "batch"} for name in inputs},
        training=mode.EVAL if case.folded and not case.training else mode.PRESERVE,
        do_constant_folding=case.folded and not case.training,
    )


def _dynamo(case: Case, module: nn.Module, examples: tuple[torch.Tensor, ...], path: Path) -> None:
    batch = torch.export.Dim.DYNAMIC
    torch.onnx.export(
        module,
        examples,
        str(path),
        dynamo=True,
        verbose=False,
        input_names=[f"x{i}" for i in range(len(examples))],
        dynamic_shapes=None if case.static else _nested(module, examples, batch),
        optimize=case.folded,
        external_data=False,
    )


def _nested(module: nn.Module, examples: tuple[torch.Tensor, ...], batch: object) -> object:
    # ``forward(*inputs)`` takes all of them as one argument.
    each = tuple({0: batch} for _ in examples)
    names = module.forward.__code__.co_varnames[: module.forward.__code__.co_argcount]
    return each if len(names) > 1 else (each,)


WRITERS: dict[str, Callable[[Case, nn.Module, tuple[torch.Tensor, ...], Path], None]] = {
    "legacy": _legacy,
    "dynamo": _dynamo,
}

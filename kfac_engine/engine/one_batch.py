"""Preconditions the gradients of a single batch with a temporary engine."""

from collections.abc import Mapping
from dataclasses import fields

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.engine.options import EngineOptions, check_names
from kfac_engine.engine.result import Result
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.observed import Targets


def precondition(
    model: ModelSource,
    inputs: Mapping[str, Array],
    targets: Targets,
    loss: LossChoices,
    **options: object,
) -> Result:
    """Return gradients and natural gradients of one batch.

    Args:
        model: Path, bytes or ``ModelProto``.
        inputs: Input name to array.
        targets: The targets of the loss.
        loss: As for ``Engine.from_onnx``.
        **options: Further options of ``Engine.from_onnx``.

    Returns:
        Loss, gradients, natural gradients.

    Raises:
        UnknownNameError: An option is unknown.
    """
    check_names(precondition.__name__, options, [field.name for field in fields(EngineOptions)])
    engine = Engine.from_onnx(model, loss=loss, **{"sample_inputs": inputs, **options})  # type: ignore[arg-type] # options are from_onnx's own
    return engine.step(inputs, targets)

"""Loads a model that can be evaluated and differentiated."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.arguments import texts
from kfac_engine.graph.load import ModelSource
from kfac_engine.graph.load import load_model as load
from kfac_engine.runtime.model import OnnxModel


def load_model(
    source: ModelSource,
    *,
    trainable: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    threads: int | None = None,
    sample_inputs: Mapping[str, Array] | None = None,
) -> OnnxModel:
    """A model that can be evaluated and differentiated.

    Args:
        source: Path, bytes or ``ModelProto``.
        trainable: Patterns of parameter names, or a single one; None takes what the graph uses like
            parameters.
        freeze: Patterns of names to exclude from training, or a single one.
        threads: Threads for ONNX Runtime; None leaves the choice to it.
        sample_inputs: A batch to find shapes with, where none can be made up.

    Returns:
        The model; ``model.run(inputs)`` gives a trace.

    Raises:
        InputError: The file or an argument is wrong.
        UnknownNameError: A pattern fits no constant of floating-point numbers.
        ModelError: Nothing is left to train.
    """
    for name, patterns in (("trainable", trainable), ("freeze", freeze)):
        if not isinstance(patterns, str | None):
            texts(name, patterns, "['fc*']")
    return OnnxModel(
        load(source),
        trainable=trainable,
        freeze=freeze,
        threads=threads or 0,
        sample_inputs=sample_inputs,
    )

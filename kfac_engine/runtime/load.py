"""Loads a model that can be evaluated and differentiated."""

from collections.abc import Mapping, Sequence

from kfac_engine._types import Array
from kfac_engine.arguments import MOST_THREADS, patterns, whole
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
    """Return a model that can be evaluated and differentiated.

    Args:
        source: Path, bytes or ``ModelProto``.
        trainable: Pattern or patterns of parameter names; None for the constants that the graph
            uses like parameters.
        freeze: Pattern or patterns of names that are not trained.
        threads: Number of threads of ONNX Runtime; None for its default.
        sample_inputs: A batch for the sample run, as a map from input to array; needed if the model
            does not run on generated inputs.

    Returns:
        The model; ``model.run(inputs)`` returns a trace.

    Raises:
        InputError: The file or an argument is wrong.
        UnknownNameError: A pattern matches no floating-point constant.
        ModelError: The model has no parameter to train.
    """
    patterns("trainable", trainable)
    patterns("freeze", freeze)
    if threads is not None:
        whole("threads", threads, least=0, most=MOST_THREADS)
    return OnnxModel(
        load(source),
        trainable=trainable,
        freeze=freeze,
        threads=threads or 0,
        sample_inputs=sample_inputs,
    )

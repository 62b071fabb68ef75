"""Combines an engine with its optimizer for an estimator, and can be pickled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.graph.load import ModelSource
from kfac_engine.sklearn.example_input import ExampleInput, SparseBatches, SparseRows
from kfac_engine.training.fit import fit, optimizer_by_name
from kfac_engine.training.history import Record
from kfac_engine.training.hooks import Callback
from kfac_engine.training.optimizer import Optimizer


class TrainedModel:
    """An engine for examples on the first axis of one input and one output.

    Args:
        source: The model.
        example: Its input.
        loss: Name of the loss.
        options: Further options of the engine.

    Attributes:
        engine: The engine.
        example: The input.
        loss: Name of the loss.
        returns_probabilities: Whether the output contains the probabilities of the loss, in place
            of its logits.

    Raises:
        KfacError: The model or an option is wrong.
        UnsupportedError: The examples are not on the first axes.
    """

    def __init__(
        self, source: ModelSource, example: ExampleInput, loss: str, options: Mapping[str, Any]
    ) -> None:
        if "loss" in options:
            raise InputError("engine_options contain 'loss', but the estimator chooses the loss.")
        self.engine = Engine.from_onnx(
            source, **{"gradient_dtype": "float32", **options, "loss": loss}
        )
        self.example, self.loss, self._options = example, loss, dict(options)
        self._optimizer: Optimizer | None = None
        report = self.engine.losses[0]
        if report.input_axes != {example.name: 0} or report.batch_axis or report.positions != 1:
            raise UnsupportedError(
                f"an estimator needs a model with the examples on axis 0 of its input "
                f"'{example.name}' and its output '{report.output}'; train it with kfac_engine.fit."
            )
        self._output = report.output
        self.returns_probabilities = bool(report.how)

    def renew_optimizer(self, name: str, options: Mapping[str, Any] | None) -> None:
        """Replace the optimizer.

        Args:
            name: Name of an optimizer of ``fit``.
            options: Its options.

        Raises:
            UnknownNameError: There is no such optimizer or option.
            InputError: The options are wrong.
        """
        call = f"the optimizer '{name}'"
        self._optimizer = optimizer_by_name(name, options or {}, call)(self.engine)

    @property
    def has_optimizer(self) -> bool:
        """Whether there is an optimizer; a model that was unpickled has none."""
        return self._optimizer is not None

    def train(
        self,
        data: tuple[Any, ...],
        callbacks: Sequence[Callback],
        validation: tuple[Any, ...] | None = None,
        **options: Any,
    ) -> list[Record]:
        """Train on examples; return the records.

        Args:
            data: Inputs and targets, and weights of the targets if there are any.
            callbacks: Callbacks of the run.
            validation: Held-out examples in the form of ``data``.
            **options: Further arguments of ``fit``.

        Returns:
            The records of the run.

        Raises:
            KfacError: As for ``fit``.
        """
        assert self._optimizer is not None  # by renew_optimizer
        parts: dict[str, Any] = {"data": data, "validation": validation}
        if isinstance(data[0], SparseRows):
            size = options["batch_size"]
            parts["data"] = SparseBatches(data, size, options["seed"])
            if validation is not None:
                parts["validation"] = SparseBatches(validation, size)
        options |= {"optimizer": self._optimizer, "callbacks": callbacks}
        return fit(self.engine, **parts, **options).records

    def outputs(self, values: Array | SparseRows, batch_size: int) -> Array:
        """Return the output of the model.

        Args:
            values: Examples in the shape of the input.
            batch_size: Number of examples in a run of the model.

        Returns:
            The output for all examples, an array of NumPy.

        Raises:
            KfacError: The examples do not fit the model.
        """
        starts = range(0, len(values), batch_size)
        return np.concatenate([self._evaluated(values[i : i + batch_size]) for i in starts])

    def _evaluated(self, values: Array | SparseRows) -> Array:
        if isinstance(values, SparseRows):
            values = values.dense()
        results = self.engine.predict({self.example.name: values})
        output = results[self._output] if isinstance(results, dict) else results
        return self.engine.collection.backend.to_numpy(output)

    def __getstate__(self) -> dict[str, Any]:
        """Return the model with its weights as a file, and the options; no optimizer.

        Raises:
            UnsupportedError: The model has more than 2 GB, which ONNX stores in two files.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            self.engine.export(path)
            if len(list(Path(folder).iterdir())) > 1:
                raise UnsupportedError(
                    "an estimator with more than 2 GB of weights cannot be copied or pickled; "
                    "write the model with export(path)."
                )
            source = path.read_bytes()
        return {
            "source": source, "example": self.example, "loss": self.loss, "options": self._options
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # the state has the arguments

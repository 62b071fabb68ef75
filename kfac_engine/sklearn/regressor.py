"""Implements scikit-learn's regressor interface."""

from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import RegressorMixin

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError
from kfac_engine.graph.load import LoadedModel
from kfac_engine.sklearn.estimator import OnnxEstimator


class OnnxRegressor(RegressorMixin, OnnxEstimator):  # type: ignore[misc] # without types
    """A regressor that trains an ONNX model with K-FAC or another optimizer.

    The model returns a column for each target. The loss is the squared error (``"normal"``). The
    arguments are the same as in ``OnnxClassifier``. Scale the targets to a variance near one, such
    as with ``TransformedTargetRegressor``.

    Attributes:
        n_features_in_: Number of values of an example.
        records_: A dictionary for each step of the last training, as ``kfac_engine.fit`` returns
            them.
        engine_: The engine with the trained parameters.
    """

    _validation: ClassVar[dict[str, bool]] = {"multi_output": True, "y_numeric": True}
    _target_shape: tuple[int, ...] = ()

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the model for one epoch; the first call begins with ``model``.

        Args:
            X: Examples, as for ``fit``.
            y: Targets.
            sample_weight: As for ``fit``.

        Returns:
            The regressor itself.

        Raises:
            ValueError: See ``fit``.
        """
        return self._fit_one_epoch(X, y, sample_weight)

    def predict(self, X: Any) -> Array:
        """Return the predicted targets.

        Args:
            X: Examples, as for ``fit``.

        Returns:
            ``(n,)`` in float64, or ``(n, targets)`` after training on targets of two axes.

        Raises:
            NotFittedError: The regressor is not fitted.
            ValueError: The examples are wrong.
        """
        output = self._outputs(X).astype(np.float64)
        return output.reshape(len(output), *self._target_shape)

    def __sklearn_tags__(self) -> Any:
        """Return the properties of the estimator: it predicts several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _read_targets(self, y: Any, labels: Array | None) -> int:
        self._target_shape = y.shape[1:]
        return y.shape[1] if y.ndim > 1 else 1

    def _known_labels(self) -> Array | None:
        return None

    def _loss(self, file: LoadedModel) -> str:
        return "normal"

    def _shaped_targets(self, y: Any, loss: str, output: Array) -> Array:
        columns, shape = self._target_shape or (1,), output.shape[1:]
        if (shape or (1,)) != columns:
            raise ShapeError(
                f"y has {columns[0]} target(s), but the model returns values of shape {shape} for "
                f"an example; it must return one for each target."
            )
        return np.asarray(y, output.dtype).reshape(-1, *shape)

    def _strata(self, targets: Array) -> Array | None:
        return None

"""Provides ``OnnxClassifier`` and ``OnnxRegressor``, scikit-learn estimators for ONNX models."""

from importlib.util import find_spec

from kfac_engine.errors import BackendError

if find_spec("sklearn") is None:
    raise BackendError(
        "kfac_engine.sklearn needs scikit-learn: pip install 'kfac-engine[sklearn]'."
    )

from kfac_engine.sklearn.classifier import OnnxClassifier
from kfac_engine.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]

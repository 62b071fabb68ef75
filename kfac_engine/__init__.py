"""Natural-gradient (K-FAC) preconditioning for any ONNX model, without a framework.

Everything public is here and is imported at its first use, so that ``import kfac_engine`` is quick.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kfac_engine._types import Rows as Rows
    from kfac_engine.autodiff.model import OnnxModel as OnnxModel
    from kfac_engine.autodiff.model import load_model as load_model
    from kfac_engine.autodiff.trace import Trace as Trace
    from kfac_engine.blocks.base import FisherBlock as FisherBlock
    from kfac_engine.blocks.embedding import EmbeddingKFACFB as EmbeddingKFACFB
    from kfac_engine.blocks.embedding import EmbeddingKFACMultiIndepFB as EmbeddingKFACMultiIndepFB
    from kfac_engine.blocks.grouped import DepthwiseConvDiagonalFB as DepthwiseConvDiagonalFB
    from kfac_engine.blocks.grouped import DepthwiseConvKFCBasicFB as DepthwiseConvKFCBasicFB
    from kfac_engine.blocks.kronecker import KroneckerProductFB as KroneckerProductFB
    from kfac_engine.blocks.named import ConvDiagonalFB as ConvDiagonalFB
    from kfac_engine.blocks.named import ConvKFCBasicFB as ConvKFCBasicFB
    from kfac_engine.blocks.named import ConvKFCBasicMultiIndepFB as ConvKFCBasicMultiIndepFB
    from kfac_engine.blocks.named import FullyConnectedDiagonalFB as FullyConnectedDiagonalFB
    from kfac_engine.blocks.named import FullyConnectedKFACBasicFB as FullyConnectedKFACBasicFB
    from kfac_engine.blocks.named import FullyConnectedMultiIndepFB as FullyConnectedMultiIndepFB
    from kfac_engine.blocks.named import FullyConnectedSeriesFB as FullyConnectedSeriesFB
    from kfac_engine.blocks.scale_shift import ScaleAndShiftDiagonalFB as ScaleAndShiftDiagonalFB
    from kfac_engine.blocks.scale_shift import ScaleAndShiftFullFB as ScaleAndShiftFullFB
    from kfac_engine.blocks.single import NaiveDiagonalFB as NaiveDiagonalFB
    from kfac_engine.blocks.single import NaiveFullFB as NaiveFullFB
    from kfac_engine.collection import LayerCollection as LayerCollection
    from kfac_engine.collection import get_default_layer_collection as get_default_layer_collection
    from kfac_engine.collection import set_default_layer_collection as set_default_layer_collection
    from kfac_engine.config import CollectionConfig as CollectionConfig
    from kfac_engine.curvature_products import (
        CurvatureMatrixVectorProductComputer as CurvatureMatrixVectorProductComputer,
    )
    from kfac_engine.engine import Engine as Engine
    from kfac_engine.errors import BackendError as BackendError
    from kfac_engine.errors import DivergenceWarning as DivergenceWarning
    from kfac_engine.errors import InputError as InputError
    from kfac_engine.errors import KfacError as KfacError
    from kfac_engine.errors import MemoryLimitError as MemoryLimitError
    from kfac_engine.errors import MissingKernelError as MissingKernelError
    from kfac_engine.errors import ModelError as ModelError
    from kfac_engine.errors import NonFiniteError as NonFiniteError
    from kfac_engine.errors import NotReadyError as NotReadyError
    from kfac_engine.errors import RegistrationError as RegistrationError
    from kfac_engine.errors import ShapeError as ShapeError
    from kfac_engine.errors import UnknownAttributeError as UnknownAttributeError
    from kfac_engine.errors import UnknownNameError as UnknownNameError
    from kfac_engine.errors import UnsupportedError as UnsupportedError
    from kfac_engine.errors import UnsupportedOpError as UnsupportedOpError
    from kfac_engine.estimator import FisherEstimator as FisherEstimator
    from kfac_engine.factors.base import FisherFactor as FisherFactor
    from kfac_engine.factors.dense import DenseSquareMatrixFactor as DenseSquareMatrixFactor
    from kfac_engine.factors.diagonal import DiagonalFactor as DiagonalFactor
    from kfac_engine.factors.embedding import (
        EmbeddingInputKroneckerFactor as EmbeddingInputKroneckerFactor,
    )
    from kfac_engine.factors.named import DiagonalKroneckerFactor as DiagonalKroneckerFactor
    from kfac_engine.factors.named import DiagonalMultiKF as DiagonalMultiKF
    from kfac_engine.factors.named import (
        FullyConnectedDiagonalFactor as FullyConnectedDiagonalFactor,
    )
    from kfac_engine.factors.named import (
        FullyConnectedKroneckerFactor as FullyConnectedKroneckerFactor,
    )
    from kfac_engine.factors.named import FullyConnectedMultiKF as FullyConnectedMultiKF
    from kfac_engine.factors.named import NaiveDiagonalFactor as NaiveDiagonalFactor
    from kfac_engine.factors.named import NaiveFullFactor as NaiveFullFactor
    from kfac_engine.factors.named_convolution import ConvDiagonalFactor as ConvDiagonalFactor
    from kfac_engine.factors.named_convolution import (
        ConvInputKroneckerFactor as ConvInputKroneckerFactor,
    )
    from kfac_engine.factors.named_convolution import ConvInputMultiKF as ConvInputMultiKF
    from kfac_engine.factors.named_convolution import (
        ConvInputSUAKroneckerFactor as ConvInputSUAKroneckerFactor,
    )
    from kfac_engine.factors.named_convolution import (
        ConvOutputKroneckerFactor as ConvOutputKroneckerFactor,
    )
    from kfac_engine.factors.named_convolution import ConvOutputMultiKF as ConvOutputMultiKF
    from kfac_engine.factors.scale_shift import (
        ScaleAndShiftDiagonalFactor as ScaleAndShiftDiagonalFactor,
    )
    from kfac_engine.factors.scale_shift import ScaleAndShiftFullFactor as ScaleAndShiftFullFactor
    from kfac_engine.gradient_model import differentiate as differentiate
    from kfac_engine.inspection import LayerReport as LayerReport
    from kfac_engine.losses import (
        CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    )
    from kfac_engine.losses import LossFunction as LossFunction
    from kfac_engine.losses import (
        MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
    )
    from kfac_engine.losses import NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss
    from kfac_engine.losses import (
        NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
    )
    from kfac_engine.losses import (
        OnehotCategoricalLogitsNegativeLogProbLoss as OnehotCategoricalLogitsNegativeLogProbLoss,
    )
    from kfac_engine.memory import MemoryReport as MemoryReport
    from kfac_engine.one_batch import precondition as precondition
    from kfac_engine.options import EngineOptions as EngineOptions
    from kfac_engine.result import Result as Result
    from kfac_engine.scheduler import Schedule as Schedule

# Public name to the module that defines it.
_HOMES = {
    "KfacError": "errors",
    "InputError": "errors",
    "ModelError": "errors",
    "ShapeError": "errors",
    "NonFiniteError": "errors",
    "RegistrationError": "errors",
    "UnknownNameError": "errors",
    "UnknownAttributeError": "errors",
    "UnsupportedError": "errors",
    "UnsupportedOpError": "errors",
    "NotReadyError": "errors",
    "BackendError": "errors",
    "MissingKernelError": "errors",
    "MemoryLimitError": "errors",
    "DivergenceWarning": "errors",
    "CollectionConfig": "config",
    "Schedule": "scheduler",
    "Engine": "engine",
    "EngineOptions": "options",
    "precondition": "one_batch",
    "differentiate": "gradient_model",
    "Result": "result",
    "LayerReport": "inspection",
    "MemoryReport": "memory",
    "OnnxModel": "autodiff.model",
    "Trace": "autodiff.trace",
    "load_model": "autodiff.model",
    "Rows": "_types",
    "LayerCollection": "collection",
    "get_default_layer_collection": "collection",
    "set_default_layer_collection": "collection",
    "FisherEstimator": "estimator",
    "CurvatureMatrixVectorProductComputer": "curvature_products",
    "FisherBlock": "blocks.base",
    "KroneckerProductFB": "blocks.kronecker",
    "NaiveFullFB": "blocks.single",
    "NaiveDiagonalFB": "blocks.single",
    "FullyConnectedKFACBasicFB": "blocks.named",
    "FullyConnectedDiagonalFB": "blocks.named",
    "ConvKFCBasicFB": "blocks.named",
    "ConvDiagonalFB": "blocks.named",
    "FullyConnectedMultiIndepFB": "blocks.named",
    "FullyConnectedSeriesFB": "blocks.named",
    "ConvKFCBasicMultiIndepFB": "blocks.named",
    "ScaleAndShiftFullFB": "blocks.scale_shift",
    "ScaleAndShiftDiagonalFB": "blocks.scale_shift",
    "EmbeddingKFACFB": "blocks.embedding",
    "EmbeddingKFACMultiIndepFB": "blocks.embedding",
    "DepthwiseConvKFCBasicFB": "blocks.grouped",
    "DepthwiseConvDiagonalFB": "blocks.grouped",
    "FisherFactor": "factors.base",
    "DenseSquareMatrixFactor": "factors.dense",
    "DiagonalFactor": "factors.diagonal",
    "DiagonalKroneckerFactor": "factors.named",
    "DiagonalMultiKF": "factors.named",
    "FullyConnectedDiagonalFactor": "factors.named",
    "FullyConnectedKroneckerFactor": "factors.named",
    "FullyConnectedMultiKF": "factors.named",
    "NaiveDiagonalFactor": "factors.named",
    "NaiveFullFactor": "factors.named",
    "ConvDiagonalFactor": "factors.named_convolution",
    "ConvInputKroneckerFactor": "factors.named_convolution",
    "ConvInputMultiKF": "factors.named_convolution",
    "ConvInputSUAKroneckerFactor": "factors.named_convolution",
    "ConvOutputKroneckerFactor": "factors.named_convolution",
    "ConvOutputMultiKF": "factors.named_convolution",
    "ScaleAndShiftFullFactor": "factors.scale_shift",
    "ScaleAndShiftDiagonalFactor": "factors.scale_shift",
    "EmbeddingInputKroneckerFactor": "factors.embedding",
    "LossFunction": "losses",
    "CategoricalLogitsNegativeLogProbLoss": "losses",
    "OnehotCategoricalLogitsNegativeLogProbLoss": "losses",
    "NormalMeanNegativeLogProbLoss": "losses",
    "NormalMeanVarianceNegativeLogProbLoss": "losses",
    "MultiBernoulliNegativeLogProbLoss": "losses",
}

__all__ = ["__version__", *_HOMES]

# In a checkout that was never installed, `kernels/` and `bench/` lie beside this package, not
# inside: let `kfac_engine.kernels` and `kfac_engine.bench` be found there, as the wheel maps them.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kfac_engine' has no attribute '{name}'")
    value = getattr(import_module(f"kfac_engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

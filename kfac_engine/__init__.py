"""Natural-gradient (K-FAC) preconditioning for any ONNX model, without a framework.

Everything public is here and is imported at its first use, so that ``import kfac_engine`` is quick.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kfac_engine._types import Rows as Rows
    from kfac_engine.analysis.fisher_matrix.curvature import Curvature as Curvature
    from kfac_engine.analysis.fisher_matrix.measure import curvature as curvature
    from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions as CurvatureOptions
    from kfac_engine.analysis.influence.influence import Influence as Influence
    from kfac_engine.analysis.laplace.posterior import Laplace as Laplace
    from kfac_engine.analysis.laplace.predictive import Predictive as Predictive
    from kfac_engine.analysis.pruning.merging import merge as merge
    from kfac_engine.analysis.pruning.pruning import prune as prune
    from kfac_engine.analysis.pruning.pruning import saliency as saliency
    from kfac_engine.analysis.spectra.lanczos import SpectrumEstimate as SpectrumEstimate
    from kfac_engine.analysis.spectra.lanczos import estimate_spectrum as estimate_spectrum
    from kfac_engine.analysis.spectra.operator import CurvatureOperator as CurvatureOperator
    from kfac_engine.analysis.spectra.operator import curvature_operator as curvature_operator
    from kfac_engine.compat.blocks import ConvDiagonalFB as ConvDiagonalFB
    from kfac_engine.compat.blocks import ConvKFCBasicFB as ConvKFCBasicFB
    from kfac_engine.compat.blocks import ConvKFCBasicMultiIndepFB as ConvKFCBasicMultiIndepFB
    from kfac_engine.compat.blocks import DepthwiseConvDiagonalFB as DepthwiseConvDiagonalFB
    from kfac_engine.compat.blocks import DepthwiseConvKFCBasicFB as DepthwiseConvKFCBasicFB
    from kfac_engine.compat.blocks import (
        EmbeddingInputKroneckerFactor as EmbeddingInputKroneckerFactor,
    )
    from kfac_engine.compat.blocks import EmbeddingKFACFB as EmbeddingKFACFB
    from kfac_engine.compat.blocks import EmbeddingKFACMultiIndepFB as EmbeddingKFACMultiIndepFB
    from kfac_engine.compat.blocks import FullyConnectedDiagonalFB as FullyConnectedDiagonalFB
    from kfac_engine.compat.blocks import FullyConnectedKFACBasicFB as FullyConnectedKFACBasicFB
    from kfac_engine.compat.blocks import FullyConnectedMultiIndepFB as FullyConnectedMultiIndepFB
    from kfac_engine.compat.blocks import FullyConnectedSeriesFB as FullyConnectedSeriesFB
    from kfac_engine.compat.blocks import (
        ScaleAndShiftDiagonalFactor as ScaleAndShiftDiagonalFactor,
    )
    from kfac_engine.compat.blocks import ScaleAndShiftDiagonalFB as ScaleAndShiftDiagonalFB
    from kfac_engine.compat.blocks import ScaleAndShiftFullFactor as ScaleAndShiftFullFactor
    from kfac_engine.compat.blocks import ScaleAndShiftFullFB as ScaleAndShiftFullFB
    from kfac_engine.compat.collection import LayerCollection as LayerCollection
    from kfac_engine.compat.collection import (
        get_default_layer_collection as get_default_layer_collection,
    )
    from kfac_engine.compat.collection import (
        set_default_layer_collection as set_default_layer_collection,
    )
    from kfac_engine.compat.convolution_factors import ConvDiagonalFactor as ConvDiagonalFactor
    from kfac_engine.compat.convolution_factors import (
        ConvInputKroneckerFactor as ConvInputKroneckerFactor,
    )
    from kfac_engine.compat.convolution_factors import ConvInputMultiKF as ConvInputMultiKF
    from kfac_engine.compat.convolution_factors import (
        ConvInputSUAKroneckerFactor as ConvInputSUAKroneckerFactor,
    )
    from kfac_engine.compat.convolution_factors import (
        ConvOutputKroneckerFactor as ConvOutputKroneckerFactor,
    )
    from kfac_engine.compat.convolution_factors import ConvOutputMultiKF as ConvOutputMultiKF
    from kfac_engine.compat.estimator import FisherEstimator as FisherEstimator
    from kfac_engine.compat.factors import DiagonalKroneckerFactor as DiagonalKroneckerFactor
    from kfac_engine.compat.factors import DiagonalMultiKF as DiagonalMultiKF
    from kfac_engine.compat.factors import (
        FullyConnectedDiagonalFactor as FullyConnectedDiagonalFactor,
    )
    from kfac_engine.compat.factors import (
        FullyConnectedKroneckerFactor as FullyConnectedKroneckerFactor,
    )
    from kfac_engine.compat.factors import FullyConnectedMultiKF as FullyConnectedMultiKF
    from kfac_engine.compat.factors import NaiveDiagonalFactor as NaiveDiagonalFactor
    from kfac_engine.compat.factors import NaiveFullFactor as NaiveFullFactor
    from kfac_engine.curvature.blocks.base import FisherBlock as FisherBlock
    from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB as KroneckerProductFB
    from kfac_engine.curvature.blocks.single import NaiveDiagonalFB as NaiveDiagonalFB
    from kfac_engine.curvature.blocks.single import NaiveFullFB as NaiveFullFB
    from kfac_engine.curvature.config import CollectionConfig as CollectionConfig
    from kfac_engine.curvature.config import RelativeDamping as RelativeDamping
    from kfac_engine.curvature.factors.base import FisherFactor as FisherFactor
    from kfac_engine.curvature.factors.dense import (
        DenseSquareMatrixFactor as DenseSquareMatrixFactor,
    )
    from kfac_engine.curvature.factors.diagonal import DiagonalFactor as DiagonalFactor
    from kfac_engine.curvature.products import (
        CurvatureMatrixVectorProductComputer as CurvatureMatrixVectorProductComputer,
    )
    from kfac_engine.curvature.schedule import Schedule as Schedule
    from kfac_engine.distributed.mpi import over_mpi as over_mpi
    from kfac_engine.distributed.nccl import over_nccl as over_nccl
    from kfac_engine.distributed.protocol import Communicator as Communicator
    from kfac_engine.engine.engine import Engine as Engine
    from kfac_engine.engine.engine import precondition as precondition
    from kfac_engine.engine.factor_spectra import factor_spectra as factor_spectra
    from kfac_engine.engine.factors import Factors as Factors
    from kfac_engine.engine.factors import FactorView as FactorView
    from kfac_engine.engine.factors import ParameterFactors as ParameterFactors
    from kfac_engine.engine.memory import MemoryReport as MemoryReport
    from kfac_engine.engine.options import EngineOptions as EngineOptions
    from kfac_engine.engine.parameter_matches import ParameterMatches as ParameterMatches
    from kfac_engine.engine.parameter_matches import match_parameters as match_parameters
    from kfac_engine.engine.report import LayerReport as LayerReport
    from kfac_engine.engine.result import Result as Result
    from kfac_engine.engine.spectra import FactorSpectrum as FactorSpectrum
    from kfac_engine.errors import BackendError as BackendError
    from kfac_engine.errors import DivergenceError as DivergenceError
    from kfac_engine.errors import DivergenceWarning as DivergenceWarning
    from kfac_engine.errors import ExportWarning as ExportWarning
    from kfac_engine.errors import InferenceFormWarning as InferenceFormWarning
    from kfac_engine.errors import InputError as InputError
    from kfac_engine.errors import KfacError as KfacError
    from kfac_engine.errors import MemoryLimitError as MemoryLimitError
    from kfac_engine.errors import MissingKernelError as MissingKernelError
    from kfac_engine.errors import ModelError as ModelError
    from kfac_engine.errors import NonFiniteError as NonFiniteError
    from kfac_engine.errors import NotReadyError as NotReadyError
    from kfac_engine.errors import OverfittingWarning as OverfittingWarning
    from kfac_engine.errors import RankError as RankError
    from kfac_engine.errors import RegistrationError as RegistrationError
    from kfac_engine.errors import ShapeError as ShapeError
    from kfac_engine.errors import UnknownAttributeError as UnknownAttributeError
    from kfac_engine.errors import UnknownNameError as UnknownNameError
    from kfac_engine.errors import UnsupportedError as UnsupportedError
    from kfac_engine.errors import UnsupportedOpError as UnsupportedOpError
    from kfac_engine.export.derivatives import derivatives as derivatives
    from kfac_engine.export.equation import equation as equation
    from kfac_engine.export.gradient_model import differentiate as differentiate
    from kfac_engine.graph.edits.adapters import add_adapters as add_adapters
    from kfac_engine.graph.edits.adapters import merge_adapters as merge_adapters
    from kfac_engine.graph.edits.head import replace_head as replace_head
    from kfac_engine.html_report.page import report as report
    from kfac_engine.losses import CTC as CTC
    from kfac_engine.losses import L1 as L1
    from kfac_engine.losses import Categorical as Categorical
    from kfac_engine.losses import (
        CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    )
    from kfac_engine.losses import CausalLM as CausalLM
    from kfac_engine.losses import ElementwiseLoss as ElementwiseLoss
    from kfac_engine.losses import Huber as Huber
    from kfac_engine.losses import LossFunction as LossFunction
    from kfac_engine.losses import MultiBernoulli as MultiBernoulli
    from kfac_engine.losses import (
        MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
    )
    from kfac_engine.losses import Normal as Normal
    from kfac_engine.losses import NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss
    from kfac_engine.losses import (
        NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
    )
    from kfac_engine.losses import (
        OnehotCategoricalLogitsNegativeLogProbLoss as OnehotCategoricalLogitsNegativeLogProbLoss,
    )
    from kfac_engine.losses import Poisson as Poisson
    from kfac_engine.losses import Weighted as Weighted
    from kfac_engine.runtime.model import OnnxModel as OnnxModel
    from kfac_engine.runtime.model import load_model as load_model
    from kfac_engine.runtime.trace import Trace as Trace
    from kfac_engine.sessions.adapter_files import load_adapter as load_adapter
    from kfac_engine.sessions.adapter_files import save_adapter as save_adapter
    from kfac_engine.training.callbacks.best import BestWeights as BestWeights
    from kfac_engine.training.callbacks.best import EarlyStop as EarlyStop
    from kfac_engine.training.callbacks.tensorboard import TensorBoard as TensorBoard
    from kfac_engine.training.callbacks.weight_average import WeightAverage as WeightAverage
    from kfac_engine.training.checkpoint import SavedState as SavedState
    from kfac_engine.training.damping_adaptation import DampingAdaptation as DampingAdaptation
    from kfac_engine.training.first_order import SGD as SGD
    from kfac_engine.training.first_order import Adam as Adam
    from kfac_engine.training.first_order import AdamW as AdamW
    from kfac_engine.training.first_order import Muon as Muon
    from kfac_engine.training.fit import fit as fit
    from kfac_engine.training.gauss_newton import GaussNewton as GaussNewton
    from kfac_engine.training.history import History as History
    from kfac_engine.training.hooks import Callback as Callback
    from kfac_engine.training.kfac import KfacOptimizer as KfacOptimizer
    from kfac_engine.training.optimizer import StepReport as StepReport
    from kfac_engine.training_files.export import export_training as export_training
    from kfac_engine.training_files.files import TrainingFiles as TrainingFiles
    from kfac_engine.training_files.files import TrainingRun as TrainingRun
    from kfac_engine.verification.checks import Check as Check
    from kfac_engine.verification.checks import Measurement as Measurement
    from kfac_engine.verification.checks import Verification as Verification
    from kfac_engine.verification.verify import verify as verify

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
    "RankError": "errors",
    "DivergenceError": "errors",
    "DivergenceWarning": "errors",
    "ExportWarning": "errors",
    "InferenceFormWarning": "errors",
    "CollectionConfig": "curvature.config",
    "RelativeDamping": "curvature.config",
    "Schedule": "curvature.schedule",
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "precondition": "engine.engine",
    "differentiate": "export.gradient_model",
    "derivatives": "export.derivatives",
    "equation": "export.equation",
    "replace_head": "graph.edits.head",
    "add_adapters": "graph.edits.adapters",
    "merge_adapters": "graph.edits.adapters",
    "save_adapter": "sessions.adapter_files",
    "load_adapter": "sessions.adapter_files",
    "export_training": "training_files.export",
    "TrainingFiles": "training_files.files",
    "TrainingRun": "training_files.files",
    "match_parameters": "engine.parameter_matches",
    "ParameterMatches": "engine.parameter_matches",
    "Result": "engine.result",
    "LayerReport": "engine.report",
    "FactorSpectrum": "engine.spectra",
    "factor_spectra": "engine.factor_spectra",
    "Factors": "engine.factors",
    "ParameterFactors": "engine.factors",
    "FactorView": "engine.factors",
    "MemoryReport": "engine.memory",
    "curvature": "analysis.fisher_matrix.measure",
    "Curvature": "analysis.fisher_matrix.curvature",
    "CurvatureOptions": "analysis.fisher_matrix.options",
    "curvature_operator": "analysis.spectra.operator",
    "CurvatureOperator": "analysis.spectra.operator",
    "estimate_spectrum": "analysis.spectra.lanczos",
    "SpectrumEstimate": "analysis.spectra.lanczos",
    "Influence": "analysis.influence.influence",
    "Laplace": "analysis.laplace.posterior",
    "Predictive": "analysis.laplace.predictive",
    "saliency": "analysis.pruning.pruning",
    "prune": "analysis.pruning.pruning",
    "merge": "analysis.pruning.merging",
    "over_mpi": "distributed.mpi",
    "over_nccl": "distributed.nccl",
    "Communicator": "distributed.protocol",
    "OnnxModel": "runtime.model",
    "OverfittingWarning": "errors",
    "Trace": "runtime.trace",
    "load_model": "runtime.model",
    "Rows": "_types",
    "LayerCollection": "compat.collection",
    "get_default_layer_collection": "compat.collection",
    "set_default_layer_collection": "compat.collection",
    "FisherEstimator": "compat.estimator",
    "CurvatureMatrixVectorProductComputer": "curvature.products",
    "FisherBlock": "curvature.blocks.base",
    "KroneckerProductFB": "curvature.blocks.kronecker",
    "NaiveFullFB": "curvature.blocks.single",
    "NaiveDiagonalFB": "curvature.blocks.single",
    "FullyConnectedKFACBasicFB": "compat.blocks",
    "FullyConnectedDiagonalFB": "compat.blocks",
    "ConvKFCBasicFB": "compat.blocks",
    "ConvDiagonalFB": "compat.blocks",
    "FullyConnectedMultiIndepFB": "compat.blocks",
    "FullyConnectedSeriesFB": "compat.blocks",
    "ConvKFCBasicMultiIndepFB": "compat.blocks",
    "ScaleAndShiftFullFB": "compat.blocks",
    "ScaleAndShiftDiagonalFB": "compat.blocks",
    "EmbeddingKFACFB": "compat.blocks",
    "EmbeddingKFACMultiIndepFB": "compat.blocks",
    "DepthwiseConvKFCBasicFB": "compat.blocks",
    "DepthwiseConvDiagonalFB": "compat.blocks",
    "FisherFactor": "curvature.factors.base",
    "DenseSquareMatrixFactor": "curvature.factors.dense",
    "DiagonalFactor": "curvature.factors.diagonal",
    "DiagonalKroneckerFactor": "compat.factors",
    "DiagonalMultiKF": "compat.factors",
    "FullyConnectedDiagonalFactor": "compat.factors",
    "FullyConnectedKroneckerFactor": "compat.factors",
    "FullyConnectedMultiKF": "compat.factors",
    "NaiveDiagonalFactor": "compat.factors",
    "NaiveFullFactor": "compat.factors",
    "ConvDiagonalFactor": "compat.convolution_factors",
    "ConvInputKroneckerFactor": "compat.convolution_factors",
    "ConvInputMultiKF": "compat.convolution_factors",
    "ConvInputSUAKroneckerFactor": "compat.convolution_factors",
    "ConvOutputKroneckerFactor": "compat.convolution_factors",
    "ConvOutputMultiKF": "compat.convolution_factors",
    "ScaleAndShiftFullFactor": "compat.blocks",
    "ScaleAndShiftDiagonalFactor": "compat.blocks",
    "EmbeddingInputKroneckerFactor": "compat.blocks",
    "LossFunction": "losses",
    "Categorical": "losses",
    "MultiBernoulli": "losses",
    "Normal": "losses",
    "Weighted": "losses",
    "ElementwiseLoss": "losses",
    "CTC": "losses",
    "CausalLM": "losses",
    "L1": "losses",
    "Huber": "losses",
    "Poisson": "losses",
    "CategoricalLogitsNegativeLogProbLoss": "losses",
    "OnehotCategoricalLogitsNegativeLogProbLoss": "losses",
    "NormalMeanNegativeLogProbLoss": "losses",
    "NormalMeanVarianceNegativeLogProbLoss": "losses",
    "MultiBernoulliNegativeLogProbLoss": "losses",
    "SGD": "training.first_order",
    "Adam": "training.first_order",
    "AdamW": "training.first_order",
    "Muon": "training.first_order",
    "GaussNewton": "training.gauss_newton",
    "KfacOptimizer": "training.kfac",
    "DampingAdaptation": "training.damping_adaptation",
    "StepReport": "training.optimizer",
    "fit": "training.fit",
    "History": "training.history",
    "Callback": "training.hooks",
    "EarlyStop": "training.callbacks.best",
    "BestWeights": "training.callbacks.best",
    "WeightAverage": "training.callbacks.weight_average",
    "TensorBoard": "training.callbacks.tensorboard",
    "SavedState": "training.checkpoint",
    "report": "html_report.page",
    "verify": "verification.verify",
    "Verification": "verification.checks",
    "Check": "verification.checks",
    "Measurement": "verification.checks",
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

"""The public names, each with the module that ``__init__.py`` imports it from."""

from kfac_engine._types import Rows as Rows
from kfac_engine.analysis.fisher_matrix.curvature import Curvature as Curvature
from kfac_engine.analysis.fisher_matrix.measure import curvature as curvature
from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions as CurvatureOptions
from kfac_engine.analysis.influence.influence import Influence as Influence
from kfac_engine.analysis.laplace.posterior import Laplace as Laplace
from kfac_engine.analysis.laplace.predictive import Predictive as Predictive
from kfac_engine.analysis.pruning.merging import merge as merge
from kfac_engine.analysis.pruning.pruning import prune as prune, saliency as saliency
from kfac_engine.analysis.spectra.lanczos import (
    SpectrumEstimate as SpectrumEstimate,
    estimate_spectrum as estimate_spectrum,
)
from kfac_engine.analysis.spectra.operator import (
    CurvatureOperator as CurvatureOperator,
    curvature_operator as curvature_operator,
)
from kfac_engine.compat.blocks import (
    ConvDiagonalFB as ConvDiagonalFB,
    ConvKFCBasicFB as ConvKFCBasicFB,
    ConvKFCBasicMultiIndepFB as ConvKFCBasicMultiIndepFB,
    DepthwiseConvDiagonalFB as DepthwiseConvDiagonalFB,
    DepthwiseConvKFCBasicFB as DepthwiseConvKFCBasicFB,
    EmbeddingInputKroneckerFactor as EmbeddingInputKroneckerFactor,
    EmbeddingKFACFB as EmbeddingKFACFB,
    EmbeddingKFACMultiIndepFB as EmbeddingKFACMultiIndepFB,
    FullyConnectedDiagonalFB as FullyConnectedDiagonalFB,
    FullyConnectedKFACBasicFB as FullyConnectedKFACBasicFB,
    FullyConnectedMultiIndepFB as FullyConnectedMultiIndepFB,
    FullyConnectedSeriesFB as FullyConnectedSeriesFB,
    ScaleAndShiftDiagonalFactor as ScaleAndShiftDiagonalFactor,
    ScaleAndShiftDiagonalFB as ScaleAndShiftDiagonalFB,
    ScaleAndShiftFullFactor as ScaleAndShiftFullFactor,
    ScaleAndShiftFullFB as ScaleAndShiftFullFB,
)
from kfac_engine.compat.collection import (
    LayerCollection as LayerCollection,
    get_default_layer_collection as get_default_layer_collection,
    set_default_layer_collection as set_default_layer_collection,
)
from kfac_engine.compat.convolution_factors import (
    ConvDiagonalFactor as ConvDiagonalFactor,
    ConvInputKroneckerFactor as ConvInputKroneckerFactor,
    ConvInputMultiKF as ConvInputMultiKF,
    ConvInputSUAKroneckerFactor as ConvInputSUAKroneckerFactor,
    ConvOutputKroneckerFactor as ConvOutputKroneckerFactor,
    ConvOutputMultiKF as ConvOutputMultiKF,
)
from kfac_engine.compat.estimator import FisherEstimator as FisherEstimator
from kfac_engine.compat.factors import (
    DiagonalKroneckerFactor as DiagonalKroneckerFactor,
    DiagonalMultiKF as DiagonalMultiKF,
    FullyConnectedDiagonalFactor as FullyConnectedDiagonalFactor,
    FullyConnectedKroneckerFactor as FullyConnectedKroneckerFactor,
    FullyConnectedMultiKF as FullyConnectedMultiKF,
    NaiveDiagonalFactor as NaiveDiagonalFactor,
    NaiveFullFactor as NaiveFullFactor,
)
from kfac_engine.curvature.blocks.base import FisherBlock as FisherBlock
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB as KroneckerProductFB
from kfac_engine.curvature.blocks.single import (
    NaiveDiagonalFB as NaiveDiagonalFB,
    NaiveFullFB as NaiveFullFB,
)
from kfac_engine.curvature.config import (
    CollectionConfig as CollectionConfig,
    RelativeDamping as RelativeDamping,
)
from kfac_engine.curvature.factors.base import FisherFactor as FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor as DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor as DiagonalFactor
from kfac_engine.curvature.products import (
    CurvatureMatrixVectorProductComputer as CurvatureMatrixVectorProductComputer,
)
from kfac_engine.curvature.schedule import Schedule as Schedule
from kfac_engine.distributed.mpi import over_mpi as over_mpi
from kfac_engine.distributed.nccl import over_nccl as over_nccl
from kfac_engine.distributed.protocol import Communicator as Communicator
from kfac_engine.engine.engine import Engine as Engine, precondition as precondition
from kfac_engine.engine.factor_spectra import factor_spectra as factor_spectra
from kfac_engine.engine.factors import (
    Factors as Factors,
    FactorView as FactorView,
    ParameterFactors as ParameterFactors,
)
from kfac_engine.engine.memory import MemoryReport as MemoryReport
from kfac_engine.engine.options import EngineOptions as EngineOptions
from kfac_engine.engine.parameter_matches import (
    ParameterMatches as ParameterMatches,
    match_parameters as match_parameters,
)
from kfac_engine.engine.report import LayerReport as LayerReport
from kfac_engine.engine.result import Result as Result
from kfac_engine.engine.spectra import FactorSpectrum as FactorSpectrum
from kfac_engine.errors import (
    BackendError as BackendError,
    DivergenceError as DivergenceError,
    DivergenceWarning as DivergenceWarning,
    ExportWarning as ExportWarning,
    InferenceFormWarning as InferenceFormWarning,
    InputError as InputError,
    KfacError as KfacError,
    MemoryLimitError as MemoryLimitError,
    MissingKernelError as MissingKernelError,
    ModelError as ModelError,
    NonFiniteError as NonFiniteError,
    NotReadyError as NotReadyError,
    OverfittingWarning as OverfittingWarning,
    RankError as RankError,
    RegistrationError as RegistrationError,
    ShapeError as ShapeError,
    UnknownAttributeError as UnknownAttributeError,
    UnknownNameError as UnknownNameError,
    UnsupportedError as UnsupportedError,
    UnsupportedOpError as UnsupportedOpError,
)
from kfac_engine.export.derivatives import derivatives as derivatives
from kfac_engine.export.equation import equation as equation
from kfac_engine.export.gradient_model import differentiate as differentiate
from kfac_engine.graph.edits.adapters import (
    add_adapters as add_adapters,
    merge_adapters as merge_adapters,
)
from kfac_engine.graph.edits.head import replace_head as replace_head
from kfac_engine.html_report.page import report as report
from kfac_engine.losses import (
    CTC as CTC,
    L1 as L1,
    Categorical as Categorical,
    CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    CausalLM as CausalLM,
    ElementwiseLoss as ElementwiseLoss,
    Huber as Huber,
    LossFunction as LossFunction,
    MultiBernoulli as MultiBernoulli,
    MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
    Normal as Normal,
    NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
    OnehotCategoricalLogitsNegativeLogProbLoss as OnehotCategoricalLogitsNegativeLogProbLoss,
    Poisson as Poisson,
    Weighted as Weighted,
)
from kfac_engine.runtime.model import OnnxModel as OnnxModel, load_model as load_model
from kfac_engine.runtime.trace import Trace as Trace
from kfac_engine.sessions.adapter_files import (
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from kfac_engine.training.callbacks.best import BestWeights as BestWeights, EarlyStop as EarlyStop
from kfac_engine.training.callbacks.tensorboard import TensorBoard as TensorBoard
from kfac_engine.training.callbacks.weight_average import WeightAverage as WeightAverage
from kfac_engine.training.checkpoint import SavedState as SavedState
from kfac_engine.training.damping_adaptation import DampingAdaptation as DampingAdaptation
from kfac_engine.training.first_order import SGD as SGD, Adam as Adam, AdamW as AdamW, Muon as Muon
from kfac_engine.training.fit import fit as fit
from kfac_engine.training.gauss_newton import GaussNewton as GaussNewton
from kfac_engine.training.history import History as History
from kfac_engine.training.hooks import Callback as Callback
from kfac_engine.training.kfac import KfacOptimizer as KfacOptimizer
from kfac_engine.training.optimizer import StepReport as StepReport
from kfac_engine.training_files.export import export_training as export_training
from kfac_engine.training_files.files import (
    TrainingFiles as TrainingFiles,
    TrainingRun as TrainingRun,
)
from kfac_engine.verification.checks import (
    Check as Check,
    Measurement as Measurement,
    Verification as Verification,
)
from kfac_engine.verification.verify import verify as verify

__version__: str

"""Junk for every argument of every public callable: it works, or it is one error of ours."""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

JUNK: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "negative": lambda: -1,
    "fraction": lambda: 1.5,
    "nan": lambda: float("nan"),
    "infinite": lambda: np.float32("inf"),
    "large": lambda: 2**70,
    "huge": lambda: 10**400,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "x",
    "zero byte": lambda: "a\0b",
    "lone surrogate": lambda: "\ud800",
    "bytes": lambda: b"x",
    "empty list": list,
    "list of None": lambda: [None],
    "list of lists": lambda: [[]],
    "nested": lambda: [{"x": None}],
    "pair": lambda: (0.5, None),
    "empty mapping": dict,
    "mapping": lambda: {"x": 1},
    "mapping of numbers": lambda: {1: [2]},
    "object": object,
    "function": lambda: lambda *arguments: None,
    "type": lambda: bool,
    "array of text": lambda: np.array(["a"]),
    "array without entries": lambda: np.zeros((2, 0)),
    "array of objects": lambda: np.array([None, {}], object),
    "path": lambda: Path("a\0b"),
}

MODEL = models.mlp((3, 4, 3)).SerializeToString()
ADAPTED = ke.add_adapters(MODEL, 2)
INPUTS = models.random_inputs(models.mlp((3, 4, 3)), 4)
TARGETS = np.array([0, 1, 2, 1])
DATA = (INPUTS, TARGETS)


@cache
def engine():
    made = ke.Engine.from_onnx(MODEL, loss="categorical", threads=1, exps=(-1, -0.5))
    made.step(INPUTS, TARGETS)
    return made


@cache
def curvature():
    return ke.curvature(MODEL, DATA, loss="categorical", threads=1)


@cache
def loaded():
    return ke.load_model(MODEL, threads=1)


@cache
def laplace():
    return ke.Laplace(curvature())


@cache
def history():
    return ke.fit(MODEL, DATA, loss="categorical", optimizer="sgd", steps=1)


def stop(record, optimizer):
    return True


def optimizer(kind, **options):
    return kind, lambda: {"engine": engine(), **options}


SAME = {"model": MODEL, "loss": "categorical", "threads": 1}
BATCH = {"inputs": INPUTS, "targets": TARGETS}
VECTORS = {name: np.ones(a.shape, np.float32) for name, a in loaded().parameters.items()}

# Callable and function that returns good arguments. Options without a good argument are those of
# the signature.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "Engine.from_onnx": (ke.Engine.from_onnx, lambda: SAME),
    "precondition": (ke.precondition, lambda: {**SAME, **BATCH}),
    "differentiate": (ke.differentiate, lambda: {"model": MODEL, "loss": "categorical"}),
    "derivatives": (
        ke.derivatives,
        lambda: {"model": MODEL, "wrt": "input", "outputs": "output", "laplacian": True}),
    "equation": (
        ke.equation,
        lambda: {
            "model": MODEL, "residuals": {"inside": lambda u: u.d(0)}, "wrt": "input",
            "outputs": "output",
        },
    ),
    "replace_head": (ke.replace_head, lambda: {"model": MODEL, "classes": 2}),
    "add_adapters": (ke.add_adapters, lambda: {"model": MODEL, "rank": 2}),
    "merge_adapters": (ke.merge_adapters, lambda: {"model": ADAPTED}),
    "save_adapter": (ke.save_adapter, lambda: {"model": ADAPTED, "path": "o"}),
    "load_adapter": (ke.load_adapter, lambda: {"model": ADAPTED, "adapter": "o"}),
    "export_training": (ke.export_training, lambda: {"model": MODEL, "path": "o"}),
    "TrainingFiles": (ke.TrainingFiles, lambda: {"folder": "o"}),
    "load_model": (ke.load_model, lambda: {"source": MODEL, "threads": 1}),
    "match_parameters": (ke.match_parameters, lambda: {"engine": engine(), "arrays": VECTORS}),
    "factor_spectra": (ke.factor_spectra, lambda: {"engine": engine()}),
    "curvature": (ke.curvature, lambda: {**SAME, "batches": DATA}),
    "curvature_operator": (ke.curvature_operator, lambda: {**SAME, "batches": DATA}),
    "estimate_spectrum": (ke.estimate_spectrum, lambda: {"operator": np.eye(3), "steps": 2}),
    "Influence": (ke.Influence, lambda: {"curvature": curvature()}),
    "Laplace": (ke.Laplace, lambda: {"curvature": curvature()}),
    "saliency": (ke.saliency, lambda: {"curvature": curvature()}),
    "prune": (ke.prune, lambda: {"curvature": curvature(), "sparsity": 0.5}),
    "merge": (ke.merge, lambda: {"models": [loaded()] * 2, "curvatures": [curvature()] * 2}),
    "fit": (
        ke.fit,
        lambda: {
            "model_or_engine": engine(), "data": DATA, "optimizer": "sgd", "steps": 1,
            "callbacks": [stop],
        },
    ),
    "report": (ke.report, lambda: {"run": history(), "path": "run.html"}),
    "verify": (ke.verify, lambda: {"model": engine(), **BATCH, "examples": 1, "parameters": 1}),
    "SGD": optimizer(ke.SGD, learning_rate=0.1),
    "Adam": optimizer(ke.Adam),
    "AdamW": optimizer(ke.AdamW),
    "Muon": optimizer(ke.Muon),
    "GaussNewton": optimizer(ke.GaussNewton),
    "KfacOptimizer": optimizer(ke.KfacOptimizer),
    "DampingAdaptation": (ke.DampingAdaptation, dict),
    "EarlyStop": (ke.EarlyStop, dict),
    "BestWeights": (ke.BestWeights, dict),
    "WeightAverage": (ke.WeightAverage, dict),
    "TensorBoard": (ke.TensorBoard, lambda: {"folder": "events"}),
    "Schedule": (ke.Schedule, dict),
    "CollectionConfig": (ke.CollectionConfig, dict),
    "EngineOptions": (ke.EngineOptions, lambda: {"loss": "categorical"}),
    "CurvatureOptions": (ke.CurvatureOptions, lambda: {"loss": "categorical"}),
    "Rows": (ke.Rows, lambda: {"indices": np.array([0]), "values": np.ones((1, 2)), "num_rows": 3}),
    "LayerCollection": (ke.LayerCollection, lambda: {"graph": {"w": (2, 3)}}),
    "FisherEstimator": (
        ke.FisherEstimator,
        lambda: {
            "variables": [], "cov_ema_decay": 0.9, "damping": 0.1,
            "layer_collection": ke.LayerCollection(graph={}),
        },
    ),
    "set_default_layer_collection": (
        ke.set_default_layer_collection, lambda: {"layer_collection": None}),
    **{
        name: (getattr(ke, name), lambda: {"logits": "a"})
        for name in (
            "CategoricalLogitsNegativeLogProbLoss", "OnehotCategoricalLogitsNegativeLogProbLoss",
            "MultiBernoulliNegativeLogProbLoss",
        )
    },
    **{
        name: (getattr(ke, name), dict)
        for name in (
            "Categorical", "CausalLM", "MultiBernoulli", "Normal", "L1", "Huber", "Poisson", "CTC",
        )
    },
    "Weighted": (ke.Weighted, lambda: {"targets": None, "weights": 1}),
    "NormalMeanNegativeLogProbLoss": (ke.NormalMeanNegativeLogProbLoss, lambda: {"mean": "a"}),
    "NormalMeanVarianceNegativeLogProbLoss": (
        ke.NormalMeanVarianceNegativeLogProbLoss, lambda: {"mean": "a", "variance": "b"}),
    **{
        f"Engine.{name}": (getattr(ke.Engine, name), lambda good=good: {"self": engine(), **good})
        for name, good in {
            "gradients": BATCH, "observe": BATCH, "step": BATCH, "loss": BATCH, "trace": BATCH,
            "predict": {"inputs": INPUTS}, "evaluate": {"data": DATA},
            "precondition": {"gradients": VECTORS}, "memory": {},
            "export": {"path": "e.onnx"},
            "save": {"path": "state"}, "load": {"path": "state"},
            "set_parameters": {"values": {}}, "set_buffers": {"values": {}},
            "multiply_cholesky": {"vectors": VECTORS},
        }.items()
    },
    **{
        f"Curvature.{name}": (
            getattr(ke.Curvature, name), lambda good=good: {"self": curvature(), **good},
        )
        for name, good in {
            "multiply": {"vectors": VECTORS}, "diagonal": {}, "effective_dimension": {"damping": 1},
            "log_determinant": {"damping": 1.0}, "sample": {"count": 1, "damping": 1.0},
            "example_gradients": BATCH, "input_moment": {"name": "fc0.weight"},
            "save": {"path": "c.safetensors"},
        }.items()
    },
    "Curvature.load": (ke.Curvature.load, lambda: {"path": "c.safetensors", "model": MODEL}),
    **{
        f"Laplace.{name}": (
            getattr(ke.Laplace, name), lambda good=good: {"self": laplace(), **good},
        )
        for name, good in {
            "predict": {"inputs": INPUTS}, "sample": {"count": 1}, "log_marginal_likelihood": {},
            "fit_prior": {}, "export": {"path": "l.onnx"},
        }.items()
    },
    **{
        f"Influence.{name}": (
            getattr(ke.Influence, name),
            lambda good=good: {"self": ke.Influence(curvature()), **good},
        )
        for name, good in {
            "scores": {"queries": DATA, "train": DATA}, "self_scores": {"train": DATA},
        }.items()
    },
    "Optimizer.step": (ke.SGD.step, lambda: {"self": ke.SGD(engine(), 0.1), **BATCH}),
    "Optimizer.save": (ke.SGD.save, lambda: {"self": ke.SGD(engine(), 0.1), "path": "o"}),
    "Optimizer.load": (ke.SGD.load, lambda: {"self": ke.SGD(engine(), 0.1), "path": "o"}),
}  # fmt: skip


# Classes of objects that the package makes, and classes whose arguments a collection passes.
MADE = {
    "ParameterMatches", "Result", "LayerReport", "FactorSpectrum", "Factors", "ParameterFactors",
    "FactorView", "MemoryReport", "Curvature", "CurvatureOperator", "SpectrumEstimate",
    "Predictive", "Communicator", "over_mpi", "over_nccl", "OnnxModel", "Trace", "LossFunction",
    "ElementwiseLoss", "StepReport", "TrainingRun", "History", "Callback",
    "SavedState", "Verification", "Check",
    "Measurement", "RelativeDamping", "CurvatureMatrixVectorProductComputer", "Engine",
    "get_default_layer_collection",
}  # fmt: skip


def test_every_public_callable_has_a_row():
    errors = {n for n in ke.__all__ if n.endswith(("Error", "Warning"))}
    of_collections = {n for n in ke.__all__ if n.endswith(("FB", "Factor", "KF", "FisherBlock"))}
    known = {name.partition(".")[0] for name in CALLS} | MADE | errors | of_collections
    assert set(ke.__all__) - {"__version__"} <= known


def arguments(name):
    """Yield each argument with each junk value, and the arguments of the call."""
    function, good = CALLS[name]
    named = {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    for argument in sorted(named - {"self"}):
        for kind, make in JUNK.items():
            yield argument, kind, {**good(), argument: make()}


def called(function, values):
    """Call a function with its first argument by position, as users do."""
    first, *rest = values
    if isinstance(function, MethodType) or first in ("self", "model"):
        return function(values[first], **{name: values[name] for name in rest})
    return function(**values)


@pytest.mark.parametrize("name", CALLS)
def test_junk_is_accepted_or_refused_by_one_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for argument, kind, values in arguments(name):
            try:
                called(CALLS[name][0], values)
            except ke.KfacError as error:
                if not str(error) or len(str(error)) > 2000:
                    raw.append(f"{argument}={kind}: a message of {len(str(error))} characters")
            except Exception as error:
                raw.append(f"{argument}={kind}: {type(error).__name__}: {error}")
    assert not raw, "\n".join(raw)

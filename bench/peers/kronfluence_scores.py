"""Influence scores of kronfluence, which writes factors and scores to a folder of files.

``gc.collect``, which it calls after every step, is replaced by nothing: it takes most of the time.
"""

import atexit
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from kronfluence.utils import state
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from kfac_engine.bench import uses
from kfac_engine.bench.jobs import Run
from kfac_engine.bench.peers.torch_uses import network, tensors
from kfac_engine.bench.uses import Study, study

_NAME = "job"


class _Classes(Task):
    """The negative log-likelihood of classes."""

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Any:
        x, targets = batch
        return cross_entropy(model(x), targets, reduction="sum")

    def compute_measurement(self, batch: Any, model: nn.Module) -> Any:
        return self.compute_train_loss(batch, model)


class _Analysis:
    """An analyzer with the data of a job in a temporary folder."""

    def __init__(self, data: Study) -> None:
        state.gc.collect = lambda: 0
        folder = TemporaryDirectory()
        atexit.register(folder.cleanup)
        task = _Classes()
        self.analyzer = Analyzer(
            _NAME, prepare_model(network(data), task), task, cpu=True, disable_tqdm=True,
            output_dir=folder.name,
        )  # fmt: skip
        self.train = TensorDataset(*tensors(data.train))
        self.queries = TensorDataset(*tensors(data.queries))

    def fit(self) -> None:
        """Compute the factors of EKFAC."""
        self.analyzer.fit_all_factors(
            _NAME, self.train, _BATCH, overwrite_output_dir=True,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=True),
        )  # fmt: skip


# Examples of a batch; of 16, 64 and 512 the fastest size.
_BATCH = 64
_OPTIONS: Mapping[str, Any] = {
    "per_device_train_batch_size": _BATCH,
    "score_args": ScoreArguments(damping_factor=None),
    "overwrite_output_dir": True,
}


def _fit(**sizes: Any) -> Run:
    analysis = _Analysis(study(**sizes))

    def run() -> dict[str, float]:
        analysis.fit()
        factors = analysis.analyzer.load_all_factors(_NAME)
        total = 0.0
        for module, sums in factors["lambda_matrix"].items():
            scales = sums / factors["num_lambda_processed"][module]
            total += float((scales / (scales + uses.DAMPING)).sum())
        return {uses.EFFECTIVE_DIMENSION: total}

    return run


def _scores(**sizes: Any) -> Run:
    analysis = _Analysis(study(**sizes))
    analysis.fit()

    def run() -> Any:
        analyzer = analysis.analyzer
        analyzer.compute_pairwise_scores(
            _NAME, _NAME, analysis.queries, analysis.train, len(analysis.queries), **_OPTIONS
        )
        return analyzer.load_pairwise_scores(_NAME)["all_modules"].numpy()

    return run


def _self_scores(**sizes: Any) -> Run:
    analysis = _Analysis(study(**sizes))
    analysis.fit()

    def run() -> Any:
        analysis.analyzer.compute_self_scores(_NAME, _NAME, analysis.train, **_OPTIONS)
        return analysis.analyzer.load_self_scores(_NAME)["all_modules"].numpy()

    return run


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "EKFAC fit": _fit,
    "scores": _scores,
    "self-influence": _self_scores,
}

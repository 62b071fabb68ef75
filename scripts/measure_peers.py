"""Write the results of laplace-torch, kronfluence and curvlinops on small models for the tests.

Run from the repository root with a Python that has these packages and onnx:
``python -m scripts.measure_peers``. kronfluence 1.0.1 installs a package ``tests``, which hides the
folder of this repository: delete it first. All libraries compute in float64, with the weights and
the data of ``tests/uses_of_peers/cases.py``. The entry ``about`` of each file has the versions and
the conventions as JSON.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import chain, product
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from curvlinops import EFLinearOperator, EKFACLinearOperator, GGNLinearOperator, KFACLinearOperator
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from kronfluence.utils import state
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.uses_of_peers.cases import (
    BATCH,
    DAMPING,
    DAMPINGS,
    EXAMPLES,
    FOLDER,
    LINKS,
    Case,
    cases,
    settings,
    wave,
)

Results = dict[str, np.ndarray]
STRATEGIES = (
    ("ekfac", "empirical"), ("ekfac", "sampled"), ("kfac", "empirical"), ("diagonal", "empirical"),
)  # fmt: skip

CONVENTIONS = {
    "laplace_torch": "H is the sum of the data's Fisher matrices. Weight and bias are blocks of "
    "their own. Regression has variance sigma_noise**2. Evidence: log-likelihood - (log det P - "
    "log det P0 + prior * |theta|**2) / 2. eigenvalues: H before the prior, all parameters. "
    "covariance: at the last setting.",
    "kronfluence": "Means over examples; the bias is joint, a one appended last. kfac eigenvalues "
    "leave the number of positions out. Scores are g (F + damping)**-1 g without sign and 1/n; "
    "damping none: a tenth of the mean eigenvalue of each layer. sampled: the targets are the "
    "draws of the case. Regression: loss sum (f - y)**2.",
    "curvlinops": "F is the mean over examples of the matrix of the summed loss. Regression: "
    "loss sum (f - y)**2. log_determinant, product: of F + 0.1, and (F + 0.1)**-1 times "
    "sin(0, 1, 2, ...) over all parameters in order.",
}  # fmt: skip


def network(name: str, case: Case) -> nn.Module:
    """Return the model of a case in PyTorch, in float64."""
    if name == "cnn":
        layers: list[tuple[str, nn.Module]] = [
            ("conv0", nn.Conv2d(2, 3, 3, stride=2, padding=1)), ("act0", nn.Tanh()),
            ("conv1", nn.Conv2d(3, 4, 2)), ("act1", nn.Tanh()), ("flat", nn.Flatten()),
            ("output", nn.Linear(16, 3)),
        ]  # fmt: skip
    else:
        layers = [("fc0", nn.Linear(6, 5)), ("act0", nn.Tanh()), ("fc1", nn.Linear(5, 3))]
    module = nn.Sequential(OrderedDict(layers))
    module.load_state_dict({key: tensor(value) for key, value in case.parameters.items()})
    return module


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor, in float64 if it is of floating point."""
    return torch.from_numpy(np.array(array, np.float64 if array.dtype.kind == "f" else np.int64))


def loader(case: Case) -> DataLoader[Any]:
    """Return the data in batches of 10, 10 and 4."""
    return DataLoader(TensorDataset(tensor(case.inputs), tensor(case.targets)), batch_size=BATCH)


# -- laplace-torch ---------------------------------------------------------------------------------


def laplace_torch(name: str, case: Case) -> Iterator[tuple[str, Any]]:
    """Yield the results of laplace-torch by name."""
    kinds = (("all", "kron"), ("last_layer", "kron"), ("all", "diag"), ("all", "full"))
    for subset, structure in kinds:
        posterior = _posterior(name, case, subset, structure)
        results = [_results(case, posterior, structure)]
        if structure == "kron" and case.loss == "categorical":
            results.append(_with_other_priors(case, posterior, several=subset == "all"))
        for key, value in chain(*results):
            yield f"{subset}.{structure}.{key}", value


def _posterior(name: str, case: Case, subset: str, structure: str) -> Any:
    likelihood = "classification" if case.loss == "categorical" else "regression"
    posterior = Laplace(
        network(name, case), likelihood, subset_of_weights=subset, hessian_structure=structure,
        backend=CurvlinopsGGN,
    )  # fmt: skip
    posterior.fit(loader(case))
    return posterior


def _results(case: Case, posterior: Any, structure: str) -> Iterator[tuple[str, Any]]:
    """Yield results; those that depend on the prior have its settings on their first axis."""
    regression, queries = case.loss == "normal", tensor(case.queries)
    yield "eigenvalues", _eigenvalues(posterior.H, structure)
    yield "log_likelihood", posterior.log_likelihood
    stacked: dict[str, list[torch.Tensor]] = defaultdict(list)
    for prior, noise in settings(case.loss):
        sigma = torch.tensor(noise) if regression else None
        evidence = posterior.log_marginal_likelihood(torch.tensor([prior]), sigma)
        stacked["evidence"].append(evidence)
        stacked["log_determinant"].append(posterior.log_det_posterior_precision)
        stacked["variance"].append(posterior._glm_predictive_distribution(queries)[1])
        for link in () if regression else LINKS:
            stacked[link].append(posterior(queries, link_approx=link))
    yield "mean", posterior._glm_predictive_distribution(queries)[0]
    yield "covariance", posterior._glm_predictive_distribution(queries, joint=True)[1]
    yield from ((key, torch.stack(values)) for key, values in stacked.items())


def _with_other_priors(case: Case, posterior: Any, *, several: bool) -> Iterator[tuple[str, Any]]:
    """Yield the results of a prior of each parameter, a temperature and the best prior."""
    if several:  # 1, 2, 3, … in the order of the parameters
        priors = torch.arange(1.0, posterior.n_layers + 1)
        yield "evidence.priors", posterior.log_marginal_likelihood(priors)
        yield "variance.priors", posterior._glm_predictive_distribution(tensor(case.queries))[1]

    def loss(logarithm: float) -> float:
        prior = torch.tensor([np.exp(logarithm)])
        return -float(posterior.log_marginal_likelihood(prior))

    best = minimize_scalar(loss, bounds=(-12, 12), method="bounded", options={"xatol": 1e-10})
    yield "best_prior", np.exp(best.x)
    posterior.temperature = 0.5
    yield "evidence.temperature=0.5", posterior.log_marginal_likelihood(torch.tensor([1.0]))
    yield "variance.temperature=0.5", posterior._glm_predictive_distribution(
        tensor(case.queries))[1]  # fmt: skip


def _eigenvalues(H: Any, structure: str) -> torch.Tensor:
    if structure == "diag":
        return torch.sort(H).values
    if structure == "full":
        return torch.linalg.eigvalsh(H)
    blocks = [b[0] if len(b) == 1 else torch.outer(b[0], b[1]).ravel() for b in H.eigenvalues]
    return torch.sort(torch.cat(blocks)).values


# -- kronfluence -----------------------------------------------------------------------------------


class Losses(Task):  # type: ignore[misc] # an untyped base class
    """The loss of a case; sampled targets are the draws of the case."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Any:
        """Return the sum over the examples."""
        x, y, draws = batch
        target = draws if sample else y
        if self._kind == "categorical":
            return cross_entropy(model(x), target, reduction="sum")
        return ((model(x) - target) ** 2).sum()

    def compute_measurement(self, batch: Any, model: nn.Module) -> Any:
        """Return the loss."""
        return self.compute_train_loss(batch, model)


def kronfluence(name: str, case: Case) -> Iterator[tuple[str, Any]]:
    """Yield the results of kronfluence by name."""
    double = torch.float64
    state.gc.collect = lambda: 0  # it takes most of the time, and changes no result
    train = TensorDataset(tensor(case.inputs), tensor(case.targets), tensor(case.draws))
    query = TensorDataset(tensor(case.queries), *[tensor(case.query_targets)] * 2)
    task = Losses(case.loss)
    with TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "case", prepare_model(network(name, case), task), task, cpu=True,
            disable_tqdm=True, output_dir=folder,
        )  # fmt: skip
        for strategy, fisher in STRATEGIES:
            key = f"{strategy}.{fisher}"
            factors = FactorArguments(
                strategy=strategy, use_empirical_fisher=fisher == "empirical",
                activation_covariance_dtype=double, gradient_covariance_dtype=double,
                per_sample_gradient_dtype=double, lambda_dtype=double,
            )  # fmt: skip
            analyzer.fit_all_factors(key, train, BATCH, factor_args=factors)
            for module, values in _spectra(analyzer.load_all_factors(key), strategy):
                yield f"{key}.eigenvalues.{module}", values
            scores = [_scores(analyzer, key, query, train, damping) for damping in DAMPINGS]
            yield f"{key}.scores", torch.stack([pairwise for pairwise, _ in scores])
            yield f"{key}.self_scores", torch.stack([selves for _, selves in scores])


def _scores(
    analyzer: Analyzer, key: str, query: Any, train: Any, damping: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (queries, examples) and the scores of the examples by themselves."""
    arguments = ScoreArguments(
        damping_factor=damping, per_sample_gradient_dtype=torch.float64,
        precondition_dtype=torch.float64, score_dtype=torch.float64,
    )  # fmt: skip
    label = f"{key}.{damping}"
    run = {"per_device_train_batch_size": BATCH, "score_args": arguments}
    analyzer.compute_pairwise_scores(label, key, query, train, 3, **run)
    analyzer.compute_self_scores(label, key, train, **run)
    pairwise, selves = analyzer.load_pairwise_scores(label), analyzer.load_self_scores(label)
    return pairwise["all_modules"], selves["all_modules"]


def _spectra(factors: Mapping[str, Any], strategy: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the sorted eigenvalues of each module."""
    if strategy == "kfac":
        sides = factors["activation_eigenvalues"], factors["gradient_eigenvalues"]
        for module, a in sides[0].items():
            yield module, torch.sort(torch.outer(a, sides[1][module]).ravel()).values
        return
    for module, scale in factors["lambda_matrix"].items():
        mean = scale / factors["num_lambda_processed"][module]
        yield module, torch.sort(mean.ravel()).values


# -- curvlinops ------------------------------------------------------------------------------------


def curvlinops(name: str, case: Case) -> Iterator[tuple[str, Any]]:
    """Yield the results of curvlinops by name."""
    module = network(name, case)
    loss = nn.CrossEntropyLoss if case.loss == "categorical" else nn.MSELoss
    parameters = list(module.parameters())
    data = list(loader(case))
    common = module, loss(reduction="sum"), parameters, data
    operators = {"exact.full": GGNLinearOperator(*common)}
    if case.loss == "categorical":
        operators["empirical.full"] = EFLinearOperator(*common)
    for fisher, separate in product(("type-2", "empirical"), (False, True)):
        key = "exact" if fisher == "type-2" else fisher, "separate" if separate else "joint"
        options = {"fisher_type": fisher, "separate_weight_and_bias": separate}
        operators["{}.kron.{}".format(*key)] = KFACLinearOperator(*common, **options)
        operators["{}.ekfac.{}".format(*key)] = EKFACLinearOperator(*common, **options)
    for key, operator in operators.items():
        matrix = operator @ torch.eye(operator.shape[1]) / EXAMPLES
        damped = matrix + DAMPING * torch.eye(len(matrix))
        yield f"{key}.trace", matrix.trace()
        yield f"{key}.log_determinant", torch.logdet(damped)
        yield f"{key}.product", torch.linalg.solve(damped, tensor(wave(len(matrix))))


# -- files -----------------------------------------------------------------------------------------

PACKAGES: Mapping[str, tuple[str, Callable[[str, Case], Iterator[tuple[str, Any]]]]] = {
    "laplace_torch": ("laplace-torch", laplace_torch),
    "kronfluence": ("kronfluence", kronfluence),
    "curvlinops": ("curvlinops-for-pytorch", curvlinops),
}


def main() -> None:
    """Write one file for each library."""
    torch.set_default_dtype(torch.float64)
    for name, (package, measure) in PACKAGES.items():
        about = {
            "versions": {p: version(p) for p in (package, "torch", "numpy")},
            "conventions": CONVENTIONS[name],
        }
        arrays: Results = {"about": np.array(json.dumps(about))}
        for label, case in cases().items():
            for key, value in measure(label, case):
                result = value.detach().numpy() if isinstance(value, torch.Tensor) else value
                arrays[f"{label}.{key}"] = np.asarray(result, np.float64)
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
        print(f"{name}: {len(arrays) - 1} results")


if __name__ == "__main__":
    main()

"""``laplace``: predict with uncertainty, or write a model that computes it."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kfac_engine.cli.command import MODEL, Option, command, file_option, output
from kfac_engine.cli.display import print_json, print_table, say, working
from kfac_engine.cli.options import curvature_option, json_option, number_or, read_curvature
from kfac_engine.errors import InputError
from kfac_engine.system.writing import write_rendered

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.analysis.laplace.predictive import Predictive

_BY_EVIDENCE = "evidence"


def _evidence(text: str) -> str:
    if text != _BY_EVIDENCE:
        raise click.BadParameter(f"'{text}' is neither a number nor '{_BY_EVIDENCE}'.")
    return text


_FILES = (
    curvature_option,
    file_option("Data", "--inputs",
        help="Queries: .npz by input name, one .npy, or a folder of shards. Needed for --out."),
    output("-o", "--out", help="File of mean, variance and probabilities of the queries (.npz)."),
    output("--export", writes="model",
        help="The model with one more output, the variance (.onnx), for a curvature of the last "
        "layer."),
)  # fmt: skip
_POSTERIOR = (
    Option(
        "Posterior", "--prior", "prior_precision", metavar="NUMBER|evidence", default=_BY_EVIDENCE,
        callback=number_or(_evidence),
        help="Precision λ > 0 of the prior of each parameter, or evidence for the most probable "
        "precision, which needs a curvature with targets."),
    Option("Posterior", "--noise", metavar="NUMBER|evidence", default="1.0",
        callback=number_or(_evidence),
        help="Standard deviation of the targets of a normal loss, or evidence for the most "
        "probable deviation."),
)  # fmt: skip


@command(
    "Predict with the uncertainty of the parameters, by a Laplace approximation.",
    "kfac-engine laplace mlp.onnx --curvature mlp.curvature.safetensors \\\n"
    "  --inputs queries.npy -o predictive.npz",
    MODEL,
    json_option,
    files=_FILES,
    prior=_POSTERIOR,
)
def laplace(model: Path, files: SimpleNamespace, prior: SimpleNamespace, as_json: bool) -> None:
    from kfac_engine.cli.files import read_data

    if files.out is None and files.export is None:
        raise InputError("there is nothing to write; name a file with --out, --export or both.")
    if (files.out is None) != (files.inputs is None):
        raise InputError(
            "--out predicts for the queries in --inputs; give both options or neither."
        )
    curvature = read_curvature(files.curvature, model, files.inputs)
    with working("choosing the prior"):
        posterior = _posterior(curvature, prior)
    predictive = None
    if files.out is not None and files.inputs is not None:
        with working("predicting"):
            _, queries = read_data(files.inputs, None, model, mapped=True)
            predictive = posterior.predict(queries)
            _write(predictive, files.out)
    if files.export is not None:
        with working("writing the model"):
            posterior.export(files.export)
    written = [path for path in (files.out, files.export) if path is not None]
    _report(posterior, predictive, written, as_json)


def _posterior(curvature: "ke.Curvature", options: SimpleNamespace) -> "ke.Laplace":
    import kfac_engine as ke

    prior, noise = (
        1.0 if isinstance(value, str) else value
        for value in (options.prior_precision, options.noise)
    )
    posterior = ke.Laplace(curvature, prior, noise)
    if isinstance(options.prior_precision, str):
        posterior.fit_prior(noise=isinstance(options.noise, str))
    elif isinstance(options.noise, str):
        raise InputError("--noise evidence needs --prior evidence: both are chosen together.")
    return posterior


def _write(predictive: "Predictive", path: Path) -> None:
    import numpy as np

    arrays: dict[str, Any] = {"mean": predictive.mean, "variance": predictive.variance}
    if predictive.probabilities is not None:
        arrays["probabilities"] = predictive.probabilities
    write_rendered(path, lambda stream: np.savez(stream, **arrays))


def _report(
    posterior: "ke.Laplace", predictive: "Predictive | None", written: list[Path], as_json: bool
) -> None:
    import numpy as np

    numbers: dict[str, object] = {
        "prior_precision": posterior.prior_precision,
        "noise": posterior.noise,
        "log_determinant": posterior.log_determinant(),
    }
    if posterior.curvature.log_likelihood is not None:
        numbers["log_marginal_likelihood"] = posterior.log_marginal_likelihood()
    if predictive is not None:
        spread = np.sqrt(np.diagonal(predictive.variance, axis1=1, axis2=2))
        numbers["queries"] = len(spread)
        numbers["median_standard_deviation"] = float(np.median(spread))
        numbers["largest_standard_deviation"] = float(spread.max())
    if as_json:
        print_json(numbers | {"written": [str(path) for path in written]})
        return
    rows = [
        (name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in numbers.items()
    ]
    print_table("posterior", ("quantity", " value"), rows)
    for path in written:
        say(f"written to {path}")

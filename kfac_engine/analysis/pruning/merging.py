"""Merges the parameters of several models into a mean weighted by their Fisher matrices."""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, checked_curvature
from kfac_engine.arguments import check_list, check_number
from kfac_engine.backend.namespace import as_array, numeric
from kfac_engine.engine.trainable_model import TrainableModel
from kfac_engine.errors import InputError, NonFiniteError, ShapeError
from kfac_engine.runtime.model import OnnxModel


def merge(
    models: Sequence[Mapping[str, Array] | TrainableModel | OnnxModel],
    curvatures: Sequence[Curvature],
    weights: Sequence[float] | None = None,
) -> dict[str, Array]:
    """Return the mean of the parameters of models, weighted by their Fisher diagonals.

    Entry ``i`` of the result is ``Σ_m w_m F_m,ii θ_m,i / Σ_m w_m F_m,ii``, which maximizes the
    product of normal approximations of the posteriors (Matena & Raffel 2022, arXiv:2111.09832,
    equation 4). Where all diagonals are zero, the result is the mean with the weights ``w``.

    Args:
        models: The parameters of each model by name, or an object that has them as ``parameters``,
            such as an engine. All models have the same names and shapes.
        curvatures: The curvature of each model, on its own data.
        weights: Weight ``w`` of each model, positive; by default all are equal.

    Returns:
        New arrays by parameter name, in the type of the first model, for ``Engine.set_parameters``.

    Raises:
        InputError: There are fewer than two models, numbers of models, curvatures and weights
            differ, parameters are missing, or a weight is not positive.
        ShapeError: A parameter has different shapes.
        NonFiniteError: A parameter contains NaN or infinity.
    """
    check_list("models", models, "[first.parameters, second.parameters]")
    check_list("curvatures", curvatures, "[first, second]")
    if len(models) < 2 or len(models) != len(curvatures):
        raise InputError(
            f"merge needs two or more models and a curvature of each, got {len(models)} models and "
            f"{len(curvatures)} curvatures."
        )
    for curvature in curvatures:
        checked_curvature(curvature, "merge")
    shares = [1.0] * len(models) if weights is None else weights
    check_list("weights", shares, "[1.0, 2.0]")
    if len(shares) != len(models):
        raise InputError(f"{len(shares)} weights are given for {len(models)} models.")
    for share in shares:
        check_number("weights", share)
        if share <= 0:
            raise InputError(f"weights must be positive, got {share}.")
    shapes = curvatures[0].vector.shapes
    arrays = [
        _checked(entry.on_host(_parameters(model)), shapes, f"model {place}")
        for place, (model, entry) in enumerate(zip(models, curvatures, strict=True), 1)
    ]
    diagonals = [
        _checked(entry.diagonal(), shapes, f"curvature {place}")
        for place, entry in enumerate(curvatures, 1)
    ]
    return {
        name: _mean([entry[name] for entry in arrays], [entry[name] for entry in diagonals], shares)
        for name in shapes
    }


def _parameters(model: Mapping[str, Array] | TrainableModel | OnnxModel) -> Mapping[str, Array]:
    if not isinstance(model, Mapping) and not hasattr(model, "parameters"):
        raise InputError(
            f"merge needs mappings of parameters, or objects that have them, got {model!r:.80}."
        )
    return model if isinstance(model, Mapping) else model.parameters


def _checked(
    entries: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], owner: str
) -> dict[str, Array]:
    """Return arrays of a model as NumPy arrays, after a check of names, shapes and numbers."""
    if entries.keys() != shapes.keys():
        differing = ", ".join(sorted(entries.keys() ^ shapes.keys()))
        raise InputError(
            f"{owner} and the first curvature differ in the parameters {differing}; merge models "
            f"of one architecture."
        )
    arrays = {name: np.asarray(as_array(array)) for name, array in entries.items()}
    for name, array in arrays.items():
        numeric(f"'{name}' of {owner}", array)
        if array.shape != shapes[name]:
            raise ShapeError(f"'{name}' of {owner} has shape {array.shape}, not {shapes[name]}.")
        if not np.isfinite(array).all():
            raise NonFiniteError(f"'{name}' of {owner} contains NaN or infinity.")
    return arrays


def _mean(arrays: Sequence[Array], diagonals: Sequence[Array], shares: Sequence[float]) -> Array:
    """Return the weighted mean of one parameter."""
    values = np.stack([np.asarray(array, np.float64) for array in arrays])
    weights = np.stack([share * entry for share, entry in zip(shares, diagonals, strict=True)])
    plain = np.broadcast_to(np.reshape(shares, (-1,) + (1,) * (values.ndim - 1)), values.shape)
    weights = np.where(weights.sum(axis=0) > 0, weights, plain)
    mean: Array = (weights * values).sum(axis=0) / weights.sum(axis=0)
    return mean.astype(arrays[0].dtype)

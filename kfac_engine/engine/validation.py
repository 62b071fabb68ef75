"""Checks the estimation modes, batch sizes and gradients that an engine receives."""

from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_bool
from kfac_engine.autodiff.training_form import trains
from kfac_engine.backend.memory_space import HOST, MemorySpace
from kfac_engine.backend.namespace import numeric
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.engine.checkpoint import Extras
from kfac_engine.engine.loss_bindings import LossBinding
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
    suggestion,
)
from kfac_engine.graph.analysis.exporter_changes import merge_ties
from kfac_engine.graph.passes.upcast import in_single
from kfac_engine.graph.structure import Fact, Graph
from kfac_engine.runtime.batch_axis import Batch
from kfac_engine.runtime.model import OnnxModel


def check_batch_size(batch: Batch, inputs: Mapping[str, Array]) -> None:
    """Refuse a batch whose size differs from the size that the model fixes."""
    for name, axis in batch.inputs.items() if batch.fixed else ():
        shape = np.shape(inputs.get(name, ()))
        if axis < len(shape) and shape[axis] != batch.size:
            raise ShapeError(f"input '{name}' has {shape[axis]} examples, but {batch.fixed}.")


def batch_size(batch: Batch, inputs: Mapping[str, Array]) -> int | None:
    """Return the number of examples in an unchecked batch; None if it cannot be determined."""
    if batch.sets:
        sizes = [batch_size(each, inputs) for each in batch.sets]
        return None if None in sizes else sum(filter(None, sizes))
    arrays = inputs if isinstance(inputs, dict | Mapping) else {}
    for name, axis in batch.inputs.items():
        shape = getattr(arrays.get(name), "shape", ())
        if axis < len(shape):
            return int(shape[axis])
    return None


def check_mode(estimation_mode: str, heads: Sequence[LossBinding], batch: Batch) -> None:
    """Refuse a mode that a loss lacks, or that needs an axis with only the examples."""
    for head in heads:
        samples = estimation_mode in ("gradients", "empirical")
        if head.loss.sequences and not (samples or head.loss.has_products):
            raise UnsupportedError(
                f"the estimation mode '{estimation_mode}' needs products with the Fisher matrix of "
                f"the loss on '{head.output}', which have no closed form; choose 'gradients' or "
                f"'empirical' for an engine, or fisher='sampled' or 'empirical' for a curvature."
            )
        place = batch.places.get(head.output)
        if place is None:  # a single number for the whole batch has no curvature
            continue
        if MODES[estimation_mode].examples_first and not place.comes_first:
            raise UnsupportedError(
                f"the Fisher matrix '{estimation_mode}' needs the examples alone on the first axis "
                f"of '{head.output}', but they lie on axis {place.axis}"
                f"{' together with positions' if place.repeats > 1 else ''}; choose "
                f"estimation_mode 'gradients' or 'empirical' for an engine, or fisher='sampled' or "
                f"'empirical' for a curvature."
            )


def checked_vectors(
    model: OnnxModel, backend: Backend, vectors: Mapping[str, Array], what: str = "the gradient of"
) -> dict[str, Array]:
    """Check arrays of a caller that have the shapes of parameters, such as gradients.

    Args:
        model: The model with the parameters.
        backend: Array library.
        vectors: Arrays by parameter name, from any library.
        what: Noun that precedes the name of a parameter in messages.

    Returns:
        Arrays of the backend, by parameter name; half precision is converted to float32.

    Raises:
        UnknownNameError: A name is not a parameter.
        InputError: Weights that are tied have different arrays.
        ShapeError: An array has another shape than its parameter.
        NonFiniteError: An array contains NaN or infinity.
    """
    checked: dict[str, Array] = {}
    for name, value in merge_ties(model.ties, vectors).items():
        parameter = model.parameters.get(name)
        if parameter is None:
            raise UnknownNameError(
                f"'{name}'{suggestion(name, model.parameters)} is not a trainable parameter; they "
                f"are: {', '.join(model.parameters)}."
            )
        checked[name] = array = in_single(numeric(f"{what} '{name}'", backend.asarray(value)))
        if array.shape != parameter.shape:
            raise ShapeError(f"{what} '{name}' has shape {array.shape}, not {parameter.shape}.")
    are_finite = backend.download([backend.are_finite(list(checked.values()))])[0]
    for name, finite in zip(checked, are_finite, strict=True):
        if not finite:
            raise NonFiniteError(f"{what} '{name}' holds NaN or infinity.")
    return checked


def check_blocks(collection: LayerCollection, names: Set[str]) -> None:
    """Refuse vectors, by name, if a block has vectors for some but not all of its parameters."""
    for params in map(uses, collection.fisher_blocks):
        if not names.isdisjoint(params) and not names >= {*params}:
            raise InputError(
                f"{', '.join(params)} form one block; give the gradients of all of them."
            )


def check_finite(
    arrays: Mapping[str, Array], memory_space: MemorySpace = HOST, what: str = "the gradient of"
) -> None:
    """Raise a NonFiniteError if a contiguous array contains NaN or infinity.

    ``what`` precedes the name of the array in the message.
    """
    refuse_nonfinite(arrays, memory_space.finite(list(arrays.values())).each, what)


def refuse_nonfinite(
    names: Iterable[str], finite: Iterable[bool], what: str = "the gradient of"
) -> None:
    """Raise a NonFiniteError with the first name that is not finite."""
    for name, good in zip(names, finite, strict=True):
        if not good:
            raise NonFiniteError(f"{what} '{name}' holds NaN or infinity.")


def check_variances(
    graph: Graph, facts: Mapping[str, Fact], batch: Mapping[str, Array | Fact]
) -> None:
    """Refuse one value for each channel of a normalization by the statistics of the batch.

    The lengths of ``facts`` choose the values of ``batch`` to read, because reading one may repeat
    the forward pass.
    """
    for node in filter(trains, graph.nodes):
        name = node.inputs[0]
        if prod(facts[name].shape[2:]) > 1:
            continue
        shape = batch[name].shape
        if prod(shape[:1]) * prod(shape[2:]) == 1:
            raise InputError(
                f"BatchNormalization node '{node.name}' has one value for each channel in this "
                f"batch of one example. Its result is then constant, and the layers before it have "
                f"no gradient. Give two or more examples to each batch, and to each part of a "
                f"batch, or train the inference form."
            )


def checked_extras(extras: object) -> Extras:
    """Return the extras of a state, empty for None; an InputError for another object."""
    if not isinstance(extras, Extras | None):
        raise InputError(f"extras must be Extras, got {extras!r:.80}.")
    return extras or Extras()


def check_load(parameters: object, accept: object) -> None:
    """Refuse other arguments of ``load`` than a flag and a function, with an InputError."""
    check_bool("parameters", parameters)
    if accept is not None and not callable(accept):
        raise InputError(f"accept must be a function of the extras, got {accept!r:.80}.")

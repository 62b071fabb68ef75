"""Reads and writes curvature files, which store the SHA-256 of the model's weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Block, InputMoment, Spectrum
from kfac_engine.analysis.fisher_matrix.layout import Layout
from kfac_engine.analysis.fisher_matrix.options import CurvatureOptions
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.errors import InputError
from kfac_engine.losses.kinds import LossKind, loss_named
from kfac_engine.printable import quoted
from kfac_engine.system.state_files import CURVATURE, read_state, write_state

# Numbers of the whole curvature.
NUMBERS = ("examples", "log_likelihood", "predictions")
# Options that determine the matrix; the others determine how it is computed.
_STORED = (
    "loss",
    "structure",
    "fisher",
    "biases",
    "layers",
    "output",
    "class_axis",
    "trainable",
    "freeze",
    "approximations",
    "batch_axes",
)


def weight_hashes(assembly: Assembly) -> dict[str, str]:
    """Return the SHA-256 of each floating-point constant of a model, by name."""
    constants = assembly.model.loaded.graph.constants
    return {name: _hash(array) for name, array in constants.items() if array.dtype.kind == "f"}


def save_curvature(
    path: str | Path, layout: Layout, blocks: Sequence[Block], about: Mapping[str, object]
) -> None:
    """Write a curvature; the file is replaced whole or not at all.

    ``about`` has numbers of the whole curvature.
    """
    tensors: dict[str, Array] = {}
    for number, block in enumerate(blocks):
        arrays = {
            "eigenvalues": block.spectrum.eigenvalues,
            "left": block.spectrum.left,
            "right": block.spectrum.right,
            "inputs": None if block.inputs is None else block.inputs.eigenvalues,
        }
        tensors |= {
            f"{number}/{name}": array for name, array in arrays.items() if array is not None
        }
    header: dict[str, object] = {
        "options": _stored(layout.options),
        "about": dict(about),
        "positions": [None if b.inputs is None else b.inputs.positions for b in blocks],
        "weights": weight_hashes(layout.assembly),
    }
    write_state(path, CURVATURE, header, tensors)


class CurvatureFile:
    """A curvature that was read from a file, with numbers of the whole curvature in ``about``.

    A file that is missing, damaged, or no curvature raises an InputError.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        file = read_state(path, CURVATURE)
        if not _is_header(file.header):
            raise InputError(CURVATURE.another(path))
        self._header, self._arrays = file.header, file.arrays
        self.about: dict[str, Any] = file.header["about"]

    def options(self, changes: Mapping[str, Any]) -> CurvatureOptions:
        """Return the options of the measurement, with ``changes`` that the file does not store.

        A loss that is an object raises an InputError, because the file does not store it.
        """
        try:
            fields = _with_loss(self._header["options"]) | dict(changes)
        except (TypeError, AttributeError, ValueError) as failure:
            raise self._damaged(str(failure)) from failure
        if fields.get("loss") is None:
            raise InputError(
                f"the curvature '{self._path}' was measured with a loss object, which the file "
                f"does not store; pass loss=."
            )
        try:
            return CurvatureOptions(**fields)
        except TypeError as failure:
            raise self._damaged(str(failure)) from failure

    def check_weights(self, hashes: Mapping[str, str]) -> None:
        """Refuse a model with other weights; ``hashes`` are the SHA-256 of its weights."""
        stored = self._header["weights"]
        changed = sorted(
            name for name in {*stored, *hashes} if stored.get(name) != hashes.get(name)
        )
        if changed:
            raise InputError(
                f"the curvature '{self._path}' belongs to other weights: {quoted(changed, 5)} "
                f"differ; measure the curvature of this model."
            )

    def read(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Return the blocks of a model with the stored spectra.

        An InputError says that the file has other blocks, or that its arrays are damaged.
        """
        positions = self._header["positions"]
        if len(positions) != len(blocks):
            raise self._damaged(f"it has {len(positions)} blocks, the model has {len(blocks)}")
        return tuple(self._block(i, block, positions[i]) for i, block in enumerate(blocks))

    # -- private ----------------------------------------------------------------------------------

    def _block(self, number: int, block: Block, positions: float | None) -> Block:
        groups, d_in, d_out = block.places.shape
        values = self._array(f"{number}/eigenvalues", (groups, d_in, d_out))
        left = self._array(f"{number}/left", (groups, d_in, d_in))
        right = self._array(f"{number}/right", (groups, d_out, d_out))
        moment = self._array(f"{number}/inputs", (groups, d_in))
        if values is None or values.min(initial=0.0) < 0:
            raise self._damaged(f"the eigenvalues of {', '.join(block.parameters)} are not valid")
        # A layer whose inputs were measured has eigenvectors of both factors. Elsewhere, absent
        # eigenvectors mean that the matrix is diagonal.
        if positions and (left is None or right is None or moment is None):
            raise self._damaged(f"{', '.join(block.parameters)} have no eigenvectors")
        inputs = None if moment is None or not positions else InputMoment(moment, positions)
        return replace(block, spectrum=Spectrum(values, left, right), inputs=inputs)

    def _array(self, key: str, shape: tuple[int, ...]) -> Array | None:
        """Return an array after a check; None if the file has none."""
        array: Array | None = self._arrays.get(key)
        if array is None:
            return None
        if array.shape != shape or array.dtype != np.float64 or not np.isfinite(array).all():
            raise self._damaged(f"'{key}' is not a finite float64 array of shape {shape}")
        return array

    def _damaged(self, reason: str) -> InputError:
        return InputError(CURVATURE.damaged(self._path, reason))


def _hash(array: Array) -> str:
    data = np.ascontiguousarray(array)
    kind = f"{data.dtype.str} {data.shape}".encode()
    return sha256(kind + b"\0" + data.tobytes()).hexdigest()


def _stored(options: CurvatureOptions) -> dict[str, object]:
    """Return the options that a file stores; the loss is None if it is an object."""
    fields: dict[str, object] = {name: getattr(options, name) for name in _STORED}
    return fields | {"loss": _stored_loss(options.loss)}


def _stored_loss(loss: LossChoices) -> Any:
    """Return a loss by name, with its options, as values of JSON; None for an object."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, LossKind):
        options = {n: v if v is None else np.asarray(v).tolist() for n, v in loss.options.items()}
        return {"name": loss.name, "weight": loss.weight, "find_logits": loss.find_logits} | options
    if isinstance(loss, Mapping):
        several = {output: _stored_loss(choice) for output, choice in loss.items()}
        return None if None in several.values() else {"outputs": several}
    if isinstance(loss, Sequence):
        listed = [_stored_loss(choice) for choice in loss]
        return None if None in listed else listed
    return None


def _with_loss(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's options, with ``loss`` as ``EngineOptions`` takes it.

    Older files store the losses' names, options and weights as separate options.
    """
    rest = dict(fields)
    weights = rest.pop("loss_weights", None)
    old = {name: rest.pop(name) for name in _OLDER if name in rest}
    loss = _read_loss(rest.get("loss"))
    if weights is not None or old.get("find_logits", True) is not True or len(old) > 1:
        names = [loss] if isinstance(loss, str) else loss
        several = zip(names, weights or [1.0] * len(names), strict=True)
        loss = [loss_named(name, weight=weight, **old) for name, weight in several]
    return rest | {"loss": loss}


# Options of losses in files of older versions.
_OLDER = ("find_logits", "ignore_index", "class_weights", "positive_weights", "label_smoothing")


def _read_loss(stored: Any) -> Any:
    """Return the loss that ``_stored_loss`` returned as values of JSON."""
    if isinstance(stored, list):
        return [_read_loss(choice) for choice in stored]
    if not isinstance(stored, dict):
        return stored
    if "outputs" in stored:
        return {output: _read_loss(choice) for output, choice in stored["outputs"].items()}
    return loss_named(**stored)


def _is_header(header: Mapping[str, Any]) -> bool:
    """Return whether a header belongs to a file of a curvature."""
    kinds = {"options": dict, "about": dict, "weights": dict, "positions": list}
    if any(not isinstance(header.get(name), kind) for name, kind in kinds.items()):
        return False
    if header.keys() - {"format"} != kinds.keys():
        return False
    if header["about"].keys() != set(NUMBERS):
        return False
    likelihood = header["about"]["log_likelihood"]
    examples = header["about"]["examples"]
    means = [mean for mean in header["positions"] if mean is not None]
    are_counts = type(examples) is int and examples > 0
    are_means = all(_is_number(n) and n > 0 for n in (*means, header["about"]["predictions"]))
    return are_counts and are_means and (likelihood is None or _is_number(likelihood))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)

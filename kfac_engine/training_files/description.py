"""The description of training files: their metadata, which any program can read as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kfac_engine.errors import InputError

# Key of the metadata of the three files.
PROPERTY = "kfac_engine.training"
# States: the number of examples of all steps, and of the different ones, which the caller sets.
SEEN, DIFFERENT = "examples seen", "different examples"


@dataclass(frozen=True, slots=True)
class Description:
    """What the inputs and outputs of training files are.

    Attributes:
        identity: Equal in the files of one export.
        model: Name of the model.
        optimizer: Name of the optimizer.
        options: Its options that are not the defaults.
        losses: Name of the class of each loss.
        inputs: Axes of the examples, by input of the model; −1 without.
        targets: Axes of the examples, by input with targets.
        outputs: The input with the targets of each output of the model, by output.
        weights: By output of the model, the input with the weights of its targets, if there is one,
            and the number of axes of this input in a step.
        state: Shapes of the states, by name.
        parameters: The states that are weights or running statistics of the model.
        metrics: Outputs that are no state.
        noise: Shapes of the inputs with random numbers, by name; −1 for the size of the part of the
            batch whose statistics a step measures.
        factors: What each factor of the curvature measures, by number of the factor.
        ties: Weight, copy in the file, and whether the copy is its transpose.
        batch_size: The only number of examples; None for any.
        steps_per_call: Number of steps that a call should take; with more than one, the inputs and
            the metrics have a first axis of steps.
    """

    identity: str
    model: str
    optimizer: str
    options: Mapping[str, Any]
    losses: tuple[str, ...]
    inputs: Mapping[str, int]
    targets: Mapping[str, int]
    outputs: Mapping[str, str]
    state: Mapping[str, tuple[int, ...]]
    parameters: tuple[str, ...]
    metrics: tuple[str, ...]
    weights: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    factors: Mapping[str, str] = field(default_factory=dict)
    ties: tuple[tuple[str, str, bool], ...] = ()
    batch_size: int | None = None
    steps_per_call: int = 1

    def properties(self) -> dict[str, str]:
        """Return the metadata of a file."""
        return {PROPERTY: json.dumps(asdict(self))}

    @classmethod
    def read(cls, properties: Mapping[str, str], what: str) -> "Description":
        """Return the description in the metadata of a file, which messages call ``what``.

        A file that is no training file of this version raises InputError.
        """
        if PROPERTY not in properties:
            raise InputError(
                f"{what} is no training file; write one with kfac_engine.export_training."
            )
        try:
            entries = json.loads(properties[PROPERTY])
            entries["state"] = {name: tuple(shape) for name, shape in entries["state"].items()}
            entries["ties"] = [tuple(tie) for tie in entries["ties"]]
            tuples = ("losses", "parameters", "metrics", "ties")
            return cls(**{**entries, **{name: tuple(entries[name]) for name in tuples}})
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise InputError(
                f"another version of this library wrote {what}; export the model again."
            ) from failure

"""One model of the corpus: how to build it, what goes in, what is known of its export."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...]]
EXPORTERS = ("legacy", "dynamo")


@dataclass(frozen=True)
class Case:
    """A module with inputs for any batch size."""

    name: str  # unique in the corpus
    module: Callable[[], nn.Module]  # builds it; called with a fixed seed
    inputs: Inputs  # batch size to inputs, drawn from torch's generator
    loss: str = "normal"  # ``"normal"`` or ``"categorical"``, on the first output and its last axis
    training: bool = False  # exported, and differentiated, in training mode
    # Exported as the exporter likes, which may fold constants; otherwise unoptimised.
    folded: bool = True
    static: bool = False  # the batch size is part of the exported model
    exporters: tuple[str, ...] = EXPORTERS  # those that can write it
    # Exporter to words of the error, where the engine refuses the model.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Parameters that the exporter turns into something else, as patterns.
    constant: tuple[str, ...] = ()


def floats(*sides: int) -> Inputs:
    """Standard normal inputs, each example of these sides."""
    return lambda batch: (torch.randn(batch, *sides),)


def tokens(vocabulary: int, *sides: int, first: int = 0) -> Inputs:
    """Uniform identifiers from ``first`` on."""
    return lambda batch: (torch.randint(first, vocabulary, (batch, *sides)),)


def together(*parts: Inputs) -> Inputs:
    """Several inputs."""
    return lambda batch: tuple(entry for part in parts for entry in part(batch))


class Function(nn.Module):
    """A module from a function of its parts and inputs.

    Args:
        forward: Called with the module and the inputs.
        **parts: Modules, or parameters given as tensors.
    """

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def chain(*modules: nn.Module) -> nn.Module:
    """Modules one after the other."""
    return nn.Sequential(*modules)


def function(
    name: str,
    forward: Callable[..., Tensor],
    inputs: Inputs,
    parts: str = "",
    **named,  # type: ignore[no-untyped-def]
) -> Case:
    """A case of a ``Function``.

    Args:
        name: Of the case.
        forward: Of the function.
        inputs: Of the case.
        parts: ``"a(5,6) w[4,6]"`` is a dense layer from 5 to 6 and a random parameter.
        **named: Functions that make other parts, and fields of the case.
    """
    known = {entry.name for entry in fields(Case)}
    options = {key: value for key, value in named.items() if key in known}

    def build() -> nn.Module:
        made = {key: make() for key, make in named.items() if key not in known}
        for key, bracket, text in re.findall(r"(\w+)([(\[])([\d,]+)[)\]]", parts):
            sides = [int(side) for side in text.split(",")]
            made[key] = nn.Linear(*sides) if bracket == "(" else torch.randn(*sides)
        return Function(forward, **made)

    return Case(name, build, inputs, **options)


def names(cases: Sequence[Case]) -> list[str]:
    """Test identifiers."""
    return [case.name for case in cases]

"""Models of the transformers package, small and with random weights."""

import ast

import torch
import transformers
from torch import Tensor, nn

from tests.exporters.case import Case, Inputs, tokens

BASES = {
    "SMALL": "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=24 "
    "vocab_size=31 max_position_embeddings=20",
    "DECODER": "SMALL num_key_value_heads=1 use_cache=False pad_token_id=0",
    "VISION": "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=24 "
    "image_size=16 patch_size=8 num_labels=4",
}
# The other one cannot write ``torch.diff``, with which the package makes masks.
DYNAMO = ("dynamo",)
# Identifiers below 3 are padding or stand for the end: torch hides such rows' gradients.
TEXT = tokens(31, 6, first=3)


class _Named(nn.Module):
    """A model called with keywords, giving one tensor.

    Args:
        model: Of the package.
        names: Keywords of the inputs.
        result: Attribute of the model's output.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], result: str) -> None:
        super().__init__()
        self.model, self._names, self._result = model, names, result

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self._names, inputs, strict=True))
        return getattr(self.model(**named), self._result)


def configuration(text: str) -> dict[str, object]:
    """The entries ``key=value`` of a text, after those of the bases that it names."""
    found: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            found |= configuration(BASES[key])
            continue
        literal = value[0] in "[-0123456789" or value in ("True", "False")
        found[key] = ast.literal_eval(value) if literal else value
    return found


def small(
    name: str,
    model: str,
    config: str | dict[str, object],
    inputs: Inputs = TEXT,
    names: tuple[str, ...] = ("input_ids",),
    result: str = "logits",
    **options,  # type: ignore[no-untyped-def]
) -> Case:
    """A case from the name of a class and its configuration."""
    kind = getattr(transformers, model)
    entries = configuration(config) if isinstance(config, str) else config

    def build() -> nn.Module:
        built = kind(kind.config_class(**entries))
        built.set_attn_implementation("eager")
        if hasattr(built, "set_experts_implementation"):
            built.set_experts_implementation("batched_mm")  # the default has no ONNX operator
        return _Named(built, names, result)

    return Case(name, build, inputs, options.pop("loss", "categorical"), **options)


def ended(batch: int) -> tuple[Tensor, ...]:
    """Identifiers with that of the end at the end, where CLIP looks for it."""
    return (torch.cat([torch.randint(3, 31, (batch, 5)), torch.full((batch, 1), 2)], 1),)

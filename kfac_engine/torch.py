"""K-FAC for the gradients of a PyTorch module.

Only this module imports torch. The exporter of torch needs onnxscript as well.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kfac_engine.engine.engine import Engine
from kfac_engine.engine.parameter_matches import match_parameters
from kfac_engine.engine.result import KL_CLIP, Result
from kfac_engine.errors import BackendError, InputError
from kfac_engine.graph.load import ModelSource, load_model
from kfac_engine.losses.objective import Targets

try:
    import torch
except ImportError as failure:
    raise BackendError(
        "kfac_engine.torch needs PyTorch: run 'pip install torch onnxscript'."
    ) from failure

_NORMALIZATIONS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


class KFAC:
    """A preconditioner that replaces the gradients of a module by natural gradients.

    The order of a training step is ``loss.backward()``, ``kfac.step(inputs)``,
    ``optimizer.step()``. The module computes the loss and its gradients; the engine computes the
    curvature from an ONNX file of the module.

    Args:
        module: The module.
        sample: Inputs of the module for the export: a tensor, or a sequence of tensors. Their first
            axis holds the examples; later batches may have other numbers of examples.
        loss: The loss of the engine, such as ``"categorical"`` for the cross entropy of logits.
            It determines the curvature, and must be the loss of the module.
        kl_clip: Bound of ``⟨Δ, g⟩`` for the natural gradient ``Δ``, which is multiplied by at most
            one to satisfy it; see ``Result.clipped_rate``. The learning rate of the optimizer is
            then at most 1. None for natural gradients without a bound.
        model: An ONNX file of the module; None to export the module.
        options: Further options of ``Engine.from_onnx``. ``train_form`` is set by default if a
            batch normalization of the module is in training mode.

    Attributes:
        engine: The engine.
        matches: Parameters of the engine and of the module.

    Raises:
        InputError: A parameter of the module is not a parameter of the file because an exporter
            merged, folded or computed it; the message names it.
        KfacError: The engine cannot read the file; see ``Engine.from_onnx``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sample: torch.Tensor | Sequence[torch.Tensor],
        *,
        loss: Any,
        kl_clip: float | None = KL_CLIP,
        model: ModelSource | None = None,
        **options: Any,
    ) -> None:
        self._module, self._kl_clip = module, kl_clip
        norms = [part for part in module.modules() if isinstance(part, _NORMALIZATIONS)]
        form = {"train_form": True} if any(norm.training for norm in norms) else {}
        source = _exported(module, _tensors(sample)) if model is None else model
        graph = load_model(source).graph
        self._inputs = [entry.name for entry in graph.inputs]
        trained = [n for n in _trained(module) if n in graph.constants]
        chosen = {"trainable": trained} if model is None and trained else {}
        self.engine = Engine.from_onnx(source, loss=loss, **{**chosen, **form, **options})
        self.matches = match_parameters(self.engine, module.state_dict())
        absent = {*_trained(module)}.intersection(self.matches.unmatched)
        if absent:
            names = ", ".join(f"'{name}'" for name in sorted(absent))
            raise InputError(
                f"the file has no parameter for {names}: the output does not depend on them, or "
                f"the exporter folded them. Set requires_grad=False for them, or omit model=."
            )

    def step(self, inputs: torch.Tensor | Sequence[torch.Tensor], targets: Targets = None) -> float:
        """Update the curvature from a batch, and precondition the gradients of the module in place.

        Parameters whose ``grad`` is None are left out.

        Args:
            inputs: The inputs of the batch whose gradients the module has.
            targets: The targets of the batch, for the estimation mode ``"empirical"``.

        Returns:
            The factor, at most 1, that ``kl_clip`` multiplied the natural gradients by.

        Raises:
            InputError: No parameter has a gradient, or the inputs are wrong. No gradient changed.
            NonFiniteError: A gradient or a parameter holds NaN or infinity. No gradient changed.
        """
        tensors = dict(self._module.named_parameters())
        known = {n for layout in self.matches.layouts.values() for n in layout.names}
        parameters = {name: tensor for name, tensor in tensors.items() if name in known}
        present = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        if not present:
            raise InputError("no parameter has a gradient; call loss.backward() before step().")
        self.engine.set_parameters(self.matches.to_engine(parameters))
        gradients = self.matches.to_engine(present)
        self.engine.observe(self._named(_tensors(inputs)), targets)
        natural = self.engine.precondition(gradients)
        scale = 1.0
        if self._kl_clip is not None:
            trained = {name: natural[name] for name in gradients}  # no copies of tied weights
            scale = Result(0.0, gradients, trained).clipped_rate(1.0, self._kl_clip)
        converted = self.matches.to_module(natural)
        with torch.no_grad():
            for name, gradient in present.items():
                gradient.copy_(torch.from_dlpack(converted[name])).mul_(scale)
        return scale

    def _named(self, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if len(inputs) != len(self._inputs):
            raise InputError(
                f"the module has {len(self._inputs)} inputs in the file, got {len(inputs)}."
            )
        return dict(zip(self._inputs, inputs, strict=True))


def _tensors(inputs: torch.Tensor | Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)


def _trained(module: torch.nn.Module) -> list[str]:
    """Return all names of the parameters that require gradients."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter.requires_grad]


def _exported(module: torch.nn.Module, sample: tuple[torch.Tensor, ...]) -> bytes:
    """Return the file of a module in evaluation form, with a free number of examples."""
    axes = tuple({0: torch.export.Dim.DYNAMIC} for _ in sample)
    with _evaluated(module):
        program = torch.onnx.export(
            module, sample, dynamo=True, optimize=False, dynamic_shapes=axes, verbose=False
        )
    buffer = io.BytesIO()
    program.save(buffer)
    return buffer.getvalue()


@contextmanager
def _evaluated(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and return each of its parts to its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training

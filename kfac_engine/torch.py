"""Preconditions the gradients of a PyTorch module with K-FAC.

Only this module imports torch. The exporter of torch needs onnxscript as well.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

from kfac_engine.arguments import check_positive
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.parameter_matches import match_parameters
from kfac_engine.engine.result import KL_CLIP, Result
from kfac_engine.errors import (
    BackendError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from kfac_engine.graph.load import ModelSource, load_model
from kfac_engine.losses import Categorical, LossKind, MultiBernoulli, Normal
from kfac_engine.losses.observed import Targets
from kfac_engine.printable import quoted

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
# Their rates do not change the curvature, for which they keep all elements.
_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
# The largest ⟨Δ, g⟩ that a bound accepts: a decrease of the loss of each example by half of it. A
# loss that a gradient scaler multiplies by 65,536 exceeds it from 0.02 on. Inverses that are some
# steps old reach 5e6 on a step of the tutorial, which the bound shortens as it should.
_LARGEST_PRODUCT = 1e8


class KFAC:
    """A preconditioner that replaces the gradients of a module by natural gradients.

    The order of a training step is ``loss.backward()``, ``kfac.step(inputs)``,
    ``optimizer.step()``. The module computes the loss and its gradients; the engine computes the
    curvature from an ONNX file of the module.

    Args:
        module: The module, or what ``torch.compile``, ``DataParallel`` or
            ``DistributedDataParallel`` returned for it. ``step`` refuses a module whose parts,
            trained parameters or normalizations in evaluation mode have changed since.
        sample: Inputs of the module for the export: a tensor, or a sequence of tensors. Their first
            axis holds the examples; later batches may have other numbers of examples.
        loss: The loss of the engine, such as ``"categorical"`` for the cross entropy of logits, or
            the loss of the module itself: ``CrossEntropyLoss(…)``, ``NLLLoss(…)``,
            ``BCEWithLogitsLoss(…)`` or ``MSELoss(…)`` of ``torch.nn``, with its options, its mean
            or sum, and the classes on axis 1. It determines the curvature, and must be the loss of
            the module. Pass targets to ``step`` if some of them are ignored, or have weights.
        kl_clip: Bound of ``⟨Δ, g⟩`` for the natural gradient ``Δ``, which is multiplied by at most
            one to satisfy it; see ``Result.clipped_rate``. The learning rate of the optimizer is
            then at most 1. None for natural gradients without a bound.
        model: An ONNX file of the module; None to export the module.
        dynamic_shapes: The free axes of the inputs, as ``torch.export`` takes them: a dictionary
            for each input, such as ``({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)`` for texts of any length.
            None for the first axis of each input.
        options: Further options of ``Engine.from_onnx``. ``train_form`` is set by default if a
            batch normalization of the module is in training mode.

    Attributes:
        engine: The engine.
        matches: Parameters of the engine and of the module.

    Raises:
        InputError: A parameter of the module is not a parameter of the file because an exporter
            merged, folded or computed it; the message names it. Or torch cannot export the module.
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
        dynamic_shapes: Any = None,
        **options: Any,
    ) -> None:
        if kl_clip is not None:
            check_positive("kl_clip", kl_clip)
        if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
            raise InputError(
                f"loss must be an object: give {loss.__name__}(), not the class itself."
            )
        module = _unwrapped(module, options)
        self._module, self._kl_clip = module, kl_clip
        norms = [part for part in module.modules() if isinstance(part, _NORMALIZATIONS)]
        chosen: dict[str, Any] = {"gradient_dtype": "float32"}
        if any(norm.training for norm in norms):
            chosen["train_form"] = True
        examples = _tensors(sample)
        if model is not None and dynamic_shapes is not None:
            raise InputError("model= needs no export; leave model= or dynamic_shapes out.")
        source = _exported(module, examples, dynamic_shapes) if model is None else model
        self._exports = model is None
        loaded = load_model(source)
        graph = loaded.graph
        if isinstance(loss, torch.nn.Module):
            shape = loaded.output_shapes.get(options.get("output", graph.outputs[0]), ())
            loss, of_loss = loss_options(loss, shape)
            chosen |= of_loss
        self._inputs = [entry.name for entry in graph.inputs]
        self._shapes = {entry.name: entry.shape or () for entry in graph.inputs}
        trained = [n for n in _trained(module) if n in graph.constants]
        if model is None and trained:
            chosen["trainable"] = trained
        self.engine = Engine.from_onnx(source, loss=loss, **{**chosen, **options})
        self.matches = match_parameters(self.engine, module.state_dict())
        absent = {*_trained(module)}.intersection(self.matches.unmatched)
        if absent:
            raise InputError(
                f"the file has no parameter for {quoted(sorted(absent))}: the output does not "
                f"depend on them, or the exporter folded them. Set requires_grad=False for them, "
                f"or omit model=."
            )
        self._parts = _parts(module)

    def step(
        self,
        inputs: torch.Tensor | Sequence[torch.Tensor] | Sequence[tuple[Any, Targets]],
        targets: Targets = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> float:
        """Update the curvature from a batch, and precondition the gradients of the module in place.

        Parameters whose ``grad`` is None are left out.

        Args:
            inputs: The inputs of the batch whose gradients the module has. For gradients that
                several calls of ``backward`` have added up, a list of the parts, each a pair of
                inputs and targets (or None).
            targets: The targets of the batch, or ``Weighted`` targets. They are needed if targets
                are ignored or have weights, and for the estimation mode ``"empirical"``.
            scaler: The scaler that multiplied the loss. ``kl_clip`` then bounds the gradients
                without its factor. They keep the factor, which ``scaler.step(optimizer)`` removes;
                omit ``scaler`` after ``scaler.unscale_(optimizer)``.

        Returns:
            The factor, at most 1, by which ``kl_clip`` multiplied the natural gradients; 0 if
            scaled gradients overflowed. ``scaler.step`` then leaves the parameters as they are.

        Raises:
            InputError: No parameter has a gradient, the inputs are wrong, the module has changed,
                or a factor of the loss makes ``kl_clip`` meaningless. No gradient changed.
            NonFiniteError: A gradient or a parameter holds NaN or infinity. No gradient changed.
        """
        parts, factor = self._batches(inputs, targets), _factor(scaler)
        self._check_shapes(parts)
        parameters = self._parameters()
        present = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if not present:
            raise InputError("no parameter has a gradient; call loss.backward() before step().")
        infinite = _infinite(present)
        if infinite and scaler is not None:
            return 0.0
        if infinite:
            raise NonFiniteError(
                f"the gradient of {quoted(sorted(infinite))} holds NaN or infinity."
            )
        self.engine.set_parameters(self.matches.to_engine(parameters))
        plain = present if factor == 1 else {n: g / factor for n, g in present.items()}
        gradients = self.matches.to_engine(plain)
        self.engine.observe(parts)
        natural = self.engine.precondition(gradients)
        trained = {name: natural[name] for name in gradients}  # no copies of tied weights
        scale = self._scale(Result(0.0, gradients, trained))
        arrays = self.matches.to_module(natural)
        _replace(parameters, {n: torch.from_dlpack(arrays[n]) * (scale * factor) for n in present})
        return scale

    def _check_shapes(self, parts: Sequence[tuple[Mapping[str, Any], Targets]]) -> None:
        """Refuse inputs that differ from the sample in more than the number of examples."""
        for named, _ in parts if self._exports else ():
            for name, tensor in named.items():
                declared, shape = self._shapes[name], tuple(tensor.shape)
                fixed = len(declared) == len(shape) and [
                    axis
                    for axis, size in enumerate(declared)
                    if isinstance(size, int) and shape[axis] != size
                ]
                if fixed:
                    axis = fixed[0]
                    raise ShapeError(
                        f"input '{name}' has size {shape[axis]} on axis {axis}, and the sample had "
                        f"{declared[axis]}; to change this size from batch to batch, pass "
                        f"dynamic_shapes, with {{{axis}: torch.export.Dim.DYNAMIC}} for this input."
                    )

    def _scale(self, result: Result) -> float:
        """Return the factor by which ``kl_clip`` shrinks a step; refuse scaled gradients."""
        if self._kl_clip is None:
            return 1.0
        scale = result.clipped_rate(1.0, self._kl_clip)
        product = self._kl_clip / scale**2
        if scale < 1 and product > _LARGEST_PRODUCT:
            raise InputError(
                f"kl_clip={self._kl_clip:g} has no meaning for these gradients: a step along the "
                f"natural gradient would lower the loss by {product / 2:.3g} for each example. "
                f"If a gradient scaler multiplied the loss, call step(inputs, scaler=scaler). If "
                f"the loss is a sum over the batch, take the mean. Divide targets of large "
                f"numbers by a constant, or pass kl_clip=None, which sets no bound."
            )
        return scale

    def _batches(self, inputs: Any, targets: Targets) -> list[tuple[Mapping[str, Any], Targets]]:
        """Return the parts of a batch, with inputs by name."""
        parts = isinstance(inputs, list) and inputs and all(type(p) is tuple for p in inputs)
        if parts and targets is not None:
            raise InputError("the parts of a batch have their own targets; leave targets out.")
        pairs = inputs if parts else [(inputs, targets)]
        if any(len(pair) != 2 for pair in pairs):
            raise InputError("each part of a batch must be a pair (inputs, targets).")
        return [(self._named(_tensors(tensors)), labels) for tensors, labels in pairs]

    def _named(self, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if len(inputs) != len(self._inputs):
            raise InputError(
                f"the file has {len(self._inputs)} inputs of the module, got {len(inputs)}."
            )
        return dict(zip(self._inputs, inputs, strict=True))

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the engine by name; refuse a module that has changed."""
        remedy = "make a new KFAC after a change of the module."
        now = _parts(self._module)
        for name in dict.fromkeys((*self._parts, *now)):
            old, new = (parts.get(name, "absent") for parts in (self._parts, now))
            if old != new:
                raise InputError(
                    f"part '{name}' of the module was {old} when KFAC was made, and is "
                    f"{new} now; {remedy}"
                )
        parameters = dict(self._module.named_parameters())
        layouts = self.matches.layouts.values()
        present = {layout.names: parameters.keys() & {*layout.names} for layout in layouts}
        apart = [name for names, one in present.items() if len(one) != 1 for name in names]
        if apart:
            raise InputError(
                f"{quoted(sorted(apart))} are absent now, or other parameters share memory; "
                f"{remedy}"
            )
        known = {name: parameters[name] for (name,) in present.values()}
        changing = [n for n, p in parameters.items() if p.requires_grad or p.grad is not None]
        strangers = [name for name in changing if name not in known]
        if strangers:
            raise InputError(
                f"KFAC has no natural gradient for {quoted(sorted(strangers))}, which the module "
                f"did not have or did not train; {remedy}"
            )
        return known


def loss_options(
    loss: torch.nn.Module, shape: Sequence[int | str | None]
) -> tuple[LossKind, dict[str, Any]]:
    """Return a loss of torch as the loss of an engine, with options of the engine.

    Args:
        loss: The loss.
        shape: Declared shape of the output that it reads.

    Returns:
        The loss, and the options ``class_axis`` and ``reduction``.

    Raises:
        UnsupportedError: An engine does not have the loss or one of its options.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "none":
        raise UnsupportedError(
            "a loss with reduction='none' is an array; give the loss with the reduction of the "
            "training loss, 'mean' or 'sum'."
        )
    options: dict[str, Any] = {"reduction": reduction}
    if isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
        options["class_axis"] = 1
        smoothing = getattr(loss, "label_smoothing", 0.0)
        return Categorical(
            ignore_index=loss.ignore_index,
            class_weights=_numbers(loss.weight),
            label_smoothing=smoothing,
        ), options
    # The mean of torch divides by the number of features as well.
    width, weight = shape[-1] if len(shape) > 1 else 1, 1.0
    if isinstance(loss, torch.nn.BCEWithLogitsLoss | torch.nn.MSELoss):
        if reduction == "mean":
            if not isinstance(width, int):
                raise UnsupportedError(
                    f"the mean of {type(loss).__name__} divides by the number of features, which "
                    f"the file does not declare; pass loss=kfac_engine.Normal(weight=1 / features) "
                    f"or kfac_engine.MultiBernoulli(weight=1 / features)."
                )
            weight = 1 / width
        if isinstance(loss, torch.nn.MSELoss):
            return Normal(weight=weight), options
        if loss.weight is not None:
            raise UnsupportedError(
                "BCEWithLogitsLoss(weight=…) divides by the number of targets, not by the sum of "
                "their weights; pass loss=kfac_engine.MultiBernoulli(weight=1 / features) with "
                "reduction='batch_mean', and Weighted targets to step."
            )
        positive_weights = _numbers(loss.pos_weight)
        kind = MultiBernoulli(ignore_index=None, positive_weights=positive_weights, weight=weight)
        return kind, options
    raise UnsupportedError(
        f"{type(loss).__name__} is not a loss of an engine; pass a name such as 'categorical', a "
        f"loss object, or one of CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss and MSELoss."
    )


def _numbers(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().cpu().reshape(-1).numpy()


def _unwrapped(module: torch.nn.Module, options: Mapping[str, Any]) -> torch.nn.Module:
    """Return the module that ``torch.compile`` or a class for parallel batches contains."""
    while isinstance(module, _WRAPPERS) or hasattr(module, "_orig_mod"):
        if (
            isinstance(module, torch.nn.parallel.DistributedDataParallel)
            and module.process_group.size() > 1
            and options.get("communicator") is None
        ):
            raise InputError(
                f"{module.process_group.size()} processes train the module, and each would have "
                f"the curvature of its own part of a batch; pass communicator=."
            )
        module = module.module if isinstance(module, _WRAPPERS) else module._orig_mod
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"a module of torch is needed, got {type(module).__name__}.")
    return module


def _tensors(inputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if not isinstance(inputs, list | tuple):
        raise InputError(
            f"the inputs must be a tensor or a sequence of tensors, got {type(inputs).__name__}."
        )
    for place, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"input {place} must be a tensor, got {type(tensor).__name__}.")
    return tuple(inputs)


def _factor(scaler: torch.amp.GradScaler | None) -> float:
    """Return the factor of the gradients that a scaler has not removed yet."""
    if scaler is None:
        return 1.0
    if not hasattr(scaler, "get_scale"):
        raise InputError(f"scaler must be a GradScaler, got {type(scaler).__name__}.")
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    if any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in states):
        raise InputError("scaler.unscale_ has divided the gradients; call step without scaler=.")
    return float(scaler.get_scale())


def _trained(module: torch.nn.Module) -> list[str]:
    """Return all names of the parameters that require gradients."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter.requires_grad]


def _parts(module: torch.nn.Module) -> dict[str, str]:
    """Return the class and settings of each part of a module, by name of the part."""
    return {name: _description(part) for name, part in module.named_modules()}


def _description(part: torch.nn.Module) -> str:
    """Return class and settings; for a normalization its mode and statistics in that mode."""
    kind = type(part).__name__
    if isinstance(part, _NORMALIZATIONS):
        mean, variance = part.running_mean, part.running_var
        if part.training or mean is None or variance is None:
            return f"{kind} in training mode"
        statistics = torch.stack([mean, variance]).cpu().double().numpy().tobytes()
        return f"{kind} in evaluation mode with statistics {crc32(statistics):08x}"
    # Other classes may show numbers that change in training.
    shown = type(part).__module__.startswith("torch.") and not isinstance(part, _DROPOUTS)
    return f"{kind}({part.extra_repr()})" if shown else kind


def _infinite(gradients: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of gradients with NaN or infinity; refuse gradients of other layouts."""
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise InputError(f"the gradient of '{name}' is sparse; set sparse=False in its layer.")
    return [name for name, gradient in gradients.items() if not gradient.isfinite().all()]


def _replace(
    parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor]
) -> None:
    """Write all gradients, or none if one exceeds the range of its element type."""
    written = {n: g.to(parameters[n].grad) for n, g in gradients.items()}
    infinite = _infinite(written)
    if infinite:
        raise NonFiniteError(
            f"the natural gradient of {quoted(sorted(infinite))} exceeds the range of its element "
            f"type; raise the damping, or use float32."
        )
    for name, gradient in written.items():
        old = parameters[name].grad
        # Elements that share memory cannot be written.
        if any(
            stride == 0 and size > 1 for stride, size in zip(old.stride(), old.shape, strict=True)
        ):
            parameters[name].grad = gradient
        else:
            old.detach().copy_(gradient)


def _exported(
    module: torch.nn.Module, sample: tuple[torch.Tensor, ...], dynamic_shapes: Any
) -> bytes:
    """Return the file of a module in evaluation form; ``dynamic_shapes`` is as for ``KFAC``."""
    if dynamic_shapes is None:
        dynamic_shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in sample)
    try:
        with _evaluated(module):
            program = torch.onnx.export(
                module,
                sample,
                dynamo=True,
                optimize=False,
                dynamic_shapes=dynamic_shapes,
                verbose=False,
            )
    except ImportError as failure:
        raise BackendError(
            f"the export needs a package: {failure}; run 'pip install onnxscript'."
        ) from failure
    except Exception as failure:
        cause: BaseException = failure
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [""]
        raise InputError(
            f"torch cannot export the module: {type(cause).__name__}: {lines[0].rstrip(' .:')}. "
            f"Give a batch of examples as sample, change the module for torch.onnx.export, or pass "
            f"a file of it as model=."
        ) from failure
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

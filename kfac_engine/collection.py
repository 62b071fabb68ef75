"""The registry of layers and losses: which parameters form which block.

``LayerCollection`` keeps the specification's names. Tensors are named; their values arrive later, as
a mapping from names to arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

from kfac_engine._types import Params, Thunk, Values
from kfac_engine.approximations import APPROXIMATIONS, DEFAULTS, GENERIC, accepted
from kfac_engine.autodiff.model import OnnxModel
from kfac_engine.backend.select import select
from kfac_engine.blocks.base import FisherBlock, TowerNames
from kfac_engine.config import CollectionConfig
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.factors.base import FisherFactor
from kfac_engine.layers.forms import LayerForm, convolution_form, dense_form
from kfac_engine.layers.views import Padding
from kfac_engine.losses import (
    CategoricalLogitsNegativeLogProbLoss,
    LossFunction,
    MultiBernoulliNegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss,
)
from kfac_engine.losses.base import RegisteredLoss
from kfac_engine.losses.table import LossTable

# "VARIABLE_SCOPE": add a tower where the key is registered, else register it.
Reuse: TypeAlias = bool | Literal["VARIABLE_SCOPE"]
TargetMode: TypeAlias = Literal["data", "sample"]
CoefficientMode: TypeAlias = Literal["regular", "sqrt", "off"]

Factor = TypeVar("Factor", bound=FisherFactor)

_COEFFICIENT: Mapping[str, Callable[[float], float]] = {
    "regular": lambda k: k,
    "sqrt": lambda k: k**0.5,
    "off": lambda k: 1.0,
}


class LayerCollection:
    """Layers, losses and the factors they share; one for each estimator.

    Args:
        graph: The model, or shapes of named tensors (``{"w": (4, 3)}``) for use without one.
        name: For messages.
        config: How statistics are averaged, damped and inverted.
        backend: ``"auto"``, ``"numpy"`` or ``"cupy"``.

    Attributes:
        fisher_blocks: Parameters (a name or a tuple) to block, in the order of registration.
        fisher_factors: (class, arguments) to factor, in the order of creation.
    """

    def __init__(
        self,
        graph: OnnxModel | Mapping[str, tuple[int, ...]] | None = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str = "auto",
    ) -> None:
        self.graph = graph
        self.name = name
        self.config = config or CollectionConfig()
        self.backend = select(backend)
        self.fisher_blocks: dict[Params, FisherBlock] = {}
        self.fisher_factors: dict[tuple[object, ...], FisherFactor] = {}
        self._rows: dict[Params, tuple[object, ...]] = {}
        self._uses: dict[str, float] = {}
        self._defaults = dict(DEFAULTS)
        self._losses = LossTable()

    # -- what is registered -----------------------------------------------------------------------

    @property
    def registered_variables(self) -> tuple[str, ...]:
        """All parameters that belong to a block."""
        return tuple(name for key in self.fisher_blocks for name in _names(key))

    @property
    def losses(self) -> tuple[LossFunction, ...]:
        """Every loss of every tower."""
        return tuple(tower for loss in self._losses for tower in loss.towers)

    @property
    def registered_losses(self) -> tuple[RegisteredLoss, ...]:
        """Losses with their names and coefficients; at least one."""
        return self._losses.require()

    @property
    def towers_by_loss(self) -> tuple[tuple[LossFunction, ...], ...]:
        """For each loss, its towers."""
        return tuple(loss.towers for loss in self._losses)

    @property
    def batch_value(self) -> str | None:
        """Name of a value whose first axis is the batch: the first loss's input; None without loss."""
        return self.losses[0].inputs[0] if len(self._losses) else None

    def get_blocks(self) -> tuple[FisherBlock, ...]:
        """All blocks, in the order of registration."""
        return tuple(self.fisher_blocks.values())

    def get_factors(self) -> tuple[FisherFactor, ...]:
        """All factors, in the order of creation: a block's input factor before its output factor."""
        return tuple(self.fisher_factors.values())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The declared shape of a tensor; None where it is not known before a batch."""
        if isinstance(self.graph, OnnxModel):
            return self.graph.static_shape(name)
        return None if self.graph is None or name not in self.graph else tuple(self.graph[name])

    def require_shape(self, name: str) -> tuple[int, ...]:
        """The declared shape of a tensor.

        Raises:
            InputError: It is not known.
        """
        shape = self.shape_of(name)
        if shape is None:
            raise InputError(
                f"the shape of '{name}' is needed to register its layer: name it in "
                f"LayerCollection(graph={{'{name}': (…), …}})."
            )
        return shape

    def make_or_get_factor(self, cls: type[Factor], args: tuple[object, ...]) -> Factor:
        """The factor ``cls(*args)``: layers that measure the same thing share it.

        Args:
            cls: Class of the factor.
            args: Its positional arguments, hashable.

        Returns:
            The factor, made at the first call.
        """
        key = (cls, *args)
        if key not in self.fisher_factors:
            self.fisher_factors[key] = cls(*args, backend=self.backend, config=self.config)  # type: ignore[arg-type] # args are cls's own
        factor = self.fisher_factors[key]
        assert isinstance(factor, cls)
        return factor

    # -- defaults -----------------------------------------------------------------------------------

    def default_approximation(self, kind: str) -> str:
        """The approximation used for a kind of layer unless one is named."""
        return self._defaults[kind]

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Choose the approximation of a kind of layer.

        Raises:
            UnknownNameError: There is no such kind.
            InputError: The kind does not accept the approximation.
        """
        if kind not in self._defaults:
            raise UnknownNameError(
                f"unknown kind of layer '{kind}'; choose one of: {', '.join(self._defaults)}."
            )
        if value not in accepted(kind):
            raise InputError(
                f"'{value}' is not a valid approximation for {kind}; choose one of: "
                f"{', '.join(accepted(kind))}."
            )
        self._defaults[kind] = value

    # -- layers -------------------------------------------------------------------------------------

    def register_fully_connected(  # noqa: PLR0913 (the specification's signature and layouts)
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str = "IO",
        feature_axis: int = -1,
    ) -> None:
        """Register a dense layer.

        Args:
            params: The weight, or ``(weight, bias)``.
            inputs: Name of the input, ``(n, …positions, d_in)``.
            outputs: Name of the output, ``(n, …positions, d_out)``.
            approx: A row of the table of approximations; the default when left out.
            reuse: Whether this is a further tower.
            weight_format: ``"IO"`` or ``"OI"``.
            feature_axis: Axis of the features in inputs and outputs; -2 for ``weight · inputs``.
        """
        key = _key(params)
        form = dense_form(weight_format, not isinstance(key, str), feature_axis=feature_axis)
        self._register("fully_connected", key, form, (inputs, outputs), approx, reuse)

    def register_conv2d(  # noqa: PLR0913 (the specification's signature)
        self,
        params: Params | Sequence[str],
        strides: Sequence[int],
        padding: Padding,
        inputs: str,
        outputs: str,
        data_format: str | None = None,
        dilations: Sequence[int] | None = None,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        weight_format: str | None = None,
    ) -> None:
        """Register a convolution over two spatial axes.

        Args:
            params: The filter, or ``(filter, bias)``; the filter's shape must be declared.
            strides: One an axis of the data, or one a spatial axis.
            padding: ``"SAME"``, ``"VALID"`` or ``((top, bottom), (left, right))``.
            inputs: Name of the images.
            outputs: Name of the output.
            data_format: ``"NHWC"`` (default) or ``"NCHW"``.
            dilations: Like ``strides``; ones when left out.
            approx: A row of the table of approximations; the default when left out.
            reuse: Whether this is a further tower.
            weight_format: ``"HWIO"`` (default) or ``"OIHW"``.
        """
        key = _key(params)
        form = convolution_form(
            self.require_shape(_names(key)[0]),
            has_bias=not isinstance(key, str),
            padding=padding,
            strides=strides,
            dilations=dilations,
            data_format=data_format,
            weight_format=weight_format,
        )
        self._register("conv2d", key, form, (inputs, outputs), approx, reuse)

    def register_generic(
        self,
        params: Params | Sequence[str],
        batch_size: int | str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> None:
        """Register parameters without a layer.

        Args:
            params: One name, or several for a joint block.
            batch_size: Examples, or the name of a value whose first axis is the batch.
            approx: ``"diagonal"`` (one parameter) or ``"full"``.
            reuse: Whether this is a further tower.
        """
        key = _key(params)
        approx = self._resolve("generic", approx)
        if self._is_new(key, reuse, ("generic", approx)):
            self.register_block(key, GENERIC[approx](self, key), reuse)
            self._rows[key] = ("generic", approx)
        block = self.fisher_blocks[key]
        assert isinstance(block, GENERIC["full"])
        block.register_additional_tower(batch_size)
        self._count_uses(key, float("inf"))

    def register_block(
        self,
        layer_key: Params | Sequence[str],
        fisher_block: FisherBlock,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> FisherBlock:
        """Register a block made by the caller.

        Args:
            layer_key: The parameters.
            fisher_block: Their block.
            reuse: True returns the registered block, False demands a new key.

        Returns:
            The block now registered under the key.

        Raises:
            RegistrationError: The key is taken and ``reuse`` is False, it is taken by another type
                of block, or one of its parameters belongs to another key.
            UnknownNameError: ``reuse`` is True and the key is unknown.
        """
        key = _key(layer_key)
        if self._is_new(key, reuse, self._rows.get(key, ())):
            fisher_block.params = key
            self.fisher_blocks[key] = fisher_block
            for name in _names(key):
                self._uses.setdefault(name, 0)
        return self.fisher_blocks[key]

    def approximation_of(self, params: Params) -> str:
        """The row of the table of approximations that a registered layer has."""
        return str(self._rows[params][1])

    def check_registration(self, variables: Sequence[str]) -> None:
        """Check that blocks cover exactly these parameters, with as many uses as the graph shows.

        Uses are compared only where the collection knows the model.

        Args:
            variables: All parameters that should have a block.

        Raises:
            RegistrationError: One is not covered, a covered one is not listed, or uses differ; the
                message lists all.
        """
        wrong = [f"{name} is not registered" for name in variables if name not in self._uses]
        wrong += [
            f"{name} is registered, but not listed" for name in self._uses if name not in variables
        ]
        if isinstance(self.graph, OnnxModel):
            consumers = self.graph.graph.consumers
            wrong += [
                f"{name} is registered with {uses:g} use(s), the graph has {len(consumers[name])}"
                for name, uses in self._uses.items()
                if uses != float("inf") and name in consumers and uses != len(consumers[name])
            ]
        if wrong:
            raise RegistrationError(f"the registration is not complete: {'; '.join(wrong)}.")

    # -- losses ---------------------------------------------------------------------------------------

    def register_loss_function(
        self,
        loss: LossFunction,
        base_name: str,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a loss object; the total loss is the weighted sum over all.

        Args:
            loss: The loss of one tower.
            base_name: What to derive a name from when none is given.
            name: Unique name.
            coeff: Weight in the total.
            reuse: Whether this is a further tower.

        Returns:
            The name.
        """
        return self._losses.add(loss, base_name, name=name, coefficient=coeff, reuse=reuse)

    def register_categorical_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a softmax output: logits ``(n, …, classes)``, integer targets ``(n, …)``."""
        loss = CategoricalLogitsNegativeLogProbLoss(logits, targets, seed)
        base = "categorical_predictive_distribution"
        return self.register_loss_function(loss, base, name, coeff, reuse)

    def register_normal_predictive_distribution(
        self,
        mean: str,
        var: float = 0.5,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register a Gaussian output of fixed variance; ``var=0.5`` is the squared error."""
        loss = NormalMeanNegativeLogProbLoss(mean, var, targets, seed)
        base = "normal_predictive_distribution"
        return self.register_loss_function(loss, base, name, coeff, reuse)

    def register_multi_bernoulli_predictive_distribution(
        self,
        logits: str,
        seed: int | None = None,
        targets: str | None = None,
        name: str | None = None,
        coeff: float = 1.0,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> str:
        """Register independent binary outputs: logits and targets of one shape."""
        loss = MultiBernoulliNegativeLogProbLoss(logits, targets, seed)
        base = "multi_bernoulli_predictive_distribution"
        return self.register_loss_function(loss, base, name, coeff, reuse)

    def eval_losses(
        self, target_mode: TargetMode = "data", coeff_mode: CoefficientMode = "regular"
    ) -> list[Thunk[float]]:
        """One callable a loss and tower, summed over the batch and weighted.

        Args:
            target_mode: Observed or sampled targets.
            coeff_mode: Weighted by the coefficient, its root, or one.

        Returns:
            Callables of the values of a batch.

        Raises:
            InputError: A mode is unknown.
        """
        if target_mode not in ("data", "sample") or coeff_mode not in _COEFFICIENT:
            raise InputError(
                f"target_mode is 'data' or 'sample' and coeff_mode one of {', '.join(_COEFFICIENT)}; "
                f"got '{target_mode}' and '{coeff_mode}'."
            )
        weighted = []
        for loss in self._losses:
            k = _COEFFICIENT[coeff_mode](loss.coefficient)
            for tower in loss.towers:
                evaluate = tower.evaluate() if target_mode == "data" else tower.evaluate_on_sample()
                weighted.append(_times(k, evaluate))
        return weighted

    def eval_losses_on_samples(self) -> list[Thunk[float]]:
        """``eval_losses`` on sampled targets."""
        return self.eval_losses("sample")

    def total_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """The sum of all losses on the data."""
        self._losses.require()
        return _sum(self.eval_losses("data", coeff_mode))

    def total_sampled_loss(self, coeff_mode: CoefficientMode = "regular") -> Thunk[float]:
        """The sum of all losses on sampled targets."""
        self._losses.require()
        return _sum(self.eval_losses("sample", coeff_mode))

    # -- private ----------------------------------------------------------------------------------------

    def _register(
        self,
        kind: str,
        key: Params,
        form: LayerForm,
        tensors: tuple[TowerNames, TowerNames],
        approx: str | None,
        reuse: Reuse,
    ) -> None:
        """Register a layer, or a further tower of one."""
        approx = self._resolve(kind, approx)
        row = (kind, approx, form)
        if self._is_new(key, reuse, row):
            block = APPROXIMATIONS[kind][approx].build(self, form)
            self.register_block(key, block, reuse)
            self._rows[key] = row
        self.fisher_blocks[key].register_additional_tower(*tensors)  # type: ignore[attr-defined] # layer blocks have it
        self._count_uses(key, 1)

    def _resolve(self, kind: str, approx: str | None) -> str:
        chosen = self._defaults[kind] if approx is None else approx
        if chosen not in accepted(kind):
            raise InputError(
                f"Bad value '{chosen}' for approx of {kind}; choose one of: "
                f"{', '.join(accepted(kind))}."
            )
        return chosen

    def _is_new(self, key: Params, reuse: Reuse, row: tuple[object, ...]) -> bool:
        """Whether the key is to be registered (else: it gets a tower); refuses what cannot be."""
        known = key in self.fisher_blocks
        if reuse is True and not known:
            raise UnknownNameError(f"reuse=True, but no layer is registered for {key}.")
        if reuse is False and known:
            raise RegistrationError(f"FisherBlock for {key} is already in LayerCollection.")
        if known and self._rows.get(key, row) != row:
            raise RegistrationError(
                f"{key} is registered as {self._rows[key][:2]}; a tower must be the same layer."
            )
        taken = set(self.registered_variables).intersection(_names(key))
        if not known and taken:
            raise RegistrationError(
                f"{', '.join(sorted(taken))} of {key} belong(s) to another registered layer."
            )
        return not known

    def _count_uses(self, key: Params, uses: float) -> None:
        for name in _names(key):
            self._uses[name] = self._uses.get(name, 0) + uses


def _key(params: Params | Sequence[str]) -> Params:
    return params if isinstance(params, str) else tuple(params)


def _names(key: Params) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _times(k: float, evaluate: Thunk[float]) -> Thunk[float]:
    return lambda values: k * evaluate(values)


def _sum(thunks: Sequence[Thunk[float]]) -> Thunk[float]:
    def total(values: Values) -> float:
        return sum(thunk(values) for thunk in thunks)

    return total

"""Defines ``LayerCollection``, which registers the layers and losses of a model.

Tensors are names; their values follow with each batch, as a mapping from names to arrays.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from kfac_engine._types import Params
from kfac_engine.arguments import check_int
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.approximations import KINDS, accepted, row as row_of
from kfac_engine.curvature.blocks.base import FisherBlock, Names, uses
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError, suggestion
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.printable import shortened
from kfac_engine.summary import counted

if TYPE_CHECKING:  # a collection of named shapes needs no ONNX file, and none of its modules
    from kfac_engine.runtime.model import OnnxModel

# The layout of the tensors and parameters of a layer.
Form: TypeAlias = LayerForm | ScaleShiftForm

_MOST_CHARACTERS = 80


class LayerCollection(FactorOwner):
    """The layers and losses of a model with their blocks and shared factors.

    A collection belongs to one estimator. The arguments are those of ``FactorOwner``, and ``name``
    for messages.

    Attributes:
        fisher_blocks: Blocks by parameters (a name or a tuple), in the order of registration.
        subgraph: The part of the model that the losses depend on; None before
            ``create_subgraph``, and without a model.
        divided: What each block multiplies in vectors, by the names of their arrays.
        sized: Kinds of layers whose default depends on the size of a layer.
    """

    def __init__(
        self,
        graph: "OnnxModel | Mapping[str, tuple[int, ...]] | None" = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__(graph, config, backend)
        self.name = name
        self.fisher_blocks: dict[Params, FisherBlock] = {}
        self.sized: frozenset[str] = frozenset()
        self._uses: dict[str, float] = {}
        self.divided: dict[tuple[str, ...], Sequence[Any]] = {}
        self._defaults = {kind: row.default for kind, row in KINDS.items()}
        self._rows: dict[Params, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        """Return the name, and the numbers of blocks and factors."""
        name = shortened(self.name, _MOST_CHARACTERS)
        blocks = counted(len(self.fisher_blocks), "block")
        factors = counted(len(self.fisher_factors), "factor")
        return f"<LayerCollection '{name}': {blocks}, {factors}>"

    # -- contents ---------------------------------------------------------------------------------

    @property
    def registered_variables(self) -> tuple[str, ...]:
        """Names of all parameters that belong to a block."""
        return tuple(name for key in self.fisher_blocks for name in uses(key))

    def get_blocks(self) -> tuple[FisherBlock, ...]:
        """Return all blocks in the order of registration."""
        return tuple(self.fisher_blocks.values())

    def approximation_of(self, params: Params) -> str:
        """Return the approximation of a registered layer."""
        return str(self._rows[params][1])

    # -- the graph --------------------------------------------------------------------------------

    def create_subgraph(self) -> None:
        """Record the part of the model that the registered losses depend on.

        Raises:
            InputError: No loss is registered.
        """
        self._require_losses()
        if self.graph is not None and not isinstance(self.graph, Mapping):
            self.subgraph = self.graph.subgraph(self._loss_inputs())

    def finalize(self) -> None:
        """Close the collection for registrations, because an estimator uses it.

        Raises:
            RegistrationError: It is closed already: a collection belongs to one estimator.
            InputError: No loss is registered.
        """
        self._require_open("an estimator")
        self.create_subgraph()
        self._finalized = True

    def check_registration(self, variables: Sequence[str]) -> None:
        """Check that blocks cover exactly these parameters, with as many uses as in the graph.

        Uses are compared only if the collection has a model. Uses that no loss depends on do not
        count.

        Args:
            variables: All parameters that must have a block.

        Raises:
            RegistrationError: A parameter has no block, a block has other parameters, or uses
                differ; the message lists all differences.
        """
        listed = dict.fromkeys(variables)
        wrong = [f"{name} is not registered" for name in listed if name not in self._uses]
        wrong += [
            f"{name} is registered, but not listed" for name in self._uses if name not in listed
        ]
        if self.graph is not None and not isinstance(self.graph, Mapping):
            reached = self.graph.subgraph(self._loss_inputs() or None)
            counts = {name: reached.variable_uses(name) for name in self._uses}
            wrong += [
                f"{name} is registered with {uses:g} use(s), the graph has {counts[name]}"
                for name, uses in self._uses.items()
                if uses not in (inf, counts[name])
            ]
        if wrong:
            raise RegistrationError(f"the registration is not complete: {'; '.join(wrong)}.")

    # -- defaults ---------------------------------------------------------------------------------

    def default_approximation(self, kind: str) -> str:
        """Return the approximation of a kind of layer for registrations that name none."""
        self._require_kind(kind)
        return self._defaults[kind]

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Set the default approximation of a kind of layer.

        Raises:
            UnknownNameError: The kind is unknown.
            InputError: The kind does not accept the approximation.
        """
        self._require_kind(kind)
        if value not in accepted(kind):
            raise InputError(
                f"'{value}'{suggestion(value, accepted(kind))} is not a valid approximation for "
                f"{kind}; choose one of: "
                f"{', '.join(accepted(kind))}."
            )
        self._defaults[kind] = value

    # -- registration -----------------------------------------------------------------------------

    def register(
        self,
        kind: str,
        params: Params | Sequence[str],
        form: Form,
        inputs: Names,
        outputs: Names,
        approx: str | None = None,
    ) -> None:
        """Register a layer, or a further part of the batch of a registered layer.

        Args:
            kind: Kind of layer, a row of ``KINDS``.
            params: The weight, or ``(weight, bias)``.
            form: Layout of the tensors and parameters, for one use; it has the number of uses.
            inputs: Name of the input, or names over uses; no names for a shift.
            outputs: Name of the output before any nonlinearity, or names over uses.
            approx: Name of an approximation of the kind; by default the default of the collection.

        Raises:
            RegistrationError: The parameters do not fit the form, belong to another layer, or are
                registered with another form or approximation.
            InputError: The kind does not accept the approximation.
        """
        key = canonical_key(params)
        names = uses(key)
        if not isinstance(key, str) and len(names) != 2:
            raise RegistrationError(
                f"a layer has one parameter, given by its name, or a pair of them; got {key}."
            )
        for tensors in (inputs, outputs):
            if not all(isinstance(name, str) for name in _entries(tensors)):
                raise RegistrationError(
                    f"inputs and outputs of {key} must be names of tensors, got {tensors!r}."
                )
        self._require_kind(kind)
        if form.num_parameters != len(names):
            raise RegistrationError(
                f"the form of the layer has {form.num_parameters} parameter(s), got {key}."
            )
        if approx is None and kind in self.sized:
            shapes = [self.require_shape(name) for name in names]
            of_data = self.data.issuperset(uses(inputs))
            approx = KINDS[kind].default_for(form, shapes, of_data)
        approx = self._resolve(kind, approx, key)
        row = (kind, approx, form)
        block = self._registered(key, row_of(kind, approx).build(self, form), row)
        block.add_part(inputs, outputs)
        self._enter(key, block, row, max(len(uses(inputs)), len(uses(outputs))))

    def register_generic(
        self, params: Params | Sequence[str], batch_size: int | str, approx: str | None = None
    ) -> None:
        """Register parameters without a layer.

        Args:
            params: A name, or several names for a joint block.
            batch_size: Examples, or the name of a value whose first axis is the batch.
            approx: ``"diagonal"`` (one parameter) or ``"full"``.
        """
        key = canonical_key(params)
        if not isinstance(batch_size, str):
            check_int("batch_size", batch_size, least=1)
        approx = self._resolve("generic", approx, key)
        row, block = ("generic", approx), row_of("generic", approx).build(self, key)
        registered = self._registered(key, block, row, exact=True)
        registered.add_part(batch_size)  # type: ignore[call-arg, arg-type] # the type of `block`
        self._enter(key, registered, row, inf)

    def register_block(
        self, layer_key: Params | Sequence[str], fisher_block: FisherBlock
    ) -> FisherBlock:
        """Register a block that the caller created.

        Args:
            layer_key: The parameters.
            fisher_block: Block of the parameters.

        Returns:
            The block that is registered under the key.

        Raises:
            RegistrationError: The key has another type of block, or a parameter belongs to another
                key.
        """
        key = canonical_key(layer_key)
        known = key in self.fisher_blocks
        registered = self._registered(key, fisher_block, self._rows.get(key, ()), exact=True)
        if not known:  # uses in a block of the caller are not compared with the graph
            self._enter(key, registered, (), inf)
        return registered

    # -- private ----------------------------------------------------------------------------------

    def _registered(
        self, key: Params, block: FisherBlock, row: tuple[object, ...], *, exact: bool = False
    ) -> FisherBlock:
        """Return the registered block of a key for a further part, or ``block`` for a new key.

        A block that the caller created can have parts of ``register`` if it has the type of
        ``block``, or a subclass unless ``exact``.

        Raises:
            RegistrationError: The key or one of its parameters belongs to another layer.
        """
        self._require_open(f"a layer of {key}")
        known = self.fisher_blocks.get(key)
        if known is None:
            others = self._uses.keys() & set(uses(key))
            if others:
                raise RegistrationError(
                    f"{', '.join(sorted(others))} of {key} belong(s) to another registered layer."
                )
            return block
        same = type(known) is type(block) or (not exact and isinstance(known, type(block)))
        if not same or self._rows.get(key, row) != row:
            kind = self._rows.get(key, (type(known).__name__,))[:2]
            raise RegistrationError(
                f"{key} is registered as {' '.join(map(str, kind))}; a further part of the batch "
                f"must be the same layer, with the same approximation."
            )
        return known

    def _resolve(self, kind: str, approx: str | None, key: Params) -> str:
        """Return the named approximation, or the default of the kind.

        An approximation that the kind does not have is an InputError.
        """
        del key
        chosen = self._defaults[kind] if approx is None else approx
        if chosen not in accepted(kind):
            raise InputError(
                f"Bad value '{chosen}'{suggestion(chosen, accepted(kind))} for approx of {kind}; "
                f"choose one of: {', '.join(accepted(kind))}."
            )
        return chosen

    def _require_kind(self, kind: str) -> None:
        if kind not in self._defaults:
            raise UnknownNameError(
                f"unknown kind of layer '{kind}'{suggestion(kind, self._defaults)}; choose one of: "
                f"{', '.join(self._defaults)}."
            )

    def _loss_inputs(self) -> list[str]:
        return [name for loss in self.losses for name in loss.inputs]

    def _enter(
        self, key: Params, block: FisherBlock, row: tuple[object, ...], count: float
    ) -> None:
        """Store a block under its key, and count the uses of its parameters."""
        if key not in self.fisher_blocks:
            block.params = key
            self.fisher_blocks[key] = block
            if row:
                self._rows[key] = row
        for name in uses(key):
            self._uses[name] = self._uses.get(name, 0) + count


def _entries(names: object) -> tuple[object, ...]:
    """Return names over uses as a tuple, and anything else as its only entry."""
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    return tuple(names) if listed else (names,)  # type: ignore[arg-type] # it is iterable


def canonical_key(params: Params | Sequence[str]) -> Params:
    """Return the key of a block: a name or a tuple of names.

    ``RegistrationError`` is raised if there is no name, a name occurs twice, or an entry is not a
    string.
    """
    iterable = isinstance(params, str | Iterable)
    key = params if isinstance(params, str) else tuple(params if iterable else ())
    names = uses(key)
    if (
        not all(isinstance(name, str) for name in names)
        or not names
        or len(set(names)) < len(names)
    ):
        raise RegistrationError(f"params must be distinct names of parameters, got {params!r}.")
    return key

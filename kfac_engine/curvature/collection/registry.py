"""The registered blocks, by the parameters that form them, and their factors."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, TypeVar

from kfac_engine._types import Params
from kfac_engine.arguments import instance, whole
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.select import select
from kfac_engine.curvature.approximations import KINDS, accepted
from kfac_engine.curvature.approximations import row as row_of
from kfac_engine.curvature.blocks.base import FisherBlock, TowerNames, uses
from kfac_engine.curvature.blocks.single import NaiveFullFB
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError, suggestion
from kfac_engine.losses.collection import LossCollection, Reuse, check_reuse
from kfac_engine.printable import shortened
from kfac_engine.summary import counted

if TYPE_CHECKING:  # a collection of named shapes needs no ONNX file, and none of its modules
    from kfac_engine.graph.analysis.subgraph import SubGraph
    from kfac_engine.runtime.model import OnnxModel

Factor = TypeVar("Factor", bound=FisherFactor)

_MOST_CHARACTERS = 80


def _default(kind: str) -> property:
    """Return a property for the default approximation of a kind of layer."""

    def default(self: "BlockRegistry") -> str:
        return self.default_approximation(kind)

    return property(default, doc=f"Default approximation of layers of the kind '{kind}'.")


def _setter(kind: str) -> Callable[["BlockRegistry", str], None]:
    """Return a method that sets the default approximation of a kind of layer."""

    def set_default(self: "BlockRegistry", value: str) -> None:
        self.set_default_approximation(kind, value)

    set_default.__doc__ = (
        f"Set the default approximation of layers of the kind '{kind}'; raise an InputError for an "
        f"approximation that the kind does not have."
    )
    return set_default


class BlockRegistry(LossCollection):
    """Registered blocks; see ``LayerCollection``, the public class."""

    def __init__(
        self,
        graph: "OnnxModel | Mapping[str, tuple[int, ...]] | None" = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(graph, Mapping | None) and not hasattr(graph, "static_shape"):
            raise InputError(
                f"graph must be a kfac_engine.OnnxModel or a dictionary of shapes, such as "
                f"{{'w': (4, 3)}}, got {graph!r:.80}."
            )
        self.graph = graph
        self.subgraph: SubGraph | None = None
        self.name = name
        self.config = CollectionConfig() if config is None else config
        instance("config", self.config, CollectionConfig)
        self.backend = select(backend) if isinstance(backend, str) else backend
        self.fisher_blocks: dict[Params, FisherBlock] = {}
        self.fisher_factors: dict[tuple[object, ...], FisherFactor] = {}
        self._uses: dict[str, float] = {}
        self._defaults = {kind: row.default for kind, row in KINDS.items()}
        self._linked: dict[frozenset[str], str | None] = {}
        # Inputs of the model, whose features may have units of their own.
        self.data: frozenset[str] = frozenset()
        # Kinds of layers whose default depends on the size of a layer.
        self.sized: frozenset[str] = frozenset()
        self._rows: dict[Params, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        """Return the name, and the numbers of blocks and factors."""
        name = shortened(self.name, _MOST_CHARACTERS)
        blocks = counted(len(self.fisher_blocks), "block")
        factors = counted(len(self.fisher_factors), "factor")
        return f"<{type(self).__name__} '{name}': {blocks}, {factors}>"

    # -- contents -----------------------------------------------------------------------

    @property
    def registered_variables(self) -> tuple[str, ...]:
        """Names of all parameters that belong to a block."""
        return tuple(name for key in self.fisher_blocks for name in names_of(key))

    def get_blocks(self) -> tuple[FisherBlock, ...]:
        """Return all blocks in the order of registration."""
        return tuple(self.fisher_blocks.values())

    def get_factors(self) -> tuple[FisherFactor, ...]:
        """Return all factors in the order of creation, the input factor of a block first."""
        return tuple(self.fisher_factors.values())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the declared shape of a tensor; None if it is unknown before the first batch."""
        if not isinstance(self.graph, Mapping):
            return None if self.graph is None else self.graph.static_shape(name)
        return tuple(self.graph[name]) if name in self.graph else None

    def require_shape(self, name: str) -> tuple[int, ...]:
        """Return the declared shape of a tensor.

        Raises:
            InputError: The shape is unknown.
        """
        shape = self.shape_of(name)
        if shape is None:
            raise InputError(
                f"the shape of '{name}' is needed to register its layer: name it in "
                f"LayerCollection(graph={{'{name}': (…), …}})."
            )
        return shape

    def require_filter(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the declared shape of the filter of a convolution.

        Args:
            name: Name of the filter.
            ranks: Allowed numbers of axes.

        Returns:
            The shape.

        Raises:
            InputError: The shape is unknown, or has another number of axes.
        """
        shape = self.require_shape(name)
        if len(shape) not in ranks:
            wanted = " or ".join(str(rank) for rank in ranks)
            raise InputError(f"filter '{name}' has shape {shape}; {wanted} axes are needed.")
        return shape

    def require_vocabulary(self, key: Params) -> int:
        """Return the number of rows in the table of a layer that reads token ids.

        Args:
            key: The parameters of the layer.

        Returns:
            The size of the first axis of the table.

        Raises:
            InputError: There is a bias, or the shape of the table is unknown or has not two axes.
        """
        if not isinstance(key, str):
            raise InputError(f"Bias not supported: identifiers pick rows of one table, got {key}.")
        shape = self.require_shape(key)
        if len(shape) != 2:
            raise InputError(f"table '{key}' has shape {shape}; (vocabulary, d) is needed.")
        return shape[0]

    def make_or_get_factor(self, cls: type[Factor], args: tuple[object, ...]) -> Factor:
        """Return the factor ``cls(*args)``, which layers with equal arguments share.

        Args:
            cls: Class of the factor.
            args: Its positional arguments, hashable.

        Returns:
            The factor, created at the first call.
        """
        key = (cls, *args)
        if key not in self.fisher_factors:
            self.fisher_factors[key] = cls(*args, backend=self.backend, config=self.config)  # type: ignore[arg-type] # args are cls's own
        factor = self.fisher_factors[key]
        factor.companions = self.fisher_factors
        assert isinstance(factor, cls)
        return factor

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

    # -- approximations: named at registration, of a linked group, or by default -----------------

    @property
    def linked_parameters(self) -> dict[frozenset[str], str | None]:
        """Groups of ``define_linked_parameters``, each with its approximation or None."""
        return dict(self._linked)

    def define_linked_parameters(
        self, params: Params | Sequence[str], approximation: str | None = None
    ) -> None:
        """Group the parameters of a layer, and set its approximation.

        A layer that is registered later with exactly these parameters has the approximation, unless
        its registration names another.

        Args:
            params: A name, or several in any order.
            approximation: Approximation of the layer; by default the default of its kind.

        Raises:
            RegistrationError: A parameter is linked already, or registered with others.
            InputError: The group is empty, or has a name twice.
        """
        if not isinstance(params, Iterable):
            raise InputError(f"a group has one or more distinct parameters, got {params!r}.")
        group = frozenset(uses(params))
        if not group or len(group) < len(uses(params)):
            raise InputError(f"a group has one or more distinct parameters, got {params!r}.")
        for key in self.fisher_blocks:
            if group.intersection(uses(key)) and group != set(uses(key)):
                raise RegistrationError(
                    f"{_listed(group)} cannot be linked: a layer of {_listed(uses(key))} is "
                    f"registered, which is another group."
                )
        for linked in self._linked:
            if group & linked:
                raise RegistrationError(
                    f"{_listed(group & linked)} cannot be linked again: the group "
                    f"{_listed(linked)} has it."
                )
        self._linked[group] = approximation

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

    default_generic_approximation = _default("generic")
    default_fully_connected_approximation = _default("fully_connected")
    default_fully_connected_multi_approximation = _default("fully_connected_multi")
    default_conv2d_approximation = _default("conv2d")
    default_conv2d_multi_approximation = _default("conv2d_multi")
    default_embedding_approximation = _default("embedding")
    default_embedding_multi_approximation = _default("embedding_multi")
    default_scale_and_shift_approximation = _default("scale_and_shift")

    set_default_generic_approximation = _setter("generic")
    set_default_fully_connected_approximation = _setter("fully_connected")
    set_default_fully_connected_multi_approximation = _setter("fully_connected_multi")
    set_default_conv2d_approximation = _setter("conv2d")
    set_default_conv2d_multi_approximation = _setter("conv2d_multi")
    set_default_embedding_approximation = _setter("embedding")
    set_default_embedding_multi_approximation = _setter("embedding_multi")
    set_default_scale_and_shift_approximation = _setter("scale_and_shift")

    # -- layers -----------------------------------------------------------------------------------

    def register_generic(
        self,
        params: Params | Sequence[str],
        batch_size: int | str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> None:
        """Register parameters without a layer.

        Args:
            params: A name, or several names for a joint block.
            batch_size: Examples, or the name of a value whose first axis is the batch.
            approx: ``"diagonal"`` (one parameter) or ``"full"``.
            reuse: Whether this is a further tower.
        """
        key = canonical_key(params)
        if not isinstance(batch_size, str):
            whole("batch_size", batch_size, least=1)
        approx = self._resolve("generic", approx, key)
        block = row_of("generic", approx).build(self, key)
        registered = self._find_or_use(key, block, reuse, ("generic", approx), exact=True)
        assert isinstance(registered, NaiveFullFB)  # the type of `block`
        registered.register_additional_tower(batch_size)
        self._enter(key, registered, ("generic", approx), inf)

    def register_block(
        self,
        layer_key: Params | Sequence[str],
        fisher_block: FisherBlock,
        reuse: Reuse = "VARIABLE_SCOPE",
    ) -> FisherBlock:
        """Register a block that the caller created.

        Args:
            layer_key: The parameters.
            fisher_block: Block of the parameters.
            reuse: True returns the registered block, False requires a new key.

        Returns:
            The block that is registered under the key.

        Raises:
            RegistrationError: The key exists and ``reuse`` is False, or has another type of
                block, or a parameter belongs to another key.
            UnknownNameError: ``reuse`` is True and the key is unknown.
        """
        key = canonical_key(layer_key)
        known = key in self.fisher_blocks
        registered = self._find_or_use(
            key, fisher_block, reuse, self._rows.get(key, ()), exact=True
        )
        if not known:  # uses in a block of the caller are not compared with the graph
            self._enter(key, registered, (), inf)
        return registered

    def approximation_of(self, params: Params) -> str:
        """Return the approximation of a registered layer."""
        return str(self._rows[params][1])

    # -- private ----------------------------------------------------------------------------------

    def _register(
        self,
        kind: str,
        key: Params,
        form: Hashable,
        tensors: tuple[TowerNames, TowerNames],
        approx: str | None,
        reuse: Reuse,
    ) -> None:
        """Register a layer, or a further tower of a registered layer."""
        if not isinstance(key, str) and len(key) != 2:
            raise RegistrationError(
                f"a layer has one parameter, given by its name, or a pair of them; got {key}."
            )
        for names in tensors:
            if not all(isinstance(name, str) for name in uses_of(names)):
                raise RegistrationError(
                    f"inputs and outputs of {key} must be names of tensors, got {names!r}."
                )
        if approx is None and kind in self.sized and not self._linked.get(frozenset(names_of(key))):
            shapes = [self.require_shape(name) for name in names_of(key)]
            approx = KINDS[kind].default_for(form, shapes)
        approx = self._resolve(kind, approx, key)
        row = (kind, approx, form)
        block = self._find_or_use(key, row_of(kind, approx).build(self, form), reuse, row)
        block.register_additional_tower(*tensors)  # type: ignore[attr-defined] # layer blocks have it
        self._enter(key, block, row, max(len(uses(names)) for names in tensors))

    def _find_or_use(
        self,
        key: Params,
        block: FisherBlock,
        reuse: Reuse,
        row: tuple[object, ...],
        *,
        exact: bool = False,
    ) -> FisherBlock:
        """Return the registered block of a key for a new tower, or ``block`` for a new key.

        A block that the caller created can have towers of ``register_*`` if it has the type of
        ``block``, or a subclass unless ``exact``.

        Raises:
            UnknownNameError: ``reuse`` is True and the key is unknown.
            InputError: ``reuse`` is none of its three values.
            RegistrationError: The key or one of its parameters belongs to another layer.
        """
        self._require_open(f"a layer of {key}")
        check_reuse(reuse)
        known = self.fisher_blocks.get(key)
        if reuse is True and known is None:
            raise UnknownNameError(f"reuse=True, but no layer is registered for {key}.")
        if reuse is False and known is not None:
            raise RegistrationError(f"FisherBlock for {key} is already in LayerCollection.")
        if known is None:
            self._require_free(key)
            return block
        same = type(known) is type(block) or (not exact and isinstance(known, type(block)))
        if not same or self._rows.get(key, row) != row:
            kind = self._rows.get(key, (type(known).__name__,))[:2]
            raise RegistrationError(
                f"{key} is registered as {' '.join(map(str, kind))}; a tower must be the same "
                f"layer, with the same approximation."
            )
        return known

    def _resolve(self, kind: str, approx: str | None, key: Params) -> str:
        """Return the approximation of a layer: the named, the linked or the default one."""
        linked = self._linked.get(frozenset(uses(key)))
        chosen = (linked or self._defaults[kind]) if approx is None else approx
        if chosen not in accepted(kind):
            raise InputError(
                f"Bad value '{chosen}'{suggestion(chosen, accepted(kind))} for approx of {kind}; "
                f"choose one of: "
                f"{', '.join(accepted(kind))}."
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

    def _count_uses(self, names: Sequence[str], uses: float) -> None:
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + uses

    def _require_free(self, key: Params) -> None:
        registered = self._uses.keys() & set(names_of(key))
        if registered:
            raise RegistrationError(
                f"{', '.join(sorted(registered))} of {key} belong(s) to another registered layer."
            )

    def _enter(
        self, key: Params, block: FisherBlock, row: tuple[object, ...], count: float
    ) -> None:
        """Store a block under its key, and count the uses of its parameters."""
        if key not in self.fisher_blocks:
            block.params = key
            self.fisher_blocks[key] = block
            if row:
                self._rows[key] = row
        self._count_uses(names_of(key), count)


def uses_of(names: object) -> tuple[object, ...]:
    """Return the uses of a layer in a tower as a tuple; a single name is one use."""
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    return tuple(names) if listed else (names,)  # type: ignore[arg-type] # it is iterable


def canonical_key(params: Params | Sequence[str]) -> Params:
    """Return the key of a block, which is a name or a tuple of names.

    ``RegistrationError`` is raised if there is no name, a name occurs twice, or an entry is not a
    string.
    """
    iterable = isinstance(params, str | Iterable)
    key = params if isinstance(params, str) else tuple(params if iterable else ())
    names = names_of(key)
    if (
        not all(isinstance(name, str) for name in names)
        or not names
        or len(set(names)) < len(names)
    ):
        raise RegistrationError(f"params must be distinct names of parameters, got {params!r}.")
    return key


def names_of(key: Params) -> tuple[str, ...]:
    """Return the names in a key."""
    return (key,) if isinstance(key, str) else key


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))

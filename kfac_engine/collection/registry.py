"""The registry of layers and losses: which parameters form which block.

``LayerCollection`` keeps the specification's names. Tensors are named; their values arrive later,
as a mapping from names to arrays.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kfac_engine._types import Params
from kfac_engine.approximations import APPROXIMATIONS, DEFAULTS, GENERIC, accepted
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.model import OnnxModel
from kfac_engine.backend.select import select
from kfac_engine.blocks.base import FisherBlock, TowerNames, uses
from kfac_engine.config import CollectionConfig
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.factors.base import FisherFactor
from kfac_engine.losses.collection import LossCollection, Reuse

Factor = TypeVar("Factor", bound=FisherFactor)


class BlockRegistry(LossCollection):
    """Registered blocks; see ``LayerCollection``, the public class."""

    def __init__(
        self,
        graph: OnnxModel | Mapping[str, tuple[int, ...]] | None = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.graph = graph
        self.name = name
        self.config = config or CollectionConfig()
        self.backend = select(backend)
        self.fisher_blocks: dict[Params, FisherBlock] = {}
        self.fisher_factors: dict[tuple[object, ...], FisherFactor] = {}
        self._rows: dict[Params, tuple[object, ...]] = {}
        self._uses: dict[str, float] = {}
        self._defaults = dict(DEFAULTS)

    # -- what is registered -----------------------------------------------------------------------

    @property
    def registered_variables(self) -> tuple[str, ...]:
        """All parameters that belong to a block."""
        return tuple(name for key in self.fisher_blocks for name in names_of(key))

    def get_blocks(self) -> tuple[FisherBlock, ...]:
        """All blocks, in the order of registration."""
        return tuple(self.fisher_blocks.values())

    def get_factors(self) -> tuple[FisherFactor, ...]:
        """All factors, in the order of creation: a block's input factor comes first."""
        return tuple(self.fisher_factors.values())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The declared shape of a tensor; None where it is not known before a batch."""
        if isinstance(self.graph, OnnxModel):
            return self.graph.static_shape(name)
        return None if self.graph is None or name not in self.graph else tuple(self.graph[name])

    def require_shape(self, name: str) -> tuple[int, ...]:
        """The declared shape of a tensor.

        Returns:
            One side an axis.

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

    def require_filter(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The declared shape of a convolution's filter.

        Args:
            name: The parameter.
            ranks: Numbers of axes it may have.

        Returns:
            One side an axis.

        Raises:
            InputError: It is not known or has another rank.
        """
        shape = self.require_shape(name)
        if len(shape) not in ranks:
            wanted = " or ".join(str(rank) for rank in ranks)
            raise InputError(f"filter '{name}' has shape {shape}; {wanted} axes are needed.")
        return shape

    def require_vocabulary(self, key: Params) -> int:
        """Rows of the table of a layer whose inputs are identifiers.

        Args:
            key: Its parameters.

        Returns:
            The first side of the table.

        Raises:
            InputError: There is a bias, or the table is unknown or has not two axes.
        """
        if not isinstance(key, str):
            raise InputError(f"Bias not supported: identifiers pick rows of one table, got {key}.")
        shape = self.require_shape(key)
        if len(shape) != 2:
            raise InputError(f"table '{key}' has shape {shape}; (vocabulary, d) is needed.")
        return shape[0]

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

    # -- defaults ---------------------------------------------------------------------------------

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
            params: One name, or several for a joint block.
            batch_size: Examples, or the name of a value whose first axis is the batch.
            approx: ``"diagonal"`` (one parameter) or ``"full"``.
            reuse: Whether this is a further tower.
        """
        key = canonical_key(params)
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
        key = canonical_key(layer_key)
        if self._is_new(key, reuse, self._rows.get(key, ())):
            fisher_block.params = key
            self.fisher_blocks[key] = fisher_block
            for name in names_of(key):
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
            graph = self.graph.graph
            if self.losses:  # uses that no loss depends on are none
                ends = [name for loss in self.losses for name in loss.inputs]
                graph = replace(graph, nodes=needed(graph.nodes, ends))
            consumers = graph.consumers
            wrong += [
                f"{name} is registered with {uses:g} use(s), the graph has {len(consumers[name])}"
                for name, uses in self._uses.items()
                if uses != float("inf") and name in consumers and uses != len(consumers[name])
            ]
        if wrong:
            raise RegistrationError(f"the registration is not complete: {'; '.join(wrong)}.")

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
        """Register a layer, or a further tower of one."""
        approx = self._resolve(kind, approx)
        row = (kind, approx, form)
        if self._is_new(key, reuse, row):
            block = APPROXIMATIONS[kind][approx].build(self, form)
            self.register_block(key, block, reuse)
            self._rows[key] = row
        self.fisher_blocks[key].register_additional_tower(*tensors)  # type: ignore[attr-defined] # layer blocks have it
        self._count_uses(key, max(len(uses(names)) for names in tensors))

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
        taken = set(self.registered_variables).intersection(names_of(key))
        if not known and taken:
            raise RegistrationError(
                f"{', '.join(sorted(taken))} of {key} belong(s) to another registered layer."
            )
        return not known

    def _count_uses(self, key: Params, uses: float) -> None:
        for name in names_of(key):
            self._uses[name] = self._uses.get(name, 0) + uses


def canonical_key(params: Params | Sequence[str]) -> Params:
    """A name, or a tuple of names."""
    return params if isinstance(params, str) else tuple(params)


def names_of(key: Params) -> tuple[str, ...]:
    """The names in a key."""
    return (key,) if isinstance(key, str) else key

"""The registered blocks, by the parameters that form them, and their factors."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

from kfac_engine._types import Params
from kfac_engine.arguments import instance, whole
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.select import select
from kfac_engine.curvature.approximations import row as row_of
from kfac_engine.curvature.blocks.base import FisherBlock, TowerNames, uses
from kfac_engine.curvature.blocks.single import NaiveFullFB
from kfac_engine.curvature.collection.choices import ApproximationChoices
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.losses.collection import Reuse, check_reuse
from kfac_engine.printable import shortened
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.text.summary import counted

Factor = TypeVar("Factor", bound=FisherFactor)

_MOST_CHARACTERS = 80


class BlockRegistry(ApproximationChoices):
    """Registered blocks; see ``LayerCollection``, the public class."""

    def __init__(
        self,
        graph: OnnxModel | Mapping[str, tuple[int, ...]] | None = None,
        name: str = "LayerCollection",
        config: CollectionConfig | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__(graph)
        self.name = name
        self.config = CollectionConfig() if config is None else config
        instance("config", self.config, CollectionConfig)
        self.backend = select(backend) if isinstance(backend, str) else backend
        self.fisher_factors: dict[tuple[object, ...], FisherFactor] = {}
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
        if isinstance(self.graph, OnnxModel):
            return self.graph.static_shape(name)
        return None if self.graph is None or name not in self.graph else tuple(self.graph[name])

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
        """Return the number of rows of the table of a layer whose inputs are token ids.

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
        """Return the registered block of a key, or ``block`` for a new key.

        A block that the caller created can have towers of ``register_*`` if its type is that of
        ``block``, or a subclass unless ``exact``.

        Returns:
            The block of the new tower.

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
    """Return the key of a block.

    Args:
        params: A name, or a sequence of names.

    Returns:
        A name, or a tuple of names.

    Raises:
        RegistrationError: There is no name, a name occurs twice, or an entry is not a string.
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

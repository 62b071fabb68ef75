"""The choice of approximation: named at registration, of a linked group, or by default."""

from collections.abc import Iterable, Mapping, Sequence

from kfac_engine._types import Params
from kfac_engine.compat.mixins.collection import CollectionDefaults
from kfac_engine.curvature.approximations import KINDS, accepted
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection.coverage import Coverage
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.suggestions import suggestion


class ApproximationChoices(CollectionDefaults, Coverage):
    """The part of ``LayerCollection`` that chooses approximations.

    Args:
        graph: As in ``LayerCollection``.

    Attributes:
        fisher_blocks: As in ``LayerCollection``.
    """

    def __init__(self, graph: OnnxModel | Mapping[str, tuple[int, ...]] | None) -> None:
        super().__init__(graph)
        self.fisher_blocks: dict[Params, FisherBlock] = {}
        self._defaults = {kind: row.default for kind, row in KINDS.items()}
        self._linked: dict[frozenset[str], str | None] = {}

    # -- groups -----------------------------------------------------------------------------------

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
            approximation: Approximation of the layer; by default that of its kind.

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

    # -- private ----------------------------------------------------------------------------------

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


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))

"""Which approximation a layer gets: the one named, that of its linked group, or the default."""

from collections.abc import Iterable, Mapping, Sequence

from kfac_engine._types import Params
from kfac_engine.compat.mixins.collection import CollectionDefaults
from kfac_engine.curvature.approximations import KINDS, accepted
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection.coverage import Coverage
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.runtime.model import OnnxModel


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
        """Groups that ``define_linked_parameters`` made, each with its approximation or None."""
        return dict(self._linked)

    def define_linked_parameters(
        self, params: Params | Sequence[str], approximation: str | None = None
    ) -> None:
        """Say that parameters belong together, and how their layer is to be approximated.

        A layer registered later with exactly these parameters gets the approximation, unless its
        registration names one.

        Args:
            params: A name, or several; their order does not matter.
            approximation: Of the layer; its kind's default when left out.

        Raises:
            RegistrationError: One of them is linked already, or registered with other parameters.
            InputError: There is none, or one is named twice.
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
        """The approximation used for a kind of layer unless one is named; ``set_…`` changes it."""
        self._require_kind(kind)
        return self._defaults[kind]

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Choose the approximation of a kind of layer.

        Raises:
            UnknownNameError: There is no such kind.
            InputError: The kind does not accept the approximation.
        """
        self._require_kind(kind)
        if value not in accepted(kind):
            raise InputError(
                f"'{value}' is not a valid approximation for {kind}; choose one of: "
                f"{', '.join(accepted(kind))}."
            )
        self._defaults[kind] = value

    # -- private ----------------------------------------------------------------------------------

    def _resolve(self, kind: str, approx: str | None, key: Params) -> str:
        """The row of the table for a layer: as named, as linked, or by default."""
        linked = self._linked.get(frozenset(uses(key)))
        chosen = (linked or self._defaults[kind]) if approx is None else approx
        if chosen not in accepted(kind):
            raise InputError(
                f"Bad value '{chosen}' for approx of {kind}; choose one of: "
                f"{', '.join(accepted(kind))}."
            )
        return chosen

    def _require_kind(self, kind: str) -> None:
        if kind not in self._defaults:
            raise UnknownNameError(
                f"unknown kind of layer '{kind}'; choose one of: {', '.join(self._defaults)}."
            )


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))

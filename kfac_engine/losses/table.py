"""The losses of one model under their names, tower by tower."""

from collections.abc import Iterator

from kfac_engine.errors import InputError, RegistrationError, UnknownNameError
from kfac_engine.losses.base import LossFunction, RegisteredLoss


class LossTable:
    """Registered losses, in the order of registration."""

    def __init__(self) -> None:
        self._losses: dict[str, RegisteredLoss] = {}

    def __iter__(self) -> Iterator[RegisteredLoss]:
        return iter(self._losses.values())

    def __len__(self) -> int:
        return len(self._losses)

    def add(
        self,
        loss: LossFunction,
        base_name: str,
        *,
        name: str | None,
        coefficient: float,
        reuse: bool | str,
    ) -> str:
        """Register a loss, or a further tower of a registered one.

        Args:
            loss: The loss of one tower.
            base_name: What to derive a unique name from when ``name`` is left out.
            name: Name of the loss.
            coefficient: Weight in the total.
            reuse: False: the name must be new. True: it must be there, and ``loss`` becomes its next
                tower. ``"VARIABLE_SCOPE"``: whichever applies.

        Returns:
            The name.

        Raises:
            UnknownNameError: ``reuse`` is True and the name is unknown, or False and it is taken.
            RegistrationError: ``reuse`` is True without a name, or another coefficient was given.
        """
        if reuse is True and name is None:
            raise RegistrationError("reuse=True needs the name of the loss that gets a tower.")
        if name is None:
            name = self._unique(base_name)
        known = self._losses.get(name)
        if reuse is True and known is None:
            raise UnknownNameError(
                f"reuse=True, but no loss goes by '{name}'; registered: {', '.join(self._losses)}."
            )
        if reuse is False and known is not None:
            raise UnknownNameError(f"a loss '{name}' exists already; pass reuse=True for a tower.")
        if known is not None and known.coefficient != coefficient:
            raise RegistrationError(
                f"loss '{name}' has the coefficient {known.coefficient}, its new tower {coefficient}."
            )
        towers = known.towers if known else ()
        self._losses[name] = RegisteredLoss(name, (*towers, loss), coefficient)
        return name

    def require(self) -> tuple[RegisteredLoss, ...]:
        """All losses.

        Raises:
            InputError: There is none.
        """
        if not self._losses:
            raise InputError("Must have at least one registered loss.")
        return tuple(self._losses.values())

    def _unique(self, base: str) -> str:
        if base not in self._losses:
            return base
        return next(
            f"{base}_{i}" for i in range(1, len(self) + 2) if f"{base}_{i}" not in self._losses
        )

"""The options of ``train`` for the refreshes of ``KfacOptimizer``."""

from typing import Any

from kfac_engine.cli.command import Group, Option
from kfac_engine.cli.engine_options import options_of
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.errors import InputError

_NAMES = ("refresh_every", "policy", "drift", "budget", "periods")


def refresh_options() -> list[Option]:
    """Return the options of a schedule, with the defaults of the optimizer in place of its own."""
    options = options_of(Schedule, _NAMES)
    for option in options:
        option.default, option.show_default = None, False
        option.group = Group.KFAC_REFRESHES
        # A step of the optimizer is a call of the engine.
        option.text = option.text.replace("call", "step")
        option.metavar = option.metavar and option.metavar.replace("CALLS", "STEPS")
    return options


def chosen_refreshes(options: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Remove the values of ``refresh_options`` from options, and return those that are given.

    Args:
        options: Values by name; changed.
        optimizer: Name of the optimizer.

    Returns:
        Argument of ``KfacOptimizer`` to value.

    Raises:
        InputError: A value is given, and the optimizer has no curvature.
    """
    values = {name: options.pop(name) for name in _NAMES}
    chosen = {name: value for name, value in values.items() if value is not None}
    if chosen and optimizer != "kfac":
        flag = next(o.opts[0] for o in refresh_options() if o.name in chosen)
        raise InputError(f"{flag} belongs to kfac; {optimizer} has no curvature.")
    return chosen

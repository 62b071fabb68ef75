"""Checks of the options of an estimator."""

from kfac_engine.arguments import check_seed, flag, listed, number, texts, whole
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.errors import InputError
from kfac_engine.suggestions import suggestion


def check_options(
    variables: object, cov_ema_decay: float, exps: object, estimation_mode: object
) -> None:
    """Refuse options of a wrong type or outside their range, with an InputError."""
    if not isinstance(estimation_mode, str) or estimation_mode not in MODES:
        raise InputError(
            f"unknown estimation_mode '{estimation_mode}'{suggestion(estimation_mode, MODES)}; "
            f"choose one of: {', '.join(MODES)}."
        )
    texts("variables", variables, "['w', 'b']")
    for exp in listed("exps", exps, "(-1,)"):
        number("each of exps", exp)
    number("cov_ema_decay", cov_ema_decay)
    if not 0 <= cov_ema_decay <= 1:
        raise InputError(f"cov_ema_decay must lie in [0, 1], got {cov_ema_decay}.")


def check_counts(seed: object, batch_size: object, needs_batch_size: bool) -> None:
    """Refuse a negative seed, and a batch size that is missing or below one, with an InputError."""
    if flag("compute_params_stats", needs_batch_size) and batch_size is None:
        raise InputError("Batch size needs to be passed in when compute_params_stats is True.")
    check_seed(seed)
    if batch_size is not None:
        whole("batch_size", batch_size, least=1)

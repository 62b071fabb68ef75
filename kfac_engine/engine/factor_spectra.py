"""Defines ``factor_spectra``, which returns the spectra of all factors of an engine."""

from kfac_engine.arguments import check_instance, check_int
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.spectra import FactorSpectrum


def factor_spectra(engine: Engine, *, most_rows: int | None = None) -> tuple[FactorSpectrum, ...]:
    """Return the eigenvalues of all factors, in the order of ``engine.layers``.

    The eigenvalues are computed in float64 on the CPU, in cubic time, from the current averages.

    Args:
        engine: An engine with statistics.
        most_rows: Largest number of rows of a matrix whose eigenvalues are computed; None for no
            bound.

    Returns:
        A spectrum for each factor of each layer.

    Raises:
        InputError: The bound is not a positive whole number.
        NotReadyError: The engine has no statistics.
    """
    check_instance("engine", engine, Engine)
    if most_rows is not None:
        check_int("most_rows", most_rows, least=1)
    return tuple(engine.factors.spectra(most_rows))

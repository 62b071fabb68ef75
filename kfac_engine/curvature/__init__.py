"""Estimates the Kronecker-factored Fisher matrix by factors, blocks and refresh schedules.

The package has the name of the public function ``kfac_engine.curvature``. Python stores an imported
package under its name in the parent package, so that ``kfac_engine.curvature`` is this package. A
call of the package calls the function.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package as the function ``analysis.fisher_matrix.measure.curvature``."""

    def __call__(self, *args: Any, **options: Any) -> object:
        return self.__wrapped__(*args, **options)

    @property
    def __wrapped__(self) -> Any:
        """The function, whose signature and documentation tools show."""
        return import_module("kfac_engine.analysis.fisher_matrix.measure").curvature


sys.modules[__name__].__class__ = _CallablePackage

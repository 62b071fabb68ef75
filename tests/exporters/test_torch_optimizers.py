"""Optimizers against PyTorch's, run here, and the stored numbers against the same run."""

import pytest

from tests.exporters import torch_optimizers
from tests.training.test_torch_optimizers import STORED, difference, tolerance, trained


@pytest.mark.parametrize("name", torch_optimizers.MAKERS)
def test_an_optimizer_has_the_numbers_of_this_version_of_pytorch(name):
    given = {key: STORED[key] for key in ("weights", "inputs", "targets")}
    live = torch_optimizers.trained(name, given)
    assert difference(trained(name, given), live) < tolerance(name)
    assert difference(trained(name, given), STORED["runs"][name]) < tolerance(name)

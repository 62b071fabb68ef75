"""Every model of the corpus through both exporters of torch, against torch's own autograd."""

import pytest
import torch

import kfac_engine as ke
from tests.exporters.check import checked
from tests.exporters.corpus import FAMILIES
from tests.exporters.exporting import distinct_parameters, export

EXPORTED = [
    pytest.param(
        family,
        case,
        exporter,
        id=f"{case.name}-{exporter}",
        marks=[pytest.mark.quick] if place % 8 == 0 else [],
    )
    for family, cases in FAMILIES.items()
    for place, case in enumerate(cases)
    for exporter in case.exporters
]


@pytest.mark.parametrize(("family", "case", "exporter"), EXPORTED)
def test_gradients_equal_autograd_and_parameters_have_blocks(
    family, case, exporter, tmp_path, record_property
):
    torch.manual_seed(0)
    module = case.module().train(case.training)
    distinct_parameters(module)
    path = export(case, module, exporter, tmp_path)
    for name, value in (("family", family), ("exporter", exporter), ("case", case.name)):
        record_property(name, value)
    if exporter in case.refused:
        with pytest.raises(ke.KfacError, match=case.refused[exporter]) as refused:
            checked(case, module, path)
        record_property("outcome", "refused")
        record_property("reason", " ".join(str(refused.value).split()))
        return
    finding = checked(case, module, path)
    record_property("outcome", "passed")
    record_property("worst", finding.worst)
    assert not finding.wrong, "; ".join(finding.wrong)

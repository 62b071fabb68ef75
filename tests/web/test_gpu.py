"""Training files on WebGPU: those of ``provider="webgpu"`` agree with WASM, and others do not."""

import shutil

import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import PACKAGE, RUNTIME, write_digits
from tests.web.browser import CHROMIUM, SCRIPTS, SITE, driven, served

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SITE, reason="make test-web runs this test"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    # The fault is in a gradient, which the shortest step shows too.
    for provider, optimizer in (("any", "sgd"), ("webgpu", "kfac")):
        options = {"optimizer": optimizer, "provider": provider}
        ke.export_training(demo_model("cnn"), path=folder / provider, **options)
    write_digits(folder)
    shutil.copy(PACKAGE / "dist" / "kfac-engine.min.js", folder)
    shutil.copy(SCRIPTS / "gpu.html", folder / "index.html")
    (folder / "ort").symlink_to(RUNTIME / "dist")
    with served(folder) as address:
        result = driven("gpu.mjs", address, CHROMIUM, limit=1300)
    if not result["adapter"]:
        pytest.skip("this Chromium has no WebGPU adapter in software")
    return result


def test_files_for_webgpu_agree_with_wasm(found):
    assert "error" not in found
    assert len(found["webgpu"]) > 15
    assert max(found["webgpu"].values()) < 1e-4


def test_other_files_do_not_while_the_runtime_has_its_fault(found):
    # If this fails, onnxruntime-web is mended, and graph/webgpu.py may go.
    assert found["any"]["momentum/conv2.weight"] > 0.05

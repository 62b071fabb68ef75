"""The communicator of the page on several processes, over processes of ``torch.distributed``."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch.multiprocessing

import kfac_engine as ke
from tests.comparing import assert_near
from tests.exporters import torch_ranks
from tests.exporters.torch_ranks import COUNTS, DTYPES, PAGE, SIZE, batches, engine_of
from tests.pages import blocks

# Relative to the largest entry, in float64.
TOLERANCE = 1e-12
ROUNDING = {"float32": 1e-6, "float64": 1e-15}
SECONDS = 300
# The processes meet on this machine, whatever the name of its network.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        torch.multiprocessing.spawn(torch_ranks.start, (str(folder),), SIZE)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(SIZE)]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_of_the_page_do_what_the_protocol_says(ranks, dtype):
    edges = np.cumsum([0, *COUNTS])
    owned = [torch_ranks.numbers_of(rank, dtype) for rank in range(SIZE)]
    parts = [slice(*edges[rank : rank + 2]) for rank in range(SIZE)]
    total = np.sum(owned, axis=0, dtype=np.float64)
    gathered = np.concatenate([own[part] for own, part in zip(owned, parts, strict=True)])
    for results, part in zip(ranks, parts, strict=True):
        of_type = {name: array for name, array in results.items() if name.endswith(dtype)}
        assert {array.dtype for array in of_type.values()} == {np.dtype(dtype)}
        close = {"rtol": 0, "atol": ROUNDING[dtype] * np.abs(total).max()}
        summed = results[f"allreduce {dtype}"]
        np.testing.assert_allclose(summed, total, **close)
        np.testing.assert_array_equal(summed, ranks[0][f"allreduce {dtype}"])
        np.testing.assert_allclose(results[f"reduce_scatter {dtype}"], total[part], **close)
        np.testing.assert_array_equal(results[f"allgather {dtype}"], gathered)
        np.testing.assert_array_equal(results[f"broadcast {dtype}"], owned[2])


@pytest.mark.quick
@pytest.mark.parametrize("distribution", torch_ranks.DISTRIBUTIONS)
def test_steps_equal_those_of_one_process_with_the_same_bits_on_all_ranks(ranks, distribution):
    alone = engine_of(None)
    for step, batch in enumerate(batches()):
        expected, prefix = alone.step(*batch), f"{distribution} {step}"
        for results in ranks:
            assert results[f"{prefix} loss"] == pytest.approx(expected.loss, rel=TOLERANCE)
            for name, array in expected.natural_gradients.items():
                natural = results[f"{prefix} {name}"]
                assert_near(natural, array, TOLERANCE)
                np.testing.assert_array_equal(natural, ranks[0][f"{prefix} {name}"])
        natural = expected.natural_gradients
        alone.set_parameters({n: v - 0.05 * natural[n] for n, v in alone.parameters.items()})


@pytest.mark.quick
def test_an_error_of_one_rank_is_the_error_of_all_and_changes_no_state(ranks):
    first, _, third, _ = batches()
    alone = engine_of(None)
    alone.step(*first)
    expected = alone.step(*third).natural_gradients
    for results in ranks:
        assert str(results["message"]).startswith("NonFiniteError: rank 1 of 3 refused: ")
        assert results["message"] == ranks[0]["message"]
        for name, array in expected.items():
            assert_near(results[f"after {name}"], array, TOLERANCE)
            np.testing.assert_array_equal(results[f"after {name}"], ranks[0][f"after {name}"])


@pytest.mark.quick
@pytest.mark.parametrize("fails", [False, True], ids=["whole", "one rank fails"])
def test_program_of_the_page_runs_under_torchrun(tmp_path, fails):
    code = torch_ranks.code_of("class OverTorch") + torch_ranks.code_of("init_process_group")
    if fails:
        code = code.replace("    result =", "    assert ranks.rank != 1\n    result =")
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    ((_, line),) = [block for block in blocks(PAGE, "sh") if "torchrun" in block[1]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, *line.split()[1:]],
        cwd=tmp_path,
        env={**os.environ, **LOOPBACK, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if fails:
        assert done.returncode
        assert not (tmp_path / "trained.onnx").exists()
        return
    assert done.returncode == 0, done.stderr
    # Processes print side by side, so that the end of a line may come late.
    printed = re.findall(r"rank (\d): loss (\d\.\d\d)", done.stdout)
    assert sorted(rank for rank, _ in printed) == ["0", "1", "2"]
    assert len({loss for _, loss in printed}) == 1
    assert ke.Engine.from_onnx(tmp_path / "trained.onnx", loss="categorical").parameters

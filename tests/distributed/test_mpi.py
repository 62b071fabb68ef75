"""Several processes over MPI give the results of one, and a failure ends all of them.

The processes run ``mpi_program``. They write files, which the tests read.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_near
from tests.distributed.mpi_program import (
    CASES,
    DISTRIBUTIONS,
    ENDS,
    LENGTHS,
    PARTS,
    SAVED_AFTER,
    STEPS,
    array_of,
    options_of,
)
from tests.distributed.test_distributed_page import program_with
from tests.distributed.test_distributions import DTYPES, TOLERANCES, batches, model_of
from tests.nightly import nightly_but

ROOT = Path(__file__).resolve().parent.parent.parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"
SIZE = 3
SECONDS = 20  # for a job that a failure ends

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the job reads /proc"),
    pytest.mark.skipif(
        not MPIEXEC.exists(), reason=f"there is no MPI library: pip install mpich puts {MPIEXEC}"
    ),
]


def start(part, folder, size=SIZE, seconds=120):
    """Run a part of the program on some ranks; return the ended job."""
    words = ["-m", "tests.distributed.mpi_program", part, folder]
    return start_program(words, size, ROOT, seconds)


def start_program(words, size, folder, seconds):
    """Run Python with some words on some ranks in a folder; return the ended job."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [MPIEXEC, "-n", str(size), sys.executable, *words],
        cwd=folder, env={**os.environ, **one_thread, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def start_page(folder, size=2):
    """Run the programs of the page on some ranks; return the ended job."""
    file = folder / "program.py"
    file.write_text(program_with("KfacOptimizer"), encoding="utf-8")
    return start_program([file], size, folder, 120)


def results(folder, name, size=SIZE):
    """The arrays that each rank has written."""
    written = []
    for rank in range(size):
        with np.load(folder / f"{name} {rank}.npz") as arrays:
            written.append(dict(arrays))
    return written


def steps_of_one_process(case, folder):
    """Results of one process on the whole batches; its parameters go to files."""
    options = {key: v for key, v in options_of(case, "").items() if key != "distribution"}
    engine = ke.Engine.from_onnx(model_of(CASES[case][0]), **options)
    expected = {}
    for index, (inputs, targets) in enumerate(batches(CASES[case][0], STEPS)):
        np.savez(folder / f"{case} parameters {index}.npz", **engine.parameters)
        result = engine.step(inputs, targets)
        expected |= {f"{index} {key}": array for key, array in result.natural_gradients.items()}
        expected[f"{index} loss"] = np.array(result.loss)
        engine.set_parameters(
            {n: v - 0.05 * result.natural_gradients[n] for n, v in engine.parameters.items()}
        )
    return expected


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Folder of a job that has computed everything, and the results of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    expected = {case: steps_of_one_process(case, folder) for case in CASES}
    job = start("compute", folder)
    assert job.returncode == 0, job.stderr
    assert "error: " not in job.stderr
    return folder, expected


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_steps_of_processes_equal_those_of_one(case, distribution, computed):
    folder, expected = computed
    for arrays in results(folder, f"{case} {distribution}"):
        assert_arrays_near(arrays, expected[case], TOLERANCES[DTYPES[CASES[case][0]]])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_all_processes_have_the_same_bits(case, distribution, computed):
    first, *others = results(computed[0], f"{case} {distribution}")
    for arrays in others:
        assert {n: a.tobytes() for n, a in arrays.items()} == {
            n: a.tobytes() for n, a in first.items()
        }


def test_nan_on_one_process_is_the_same_error_on_all(computed):
    # The program compares the states before and after, and the next step.
    for rank in range(SIZE):
        for kind, message in json.loads((computed[0] / f"refused {rank}.json").read_text()):
            assert kind == "NonFiniteError"
            assert message.startswith("rank 1 of 3 refused: input 'input' ")


def test_other_options_on_one_process_are_an_error_of_all(computed):
    for rank in range(SIZE):
        text = (computed[0] / f"differing {rank}").read_text()
        assert text.startswith("rank 1 has other options than rank 0")


def test_a_signal_to_one_process_interrupts_the_run_of_all(computed):
    for rank in range(SIZE):
        assert json.loads((computed[0] / f"interrupted {rank}.json").read_text()) == [1, 2, 3]


def test_arrays_longer_than_a_message_arrive_in_pieces(computed):
    for rank, arrays in enumerate(results(computed[0], "collectives")):
        for dtype in ("float32", "float64"):
            for length in LENGTHS:
                every = [array_of(other, length, dtype) for other in range(SIZE)]
                np.testing.assert_array_equal(arrays[f"sum {length} {dtype}"], sum(every))
                np.testing.assert_array_equal(arrays[f"sent {length} {dtype}"], every[-1])
            counts = PARTS[SIZE]
            edges = np.cumsum([0, *counts])
            total = sum(array_of(other, sum(counts), dtype) for other in range(SIZE))
            part = total[slice(*edges[rank:][:2])]
            np.testing.assert_array_equal(arrays[f"part {dtype}"], part)
            parts = [array_of(other, count, dtype) for other, count in enumerate(counts)]
            np.testing.assert_array_equal(arrays[f"gathered {dtype}"], np.concatenate(parts))


def test_processes_that_end_one_after_the_other_end_the_job_without_an_error(computed):
    # The fixture compares the exit status; the last process has slept.
    assert len(list(computed[0].glob("end *"))) == SIZE


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, 2])
def test_fewer_processes_resume_a_state(size, computed):
    folder, expected = computed
    job = start("resume", folder, size)
    assert job.returncode == 0, job.stderr
    wanted = {
        key: array
        for key, array in expected["sampled"].items()
        if int(key[0]) >= SAVED_AFTER and not key.endswith("loss")
    }
    for saved in DISTRIBUTIONS:
        for arrays in results(folder, f"resumed {saved} {size}", size):
            assert_arrays_near(arrays, wanted, 1e-12)


@pytest.mark.nightly
def test_programs_of_the_page_run_on_two_processes(tmp_path):
    job = start_page(tmp_path)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "trained.onnx").exists()


def running(folder):
    """The processes of a job that have not ended."""
    for file in folder.glob("process *"):
        status = Path("/proc") / file.name.split()[1] / "status"
        try:
            if not re.search(r"^State:\s+[ZX]", status.read_text(), re.M):
                yield file.name
        except (FileNotFoundError, ProcessLookupError):
            continue


def end_of(part, folder):
    """Start a job that a failure ends; return it when no process is left."""
    began = time.monotonic()
    job = start(part, folder, seconds=SECONDS)
    assert len(list(folder.glob("process *"))) == SIZE, job.stderr
    while left := list(running(folder)):
        assert time.monotonic() < began + SECONDS, left
        time.sleep(0.05)
    return job


@pytest.mark.parametrize(
    "part", nightly_but(["raise_error", "leave"], [part for part in ENDS if part != "run_command"])
)
def test_a_process_that_fails_ends_the_job(part, tmp_path):
    job = end_of(part, tmp_path)
    assert job.returncode != 0
    explanation = {
        "kill": "Killed",
        "raise_error": "ValueError: no such file",
        "leave": "error: rank 1 of 3 has ended, but rank 0 waits for it; all ranks are ended.",
        "leave_late": "error: rank 1 of 3 has ended, but rank 0 waits for it",
    }[part]
    assert explanation in job.stdout + job.stderr


@pytest.mark.nightly
def test_a_command_prints_an_error_of_all_processes_once_and_ends_them_for_one_of_one(tmp_path):
    job = end_of("run_command", tmp_path)
    lines = [line for line in job.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: rank 1 of 3 refused: input 'image' contains NaN.",
        "error: rank 1: cannot use 'images.npy': no such file.",
    ]
    assert [(tmp_path / f"status {rank}").read_text() for rank in range(SIZE)] == ["2"] * SIZE
    assert job.returncode == 2

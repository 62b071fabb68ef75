"""Memory that may still be taken: of the machine, of containers, and by limits of the process."""

import os
import subprocess
import sys

import pytest

from kfac_engine.system import memory_limits
from kfac_engine.system.memory_limits import available_memory

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of a made-up system that is read instead of the real one."""
    monkeypatch.setattr(memory_limits, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_limits, "_CGROUPS", tmp_path / "cgroups")

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def group(folder, most, used, inactive=0, active=0):
    return {
        f"cgroups/{folder}memory.max": f"{most}\n",
        f"cgroups/{folder}memory.current": f"{used}\n",
        f"cgroups/{folder}memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\n",
    }


def group_1(folder, most, used, inactive=0):
    return {
        f"cgroups/memory/{folder}memory.limit_in_bytes": f"{most}\n",
        f"cgroups/memory/{folder}memory.usage_in_bytes": f"{used}\n",
        f"cgroups/memory/{folder}memory.stat": f"inactive_file 7\ntotal_inactive_file {inactive}\n",
    }


OWN, OWN_1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "5:cpu:/x\n4:memory:/a/b\n"}
SYSTEMS = {
    "no limits": (MACHINE, 8 * GIB),
    "version 2": (MACHINE | OWN | group("a/b/", 3 * GIB, GIB), 2 * GIB),
    "cache that can be taken back": (MACHINE | OWN | group("a/b/", 3 * GIB, 2 * GIB, GIB), 2 * GIB),
    "cache that was read twice": (
        MACHINE | OWN | group("a/b/", 3 * GIB, 3 * GIB, GIB // 2, GIB), GIB * 3 // 2),
    "a group around it": (
        MACHINE | OWN | group("a/b/", "max", GIB) | group("a/", 5 * GIB, GIB), 4 * GIB),
    "the tightest of several": (
        MACHINE | OWN | group("a/b/", 4 * GIB, GIB) | group("a/", 2 * GIB, GIB), GIB),
    "a container that is the root": (MACHINE | OWN | group("", 3 * GIB, GIB), 2 * GIB),
    "more used than allowed": (MACHINE | OWN | group("a/b/", GIB, 2 * GIB), 0),
    "a limit above the machine": (MACHINE | OWN | group("a/b/", 99 * GIB, GIB), 8 * GIB),
    "version 1": (MACHINE | OWN_1 | group_1("a/b/", 3 * GIB, GIB), 2 * GIB),
    "version 1, cache": (MACHINE | OWN_1 | group_1("a/b/", 3 * GIB, 2 * GIB, GIB), 2 * GIB),
    "version 1 without limit": (MACHINE | OWN_1 | group_1("a/b/", 2**63 - 4096, GIB), 8 * GIB),
    "version 1 in a container": (MACHINE | OWN_1 | group_1("", 3 * GIB, GIB), 2 * GIB),
    "a group that is not shown": (MACHINE | OWN, 8 * GIB),
}  # fmt: skip


@pytest.mark.parametrize(("files", "wanted"), SYSTEMS.values(), ids=SYSTEMS)
def test_available_memory_is_smallest_limit(files, wanted, system):
    system(files)
    assert available_memory() == wanted


def test_physical_memory_is_used_without_system_files(system):
    assert available_memory() >= GIB // 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep such limits")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_process_limits_bound_available_memory(limit):
    code = f"""
import resource
from kfac_engine.system.memory_limits import available_memory
resource.setrlimit(resource.{limit}, (1 << 30, 1 << 30))
found = available_memory()
assert 0 < found < 1 << 30, found
fits = bytearray(found - (32 << 20))  # Python and its allocator take some
try:
    bytearray(64 << 20)
except MemoryError:
    print("no more")
"""
    # Threads of OpenBLAS have stacks, which take address space on each core.
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "no more\n"


LIMITED = """
import resource, sys
import kfac_engine as ke
from kfac_engine.system import memory_limits
from tests import models

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
if sys.argv[1] == "more":  # than the limit leaves
    memory_limits._ROOM = memory_limits._ROOM_OF_ONE_CORE = 9 << 30
try:
    ke.Engine.from_onnx(models.mlp(), loss="normal", threads=1)
except ke.MemoryLimitError as error:
    print(error)
else:
    print("built")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep such limits")
@pytest.mark.parametrize(("need", "outcome"), [("more", "ulimit -v"), ("usual", "built")])
def test_too_little_address_space_for_threads_is_an_error(need, outcome):
    arguments = [sys.executable, "-c", LIMITED, need]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert outcome in done.stdout

"""The package works where Python lacks what only Linux, or only POSIX, has.

A process of its own takes these things away, imports all modules and runs commands. That is less
than the real system: what a library does there stays unseen.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.nightly import nightly_but

# What is loaded first: these libraries have their own ways on each system.
PRELUDE = """
import importlib, os, pathlib, signal, sys
import click, concurrent.futures, matplotlib.pyplot, numpy, onnx.reference, onnxruntime
import rich.console, rich.progress, rich.table, safetensors.numpy, scipy.linalg, scipy.optimize
import importlib.util, threadpoolctl, types

if importlib.util.find_spec("sklearn"):
    import sklearn.model_selection
# It keeps the system's own name, and the libc that it finds with calls that are removed below.
threadpoolctl.ThreadpoolController()
threadpoolctl.sys = types.SimpleNamespace(**vars(sys))
SYSTEM, MODULES, CALLS, SIGNALS = sys.argv[1:5]
for name in MODULES.split():
    sys.modules[name] = None
for name in CALLS.split():
    if hasattr(os, name):
        delattr(os, name)
for name in SIGNALS.split():
    if hasattr(signal, name):
        delattr(signal, name)
sys.platform = SYSTEM
is_file, read_text = pathlib.Path.is_file, pathlib.Path.read_text


def is_there(path):
    return not str(path).startswith(("/proc", "/sys")) and is_file(path)


def text(path, *arguments, **options):
    if not is_there(path):
        raise FileNotFoundError(2, "no such file", str(path))
    return read_text(path, *arguments, **options)


pathlib.Path.is_file, pathlib.Path.read_text = is_there, text
"""
IMPORT_ALL = """
PEERS = {"torch", "jax", "kfac_jax", "curvlinops", "laplace", "kronfluence", "cupy", "cupyx"}
for name in sys.argv[5:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as failure:
        assert failure.name.split(".")[0] in PEERS, (name, failure)
"""
RUN = """
import kfac_engine
from kfac_engine.__main__ import main
from kfac_engine.backend.threads import Workers, default_count
from kfac_engine.bench.resource_usage import used
from kfac_engine.system.memory_limits import available_memory
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes

assert default_count() >= 1
done = []
Workers(2).run([lambda i=i: done.append(i) for i in range(9)])
assert sorted(done) == list(range(9))
assert available_memory() > 0
forget_peak()
assert resident_bytes() == peak_bytes() == 0
assert used(lambda: None, runs=2).others_seconds == 0
data = kfac_engine.__path__[0] + os.sep + "data" + os.sep
with numpy.load(data + "digits.npz") as digits:
    numpy.savez("x.npz", image=digits["images"][:8, None].astype(numpy.float32) / 16)
    numpy.savez("y.npz", targets=digits["labels"][:8].astype(numpy.int64))
command = ["precondition", data + "mlp.onnx", "--inputs=x.npz", "--targets=y.npz", "-o", "out"]
for _ in range(2):  # the second time over files that are there
    assert main([*command, "--state=state"]) == 0
assert main(["inspect", data + "cnn.onnx"]) == 0
assert main(["doctor"]) == 0
assert not [name for name in os.listdir() if name.endswith(".tmp")]
"""
ROOT = Path(__file__).resolve().parent.parent
# Folders of packages that lie beside kfac_engine in the repository.
FOLDERS = {"kfac_engine": "", "bench": "kfac_engine.", "kernels": "kfac_engine."}
NAMES = [
    prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder, prefix in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.stem != "__main__"
    if path.parent.name != "sklearn" or find_spec("sklearn")
    if path.stem != "torch" or find_spec("torch")
]
LINUX_ONLY = "sched_getaffinity sched_setaffinity sched_getcpu posix_fadvise memfd_create O_TMPFILE"
SYSTEMS = {
    "macOS": ("darwin", "", LINUX_ONLY, ""),
    "Windows": (
        "win32",
        "fcntl grp posix pwd resource termios tty",
        f"{LINUX_ONLY} chown fchmod fchown fork geteuid getpgid getuid killpg lchown mkfifo mknod"
        " register_at_fork setsid statvfs sysconf sysconf_names uname wait waitpid O_NOFOLLOW"
        " O_DIRECTORY O_CLOEXEC O_NONBLOCK getloadavg",
        "SIGALRM SIGHUP SIGKILL SIGQUIT SIGUSR1 alarm pthread_kill pthread_sigmask setitimer",
    ),
}


@pytest.mark.parametrize("system", nightly_but(["Windows"], SYSTEMS))
def test_package_works_without_posix_modules(system, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + IMPORT_ALL + RUN, *SYSTEMS[system], *NAMES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

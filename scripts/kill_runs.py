"""Kill a training run at random moments, resume it each time, and compare it with a whole run.

    python scripts/kill_runs.py --moments 50 --seed 0

The run is a process of its own that trains the bundled network by K-FAC and writes a checkpoint
every two steps. SIGKILL ends it while it prepares the model, in a step, or in a checkpoint. The
script fails if a run does not resume, or if its parameters, records or metrics at the end differ
from those of a run without interruption.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Each attempt ends before its ninth step, so that no attempt reaches the end of the run.
STEPS_PER_MOMENT = 8
# A step takes some milliseconds, and the preparation of the model some tenths of a second.
STEP_SECONDS, PREPARATION_SECONDS = 0.02, 0.3
READY, STEP, DONE = "ready\n", "step\n", "done "


def train(folder: Path, steps: int) -> None:
    """Train or resume the run in a folder; print a digest of its results."""
    import kfac_engine as ke
    from kfac_engine.data import demo_model, digits

    def report_step(*_: object) -> None:
        print(STEP, end="", flush=True)
        sys.stdin.readline()  # The next step begins when the parent process has read this one.

    images, labels = digits()
    print(READY, end="", flush=True)
    history = ke.fit(
        demo_model("mlp"),
        (images[:512], labels[:512]),
        steps=steps,
        validation=(images[1536:], labels[1536:]),
        callbacks=[report_step],
        checkpoint=folder,
        checkpoint_every=2,
        resume=True,
    )
    digest = hashlib.sha256()
    for name, value in history.engine.parameters.items():
        digest.update(name.encode() + value.tobytes())
    for record in history.records:
        lasting = {name: v for name, v in record.items() if not name.startswith("seconds")}
        digest.update(json.dumps(lasting).encode())
    print(DONE + digest.hexdigest(), flush=True)


def started(folder: Path, steps: int) -> "subprocess.Popen[str]":
    """Return the process of a run that has loaded its modules."""
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(steps)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != READY:
        raise SystemExit(f"the run did not start; it printed {line!r}")
    return process


def finished(folder: Path, steps: int) -> str:
    """Return the digest of a run that is not killed."""
    last = started(folder, steps).communicate()[0].splitlines()[-1:]
    if not last or not last[0].startswith(DONE):
        raise SystemExit(f"the run in {folder} did not resume; it printed {last}")
    return last[0].removeprefix(DONE)


def kill_after(process: "subprocess.Popen[str]", steps: int, part: float) -> bool:
    """Kill a run after so many of its steps and a part of the next one; return whether it ran."""
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(steps):
        if process.stdout.readline() != STEP:
            break
        process.stdin.write("\n")
        process.stdin.flush()
    time.sleep(part * (STEP_SECONDS if steps else PREPARATION_SECONDS))
    process.kill()
    return DONE not in process.communicate()[0]


def kill_often(folder: Path, moments: int, seed: int) -> dict[str, object]:
    """Kill a run and compare it with a whole run; return the numbers of the comparison."""
    steps = STEPS_PER_MOMENT * moments
    expected = finished(folder / "whole", steps)
    generator = random.Random(seed)
    killed = 0
    for _ in range(moments):
        process = started(folder / "killed", steps)
        killed += kill_after(process, generator.randrange(STEPS_PER_MOMENT), generator.random())
    result = finished(folder / "killed", steps)
    return {
        "moments": moments,
        "killed before the end": killed,
        "steps": steps,
        "equal": result == expected,
        "digest": expected[:16],
    }


def main() -> None:
    """Run the comparison, or the run that it kills."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = kill_often(Path(folder), options.moments, options.seed)
    print(json.dumps(result))
    sys.exit(not result["equal"])


if __name__ == "__main__":
    main()

"""A run that SIGKILL ends at random moments has the results of a run without interruption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_runs.py"


@pytest.mark.nightly
def test_a_run_that_is_killed_often_ends_with_the_same_bits():
    command = [sys.executable, str(SCRIPT), "--moments", "6"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(output)
    assert result["equal"]
    assert result["killed before the end"] == 6

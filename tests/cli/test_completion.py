"""A shell completes commands, options and the names that options accept."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kfac_engine.__main__ import main
from kfac_engine.analysis.fisher_matrix.options import FISHERS
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.engine.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"

# Typed words, of which the last is incomplete, and all completions.
TYPED = {
    "command": (["ver"], {"verify"}),
    "commands": (["d"], {"demo", "derivatives", "differentiate", "doctor"}),
    "option": (["train", "--weight"], {"--weight-decay"}),
    "option of the engine": (["inspect", "--grad"], {"--gradient-dtype"}),
    "loss": (["train", "--loss", "cross"], {"cross_entropy"}),
    "loss of a gradient": (["differentiate", "--loss", "m"], {"mse", "multi_bernoulli"}),
    "optimizer": (["train", "--optimizer", "ad"], {"adam", "adamw"}),
    "structure": (["curvature", "--structure", "e"], {"ekfac"}),
    "Fisher matrix": (["curvature", "--fisher", ""], set(FISHERS)),
    "layers": (["curvature", "--layers", "l"], {"last"}),
    "saliency": (["prune", "--method", "ob"], {"obd", "obs"}),
    "mode": (["precondition", "--mode", ""], set(MODES)),
    "metric": (["train", "--metrics", ""], set(METRICS)),
    "unknown": (["train", "--optimizer", "lb"], set()),
}


@pytest.mark.parametrize(("words", "names"), TYPED.values(), ids=TYPED)
def test_shell_gets_the_names_that_begin_with_the_typed_text(words, names, capsys, monkeypatch):
    monkeypatch.setenv("_KFAC_ENGINE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["kfac-engine", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    answers = [line.partition(",") for line in capsys.readouterr().out.splitlines()]
    assert {name for kind, _, name in answers if kind == "plain"} == names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_program_writes_the_script_that_the_page_names(shell, capsys, monkeypatch):
    assert f"_KFAC_ENGINE_COMPLETE={shell}_source kfac-engine" in PAGE.read_text(encoding="utf-8")
    monkeypatch.setenv("_KFAC_ENGINE_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert f"_KFAC_ENGINE_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_line_of_the_page_makes_bash_complete_a_command(tmp_path):
    line = re.search(r"^eval .*bash_source.*$", PAGE.read_text(encoding="utf-8"), re.M)[0]
    program = tmp_path / "kfac-engine"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kfac_engine "$@"\n')
    program.chmod(0o755)
    script = f"""
        PATH="{tmp_path}:$PATH"
        {line}
        COMP_WORDS=(kfac-engine train --optimizer ad)
        COMP_CWORD=3
        $(complete -p kfac-engine | sed 's/.*-F \\([^ ]*\\) .*/\\1/') kfac-engine
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=Path.cwd(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["adam", "adamw"], done.stderr

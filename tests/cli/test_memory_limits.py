"""Too little memory to load the libraries: one message, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launches import REPOSITORY, finetune_tracebacks
from refusals import EXIT_CODES


def run_with_memory_limit(
    mebibytes: int | None, *arguments: str, python_path: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a command with a limit on its address space, as with `ulimit -v`."""
    limit = [] if mebibytes is None else ["prlimit", f"--as={mebibytes << 20}"]
    return subprocess.run(
        [*limit, sys.executable, "-m", "finetune", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(python_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )


requires_prlimit = pytest.mark.skipif(
    shutil.which("prlimit") is None,
    reason="no limit on the address space: the command prlimit is not installed",
)


@requires_prlimit
@pytest.mark.parametrize(
    "mebibytes",
    [200, *(pytest.param(n, marks=pytest.mark.faults) for n in (100, 150, 250, 300, 400))],
)
def test_too_little_memory_to_load_the_libraries(mebibytes: int, tmp_path: Path) -> None:
    """The largest library of torch has more than 400 MB in every build."""
    arguments = ("train", "recipes/quickstart.yaml", "--out", str(tmp_path / "run"), "--json")
    result = run_with_memory_limit(mebibytes, *arguments)
    error = json.loads(result.stdout)
    assert (result.returncode, error["code"]) == (EXIT_CODES["setup"], "setup.memory"), (
        result.stderr
    )
    banner, message = result.stderr.splitlines()  # the banner is printed before torch is loaded
    assert "output in" in banner
    assert "ulimit" in message
    assert not finetune_tracebacks(result.stderr)
    assert not (tmp_path / "run" / "run.json").exists()


@requires_prlimit
def test_torch_that_aborts_while_it_is_loaded(tmp_path: Path) -> None:
    """As one of its libraries does between two limits, which differ from build to build."""
    (tmp_path / "torch.py").write_text("import os\nos.abort()")
    result = run_with_memory_limit(1 << 20, "info", "vit_tiny", "--json", python_path=tmp_path)
    error = json.loads(result.stdout)
    assert (result.returncode, error["code"]) == (EXIT_CODES["setup"], "setup.memory")
    assert len(result.stderr.splitlines()) == 1, result.stderr


@requires_prlimit
@pytest.mark.faults
def test_control_with_enough_memory(tmp_path: Path) -> None:
    """The control: without the limit the command works."""
    arguments = ("train", "recipes/quickstart.yaml", "--dry-run", "--out", str(tmp_path / "run"))
    assert run_with_memory_limit(None, *arguments).returncode == 0

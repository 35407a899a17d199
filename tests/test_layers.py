"""tools/layers.py, which prints the packages and the imports between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.faults  # test_project.py checks the imports
def test_it_prints_every_arrow_and_finds_no_circle(repository: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "layers.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert "  __main__ -> cli" in lines
    assert lines[-2:] == ["cycle: none", "imports of a higher layer: none"]

"""The page of faults: a trial that fails is counted, wherever in its test it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.fixture
def broken(request):
    assert request.getfixturevalue("number") != 4, "before it began"

@pytest.mark.parametrize("number", range(5))
def test_trials(number, broken, fault):
    assert number != 1, "before it told"
    fault("a fault", "a promise", "as it came out")
    assert number != 2, "after it told"

def test_alone(fault):
    fault("another", "nothing")
"""


def test_a_trial_that_fails_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "faults_page", "--page", "page.md"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(here), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "| a fault | a promise | 2 of 5 | as it came out |" in page
    assert "| another | nothing | 1 of 1 |  |" in page
    assert page.count("- `test_it.py::test_trials[") == 3


def test_a_figure_outlives_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(figure):\n"
        "    figure('a question', 'less than 1', '2.5 | 3')\n"
        "    assert 2.5 < 1, 'too much'\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "faults_page", "--gpu-page", "page.md"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(here), "PATH": "/usr/bin:/bin", "FINETUNE_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "| a question | less than 1 | 0 of 1 | 2.5 \\| 3 |" in page
    assert "- `test_it.py::test_it`: AssertionError: too much" in page
    assert "abc1234" in page

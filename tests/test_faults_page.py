"""The page of faults: a trial that fails is counted, wherever in its test it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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

def test_figure(figure):
    figure("a question", "less than 1", "2.5 | 3")
    assert 2.5 < 1, "too much"
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page of faults and the page of figures that come out of TESTS."""
    place = tmp_path_factory.mktemp("pages")
    (place / "test_it.py").write_text(TESTS)
    options = ["-q", "-p", "faults_page", "--page", "page.md", "--gpu-page", "gpu.md"]
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=place,
        env={"PYTHONPATH": here, "PATH": "/usr/bin:/bin", "FINETUNE_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return (place / "page.md").read_text(), (place / "gpu.md").read_text()


def test_a_trial_that_fails_is_counted(pages: tuple[str, str]) -> None:
    page, _ = pages
    assert "| a fault | a promise | 2 of 5 | as it came out |" in page
    assert "| another | nothing | 1 of 1 |  |" in page
    assert page.count("- `test_it.py::test_trials[") == 3


def test_a_figure_outlives_its_test(pages: tuple[str, str]) -> None:
    _, page = pages
    assert "| a question | less than 1 | 0 of 1 | 2.5 \\| 3 |" in page
    assert "- `test_it.py::test_figure`: AssertionError: too much" in page
    assert "abc1234" in page

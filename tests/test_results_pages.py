"""The results pages count a failed trial wherever in its test it failed."""

from __future__ import annotations

import os

import pytest
from forked_runs import run_in_child

TESTS = """
import pytest

@pytest.fixture
def broken(request):
    assert request.getfixturevalue("number") != 4, "before the test"

@pytest.mark.parametrize("number", range(5))
def test_trials(number, broken, fault):
    assert number != 1, "before the row"
    fault("a fault", "a promise", "a result")
    assert number != 2, "after the row"

def test_alone(fault):
    fault("another", "nothing")

def test_figure(figure):
    figure("a question", "less than 1", "2.5 | 3")
    assert 2.5 < 1, "too much"
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Run TESTS. Returns: the page of faults and the page of figures."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "test_it.py").write_text(TESTS)
    options = [
        "-q",
        "-p",
        "results_pages",
        "-p",
        "no:cacheprovider",
        "--page",
        "page.md",
        "--gpu-page",
        "gpu.md",
    ]

    def run_pytest() -> None:
        os.environ.clear()
        os.environ.update({"PATH": "/usr/bin:/bin", "FINETUNE_COMMIT": "abc1234"})
        os.chdir(folder)
        raise SystemExit(pytest.main(options))

    result = run_in_child(run_pytest)
    assert result.exit_code == 1, result.output
    return (folder / "page.md").read_text(), (folder / "gpu.md").read_text()


def test_failed_trials_are_counted(pages: tuple[str, str]) -> None:
    page, _ = pages
    assert "| a fault | a promise | 2 of 5 | a result |" in page
    assert "| another | nothing | 1 of 1 |  |" in page
    assert page.count("- `test_it.py::test_trials[") == 3


def test_a_failed_test_keeps_its_figure(pages: tuple[str, str]) -> None:
    _, page = pages
    assert "| a question | less than 1 | 0 of 1 | 2.5 \\| 3 |" in page
    assert "- `test_it.py::test_figure`: AssertionError: too much" in page
    assert "abc1234" in page

"""Every test here has the marker `faults`; and the finished run that several of them start from."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of this folder out of the default suite."""
    item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished, uninterrupted run; tests that change it must copy it first."""
    from forked_runs import SMALL_OVERRIDES, disable_report_and_plots, tiny_recipe

    from finetune.training.train import train

    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        train(tiny_recipe(*SMALL_OVERRIDES), out)
    return out

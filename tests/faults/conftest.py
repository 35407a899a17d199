"""The run that several files of faults start from: whole, and without pictures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def whole(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has stopped."""
    from faults_runs import SMALL, tiny

    from finetune.training.train import train

    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(*SMALL), out)
    return out

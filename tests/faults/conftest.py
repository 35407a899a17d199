"""The run that several files of faults start from: whole, and without pictures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has stopped; whoever changes it changes a copy."""
    from faults_runs import SMALL, tiny, without_pictures

    from finetune.training.train import train

    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        train(tiny(*SMALL), out)
    return out

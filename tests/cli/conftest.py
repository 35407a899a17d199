"""A working directory with what the commands name; the functions behind them are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_files import write_plan
from recipe_texts import BASE_RECIPE


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe, a plan, an image and three runs."""
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path)
    Path("mine.yaml").write_text(BASE_RECIPE)
    Path("a.png").touch()
    for run in ("runs/x", "a", "b"):
        Path(run).mkdir(parents=True)
        Path(run, "recipe.yaml").write_text(BASE_RECIPE)
        Path(run, "run.json").write_text('{"status": "done"}')
    return tmp_path

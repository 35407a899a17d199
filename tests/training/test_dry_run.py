"""`train --dry-run`: every image that the run will read is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_texts import tiny_text
from refusals import refused
from samples import make_folder, make_parquet

from finetune.recipe.load import Recipe, parse_recipe
from finetune.training.train import train


def recipe(source: str, data: str = "eval: resize") -> Recipe:
    return parse_recipe(tiny_text(f"{data}, batch_size: 4", source=source))


@pytest.fixture
def broken(tmp_path: Path) -> list[Path]:
    """One image of each split that cannot be decoded."""
    names = []
    for split in ("train", "val", "test"):
        make_folder(tmp_path / "data" / split, {"ant": 5, "bee": 5})
        image = sorted((tmp_path / "data" / split / "bee").iterdir())[3]
        image.write_bytes(image.read_bytes()[:30])
        names.append(image)
    return names


def test_broken_images_of_every_split_are_named(tmp_path: Path, broken: list[Path]) -> None:
    source, out = f"folder:{tmp_path / 'data'}", tmp_path / "run"
    places = [str(path.relative_to(tmp_path / "data")) for path in broken]
    with refused("data.unreadable", *places):
        train(recipe(source), out, dry_run=True)
    plan = train(recipe(source, "eval: resize, unreadable: quarantine"), out, dry_run=True)
    assert plan["images_read"] == 9
    assert not out.exists()


def test_what_the_recipe_leaves_out_is_not_read(tmp_path: Path, broken: list[Path]) -> None:
    for path in broken:
        make_folder(path.parents[1], {"cat": 2})
    source = f"folder:{tmp_path / 'data'}"
    plan = train(recipe(source, "classes: [ant, cat]"), tmp_path / "run", dry_run=True)
    assert plan["images_read"] == 7


def test_streamed_images_stay_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [{"bytes": b"", "path": None}] * 8
    make_parquet(tmp_path / "train.parquet", [0, 1] * 4)
    make_parquet(tmp_path / "test.parquet", [0, 1] * 4, images=images)
    data = "streaming: true, keep: none, val_fraction: 0"
    train(recipe(f"parquet:{tmp_path}", data), tmp_path / "run", dry_run=True)
    assert "streamed images are not read now" in capsys.readouterr().err

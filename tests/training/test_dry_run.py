"""`train --dry-run` reads every image that the run will read."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import write_image_folder, write_parquet

from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.train import train


def make_recipe(source: str, data: str = "eval: resize") -> Recipe:
    return parse_recipe(tiny_recipe_text(f"{data}, batch_size: 4", source=source))


@pytest.fixture
def broken_images(tmp_path: Path) -> list[Path]:
    """Create a dataset with one undecodable image per split. Returns: their paths."""
    paths: list[Path] = []
    for split in ("train", "val", "test"):
        write_image_folder(tmp_path / "data" / split, {"ant": 5, "bee": 5})
        image = sorted((tmp_path / "data" / split / "bee").iterdir())[3]
        image.write_bytes(image.read_bytes()[:30])
        paths.append(image)
    return paths


def test_broken_images_of_every_split_are_reported(
    tmp_path: Path, broken_images: list[Path]
) -> None:
    source, out = f"folder:{tmp_path / 'data'}", tmp_path / "run"
    relative_paths = [str(path.relative_to(tmp_path / "data")) for path in broken_images]
    with refused("data.unreadable", *relative_paths):
        train(make_recipe(source), out, dry_run=True)
    plan = train(make_recipe(source, "eval: resize, unreadable: quarantine"), out, dry_run=True)
    assert plan["images_read"] == 9
    assert not out.exists()


def test_images_of_excluded_classes_are_not_read(tmp_path: Path, broken_images: list[Path]) -> None:
    for path in broken_images:
        write_image_folder(path.parents[1], {"cat": 2})
    source = f"folder:{tmp_path / 'data'}"
    plan = train(make_recipe(source, "classes: [ant, cat]"), tmp_path / "run", dry_run=True)
    assert plan["images_read"] == 7


def test_streamed_images_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [{"bytes": b"", "path": None}] * 8
    write_parquet(tmp_path / "train.parquet", [0, 1] * 4)
    write_parquet(tmp_path / "test.parquet", [0, 1] * 4, images=images)
    data = "streaming: true, keep: none, val_fraction: 0"
    train(make_recipe(f"parquet:{tmp_path}", data), tmp_path / "run", dry_run=True)
    assert "streamed images are not checked now" in capsys.readouterr().err

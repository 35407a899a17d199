"""The cache's folder: a file appears as a whole or not at all, and the oldest make room."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

import pytest

from finetune.files import cache_folder, leftovers, make_room, published

KEY = hashlib.sha256(b"one").hexdigest()
NAMES = re.compile(r"[a-z]\.bin")


def test_each_kind_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert cache_folder("a") == tmp_path / "a"
    assert cache_folder("b") == tmp_path / "b"


def test_a_file_appears_with_its_name_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with published(folder, KEY) as (temporary, name):
        temporary.write_text("whole")
        assert leftovers(folder, KEY) == [temporary]
        name.append("a.bin")
        assert not (folder / "a.bin").exists()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    with published(folder, KEY) as (temporary, name):
        temporary.write_text("no name")

    def broken() -> None:
        with published(folder, KEY) as (temporary, name):
            temporary.write_text("half")
            name.append("b.bin")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]


def test_the_oldest_go_first_and_strangers_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("c.bin", "b.bin", "a.bin", "mine.txt")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - 100 * age,) * 2)
    old, young = (tmp_path / f".{KEY}.{number}.tmp" for number in (1, 2))
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    make_room(tmp_path, 200, keep="a.bin", names=NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "c.bin", "mine.txt", young.name}

"""What files, folders, patterns and a list on standard input name; nothing is opened."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.commands import predict_io as listing
from finetune.commands.predict_io import find_files, list_files
from finetune.errors import DataError, RecipeError


def give(monkeypatch: pytest.MonkeyPatch, listed: bytes) -> None:
    monkeypatch.setattr(listing.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(listed)))


def test_files_folders_patterns_and_what_is_not_there(tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "star[1].png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    here = str(tmp_path)

    def names(*paths: str) -> list[str]:
        found = find_files(f"{here}/{path}" for path in paths)
        assert all(error is None for _, error in found)
        return [os.path.relpath(path, here) for path, _ in found]

    assert names("b.png", "a.png", "b.png") == ["b.png", "a.png", "b.png"]
    assert names("[ab].png") == ["a.png", "b.png"]
    assert names("**/c.png") == ["sub/c.png"]
    assert names("star[1].png") == ["star[1].png"], "an existing name is no pattern"
    assert names("sub") == ["sub/c.png"]
    assert find_files([f"{here}/none-*.png"]) == [
        (f"{here}/none-*.png", "no file matches this pattern")
    ]
    assert find_files([tmp_path / "bare"]) == [(f"{here}/bare", "a folder without images")]
    assert find_files([f"{here}/gone.png"]) == [(f"{here}/gone.png", None)]
    assert find_files([]) == []


def test_a_list_on_standard_input_stands_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, b"b.png\r\n\na b.png\n")
    assert [path for path, _ in list_files(["a.png", "-", "c.png"])] == [
        *("a.png", "b.png", "a b.png", "c.png")
    ]


def test_between_zero_bytes_a_name_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"two\nlines.png", b" spaces ", b"caf\xe9.png", b"-", b"end\n", b"\r"]
    give(monkeypatch, b"\0".join(names) + b"\0")
    assert [os.fsencode(path) for path, _ in list_files(["-"])] == names


def test_a_listed_name_is_no_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a1.png").touch()
    pattern = f"{tmp_path}/a[1].png"
    assert find_files([pattern]) == [(f"{tmp_path}/a1.png", None)]
    give(monkeypatch, os.fsencode(pattern))
    assert list_files(["-"]) == [(pattern, None)]


def test_listed_folders_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    give(monkeypatch, os.fsencode(tmp_path))
    assert list_files(["-"]) == [(f"{tmp_path}/a.png", None)]


@pytest.mark.parametrize("given", [b"", b"\n\r\n", b"\0"])
def test_an_empty_list_says_so(given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, given)
    with pytest.raises(DataError, match="-: the list on standard input is empty"):
        list_files(["-"])


def test_standard_input_is_read_once() -> None:
    with pytest.raises(RecipeError, match="name it once"):
        list_files(["-", "a.png", "-"])

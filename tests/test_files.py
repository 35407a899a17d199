"""Files: whole or not at all, and the system's refusals in words."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from finetune.errors import SetupError
from finetune.files import disk_errors, make_folder, sha256_of, write_atomically


def test_write_atomically_keeps_the_old_text_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    write_atomically(path, json.dumps({"a": 1}))
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_refusals_are_one_message_even_where_nothing_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SetupError, match=r"cannot be written|the disk is full") as caught:
        write_atomically(tmp_path / "a.json", "{}")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EISDIR])
def test_whatever_else_the_system_says_of_the_place_is_told_too(tmp_path: Path, code: int) -> None:
    words = rf"a: cannot be written \({os.strerror(code)}\); choose another --profile"
    with (
        pytest.raises(SetupError, match=words),
        disk_errors(tmp_path / "a", needed=1, option="--profile"),
    ):
        raise OSError(code, "odd")


@pytest.mark.parametrize("error", [OSError("odd"), ValueError("odd"), KeyError("odd")])
def test_errors_that_are_not_the_systems_stay_what_they_are(
    tmp_path: Path, error: Exception
) -> None:
    for path in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(type(error), match="odd"), disk_errors(path, needed=1):
            raise error


@pytest.mark.parametrize("name", ["u/" + "y" * 300, "loop/x", "u/\0x", "u/\ud800"])
def test_a_path_that_cannot_be_is_refused_as_a_folder_and_as_a_file(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "u").mkdir()
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    for write in (
        lambda path: make_folder(path, option="--out"),
        lambda path: write_atomically(path, "{}"),
    ):
        with pytest.raises(SetupError, match=r"\(.+\); choose another --out") as caught:
            write(tmp_path / name)
        assert str(caught.value).isprintable()


def test_a_full_disk_that_safetensors_met_is_one_too(tmp_path: Path) -> None:
    refused = SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(SetupError, match="the disk is full"), disk_errors(tmp_path, needed=1):
        raise refused
    with pytest.raises(SafetensorError, match="odd"), disk_errors(tmp_path, needed=1):
        raise SafetensorError("odd")


def test_bytes_and_their_hash(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    write_atomically(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == content
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_is_made_or_refused_before_any_work(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", option="--out")
    make_folder(tmp_path / "a" / "b", option="--out")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SetupError, match=r"--out: .* is not a folder"):
            make_folder(wrong, option="--out")

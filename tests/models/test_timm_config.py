"""models/weights/timm_config.py: valid and invalid values of a config.json."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import timm
from networks import write_timm_folder
from refusals import refused

from finetune.files import MAX_JSON_BYTES
from finetune.models.weights.resolve import resolve_weights
from finetune.models.weights.timm_config import (
    CONTROL_ARGS,
    PretrainedConfig,
    Weights,
    read_timm_config,
)

WRONG_VALUES: dict[tuple[str | None, str], list[Any]] = {
    (None, "pretrained_cfg"): ["here"],
    (None, "num_classes"): ["ten", 2.5, -1, True],
    (None, "label_names"): ["ant", ["ant"], [1, 2, 3], {"0": "ant", "1": "bee"}],
    (None, "calibration"): [1.5],
    (None, "model_args"): [[1]],
    ("model_args", "img_size"): ["large", 10**6, 0, True, [32]],
    ("model_args", "embed_dim"): [10**9, [10**9]],
    ("model_args", "in_chans"): [4],
    ("pretrained_cfg", "mean"): [0.5, [0.5, 0.5], [float("nan")] * 3, [True] * 3],
    ("pretrained_cfg", "std"): [[0.5, "0.5", 0.5], [0, 0, 0]],
    ("pretrained_cfg", "crop_pct"): ["all", 0, 2, float("inf")],
    ("pretrained_cfg", "input_size"): [[3, 32.5, 32], [1, 32, 32], [32, 32], [3, -32, 32]],
    ("pretrained_cfg", "interpolation"): ["magic"],
    ("pretrained_cfg", "crop_mode"): ["magic"],
    ("pretrained_cfg", "label_offset"): ["one"],
    ("pretrained_cfg", "classifier"): [1, ["head", 1]],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


def edit_config(folder: Path, section: str | None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = config if section is None else config[section]
    target.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def read_config(folder: Path) -> Weights:
    return read_timm_config(folder / "config.json", "net")


class TestConfig:
    def test_does_not_read_a_huge_file(self, folder: Path) -> None:
        os.truncate(folder / "config.json", 2**31)  # sparse
        tracemalloc.start()
        try:
            with refused("weights.wrong_format", "net: config.json", "2,147,483,648 bytes"):
                read_config(folder)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 32 * 2**20

    @pytest.mark.parametrize("make_special_file", [os.mkdir, os.mkfifo])
    def test_rejects_folders_and_pipes(self, tmp_path: Path, make_special_file: Any) -> None:
        make_special_file(tmp_path / "config.json")
        with refused("weights.wrong_format", "net: config.json"):
            read_config(tmp_path)

    def test_size_limit(self, folder: Path) -> None:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.ljust(MAX_JSON_BYTES))
        assert read_config(folder).architecture
        (folder / "config.json").write_text(text.ljust(MAX_JSON_BYTES + 1))
        with refused("weights.wrong_format", "8,388,608"):
            read_config(folder)

    @pytest.mark.parametrize("key", sorted({*CONTROL_ARGS} - {"num_classes"}))
    def test_rejects_arguments_that_control_timm(self, folder: Path, key: str) -> None:
        edit_config(folder, "model_args", **{key: "/somewhere/evil.pth"})
        code = "weights.wrong_config" if key == "in_chans" else "weights.unsafe"
        with refused(code, f"net: config.json: model_args.{key}") as caught:
            read_config(folder)
        assert "weights_only" not in str(caught.value)

    def test_ignores_other_fields_that_timm_writes(self, folder: Path) -> None:
        args_before = read_config(folder).model_args
        edit_config(folder, "model_args", num_classes=7, in_chans=3)
        edit_config(
            folder, "pretrained_cfg", url="http://host/x.pth", file="/x.pth", hf_hub_id="a/b"
        )
        weights = read_config(folder)
        assert weights.model_args == args_before
        assert not {"url", "file", "hf_hub_id"} & weights.config.keys()

    @pytest.mark.parametrize(
        "section, key, value",
        [(section, key, v) for (section, key), values in WRONG_VALUES.items() for v in values],
        ids=str,
    )
    def test_rejects_invalid_values(
        self, folder: Path, section: str | None, key: str, value: Any
    ) -> None:
        edit_config(folder, section, **{key: value})
        with refused("weights.wrong_config", "net: config.json: ", key):
            read_config(folder)

    @pytest.mark.parametrize(
        "content, code, expected",
        [
            (b"", "damaged", "not JSON"),
            (b'{"architecture": "vit_', "damaged", "not JSON"),
            (b"\xff\xfe{}", "damaged", "not JSON"),
            (b"[" * 200_000, "damaged", "not JSON"),
            (b'{"architecture": ' + b"9" * 10**6 + b"}", "damaged", "not JSON"),
            (b"[]", "wrong_format", "architecture"),
            (b"{}", "wrong_format", "architecture"),
            (b'{"architectures": ["ViTModel"]}', "wrong_format", "transformers"),
            (b'{"architecture": "vit_tinny"}', "unknown_name", "'vit_tinny'"),
            (b'{"architecture": [1]}', "unknown_name", "'[1]'"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_rejects_other_content(
        self, folder: Path, content: bytes, code: str, expected: str
    ) -> None:
        (folder / "config.json").write_bytes(content)
        with refused(f"weights.{code}", "net: ", expected):
            read_config(folder)

    def test_removes_the_tag_from_the_architecture(self, folder: Path) -> None:
        edit_config(folder, None, architecture="vit_tiny_patch16_224.nothing")
        assert read_config(folder).architecture == "vit_tiny_patch16_224"

    def test_accepts_the_configurations_of_timm(self) -> None:
        for name in timm.list_pretrained():
            PretrainedConfig.model_validate(vars(timm.get_pretrained_cfg(name)))


class TestTemperature:
    def test_is_loaded_with_the_weights(self, folder: Path) -> None:
        assert resolve_weights(str(folder)).temperature is None
        edit_config(folder, None, calibration={"temperature": 2, "split": "val"})
        assert resolve_weights(str(folder)).temperature == 2.0
        assert resolve_weights(str(folder / "model.safetensors")).temperature == 2.0

    @pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "1.5", None, True, [1]])
    def test_rejects_invalid_values(self, folder: Path, value: Any) -> None:
        edit_config(folder, None, calibration={"temperature": value, "split": "val"})
        with refused("weights.wrong_config", "calibration.temperature: "):
            read_config(folder)

    @pytest.mark.parametrize("split", [None, "", 3])
    def test_requires_the_split_it_was_fitted_on(self, folder: Path, split: Any) -> None:
        edit_config(folder, None, calibration={"temperature": 1.5, "split": split})
        with refused("weights.wrong_config", "calibration.split: "):
            read_config(folder)


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5, 2, 0.5], [0.5, float("nan"), 0], ["0.5"], 1])
def test_rejects_invalid_thresholds(folder: Path, values: Any) -> None:
    calibration = {"thresholds": [0.5, 0, 1], "split": "val"}
    edit_config(folder, None, problem_type="multi_label_classification", calibration=calibration)
    assert read_config(folder).thresholds == [0.5, 0.0, 1.0]
    edit_config(folder, None, calibration={"thresholds": values, "split": "val"})
    with refused("weights.wrong_config", "calibration.thresholds"):
        read_config(folder)

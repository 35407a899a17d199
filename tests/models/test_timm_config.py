"""models/weights/timm_config.py: valid values of a config.json, and each kind of wrong ones."""

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

from finetune.models.weights.resolve import resolve_weights
from finetune.models.weights.timm_config import (
    CONFIG_CHECKS,
    CONTROL_ARGS,
    MAX_JSON_BYTES,
    Weights,
    read_timm_config,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


def edit(folder: Path, section: str | None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = config if section is None else config[section]
    target.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> Weights:
    return read_timm_config(folder / "config.json", "net")


class TestConfig:
    def test_a_file_without_end_is_not_read_to_its_end(self, folder: Path) -> None:
        os.truncate(folder / "config.json", 2**31)  # sparse
        tracemalloc.start()
        try:
            with refused("weights.wrong_format", "net: config.json", "2,147,483,648 bytes"):
                read(folder)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 32 * 2**20

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
    def test_what_is_no_file_is_not_waited_for(self, tmp_path: Path, make: Any) -> None:
        make(tmp_path / "config.json")
        with refused("weights.wrong_format", "net: config.json"):
            read(tmp_path)

    def test_as_much_as_is_allowed_is_read(self, folder: Path) -> None:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.ljust(MAX_JSON_BYTES))
        assert read(folder).architecture
        (folder / "config.json").write_text(text.ljust(MAX_JSON_BYTES + 1))
        with refused("weights.wrong_format", "8,388,608"):
            read(folder)

    @pytest.mark.parametrize("key", sorted({*CONTROL_ARGS} - {"num_classes"}))
    def test_nothing_steers_timms_loader(self, folder: Path, key: str) -> None:
        edit(folder, "model_args", **{key: "/somewhere/evil.pth"})
        code = "weights.wrong_config" if key == "in_chans" else "weights.unsafe"
        with refused(code, f"net: config.json: model_args.{key}") as caught:
            read(folder)
        assert "weights_only" not in str(caught.value)

    def test_what_timm_writes_there_is_dropped(self, folder: Path) -> None:
        before = read(folder).model_args
        edit(folder, "model_args", num_classes=7, in_chans=3)
        edit(folder, "pretrained_cfg", url="http://host/x.pth", file="/x.pth", hf_hub_id="a/b")
        weights = read(folder)
        assert weights.model_args == before
        assert not {"url", "file", "hf_hub_id"} & weights.config.keys()

    @pytest.mark.parametrize(
        "section, key, value",
        [
            # more of them are in tests/faults/test_bad_weights.py
            ("pretrained_cfg", "mean", 0.5),
            ("pretrained_cfg", "std", [0.5, "0.5", 0.5]),
            ("pretrained_cfg", "crop_pct", "all"),
            ("pretrained_cfg", "crop_pct", float("inf")),
            ("pretrained_cfg", "input_size", [3, 32.5, 32]),
            ("pretrained_cfg", "input_size", [1, 32, 32]),
            ("pretrained_cfg", "label_offset", "one"),
            (None, "pretrained_cfg", "here"),
            (None, "num_classes", "ten"),
            (None, "label_names", "ant"),
            (None, "label_names", {"0": "ant", "1": "bee"}),
            ("model_args", "img_size", "large"),
            (None, "calibration", 1.5),
        ],
    )
    def test_values_of_no_use(
        self, folder: Path, section: str | None, key: str, value: Any
    ) -> None:
        edit(folder, section, **{key: value})
        with refused("weights.wrong_config", "net: config.json: ", f"{key}: "):
            read(folder)

    def test_a_tag_belongs_to_no_architecture(self, folder: Path) -> None:
        edit(folder, None, architecture="vit_tiny_patch16_224.nothing")
        assert read(folder).architecture == "vit_tiny_patch16_224"

    @pytest.mark.parametrize("name", timm.list_pretrained()[::40])
    def test_timms_own_configurations_pass(self, name: str) -> None:
        entry = vars(timm.get_pretrained_cfg(name))
        checked = {key for key in CONFIG_CHECKS if entry[key] is not None}
        assert checked
        assert all(CONFIG_CHECKS[key][1](entry[key]) for key in checked)


class TestTemperature:
    def test_it_comes_with_the_weights(self, folder: Path) -> None:
        assert resolve_weights(str(folder)).temperature is None
        edit(folder, None, calibration={"temperature": 2, "split": "val"})
        assert resolve_weights(str(folder)).temperature == 2.0
        assert resolve_weights(str(folder / "model.safetensors")).temperature == 2.0

    @pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "1.5", None, True, [1]])
    def test_values_of_no_use(self, folder: Path, value: Any) -> None:
        edit(folder, None, calibration={"temperature": value, "split": "val"})
        with refused("weights.wrong_config", "calibration.temperature: "):
            read(folder)

    @pytest.mark.parametrize("split", [None, "", 3])
    def test_it_says_where_it_was_fitted(self, folder: Path, split: Any) -> None:
        edit(folder, None, calibration={"temperature": 1.5, "split": split})
        with refused("weights.wrong_config", "calibration.split: "):
            read(folder)

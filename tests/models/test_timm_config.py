"""timm_config.py: what a config.json may say, and each way in which it can be wrong."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import timm
from networks import message, timm_folder

from finetune.errors import WeightsError
from finetune.models.weights import timm_config as config_module
from finetune.models.weights.resolve import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return timm_folder(tmp_path / "net")


def edit(folder: Path, section: str | None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = config if section is None else config[section]
    target.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


class TestConfig:
    def test_a_file_without_end_is_not_read_to_its_end(self, folder: Path) -> None:
        os.truncate(folder / "config.json", 2**31)  # sparse
        tracemalloc.start()
        try:
            assert "config.json describes no network (2,147,483,648 bytes" in message(folder)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 32 * 2**20

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
    def test_what_is_no_file_is_not_waited_for(self, tmp_path: Path, make: Any) -> None:
        make(tmp_path / "config.json")
        with pytest.raises(WeightsError, match=r"net: config\.json .*not a file"):
            config_module.read_config(tmp_path / "config.json", "net")

    def test_as_much_as_is_allowed_is_read(self, folder: Path) -> None:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.ljust(config_module.LARGEST_JSON))
        assert resolve(str(folder)).architecture
        (folder / "config.json").write_text(text.ljust(config_module.LARGEST_JSON + 1))
        assert "more than the 8,388,608 that are read" in message(folder)

    @pytest.mark.parametrize("key", sorted({*config_module.CONTROL_ARGS} - {"num_classes"}))
    def test_nothing_steers_timms_loader(self, folder: Path, key: str) -> None:
        edit(folder, "model_args", **{key: "/somewhere/evil.pth"})
        text = message(folder)
        assert f"config.json: model_args.{key}" in text
        assert "weights_only" not in text

    def test_what_timm_writes_there_is_dropped(self, folder: Path) -> None:
        before = resolve(str(folder)).model_args
        edit(folder, "model_args", num_classes=7, in_chans=3)
        edit(folder, "pretrained_cfg", url="http://host/x.pth", file="/x.pth", hf_hub_id="a/b")
        found = resolve(str(folder))
        assert found.model_args == before
        assert not {"url", "file", "hf_hub_id"} & found.config.keys()

    @pytest.mark.parametrize(
        "key, value",
        [
            ("mean", [0.5, 0.5]),
            ("mean", [0.5, 0.5, float("nan")]),
            ("mean", 0.5),
            ("std", [0.5, 0.5, 0]),
            ("std", [0.5, "0.5", 0.5]),
            ("crop_pct", 0),
            ("crop_pct", "all"),
            ("crop_pct", float("inf")),
            ("input_size", [3, 32]),
            ("input_size", [3, 32.5, 32]),
            ("input_size", [1, 32, 32]),
            ("input_size", [3, 0, 32]),
            ("label_offset", "one"),
            ("classifier", 5),
        ],
    )
    def test_values_of_no_use(self, folder: Path, key: str, value: Any) -> None:
        edit(folder, "pretrained_cfg", **{key: value})
        assert f"config.json: {key}: " in message(folder)

    @pytest.mark.parametrize(
        "key, value",
        [
            ("model_args", [1]),
            ("pretrained_cfg", "here"),
            ("num_classes", "ten"),
            ("num_classes", -1),
            ("label_names", "ant"),
            ("label_names", [1, 2, 3]),
            ("label_names", ["ant", "bee"]),
            ("label_names", {"0": "ant", "1": "bee"}),
            ("model_args", {"img_size": "large"}),
        ],
    )
    def test_sections_of_no_use(self, folder: Path, key: str, value: Any) -> None:
        edit(folder, None, **{key: value})
        assert f"config.json: {key}" in message(folder)

    def test_a_tag_belongs_to_no_architecture(self, folder: Path) -> None:
        edit(folder, None, architecture="vit_tiny_patch16_224.nothing")
        assert resolve(str(folder)).architecture == "vit_tiny_patch16_224"
        edit(folder, None, architecture=["vit_tiny_patch16_224"])
        assert "does not know" in message(folder)

    @pytest.mark.parametrize("name", timm.list_pretrained()[::40])
    def test_timms_own_configurations_pass(self, name: str) -> None:
        entry = vars(timm.get_pretrained_cfg(name))
        checked = {key for key in config_module.CHECKS if entry[key] is not None}
        assert checked
        assert all(config_module.CHECKS[key][1](entry[key]) for key in checked)


class TestTemperature:
    def test_it_comes_with_the_weights(self, folder: Path) -> None:
        assert resolve(str(folder)).temperature is None
        edit(folder, None, calibration={"temperature": 2, "split": "val"})
        assert resolve(str(folder)).temperature == 2.0
        assert resolve(str(folder / "model.safetensors")).temperature == 2.0

    @pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "1.5", None, True, [1]])
    def test_values_of_no_use(self, folder: Path, value: Any) -> None:
        edit(folder, None, calibration={"temperature": value, "split": "val"})
        assert "config.json: calibration.temperature: " in message(folder)

    @pytest.mark.parametrize("split", [None, "", 3])
    def test_it_says_where_it_was_fitted(self, folder: Path, split: Any) -> None:
        edit(folder, None, calibration={"temperature": 1.5, "split": split})
        assert "config.json: calibration.split: " in message(folder)

    def test_a_section_of_no_use(self, folder: Path) -> None:
        edit(folder, None, calibration=1.5)
        assert "config.json: calibration: 1.5, expected a mapping" in message(folder)

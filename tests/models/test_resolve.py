"""models/weights/resolve.py: every place that weights come from, and what a wrong name says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import (
    SMALL,
    message,
    timm_folder,
)
from safetensors.torch import load_file

from finetune.models.weights import resolve as weights_module
from finetune.models.weights.resolve import locate, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return timm_folder(tmp_path / "net")


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


class TestFolder:
    def test_everything_is_read(self, folder: Path) -> None:
        found = resolve(str(folder))
        assert found.architecture == "vit_tiny_patch16_224"
        assert found.model_args == SMALL
        assert found.config["mean"] == [0.1, 0.2, 0.3]
        assert found.class_names == ["ant", "bee", "cat"]
        assert found.provenance["license"] == "mit"
        expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert found.provenance["sha256"] == expected
        assert found.state is not None
        own = load_file(folder / "model.safetensors")
        assert found.state.keys() == own.keys()
        assert all(torch.equal(found.state[k], own[k]) for k in own)

    def test_timms_own_prefix_for_folders(self, folder: Path) -> None:
        assert resolve(f"local-dir:{folder}").model_args == SMALL

    def test_a_run_directory_stands_for_its_model(self, tmp_path: Path, folder: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        (run / "run.json").write_text("{}")
        assert "no model/ yet" in message(run)
        folder.rename(run / "model")
        assert locate(str(run)) == run / "model"
        assert resolve(str(run)).class_names == ["ant", "bee", "cat"]

    def test_without_weights_only_the_configuration_is_read(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        found = resolve(str(folder), pretrained=False)
        assert found.state is None
        assert found.model_args == SMALL
        assert "no weights beside config.json" in message(folder)

    @pytest.mark.parametrize(
        "names, expected",
        [
            ({"0": "ant", "1": "bee", "2": "cat"}, ["ant", "bee", "cat"]),
            ({"0": "ant", "2": "bee"}, None),
            ([], None),
        ],
    )
    def test_class_names_in_other_forms(
        self, folder: Path, names: Any, expected: list[str] | None
    ) -> None:
        edit(folder, label_names=names)
        assert resolve(str(folder)).class_names == expected

    def test_an_old_flat_configuration(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        flat = {"architecture": config["architecture"], **config["pretrained_cfg"]}
        (folder / "config.json").write_text(json.dumps(flat))
        found = resolve(str(folder))
        assert found.config["std"] == [0.4, 0.5, 0.6]
        assert found.config["num_classes"] == 3

    def test_configurations_that_are_of_no_use(self, folder: Path) -> None:
        edit(folder, architecture="vit_tinny_patch16_224")
        assert "did you mean 'vit_tiny_patch16_224'" in message(folder)
        (folder / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
        assert "transformers" in message(folder)
        (folder / "config.json").write_text("{")
        assert "not JSON" in message(folder)
        (folder / "config.json").unlink()
        assert "no config.json" in message(folder)


class TestNames:
    def test_unknown_names_suggest_the_nearest(self) -> None:
        assert "'vit_base_patch16_224'" in message("vit_bse_patch16_224")
        text = message("vit_base_patch16_224.augreg_in21")
        assert "vit_base_patch16_224.augreg_in21k" in text
        text = message("vit_bse_patch16_224.augreg_in21k")
        assert "did you mean 'vit_base_patch16_224.augreg_in21k'" in text
        assert "hf-hub:" in message("nothing_like_it_at_all_1234")

    def test_local_names_and_repositories_are_told_apart(self) -> None:
        assert "no such file or folder" in message("./missing")
        assert "no such file or folder" in message("missing.safetensors")
        assert "hf-hub:google/vit" in message("google/vit")
        assert "embedded:nothing" in message("embedded:nothing")

    def test_embedded_weights_are_package_data(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = folder.parent / "package"
        (package / "embedded").mkdir(parents=True)
        folder.rename(package / "embedded" / "net")
        monkeypatch.setattr(weights_module.resources, "files", lambda _: package)
        assert resolve("embedded:net").provenance["source"] == "embedded:net"
        assert "did you mean 'net'" in message("embedded:nett")

    def test_an_architecture_without_weights(self) -> None:
        assert resolve("test_vit4", pretrained=False).config["input_size"]
        name = next(n for n in timm.list_models() if not timm.list_pretrained(f"{n}*"))
        assert "no pretrained weights" in message(name)

    def test_addresses_are_not_read(self) -> None:
        for name in ("https://host/a/model.safetensors", "https://host/owner/name"):
            assert "addresses are not read; download it first" in message(name)
        assert "did you mean 'hf-hub:a/b'?" in message("hub:a/b")
        assert "cannot be read" in message("a" * 5000)


class TestFiles:
    def test_safetensors_with_a_configuration_beside(self, folder: Path) -> None:
        assert resolve(str(folder / "model.safetensors")).class_names == ["ant", "bee", "cat"]

    def test_safetensors_alone_need_an_architecture(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        path = folder / "model.safetensors"
        assert "model.args.architecture" in message(path)
        found = resolve(str(path), args={"architecture": "vit_tiny_patch16_224"})
        assert found.architecture == "vit_tiny_patch16_224"
        text = message(path, args={"architecture": "vit_tiny_patch16_24"})
        assert "did you mean 'vit_tiny_patch16_224'" in text

    def test_a_suffix_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "weights.h5").write_bytes(b"x")
        assert "not a weights file" in message(tmp_path / "weights.h5")

    def test_code_is_refused_before_an_architecture_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "alone.pth"
        torch.save({"x": Path.cwd}, path)
        text = message(path)
        assert "refused" in text
        assert "config.json" not in text

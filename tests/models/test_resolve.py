"""models/weights/resolve.py: every source of weights, and wrong names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import SMALL_VIT_ARGS, write_timm_folder
from refusals import refused
from safetensors.torch import load_file

from finetune.models.weights import resolve as weights_module
from finetune.models.weights.resolve import locate_weights, resolve_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_timm_folder(tmp_path / "net")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


class TestFolder:
    def test_reads_config_names_and_weights(self, folder: Path) -> None:
        weights = resolve_weights(str(folder))
        assert weights.architecture == "vit_tiny_patch16_224"
        assert weights.model_args == SMALL_VIT_ARGS
        assert weights.config["mean"] == [0.1, 0.2, 0.3]
        assert weights.class_names == ["ant", "bee", "cat"]
        assert weights.provenance["license"] == "mit"
        expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert weights.provenance["sha256"] == expected
        assert weights.state is not None
        state = load_file(folder / "model.safetensors")
        assert weights.state.keys() == state.keys()
        assert all(torch.equal(weights.state[name], state[name]) for name in state)

    def test_local_dir_prefix_of_timm(self, folder: Path) -> None:
        assert resolve_weights(f"local-dir:{folder}").model_args == SMALL_VIT_ARGS

    def test_a_run_directory_resolves_to_its_model(self, tmp_path: Path, folder: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        (run / "run.json").write_text("{}")
        with refused("weights.not_found", run, "--resume"):
            resolve_weights(str(run))
        folder.rename(run / "model")
        assert locate_weights(str(run)) == run / "model"
        assert resolve_weights(str(run)).class_names == ["ant", "bee", "cat"]

    def test_reads_only_the_config_without_pretrained(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        weights = resolve_weights(str(folder), pretrained=False)
        assert weights.state is None
        assert weights.model_args == SMALL_VIT_ARGS
        with refused("weights.not_found", folder, "model.safetensors"):
            resolve_weights(str(folder))

    @pytest.mark.parametrize(
        "names, expected",
        [
            ({"0": "ant", "1": "bee", "2": "cat"}, ["ant", "bee", "cat"]),
            ({"0": "ant", "2": "bee"}, None),
            ([], None),
        ],
    )
    def test_other_formats_of_class_names(
        self, folder: Path, names: Any, expected: list[str] | None
    ) -> None:
        edit_config(folder, label_names=names)
        assert resolve_weights(str(folder)).class_names == expected

    def test_legacy_flat_config(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        flat = {"architecture": config["architecture"], **config["pretrained_cfg"]}
        (folder / "config.json").write_text(json.dumps(flat))
        weights = resolve_weights(str(folder))
        assert weights.config["std"] == [0.4, 0.5, 0.6]
        assert weights.config["num_classes"] == 3


class TestNames:
    """Cases in addition to the command-line tests in tests/faults/test_bad_weights.py."""

    def test_embedded_weights_are_package_data(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = folder.parent / "package"
        (package / "embedded").mkdir(parents=True)
        folder.rename(package / "embedded" / "net")
        monkeypatch.setattr(weights_module.resources, "files", lambda _: package)
        assert resolve_weights("embedded:net").provenance["source"] == "embedded:net"
        with refused("weights.unknown_name", "embedded:nett", "'net'"):
            resolve_weights("embedded:nett")

    def test_architecture_without_pretrained_weights(self) -> None:
        assert resolve_weights("test_vit4", pretrained=False).config["input_size"]
        name = next(
            architecture
            for architecture in timm.list_models()
            if not timm.list_pretrained(f"{architecture}*")
        )
        with refused("weights.not_found", name, "model.pretrained=false"):
            resolve_weights(name)


class TestFiles:
    def test_safetensors_file_next_to_a_config(self, folder: Path) -> None:
        assert resolve_weights(str(folder / "model.safetensors")).class_names == [
            "ant",
            "bee",
            "cat",
        ]

    def test_safetensors_file_alone_needs_an_architecture(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        path = str(folder / "model.safetensors")
        with refused("weights.no_config", path, "model.args.architecture"):
            resolve_weights(path)
        weights = resolve_weights(path, args={"architecture": "vit_tiny_patch16_224"})
        assert weights.architecture == "vit_tiny_patch16_224"
        with refused("weights.unknown_name", "'vit_tiny_patch16_224'"):
            resolve_weights(path, args={"architecture": "vit_tiny_patch16_24"})

    def test_rejects_code_before_asking_for_an_architecture(self, tmp_path: Path) -> None:
        path = tmp_path / "alone.pth"
        torch.save({"x": Path.cwd}, path)
        with refused("weights.unsafe", "alone.pth"):
            resolve_weights(str(path))

"""models/weights/resolve.py: every source of weights, and wrong names."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import SMALL_VIT_ARGS, write_timm_folder
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.errors import WeightsError
from finetune.files import file_sha256
from finetune.hub.download import download_url
from finetune.model_checksums import add_checksums, json_sha256
from finetune.models import build as build_module
from finetune.models.build import build_model
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

    def test_weights_that_change_while_they_are_loaded_are_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tensors are a memory map of the file until they are in the network."""
        load = build_module.load_weights
        path = folder / "model.safetensors"

        def overwrite_and_load(*arguments: Any, **options: Any) -> Any:
            times = path.stat()
            path.write_bytes(path.read_bytes()[:-4] + b"abcd")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            return load(*arguments, **options)

        assert build_model(str(folder)).class_names == ["ant", "bee", "cat"]
        monkeypatch.setattr(build_module, "load_weights", overwrite_and_load)
        with refused("weights.changed", folder, "while it was read"):
            build_model(str(folder))

    def test_a_new_hard_link_of_the_weights_is_no_change(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A push links the weights while it rewrites the folder of a run."""
        load = build_module.load_weights

        def link_and_load(*arguments: Any, **options: Any) -> Any:
            (folder / "link").hardlink_to(folder / "model.safetensors")
            return load(*arguments, **options)

        monkeypatch.setattr(build_module, "load_weights", link_and_load)
        assert build_model(str(folder)).class_names == ["ant", "bee", "cat"]

    def test_the_prefix_of_transformers_is_removed_if_all_tensors_have_it(
        self, folder: Path
    ) -> None:
        path = folder / "model.safetensors"
        state = load_file(path)
        prefixed = {f"timm_model.{name}": tensor for name, tensor in state.items()}
        save_file(prefixed, path)
        assert resolve_weights(str(folder)).state.keys() == state.keys()  # type: ignore[union-attr]
        save_file({**prefixed, **{name: state[name].clone() for name in state}}, path)
        with refused("weights.unknown_tensors", "timm_model."):
            build_model(str(folder))

    def test_the_image_size_is_that_of_timm(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["pretrained_cfg"] |= {"input_size": [3, 48, 48]}
        for dynamic, size in ((False, SMALL_VIT_ARGS["img_size"]), (True, 48)):
            config["model_args"] = {**SMALL_VIT_ARGS, "dynamic_img_size": dynamic}
            (folder / "config.json").write_text(json.dumps(config))
            assert build_model(str(folder)).preprocessing.image_size == (size, size)

    def test_a_size_from_the_registry_is_said(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["pretrained_cfg"].pop("input_size", None)
        edit_config(folder, **{**config, "architecture": "test_resnet", "model_args": {}})
        assert resolve_weights(str(folder), pretrained=False).config["input_size"] == (3, 160, 160)
        assert "has no input_size; without model.image_size, images get 160 pixels" in caplog.text

    def test_local_dir_prefix_of_timm(self, folder: Path) -> None:
        assert resolve_weights(f"local-dir:{folder}").model_args == SMALL_VIT_ARGS

    def test_a_run_directory_resolves_to_its_model(self, tmp_path: Path, folder: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        (run / "run.json").write_text('{"status": "done"}')
        with refused("weights.not_found", run, "--resume"):
            resolve_weights(str(run))
        folder.rename(run / "model")
        assert locate_weights(str(run)) == run / "model"
        assert resolve_weights(str(run)).class_names == ["ant", "bee", "cat"]

    def test_a_folder_named_like_a_network_of_timm(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "vit_tiny_patch16_224"
        folder.rename(folder.with_name(name))
        monkeypatch.chdir(folder.parent)
        with refused("weights.ambiguous", f"./{name}"):
            resolve_weights(name)
        assert resolve_weights(f"./{name}").class_names == ["ant", "bee", "cat"]

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
    @pytest.mark.parametrize(
        "name, code, expected",
        [
            ("vit_bse_patch16_224", "unknown_name", "'vit_base_patch16_224'"),
            ("vit_base_patch16_224.augreg_in21", "unknown_name", "augreg_in21k"),
            ("vit_bse_patch16_224.augreg_in21k", "unknown_name", "'vit_base_patch16_224.aug"),
            ("vit_base_patch16_224.nobody", "unknown_name", "'nobody'"),
            ("cvt_13", "unknown_name", "'cvt_13'"),
            ("embedded:vit_nana", "unknown_name", "'vit_nano'"),
            ("package:numpy", "unknown_name", "'package:numpy'"),
            ("https://example.org/w.safetensors", "unknown_name", "'https://example.org/w.safe"),
            ("owner/name", "not_found", "'hf-hub:owner/name'"),
            ("hf:owner/name", "unknown_name", "'hf-hub:owner/name'"),
            ("hub:a/b", "unknown_name", "'hf-hub:a/b'"),
            ("./w.safetensors", "not_found", "w.safetensors"),
            ("nets/", "not_found", "'nets/'"),
            ("", "unknown_name", "model ''"),
            ("a\0b", "unknown_name", r"'a\x00b'"),
            ("x" * 300, "unreadable", "model 'xxx"),
            ("/dev/zero", "wrong_format", "'/dev/zero'"),
        ],
        ids=lambda value: value[:40],
    )
    def test_wrong_names(self, name: str, code: str, expected: str) -> None:
        with refused(f"weights.{code}", expected):
            resolve_weights(name)

    @pytest.mark.parametrize(
        "name, make, code",
        [
            ("a.png", Path.touch, "wrong_format"),
            ("empty", Path.mkdir, "no_config"),
            ("w.safetensors", os.mkfifo, "wrong_format"),
            ("w.npz", lambda path: path.symlink_to("gone"), "not_found"),
            ("w.npz", lambda path: path.symlink_to("w.npz"), "not_found"),
        ],
    )
    def test_wrong_files(self, name: str, make: Any, code: str, tmp_path: Path) -> None:
        make(tmp_path / name)
        with refused(f"weights.{code}", tmp_path / name):
            resolve_weights(str(tmp_path / name))

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_a_weights_file_that_is_none(self, folder: Path, make: Any) -> None:
        (folder / "model.safetensors").unlink()
        make(folder / "model.safetensors")
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            resolve_weights(str(folder))

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

    def test_an_architecture_does_not_skip_recorded_checksums(self, folder: Path) -> None:
        file, args = folder / "model.safetensors", {"architecture": "vit_tiny_patch16_224"}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(add_checksums(config, folder)))
        files = {file.name: {"sha256": file_sha256(file)}}
        resolve_weights(str(file), args=args)
        state = load_file(file)
        save_file({name: tensor + 1 for name, tensor in state.items()}, file)
        with refused("weights.damaged", file.name):
            resolve_weights(str(file), args=args)
        (folder / "config.json").unlink()
        resolve_weights(str(file), args=args)
        checkpoint = {"files": files, "sha256": json_sha256(files)}
        (folder / "manifest.json").write_text(json.dumps(checkpoint))
        with refused("weights.damaged", file.name):
            resolve_weights(str(file), args=args)
        files[file.name]["sha256"] = file_sha256(file)
        (folder / "manifest.json").write_text(json.dumps(checkpoint))
        with refused("weights.damaged", "manifest.json"):
            resolve_weights(str(file), args=args)

    def test_rejects_code_before_asking_for_an_architecture(self, tmp_path: Path) -> None:
        path = tmp_path / "alone.pth"
        torch.save({"x": Path.cwd}, path)
        with refused("weights.unsafe", "alone.pth"):
            resolve_weights(str(path))


def test_a_damaged_file_in_the_cache_of_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    digest = hashlib.sha256(b"weights").hexdigest()
    for name in (f"net-{digest[:8]}.pth", "net.pth"):  # the second name has no digits to compare
        (folder / name).write_bytes(b"weights")
        assert download_url(f"https://host/{name}") == folder / name
        (folder / name).write_bytes(b"other")
    with refused("weights.damaged", folder, digest[:8]):
        download_url(f"https://host/net-{digest[:8]}.pth")
    assert download_url("https://host/net.pth") == folder / "net.pth"

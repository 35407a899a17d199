"""model_checksums.py: a saved model that was changed is refused, whatever was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_fixtures import hub, sleep_durations
from hub_server import HubServer
from networks import save_random_network
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.commands.evaluate import evaluate_model
from finetune.model_checksums import add_checksums, verify_model_folder
from finetune.models.build import build_model

__all__ = ["hub", "sleep_durations"]  # fixtures


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two networks of the same architecture and classes, with other weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    return [Path(save_random_network(folder, "vit")) for folder in folders]


@pytest.fixture
def folder(originals: list[Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals[0], tmp_path / "run" / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=1))


def flip_bit(folder: Path, _: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def swap_rows(folder: Path, _: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["head.weight"] = state["head.weight"].flip(0).contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def take_file(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, other: shutil.copyfile(other / name, folder / name)


def swap_class_names(folder: Path, _: Path) -> None:
    names = json.loads((folder / "config.json").read_text())["label_names"]
    edit_config(folder, label_names=names[::-1])


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "bit": flip_bit,
    "rows": swap_rows,
    "weights of another model": take_file("model.safetensors"),
    "config of another model": take_file("config.json"),
    "class names": swap_class_names,
    "temperature": lambda folder, _: edit_config(
        folder, calibration={"temperature": 9.0, "split": "val"}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_is_refused(change: str, folder: Path, originals: list[Path]) -> None:
    CHANGES[change](folder, originals[1])
    for name in (folder.parent, folder, folder / "model.safetensors"):
        with refused("weights.damaged", name):
            build_model(str(name))
    with refused("weights.damaged", "a name"):
        verify_model_folder(folder, source="a name")


def test_adapter_of_another_model_is_refused(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with refused("weights.damaged", "adapter/adapter_model.safetensors"):
        verify_model_folder(folder, source="a name")


def test_weights_under_another_name_are_refused(folder: Path, originals: list[Path]) -> None:
    """timm would load them, because model.safetensors is missing."""
    (folder / "model.safetensors").unlink()
    torch.save(load_file(originals[1] / "model.safetensors"), folder / "pytorch_model.bin")
    with refused("weights.not_found", "model.safetensors"):
        build_model(str(folder))


def test_weights_next_to_the_config_of_others_are_refused(
    folder: Path, originals: list[Path]
) -> None:
    other = shutil.copyfile(originals[1] / "model.safetensors", folder / "epoch5.safetensors")
    with refused("weights.wrong_config", "epoch5.safetensors"):
        build_model(str(other))
    edit_config(folder, checksums=None)  # as in a folder of timm
    build_model(str(other))


def test_whole_model_of_another_run_is_refused(folder: Path, originals: list[Path]) -> None:
    checksums = json.loads((folder / "config.json").read_text())["checksums"]
    record = {"status": "done", "model_sha256": checksums["model.safetensors"]}
    (folder.parent / "run.json").write_text(json.dumps(record))
    build_model(str(folder.parent))
    shutil.rmtree(folder)
    shutil.copytree(originals[1], folder)
    (link := folder.parents[1] / "best").symlink_to(folder)
    for name in (folder.parent, folder, link):
        with refused("weights.damaged", name):
            build_model(str(name))
    edit_config(folder, checksums=None)
    with refused("weights.damaged", folder):
        build_model(str(folder))
    (folder.parent / "run.json").write_text(json.dumps({**record, "status": "running"}))
    with refused("weights.damaged", folder):  # the status does not matter
        build_model(str(folder))
    # a run that is extended has not recorded its new model yet
    (folder.parent / "run.json").write_text(json.dumps({"status": "running"}))
    build_model(str(folder.parent))


def test_hub_repository_with_weights_of_another_model(
    hub: HubServer, originals: list[Path]
) -> None:
    files = [{path.name: path.read_bytes() for path in each.iterdir()} for each in originals]
    hub.add_repo("zoo/net", files[0])
    build_model("hf-hub:zoo/net")
    hub.add_repo("zoo/mixed", {**files[0], "model.safetensors": files[1]["model.safetensors"]})
    with refused("weights.damaged", "hf-hub:zoo/mixed"):
        build_model("hf-hub:zoo/mixed")


def test_layout_of_the_json_and_other_files_may_change(folder: Path) -> None:
    edit_config(folder)
    (folder / "README.md").write_text("a card")
    verify_model_folder(folder, source="a name")
    build_model(str(folder))


def test_missing_or_damaged_adapter_is_refused_also_after_fitting_a_temperature(
    folder: Path,
) -> None:
    adapter = folder / "adapter" / "adapter_model.safetensors"
    adapter.parent.mkdir()
    save_file({"weight": torch.ones(3)}, adapter)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(add_checksums(config, folder)))
    verify_model_folder(folder, source="a name")
    save_file({"weight": torch.zeros(3)}, adapter)
    with refused("weights.damaged", "adapter_model.safetensors"):
        evaluate_model(str(folder), data="embedded:digits", fit_temperature=True)
    adapter.unlink()
    with refused("weights.damaged", "adapter_model.safetensors"):
        verify_model_folder(folder, source="a name")


def test_folder_without_checksums_is_accepted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["checksums"]
    (folder / "config.json").write_text(json.dumps(config))
    flip_bit(folder, folder)
    build_model(str(folder))

"""`info`: published parameter counts and MACs, the location of the weights, and the text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build_network, save_network, save_random_network, write_timm_folder
from refusals import refused

from finetune.commands.info import format_model_info, model_info
from finetune.errors import RecipeError

# By timm name: millions of parameters in timm's results tables; then, from the papers,
# millions of parameters and billions of MACs: DeiT table 5, TNT table 2, ViT at 384 px.
PUBLISHED: dict[str, tuple[float, int, float]] = {
    "resnet50": (25.56, 25, 4.1),
    "vit_base_patch16_384": (86.86, 86, 55.5),
    "vit_large_patch16_384": (304.72, 307, 191.1),
    "deit_small_patch16_224": (22.05, 22, 4.6),
    "deit_base_patch16_224": (86.57, 86, 17.6),
    "tnt_s_patch16_224": (23.77, 24, 5.2),
    "tnt_b_patch16_224": (65.43, 66, 14.1),
}


# These repeat the architecture of another one, and are slow to build.
LARGE = ("vit_large_patch16_384", "deit_base_patch16_224", "tnt_b_patch16_224")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.faults] * (name in LARGE)) for name in PUBLISHED],
)
def test_parameters_and_macs_match_published_values(name: str) -> None:
    info = model_info(name)
    timm_millions, reported, billions = PUBLISHED[name]
    millions = info["parameters"]["total"] / 1e6
    assert round(millions, 2) == timm_millions
    assert info["macs"] / 1e9 == pytest.approx(billions, rel=0.015)
    if name == "resnet50":
        assert int(millions) == reported  # the paper truncates: 2.2 % above 25
    else:
        assert millions == pytest.approx(reported, rel=0.015)


def test_model_folder(tmp_path: Path) -> None:
    folder = save_random_network(tmp_path, "vit")
    info = model_info(folder)
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert info["weights"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert info["weights"]["file"] == "model.safetensors"
    assert info["architecture"] == "vit_tiny_patch16_224"
    assert info["image_size"] == [32, 32]
    assert info["num_classes"] == 5
    assert info["depth"] == [2]
    num_parameters = sum(p.numel() for p in build_network("vit").model.parameters())
    assert info["parameters"] == {
        "total": num_parameters,
        "trainable": num_parameters,
        "head": 5 * 33,
    }
    json.dumps(info)


def test_preprocessing_comes_from_the_weights(tmp_path: Path) -> None:
    preprocessing = model_info(write_timm_folder(tmp_path / "folder"))["preprocessing"]
    assert preprocessing["mean"] == [0.1, 0.2, 0.3]
    assert preprocessing["std"] == [0.4, 0.5, 0.6]
    assert "32" in preprocessing["operations"]


def test_larger_image_size_only_adds_tokens() -> None:
    small, large = model_info("embedded:vit_nano"), model_info("embedded:vit_nano", image_size=48)
    assert (small["tokens"]["total"], large["tokens"]["total"]) == (65, 145)
    assert large["macs"] > 2 * small["macs"]
    width = large["layers"][1]["output"][1]
    difference = large["parameters"]["total"] - small["parameters"]["total"]
    assert difference == (145 - 65) * width  # position embeddings
    with pytest.raises(RecipeError, match="not a multiple"):
        model_info("embedded:vit_nano", image_size=30)


def test_run_shows_trainable_parameters_and_its_eval_transform(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_network(run / "model", build_network("vit"))
    (run / "run.json").write_text('{"status": "done"}')
    (run / "recipe.yaml").write_text(
        "model: {name: vit_tiny_patch16_224, freeze: backbone}\n"
        "data: {source: embedded:digits, eval: 'resize(36) | center_crop(32)', batch_size: 8,\n"
        "       decode_size: 36}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    info = model_info(run)
    assert info["parameters"]["trainable"] == info["parameters"]["head"] == 5 * 33
    assert info["preprocessing"]["operations"] == "resize(36) | center_crop(32)"
    assert "165 trainable, " in format_model_info(info)
    assert info["preprocessing"]["decode_size"] == 36
    assert "JPEGs decoded to no less than 36 pixels a side" in format_model_info(info)
    # the run's eval transform does not give another size
    assert "center_crop(32)" not in model_info(run, image_size=48)["preprocessing"]["operations"]


def test_info_allocates_and_downloads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of ViT-H would take 2.5 GB."""
    allocated: list[int] = []
    normal_ = torch.Tensor.normal_

    def recording_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type != "meta":
            allocated.append(tensor.numel())
        return normal_(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", recording_normal)
    info = model_info("vit_huge_patch14_224.orig_in21k")
    assert info["parameters"]["total"] > 6e8
    assert sum(allocated) == 0
    assert info["weights"]["repository"] == "timm/vit_huge_patch14_224.orig_in21k"
    assert info["weights"]["sha256"] is None
    assert "not on this machine" in format_model_info(info)
    assert "no classifier" in format_model_info(info)


def test_cached_weights_are_identified_by_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "a" * 64
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    blob.write_bytes(b"not read: the file name is its checksum")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    repositories: list[str] = []

    def cached(repository: str, file: str, revision: str | None = None) -> str | None:
        repositories.append(repository)
        return str(link) if file == "model.safetensors" else None

    monkeypatch.setattr("finetune.commands.info.try_to_load_from_cache", cached)
    info = model_info("test_vit.r160_in1k")
    assert repositories == ["timm/test_vit.r160_in1k"]
    assert info["weights"]["sha256"] == digest
    assert f"model.safetensors, sha256 {digest}" in format_model_info(info)


def test_text_matches_the_golden_file() -> None:
    golden = Path(__file__).with_name("info.txt").read_text(encoding="utf-8")
    assert format_model_info(model_info("embedded:vit_nano")) + "\n" == golden


def test_unknown_names_and_missing_weights() -> None:
    with refused("weights.unknown_name", "vit_base_patch16_225", "did you mean"):
        model_info("vit_base_patch16_225")
    assert "none: timm has no pretrained weights" in format_model_info(
        model_info("vit_base_patch16_xp_224")
    )


def test_google_npz_checkpoint(shared: Path) -> None:
    info = model_info(shared / "oracles" / "ckpt_plain.npz")
    assert info["tokens"] == {"total": 17, "grid": [4, 4], "prefix": 1}
    assert info["weights"]["file"] == "ckpt_plain.npz"
    assert len(info["weights"]["sha256"]) == 64

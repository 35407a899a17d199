"""`info`: the figures that timm and the papers print, where the weights are, and the text."""

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

# timm name, millions of parameters in timm's results tables, and in the papers' own words
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    found = model_info(name)
    timms, reported, billions = PUBLISHED[name]
    millions = found["parameters"]["total"] / 1e6
    assert round(millions, 2) == timms
    assert found["macs"] / 1e9 == pytest.approx(billions, rel=0.015)
    if name == "resnet50":
        assert int(millions) == reported  # it is cut, not rounded: 2.2 % above 25
    else:
        assert millions == pytest.approx(reported, rel=0.015)


def test_a_small_folder(tmp_path: Path) -> None:
    folder = save_random_network(tmp_path, "vit")
    found = model_info(folder)
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert found["weights"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert found["weights"]["file"] == "model.safetensors"
    assert found["architecture"] == "vit_tiny_patch16_224"
    assert found["image_size"] == [32, 32]
    assert found["num_classes"] == 5
    assert found["depth"] == [2]
    real = sum(p.numel() for p in build_network("vit").model.parameters())
    assert found["parameters"] == {"total": real, "trainable": real, "head": 5 * 33}
    json.dumps(found)


def test_preprocessing_is_the_weights_own(tmp_path: Path) -> None:
    found = model_info(write_timm_folder(tmp_path / "folder"))["preprocessing"]
    assert found["mean"] == [0.1, 0.2, 0.3]
    assert found["std"] == [0.4, 0.5, 0.6]
    assert "32" in found["operations"]


def test_another_size_has_more_tokens_and_the_same_blocks() -> None:
    small, large = model_info("embedded:vit_nano"), model_info("embedded:vit_nano", image_size=48)
    assert (small["tokens"]["total"], large["tokens"]["total"]) == (65, 145)
    assert large["macs"] > 2 * small["macs"]
    width = large["layers"][1]["output"][1]
    grown = large["parameters"]["total"] - small["parameters"]["total"]
    assert grown == (145 - 65) * width  # position embeddings
    with pytest.raises(RecipeError, match="not a multiple"):
        model_info("embedded:vit_nano", image_size=30)


def test_a_run_says_what_it_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_network(run / "model", build_network("vit"))
    (run / "run.json").write_text("{}")
    (run / "recipe.yaml").write_text(
        "model: {name: vit_tiny_patch16_224, freeze: backbone}\n"
        "data: {source: embedded:digits, eval: 'resize(36) | center_crop(32)', batch_size: 8,\n"
        "       decode_size: 36}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    found = model_info(run)
    assert found["parameters"]["trainable"] == found["parameters"]["head"] == 5 * 33
    assert found["preprocessing"]["operations"] == "resize(36) | center_crop(32)"
    assert "165 trainable, " in format_model_info(found)
    assert found["preprocessing"]["decode_size"] == 36
    assert "JPEGs decoded to no less than 36 pixels a side" in format_model_info(found)
    # at another size the run's sentence does not lead there
    assert "center_crop(32)" not in model_info(run, image_size=48)["preprocessing"]["operations"]


def test_nothing_large_is_made_and_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """ViT-H would take 2.5 GB."""
    made: list[int] = []
    empty = torch.Tensor.normal_

    def watch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type != "meta":
            made.append(tensor.numel())
        return empty(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", watch)
    found = model_info("vit_huge_patch14_224.orig_in21k")
    assert found["parameters"]["total"] > 6e8
    assert sum(made) == 0
    assert found["weights"]["repository"] == "timm/vit_huge_patch14_224.orig_in21k"
    assert found["weights"]["sha256"] is None
    assert "not on this machine" in format_model_info(found)
    assert "no classifier" in format_model_info(found)


def test_weights_in_the_cache_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "a" * 64
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    blob.write_bytes(b"not read: it is called after its checksum")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    asked: list[str] = []

    def cached(repository: str, file: str, revision: str | None = None) -> str | None:
        asked.append(repository)
        return str(link) if file == "model.safetensors" else None

    monkeypatch.setattr("finetune.commands.info.try_to_load_from_cache", cached)
    found = model_info("test_vit.r160_in1k")
    assert asked == ["timm/test_vit.r160_in1k"]
    assert found["weights"]["sha256"] == digest
    assert f"model.safetensors, sha256 {digest}" in format_model_info(found)


def test_the_page() -> None:
    golden = Path(__file__).with_name("info.txt").read_text(encoding="utf-8")
    assert format_model_info(model_info("embedded:vit_nano")) + "\n" == golden


def test_names_that_are_none() -> None:
    with refused("weights.unknown_name", "vit_base_patch16_225", "did you mean"):
        model_info("vit_base_patch16_225")
    assert "none: timm has no pretrained weights" in format_model_info(
        model_info("vit_base_patch16_xp_224")
    )


def test_an_npz_of_googles(shared: Path) -> None:
    found = model_info(shared / "oracles" / "ckpt_plain.npz")
    assert found["tokens"] == {"total": 17, "grid": [4, 4], "prefix": 1}
    assert found["weights"]["file"] == "ckpt_plain.npz"
    assert len(found["weights"]["sha256"]) == 64

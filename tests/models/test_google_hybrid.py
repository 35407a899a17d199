"""models/architectures/google_hybrid.py against Google's JAX code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from networks import compute_logits, random_images, randomize_head, save_network
from refusals import refused
from torch import Tensor

from finetune.models.architectures.google_hybrid import convert_backbone
from finetune.models.build import build_model
from finetune.models.weights.read import read_tensors
from finetune.models.weights.resize_posemb import resize_posemb

# both compute in float32, through five convolutional units and three blocks.
MAX_DIFFERENCE = 2e-5


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit_extra.npz") as archive:
        return dict(archive.items())


@pytest.fixture(scope="module")
def checkpoint(shared: Path) -> str:
    return str(shared / "oracles" / "ckpt_hybrid.npz")


def max_difference(actual: Tensor, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 0.01
    return float((actual.detach() - torch.from_numpy(expected)).abs().max())


@torch.no_grad()
def test_parity_with_jax(checkpoint: str, oracle: dict[str, np.ndarray]) -> None:
    model = build_model(checkpoint).model.eval()
    x = torch.from_numpy(oracle["images"]).permute(0, 3, 1, 2)
    backbone = model.patch_embed.backbone
    feature_maps = {"conv_root": backbone.stem.conv(x)}
    features = backbone.stem(x)
    for number, stage in enumerate(backbone.stages, start=1):
        features = feature_maps[f"block{number}"] = stage(features)
    assert list(feature_maps) == ["conv_root", "block1", "block2"]
    for name, our_map in feature_maps.items():
        jax_map = oracle[f"hybrid/inter/{name}"].transpose(0, 3, 1, 2)
        # feature maps are not normalized, so relative to their magnitude
        assert max_difference(our_map, jax_map) < MAX_DIFFERENCE * np.abs(jax_map).max(), name
    tokens = model.forward_features(x)
    expected_tokens = oracle["hybrid/inter/Transformer/encoder_norm"]
    assert max_difference(tokens, expected_tokens) < MAX_DIFFERENCE
    pre_logits = model.forward_head(tokens, pre_logits=True)
    assert max_difference(pre_logits, oracle["hybrid/pre_logits"]) < MAX_DIFFERENCE
    assert max_difference(compute_logits(model, x), oracle["hybrid/logits"]) < MAX_DIFFERENCE


def test_reads_sizes_from_the_tensors(checkpoint: str) -> None:
    built = build_model(checkpoint, pretrained=False)
    expected = {"layers": [1, 2], "channels": [128, 256], "stem_chs": 32, "depth": 3}
    assert {key: built.model_args[key] for key in expected} == expected
    assert built.preprocessing.image_size == (64, 64)
    assert built.model.num_classes == 11


def test_converts_every_tensor(checkpoint: str) -> None:
    tensors = read_tensors(Path(checkpoint))
    state, _, stride = convert_backbone(tensors)
    assert stride == 8
    backbone_names = [
        name for name in tensors if name.startswith(("block", "conv_root", "gn_root"))
    ]
    assert len(state) == len(backbone_names) == 36


@pytest.mark.parametrize("size", [pytest.param(96, marks=pytest.mark.faults), 48])
def test_resizes_positions_replaces_the_head_and_trains(
    checkpoint: str, size: int, tmp_path: Path
) -> None:
    """The head is zero, positions are resized with the paper's method, and both train."""
    built = build_model(checkpoint, num_classes=3, image_size=size)
    model, x = built.model, random_images(size)
    assert built.provenance["posemb"] == "paper"
    table = read_tensors(Path(checkpoint))["Transformer/posembed_input/pos_embedding"]
    assert torch.equal(model.pos_embed, resize_posemb(table, (size // 8, size // 8)))
    assert torch.equal(compute_logits(model, x), torch.zeros(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 2])).backward()
        optimizer.step()
    assert model.patch_embed.backbone.stem.conv.weight.grad.abs().sum() > 0
    folder = save_network(tmp_path / "saved", built, class_names=["a", "b", "c"])
    assert torch.equal(compute_logits(build_model(folder).model, x), compute_logits(model, x))
    timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(compute_logits(timm_model, x), compute_logits(model, x))


def test_rejects_a_representation_layer(checkpoint: str) -> None:
    with refused("weights.unsupported", checkpoint, "model.args.pre_logits"):
        build_model(checkpoint, args={"pre_logits": True})


@pytest.mark.faults  # slow: two networks of 98 million parameters
def test_defaults_equal_r50_b16() -> None:
    with torch.device("meta"):
        our_model = timm.create_model("vit_hybrid", num_classes=10)
        timm_model = timm.create_model("vit_base_r50_s16_224", num_classes=10)
    shapes = {name: tensor.shape for name, tensor in timm_model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in our_model.state_dict().items()} == shapes


@pytest.mark.faults
def test_resizes_a_small_timm_hybrid_with_a_zero_head(tmp_path: Path) -> None:
    """vit_small_r26_s32_224 with a small transformer; its ResNet has 26 layers."""
    args = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    built = build_model(
        "vit_small_r26_s32_224", pretrained=False, num_classes=5, image_size=64, args=args
    )
    randomize_head(built.model)
    folder = save_network(tmp_path / "small", built)
    larger = build_model(folder, num_classes=3, image_size=96)
    assert larger.model.pos_embed.shape == (1, 10, 32)
    assert larger.provenance["posemb"] == "paper"
    assert torch.equal(compute_logits(larger.model, random_images(96)), torch.zeros(2, 3))


def test_group_norms_use_the_epsilon_and_groups_of_the_paper(checkpoint: str) -> None:
    norms = [
        module
        for module in build_model(checkpoint).model.modules()
        if isinstance(module, torch.nn.GroupNorm)
    ]
    assert len(norms) > 8
    assert {(norm.eps, norm.num_groups) for norm in norms} == {(1e-6, 32)}

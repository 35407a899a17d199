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

# float32 here and in JAX through five convolutional units and three blocks.
FEATURES = 2e-5


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit_extra.npz") as archive:
        return dict(archive.items())


@pytest.fixture(scope="module")
def checkpoint(shared: Path) -> str:
    return str(shared / "oracles" / "ckpt_hybrid.npz")


def distance(ours: Tensor, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 0.01
    return float((ours.detach() - torch.from_numpy(theirs)).abs().max())


@torch.no_grad()
def test_parity_with_jax(checkpoint: str, oracle: dict[str, np.ndarray]) -> None:
    model = build_model(checkpoint).model.eval()
    x = torch.from_numpy(oracle["images"]).permute(0, 3, 1, 2)
    backbone = model.patch_embed.backbone
    maps = {"conv_root": backbone.stem.conv(x)}
    features = backbone.stem(x)
    for number, stage in enumerate(backbone.stages, start=1):
        features = maps[f"block{number}"] = stage(features)
    assert list(maps) == ["conv_root", "block1", "block2"]
    for name, ours in maps.items():
        theirs = oracle[f"hybrid/inter/{name}"].transpose(0, 3, 1, 2)
        # of feature maps that nothing has normalised: by their size
        assert distance(ours, theirs) < FEATURES * np.abs(theirs).max(), name
    tokens = model.forward_features(x)
    encoded = oracle["hybrid/inter/Transformer/encoder_norm"]
    assert distance(tokens, encoded) < FEATURES
    pooled = model.forward_head(tokens, pre_logits=True)
    assert distance(pooled, oracle["hybrid/pre_logits"]) < FEATURES
    assert distance(compute_logits(model, x), oracle["hybrid/logits"]) < FEATURES


def test_sizes_are_read_off_the_tensors(checkpoint: str) -> None:
    made = build_model(checkpoint, pretrained=False)
    expected = {"layers": [1, 2], "channels": [128, 256], "stem_chs": 32, "depth": 3}
    assert {key: made.model_args[key] for key in expected} == expected
    assert made.preprocessing.image_size == (64, 64)
    assert made.model.num_classes == 11


def test_every_tensor_finds_its_place(checkpoint: str) -> None:
    tensors = read_tensors(Path(checkpoint))
    state, _, step = convert_backbone(tensors)
    assert step == 8
    convolutional = [name for name in tensors if name.startswith(("block", "conv_root", "gn_root"))]
    assert len(state) == len(convolutional) == 36


@pytest.mark.parametrize("size", [96, 48])
def test_the_same_position_and_head_code(checkpoint: str, size: int, tmp_path: Path) -> None:
    """Zero head, positions resized as the paper does, training moves both."""
    made = build_model(checkpoint, num_classes=3, image_size=size)
    model, x = made.model, random_images(size)
    assert made.provenance["posemb"] == "paper"
    table = read_tensors(Path(checkpoint))["Transformer/posembed_input/pos_embedding"]
    assert torch.equal(model.pos_embed, resize_posemb(table, (size // 8, size // 8)))
    assert torch.equal(compute_logits(model, x), torch.zeros(2, 3))
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 2])).backward()
        step.step()
    assert model.patch_embed.backbone.stem.conv.weight.grad.abs().sum() > 0
    folder = save_network(tmp_path / "saved", made, class_names=["a", "b", "c"])
    assert torch.equal(compute_logits(build_model(folder).model, x), compute_logits(model, x))
    plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(compute_logits(plain, x), compute_logits(model, x))


def test_a_representation_layer_is_refused(checkpoint: str) -> None:
    with refused("weights.unsupported", checkpoint, "model.args.pre_logits"):
        build_model(checkpoint, args={"pre_logits": True})


def test_defaults_are_those_of_r50_b16() -> None:
    with torch.device("meta"):
        ours = timm.create_model("vit_hybrid", num_classes=10)
        theirs = timm.create_model("vit_base_r50_s16_224", num_classes=10)
    shapes = {name: p.shape for name, p in theirs.state_dict().items()}
    assert {name: p.shape for name, p in ours.state_dict().items()} == shapes


def test_timms_small_hybrid_is_resized_and_gets_a_zero_head(tmp_path: Path) -> None:
    """The named one with a small transformer; its ResNet has 26 layers."""
    args = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    made = build_model(
        "vit_small_r26_s32_224", pretrained=False, num_classes=5, image_size=64, args=args
    )
    randomize_head(made.model)
    folder = save_network(tmp_path / "small", made)
    larger = build_model(folder, num_classes=3, image_size=96)
    assert larger.model.pos_embed.shape == (1, 10, 32)
    assert larger.provenance["posemb"] == "paper"
    assert torch.equal(compute_logits(larger.model, random_images(96)), torch.zeros(2, 3))


def test_group_norms_divide_as_the_papers_code_does(checkpoint: str) -> None:
    norms = [
        m for m in build_model(checkpoint).model.modules() if isinstance(m, torch.nn.GroupNorm)
    ]
    assert len(norms) > 8
    assert {(norm.eps, norm.num_groups) for norm in norms} == {(1e-6, 32)}

"""models/weights/google_npz.py against Google's JAX code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from networks import compute_logits, random_images, save_network
from refusals import refused
from torch import Tensor, nn

from finetune.models.build import build_model

# float32 here and in JAX, three blocks deep, the sums in another order: 4e-6 measured.
FEATURES = 1e-5


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit.npz") as archive:
        return dict(archive.items())


@pytest.fixture(scope="module")
def extra(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit_extra.npz") as archive:
        return dict(archive.items())


def tensor(images_BHWC: np.ndarray) -> Tensor:
    return torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)


def distance(ours: Tensor, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float((ours.detach() - torch.from_numpy(theirs)).abs().max())


@torch.no_grad()
def pooled(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    model.eval()
    return model.forward_head(model.forward_features(images_BCHW), pre_logits=True)


class TestGoogle:
    """The same small networks, run by Google's JAX code."""

    @pytest.mark.parametrize("layout", ["", "_linen"])
    @pytest.mark.parametrize("tag", ["plain", "prelogits"])
    def test_pretrained_network(
        self, shared: Path, oracle: dict[str, np.ndarray], tag: str, layout: str
    ) -> None:
        path = shared / "oracles" / f"ckpt_{tag}{layout}.npz"
        made = build_model(str(path), args={"pre_logits": tag == "prelogits"})
        x = tensor(oracle["images64"])
        tokens = made.model.eval().forward_features(x)
        assert distance(tokens, oracle[f"{tag}/inter64/Transformer/encoder_norm"]) < FEATURES
        assert distance(pooled(made.model, x), oracle[f"{tag}/pre_logits64"]) < FEATURES
        assert distance(compute_logits(made.model, x), oracle[f"{tag}/logits64"]) < FEATURES

    @pytest.mark.parametrize("size", [96, 48])
    @pytest.mark.parametrize(
        "tag, width", [("plain", None), ("prelogits", None), ("prelogits", 48)]
    )
    def test_fine_tuning_at_another_size(
        self,
        shared: Path,
        oracle: dict[str, np.ndarray],
        tag: str,
        width: int | None,
        size: int,
    ) -> None:
        path = shared / "oracles" / f"ckpt_{tag}.npz"
        args = {"pre_logits": width is not None}
        made = build_model(str(path), num_classes=7, image_size=size, args=args)
        key, x = f"{tag}/ft{size}_rep{width}", tensor(oracle[f"images{size}"])
        assert distance(made.model.pos_embed, oracle[f"{key}/pos_embedding"]) < 1e-6
        assert distance(pooled(made.model, x), oracle[f"{key}/pre_logits"]) < FEATURES
        head = made.model.get_submodule("head")
        assert distance(head.weight.T, oracle[f"{key}/head_kernel"]) == 0
        assert distance(compute_logits(made.model, x), oracle[f"{key}/logits"]) == 0

    @pytest.mark.parametrize("tag, size", [("gap", None), ("nopos", 64)])
    def test_average_pooling_and_no_positions(
        self, shared: Path, extra: dict[str, np.ndarray], tag: str, size: int | None
    ) -> None:
        made = build_model(str(shared / "oracles" / f"ckpt_{tag}.npz"), image_size=size)
        x = tensor(extra["images"])
        assert distance(pooled(made.model, x), extra[f"{tag}/pre_logits"]) < FEATURES
        assert distance(compute_logits(made.model, x), extra[f"{tag}/logits"]) < FEATURES

    @pytest.mark.parametrize("tag", ["plain", "prelogits", "gap", "nopos"])
    def test_a_saved_folder_means_the_same_to_timm(
        self, shared: Path, tmp_path: Path, tag: str
    ) -> None:
        path = str(shared / "oracles" / f"ckpt_{tag}.npz")
        made = build_model(path, image_size=96, args={"pre_logits": tag == "prelogits"})
        folder = save_network(tmp_path / tag, made, class_names=list("abcdefghijk"))
        x = random_images(96)
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert torch.equal(compute_logits(plain, x), compute_logits(made.model, x))
        # And once more at another size: the representation layer travels along.
        smaller = build_model(folder, num_classes=3, image_size=48)
        assert compute_logits(smaller.model, random_images(48)).shape == (2, 3)

    def test_sizes_are_read_off_the_tensors(self, shared: Path) -> None:
        made = build_model(str(shared / "oracles" / "ckpt_plain.npz"), pretrained=False)
        assert made.provenance["pretrained"] is False
        assert made.model_args == {
            "patch_size": 16,
            "embed_dim": 64,
            "depth": 3,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "act_layer": "gelu_tanh",
            "img_size": [64, 64],
        }
        assert made.preprocessing.mean == (0.5, 0.5, 0.5)
        # nothing of the files that timm has for the architecture
        assert not {"tag", "license", "url", "hf_hub_id"} & made.model.pretrained_cfg.keys()

    def test_a_layer_that_is_not_there(self, shared: Path) -> None:
        with refused("weights.missing_tensors", "ckpt_plain.npz", "pre_logits/kernel"):
            build_model(str(shared / "oracles" / "ckpt_plain.npz"), args={"pre_logits": True})

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

# both compute in float32, three blocks deep, with sums in another order: 4e-6 measured.
MAX_DIFFERENCE = 1e-5


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit.npz") as archive:
        return dict(archive.items())


@pytest.fixture(scope="module")
def extra_oracle(shared: Path) -> dict[str, np.ndarray]:
    with np.load(shared / "oracles" / "oracle_vit_extra.npz") as archive:
        return dict(archive.items())


def to_bchw(images_BHWC: np.ndarray) -> Tensor:
    return torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)


def max_difference(actual: Tensor, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float((actual.detach() - torch.from_numpy(expected)).abs().max())


@torch.no_grad()
def compute_pre_logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    model.eval()
    return model.forward_head(model.forward_features(images_BCHW), pre_logits=True)


class TestParityWithJax:
    """The references are the same small networks, run with Google's JAX code."""

    @pytest.mark.parametrize("layout", ["", "_linen"])
    @pytest.mark.parametrize("tag", ["plain", "prelogits"])
    def test_pretrained_network(
        self, shared: Path, oracle: dict[str, np.ndarray], tag: str, layout: str
    ) -> None:
        path = shared / "oracles" / f"ckpt_{tag}{layout}.npz"
        built = build_model(str(path), args={"pre_logits": tag == "prelogits"})
        x = to_bchw(oracle["images64"])
        tokens = built.model.eval().forward_features(x)
        assert (
            max_difference(tokens, oracle[f"{tag}/inter64/Transformer/encoder_norm"])
            < MAX_DIFFERENCE
        )
        assert (
            max_difference(compute_pre_logits(built.model, x), oracle[f"{tag}/pre_logits64"])
            < MAX_DIFFERENCE
        )
        assert (
            max_difference(compute_logits(built.model, x), oracle[f"{tag}/logits64"])
            < MAX_DIFFERENCE
        )

    @pytest.mark.parametrize("size", [96, 48])
    @pytest.mark.parametrize(
        "tag, width", [("plain", None), ("prelogits", None), ("prelogits", 48)]
    )
    def test_initial_state_of_fine_tuning_at_another_size(
        self,
        shared: Path,
        oracle: dict[str, np.ndarray],
        tag: str,
        width: int | None,
        size: int,
    ) -> None:
        path = shared / "oracles" / f"ckpt_{tag}.npz"
        args = {"pre_logits": width is not None}
        built = build_model(str(path), num_classes=7, image_size=size, args=args)
        key, x = f"{tag}/ft{size}_rep{width}", to_bchw(oracle[f"images{size}"])
        assert max_difference(built.model.pos_embed, oracle[f"{key}/pos_embedding"]) < 1e-6
        assert (
            max_difference(compute_pre_logits(built.model, x), oracle[f"{key}/pre_logits"])
            < MAX_DIFFERENCE
        )
        head = built.model.get_submodule("head")
        assert max_difference(head.weight.T, oracle[f"{key}/head_kernel"]) == 0
        assert max_difference(compute_logits(built.model, x), oracle[f"{key}/logits"]) == 0

    @pytest.mark.parametrize("tag, size", [("gap", None), ("nopos", 64)])
    def test_average_pooling_and_no_positions(
        self, shared: Path, extra_oracle: dict[str, np.ndarray], tag: str, size: int | None
    ) -> None:
        built = build_model(str(shared / "oracles" / f"ckpt_{tag}.npz"), image_size=size)
        x = to_bchw(extra_oracle["images"])
        assert (
            max_difference(compute_pre_logits(built.model, x), extra_oracle[f"{tag}/pre_logits"])
            < MAX_DIFFERENCE
        )
        assert (
            max_difference(compute_logits(built.model, x), extra_oracle[f"{tag}/logits"])
            < MAX_DIFFERENCE
        )

    @pytest.mark.parametrize("tag", ["plain", "prelogits", "gap", "nopos"])
    def test_saved_folders_load_in_timm(self, shared: Path, tmp_path: Path, tag: str) -> None:
        path = str(shared / "oracles" / f"ckpt_{tag}.npz")
        built = build_model(path, image_size=96, args={"pre_logits": tag == "prelogits"})
        folder = save_network(tmp_path / tag, built, class_names=list("abcdefghijk"))
        x = random_images(96)
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert torch.equal(compute_logits(timm_model, x), compute_logits(built.model, x))
        # At yet another size: the representation layer is kept.
        smaller = build_model(folder, num_classes=3, image_size=48)
        assert compute_logits(smaller.model, random_images(48)).shape == (2, 3)

    def test_reads_sizes_from_the_tensors(self, shared: Path) -> None:
        built = build_model(str(shared / "oracles" / "ckpt_plain.npz"), pretrained=False)
        assert built.provenance["pretrained"] is False
        assert built.model_args == {
            "patch_size": 16,
            "embed_dim": 64,
            "depth": 3,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "act_layer": "gelu_tanh",
            "img_size": [64, 64],
        }
        assert built.preprocessing.mean == (0.5, 0.5, 0.5)
        # no metadata of the weights that timm has for the architecture
        assert not {"tag", "license", "url", "hf_hub_id"} & built.model.pretrained_cfg.keys()

    def test_rejects_a_missing_representation_layer(self, shared: Path) -> None:
        with refused("weights.missing_tensors", "ckpt_plain.npz", "pre_logits/kernel"):
            build_model(str(shared / "oracles" / "ckpt_plain.npz"), args={"pre_logits": True})

    def test_rejects_the_weights_of_two_networks(self, tmp_path: Path) -> None:
        kernel = np.ones((4, 4, 3, 8), np.float32)
        names = ("embedding/kernel", "opt/target/embedding/kernel")
        np.savez(tmp_path / "two.npz", **dict.fromkeys(names, kernel))
        with refused("weights.other_names", "two.npz", "'opt/target/'"):
            build_model(str(tmp_path / "two.npz"))

"""models/weights/load.py: position embeddings at any size, and all of the weights or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from networks import (
    NETWORKS,
    TINY_ARGS,
    build_network,
    compute_logits,
    random_images,
    save_network,
    save_random_network,
)
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.models.build import build_model
from finetune.models.weights.resize_posemb import resize_posemb

# timm's own interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]


class TestImageSize:
    @pytest.mark.parametrize("key", ["vit", "vit_average", "distilled", "registers", "beit"])
    @pytest.mark.parametrize("size", [48, 24, (48, 32)])
    def test_timms_resizing_is_timms(
        self, key: str, size: int | tuple[int, int], tmp_path: Path
    ) -> None:
        folder = save_random_network(tmp_path, key)
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size)
        ours = build_model(folder, image_size=size, posemb="timm")
        x = random_images(size)
        assert torch.equal(compute_logits(plain, x), compute_logits(ours.model, x))

    @pytest.mark.parametrize(
        "key", ["vit", "vit_average", "distilled", "registers", "cait", "representation"]
    )
    @pytest.mark.parametrize("grid", [(6, 6), (3, 3), (6, 4), (2, 8)])
    def test_the_papers_resizing(self, key: str, grid: tuple[int, int], tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, key)
        before = load_file(f"{folder}/model.safetensors")["pos_embed"]
        made = build_model(folder, image_size=(8 * grid[0], 8 * grid[1]))
        after = made.model.pos_embed
        num_prefix = before.shape[1] - 16
        counts = {"vit": 1, "vit_average": 1, "representation": 1, "distilled": 2}
        assert num_prefix == counts.get(key, 0)
        assert torch.equal(after, resize_posemb(before, grid, num_prefix_tokens=num_prefix))
        assert made.provenance["posemb"] == "paper"
        assert made.preprocessing.image_size == (8 * grid[0], 8 * grid[1])
        assert compute_logits(made.model, random_images(made.preprocessing.image_size)).any()

    def test_from_oblong_to_square_and_back(self, tmp_path: Path) -> None:
        oblong = build_model(save_random_network(tmp_path, "vit"), image_size=(16, 72))
        folder = save_network(tmp_path / "oblong", oblong)
        kept = build_model(folder)
        assert kept.preprocessing.image_size == (16, 72)
        assert torch.equal(kept.model.pos_embed, oblong.model.pos_embed)
        # 2 x 9 patches; and 3 x 6 are as many, but not the same.
        other = build_model(folder, image_size=(24, 48))
        expected = resize_posemb(oblong.model.pos_embed, (3, 6), source_grid=(2, 9))
        assert torch.equal(other.model.pos_embed, expected)

    def test_relative_positions_are_timms_affair(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = save_random_network(tmp_path, "swin")
        args = {"window_size": 8}
        ours = build_model(folder, image_size=64, args=args)
        assert ours.provenance["posemb"] == "timm"
        assert "does not apply" in caplog.text
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=64, **args)
        x = random_images(64)
        assert torch.equal(compute_logits(plain, x), compute_logits(ours.model, x))

    @pytest.mark.parametrize("key", ["swin", "convnext", "resnet", "byobnet", "cait", "shiftvit"])
    def test_every_network_moves_to_another_size(self, key: str, tmp_path: Path) -> None:
        size = NETWORKS[key][3]
        made = build_model(save_random_network(tmp_path, key), image_size=size)
        assert compute_logits(made.model, random_images(size)).shape == (2, 5)
        assert made.preprocessing.image_size == (size, size)


class TestLoading:
    def test_a_missing_head_is_no_error(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        state = load_file(f"{folder}/model.safetensors")
        del state["head.weight"], state["head.bias"]
        save_file(state, f"{folder}/model.safetensors")
        made = build_model(folder, num_classes=7)
        assert torch.equal(made.model.cls_token, state["cls_token"])
        with refused("weights.missing_tensors", "2 missing: head.weight, head.bias"):
            build_model(folder)

    def test_weights_that_never_had_a_head(self, tmp_path: Path) -> None:
        made = build_network("vit", num_classes=0, head_init="default")
        folder = save_network(tmp_path / "none", made, class_names=[])
        assert build_model(folder, num_classes=3).model.get_submodule("head").weight.shape == (
            3,
            32,
        )
        assert compute_logits(build_model(folder).model, random_images(32)).shape == (2, 32)

    def test_missing_tensors(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        state = load_file(f"{folder}/model.safetensors")
        removed = [k for k in state if k.startswith("blocks.1.")]
        for key in removed:
            del state[key]
        save_file(state, f"{folder}/model.safetensors")
        with refused("weights.missing_tensors", f"{len(removed)} missing: blocks.1.norm1"):
            build_model(folder, num_classes=5)

    def test_shapes_that_do_not_fit(self, tmp_path: Path) -> None:
        with refused("weights.wrong_shape", "cls_token (1, 1, 32) for (1, 1, 48)") as caught:
            build_model(save_random_network(tmp_path, "vit"), num_classes=5, args={"embed_dim": 48})
        assert str(caught.value).count(" for (") == 3

    def test_tensors_of_another_network(self, tmp_path: Path) -> None:
        path = f"{save_random_network(tmp_path, 'resnet')}/model.safetensors"
        with refused("weights.missing_tensors", " missing: cls_token", "not of this network: "):
            build_model(
                path, num_classes=5, args={"architecture": "vit_tiny_patch16_224", **TINY_ARGS}
            )

    def test_half_precision_weights(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        state = load_file(f"{folder}/model.safetensors")
        halves = {k: v.half() for k, v in state.items()}
        save_file(halves, f"{folder}/model.safetensors")
        made = build_model(folder, num_classes=5)
        assert all(p.dtype == torch.float32 for p in made.model.parameters())
        assert torch.equal(made.model.cls_token, halves["cls_token"].float())

    def test_another_patch_size_is_resampled_by_timm(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        made = build_model(folder, image_size=64, args={"patch_size": 4})
        before = load_file(f"{folder}/model.safetensors")["pos_embed"]
        assert made.provenance["posemb"] == "paper"
        assert torch.equal(made.model.pos_embed, resize_posemb(before, (16, 16)))
        assert made.model.patch_embed.proj.weight.shape == (32, 3, 4, 4)
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=64, patch_size=4)
        ours, theirs = made.model.state_dict(), plain.state_dict()
        different = [k for k in ours if not torch.equal(ours[k], theirs[k])]
        assert different == ["pos_embed"]

    def test_another_patch_size_and_another_shape(self, tmp_path: Path) -> None:
        oblong = build_model(save_random_network(tmp_path, "vit"), image_size=(16, 72))
        folder = save_network(tmp_path / "oblong", oblong)
        # 2 x 9 patches become 3 x 6: as many, so that timm would take ours for the source's.
        made = build_model(folder, image_size=(12, 24), args={"patch_size": 4})
        expected = resize_posemb(oblong.model.pos_embed, (3, 6), source_grid=(2, 9))
        assert torch.equal(made.model.pos_embed, expected)

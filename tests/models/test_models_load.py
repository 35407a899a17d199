"""models/weights/load.py: position embeddings of any size; loads all weights or none."""

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
    forget_checksums,
    random_images,
    save_network,
    save_random_network,
)
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.models.build import build_model
from finetune.models.weights.resize_posemb import resize_posemb

# warnings of timm's interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]


class TestImageSize:
    @pytest.mark.parametrize(
        "key, size",
        [
            *(("vit", size) for size in (48, 24, (48, 32))),
            *((key, (48, 32)) for key in ("vit_average", "distilled", "registers", "beit")),
        ],
    )
    def test_posemb_timm_equals_timm(
        self, key: str, size: int | tuple[int, int], tmp_path: Path
    ) -> None:
        folder = save_random_network(tmp_path, key)
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size)
        ours = build_model(folder, image_size=size, posemb="timm")
        x = random_images(size)
        assert torch.equal(compute_logits(timm_model, x), compute_logits(ours.model, x))

    @pytest.mark.parametrize(
        "key, grid",
        [
            *(("vit", grid) for grid in ((6, 6), (3, 3), (2, 8))),
            *((key, (2, 8)) for key in ("vit_average", "distilled", "registers")),
            *((key, (2, 8)) for key in ("cait", "representation")),
        ],
    )
    def test_posemb_paper_equals_the_paper(
        self, key: str, grid: tuple[int, int], tmp_path: Path
    ) -> None:
        folder = save_random_network(tmp_path, key)
        source_table = load_file(f"{folder}/model.safetensors")["pos_embed"]
        built = build_model(folder, image_size=(8 * grid[0], 8 * grid[1]), posemb="paper")
        resized_table = built.model.pos_embed
        num_prefix_tokens = source_table.shape[1] - 16
        num_prefix_by_key = {"vit": 1, "vit_average": 1, "representation": 1, "distilled": 2}
        assert num_prefix_tokens == num_prefix_by_key.get(key, 0)
        assert torch.equal(
            resized_table, resize_posemb(source_table, grid, num_prefix_tokens=num_prefix_tokens)
        )
        assert built.provenance["posemb"] == "paper"
        assert built.preprocessing.image_size == (8 * grid[0], 8 * grid[1])
        assert compute_logits(built.model, random_images(built.preprocessing.image_size)).any()

    @pytest.mark.parametrize("saved, expected", [("dinov2", "dinov2"), ("auto", "paper")])
    def test_posemb_auto_resizes_as_the_weights_say(
        self, saved: str, expected: str, tmp_path: Path
    ) -> None:
        source = build_network("vit", posemb=saved)  # its tag in timm's registry is Google's
        built = build_model(save_network(tmp_path / "net", source), image_size=48)
        assert built.provenance["posemb"] == expected
        table = resize_posemb(source.model.pos_embed, (6, 6), method=expected)
        assert torch.equal(built.model.pos_embed, table)

    def test_oblong_position_grids(self, tmp_path: Path) -> None:
        oblong = build_model(save_random_network(tmp_path, "vit"), image_size=(16, 72))
        folder = save_network(tmp_path / "oblong", oblong)
        reloaded = build_model(folder)
        assert reloaded.preprocessing.image_size == (16, 72)
        assert torch.equal(reloaded.model.pos_embed, oblong.model.pos_embed)
        # 2 x 9 and 3 x 6 patches are equally many, but not the same grid.
        resized = build_model(folder, image_size=(24, 48))
        expected = resize_posemb(oblong.model.pos_embed, (3, 6), source_grid=(2, 9))
        assert torch.equal(resized.model.pos_embed, expected)

    def test_timm_resizes_relative_positions(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = save_random_network(tmp_path, "swin")
        args = {"window_size": 8}
        ours = build_model(folder, image_size=64, args=args)
        assert "does not apply" not in caplog.text
        build_model(folder, image_size=64, posemb="paper", args=args)
        assert "does not apply" in caplog.text
        assert ours.provenance["posemb"] == "timm"
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=64, **args)
        x = random_images(64)
        assert torch.equal(compute_logits(timm_model, x), compute_logits(ours.model, x))

    @pytest.mark.parametrize("key", ["swin", "convnext", "resnet", "byobnet", "cait", "shiftvit"])
    def test_every_network_loads_at_another_size(self, key: str, tmp_path: Path) -> None:
        size = NETWORKS[key][3]
        built = build_model(save_random_network(tmp_path, key), image_size=size)
        assert compute_logits(built.model, random_images(size)).shape == (2, 5)
        assert built.preprocessing.image_size == (size, size)


class TestLoading:
    def test_a_missing_head_is_an_error_only_without_num_classes(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        state = load_file(f"{folder}/model.safetensors")
        del state["head.weight"], state["head.bias"]
        save_file(state, f"{folder}/model.safetensors")
        built = build_model(folder, num_classes=7)
        assert torch.equal(built.model.cls_token, state["cls_token"])
        with refused("weights.missing_tensors", "2 missing: head.weight, head.bias"):
            build_model(folder)

    def test_weights_of_a_network_without_a_head(self, tmp_path: Path) -> None:
        built = build_network("vit", num_classes=0, head_init="default")
        folder = save_network(tmp_path / "none", built, class_names=[])
        assert build_model(folder, num_classes=3).model.get_submodule("head").weight.shape == (
            3,
            32,
        )
        assert compute_logits(build_model(folder).model, random_images(32)).shape == (2, 32)

    def test_rejects_missing_tensors(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        state = load_file(f"{folder}/model.safetensors")
        removed = [name for name in state if name.startswith("blocks.1.")]
        for key in removed:
            del state[key]
        save_file(state, f"{folder}/model.safetensors")
        with refused("weights.missing_tensors", f"{len(removed)} missing: blocks.1.norm1"):
            build_model(folder, num_classes=5)

    def test_rejects_wrong_shapes(self, tmp_path: Path) -> None:
        with refused("weights.wrong_shape", "cls_token (1, 1, 32) for (1, 1, 48)") as caught:
            build_model(save_random_network(tmp_path, "vit"), num_classes=5, args={"embed_dim": 48})
        assert str(caught.value).count(" for (") == 3

    def test_rejects_tensors_of_another_network(self, tmp_path: Path) -> None:
        path = f"{save_random_network(tmp_path, 'resnet')}/model.safetensors"
        with refused("weights.missing_tensors", " missing: cls_token", "not in this network: "):
            build_model(
                path, num_classes=5, args={"architecture": "vit_tiny_patch16_224", **TINY_ARGS}
            )

    def test_converts_half_precision_weights(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        state = load_file(f"{folder}/model.safetensors")
        halves = {name: tensor.half() for name, tensor in state.items()}
        save_file(halves, f"{folder}/model.safetensors")
        built = build_model(folder, num_classes=5)
        assert all(parameter.dtype == torch.float32 for parameter in built.model.parameters())
        assert torch.equal(built.model.cls_token, halves["cls_token"].float())

    def test_timm_resamples_another_patch_size(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        built = build_model(folder, image_size=64, args={"patch_size": 4})
        source_table = load_file(f"{folder}/model.safetensors")["pos_embed"]
        assert built.provenance["posemb"] == "paper"
        assert torch.equal(built.model.pos_embed, resize_posemb(source_table, (16, 16)))
        assert built.model.patch_embed.proj.weight.shape == (32, 3, 4, 4)
        timm_model = timm.create_model(
            f"local-dir:{folder}", pretrained=True, img_size=64, patch_size=4
        )
        our_state, timm_state = built.model.state_dict(), timm_model.state_dict()
        different = [
            name for name in our_state if not torch.equal(our_state[name], timm_state[name])
        ]
        assert different == ["pos_embed"]

    def test_another_patch_size_and_grid_shape(self, tmp_path: Path) -> None:
        oblong = build_model(save_random_network(tmp_path, "vit"), image_size=(16, 72))
        folder = save_network(tmp_path / "oblong", oblong)
        # 2 x 9 patches become 3 x 6: the same number, so timm would not resize the table.
        built = build_model(folder, image_size=(12, 24), args={"patch_size": 4})
        expected = resize_posemb(oblong.model.pos_embed, (3, 6), source_grid=(2, 9))
        assert torch.equal(built.model.pos_embed, expected)

"""models/build.py: dropout, provenance, refused values, and ViT-B/16 at full size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import NETWORKS, TINY, built, images, logits, save, saved, shuffle
from refusals import refused
from torch import nn

from finetune.models.build import build
from finetune.models.weights.resize_posemb import resize_grid
from finetune.models.weights.timm_config import CONTROL_ARGS

# timm's own interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]


class TestRegularisation:
    def test_the_papers_places_in_a_vit(self) -> None:
        made = built("vit", dropout=0.1, attention_dropout=0.2, drop_path=0.3)
        model = made.model
        assert model.pos_drop.p == 0.1
        assert model.head_drop.p == 0.0
        for block in model.blocks:
            assert block.attn.proj_drop.p == block.mlp.drop1.p == block.mlp.drop2.p == 0.1
            assert block.attn.attn_drop.p == 0.2
        assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
        assert made.provenance["dropout"] == {
            "pos_drop_rate": 0.1,
            "proj_drop_rate": 0.1,
            "attn_drop_rate": 0.2,
            "drop_path_rate": 0.3,
        }

    def test_dropout_survives_loading(self, tmp_path: Path) -> None:
        for key, size, args in (("vit", 48, {}), ("swin", 64, {"window_size": 8})):  # both roads
            made = build(
                saved(tmp_path, key),
                num_classes=5,
                image_size=size,
                attention_dropout=0.2,
                args=args,
            )
            rates = [m.p for n, m in made.model.named_modules() if n.endswith("attn_drop")]
            assert rates
            assert set(rates) == {0.2}

    def test_before_the_head_where_there_is_no_other_place(self) -> None:
        made = built("convnext", dropout=0.1)
        assert made.provenance["dropout"] == {"drop_rate": 0.1}
        assert any(isinstance(m, nn.Dropout) and m.p == 0.1 for m in made.model.modules())

    @pytest.mark.parametrize("key", ["vit", "shiftvit"])
    def test_gradient_checkpointing_changes_no_gradient(self, key: str) -> None:
        gradients, x = [], images(NETWORKS[key][2])
        for checkpointing in (False, True):
            torch.manual_seed(0)
            made = built(key, head_init="default", grad_checkpointing=checkpointing)
            flags = [getattr(m, "grad_checkpointing", None) for m in made.model.modules()]
            assert {flag for flag in flags if flag is not None} == {checkpointing}
            made.model.train()(x).square().sum().backward()
            gradients.append({n: p.grad for n, p in made.model.named_parameters()})
        assert all(gradient.any() for gradient in gradients[0].values())
        assert all(torch.equal(gradients[1][n], g) for n, g in gradients[0].items())

    def test_provenance(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, "vit")
        made = build(folder, num_classes=7, freeze="backbone")
        assert made.provenance["source"] == folder
        assert made.provenance["architecture"] == "vit_tiny_patch16_224"
        assert made.provenance["trainable_parameters"] == 7 * 32 + 7
        count = sum(p.numel() for p in made.model.parameters())
        assert made.provenance["parameters"] == count


class TestRefusals:
    @pytest.mark.parametrize(
        "size, pixels, near",
        [(225, 225, "224 or 240"), ((224, 250), 250, "240 or 256"), (9, 9, "16")],
    )
    def test_sizes_that_the_patch_does_not_divide(self, size: Any, pixels: int, near: str) -> None:
        with refused("recipe.wrong_size", "model.image_size", f"{pixels} px", near):
            build("test_vit", pretrained=False, num_classes=5, image_size=size)

    @pytest.mark.parametrize(
        "key, settings, code, named",
        [
            ("resnet", {"args": {"img_size": 64}}, "unknown_key", ["model.image_size"]),
            ("resnet", {"attention_dropout": 0.1}, "unsupported", ["model.attention_dropout"]),
            ("vit", {"posemb": "bicubic"}, "unknown_name", ["model.posemb", "'bicubic'", "timm"]),
            ("vit", {"args": {"img_size": "large"}}, "wrong_value", ["model.args.img_size"]),
            (
                "vit",
                {"args": {"embed_dims": 32}},
                "unknown_key",
                ["model.args.embed_dims", "'embed_dim'"],
            ),
            ("vit", {"args": {**TINY, "act_layer": "nope"}}, "wrong_value", ["model.args", "nope"]),
        ],
    )
    def test_values_of_the_recipe(
        self, key: str, settings: dict[str, Any], code: str, named: list[str]
    ) -> None:
        with refused(f"recipe.{code}", *named):
            built(key, **settings)

    def test_arguments_that_do_not_go_together(self) -> None:
        with refused("recipe.wrong_value", "model.args", "num_heads") as caught:
            built("vit", args={**TINY, "num_heads": 5})
        assert "px" not in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("key", CONTROL_ARGS)
    def test_arguments_that_steer_timm(self, key: str) -> None:
        with refused("recipe.unknown_key", f"model.args.{key}: "):
            built("vit", args={**TINY, key: 10})

    def test_the_place_of_other_arguments(self) -> None:
        with refused("recipe.unknown_key") as caught:
            built("vit", args={"pretrained": False, "num_classes": 3, "foo:1": None})
        lines = str(caught.value).splitlines()
        assert "model.pretrained" in lines[0]
        assert "from the data" in lines[1]
        assert "model.args.foo:1: " in lines[2]

    @pytest.mark.parametrize("argument", [{"global_pool": "nope"}, {"no_such": 1}, {"depth": "x"}])
    def test_values_that_timm_refuses_are_the_folders(
        self, argument: dict[str, Any], tmp_path: Path
    ) -> None:
        folder = saved(tmp_path, "vit")
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        config["model_args"] |= argument
        path.write_text(json.dumps(config))
        for num_classes in (None, 3):
            with refused("weights.wrong_config", folder, "config.json") as caught:
                build(folder, num_classes=num_classes, image_size=48)
            assert "image_size" not in str(caught.value)

    def test_the_recipes_arguments_on_a_good_folder(self, tmp_path: Path) -> None:
        with refused("recipe.wrong_value", "model.args", "{'num_heads': 7}"):
            build(saved(tmp_path, "vit"), num_classes=3, args={"num_heads": 7})

    def test_names_for_another_number_of_classes(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, "vit")
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        names = [*config["label_names"], "fox"]
        path.write_text(json.dumps({**config, "num_classes": 6, "label_names": names}))
        with refused("weights.wrong_config", "label_names", "6 names", "5 classes"):
            build(folder)


def test_vit_b_16_from_a_folder_to_384_px_and_back(tmp_path: Path) -> None:
    """The layout of vit_base_patch16_224.augreg_in21k, with a block of its 12."""
    source = build("vit_base_patch16_224.augreg_in21k", pretrained=False, args={"depth": 1})
    assert source.provenance["parameters"] == 102_595_923 - 11 * 7_087_872
    shuffle(source.model)
    names = [str(index) for index in range(21_843)]
    folder = save(tmp_path / "pretrained", source, names=names)
    pretrained_pos = source.model.pos_embed.detach().clone()
    del source

    made = build(folder, num_classes=10, image_size=384)
    assert made.provenance["posemb"] == "paper"
    assert torch.equal(made.model.pos_embed, resize_grid(pretrained_pos, (24, 24)))
    x = images(384, 1)
    assert torch.equal(logits(made.model, x), torch.zeros(1, 10))
    shuffle(made.model)
    again = save(tmp_path / "fine_tuned", made, names=list("abcdefghij"))
    plain = timm.create_model(f"local-dir:{again}", pretrained=True)
    assert plain.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    assert torch.equal(logits(plain, x), logits(made.model, x))

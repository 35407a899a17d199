"""models/build.py: dropout, provenance, invalid values, and ViT-B/16 at full width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    randomize_head,
    save_network,
    save_random_network,
)
from refusals import refused
from torch import nn

from finetune.models.build import build_model
from finetune.models.weights.resize_posemb import resize_posemb
from finetune.models.weights.timm_config import CONTROL_ARGS

# warnings of timm's interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]


class TestRegularization:
    def test_dropout_rates_of_a_vit(self) -> None:
        built = build_network("vit", dropout=0.1, attention_dropout=0.2, drop_path=0.3)
        model = built.model
        assert model.pos_drop.p == 0.1
        assert model.head_drop.p == 0.0
        for block in model.blocks:
            assert block.attn.proj_drop.p == block.mlp.drop1.p == block.mlp.drop2.p == 0.1
            assert block.attn.attn_drop.p == 0.2
        assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
        assert built.provenance["dropout"] == {
            "pos_drop_rate": 0.1,
            "proj_drop_rate": 0.1,
            "attn_drop_rate": 0.2,
            "drop_path_rate": 0.3,
        }

    def test_dropout_survives_loading(self, tmp_path: Path) -> None:
        # resized by us, and by timm
        for key, size, args in (("vit", 48, {}), ("swin", 64, {"window_size": 8})):
            built = build_model(
                save_random_network(tmp_path, key),
                num_classes=5,
                image_size=size,
                attention_dropout=0.2,
                args=args,
            )
            rates = [
                module.p
                for name, module in built.model.named_modules()
                if name.endswith("attn_drop")
            ]
            assert rates
            assert set(rates) == {0.2}

    def test_dropout_before_the_head_of_a_convnet(self) -> None:
        built = build_network("convnext", dropout=0.1)
        assert built.provenance["dropout"] == {"drop_rate": 0.1}
        assert any(
            isinstance(module, nn.Dropout) and module.p == 0.1 for module in built.model.modules()
        )

    @pytest.mark.parametrize(
        "name, arguments",
        [
            ("poolformer_s12", {"proj_drop_rate": 0.1}),  # explicit arguments, then **kwargs
            ("deit_tiny_distilled_patch16_224", {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1}),
            ("naflexvit_base_patch16_gap", {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1}),
        ],
    )
    def test_dropout_uses_the_arguments_that_the_network_has(
        self, name: str, arguments: dict[str, float]
    ) -> None:
        args = {} if name == "poolformer_s12" else {"depth": 1}
        built = build_model(name, pretrained=False, num_classes=3, dropout=0.1, args=args)
        assert built.provenance["dropout"] == arguments

    @pytest.mark.parametrize("key", ["vit", "shiftvit"])
    def test_gradient_checkpointing_does_not_change_gradients(self, key: str) -> None:
        gradients, x = [], random_images(NETWORKS[key][2])
        for checkpointing in (False, True):
            torch.manual_seed(0)
            built = build_network(key, head_init="default", grad_checkpointing=checkpointing)
            flags = [getattr(m, "grad_checkpointing", None) for m in built.model.modules()]
            assert {flag for flag in flags if flag is not None} == {checkpointing}
            built.model.train()(x).square().sum().backward()
            gradients.append(
                {name: parameter.grad for name, parameter in built.model.named_parameters()}
            )
        assert all(gradient.any() for gradient in gradients[0].values())
        assert all(
            torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items()
        )

    def test_provenance(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        built = build_model(folder, num_classes=7, freeze="backbone")
        assert built.provenance["source"] == folder
        assert built.provenance["architecture"] == "vit_tiny_patch16_224"
        assert built.provenance["trainable_parameters"] == 7 * 32 + 7
        count = sum(p.numel() for p in built.model.parameters())
        assert built.provenance["parameters"] == count


class TestErrors:
    @pytest.mark.parametrize(
        "size, pixels, suggestion",
        [(225, 225, "224 or 240"), ((224, 250), 250, "240 or 256"), (9, 9, "16")],
    )
    def test_rejects_sizes_that_the_patch_does_not_divide(
        self, size: Any, pixels: int, suggestion: str
    ) -> None:
        with refused("recipe.wrong_size", "model.image_size", f"{pixels} px", suggestion):
            build_model("test_vit", pretrained=False, num_classes=5, image_size=size)

    @pytest.mark.parametrize(
        "key, settings, code, expected_texts",
        [
            ("resnet", {"args": {"img_size": 64}}, "unknown_key", ["model.image_size"]),
            ("resnet", {"attention_dropout": 0.1}, "unsupported", ["model.attention_dropout"]),
            ("convnext", {"attention_dropout": 0.1}, "unsupported", ["model.attention_dropout"]),
            ("vit", {"posemb": "bicubic"}, "unknown_name", ["model.posemb", "'bicubic'", "timm"]),
            ("vit", {"args": {"img_size": "large"}}, "wrong_value", ["model.args.img_size"]),
            (
                "vit",
                {"args": {"embed_dims": 32}},
                "unknown_key",
                ["model.args.embed_dims", "'embed_dim'"],
            ),
            (
                "vit",
                {"args": {**TINY_ARGS, "act_layer": "nope"}},
                "wrong_value",
                ["model.args", "nope"],
            ),
        ],
    )
    def test_rejects_invalid_recipe_values(
        self, key: str, settings: dict[str, Any], code: str, expected_texts: list[str]
    ) -> None:
        with refused(f"recipe.{code}", *expected_texts):
            build_network(key, **settings)

    def test_rejects_arguments_that_do_not_fit_together(self) -> None:
        with refused("recipe.wrong_value", "model.args", "num_heads") as caught:
            build_network("vit", args={**TINY_ARGS, "num_heads": 5})
        assert "px" not in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("key", CONTROL_ARGS)
    def test_rejects_arguments_that_control_timm(self, key: str) -> None:
        with refused("recipe.unknown_key", f"model.args.{key}: "):
            build_network("vit", args={**TINY_ARGS, key: 10})

    def test_names_the_recipe_key_of_other_arguments(self) -> None:
        with refused("recipe.unknown_key") as caught:
            build_network("vit", args={"pretrained": False, "num_classes": 3, "foo:1": None})
        lines = str(caught.value).splitlines()
        assert "model.pretrained" in lines[0]
        assert "from the data" in lines[1]
        assert "model.args.foo:1: " in lines[2]

    @pytest.mark.parametrize("argument", [{"global_pool": "nope"}, {"no_such": 1}, {"depth": "x"}])
    def test_blames_the_folder_for_its_invalid_arguments(
        self, argument: dict[str, Any], tmp_path: Path
    ) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        config["model_args"] |= argument
        path.write_text(json.dumps(config))
        for num_classes in (None, 3):
            with refused("weights.wrong_config", folder, "config.json") as caught:
                build_model(folder, num_classes=num_classes, image_size=48)
            assert "image_size" not in str(caught.value)

    def test_blames_the_recipe_for_its_invalid_arguments(self, tmp_path: Path) -> None:
        with refused("recipe.wrong_value", "model.args", "{'num_heads': 7}"):
            build_model(save_random_network(tmp_path, "vit"), num_classes=3, args={"num_heads": 7})

    def test_rejects_a_wrong_number_of_class_names(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        names = [*config["label_names"], "fox"]
        path.write_text(json.dumps({**config, "num_classes": 6, "label_names": names}))
        with refused("weights.wrong_config", "label_names", "6 names", "5 classes"):
            build_model(folder)


@pytest.mark.faults
def test_vit_b_16_at_384_px_saves_and_loads_in_timm(tmp_path: Path) -> None:
    """The layout of vit_base_patch16_224.augreg_in21k with one of its 12 blocks."""
    source = build_model("vit_base_patch16_224.augreg_in21k", pretrained=False, args={"depth": 1})
    assert source.provenance["parameters"] == 102_595_923 - 11 * 7_087_872
    randomize_head(source.model)
    names = [str(index) for index in range(21_843)]
    folder = save_network(tmp_path / "pretrained", source, class_names=names)
    pretrained_pos = source.model.pos_embed.detach().clone()
    del source

    built = build_model(folder, num_classes=10, image_size=384)
    assert built.provenance["posemb"] == "paper"
    assert torch.equal(built.model.pos_embed, resize_posemb(pretrained_pos, (24, 24)))
    x = random_images(384, 1)
    assert torch.equal(compute_logits(built.model, x), torch.zeros(1, 10))
    randomize_head(built.model)
    saved_folder = save_network(tmp_path / "fine_tuned", built, class_names=list("abcdefghij"))
    timm_model = timm.create_model(f"local-dir:{saved_folder}", pretrained=True)
    assert timm_model.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    assert torch.equal(compute_logits(timm_model, x), compute_logits(built.model, x))

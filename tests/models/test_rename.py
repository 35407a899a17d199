"""models/weights/rename.py: other names become timm's names; wrong patterns are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from networks import SMALL_VIT_ARGS, compute_logits
from refusals import refused
from torch import Tensor

from finetune.models.build import build_model
from finetune.models.weights.rename import match_by_shape, rename_tensors
from finetune.models.weights.resolve import resolve_weights

NAME = "vit_tiny_patch16_224"
ARGS = {"architecture": NAME, **SMALL_VIT_ARGS}


def state_with_names(*names: str) -> dict[str, Tensor]:
    return {name: torch.full((2,), float(index)) for index, name in enumerate(names)}


class TestRenameTensors:
    def test_applies_patterns_in_order(self) -> None:
        state = state_with_names("net.bn1.weight", "net.bn2.weight", "net.fc.bias")
        rename = {r"^net\.": "", "bn2": "bn3", "bn1": "bn2", r"^(f)(c)": r"\2\1"}
        result = rename_tensors(state, rename, source="w.pth")
        assert list(result) == ["bn2.weight", "bn3.weight", "cf.bias"]
        assert all(
            renamed is original
            for renamed, original in zip(result.values(), state.values(), strict=True)
        )

    @pytest.mark.parametrize(
        "names, rename, expected_texts",
        [
            (["net.a"], {"^nut": ""}, ["'^nut'", "net.a"]),
            (["a.weight", "b.weight"], {"^[ab]": "c"}, ["a.weight", "b.weight", "c.weight"]),
            # in the order of test_applies_patterns_in_order both names stay distinct
            (
                ["net.bn1.weight", "net.bn2.weight"],
                {r"^net\.": "", "bn1": "bn2", "bn2": "bn3"},
                ["net.bn1.weight", "net.bn2.weight", "bn3.weight"],
            ),
            (["bn.weight"], {"weight": "bias"}, ["bn.weight", "bn.bias"]),
        ],
    )
    def test_rejects_wrong_patterns(
        self, names: list[str], rename: dict[str, str], expected_texts: list[str]
    ) -> None:
        with refused("weights.wrong_rename", "w.pth", "model.rename", *expected_texts):
            rename_tensors(state_with_names(*names), rename, source="w.pth")

    def test_other_names_may_map_to_any_kind(self) -> None:
        assert list(
            rename_tensors(state_with_names("bn.gamma"), {"gamma": "weight"}, source="")
        ) == ["bn.weight"]

    def test_rejects_a_negative_variance(self) -> None:
        state = {"bn.moving": torch.tensor([1.0, -0.1])}
        with refused("weights.wrong_rename", "bn.moving", "bn.running_var"):
            rename_tensors(state, {"moving": "running_var"}, source="w.pth")
        assert rename_tensors({"bn.moving": torch.ones(2)}, {"moving": "running_var"}, source="")


class TestMatchByShape:
    def test_matches_shapes_in_order(self) -> None:
        timm_state = state_with_names("a.weight", "a.bias")
        assert match_by_shape(state_with_names("x.weight", "x.bias"), timm_state) == [
            ("x.weight", "a.weight"),
            ("x.bias", "a.bias"),
        ]

    def test_no_match_for_another_order_count_or_shape(self) -> None:
        timm_state = state_with_names("a.weight", "a.bias")
        assert match_by_shape(state_with_names("x.bias", "x.weight"), timm_state) == []
        assert match_by_shape(state_with_names("x.weight"), timm_state) == []
        assert (
            match_by_shape({**state_with_names("x.weight"), "x.bias": torch.zeros(3)}, timm_state)
            == []
        )
        assert (
            match_by_shape(
                {**state_with_names("x.weight"), "x.bias": torch.zeros(2, 1)}, timm_state
            )
            == []
        )

    def test_the_head_may_have_another_number_of_classes(self) -> None:
        other_state, timm_state = (
            {"fc.weight": torch.zeros(9, 4)},
            {"head.weight": torch.zeros(5, 4)},
        )
        assert match_by_shape(other_state, timm_state) == []
        assert match_by_shape(other_state, timm_state, head_names=["head"]) == [
            ("fc.weight", "head.weight")
        ]
        assert (
            match_by_shape({"fc.weight": torch.zeros(9, 3)}, timm_state, head_names=["head"]) == []
        )


@pytest.fixture
def foreign_weights(tmp_path: Path) -> Path:
    """Save a network of three classes with other parameter names."""
    network = timm.create_model(NAME, num_classes=3, **SMALL_VIT_ARGS)
    path = tmp_path / "w.pth"
    torch.save(
        {
            f"net.{name}".replace("qkv", "q_k_v"): tensor
            for name, tensor in network.state_dict().items()
        },
        path,
    )
    return path


RENAME = {r"^net\.": "", "q_k_v": "qkv"}


class TestBuildWithRename:
    def test_loads_renamed_weights(self, foreign_weights: Path) -> None:
        built = build_model(str(foreign_weights), args=ARGS, rename=RENAME)
        assert built.provenance["rename"] == RENAME
        state = torch.load(foreign_weights, weights_only=True)
        network = timm.create_model(NAME, num_classes=3, **SMALL_VIT_ARGS)
        network.load_state_dict({renamed_key(name): tensor for name, tensor in state.items()})
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(compute_logits(built.model, x), compute_logits(network, x))

    def test_new_head_with_renamed_weights(self, foreign_weights: Path) -> None:
        built = build_model(str(foreign_weights), num_classes=7, args=ARGS, rename=RENAME)
        assert built.model.get_submodule("head").weight.shape == (7, 16)
        state = torch.load(foreign_weights, weights_only=True)
        assert torch.equal(built.model.state_dict()["pos_embed"], state["net.pos_embed"])

    def test_does_not_rename_without_pretrained_weights(self, foreign_weights: Path) -> None:
        weights = resolve_weights(str(foreign_weights), pretrained=False, args=ARGS, rename=RENAME)
        assert weights.state is None
        assert "rename" not in weights.provenance
        assert "rename" not in resolve_weights(str(foreign_weights), args=ARGS).provenance

    @pytest.mark.parametrize("num_classes", [None, 7])
    def test_error_pairs_the_tensors_if_only_names_differ(
        self, foreign_weights: Path, num_classes: int | None
    ) -> None:
        with refused("weights.other_names", "net.cls_token is cls_token", "model.rename"):
            build_model(str(foreign_weights), num_classes=num_classes, args=ARGS)

    def test_tensors_in_another_order(self, foreign_weights: Path) -> None:
        state = torch.load(foreign_weights, weights_only=True)
        names = list(state)
        weight_index, bias_index = names.index("net.norm.weight"), names.index("net.norm.bias")
        names[weight_index], names[bias_index] = names[bias_index], names[weight_index]
        torch.save({name: state[name] for name in names}, foreign_weights)
        with refused("weights.missing_tensors", "model.name"):
            build_model(str(foreign_weights), args=ARGS)
        # with a rename, tensors are matched by name
        assert build_model(str(foreign_weights), args=ARGS, rename=RENAME).provenance["rename"]

    def test_error_names_insufficient_patterns(self, foreign_weights: Path) -> None:
        with refused("weights.missing_tensors", "model.rename", "blocks.0.attn.qkv.weight"):
            build_model(str(foreign_weights), args=ARGS, rename={r"^net\.": ""})


def renamed_key(key: str) -> str:
    return key.removeprefix("net.").replace("q_k_v", "qkv")

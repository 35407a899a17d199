"""models/weights/rename.py: foreign names become timm's, and wrong patterns are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import yaml
from networks import SMALL_VIT_ARGS, compute_logits
from refusals import refused
from torch import Tensor

from finetune.models.build import build_model
from finetune.models.head import classifier_names
from finetune.models.weights.rename import main, match_by_shape, propose_patterns, rename_tensors
from finetune.models.weights.resolve import resolve_weights

NAME = "vit_tiny_patch16_224"
ARGS = {"architecture": NAME, **SMALL_VIT_ARGS}


def state_of(*names: str) -> dict[str, Tensor]:
    return {name: torch.full((2,), float(index)) for index, name in enumerate(names)}


class TestRenamed:
    def test_patterns_follow_one_another(self) -> None:
        state = state_of("net.bn1.weight", "net.bn2.weight", "net.fc.bias")
        rename = {r"^net\.": "", "bn2": "bn3", "bn1": "bn2", r"^(f)(c)": r"\2\1"}
        result = rename_tensors(state, rename, source="w.pth")
        assert list(result) == ["bn2.weight", "bn3.weight", "cf.bias"]
        assert all(one is other for one, other in zip(result.values(), state.values(), strict=True))

    @pytest.mark.parametrize(
        "names, rename, named",
        [
            (["net.a"], {"^nut": ""}, ["'^nut'", "net.a"]),
            (["a.weight", "b.weight"], {"^[ab]": "c"}, ["a.weight", "b.weight", "c.weight"]),
            # in the order of test_patterns_follow_one_another both keep a name of their own
            (
                ["net.bn1.weight", "net.bn2.weight"],
                {r"^net\.": "", "bn1": "bn2", "bn2": "bn3"},
                ["net.bn1.weight", "net.bn2.weight", "bn3.weight"],
            ),
            (["bn.weight"], {"weight": "bias"}, ["bn.weight", "bn.bias"]),
        ],
    )
    def test_what_is_refused(
        self, names: list[str], rename: dict[str, str], named: list[str]
    ) -> None:
        with refused("weights.wrong_rename", "w.pth", "model.rename", *named):
            rename_tensors(state_of(*names), rename, source="w.pth")

    def test_foreign_names_say_nothing_about_the_kind(self) -> None:
        assert list(rename_tensors(state_of("bn.gamma"), {"gamma": "weight"}, source="")) == [
            "bn.weight"
        ]

    def test_a_variance_below_zero(self) -> None:
        state = {"bn.moving": torch.tensor([1.0, -0.1])}
        with refused("weights.wrong_rename", "bn.moving", "bn.running_var"):
            rename_tensors(state, {"moving": "running_var"}, source="w.pth")
        assert rename_tensors({"bn.moving": torch.ones(2)}, {"moving": "running_var"}, source="")


class TestMatched:
    def test_shapes_in_order(self) -> None:
        own = state_of("a.weight", "a.bias")
        assert match_by_shape(state_of("x.weight", "x.bias"), own) == [
            ("x.weight", "a.weight"),
            ("x.bias", "a.bias"),
        ]

    def test_another_order_count_or_shape(self) -> None:
        own = state_of("a.weight", "a.bias")
        assert match_by_shape(state_of("x.bias", "x.weight"), own) == []
        assert match_by_shape(state_of("x.weight"), own) == []
        assert match_by_shape({**state_of("x.weight"), "x.bias": torch.zeros(3)}, own) == []
        assert match_by_shape({**state_of("x.weight"), "x.bias": torch.zeros(2, 1)}, own) == []

    def test_the_head_may_have_other_classes(self) -> None:
        theirs, own = {"fc.weight": torch.zeros(9, 4)}, {"head.weight": torch.zeros(5, 4)}
        assert match_by_shape(theirs, own) == []
        assert match_by_shape(theirs, own, head_names=["head"]) == [("fc.weight", "head.weight")]
        assert match_by_shape({"fc.weight": torch.zeros(9, 3)}, own, head_names=["head"]) == []


class TestPropose:
    @pytest.mark.parametrize(
        "pairs",
        [
            [("x.a.weight", "b.weight"), ("x.a.bias", "b.bias"), ("c.weight", "c.weight")],
            [("bn0.bias", "bn1.bias"), ("bn1.bias", "bn2.bias"), ("bn2.bias", "bn3.bias")],
            [("token", "cls_token"), ("position", "pos_embed"), ("n.gamma", "n.weight")],
        ],
    )
    def test_what_it_makes_does_it(self, pairs: list[tuple[str, str]]) -> None:
        result = rename_tensors(
            state_of(*(a for a, _ in pairs)), propose_patterns(pairs), source=""
        )
        assert list(result) == [b for _, b in pairs]

    def test_names_that_change_places(self) -> None:
        with refused("weights.wrong_rename"):
            propose_patterns([("a.bias", "b.bias"), ("b.bias", "a.bias")])


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A network whose names somebody else gave, with three classes."""
    network = timm.create_model(NAME, num_classes=3, **SMALL_VIT_ARGS)
    path = tmp_path / "w.pth"
    torch.save(
        {f"net.{k}".replace("qkv", "q_k_v"): v for k, v in network.state_dict().items()}, path
    )
    return path


RENAME = {r"^net\.": "", "q_k_v": "qkv"}


class TestWeights:
    def test_a_network_of_foreign_names(self, foreign: Path) -> None:
        made = build_model(str(foreign), args=ARGS, rename=RENAME)
        assert made.provenance["rename"] == RENAME
        own = torch.load(foreign, weights_only=True)
        network = timm.create_model(NAME, num_classes=3, **SMALL_VIT_ARGS)
        network.load_state_dict({renamed_key(k): v for k, v in own.items()})
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(compute_logits(made.model, x), compute_logits(network, x))

    def test_a_new_head_beside_renamed_weights(self, foreign: Path) -> None:
        made = build_model(str(foreign), num_classes=7, args=ARGS, rename=RENAME)
        assert made.model.get_submodule("head").weight.shape == (7, 16)
        own = torch.load(foreign, weights_only=True)
        assert torch.equal(made.model.state_dict()["pos_embed"], own["net.pos_embed"])

    def test_nothing_is_renamed_where_nothing_is_read(self, foreign: Path) -> None:
        weights = resolve_weights(str(foreign), pretrained=False, args=ARGS, rename=RENAME)
        assert weights.state is None
        assert "rename" not in weights.provenance
        assert "rename" not in resolve_weights(str(foreign), args=ARGS).provenance

    @pytest.mark.parametrize("num_classes", [None, 7])
    def test_the_error_names_the_command_where_only_names_differ(
        self, foreign: Path, num_classes: int | None
    ) -> None:
        command = f"python -m finetune.models.weights.rename FILE {NAME}"
        with refused("weights.other_names", "net.cls_token is cls_token", command):
            build_model(str(foreign), num_classes=num_classes, args=ARGS)

    def test_a_file_in_another_order(self, foreign: Path) -> None:
        state = torch.load(foreign, weights_only=True)
        names = list(state)
        one, two = names.index("net.norm.weight"), names.index("net.norm.bias")
        names[one], names[two] = names[two], names[one]
        torch.save({name: state[name] for name in names}, foreign)
        with refused("weights.missing_tensors", "model.name"):
            build_model(str(foreign), args=ARGS)
        # by their names they are right all the same
        assert build_model(str(foreign), args=ARGS, rename=RENAME).provenance["rename"]

    def test_the_error_names_the_patterns_that_do_not_do(self, foreign: Path) -> None:
        with refused("weights.missing_tensors", "model.rename", "blocks.0.attn.qkv.weight"):
            build_model(str(foreign), args=ARGS, rename={r"^net\.": ""})


def renamed_key(key: str) -> str:
    return key.removeprefix("net.").replace("q_k_v", "qkv")


class TestMain:
    def test_what_it_prints_renames(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        network = timm.create_model("test_vit", num_classes=3)
        own = network.state_dict()
        path = tmp_path / "w.pth"
        torch.save({f"net.{k}": v for k, v in own.items()}, path)
        assert main([str(path), "test_vit"]) == 0
        rename = yaml.safe_load(capsys.readouterr().out)
        made = build_model(str(path), args={"architecture": "test_vit"}, rename=rename)
        assert classifier_names(made.model)
        x = torch.randn(2, 3, *made.preprocessing.image_size)
        assert torch.equal(compute_logits(made.model, x), compute_logits(network, x))

    @pytest.mark.parametrize(
        "words, code, named",
        [
            (["w.pth"], 2, "python -m"),
            (["w.pth", "vit_tinny"], 2, "python -m"),
            (["missing.pth", NAME], 4, "missing.pth"),
            (["w.pth", NAME], 4, NAME),  # shapes of 32 pixels and not 224
        ],
    )
    def test_what_it_refuses(
        self,
        words: list[str],
        code: int,
        named: str,
        foreign: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(foreign.parent)
        assert main(words) == code
        assert named in capsys.readouterr().err

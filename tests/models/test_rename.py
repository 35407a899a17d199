"""rename.py: foreign names become timm's, and nothing is put where it does not belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import yaml
from networks import SMALL, logits, message
from torch import Tensor

from finetune.errors import WeightsError
from finetune.models.build import build
from finetune.models.head import classifier_names
from finetune.models.weights.rename import main, matched, propose, renamed
from finetune.models.weights.resolve import resolve

NAME = "vit_tiny_patch16_224"
ARGS = {"architecture": NAME, **SMALL}


def state_of(*names: str) -> dict[str, Tensor]:
    return {name: torch.full((2,), float(index)) for index, name in enumerate(names)}


def refused(state: dict[str, Tensor], rename: dict[str, str]) -> str:
    with pytest.raises(WeightsError) as caught:
        renamed(state, rename, source="w.pth")
    return str(caught.value)


class TestRenamed:
    def test_patterns_follow_one_another(self) -> None:
        state = state_of("net.bn1.weight", "net.bn2.weight", "net.fc.bias")
        rename = {r"^net\.": "", "bn2": "bn3", "bn1": "bn2", r"^(f)(c)": r"\2\1"}
        found = renamed(state, rename, source="w.pth")
        assert list(found) == ["bn2.weight", "bn3.weight", "cf.bias"]
        assert all(one is other for one, other in zip(found.values(), state.values(), strict=True))
        # in the other order the first becomes what the second pattern looks for
        chained = {r"^net\.": "", "bn1": "bn2", "bn2": "bn3"}
        assert "both net.bn1.weight and net.bn2.weight become bn3.weight" in refused(state, chained)

    def test_a_pattern_that_is_found_nowhere(self) -> None:
        assert "'^nut' is found in no name (net.a, …)" in refused(state_of("net.a"), {"^nut": ""})

    def test_two_tensors_of_one_name(self) -> None:
        text = refused(state_of("a.weight", "b.weight"), {"^[ab]": "c"})
        assert "both a.weight and b.weight become c.weight" in text

    def test_a_kind_that_is_another(self) -> None:
        text = refused(state_of("bn.weight"), {"weight": "bias"})
        assert "bn.weight cannot become bn.bias: a weight is no bias" in text
        # names of elsewhere say nothing about the kind
        assert list(renamed(state_of("bn.gamma"), {"gamma": "weight"}, source="")) == ["bn.weight"]

    def test_a_variance_below_zero(self) -> None:
        state = {"bn.moving": torch.tensor([1.0, -0.1])}
        assert "a variance is not below 0" in refused(state, {"moving": "running_var"})
        assert renamed({"bn.moving": torch.ones(2)}, {"moving": "running_var"}, source="")


class TestMatched:
    def test_shapes_in_order(self) -> None:
        own = state_of("a.weight", "a.bias")
        assert matched(state_of("x.weight", "x.bias"), own) == [
            ("x.weight", "a.weight"),
            ("x.bias", "a.bias"),
        ]

    def test_another_order_count_or_shape(self) -> None:
        own = state_of("a.weight", "a.bias")
        assert matched(state_of("x.bias", "x.weight"), own) == []
        assert matched(state_of("x.weight"), own) == []
        assert matched({**state_of("x.weight"), "x.bias": torch.zeros(3)}, own) == []
        assert matched({**state_of("x.weight"), "x.bias": torch.zeros(2, 1)}, own) == []

    def test_the_head_may_have_other_classes(self) -> None:
        theirs, own = {"fc.weight": torch.zeros(9, 4)}, {"head.weight": torch.zeros(5, 4)}
        assert matched(theirs, own) == []
        assert matched(theirs, own, free=["head"]) == [("fc.weight", "head.weight")]
        assert matched({"fc.weight": torch.zeros(9, 3)}, own, free=["head"]) == []


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
        found = renamed(state_of(*(a for a, _ in pairs)), propose(pairs), source="")
        assert list(found) == [b for _, b in pairs]

    def test_names_that_change_places(self) -> None:
        with pytest.raises(WeightsError, match="write it by hand"):
            propose([("a.bias", "b.bias"), ("b.bias", "a.bias")])


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A network whose names somebody else gave, with three classes."""
    network = timm.create_model(NAME, num_classes=3, **SMALL)
    path = tmp_path / "w.pth"
    torch.save(
        {f"net.{k}".replace("qkv", "q_k_v"): v for k, v in network.state_dict().items()}, path
    )
    return path


RENAME = {r"^net\.": "", "q_k_v": "qkv"}


class TestWeights:
    def test_a_network_of_foreign_names(self, foreign: Path) -> None:
        made = build(str(foreign), args=ARGS, rename=RENAME)
        assert made.provenance["rename"] == RENAME
        own = torch.load(foreign, weights_only=True)
        network = timm.create_model(NAME, num_classes=3, **SMALL)
        network.load_state_dict({renamed_key(k): v for k, v in own.items()})
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(logits(made.model, x), logits(network, x))

    def test_a_new_head_beside_renamed_weights(self, foreign: Path) -> None:
        made = build(str(foreign), num_classes=7, args=ARGS, rename=RENAME)
        assert made.model.get_submodule("head").weight.shape == (7, 16)
        own = torch.load(foreign, weights_only=True)
        assert torch.equal(made.model.state_dict()["pos_embed"], own["net.pos_embed"])

    def test_nothing_is_renamed_where_nothing_is_read(self, foreign: Path) -> None:
        found = resolve(str(foreign), pretrained=False, args=ARGS, rename=RENAME)
        assert found.state is None
        assert "rename" not in found.provenance
        assert "rename" not in resolve(str(foreign), args=ARGS).provenance

    @pytest.mark.parametrize("num_classes", [None, 7])
    def test_the_error_says_that_the_names_alone_are_wrong(
        self, foreign: Path, num_classes: int | None
    ) -> None:
        with pytest.raises(WeightsError) as caught:
            build(str(foreign), num_classes=num_classes, args=ARGS)
        text = str(caught.value)
        assert "every shape fits in order under other names (net.cls_token is cls_token" in text
        assert f"python -m finetune.models.weights.rename FILE {NAME}" in text

    def test_the_error_proposes_nothing_where_the_order_is_wrong(self, foreign: Path) -> None:
        state = torch.load(foreign, weights_only=True)
        names = list(state)
        one, two = names.index("net.norm.weight"), names.index("net.norm.bias")
        names[one], names[two] = names[two], names[one]
        torch.save({name: state[name] for name in names}, foreign)
        with pytest.raises(WeightsError) as caught:
            build(str(foreign), args=ARGS)
        assert "fits in order" not in str(caught.value)
        # by their names they are right all the same
        assert build(str(foreign), args=ARGS, rename=RENAME).provenance["rename"]

    def test_the_error_names_the_patterns_that_do_not_do(self, foreign: Path) -> None:
        with pytest.raises(WeightsError, match=r"and the patterns of model\.rename") as caught:
            build(str(foreign), args=ARGS, rename={r"^net\.": ""})
        assert "missing: blocks.0.attn.qkv.weight" in str(caught.value)

    def test_patterns_for_other_weights(self, foreign: Path) -> None:
        assert "is found in no name" in message(foreign, args=ARGS, rename={"_conv": "conv"})


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
        made = build(str(path), args={"architecture": "test_vit"}, rename=rename)
        assert classifier_names(made.model)
        x = torch.randn(2, 3, *made.preprocessing.image_size)
        assert torch.equal(logits(made.model, x), logits(network, x))

    @pytest.mark.parametrize(
        "words, code, said",
        [
            (["w.pth"], 2, "use: python -m"),
            (["w.pth", "vit_tinny"], 2, "use: python -m"),
            (["w.pth", NAME], 4, "cannot be read"),
        ],
    )
    def test_what_it_refuses(
        self,
        words: list[str],
        code: int,
        said: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(words) == code
        assert said in capsys.readouterr().err

    def test_shapes_of_another_network(
        self, foreign: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(foreign), NAME]) == 4  # 32 pixels and not 224
        assert "not the shapes of" in capsys.readouterr().err

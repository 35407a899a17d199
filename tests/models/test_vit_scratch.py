"""models/architectures/vit_scratch.py against a computation by hand; built, saved and trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from networks import (
    compute_logits,
    gelu,
    layer_norm,
    linear,
    random_images,
    randomize_head,
    save_network,
)
from refusals import refused
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import finetune
from finetune.models.architectures.position_embeddings import POSITION_KINDS, POSITION_LOCATIONS
from finetune.models.build import build_model
from finetune.models.interpretability import attention_maps
from finetune.models.weights.resize_posemb import resize_posemb
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.training.optim import param_groups

NAME = "vit_scratch_large_patch8_32"
TINY = {"embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
# every kind at every place that it can have
STUDY = [
    (k, p) for k in POSITION_KINDS for p in POSITION_LOCATIONS if (k, p) != ("relative", "stem")
]


def tiny(**args: Any) -> Any:
    return timm.create_model(NAME, **{**TINY, **args})


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def randomise(model: nn.Module) -> None:
    """No parameter at a special value, such as a LayerNorm's 1 and 0."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


@pytest.fixture(scope="module")
def large() -> Any:
    with torch.device("meta"):  # shapes only
        return timm.create_model(NAME).eval()


class TestNumbers:
    def test_parameters(self, large: Any) -> None:
        assert count(large) == 302_520_350
        assert [count(block) for block in large.blocks] == [12_596_224] * 24
        assert count(large.patch_embed) == 192 * 1024 + 1024
        assert (count(large.norm), count(large.head)) == (2 * 1024, 1024 * 10 + 10 + 2 * 10)

    def test_multiply_adds(self, large: Any) -> None:
        tokens, width = 17, 1024
        layer = 4 * tokens * width**2 + 2 * tokens * width * 4096 + 2 * tokens**2 * width
        expected = 16 * 192 * width + 24 * layer + tokens * width * 10
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            large(torch.empty(1, 3, 32, 32, device="meta"))
        assert counter.get_total_flops() == 2 * expected  # a multiplication and an addition
        assert round(expected / 1e9, 2) == 5.15

    def test_settings(self, large: Any) -> None:
        norms = [m for m in large.modules() if isinstance(m, nn.LayerNorm)]
        assert len(norms) == 2 * 24 + 2
        assert {norm.eps for norm in norms} == {1e-5}
        assert {m.approximate for m in large.modules() if isinstance(m, nn.GELU)} == {"none"}
        assert (len(large.blocks), large.blocks[0].attn.num_heads) == (24, 16)
        assert large.blocks[0].mlp.fc1.out_features == 4096


# --- by hand, in numpy and float64 ---------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def patches(image: np.ndarray, patch: int = 8) -> np.ndarray:
    """Each patch as a row of (channel, row, column), patches in reading order."""
    _, height, width = image.shape
    rows = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            window = image[:, top : top + patch, left : left + patch]
            rows.append(
                [window[c, y, x] for c in range(3) for y in range(patch) for x in range(patch)]
            )
    return np.array(rows)


def added(w: dict[str, np.ndarray], prefix: str, kind: str, grid: tuple[int, int]) -> np.ndarray:
    """The table that a kind adds to the tokens: (1 + h*w, D)."""
    count, width = 1 + grid[0] * grid[1], TINY["embed_dim"]
    table = np.zeros((count, width))
    if kind == "sinusoidal":
        for p in range(count):
            for j in range(width):
                angle = p / 10000 ** ((j - j % 2) / width)
                table[p, j] = np.float32(math.cos(angle) if j % 2 else math.sin(angle))
    elif kind == "learned_1d":
        table = w[f"{prefix}pos_embed"][0]
    elif kind == "learned_2d":
        table[0] = w[f"{prefix}pos_embed.class_position"][0]
        for p in range(1, count):
            row, column = divmod(p - 1, grid[1])
            halves = (w[f"{prefix}pos_embed.columns"][column], w[f"{prefix}pos_embed.rows"][row])
            table[p] = np.concatenate(halves)
    return table


def attention(x: np.ndarray, w: dict[str, np.ndarray], name: str, offsets: Any) -> np.ndarray:
    count, width = x.shape
    share = width // TINY["num_heads"]
    qkv, out = linear(x, w, f"{name}.qkv"), np.empty_like(x)
    for head in range(TINY["num_heads"]):
        q, k, v = (qkv[:, part * width + head * share :][:, :share] for part in range(3))
        scores = q @ k.T
        if offsets is not None:
            for i in range(count):
                for j in range(count):
                    scores[i, j] += q[i] @ offsets[i - j + count - 1]
        out[:, head * share : (head + 1) * share] = softmax(scores / math.sqrt(share)) @ v
    return linear(out, w, f"{name}.proj")


def by_hand(image: np.ndarray, w: dict[str, np.ndarray], kind: str, where: str) -> np.ndarray:
    grid = (image.shape[1] // 8, image.shape[2] // 8)
    x = np.concatenate([w["cls_token"][0], linear(patches(image), w, "patch_embed.proj")])
    if where == "stem":
        x = x + added(w, "", kind, grid)
    for number in range(TINY["depth"]):
        block = f"blocks.{number}"
        prefix = f"{block}." if where == "every_layer" else ""
        if where != "stem":
            x = x + added(w, prefix, kind, grid)
        offsets = w[f"{prefix}pos_embed.offsets"] if kind == "relative" else None
        x = x + attention(layer_norm(x, w, f"{block}.norm1"), w, f"{block}.attn", offsets)
        hidden = gelu(linear(layer_norm(x, w, f"{block}.norm2"), w, f"{block}.mlp.fc1"))
        x = x + linear(hidden, w, f"{block}.mlp.fc2")
    outputs = gelu(linear(layer_norm(x, w, "norm"), w, "head.fc"))
    return layer_norm(outputs[0], w, "head.norm")


class TestForward:
    @pytest.mark.parametrize("kind, where", STUDY)
    def test_equals_the_computation_by_hand(self, kind: str, where: str) -> None:
        model = tiny(position=kind, where=where, img_size=(16, 24), num_classes=5).eval()
        randomise(model)
        weights = {name: t.double().numpy() for name, t in model.state_dict().items()}
        images_BCHW = torch.randn(2, 3, 16, 24)
        expected = np.stack(
            [by_hand(image, weights, kind, where) for image in images_BCHW.double().numpy()]
        )
        single = compute_logits(model, images_BCHW).double().numpy()
        double = compute_logits(model.double(), images_BCHW.double()).numpy()
        # float64 leaves only the order of the sums; float32 a few of its roundings
        largest = np.abs(expected).max()
        assert np.abs(double - expected).max() < 2**-52 * 32 * largest
        assert np.abs(single - expected).max() < 2**-23 * 32 * largest

    def test_features_and_head_make_the_logits(self) -> None:
        model = tiny().eval()
        x = random_images(32)
        tokens_BND = model.forward_features(x)
        assert tokens_BND.shape == (2, 17, 24)
        assert torch.equal(model.forward_head(tokens_BND, pre_logits=True), tokens_BND[:, 0])
        assert torch.equal(model.forward_head(tokens_BND), model(x))
        assert model.get_classifier() is model.head
        assert tiny(num_classes=0)(random_images(32)).shape == (2, 24)

    def test_places_differ_where_they_should(self) -> None:
        x, seen = random_images(32), {}
        for where in POSITION_LOCATIONS:
            torch.manual_seed(1)
            seen[where] = compute_logits(tiny(position="sinusoidal", where=where), x)
        # a fixed table cannot differ between layers, so sharing it changes nothing
        assert torch.equal(seen["every_layer"], seen["every_layer_shared"])
        assert not torch.allclose(seen["stem"], seen["every_layer"])
        sizes = {w: count(tiny(position="learned_1d", where=w)) for w in POSITION_LOCATIONS}
        assert sizes["stem"] == sizes["every_layer_shared"]
        assert sizes["every_layer"] - sizes["stem"] == 17 * 24
        assert count(tiny(position="sinusoidal")) == count(tiny(position="none"))


class TestDraws:
    def test_the_class_token_is_uniform(self) -> None:
        torch.manual_seed(123)
        token = tiny(embed_dim=4096, num_heads=1, depth=0).cls_token.detach()
        assert 0 <= token.min() < 0.01
        assert 0.99 < token.max() < 1
        assert abs(token.mean() - 0.5) < 0.02
        assert abs(token.var() - 1 / 12) < 0.005  # a normal of this mean would be wider

    def test_the_seed_decides(self) -> None:
        drawn = []
        for seed in (123, 123, 124):
            torch.manual_seed(seed)
            drawn.append(tiny().state_dict())
        assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
        assert not torch.equal(drawn[0]["cls_token"], drawn[2]["cls_token"])

    def test_what_is_compared_starts_from_the_same_weights(self) -> None:
        torch.manual_seed(7)
        base, after = tiny(position="none").state_dict(), torch.get_rng_state()
        for kind, where in STUDY:
            torch.manual_seed(7)
            other = tiny(position=kind, where=where).state_dict()
            assert all(torch.equal(other[name], base[name]) for name in base), kind
            if kind == "sinusoidal":
                assert torch.equal(torch.get_rng_state(), after)
                assert set(other) == set(base)


@pytest.mark.parametrize("kind, where", STUDY)
def test_both_paths_of_the_attention_agree(kind: str, where: str | None) -> None:
    model, x = tiny(position=kind, where=where), random_images(32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # learned positions and biases start at zero
    outputs, slopes = [], []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        outputs.append(model(x))
        slopes.append(torch.autograd.grad(outputs[-1].square().sum(), list(model.parameters())))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-3, atol=1e-4)


class TestDropout:
    def test_in_the_head_only(self) -> None:
        model, x = tiny(drop_rate=0.5), random_images(32)
        calm = model.eval().forward_features(x)
        assert torch.equal(model.train().forward_features(x), calm)
        assert len([m for m in model.modules() if isinstance(m, nn.Dropout) and m.p]) == 1
        seen = model.head.drop(torch.ones(1000))
        assert set(seen.tolist()) == {0.0, 2.0}
        noisy = [model(x) for _ in range(8)]
        assert any(not torch.equal(noisy[0], other) for other in noisy[1:])

    @pytest.mark.parametrize("fused", [True, False])
    def test_on_attention_weights(self, fused: bool) -> None:
        attention_layer = tiny(attn_drop_rate=0.5).blocks[0].attn.train()
        attention_layer.fused_attn = fused
        with torch.no_grad():
            attention_layer.qkv.weight.zero_()  # all scores equal: each weight is 1/16
            attention_layer.qkv.bias[:48] = 0.0
            attention_layer.qkv.bias[48:] = 1.0  # and all values 1
            attention_layer.proj.weight.copy_(torch.eye(24))
            attention_layer.proj.bias.zero_()
        kept_BNG = attention_layer(torch.randn(4, 16, 24), None)[..., ::8] * 16 / 2
        torch.testing.assert_close(kept_BNG, kept_BNG.round())  # a number of kept weights
        assert 0 < kept_BNG.min() < 8 < kept_BNG.max() < 16
        steady = attention_layer.eval()(torch.randn(4, 16, 24), None)
        torch.testing.assert_close(steady, torch.ones_like(steady))

    def test_a_recipe_reaches_both_places_and_no_other(self) -> None:
        made = build_model(NAME, pretrained=False, dropout=0.1, attention_dropout=0.2, args=TINY)
        rates = {n: m.p for n, m in made.model.named_modules() if isinstance(m, nn.Dropout) and m.p}
        layers = {f"blocks.{number}.attn.attn_drop": 0.2 for number in (0, 1)}
        assert rates == {"head.drop": 0.1, **layers}
        with refused("recipe.unsupported", "model.drop_path"):
            build_model(NAME, pretrained=False, drop_path=0.1, args=TINY)


class TestBuilt:
    def made(self, **kwargs: Any) -> Any:
        kwargs = {"num_classes": 5, "pretrained": False, **kwargs}
        return build_model(NAME, **{**kwargs, "args": {**TINY, **kwargs.get("args", {})}})

    def test_zero_head_gives_ln_k_and_learns(self) -> None:
        model, labels = self.made().model, torch.tensor([0, 4])
        loss = nn.functional.cross_entropy(model.eval()(random_images(32)), labels)
        assert loss.item() == torch.tensor(5.0).log().item()
        loss.backward()
        assert model.head.fc.weight.grad.abs().max() > 0
        assert model.cls_token.grad.abs().max() == 0  # behind a layer of zeros
        assert torch.equal(model.head.norm.weight, torch.ones(5))

    def test_freezing(self) -> None:
        def trainable(**kwargs: Any) -> set[str]:
            return {n for n, p in self.made(**kwargs).model.named_parameters() if p.requires_grad}

        head = {"head.fc.weight", "head.fc.bias", "head.norm.weight", "head.norm.bias"}
        assert trainable(freeze="backbone") == head
        for place in POSITION_LOCATIONS:
            names = trainable(freeze=1, args={"position": "learned_2d", "where": place})
            starts = {".".join(name.split(".")[:2]) for name in names}
            assert starts == {"blocks.1", "norm.weight", "norm.bias", "head.fc", "head.norm"}

    @pytest.mark.parametrize("kind, where", STUDY)
    def test_layer_decay_and_what_is_decayed(self, kind: str, where: str) -> None:
        model = self.made(args={"position": kind, "where": where}).model
        names = {id(p): name for name, p in model.named_parameters()}
        scales, decayed = {}, set()
        for group in param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5):
            for parameter in group["params"]:
                name = names[id(parameter)]
                scales[name] = group["lr_scale"]
                if group["weight_decay"]:
                    decayed.add(name)
        assert len(scales) == len(names)
        for name, scale in scales.items():
            depth = {"head": 1.0, "norm": 0.5}.get(name.split(".")[0], 0.125)
            depth = {"blocks.0": 0.25, "blocks.1": 0.5}.get(name[:8], depth)
            assert scale == depth, name
        matrices = {"patch_embed.proj", "head.fc"} | {
            f"blocks.{i}.{m}"
            for i in (0, 1)
            for m in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        }
        assert decayed == {f"{name}.weight" for name in matrices}

    @pytest.mark.parametrize("kind, where", STUDY)
    def test_saved_and_loaded_by_timm(self, kind: str, where: str, tmp_path: Path) -> None:
        made = self.made(args={"position": kind, "where": where})
        randomize_head(made.model)
        folder, x = save_network(tmp_path / "net", made), random_images(32)
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert torch.equal(compute_logits(plain, x), compute_logits(made.model, x))
        other = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3)
        assert torch.equal(other.eval().forward_features(x), plain.forward_features(x))
        assert torch.equal(build_model(folder).model.eval()(x), plain(x))

    @pytest.mark.parametrize("kind, where", STUDY)
    def test_another_image_size(
        self, kind: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = self.made(args={"position": kind, "where": where})
        folder = save_network(tmp_path / "net", made)
        if kind == "relative":
            with refused("weights.wrong_shape", "pos_embed.offsets (33, 8) for (73, 8)"):
                build_model(folder, num_classes=3, image_size=48)
            return
        moved = build_model(folder, num_classes=3, image_size=48)
        assert torch.equal(compute_logits(moved.model, random_images(48)), torch.zeros(2, 3))
        before, after = made.model.state_dict(), moved.model.state_dict()
        same = [n for n in before if "pos_embed" not in n and not n.startswith("head.")]
        assert len(same) == 2 * 12 + 5
        assert all(torch.equal(before[n], after[n]) for n in same)
        learned = [name for name in before if "pos_embed" in name]
        own_way = kind == "learned_1d" and where != "every_layer"
        posemb = "paper" if own_way else "timm" if learned else "none"
        assert moved.provenance["posemb"] == posemb
        assert ("timm's own resizing was used" in caplog.text) == (posemb == "timm")
        if own_way:
            assert torch.equal(after["pos_embed"], resize_posemb(before["pos_embed"], (6, 6)))
        fresh = self.made(image_size=48, args={"position": kind, "where": where}).model
        if kind == "sinusoidal" and where == "stem":
            assert torch.equal(moved.model.pos_embed, fresh.pos_embed)
            assert moved.model.pos_embed.shape == (1, 37, 24)

    @pytest.mark.parametrize("kind", ["sinusoidal", "relative"])
    def test_recomputing_activations_changes_nothing(self, kind: str) -> None:
        def gradients(**kwargs: Any) -> list[Tensor]:
            torch.manual_seed(3)
            model = self.made(head_init="default", args={"position": kind}, **kwargs).model
            x = torch.randn(2, 3, 32, 32)
            model.train()(x).square().sum().backward()
            return [p.grad for p in model.parameters()]

        plain = gradients(attention_dropout=0.3)
        again = gradients(attention_dropout=0.3, grad_checkpointing=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))

    @pytest.mark.parametrize("kind", ["sinusoidal", "relative"])
    def test_exported_for_any_batch(self, kind: str) -> None:
        model = self.made(head_init="default", args={"position": kind}).model.eval()
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        program = torch.export.export(model, (random_images(32),), dynamic_shapes=(batch,))
        x = random_images(32, 5)
        torch.testing.assert_close(program.module()(x), model(x))

    def test_its_attention_maps(self) -> None:
        for kind in ("sinusoidal", "relative"):
            model = self.made(args={"position": kind}).model.eval()
            maps = attention_maps(model, random_images(32))
            assert [tuple(m.shape) for m in maps] == [(2, 3, 17, 17)] * 2
            torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 3, 17))

    @pytest.mark.parametrize(
        "args, code, named",
        [
            ({"position": "learned"}, "wrong_value", "position: unknown 'learned'"),
            ({"num_heads": 5}, "wrong_value", "num_heads: 5 does not divide embed_dim=24"),
            ({"global_pool": "avg"}, "unknown_key", "'global_pool'"),
            ({"position": "relative", "where": "stem"}, "wrong_value", "every_layer"),
        ],
    )
    def test_what_it_refuses(self, args: dict[str, Any], code: str, named: str) -> None:
        with refused(f"recipe.{code}", named):
            self.made(args=args)

    def test_a_class_pooling_only(self) -> None:
        model = tiny().double()
        model.reset_classifier(4, "token")
        assert model.head.fc.weight.dtype == torch.float64
        assert model.head.fc.out_features == model.num_classes == 4
        with refused("recipe.wrong_value", "global_pool", "'token'"):
            model.reset_classifier(4, "avg")

    @pytest.mark.usefixtures("no_pictures")
    def test_trains_with_a_moving_average_and_predicts(self, tmp_path: Path) -> None:
        recipe = parse_recipe(
            "model: {name: vit_scratch_large_patch8_32, pretrained: false, dropout: 0.1, "
            "attention_dropout: 0.1, args: {embed_dim: 24, depth: 2, num_heads: 3}}\n"
            "data: {source: 'embedded:digits', batch_size: 16}\n"
            "optim: {name: adam, lr: 1e-3, schedule: constant, steps: 2, ema_decay: 0.9}\n"
        )
        results = finetune.train(recipe, tmp_path / "run")
        assert 0 < results["test"]["loss"] < 5
        model = finetune.Classifier.load(tmp_path / "run")
        assert len(model.class_names) == 10


class TestRecipes:
    def test_the_reviews_settings(self, repository: Path) -> None:
        recipe = load_recipe(repository / "recipes" / "scratch_vit" / "vit_scratch_large.yaml")
        assert (recipe.model.name, recipe.model.pretrained) == (NAME, False)
        assert (recipe.model.dropout, recipe.model.attention_dropout) == (0.1, 0.1)
        optim = recipe.optim
        assert (optim.name, optim.lr, optim.epochs, optim.weight_decay) == ("adam", 5e-7, 800, 0)
        assert (recipe.data.batch_size, recipe.run.seed) == (512, 123)
        assert recipe.data.source == "hub:uoft-cs/cifar10"

    def test_the_study_varies_one_thing(self, repository: Path) -> None:
        folder = repository / "recipes" / "ablations" / "position_embeddings"
        seen, rest = set(), set()
        for path in sorted(set(folder.glob("*.yaml")) - {folder / "plan.yaml"}):
            values = load_recipe(path).model_dump()
            args = dict(values["model"].pop("args"))
            kind, where = args.pop("position"), args.get("where")
            name = kind if kind in ("none", "relative") else f"{kind}_{args['where']}"
            assert path.stem == name
            tiny(position=kind, where=args.pop("where", None), **{**args, "depth": 1})
            seen.add((kind, where))
            rest.add((repr(values), repr(args)))
        assert len(rest) == 1
        # a fixed table shared by the layers is the same network as one that is not
        left_out = {("sinusoidal", "every_layer_shared"), ("relative", "every_layer_shared")}
        left_out |= {("none", place) for place in POSITION_LOCATIONS}
        assert seen == {*STUDY, ("none", None)} - left_out

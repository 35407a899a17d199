"""models/architectures/vit_scratch.py against a NumPy reference; built, saved and trained."""

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
# every kind at every possible location
KINDS_AND_LOCATIONS = [
    (kind, location)
    for kind in POSITION_KINDS
    for location in POSITION_LOCATIONS
    if (kind, location) != ("relative", "stem")
]
# for tests in which only the names of the parameters matter
AT_EVERY_LAYER = [(kind, "every_layer") for kind in POSITION_KINDS] + [("learned_1d", "stem")]


def make_tiny(**args: Any) -> Any:
    return timm.create_model(NAME, **{**TINY, **args})


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def randomize(model: nn.Module) -> None:
    """Give all parameters random values, also those of LayerNorm."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


@pytest.fixture(scope="module")
def large_model() -> Any:
    with torch.device("meta"):  # shapes only
        return timm.create_model(NAME).eval()


class TestSize:
    def test_number_of_parameters(self, large_model: Any) -> None:
        assert num_parameters(large_model) == 302_520_350
        assert [num_parameters(block) for block in large_model.blocks] == [12_596_224] * 24
        assert num_parameters(large_model.patch_embed) == 192 * 1024 + 1024
        assert (num_parameters(large_model.norm), num_parameters(large_model.head)) == (
            2 * 1024,
            1024 * 10 + 10 + 2 * 10,
        )

    def test_macs(self, large_model: Any) -> None:
        tokens, width = 17, 1024
        layer = 4 * tokens * width**2 + 2 * tokens * width * 4096 + 2 * tokens**2 * width
        expected = 16 * 192 * width + 24 * layer + tokens * width * 10
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            large_model(torch.empty(1, 3, 32, 32, device="meta"))
        assert counter.get_total_flops() == 2 * expected  # one multiplication and one addition each
        assert round(expected / 1e9, 2) == 5.15

    def test_layer_settings(self, large_model: Any) -> None:
        norms = [m for m in large_model.modules() if isinstance(m, nn.LayerNorm)]
        assert len(norms) == 2 * 24 + 2
        assert {norm.eps for norm in norms} == {1e-5}
        assert {m.approximate for m in large_model.modules() if isinstance(m, nn.GELU)} == {"none"}
        assert (len(large_model.blocks), large_model.blocks[0].attn.num_heads) == (24, 16)
        assert large_model.blocks[0].mlp.fc1.out_features == 4096


# --- reference in NumPy, float64 -----------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def extract_patches(image: np.ndarray, patch: int = 8) -> np.ndarray:
    """Flatten each patch to (channel, row, column); patches in row-major order."""
    _, height, width = image.shape
    rows = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            window = image[:, top : top + patch, left : left + patch]
            rows.append(
                [window[c, y, x] for c in range(3) for y in range(patch) for x in range(patch)]
            )
    return np.array(rows)


def reference_table(
    w: dict[str, np.ndarray], prefix: str, kind: str, grid: tuple[int, int]
) -> np.ndarray:
    """Return the table that a kind adds to the tokens: (1 + h*w, D)."""
    num_parameters, width = 1 + grid[0] * grid[1], TINY["embed_dim"]
    table = np.zeros((num_parameters, width))
    if kind == "sinusoidal":
        for p in range(num_parameters):
            for j in range(width):
                angle = p / 10000 ** ((j - j % 2) / width)
                table[p, j] = np.float32(math.cos(angle) if j % 2 else math.sin(angle))
    elif kind == "learned_1d":
        table = w[f"{prefix}pos_embed"][0]
    elif kind == "learned_2d":
        table[0] = w[f"{prefix}pos_embed.class_position"][0]
        for p in range(1, num_parameters):
            row, column = divmod(p - 1, grid[1])
            halves = (w[f"{prefix}pos_embed.columns"][column], w[f"{prefix}pos_embed.rows"][row])
            table[p] = np.concatenate(halves)
    return table


def reference_attention(
    x: np.ndarray, w: dict[str, np.ndarray], name: str, offsets: Any
) -> np.ndarray:
    num_parameters, width = x.shape
    head_dim = width // TINY["num_heads"]
    qkv, out = linear(x, w, f"{name}.qkv"), np.empty_like(x)
    for head in range(TINY["num_heads"]):
        q, k, v = (qkv[:, part * width + head * head_dim :][:, :head_dim] for part in range(3))
        scores = q @ k.T
        if offsets is not None:
            for i in range(num_parameters):
                for j in range(num_parameters):
                    scores[i, j] += q[i] @ offsets[i - j + num_parameters - 1]
        out[:, head * head_dim : (head + 1) * head_dim] = softmax(scores / math.sqrt(head_dim)) @ v
    return linear(out, w, f"{name}.proj")


def reference_logits(
    image: np.ndarray, w: dict[str, np.ndarray], kind: str, location: str
) -> np.ndarray:
    grid = (image.shape[1] // 8, image.shape[2] // 8)
    x = np.concatenate([w["cls_token"][0], linear(extract_patches(image), w, "patch_embed.proj")])
    if location == "stem":
        x = x + reference_table(w, "", kind, grid)
    for number in range(TINY["depth"]):
        block = f"blocks.{number}"
        prefix = f"{block}." if location == "every_layer" else ""
        if location != "stem":
            x = x + reference_table(w, prefix, kind, grid)
        offsets = w[f"{prefix}pos_embed.offsets"] if kind == "relative" else None
        x = x + reference_attention(layer_norm(x, w, f"{block}.norm1"), w, f"{block}.attn", offsets)
        hidden = gelu(linear(layer_norm(x, w, f"{block}.norm2"), w, f"{block}.mlp.fc1"))
        x = x + linear(hidden, w, f"{block}.mlp.fc2")
    outputs = gelu(linear(layer_norm(x, w, "norm"), w, "head.fc"))
    return layer_norm(outputs[0], w, "head.norm")


class TestLogits:
    @pytest.mark.parametrize("kind, location", KINDS_AND_LOCATIONS)
    def test_logits_equal_the_reference(self, kind: str, location: str) -> None:
        model = make_tiny(position=kind, where=location, img_size=(16, 24), num_classes=5).eval()
        randomize(model)
        weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        images_BCHW = torch.randn(2, 3, 16, 24)
        expected = np.stack(
            [
                reference_logits(image, weights, kind, location)
                for image in images_BCHW.double().numpy()
            ]
        )
        float32_logits = compute_logits(model, images_BCHW).double().numpy()
        float64_logits = compute_logits(model.double(), images_BCHW.double()).numpy()
        # float64 differs only by the order of the sums; float32 by a few roundings
        max_value = np.abs(expected).max()
        assert np.abs(float64_logits - expected).max() < 2**-52 * 32 * max_value
        assert np.abs(float32_logits - expected).max() < 2**-23 * 32 * max_value

    def test_features_and_head_compose_to_the_logits(self) -> None:
        model = make_tiny().eval()
        x = random_images(32)
        tokens_BND = model.forward_features(x)
        assert tokens_BND.shape == (2, 17, 24)
        assert torch.equal(model.forward_head(tokens_BND, pre_logits=True), tokens_BND[:, 0])
        assert torch.equal(model.forward_head(tokens_BND), model(x))
        assert model.get_classifier() is model.head
        assert make_tiny(num_classes=0)(random_images(32)).shape == (2, 24)

    def test_locations_differ_in_logits_and_parameters(self) -> None:
        x, logits_by_location = random_images(32), {}
        for location in POSITION_LOCATIONS:
            torch.manual_seed(1)
            logits_by_location[location] = compute_logits(
                make_tiny(position="sinusoidal", where=location), x
            )
        # a fixed table cannot differ between layers, so sharing it changes nothing
        assert torch.equal(
            logits_by_location["every_layer"], logits_by_location["every_layer_shared"]
        )
        assert not torch.allclose(logits_by_location["stem"], logits_by_location["every_layer"])
        num_parameters_by_location = {
            location: num_parameters(make_tiny(position="learned_1d", where=location))
            for location in POSITION_LOCATIONS
        }
        assert (
            num_parameters_by_location["stem"] == num_parameters_by_location["every_layer_shared"]
        )
        assert (
            num_parameters_by_location["every_layer"] - num_parameters_by_location["stem"]
            == 17 * 24
        )
        assert num_parameters(make_tiny(position="sinusoidal")) == num_parameters(
            make_tiny(position="none")
        )


class TestInitialization:
    def test_class_token_is_uniform(self) -> None:
        torch.manual_seed(123)
        token = make_tiny(embed_dim=4096, num_heads=1, depth=0).cls_token.detach()
        assert 0 <= token.min() < 0.01
        assert 0.99 < token.max() < 1
        assert abs(token.mean() - 0.5) < 0.02
        # a normal distribution would have another variance
        assert abs(token.var() - 1 / 12) < 0.005

    def test_weights_depend_on_the_seed_only(self) -> None:
        states = []
        for seed in (123, 123, 124):
            torch.manual_seed(seed)
            states.append(make_tiny().state_dict())
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert not torch.equal(states[0]["cls_token"], states[2]["cls_token"])

    def test_all_position_kinds_start_from_the_same_weights(self) -> None:
        torch.manual_seed(7)
        base_state, rng_state = make_tiny(position="none").state_dict(), torch.get_rng_state()
        for kind, location in KINDS_AND_LOCATIONS:
            torch.manual_seed(7)
            state = make_tiny(position=kind, where=location).state_dict()
            assert all(torch.equal(state[name], base_state[name]) for name in base_state), kind
            if kind == "sinusoidal":
                assert torch.equal(torch.get_rng_state(), rng_state)
                assert set(state) == set(base_state)


@pytest.mark.parametrize("kind, location", AT_EVERY_LAYER)
def test_fused_and_unfused_attention_agree(kind: str, location: str | None) -> None:
    model, x = make_tiny(position=kind, where=location), random_images(32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # learned positions and biases start at zero
    outputs, gradients = [], []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        outputs.append(model(x))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), list(model.parameters())))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)


class TestDropout:
    def test_drop_rate_applies_to_the_head_only(self) -> None:
        model, x = make_tiny(drop_rate=0.5), random_images(32)
        expected = model.eval().forward_features(x)
        assert torch.equal(model.train().forward_features(x), expected)
        assert (
            len(
                [
                    module
                    for module in model.modules()
                    if isinstance(module, nn.Dropout) and module.p
                ]
            )
            == 1
        )
        dropped = model.head.drop(torch.ones(1000))
        assert set(dropped.tolist()) == {0.0, 2.0}
        outputs = [model(x) for _ in range(8)]
        assert any(not torch.equal(outputs[0], output) for output in outputs[1:])

    @pytest.mark.parametrize("fused", [True, False])
    def test_attn_drop_rate_applies_to_attention_weights(self, fused: bool) -> None:
        attention_layer = make_tiny(attn_drop_rate=0.5).blocks[0].attn.train()
        attention_layer.fused_attn = fused
        with torch.no_grad():
            attention_layer.qkv.weight.zero_()  # all scores equal: each weight is 1/16
            attention_layer.qkv.bias[:48] = 0.0
            attention_layer.qkv.bias[48:] = 1.0  # all values are 1
            attention_layer.proj.weight.copy_(torch.eye(24))
            attention_layer.proj.bias.zero_()
        num_kept_BNG = attention_layer(torch.randn(4, 16, 24), None)[..., ::8] * 16 / 2
        # the number of kept weights is whole
        torch.testing.assert_close(num_kept_BNG, num_kept_BNG.round())
        assert 0 < num_kept_BNG.min() < 8 < num_kept_BNG.max() < 16
        eval_output = attention_layer.eval()(torch.randn(4, 16, 24), None)
        torch.testing.assert_close(eval_output, torch.ones_like(eval_output))

    def test_recipe_dropout_applies_to_head_and_attention_only(self) -> None:
        built = build_model(NAME, pretrained=False, dropout=0.1, attention_dropout=0.2, args=TINY)
        rates = {
            n: m.p for n, m in built.model.named_modules() if isinstance(m, nn.Dropout) and m.p
        }
        layers = {f"blocks.{number}.attn.attn_drop": 0.2 for number in (0, 1)}
        assert rates == {"head.drop": 0.1, **layers}
        with refused("recipe.unsupported", "model.drop_path"):
            build_model(NAME, pretrained=False, drop_path=0.1, args=TINY)


class TestBuildModel:
    def build(self, **kwargs: Any) -> Any:
        kwargs = {"num_classes": 5, "pretrained": False, **kwargs}
        return build_model(NAME, **{**kwargs, "args": {**TINY, **kwargs.get("args", {})}})

    def test_zero_head_has_loss_ln_k_and_gets_gradients(self) -> None:
        model, labels = self.build().model, torch.tensor([0, 4])
        loss = nn.functional.cross_entropy(model.eval()(random_images(32)), labels)
        assert loss.item() == torch.tensor(5.0).log().item()
        loss.backward()
        assert model.head.fc.weight.grad.abs().max() > 0
        assert model.cls_token.grad.abs().max() == 0  # the zero head blocks the gradient
        assert torch.equal(model.head.norm.weight, torch.ones(5))

    def test_freezing(self) -> None:
        def trainable(**kwargs: Any) -> set[str]:
            return {
                name
                for name, parameter in self.build(**kwargs).model.named_parameters()
                if parameter.requires_grad
            }

        head = {"head.fc.weight", "head.fc.bias", "head.norm.weight", "head.norm.bias"}
        assert trainable(freeze="backbone") == head
        for location in POSITION_LOCATIONS:
            names = trainable(freeze=1, args={"position": "learned_2d", "where": location})
            prefixes = {".".join(name.split(".")[:2]) for name in names}
            assert prefixes == {"blocks.1", "norm.weight", "norm.bias", "head.fc", "head.norm"}

    @pytest.mark.parametrize("kind, location", AT_EVERY_LAYER)
    def test_layer_decay_and_weight_decay(self, kind: str, location: str) -> None:
        model = self.build(args={"position": kind, "where": location}).model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        scales, decayed_names = {}, set()
        for group in param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5):
            for parameter in group["params"]:
                name = names[id(parameter)]
                scales[name] = group["lr_scale"]
                if group["weight_decay"]:
                    decayed_names.add(name)
        assert len(scales) == len(names)
        for name, scale in scales.items():
            expected_scale = {"head": 1.0, "norm": 0.5}.get(name.split(".")[0], 0.125)
            expected_scale = {"blocks.0": 0.25, "blocks.1": 0.5}.get(name[:8], expected_scale)
            assert scale == expected_scale, name
        matrices = {"patch_embed.proj", "head.fc"} | {
            f"blocks.{i}.{m}"
            for i in (0, 1)
            for m in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        }
        assert decayed_names == {f"{name}.weight" for name in matrices}

    @pytest.mark.parametrize("kind, location", AT_EVERY_LAYER)
    def test_saves_and_loads_in_timm(self, kind: str, location: str, tmp_path: Path) -> None:
        built = self.build(args={"position": kind, "where": location})
        randomize_head(built.model)
        folder, x = save_network(tmp_path / "net", built), random_images(32)
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert torch.equal(compute_logits(timm_model, x), compute_logits(built.model, x))
        other_classes = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3)
        assert torch.equal(other_classes.eval().forward_features(x), timm_model.forward_features(x))
        assert torch.equal(build_model(folder).model.eval()(x), timm_model(x))

    @pytest.mark.parametrize("kind, location", [*AT_EVERY_LAYER, ("sinusoidal", "stem")])
    def test_loads_at_another_image_size(
        self, kind: str, location: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        built = self.build(args={"position": kind, "where": location})
        folder = save_network(tmp_path / "net", built)
        if kind == "relative":
            with refused("weights.wrong_shape", "pos_embed.offsets (33, 8) for (73, 8)"):
                build_model(folder, num_classes=3, image_size=48)
            return
        resized = build_model(folder, num_classes=3, image_size=48, posemb="paper")
        assert torch.equal(compute_logits(resized.model, random_images(48)), torch.zeros(2, 3))
        state_before, state_after = built.model.state_dict(), resized.model.state_dict()
        unchanged_names = [
            name
            for name in state_before
            if "pos_embed" not in name and not name.startswith("head.")
        ]
        assert len(unchanged_names) == 2 * 12 + 5
        assert all(torch.equal(state_before[name], state_after[name]) for name in unchanged_names)
        position_names = [name for name in state_before if "pos_embed" in name]
        uses_paper_resizing = kind == "learned_1d" and location != "every_layer"
        posemb = "paper" if uses_paper_resizing else "timm" if position_names else "none"
        assert resized.provenance["posemb"] == posemb
        assert ("timm's own resizing was used" in caplog.text) == (posemb == "timm")
        if uses_paper_resizing:
            assert torch.equal(
                state_after["pos_embed"], resize_posemb(state_before["pos_embed"], (6, 6))
            )
        newly_built = self.build(image_size=48, args={"position": kind, "where": location}).model
        if kind == "sinusoidal" and location == "stem":
            assert torch.equal(resized.model.pos_embed, newly_built.pos_embed)
            assert resized.model.pos_embed.shape == (1, 37, 24)

    @pytest.mark.parametrize("kind", ["sinusoidal", "relative"])
    def test_gradient_checkpointing_does_not_change_gradients(self, kind: str) -> None:
        def gradients(**kwargs: Any) -> list[Tensor]:
            torch.manual_seed(3)
            model = self.build(head_init="default", args={"position": kind}, **kwargs).model
            x = torch.randn(2, 3, 32, 32)
            model.train()(x).square().sum().backward()
            return [parameter.grad for parameter in model.parameters()]

        expected = gradients(attention_dropout=0.3)
        recomputed = gradients(attention_dropout=0.3, grad_checkpointing=True)
        assert all(
            torch.equal(gradient, other_gradient)
            for gradient, other_gradient in zip(expected, recomputed, strict=True)
        )

    @pytest.mark.parametrize(
        "kind", [pytest.param("sinusoidal", marks=pytest.mark.faults), "relative"]
    )
    def test_exports_with_a_dynamic_batch_size(self, kind: str) -> None:
        model = self.build(head_init="default", args={"position": kind}).model.eval()
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        program = torch.export.export(model, (random_images(32),), dynamic_shapes=(batch,))
        x = random_images(32, 5)
        torch.testing.assert_close(program.module()(x), model(x))

    def test_attention_maps(self) -> None:
        for kind in ("sinusoidal", "relative"):
            model = self.build(args={"position": kind}).model.eval()
            maps = attention_maps(model, random_images(32))
            assert [tuple(attention_map.shape) for attention_map in maps] == [(2, 3, 17, 17)] * 2
            torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 3, 17))

    @pytest.mark.parametrize(
        "args, code, expected_text",
        [
            ({"position": "learned"}, "wrong_value", "position: unknown 'learned'"),
            ({"num_heads": 5}, "wrong_value", "num_heads: 5 does not divide embed_dim=24"),
            ({"global_pool": "avg"}, "unknown_key", "'global_pool'"),
            ({"position": "relative", "where": "stem"}, "wrong_value", "every_layer"),
        ],
    )
    def test_rejects_invalid_arguments(
        self, args: dict[str, Any], code: str, expected_text: str
    ) -> None:
        with refused(f"recipe.{code}", expected_text):
            self.build(args=args)

    def test_a_replaced_head_keeps_the_dtype(self) -> None:
        model = make_tiny().double()
        model.reset_classifier(4, "token")
        assert model.head.fc.weight.dtype == torch.float64
        assert model.head.fc.out_features == model.num_classes == 4

    @pytest.mark.usefixtures("no_plots")
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
    def test_settings_of_the_paper_recipe(self, repository: Path) -> None:
        recipe = load_recipe(repository / "recipes" / "scratch_vit" / "vit_scratch_large.yaml")
        assert (recipe.model.name, recipe.model.pretrained) == (NAME, False)
        assert (recipe.model.dropout, recipe.model.attention_dropout) == (0.1, 0.1)
        optim = recipe.optim
        assert (optim.name, optim.lr, optim.epochs, optim.weight_decay) == ("adam", 5e-7, 800, 0)
        assert (recipe.data.batch_size, recipe.run.seed) == (512, 123)
        assert recipe.data.source == "hub:uoft-cs/cifar10"

    def test_ablation_recipes_vary_only_the_position_embedding(self, repository: Path) -> None:
        folder = repository / "recipes" / "ablations" / "position_embeddings"
        positions, other_settings = set(), set()
        for path in sorted(set(folder.glob("*.yaml")) - {folder / "plan.yaml"}):
            values = load_recipe(path).model_dump()
            args = dict(values["model"].pop("args"))
            kind, location = args.pop("position"), args.get("where")
            name = kind if kind in ("none", "relative") else f"{kind}_{args['where']}"
            assert path.stem == name
            make_tiny(position=kind, where=args.pop("where", None), **{**args, "depth": 1})
            positions.add((kind, location))
            other_settings.add((repr(values), repr(args)))
        assert len(other_settings) == 1
        # with a fixed table, sharing it between layers makes no difference
        omitted = {("sinusoidal", "every_layer_shared"), ("relative", "every_layer_shared")}
        omitted |= {("none", location) for location in POSITION_LOCATIONS}
        assert positions == {*KINDS_AND_LOCATIONS, ("none", None)} - omitted

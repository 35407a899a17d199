"""models/architectures/shiftvit.py against loops in NumPy; ShiftViT in builds, recipes and runs."""

# B batch, H W tokens in a column and a row, C channels, K classes

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import timm
import torch
from forked_runs import read_train_losses
from networks import (
    CLASS_NAMES,
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

from finetune.inference import Classifier
from finetune.models.architectures.shiftvit import SHIFT_VERSIONS, shift_channels, zero_edges
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import Recipe
from finetune.training.lr_schedule import lr_at
from finetune.training.optim import param_groups
from finetune.training.train import train
from finetune.transforms.pipeline import Pipeline, sample_keys

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "recipes" / "shiftvit"
NAME = "shiftvit_tiny_patch4_48"
# the narrowest width that the document's shift allows
SMALL: dict[str, Any] = {"embed_dim": 48, "depths": [1, 2]}

Array = npt.NDArray[np.float64]
SHIFT_FUNCTIONS = {"document": zero_edges, "paper": shift_channels}


def make_network(shift: str, **kwargs: Any) -> Any:
    return timm.create_model(NAME, shift=shift, **{"num_classes": 5, **SMALL, **kwargs})


def build_small(shift: str = "document", **kwargs: Any) -> BuiltModel:
    args = {**SMALL, "shift": shift}
    return build_model(NAME, **{"num_classes": 5, "pretrained": False, "args": args, **kwargs})


# --- reference implementations with loops -------------------------------------------------------


def reference_shift(x_HWC: Array, shift: str, num_div: int = 12) -> Array:
    """Shift the channels of one image."""
    height, width, channels = x_HWC.shape
    group_width = num_div if shift == "document" else channels // num_div
    out = np.zeros_like(x_HWC)
    for row in range(height):
        for column in range(width):
            for channel in range(channels):
                group = channel // group_width
                # the position that a value of this group moves from
                source = {
                    0: (row, column + 1),
                    1: (row, column - 1),
                    2: (row + 1, column),
                    3: (row - 1, column),
                }.get(group, (row, column))
                is_inside = 0 <= source[0] < height and 0 <= source[1] < width
                if shift == "document":
                    source = (row, column)
                if is_inside:
                    out[row, column, channel] = x_HWC[source[0], source[1], channel]
    return out


def reference_patch_conv(x_HWC: Array, size: int, kernel_OIHW: Array) -> Array:
    """Multiply each size x size block by the kernel; pad with zeros beyond the edge."""
    height, width = (math.ceil(side / size) for side in x_HWC.shape[:2])
    out = np.zeros((height, width, len(kernel_OIHW)))
    for row in range(height):
        for column in range(width):
            for down in range(size):
                for across in range(size):
                    y, x = row * size + down, column * size + across
                    if y < x_HWC.shape[0] and x < x_HWC.shape[1]:
                        out[row, column] += kernel_OIHW[:, :, down, across] @ x_HWC[y, x]
    return out


def reference_logits(model: nn.Module, image_CHW: Array, shift: str, depths: list[int]) -> Array:
    """Compute the logits of one image."""
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    x = reference_patch_conv(image_CHW.transpose(1, 2, 0), 4, weights["patch_embed.proj.weight"])
    x = x + weights["patch_embed.proj.bias"]
    for stage, depth in enumerate(depths):
        name = f"stages.{stage}.downsample"
        if stage:
            x = reference_patch_conv(
                layer_norm(x, weights, f"{name}.norm"), 2, weights[f"{name}.reduction.weight"]
            )
        for block in range(depth):
            name = f"stages.{stage}.blocks.{block}"
            x = reference_shift(x, shift)
            hidden = gelu(
                linear(layer_norm(x, weights, f"{name}.norm"), weights, f"{name}.mlp.fc1")
            )
            x = x + linear(hidden, weights, f"{name}.mlp.fc2")
    return linear(x.mean((0, 1)), weights, "head.fc")


# --- the network --------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFT_VERSIONS)
def test_number_of_parameters(shift: str) -> None:
    model = timm.create_model(NAME, num_classes=10, shift=shift)
    count = lambda part: sum(p.numel() for p in part.parameters())  # noqa: E731
    assert count(model) == 11_690_602
    assert [len(stage.blocks) for stage in model.stages] == [2, 4, 8, 2]
    assert [count(stage.blocks[0]) for stage in model.stages] == [
        4 * width**2 + 5 * width for width in (96, 192, 384, 768)
    ]
    assert count(model.patch_embed) == 4 * 4 * 3 * 96 + 96
    assert [count(stage.downsample) for stage in model.stages[1:]] == [
        8 * width**2 + 2 * width for width in (96, 192, 384)
    ]
    assert model.stages[1].downsample.reduction.bias is None
    assert not any(isinstance(m, nn.LayerNorm) for m in model.head.modules())


@pytest.mark.parametrize("shift", SHIFT_VERSIONS)
@pytest.mark.parametrize("size", [(3, 4), (5, 2), (1, 3), (2, 1), (1, 1)])
def test_shift_equals_the_reference(shift: str, size: tuple[int, int]) -> None:
    x_BHWC = torch.randn(2, *size, 50)
    original = x_BHWC.clone()
    result = SHIFT_FUNCTIONS[shift](x_BHWC, 12)
    expected = [
        reference_shift(x.numpy(), shift, num_div=12 if shift == "document" else 4) for x in x_BHWC
    ]
    assert torch.equal(result, torch.from_numpy(np.stack(expected)))
    assert torch.equal(x_BHWC, original)


def test_document_shift_only_zeros_the_edges() -> None:
    x_BHWC = torch.rand(1, 4, 4, 60) + 1
    cleared = zero_edges(x_BHWC, 12)
    assert torch.equal(cleared[cleared != 0], x_BHWC[cleared != 0])
    zeros_by_group = [(cleared[0, :, :, 12 * group] == 0).nonzero().tolist() for group in range(5)]
    indices = range(4)
    assert zeros_by_group[0] == [[row, 3] for row in indices]  # the last column
    assert zeros_by_group[1] == [[row, 0] for row in indices]
    assert zeros_by_group[2] == [[3, column] for column in indices]  # the last row
    assert zeros_by_group[3] == [[0, column] for column in indices]
    assert zeros_by_group[4] == []


def test_paper_shift_moves_in_four_directions() -> None:
    x_BHWC = torch.zeros(1, 3, 3, 5)
    x_BHWC[0, 1, 1] = 1.0
    positions = shift_channels(x_BHWC, 1)[0].nonzero().tolist()
    # left, right, up, down and not at all
    assert sorted(positions, key=lambda position: position[2]) == [
        [1, 0, 0], [1, 2, 1], [0, 1, 2], [2, 1, 3], [1, 1, 4],
    ]  # fmt: skip


def test_number_of_shifted_channels() -> None:
    widths = {
        shift: [
            stage.blocks[0].group_width for stage in timm.create_model(NAME, shift=shift).stages
        ]
        for shift in SHIFT_VERSIONS
    }
    assert widths == {"document": [12, 12, 12, 12], "paper": [8, 16, 32, 64]}


@pytest.mark.parametrize("shift", SHIFT_VERSIONS)
def test_logits_equal_the_reference(shift: str) -> None:
    depths = [2, 1, 1]
    model = make_network(shift, depths=depths).double().eval()
    torch.manual_seed(1)
    for parameter in model.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.1)
    # grids of 5 x 7, 3 x 4 and 2 x 2 tokens: odd sides on both axes
    images_BCHW = torch.rand(2, 3, 20, 28, dtype=torch.float64)
    images_BCHW[1] /= 50  # small values, so that the epsilon of the norms matters
    expected = [reference_logits(model, image.numpy(), shift, depths) for image in images_BCHW]
    logits_BK = compute_logits(model, images_BCHW).numpy()
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    # float64 rounding; tanh for erf, or another epsilon, is off by more than 1e-6
    np.testing.assert_allclose(logits_BK, np.stack(expected), rtol=0, atol=1e-11)


def drop_rates(shift: str) -> list[list[float]]:
    model = timm.create_model(NAME, shift=shift, drop_path_rate=0.2)
    return [
        [getattr(block.drop_path, "drop_prob", 0.0) for block in stage.blocks]
        for stage in model.stages
    ]


def test_drop_path_rates_by_block() -> None:
    document, paper = drop_rates("document"), drop_rates("paper")
    assert document == [
        pytest.approx([0.2 * index / (depth - 1) for index in range(depth)])
        for depth in (2, 4, 8, 2)
    ]
    assert [len(stage) for stage in paper] == [2, 4, 8, 2]
    all_rates = [rate for stage in paper for rate in stage]
    assert all_rates == pytest.approx([0.2 * index / 15 for index in range(16)])


def test_drop_path_drops_whole_samples() -> None:
    block = make_network("document", drop_path_rate=0.5).stages[1].blocks[1]
    x_BHWC = torch.randn(64, 3, 3, 96)
    shifted = zero_edges(x_BHWC, 12)
    with torch.no_grad():
        residual = block.eval()(x_BHWC) - shifted
        torch.manual_seed(0)
        residual_in_training = block.train()(x_BHWC) - shifted
    is_dropped = [
        bool(torch.equal(sample, torch.zeros_like(sample))) for sample in residual_in_training
    ]
    assert 20 < sum(is_dropped) < 44
    kept_rows = [sample for sample, dropped in enumerate(is_dropped) if not dropped]
    assert torch.allclose(residual_in_training[kept_rows], 2 * residual[kept_rows], atol=1e-5)


def test_dropout_after_both_mlp_layers() -> None:
    mlp = make_network("document", proj_drop_rate=0.2).stages[0].blocks[0].mlp
    assert [mlp.drop1.p, mlp.drop2.p] == [0.2, 0.2]
    assert make_network("document", drop_rate=0.3).head.drop.p == 0.3


@pytest.mark.parametrize(
    "shift, args, expected",
    [
        ("papr", {}, "'paper'"),
        ("document", {"embed_dim": 36}, "embed_dim: 36 .* num_div=12"),
        ("document", {"embed_dim": 100}, "embed_dim: 100 .* num_div=12"),
        ("paper", {"num_div": 3}, "num_div: 3 is not between 4 and 48"),
        ("paper", {"num_div": 49}, "num_div: 49 is not between 4 and 48"),
    ],
)
def test_rejects_conflicting_values(shift: str, args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make_network(shift, **args)


def test_a_recipe_with_an_unknown_shift_is_refused() -> None:
    with refused("recipe.wrong_value", "model.args", "'papr'", "'paper'"):
        build_small("papr")


# --- built, saved and trained -------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFT_VERSIONS)
def test_timm_model_interface(shift: str) -> None:
    model = make_network(shift).eval()
    x = random_images(48)
    with torch.no_grad():
        features_BHWC = model.forward_features(x)
        pooled = model.forward_head(features_BHWC, pre_logits=True)
        assert features_BHWC.shape == (2, 6, 6, 96)
        assert torch.allclose(pooled, features_BHWC.mean((1, 2)), atol=1e-6)  # without a norm
        assert torch.equal(model(x), model.get_classifier()(pooled))
    assert model.num_classes == 5
    assert model.num_features == model.head_hidden_size == 96
    model.reset_classifier(3)
    assert compute_logits(model, x).shape == (2, 3)
    assert model.num_classes == 3
    model.reset_classifier(0)
    assert torch.allclose(compute_logits(model, x), pooled, atol=1e-6)
    model.reset_classifier(0, global_pool="")
    assert compute_logits(model, x).shape == (2, 6, 6, 96)


def test_freezing() -> None:
    def trainable(freeze: str | int) -> set[str]:
        model = build_small(freeze=freeze).model
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    all_names = trainable("none")
    assert trainable("backbone") == {"head.fc.weight", "head.fc.bias"}
    stem = {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert all_names - trainable(0) == stem
    first_stage = {name for name in all_names if name.startswith("stages.0.")}
    assert len(first_stage) == 6
    assert all_names - trainable(1) == stem | first_stage
    # downsampling is frozen together with the following block
    second_stage_start = {
        name for name in all_names if name.startswith(("stages.1.downsample", "stages.1.blocks.0."))
    }
    assert all_names - trainable(2) == stem | first_stage | second_stage_start
    with refused("recipe.wrong_value", "model.freeze: 4 blocks, but the network has 3"):
        trainable(4)


def test_layer_decay() -> None:
    model = build_small().model
    groups = param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {
        names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]
    }
    decays = {
        names[id(parameter)]: group["weight_decay"]
        for group in groups
        for parameter in group["params"]
    }
    assert scales["head.fc.weight"] == 1.0
    assert scales["stages.1.blocks.1.mlp.fc1.weight"] == 0.5
    assert scales["stages.1.blocks.0.mlp.fc1.weight"] == 0.25
    assert scales["stages.1.downsample.reduction.weight"] == 0.25
    assert scales["stages.0.blocks.0.norm.weight"] == 0.125
    assert scales["patch_embed.proj.weight"] == 0.0625
    assert decays["stages.0.blocks.0.norm.weight"] == decays["head.fc.bias"] == 0.0
    assert decays["stages.1.downsample.reduction.weight"] == 0.1


@pytest.mark.parametrize("shift", SHIFT_VERSIONS)
def test_saves_its_shift_and_loads_at_other_sizes(shift: str, tmp_path: Path) -> None:
    built = build_small(shift, dropout=0.1, drop_path=0.1)
    randomize_head(built.model)
    folder = save_network(tmp_path / "net", built)
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    assert config["model_args"] == {**SMALL, "shift": shift}
    assert config["label_names"] == CLASS_NAMES
    x, odd_images = random_images(48), random_images((36, 44))
    for loaded in (
        timm.create_model(f"local-dir:{folder}", pretrained=True),
        build_model(folder).model,
    ):
        assert torch.equal(compute_logits(loaded, x), compute_logits(built.model, x))
        assert torch.equal(
            compute_logits(loaded, odd_images), compute_logits(built.model, odd_images)
        )
    other_shift = timm.create_model(
        f"local-dir:{folder}", pretrained=True, shift=SHIFT_VERSIONS[shift == SHIFT_VERSIONS[0]]
    )
    assert not torch.allclose(
        compute_logits(other_shift, x), compute_logits(built.model, x), atol=1e-4
    )
    resized = build_model(folder, num_classes=3, image_size=(32, 64))
    assert resized.preprocessing.image_size == (32, 64)
    assert compute_logits(resized.model, random_images((32, 64))).shape == (2, 3)
    backbone_state = {
        name: tensor
        for name, tensor in built.model.state_dict().items()
        if not name.startswith("head.")
    }
    assert all(
        torch.equal(resized.model.state_dict()[key], value) for key, value in backbone_state.items()
    )
    with refused("recipe.wrong_size", "model.image_size: 50 px", "4 px"):
        build_small(shift, image_size=50)


# --- the recipes --------------------------------------------------------------------------------


def load_shiftvit_recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"shiftvit_tiny_{name}.yaml", overrides)


def make_pipeline(name: str, *, training: bool) -> Pipeline:
    data = load_shiftvit_recipe(name).data
    return Pipeline(
        (data.train if training else data.eval) or "",
        image_size=(48, 48),
        mean=data.mean or (),
        std=data.std or (),
        interpolation=data.interpolation or "",
        train=training,
    )


def resize(images_BCHW: Tensor, size: int) -> Tensor:
    """Resize like PIL's bilinear filter, with torch."""
    interpolate = nn.functional.interpolate
    return interpolate(images_BCHW, size=(size, size), mode="bilinear", antialias=True)


def test_preprocessing_equals_the_document() -> None:
    image_BCHW = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    enlarged = resize(image_BCHW.float() / 255, 52)
    # two float32 interpolations versus their product
    tolerances = {"rtol": 0, "atol": 2e-6}
    prepared = make_pipeline("document", training=False)(image_BCHW)
    torch.testing.assert_close(prepared, resize(enlarged, 48), **tolerances)
    assert not torch.allclose(prepared, resize(image_BCHW.float() / 255, 48), atol=1e-3)
    keys = sample_keys(0, 0, np.arange(200))
    augmented = make_pipeline("document", training=True)(
        image_BCHW.expand(200, 3, 32, 32), keys=keys
    )
    windows = [
        window
        for top in range(5)
        for left in range(5)
        for crop in [enlarged[0, :, top : top + 48, left : left + 48]]
        for window in (crop, crop.flip(-1))
    ]
    distances = torch.cdist(augmented.flatten(1), torch.stack(windows).flatten(1), p=torch.inf)
    nearest = distances.min(1)
    assert nearest.values.max() < 2e-6
    assert len(nearest.indices.unique()) > 40  # of 5 x 5 positions, each with and without a flip


def test_lr_schedule_equals_the_document() -> None:
    optim, optim_5_epochs = (
        load_shiftvit_recipe("document").optim,
        load_shiftvit_recipe("document_5_epochs").optim,
    )
    per_epoch = 40_000 / 256

    def rate(step: int, optim_section: Any) -> float:
        names = ("lr", "schedule", "warmup_lr", "min_lr")
        settings = {name: getattr(optim_section, name) for name in names}
        warmup = round(optim_section.warmup_epochs * per_epoch)
        return lr_at(
            step,
            total_steps=math.ceil(optim_section.epochs * per_epoch),
            warmup_steps=warmup,
            **settings,
        )

    total, warmup = 15_625, 2_343  # int(40000 / 256 * 100) and 15 % of it, rounded down
    assert math.ceil(optim.epochs * per_epoch) == total
    for step in range(0, total, 25):
        linear_lr = 1e-5 + (1e-3 - 1e-5) * step / warmup
        cosine_lr = 0.5e-3 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        # the recipe's warm-up is one step longer: 1e-3 / 2343
        assert rate(step, optim) == pytest.approx(
            linear_lr if step < warmup else cosine_lr, abs=5e-7
        )
    # 5 epochs are 781.25 steps; the recipe warms up in 781
    for step in range(782):
        assert rate(step, optim_5_epochs) == pytest.approx(rate(step, optim), rel=1e-3)


def test_recipes_differ_only_in_the_studied_keys() -> None:
    document, paper, short = (
        load_shiftvit_recipe(name).model_dump()
        for name in ("document", "paper", "document_5_epochs")
    )
    assert document["model"]["args"] == {"shift": "document"}
    assert paper["model"].pop("args") == {"shift": "paper"}
    short_optim, optim = short.pop("optim"), document.pop("optim")
    assert paper.pop("optim") == optim
    assert {key for key in optim if optim[key] != short_optim[key]} == {
        "lr", "epochs", "warmup_epochs",
    }  # fmt: skip
    assert document["run"].pop("patience") == paper["run"].pop("patience") == 5
    assert short["run"].pop("patience") is None
    claims = [values.pop("claims") for values in (document, paper, short)]
    assert document == short
    document["model"].pop("args")
    assert document == paper
    reported = [(claim["metric"], claim["when"], claim["value"]) for claim in claims[0]]
    assert ("test.top1", "end", 0.7638) in reported
    assert ("test.top5", "end", 0.9855) in reported
    assert [claim["value"] for claim in claims[2]] == [0.261, 0.336, 0.459, 0.486, 0.509]


@pytest.mark.usefixtures("no_plots")
def test_trains_two_steps_and_loads_the_model(tmp_path: Path) -> None:
    model_args_override = "model.args={shift: paper, embed_dim: 48, depths: [1, 1]}"
    recipe = load_shiftvit_recipe(
        "paper", model_args_override, "data.source=embedded:digits", "data.batch_size=16",
        "optim.epochs=null", "optim.warmup_epochs=null", "optim.steps=2", "optim.ema_decay=0.5",
        "run.log_every=1", "run.precision=fp32", "run.patience=null",
    )  # fmt: skip
    results = train(recipe, tmp_path / "run")
    assert results["test"]["examples"] == 355
    losses = read_train_losses(tmp_path / "run")
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["model_args"]["shift"] == "paper"
    assert config["pretrained_cfg"]["std"] == [1, 1, 1]
    classifier = Classifier.load(str(tmp_path / "run"))
    timm_model = timm.create_model(f"local-dir:{tmp_path / 'run/model'}", pretrained=True)
    x = torch.rand(2, 3, 48, 48)
    torch.testing.assert_close(
        compute_logits(classifier.network, x), compute_logits(timm_model, x), rtol=0, atol=1e-5
    )

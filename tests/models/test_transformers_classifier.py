"""models/architectures/transformers_classifier.py: tiny networks saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_runs import read_train_losses
from networks import CLASS_NAMES, compute_logits, random_images, randomize_head, save_network
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import nn

from finetune import load_recipe, train
from finetune.models.architectures.transformers_classifier import classifier_types
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.transforms.eval_transforms import build_pipeline

transformers = pytest.importorskip("transformers")

VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}
PYRAMID = {
    "image_size": 64,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
}
LEVIT = {
    "image_size": 64,
    "hidden_sizes": [16, 32, 48],
    "num_attention_heads": [1, 2, 3],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}
PERCEIVER = {
    "num_latents": 4,
    "d_latents": 16,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1,
}
# Tiny configurations by model type; of types with several classifiers, by type:class.
NETWORKS: dict[str, dict[str, Any]] = {
    # the text encoder is not part of the classifier
    "clip": {"vision_config": VIT, "text_config": {"vocab_size": 49_408}},
    "cvt": {
        "embed_dim": [8, 16, 24],
        "depth": [1, 2, 3],  # transformers' drop path rates need at least this many blocks
        # its drop path drops whole samples, including the shortcut
        "drop_path_rate": [0.0, 0.0, 0.0],
        "num_heads": [1, 2, 3],
        "patch_sizes": [7, 3, 3],
    },
    "deit:DeiTForImageClassificationWithTeacher": VIT,  # two heads
    "levit": LEVIT,  # a head with batch norm, and a fixed image size
    "hgnet_v2": {  # the head is `fc`
        **STAGES,
        "embedding_size": 8,
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8],
        "stage_mid_channels": [8, 8],
        "stage_out_channels": [8, 16],
        "stage_num_blocks": [1, 1],
        "stage_numb_of_layers": [1, 1],
        "stage_downsample": [False, True],
        "stage_downsample_strides": [2, 2],
        "stage_light_block": [False, False],
        "stage_kernel_size": [3, 3],
    },
    "perceiver": {**PERCEIVER, "d_model": 512, "image_size": 16},  # three classifiers
    "pvt": {**PYRAMID, "mlp_ratios": [2, 2, 2, 2]},  # position embeddings of every stage
    # takes patches; its pooling head is not part of the classifier
    "siglip2": {"vision_config": {**VIT, "num_patches": 16, "vision_use_head": False}},
}
# The fault tests train the others too.
IN_THE_SUITE = ("clip", "siglip2")
OTHER_NETWORKS: dict[str, dict[str, Any]] = {
    "beit": {**VIT, "use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    "bit": {**STAGES, "embedding_size": 32, "hidden_sizes": [32, 64], "num_groups": 1},
    "convnext": {**STAGES, "num_stages": 2},
    "convnextv2": {**STAGES, "num_stages": 2},
    "data2vec-vision": {**VIT, "use_relative_position_bias": True},
    "deit": VIT,
    "dinov2": {**VIT, "mlp_ratio": 2},
    "dinov2_with_registers": {**VIT, "mlp_ratio": 2},
    "donut-swin": SWIN,
    "efficientnet": {
        "image_size": 32,
        "width_coefficient": 0.1,
        "depth_coefficient": 0.1,
        "hidden_dim": 128,
        "in_channels": [8, 8, 16],
        "out_channels": [8, 16, 16],
        "kernel_sizes": [3, 3, 3],
        "strides": [1, 2, 2],
        "num_block_repeats": [1, 1, 1],
        "expand_ratios": [1, 6, 6],
        "depthwise_padding": [],
    },
    "focalnet": {
        **STAGES,
        "image_size": 32,
        "embed_dim": 8,
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "hiera": {
        "image_size": [64, 64],
        "embed_dim": 8,
        "depths": [1, 1, 1],
        "num_heads": [1, 1, 1],
        "query_stride": [2, 2],
        "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False, False],
        "num_query_pool": 2,
    },
    "ijepa": VIT,
    "levit:LevitForImageClassificationWithTeacher": LEVIT,
    "metaclip_2": {"vision_config": VIT},
    "mobilenet_v1": {
        "image_size": 32,
        "depth_multiplier": 0.25,
        "classifier_dropout_prob": 0.0,  # the default is 0.999
    },
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.25, "finegrained_output": False},
    "mobilevit": {
        "image_size": 64,
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
        "num_attention_heads": 2,
    },
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.25},
    "perceiver:PerceiverForImageClassificationFourier": {**PERCEIVER, "d_model": 261},
    "perceiver:PerceiverForImageClassificationConvProcessing": {**PERCEIVER, "d_model": 322},
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "pp_lcnet": {"scale": 0.25, "class_expand": 32},
    "pvt_v2": {**PYRAMID, "mlp_ratios": [2, 2, 2, 2]},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "resnet": {**STAGES, "embedding_size": 8},
    "segformer": PYRAMID,
    "siglip": {
        "vision_config": VIT,
        "text_config": {"vocab_size": 256_000},
    },
    "swiftformer": {
        "image_size": 64,
        "embed_dims": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "mlp_ratio": 2,
        "downsamples": [True, True, True, True],
    },
    "swin": SWIN,
    "swinv2": SWIN,
    "textnet": {"hidden_sizes": [8, 8, 16, 16, 16], "stem_out_channels": 8},
    "vit": VIT,
    "vit_msn": VIT,
}
# Their convolutions and Fourier features have the size of their training images.
IMAGE_SIZES = {
    "perceiver:PerceiverForImageClassificationFourier": 224,
    "perceiver:PerceiverForImageClassificationConvProcessing": 224,
}
FIXED_SIZE = {*IMAGE_SIZES, "levit", "levit:LevitForImageClassificationWithTeacher"}
# Neither of them predicts classes of an image alone; Dinat needs a package that builds CUDA code.
NOT_SUPPORTED = {"imagegpt", "shieldgemma2", "dinat", "timm_wrapper"}


def save_with_transformers(tmp_path: Path, name: str) -> str:
    """Save a tiny classifier and its processor with transformers only."""
    kind, _, class_name = name.partition(":")
    config = transformers.AutoConfig.for_model(
        kind,
        **(NETWORKS | OTHER_NETWORKS)[name],
        num_labels=5,
        id2label=dict(enumerate(CLASS_NAMES)),
        architectures=[class_name],
    )
    model = transformers.AutoModelForImageClassification.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / kind)
    if kind == "cvt":
        processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.8)
    else:
        vision_config = getattr(config, "vision_config", config)
        size = IMAGE_SIZES.get(name) or getattr(vision_config, "image_size", 64)
        height, width = (size, size) if isinstance(size, int) else size
        processor = transformers.ViTImageProcessor(size={"height": height, "width": width})
    processor.save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)


def load_with_transformers(path: str) -> Any:
    return transformers.AutoModelForImageClassification.from_pretrained(path).eval()


def build(path: object, **kwargs: Any) -> BuiltModel:
    return build_model(f"transformers:{path}", **kwargs)


@torch.no_grad()
def compute_with_transformers(path: str, images_BCHW: torch.Tensor) -> torch.Tensor:
    """Compute logits with transformers alone; Siglip2's processor cuts the images into patches."""
    model = load_with_transformers(path)
    if model.config.model_type != "siglip2":
        return model(pixel_values=images_BCHW)[0]
    size = model.config.vision_config.patch_size
    processor = transformers.Siglip2ImageProcessor(
        do_resize=False, do_rescale=False, do_normalize=False, patch_size=size
    )
    num_patches = images_BCHW[0, 0].numel() // size**2
    inputs = processor(list(images_BCHW), max_num_patches=num_patches, return_tensors="pt")
    return model(**inputs).logits


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_THE_SUITE else pytest.param(name, marks=pytest.mark.faults)
        for name in (*NETWORKS, *OTHER_NETWORKS)
    ],
)
def test_trains_saves_and_loads(tmp_path: Path, name: str) -> None:
    if name.partition(":")[0] not in classifier_types():
        pytest.skip("this version of transformers does not have it")
    path = save_with_transformers(tmp_path, name)
    built = build(path)
    own_size = built.preprocessing.image_size[0]
    x = random_images(own_size)
    expected = compute_with_transformers(path, x)
    assert expected.std() > 0
    torch.testing.assert_close(compute_logits(built.model, x), expected)
    assert built.class_names == CLASS_NAMES

    size = own_size if name in FIXED_SIZE else own_size + 32
    built = build(path, num_classes=3, image_size=size)
    model, x, labels = built.model, random_images(size, count=3), torch.tensor([0, 1, 2])
    assert torch.equal(compute_logits(model, x), torch.zeros(3, 3))  # the zero head
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    names_with_gradient = [
        parameter_name
        for parameter_name, parameter in parameters.items()
        if parameter.grad is not None and parameter.grad.any()
    ]
    num_unused = 11 if name == "siglip" else 0  # its pooling head
    assert len(names_with_gradient) > 0.9 * len(parameters) - num_unused

    logits_BK = compute_logits(model, x)
    folder = save_network(tmp_path / "ours", built, class_names=["a", "b", "c"])
    loaded = build_model(folder)
    assert torch.equal(compute_logits(loaded.model, x), logits_BK)
    assert loaded.class_names == ["a", "b", "c"]
    assert loaded.preprocessing == built.preprocessing
    torch.testing.assert_close(compute_with_transformers(folder, x), logits_BK)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == name.partition(":")[0]
    assert config.id2label == {0: "a", 1: "b", 2: "c"}


@pytest.mark.faults
def test_every_classifier_of_transformers_is_tested() -> None:
    tested = {name.partition(":")[0] for name in NETWORKS | OTHER_NETWORKS}
    assert set(classifier_types()) - NOT_SUPPORTED <= tested


@pytest.mark.parametrize("kind", ["imagegpt", "shieldgemma2"])
def test_rejects_networks_that_need_tokens(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with refused("weights.unsupported", kind):
        build(tmp_path, pretrained=False, num_classes=2)


def test_networks_of_timm_load_without_the_prefix(tmp_path: Path) -> None:
    config = transformers.TimmWrapperConfig(architecture="test_resnet", num_labels=5)
    network = transformers.AutoModelForImageClassification.from_config(config).eval()
    network.save_pretrained(tmp_path)
    x = random_images(64)
    with torch.no_grad():
        expected = network(pixel_values=x).logits
    assert torch.equal(compute_logits(build_model(str(tmp_path)).model, x), expected)
    with refused("weights.wrong_format", tmp_path, "without a prefix"):
        build(tmp_path)


def test_rejects_missing_tensors(tmp_path: Path) -> None:
    path = Path(save_with_transformers(tmp_path, "pvt"))
    tensors = load_file(path / "model.safetensors")
    tensors.pop("classifier.bias")
    save_file(tensors, path / "model.safetensors")
    with refused("weights.missing_tensors", path, "1 tensors", "classifier.bias"):
        build(path)


def test_rejects_tensors_of_another_shape(tmp_path: Path) -> None:
    path = Path(save_with_transformers(tmp_path, "pvt"))
    tensors = load_file(path / "model.safetensors")
    tensors["classifier.bias"] = torch.zeros(7)
    save_file(tensors, path / "model.safetensors")
    with refused("weights.wrong_shape", path, "classifier.bias: (7,) for (5,)"):
        build(path)


def test_weights_without_a_head_train(tmp_path: Path) -> None:
    path = Path(save_with_transformers(tmp_path, "clip"))
    tensors = load_file(path / "model.safetensors")
    headless = {name: value for name, value in tensors.items() if "classifier" not in name}
    save_file(headless, path / "model.safetensors")
    assert compute_logits(build(path, num_classes=2).model, random_images(32)).shape == (2, 2)
    with refused("weights.missing_tensors", path, "classifier.weight"):
        build(path)


def test_refuses_what_could_not_be_read_back(tmp_path: Path) -> None:
    path = Path(save_with_transformers(tmp_path, "pvt"))
    content = json.loads((path / "config.json").read_text())
    content["hidden_sizes"][0] = 10**9
    (path / "config.json").write_text(json.dumps(content))
    with refused("weights.wrong_config", path, "at most 20000"):
        build(path)


@pytest.mark.faults
def test_two_ranks_train_a_network_with_unused_parameters(tmp_path: Path, no_plots: None) -> None:
    """The logits of SigLIP do not depend on its pooling head, and DDP waits for all gradients."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: 'transformers:{save_with_transformers(tmp_path, 'siglip')}'}}\n"
        "data: {source: embedded:digits, train: resize, batch_size: 16, num_train: 48}\n"
        "optim: {name: sgd, lr: 1e-2, steps: 3}\n"
        "run: {precision: fp32, log_every: 1, test: false, threads: 1}\n"
    )
    train(load_recipe(recipe), tmp_path / "one")
    run_two_ranks(run_rank_command, "train", str(recipe), "--out", str(tmp_path / "two"))
    one, two = (read_train_losses(tmp_path / name) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)


def test_head_and_features(tmp_path: Path) -> None:
    model = build(save_with_transformers(tmp_path, "pvt")).model
    assert model.num_features == 32
    assert model.get_classifier().out_features == model.num_classes == 5


def test_freezing_the_backbone_leaves_the_head(tmp_path: Path) -> None:
    model = build(save_with_transformers(tmp_path, "cvt"), num_classes=2, freeze="backbone").model
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["network.classifier.weight", "network.classifier.bias"]


@pytest.mark.parametrize("kind", ["cvt", "pvt"])
def test_preprocessing_equals_the_processor(tmp_path: Path, kind: str) -> None:
    path = save_with_transformers(tmp_path, kind)
    rng = np.random.default_rng(0)
    small_image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.array(small_image.resize((200, 150), Image.Resampling.BICUBIC))
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    pipeline = build_pipeline(build(path).preprocessing)
    actual = pipeline(torch.from_numpy(pixels).permute(2, 0, 1)[None], device=torch.device("cpu"))
    assert actual.shape == expected.shape
    # rounding to bytes between the two resizes
    assert float((actual - expected).abs().mean()) < 0.02


def test_random_weights_need_no_weights_file(tmp_path: Path) -> None:
    path = save_with_transformers(tmp_path, "cvt")
    (Path(path) / "model.safetensors").unlink()
    built = build(path, pretrained=False, num_classes=4)
    randomize_head(built.model)
    assert compute_logits(built.model, random_images(64)).std() > 0
    with refused("weights.not_found", path, "model.safetensors"):
        build(path)


def test_never_runs_code_of_a_repository(tmp_path: Path) -> None:
    path = save_with_transformers(tmp_path, "cvt")
    file = Path(path) / "config.json"
    content = json.loads(file.read_text())
    content["auto_map"] = {"AutoModelForImageClassification": "evil.Model"}
    file.write_text(json.dumps(content))
    (Path(path) / "evil.py").write_text("raise SystemExit('ran')")
    assert type(build(path).model.network).__module__.startswith("transformers.models.cvt")


@pytest.mark.parametrize(
    "config, code, expected_text",
    [
        ({"architecture": "vit"}, "weights.wrong_format", "timm's format"),
        ({"model_type": "bert"}, "weights.unsupported", "'bert'"),
        ({"model_type": "nothing"}, "weights.unsupported", "'nothing'"),
    ],
)
def test_rejects_configs_of_other_models(
    tmp_path: Path, config: dict[str, Any], code: str, expected_text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(code, tmp_path, expected_text):
        build(tmp_path, pretrained=False)

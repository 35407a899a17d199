"""Adapters: the same logits as peft, merged and unmerged, and the layers that may have one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from refusals import refused
from torch import Tensor, nn

from finetune.models.build import build_model
from finetune.models.lora import (
    base_state_dict,
    load_base_state_dict,
    merge_adapter,
    save_adapter,
)
from finetune.models.save import BuiltModel, save_model

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
NETWORKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "vit": ("vit_tiny_patch16_224", VIT, ["attention", "mlp"]),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT, ["qkv"]),
    "convnext": ("test_convnext", {}, ["all"]),
    "eva": ("eva02_base_patch14_224", VIT, [r"[qkv]_proj", "mlp"]),
    "same-padding": ("tf_efficientnet_lite0", {}, [r"blocks\.0\..*", "conv_stem"]),
}


def build_with_adapter(network: str, kind: str = "lora", **settings: Any) -> BuiltModel:
    name, args, targets = NETWORKS[network]
    adapter = {"kind": kind, "rank": 4, "alpha": None, "targets": targets, "dropout": 0.0}
    torch.manual_seed(0)
    return build_model(
        name,
        num_classes=3,
        pretrained=False,
        image_size=32,
        args=args,
        adapter={**adapter, **settings},
    )


def perturb_trainable(model: nn.Module) -> nn.Module:
    """Change all trainable parameters, as training would."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def compute_logits(model: nn.Module) -> Tensor:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        result: Tensor = model(images)
    return result


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.std() > 0.01, "the logits must not be constant"
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "network, kind",
    [
        *((network, "lora") for network in NETWORKS),
        ("vit", "dora"),
        *(
            pytest.param(name, "dora", marks=pytest.mark.faults)
            for name in NETWORKS
            if name != "vit"
        ),
    ],
)
def test_merged_unmerged_and_peft_models_give_the_same_logits(
    network: str, kind: str, tmp_path: Path
) -> None:
    built = build_with_adapter(network, kind)
    model = built.model
    base = timm.create_model(NETWORKS[network][0], num_classes=3, **built.model_args).eval()
    base.load_state_dict(base_state_dict(model, model.state_dict()))
    torch.testing.assert_close(compute_logits(model.eval()), compute_logits(base), rtol=0, atol=0)
    base_before = {key: value.clone() for key, value in base.state_dict().items()}
    expected = compute_logits(perturb_trainable(model))
    names = [f"c{number}" for number in range(3)]
    state = merge_adapter(model)
    save_model(
        tmp_path,
        built,
        state,
        class_names=names,
        preprocessing=built.preprocessing,
        temperature=1.0,
    )
    save_adapter(tmp_path / "adapter", model, base_model_name="owner/name", revision="abc")
    assert_close(compute_logits(model), expected)
    merged = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_close(compute_logits(merged), expected)
    from peft import PeftModel

    peft_model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    config = peft_model.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("owner/name", "abc")
    assert_close(compute_logits(peft_model), expected)
    peft_model.unload()
    changed = [key for key, value in base_before.items() if not torch.equal(state[key], value)]
    assert changed, "some weights must have changed"
    layers = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for key in changed:
        assert key.startswith(("head", "classifier")) or key.removesuffix(".weight") in layers


def test_trains_only_the_adapter_and_the_head() -> None:
    model = build_with_adapter("vit").model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"head.weight", "head.bias"} < trained
    assert len(trained) == 2 + 2 * 2 * 4, "A and B of qkv, proj, fc1, fc2 in two blocks"
    assert all("lora_" in name for name in trained - {"head.weight", "head.bias"})


def test_gradients_reach_the_adapter_with_gradient_checkpointing() -> None:
    for checkpointing in (False, True):
        model = perturb_trainable(build_with_adapter("vit").model).train()
        model.set_grad_checkpointing(checkpointing)  # type: ignore[operator]
        model(torch.ones(2, 3, 32, 32)).square().sum().backward()
        missing = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        assert not missing
        assert all(
            parameter.grad.any() for name, parameter in model.named_parameters() if "lora_B" in name
        )


def test_loads_base_weights_under_an_adapter() -> None:
    model, trained_model = build_with_adapter("vit").model, build_with_adapter("vit").model
    perturb_trainable(trained_model)
    state = {key: value + 1 for key, value in merge_adapter(copy.deepcopy(trained_model)).items()}
    load_base_state_dict(model, state)
    loaded = base_state_dict(model, model.state_dict())
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert not any(
        parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name
    )


def test_rejects_adapters_that_cannot_work() -> None:
    with refused("recipe.unknown_name", "'qvk'", "attn.qkv"):
        build_with_adapter("vit", targets=["qvk"])
    with refused("recipe.wrong_value", "model.adapter.rank", "33", "blocks.0.attn.qkv", "32"):
        build_with_adapter("vit", rank=33)
    with refused("recipe.unknown_name", "'attention'", "fc1"):
        build_with_adapter("convnext", targets=["attention"])
    with refused("recipe.unsupported", "grouped"):
        build_with_adapter("convnext", targets=["conv_dw"])
    # timm's BEiT and small EVA-02 read the qkv weights; standardized convolutions change them
    for name, args, targets in (
        ("beit_base_patch16_224", {**VIT}, ["qkv"]),
        ("eva02_small_patch14_224", {**VIT}, ["attention"]),
        ("test_nfnet", {}, ["all"]),
    ):
        adapter = {"kind": "lora", "rank": 2, "alpha": None, "targets": targets, "dropout": 0.0}
        with refused("recipe.unsupported", "model.adapter.targets"):
            build_model(
                name, num_classes=3, pretrained=False, image_size=32, args=args, adapter=adapter
            )


def test_skips_grouped_convolutions_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    build_with_adapter("convnext")
    assert "grouped or dilated convolutions get no adapter" in caplog.text

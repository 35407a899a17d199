"""Adapters: the logits of peft's own model, merged and not, and the layers that may have one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from refusals import refused
from torch import Tensor, nn

from finetune.models.adapter import load_plain, merge_adapter, plain_state, save_adapter
from finetune.models.build import build
from finetune.models.saved import Built, save_model

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
NETWORKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "vit": ("vit_tiny_patch16_224", VIT, ["attention", "mlp"]),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT, ["qkv"]),
    "convnext": ("test_convnext", {}, ["all"]),
    "eva": ("eva02_base_patch14_224", VIT, [r"[qkv]_proj", "mlp"]),
    "same-padding": ("tf_efficientnet_lite0", {}, [r"blocks\.0\..*", "conv_stem"]),
}


def built(network: str, kind: str = "lora", **settings: Any) -> Built:
    name, args, targets = NETWORKS[network]
    adapter = {"kind": kind, "rank": 4, "alpha": None, "targets": targets, "dropout": 0.0}
    torch.manual_seed(0)
    return build(
        name,
        num_classes=3,
        pretrained=False,
        image_size=32,
        args=args,
        adapter={**adapter, **settings},
    )


def moved(model: nn.Module) -> nn.Module:
    """The network after some training of what it trains."""
    draws = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draws)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        result: Tensor = model(images)
    return result


def close(one: Tensor, other: Tensor) -> None:
    assert one.std() > 0.01, "the logits tell something"
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("network", NETWORKS)
def test_merged_unmerged_and_pefts_own_give_the_same_logits(
    network: str, kind: str, tmp_path: Path
) -> None:
    made = built(network, kind)
    model = made.model
    base = timm.create_model(NETWORKS[network][0], num_classes=3, **made.model_args).eval()
    base.load_state_dict(plain_state(model, model.state_dict()))
    torch.testing.assert_close(logits(model.eval()), logits(base), rtol=0, atol=0)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    expected = logits(moved(model))
    names = [f"c{number}" for number in range(3)]
    state = merge_adapter(model)
    save_model(
        tmp_path, made, state, class_names=names, preprocessing=made.preprocessing, temperature=1.0
    )
    save_adapter(tmp_path / "adapter", model, base="owner/name")
    close(logits(model), expected)
    alone = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    close(logits(alone), expected)
    from peft import PeftModel

    of_peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert of_peft.peft_config["default"].base_model_name_or_path == "owner/name"
    close(logits(of_peft), expected)
    of_peft.unload()
    changed = [key for key, value in before.items() if not torch.equal(state[key], value)]
    assert changed, "the adapter and the head are all that was changed"
    layers = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for key in changed:
        assert key.startswith(("head", "classifier")) or key.removesuffix(".weight") in layers


def test_only_the_adapter_and_the_head_are_trained() -> None:
    model = built("vit").model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trained
    assert len(trained) == 2 + 2 * 2 * 4, "A and B of qkv, proj, fc1, fc2 in two blocks"
    assert all("lora_" in name for name in trained - {"head.weight", "head.bias"})


def test_gradients_reach_it_through_recomputed_blocks() -> None:
    for checkpointing in (False, True):
        model = moved(built("vit").model).train()
        model.set_grad_checkpointing(checkpointing)  # type: ignore[operator]
        model(torch.ones(2, 3, 32, 32)).square().sum().backward()
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing
        assert all(p.grad.any() for n, p in model.named_parameters() if "lora_B" in n)


def test_weights_by_their_plain_names_are_loaded_under_an_adapter() -> None:
    model, other = built("vit").model, built("vit").model
    moved(other)
    state = {key: value + 1 for key, value in merge_adapter(copy.deepcopy(other)).items()}
    load_plain(model, state)
    loaded = plain_state(model, model.state_dict())
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert not any(p.any() for name, p in model.named_parameters() if "lora_B" in name)


def test_an_adapter_that_could_not_work_is_refused() -> None:
    with refused("recipe.unknown_name", "'qvk'", "attn.qkv"):
        built("vit", targets=["qvk"])
    with refused("recipe.wrong_value", "model.adapter.rank", "33", "blocks.0.attn.qkv", "32"):
        built("vit", rank=33)
    with refused("recipe.unknown_name", "'attention'", "fc1"):
        built("convnext", targets=["attention"])
    with refused("recipe.unsupported", "grouped"):
        built("convnext", targets=["conv_dw"])
    # timm's BEiT and small EVA-02 read the weights of qkv, standardised convolutions change them
    for name, args, targets in (
        ("beit_base_patch16_224", {**VIT}, ["qkv"]),
        ("eva02_small_patch14_224", {**VIT}, ["attention"]),
        ("test_nfnet", {}, ["all"]),
    ):
        adapter = {"kind": "lora", "rank": 2, "alpha": None, "targets": targets, "dropout": 0.0}
        with refused("recipe.unsupported", "model.adapter.targets"):
            build(name, num_classes=3, pretrained=False, image_size=32, args=args, adapter=adapter)


def test_grouped_convolutions_are_left_out_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    built("convnext")
    assert "grouped or dilated convolutions stay without one" in caplog.text

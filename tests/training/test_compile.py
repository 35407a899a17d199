"""Kernel choices by device and dtype: fused attention, channels last, torch.compile."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from logs import logged, logging_nothing

from finetune.training.compile import (
    MIN_TRAINING_SECONDS,
    choose_kernels,
    missing_compile_dependency,
    should_compile,
    training_flops,
)

CPU = torch.device("cpu")


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3
    )
    return model.eval()


def fused_attention_flags(model: torch.nn.Module) -> list[bool]:
    return [module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")]


@pytest.mark.parametrize(
    "device, dtype, expected",
    [
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
    ],
)
def test_fused_attention_is_disabled_only_for_bf16_on_cpu(
    device: str, dtype: torch.dtype, expected: bool
) -> None:
    model = make_model()
    assert fused_attention_flags(model) == [True, True]
    choose_kernels(model, device=torch.device(device), dtype=dtype)
    assert fused_attention_flags(model) == [expected, expected]


@pytest.mark.parametrize(
    "name, on_cuda, on_cpu",
    [
        ("test_resnet", True, True),
        ("test_vit", False, False),
        ("vit_base_r50_s16_224", True, False),  # a CNN/ViT hybrid
        ("repvgg_a0", True, False),  # its stem has a strided 1x1 convolution
    ],
)
def test_convolutional_models_use_channels_last(name: str, on_cuda: bool, on_cpu: bool) -> None:
    hybrid_args = (
        {"embed_dim": 48, "depth": 1, "num_heads": 3} if name.startswith("vit_base") else {}
    )
    created = timm.create_model(name, **hybrid_args)
    for device, channels_last in (("cuda", on_cuda), ("cpu", on_cpu)):
        model = copy.deepcopy(created)
        choose_kernels(model, device=torch.device(device), dtype=torch.bfloat16)
        weights = [p for p in model.parameters() if p.ndim == 4 and min(p.shape[1:3]) > 1]
        assert weights
        layouts = {w.is_contiguous(memory_format=torch.channels_last) for w in weights}
        assert layouts == {channels_last}


def test_fused_and_plain_attention_agree() -> None:
    model, images = make_model().double(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        before = model(images)
        choose_kernels(model, device=CPU, dtype=torch.bfloat16)
        after = model(images)
    assert fused_attention_flags(model) == [False, False]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharded", [False, True])
def test_last_block_computes_only_the_class_token(sharded: bool) -> None:
    model = make_model()
    choose_kernels(model, device=CPU, dtype=torch.float32, sharded=sharded)
    tokens = model.forward_features(torch.zeros(1, 3, 32, 32))  # type: ignore[operator]
    assert tokens.shape[1] == (17 if sharded else 1)


def test_training_flops_are_three_forward_passes() -> None:
    layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 5, 7))
    assert training_flops(layer, (4, 5)) == 3 * 2 * 60 * 7


def decide(choice: bool | str, seconds: float, *, device: str = "cpu", **options: bool) -> bool:
    with logging_nothing():
        return should_compile(
            choice,
            device=torch.device(device),
            sharded=options.get("sharded", False),
            num_images=1000,
            count_flops=lambda: int(seconds * {"cpu": 3e11, "cuda": 3e14}[device] / 1000),
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_compiles_only_long_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.training.compile.missing_compile_dependency", lambda device: None)
    assert decide("auto", 1.01 * MIN_TRAINING_SECONDS[device], device=device)
    assert not decide("auto", 0.99 * MIN_TRAINING_SECONDS[device], device=device)
    assert not decide("auto", 2 * MIN_TRAINING_SECONDS[device], device=device, sharded=True)
    assert decide(True, 0, device=device)
    assert not decide(False, 2 * MIN_TRAINING_SECONDS[device], device=device)


def test_missing_compile_dependency_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = {"CC": False, "triton": False}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed[name] or None)
    monkeypatch.setattr("shutil.which", lambda name: (installed["CC"] and name == "clang") or None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    for name, fix in (
        ("triton", lambda: installed.update(triton=True)),
        ("C compiler", lambda: installed.update(CC=True)),
        ("Python.h", lambda: (tmp_path / "Python.h").write_text("")),
    ):
        missing = missing_compile_dependency(torch.device("cuda"))
        assert missing is not None
        assert name in missing
        fix()
    assert missing_compile_dependency(torch.device("cuda")) is None
    monkeypatch.setenv("CC", "/opt/cc")  # Triton would use it unchecked
    assert "/opt/cc" in str(missing_compile_dependency(torch.device("cuda")))


def test_warns_once_if_no_compiler_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    common: dict[str, Any] = {"device": CPU, "sharded": False, "num_images": 1}
    with logged() as messages:
        assert not should_compile("auto", count_flops=lambda: 10**15, **common)
        (message,) = messages
        assert "g++" in message
        assert not should_compile("auto", count_flops=lambda: 1, **common)
        assert len(messages) == 1

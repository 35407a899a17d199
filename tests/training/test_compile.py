"""Kernels follow from the recipe and the device: attention's, and whether a run is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from finetune.training.compile import (
    LONG_SECONDS,
    _missing_to_compile,
    choose_kernels,
    compiles,
    training_operations,
)

CPU = torch.device("cpu")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3
    )
    return made.eval()


def fused(model: torch.nn.Module) -> list[bool]:
    return [module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")]


@pytest.mark.parametrize(
    "device, dtype, kept",
    [
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
    ],
)
def test_plain_attention_on_a_cpu_in_bf16_alone(
    device: str, dtype: torch.dtype, kept: bool
) -> None:
    model = network()
    assert fused(model) == [True, True]
    choose_kernels(model, device=torch.device(device), dtype=dtype)
    assert fused(model) == [kept, kept]


@pytest.mark.parametrize(
    "name, device, last",
    [
        ("test_resnet", "cuda", True),
        ("test_resnet", "cpu", True),
        ("test_vit", "cuda", False),
        ("test_vit", "cpu", False),
        ("vit_base_r50_s16_224", "cuda", True),  # a hybrid
        ("vit_base_r50_s16_224", "cpu", False),
        ("repvgg_a0", "cuda", True),  # its stem convolves single pixels with a stride
        ("repvgg_a0", "cpu", False),
    ],
)
def test_networks_that_convolve_have_their_channels_last(
    name: str, device: str, last: bool
) -> None:
    hybrid = {"embed_dim": 48, "depth": 1, "num_heads": 3} if name.startswith("vit_base") else {}
    model = timm.create_model(name, **hybrid)
    choose_kernels(model, device=torch.device(device), dtype=torch.bfloat16)
    weights = [p for p in model.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert weights
    assert {w.is_contiguous(memory_format=torch.channels_last) for w in weights} == {last}


def test_both_attentions_give_the_same() -> None:
    model, images = network().double(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        before = model(images)
        choose_kernels(model, device=CPU, dtype=torch.bfloat16)
        after = model(images)
    assert fused(model) == [False, False]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharded", [False, True])
def test_no_more_is_computed_than_is_read(sharded: bool) -> None:
    model = network()
    choose_kernels(model, device=CPU, dtype=torch.float32, sharded=sharded)
    tokens = model.forward_features(torch.zeros(1, 3, 32, 32))  # type: ignore[operator]
    assert tokens.shape[1] == (17 if sharded else 1)


def test_operations_of_a_step() -> None:
    layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 5, 7))
    assert training_operations(layer, (4, 5)) == 3 * 2 * 60 * 7


def decided(choice: bool | str, seconds: float, *, device: str = "cpu", **given: bool) -> bool:
    return compiles(
        choice,
        device=torch.device(device),
        sharded=given.get("sharded", False),
        images=1000,
        operations=lambda: int(seconds * {"cpu": 3e11, "cuda": 3e14}[device] / 1000),
        notice=pytest.fail,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_long_runs_are_compiled(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.training.compile._missing_to_compile", lambda device: None)
    assert decided("auto", 1.01 * LONG_SECONDS[device], device=device)
    assert not decided("auto", 0.99 * LONG_SECONDS[device], device=device)
    assert not decided("auto", 2 * LONG_SECONDS[device], device=device, sharded=True)
    assert decided(True, 0, device=device)
    assert not decided(False, 2 * LONG_SECONDS[device], device=device)


def test_what_triton_needs_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = {"CC": False, "triton": False}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there[name] or None)
    monkeypatch.setattr("shutil.which", lambda name: (there["CC"] and name == "clang") or None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    for name, cure in (
        ("triton", lambda: there.update(triton=True)),
        ("C compiler", lambda: there.update(CC=True)),
        ("Python.h", lambda: (tmp_path / "Python.h").write_text("")),
    ):
        missing = _missing_to_compile(torch.device("cuda"))
        assert missing is not None
        assert name in missing
        cure()
    assert _missing_to_compile(torch.device("cuda")) is None
    monkeypatch.setenv("CC", "/opt/cc")  # it would be taken as it is
    assert "/opt/cc" in str(_missing_to_compile(torch.device("cuda")))


def test_without_a_compiler_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    told: list[str] = []
    common = {"device": CPU, "sharded": False, "images": 1, "notice": told.append}
    assert not compiles("auto", operations=lambda: 10**15, **common)
    assert len(told) == 1
    assert "g++" in told[0]
    assert not compiles("auto", operations=lambda: 1, **common)
    assert len(told) == 1

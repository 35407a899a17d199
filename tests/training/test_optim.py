"""Parameter groups, optimizers by name, and the learning rate schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from refusals import refused
from torch import nn

from finetune.training.lr_schedule import lr_at, set_lr
from finetune.training.optim import build_optimizer, param_groups


def make_vit(**kwargs: Any) -> nn.Module:
    sizes: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 3,
        "num_heads": 2,
    }
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**sizes, **kwargs})


def groups_by_name(model: nn.Module, groups: list[dict]) -> dict[str, dict]:
    names = {id(p): name for name, p in model.named_parameters()}
    by_name = {names[id(p)]: group for group in groups for p in group["params"]}
    assert len(by_name) == sum(len(group["params"]) for group in groups), "duplicate parameter"
    return by_name


# --- the learning rate ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_lr_matches_the_vit_jax_schedule(shared: Path, kind: str, warmup_steps: int) -> None:
    with np.load(shared / "oracles" / "oracle_vit.npz") as oracle:
        steps, expected = oracle["lr/steps"], oracle[f"lr/{kind}_wu{warmup_steps}"]
    assert len(steps) > 10
    assert len(np.unique(expected)) > 10
    actual = [
        lr_at(
            int(step),
            lr=0.03,
            schedule=kind,
            total_steps=1000,
            warmup_steps=warmup_steps,
            min_lr=1e-5 if kind == "linear" else 0.0,
        )
        for step in steps
    ]
    # the reference is float32: one rounding is about 1e-7 of the highest rate
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03 * 1e-7)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lr_at_schedule_boundaries(schedule: str) -> None:
    def at(step: int, *, warmup_steps: int = 4, steps: int = 12, warmup_lr: float = 0.1) -> float:
        return lr_at(
            step,
            lr=1.0,
            schedule=schedule,
            total_steps=steps,
            warmup_steps=warmup_steps,
            warmup_lr=warmup_lr,
            min_lr=0.25,
        )

    end = 1.0 if schedule == "constant" else 0.25
    assert at(0) == 0.1
    assert at(3) == pytest.approx(0.1 + 0.9 * 3 / 4, rel=1e-15)
    assert at(4) == 1.0  # the first step at the full rate
    assert at(12) == at(13) == at(10**9) == pytest.approx(end, rel=1e-15)
    if schedule != "constant":
        assert 0.25 < at(11) < at(10) < 1.0  # the last step is still above the final rate
    # no warmup: full rate from the first step, and warmup_lr is unused
    assert at(0, warmup_steps=0) == 1.0
    # all warmup: only the rise, then the final rate after the last step
    assert at(11, warmup_steps=12) == pytest.approx(0.1 + 0.9 * 11 / 12, rel=1e-15)
    assert at(12, warmup_steps=12) == end
    # a single step
    assert at(0, steps=1, warmup_steps=0) == 1.0
    assert at(0, steps=1, warmup_steps=1) == 0.1


def test_lr_halfway_and_at_the_last_step_matches_the_formula() -> None:
    def cosine(step: int) -> float:
        return lr_at(step, lr=2.0, schedule="cosine", total_steps=110, warmup_steps=10, min_lr=1.0)

    assert cosine(60) == pytest.approx(1.5, rel=1e-15)
    assert cosine(109) == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi * 0.99)), rel=1e-15)
    assert lr_at(60, lr=2.0, schedule="linear", total_steps=110, warmup_steps=10, min_lr=1.0) == 1.5


def test_step_schedule_counts_from_the_start() -> None:
    def at(step: int, warmup_steps: int = 0, min_lr: float = 0.0) -> float:
        return lr_at(
            step,
            lr=1.0,
            schedule="step",
            total_steps=100,
            warmup_steps=warmup_steps,
            min_lr=min_lr,
            step_every=10,
            step_factor=0.5,
        )

    assert [at(s) for s in (0, 9, 10, 19, 20, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.5**9]
    assert [at(s, warmup_steps=5) for s in (0, 4, 5, 9, 10)] == [0, 0.8, 1, 1, 0.5]
    assert at(99, min_lr=0.1) == 0.1


def test_wsd_is_constant_and_then_linear_in_the_last_steps() -> None:
    def at(step: int, steps: int = 110, warmup_steps: int = 10, decay_ratio: float = 0.2) -> float:
        return lr_at(
            step,
            lr=2.0,
            schedule="wsd",
            total_steps=steps,
            warmup_steps=warmup_steps,
            min_lr=1.0,
            decay_ratio=decay_ratio,
        )

    assert [at(step) for step in (5, 10, 87, 88)] == [1.0, 2.0, 2.0, 2.0]
    assert at(99) == 1.5
    assert at(109) == pytest.approx(1 + 1 / 22, rel=1e-15)
    assert at(110) == at(10**9) == 1.0
    # another length changes no step before the decay
    assert [at(step) for step in range(88)] == [at(step, steps=200) for step in range(88)]
    # the decay never starts in the warm-up, and a ratio of 1 is "linear"
    assert at(99, warmup_steps=100, decay_ratio=0.5) == 1.98
    assert [at(step, warmup_steps=100, decay_ratio=0.5) for step in (100, 105)] == [2.0, 1.5]
    assert at(60, decay_ratio=1.0) == 1.5
    # no decay: a share of the steps below a half
    assert [at(step, steps=2, warmup_steps=0) for step in range(2)] == [2.0, 2.0]


# --- groups -----------------------------------------------------------------------------------


def test_only_weight_matrices_get_weight_decay() -> None:
    model = make_vit(reg_tokens=2)
    groups = groups_by_name(model, param_groups(model, lr=0.1, weight_decay=0.05))
    assert set(groups) == {name for name, _ in model.named_parameters()}
    decayed = {name for name, group in groups.items() if group["weight_decay"] == 0.05}
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert decayed == linear | {"patch_embed.proj.weight"}
    assert {groups[name]["weight_decay"] for name in set(groups) - decayed} == {0.0}
    assert {"pos_embed", "cls_token", "reg_token"} <= set(groups) - decayed
    assert all(group["lr_scale"] == 1.0 and group["lr"] == 0.1 for group in groups.values())


def test_relative_position_bias_tables_get_no_weight_decay() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)
    )
    groups = groups_by_name(model, param_groups(model, lr=1.0, weight_decay=0.1))
    tables = [name for name in groups if name.endswith("relative_position_bias_table")]
    assert len(tables) == 4
    assert {groups[name]["weight_decay"] for name in tables} == {0.0}


@pytest.mark.parametrize(
    "name, args, table",
    [
        ("hiera_small_abswin_256", {"embed_dim": 8, "stages": (1, 1, 1, 1)}, "pos_embed_win"),
        ("vit_base_patch16_siglip_224", {}, "attn_pool.latent"),
        ("vit_small_patch16_rope_mixed_224", {}, "rope.freqs"),
    ],
)
def test_learned_position_tables_get_no_weight_decay(
    name: str, args: dict[str, Any], table: str
) -> None:
    model_args = args or {"embed_dim": 8, "depth": 1, "num_heads": 1}
    model = timm.create_model(name, **model_args)
    groups = groups_by_name(model, param_groups(model, lr=1.0, weight_decay=0.1))
    assert groups[table]["weight_decay"] == 0
    assert {name for name, group in groups.items() if group["weight_decay"]}


def test_no_weight_decay_names_and_embeddings_get_no_weight_decay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Embedding(4, 4)
            self.special = nn.Parameter(torch.zeros(2, 2))
            self.head = nn.Linear(4, 2)

        def no_weight_decay(self) -> set[str]:
            return {"special"}

    model = Net()
    groups = groups_by_name(model, param_groups(model, lr=1.0, weight_decay=0.1))
    assert {n for n, g in groups.items() if g["weight_decay"]} == {"head.weight"}


def test_decay_all_applies_to_all_parameters() -> None:
    model = make_vit()
    for layer_decay in (None, 0.5):
        groups = groups_by_name(
            model,
            param_groups(model, lr=1.0, weight_decay=0.1, decay="all", layer_decay=layer_decay),
        )
        not_decayed = {name for name, group in groups.items() if group["weight_decay"] != 0.1}
        # the model's no_weight_decay list is ignored, too
        assert not_decayed == set()
        assert len(groups) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused() -> None:
    model = make_vit()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for layer_decay in (None, 0.5):
        groups = groups_by_name(
            model, param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=layer_decay)
        )
        assert set(groups) == {"head.weight", "head.bias"}
        assert {group["lr_scale"] for group in groups.values()} == {1.0}
    model.requires_grad_(False)
    for layer_decay in (None, 0.5):
        with refused("recipe.conflict", "model.freeze"):
            param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=layer_decay)


def test_layer_decay_scales_each_vit_block() -> None:
    model = make_vit()
    groups = groups_by_name(model, param_groups(model, lr=0.2, weight_decay=0.1, layer_decay=0.5))
    assert set(groups) == {name for name, _ in model.named_parameters()}
    expected = {"head": 1.0, "norm": 0.5, "blocks.2": 0.5, "blocks.1": 0.25, "blocks.0": 0.125}
    expected |= {"patch_embed": 0.0625, "pos_embed": 0.0625, "cls_token": 0.0625}
    for name, group in groups.items():
        scale = next(v for prefix, v in expected.items() if name.startswith(prefix))
        assert group["lr_scale"] == scale, name
        assert group["lr"] == pytest.approx(0.2 * scale)
    assert groups["pos_embed"]["weight_decay"] == 0
    assert groups["blocks.1.mlp.fc1.weight"]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    "name,expected",
    [
        ("test_resnet", {"conv1.": 2**-5, "layer1.": 2**-4, "layer4.": 0.5, "fc.": 1.0}),
        ("test_efficientnet", {"conv_stem.": 2**-6, "blocks.4.": 0.5, "classifier.": 1.0}),
        ("test_convnext", {"stem.": 2**-10, "stages.3.blocks.0.": 0.25, "head.fc.": 1.0}),
    ],
)
def test_layer_decay_scales_convolutional_networks(name: str, expected: dict[str, float]) -> None:
    model = timm.create_model(name, num_classes=3)
    groups = groups_by_name(model, param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5))
    assert set(groups) == {name for name, _ in model.named_parameters()}
    for prefix, scale in expected.items():
        scales = {group["lr_scale"] for key, group in groups.items() if key.startswith(prefix)}
        assert scales == {scale}, prefix


# --- optimizers -------------------------------------------------------------------------------


def test_set_lr_keeps_lr_scales_and_tensor_lrs() -> None:
    optimizer = build_optimizer(make_vit(), name="adamw", lr=1.0, layer_decay=0.5)
    optimizer.param_groups[0]["lr"] = tensor = torch.tensor(1.0)
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    assert len(set(scales)) == 5
    set_lr(optimizer, 0.3)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
        [0.3 * scale for scale in scales]
    )
    assert optimizer.param_groups[0]["lr"] is tensor


def test_sgd_is_plain_momentum_and_nesterov_is_an_argument() -> None:
    plain = build_optimizer(make_vit(), name="sgd", lr=0.1, momentum=0.8)
    assert type(plain) is torch.optim.SGD
    assert {(g["nesterov"], g["momentum"]) for g in plain.param_groups} == {(False, 0.8)}
    nesterov = build_optimizer(make_vit(), name="sgd", lr=0.1, args={"nesterov": True})
    assert {g["nesterov"] for g in nesterov.param_groups} == {True}
    assert {g["momentum"] for g in nesterov.param_groups} == {0.9}


def test_adamw_accepts_betas_and_extra_args() -> None:
    optimizer = build_optimizer(
        make_vit(), name="adamw", lr=0.1, betas=[0.8, 0.95], weight_decay=0.2, args={"eps": 1e-6}
    )
    assert type(optimizer) is torch.optim.AdamW
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.8, 0.95), 1e-6)}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.2}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lion"])
def test_optimizers_by_name_reduce_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = torch.randn(16, 4)
    optimizer = build_optimizer(model, name=name, lr=0.01, weight_decay=0.01)
    losses = []
    for _ in range(5):
        loss = (model(inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["muon", "nadamuon"])
def test_muon_equals_timm_with_its_fallback_list(name: str) -> None:
    """AdamW for head, patch kernel and embeddings; orthogonalized updates for hidden layers."""
    torch.manual_seed(0)
    ours, reference = make_vit(), make_vit()
    reference.load_state_dict(ours.state_dict())
    settings = {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.95}
    optimizers = (
        build_optimizer(ours, name=name, **settings),
        timm.optim.create_optimizer_v2(
            reference,
            opt=name,
            fallback_list=["head.*", "patch_embed.*"],
            fallback_no_weight_decay=True,
            **settings,
        ),
    )
    for _ in range(2):
        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for (key, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), key


@pytest.mark.parametrize(
    "cause, changes, named",
    [
        ("unknown_name", {"name": "adamww"}, ["optim.name", "'adamww'", "'adamw'"]),
        ("wrong_value", {"name": "adahessian"}, ["optim.name", "'adahessian'"]),
        ("wrong_value", {"name": "kronw"}, ["optim.name", "'kronw'"]),
        ("unknown_key", {"args": {"nestrov": True}}, ["optim.args.nestrov", "'sgd'", "'nesterov'"]),
        (
            "unknown_key",
            {"args": {"foo": 1, "lr": 3}},
            ["optim.args.foo", "optim.args.lr", "optim.lr"],
        ),
        ("conflict", {"betas": (0.9, 0.99)}, ["optim.betas", "'sgd'"]),
        ("wrong_value", {"momentum": -1.0}, ["optim", "'sgd'", "momentum"]),
        ("wrong_value", {"momentum": 0.0, "args": {"nesterov": True}}, ["'sgd'", "Nesterov"]),
        ("wrong_value", {"name": "adamw", "betas": (0.9, 2.0)}, ["'adamw'", "beta"]),
        ("wrong_value", {"name": "adamw", "args": {"eps": "small"}}, ["'adamw'"]),
    ],
)
def test_invalid_optimizer_arguments_name_the_key(
    cause: str, changes: dict, named: list[str]
) -> None:
    with refused(f"recipe.{cause}", *named):
        build_optimizer(make_vit(), **{"name": "sgd", "lr": 0.1, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="apex may be installed on a GPU machine")
def test_optimizer_that_needs_a_missing_package_is_refused() -> None:
    with refused("setup.missing_package", "optim.name", "fusedadam"):
        build_optimizer(make_vit(), name="fusedadam", lr=0.1)


def test_sgd_with_clipping_matches_optax(shared: Path) -> None:
    """Eight steps of clip_by_global_norm(1) and momentum 0.9 under a schedule with warmup."""
    with np.load(shared / "oracles" / "oracle_vit.npz") as oracle:
        assert "sgd/grads" in oracle
        start, grads = oracle["sgd/w0"], oracle["sgd/grads"]
        expected_w, expected_b = oracle["sgd/float32/w"], oracle["sgd/float32/b"]
    model = nn.Linear(6, 4)
    model.weight = nn.Parameter(torch.from_numpy(start))  # (4, 6)
    model.bias = nn.Parameter(torch.zeros(6))
    optimizer = build_optimizer(model, name="sgd", lr=0.03)
    norms = []
    for step, flat_grads in enumerate(grads):  # (30,): the 24 of the matrix, then the bias
        model.weight.grad = torch.from_numpy(flat_grads[:24].reshape(4, 6).copy())
        model.bias.grad = torch.from_numpy(flat_grads[24:].copy())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        set_lr(optimizer, lr_at(step, lr=0.03, schedule="cosine", total_steps=10, warmup_steps=2))
        optimizer.step()
        # a few float32 roundings of values near 1; torch divides by norm + 1e-6, optax by norm
        np.testing.assert_allclose(model.weight.detach(), expected_w[step], rtol=0, atol=5e-7)
        np.testing.assert_allclose(model.bias.detach(), expected_b[step], rtol=0, atol=5e-7)
    assert len(norms) == 8
    assert min(norms) < 1 < max(norms), "some gradients must be clipped, and some not"

"""Device memory: automatic micro-batch size, memory estimate, and out-of-memory messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import (
    NANO_RECIPE,
    TINY_224_RECIPE,
    describe_result,
    disable_tf32,
    max_relative_difference,
    needs_gpu,
    run_child,
    train_here,
)

pytestmark = needs_gpu

GIB = 2**30

# One image has 16,385 tokens: a few GiB of activations, and 24 MB of weights.
HUGE_RECIPE = """
model:
  name: vit_tiny_patch16_224
  args: {patch_size: 8}
  pretrained: false
  head_init: default
  image_size: 1024
  compile: false
data: {source: embedded:digits, val_fraction: 0, train: resize, eval: resize, batch_size: 4}
optim: {name: adamw, lr: 1e-4, steps: 2}
run: {precision: fp32, threads: 1, log_every: 1, test: false}
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_micro_batch_under_a_memory_limit(precision: str, tmp_path: Path, figure: Any) -> None:
    from forked_runs import read_train_losses

    disable_tf32()
    precision_override, limit, out = f"run.precision={precision}", 2 * GIB, tmp_path / "auto"
    settings = {
        "recipe": TINY_224_RECIPE,
        "overrides": [precision_override, "data.micro_batch=auto", "data.batch_size=256"],
        "out": str(out),
        "limit_bytes": limit,
        "strict": True,
        "memory_path": str(tmp_path / "memory.json"),
    }
    question = "`data.micro_batch: auto` where the whole batch of 256 does not fit into 2 GiB"
    bound = 1e-4 if precision == "fp32" else 3e-2
    promise = (
        "a smaller micro-batch; losses within 1e-4 of the whole batch in float32, 3e-2 in bf16"
    )
    result = run_child(settings)
    if result.exit_code:
        figure(question, promise, f"{precision}: {describe_result(result)}")
    assert result.exit_code == 0, result.err[-3000:]
    micro_batch_size = json.loads((out / "run.json").read_text())["micro_batch"]["images"]
    reserved = json.loads((tmp_path / "memory.json").read_text())["reserved"]
    whole_batch_losses = train_here(
        tmp_path / "whole", precision_override, "data.batch_size=256", text=TINY_224_RECIPE
    )["losses"]
    fixed_losses = train_here(
        tmp_path / "fixed",
        precision_override,
        "data.batch_size=256",
        f"data.micro_batch={micro_batch_size}",
        text=TINY_224_RECIPE,
    )["losses"]
    differences = {
        "whole": max_relative_difference(read_train_losses(out), whole_batch_losses),
        "fixed": max_relative_difference(read_train_losses(out), fixed_losses),
    }
    figure(
        question,
        promise,
        f"{precision}: micro-batch {micro_batch_size}, {reserved / GIB:.2f} GiB reserved; losses "
        f"{differences['whole']:.1e} from the whole batch's, {differences['fixed']:.1e} from those "
        f"of micro_batch={micro_batch_size}",
    )
    assert 1 < micro_batch_size < 256
    assert reserved <= limit
    assert reserved > 0.3 * limit, "the micro-batch is much smaller than what fits"
    assert differences["whole"] < bound
    assert differences["fixed"] < bound


@pytest.mark.parametrize("auto", [True, False])
def test_out_of_memory_gives_one_message(auto: bool, tmp_path: Path, figure: Any) -> None:
    recipe = tmp_path / "huge.yaml"
    recipe.write_text(HUGE_RECIPE, encoding="utf-8")
    override = "data.micro_batch=auto" if auto else "data.micro_batch=null"
    argv = ["train", str(recipe), override, "--out", str(tmp_path / "run")]
    result = run_child({"argv": argv, "limit_bytes": GIB // 2})
    lines = [line for line in result.err.splitlines() if line.strip()]
    figure(
        "memory of the device runs out: "
        + ("not even one image fits, micro_batch=auto" if auto else "a batch that does not fit"),
        "exit code 5 and one message with a fix",
        describe_result(result),
    )
    assert result.exit_code == 5, result.err[-3000:]
    assert not result.has_traceback
    assert "model.grad_checkpointing=true" in lines[-1]
    assert len(lines[-1]) < 400
    assert not any("step-" in str(path) for path in (tmp_path / "run").rglob("*"))


def test_out_of_memory_in_evaluation(tmp_path: Path, figure: Any) -> None:
    """Training fits; an evaluation batch of 1,000 images does not."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_224_RECIPE, encoding="utf-8")
    overrides = ["data.batch_size=4", "data.val_fraction=0.6", "data.eval_batch_size=1000"]
    argv = ["train", str(recipe), *overrides, "--out", str(tmp_path / "run")]
    result = run_child({"argv": argv, "limit_bytes": GIB // 2})
    figure(
        "memory of the device runs out: in evaluation",
        "exit code 5 and one message that names data.eval_batch_size",
        describe_result(result),
    )
    assert result.exit_code == 5, result.err[-3000:]
    assert not result.has_traceback
    assert "data.eval_batch_size" in result.last_message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", ["", "model.grad_checkpointing=true", "data.micro_batch=32"])
def test_the_measured_memory_matches_a_run(
    precision: str, change: str, tmp_path: Path, figure: Any
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_224_RECIPE, encoding="utf-8")
    overrides = [f"run.precision={precision}", *filter(None, [change])]
    question = "`info --plan`: measured peak of device memory against torch's own"
    promise = "between 0.8 and 1.25 of the memory that the run allocated"
    case = f"{precision}{', ' if change else ''}{change}"
    plan = run_child({"argv": ["info", str(recipe), *overrides, "--plan", "--json"]})
    if plan.exit_code:
        figure(question, promise, f"{case}: {describe_result(plan)}")
    assert plan.exit_code == 0, plan.err[-3000:]
    memory = json.loads(plan.out)["memory"]
    memory_path = tmp_path / "memory.json"
    run = {"recipe": TINY_224_RECIPE, "overrides": overrides, "out": str(tmp_path / "run")}
    result = run_child({**run, "memory_path": str(memory_path)})
    assert result.exit_code == 0, result.err[-3000:]
    used = json.loads(memory_path.read_text())
    ratio = memory["peak"] / used["peak"]
    figure(
        question,
        promise,
        f"{case}: {ratio:.2f} ({memory['peak'] / GIB:.2f} GiB measured, {used['peak'] / GIB:.2f} "
        f"allocated, {used['reserved'] / GIB:.2f} reserved)",
    )
    assert memory["where"] == "device"
    assert 0.8 < ratio < 1.25


def test_several_runs_in_a_process_free_their_memory(tmp_path: Path, figure: Any) -> None:
    import gc

    import torch

    allocated = []
    for number in range(3):
        train_here(
            tmp_path / str(number), "optim.steps=2", "optim.warmup_steps=0", text=NANO_RECIPE
        )
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    figure(
        "memory that runs of one process leave allocated",
        "at most 1 MiB more after the third than after the first",
        ", ".join(f"{number / 2**20:.1f} MiB" for number in allocated),
    )
    assert allocated[2] <= allocated[0] + 2**20

"""The device's memory: a micro-batch that is found, a forecast that holds, an end in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import NANO, TINY_224, apart, child, described, needs_gpu, strict_float32, trained

pytestmark = needs_gpu

GIB = 2**30

# One image has 16,385 tokens: a few GiB of activations, and 24 MB of weights.
HUGE = """
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
def test_auto_at_the_edge_of_memory(precision: str, tmp_path: Path, figure: Any) -> None:
    from forked_runs import read_train_losses

    strict_float32()
    wish, limit, out = f"run.precision={precision}", 2 * GIB, tmp_path / "auto"
    settings = {
        "recipe": TINY_224,
        "overrides": [wish, "data.micro_batch=auto", "data.batch_size=256"],
        "out": str(out),
        "limit_bytes": limit,
        "strict": True,
        "facts": str(tmp_path / "facts.json"),
    }
    question = "`data.micro_batch: auto` where the whole batch of 256 does not fit into 2 GiB"
    bound = 1e-4 if precision == "fp32" else 3e-2
    promise = "fewer at once; losses of the whole batch within 1e-4 in float32, 3e-2 in bf16"
    done = child(settings)
    if done.code:
        figure(question, promise, f"{precision}: {described(done)}")
    assert done.code == 0, done.err[-3000:]
    found = json.loads((out / "run.json").read_text())["micro_batch"]["images"]
    peak = json.loads((tmp_path / "facts.json").read_text())["reserved"]
    whole = trained(tmp_path / "whole", wish, "data.batch_size=256", text=TINY_224)["losses"]
    fixed = trained(
        tmp_path / "fixed", wish, "data.batch_size=256", f"data.micro_batch={found}", text=TINY_224
    )["losses"]
    against = {
        "whole": apart(read_train_losses(out), whole),
        "fixed": apart(read_train_losses(out), fixed),
    }
    figure(
        question,
        promise,
        f"{precision}: {found} at once, {peak / GIB:.2f} GiB reserved; losses "
        f"{against['whole']:.1e} from the whole batch's, {against['fixed']:.1e} from those of "
        f"micro_batch={found}",
    )
    assert 1 < found < 256
    assert peak <= limit
    assert peak > 0.4 * limit, "a quarter of what fits would be no answer"
    assert against["whole"] < bound
    assert against["fixed"] < bound


@pytest.mark.parametrize("auto", [True, False])
def test_out_of_memory_is_one_message(auto: bool, tmp_path: Path, figure: Any) -> None:
    recipe = tmp_path / "huge.yaml"
    recipe.write_text(HUGE, encoding="utf-8")
    wish = "data.micro_batch=auto" if auto else "data.micro_batch=null"
    argv = ["train", str(recipe), wish, "--out", str(tmp_path / "run")]
    done = child({"argv": argv, "limit_bytes": GIB // 2})
    lines = [line for line in done.err.splitlines() if line.strip()]
    figure(
        "memory of the device runs out: "
        + ("not even one image fits, micro_batch=auto" if auto else "a batch that does not fit"),
        "exit code 5 and one message that says what to do",
        described(done),
    )
    assert done.code == 5, done.err[-3000:]
    assert not done.has_traceback
    assert "model.grad_checkpointing=true" in lines[-1]
    assert len(lines[-1]) < 400
    assert not any("step-" in str(path) for path in (tmp_path / "run").rglob("*"))


def test_out_of_memory_in_evaluation(tmp_path: Path, figure: Any) -> None:
    """The training fits, the evaluation of 1,000 images at once does not."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_224, encoding="utf-8")
    overrides = ["data.batch_size=4", "data.val_fraction=0.6", "data.eval_batch_size=1000"]
    argv = ["train", str(recipe), *overrides, "--out", str(tmp_path / "run")]
    done = child({"argv": argv, "limit_bytes": GIB // 2})
    figure(
        "memory of the device runs out: in evaluation",
        "exit code 5 and one message that names data.eval_batch_size",
        described(done),
    )
    assert done.code == 5, done.err[-3000:]
    assert not done.has_traceback
    assert "data.eval_batch_size" in done.last_words


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", ["", "model.grad_checkpointing=true", "data.micro_batch=32"])
def test_the_forecast_of_memory(precision: str, change: str, tmp_path: Path, figure: Any) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_224, encoding="utf-8")
    overrides = [f"run.precision={precision}", *filter(None, [change])]
    question = "`info --plan`: its peak of the device's memory against torch's own"
    promise = "between 0.8 and 1.25 of what the run had allocated"
    kind = f"{precision}{', ' if change else ''}{change}"
    plan = child({"argv": ["info", str(recipe), *overrides, "--plan", "--json"]})
    if plan.code:
        figure(question, promise, f"{kind}: {described(plan)}")
    assert plan.code == 0, plan.err[-3000:]
    memory = json.loads(plan.out)["memory"]
    facts = tmp_path / "facts.json"
    run = {"recipe": TINY_224, "overrides": overrides, "out": str(tmp_path / "run")}
    done = child({**run, "facts": str(facts)})
    assert done.code == 0, done.err[-3000:]
    used = json.loads(facts.read_text())
    ratio = memory["peak"] / used["peak"]
    figure(
        question,
        promise,
        f"{kind}: {ratio:.2f} ({memory['peak'] / GIB:.2f} GiB forecast, {used['peak'] / GIB:.2f} "
        f"allocated, {used['reserved'] / GIB:.2f} reserved; its own steps "
        f"{(memory['measured'] or 0) / GIB:.2f})",
    )
    assert memory["where"] == "device"
    assert 0.8 < ratio < 1.25


def test_several_runs_in_a_process_give_their_memory_back(tmp_path: Path, figure: Any) -> None:
    import gc

    import torch

    left = []
    for number in range(3):
        trained(tmp_path / str(number), "optim.steps=2", "optim.warmup_steps=0", text=NANO)
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    figure(
        "memory that runs of one process leave allocated",
        "no more after the third than after the first, but 1 MiB",
        ", ".join(f"{number / 2**20:.1f} MiB" for number in left),
    )
    assert left[2] <= left[0] + 2**20

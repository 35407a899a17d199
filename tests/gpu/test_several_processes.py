"""Several processes and one GPU: DDP and FSDP through their launchers, and what a user is told."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_runs import (
    CHILD,
    NANO,
    ON_GPU,
    REPOSITORY,
    apart,
    described,
    needs_gpu,
    recipe_of,
    started,
    strict_float32,
    trained,
)

STEPS = ("optim.steps=8", "optim.warmup_steps=2", "run.timeout_seconds=60")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launched(
    config: dict[str, Any], tmp_path: Path, arguments: list[str], **environment: str
) -> Any:
    """Run Accelerate's launcher as a user does, with a configuration file."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**config, "main_process_port": free_port()}), encoding="utf-8")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    return started([*launcher, *arguments], **environment)


def ddp(processes: int) -> dict[str, Any]:
    known = yaml.safe_load((REPOSITORY / "recipes/accelerate/gpu_8.yaml").read_text())
    return {**known, "num_processes": processes, "use_cpu": not ON_GPU}


def fsdp(processes: int) -> dict[str, Any]:
    known = yaml.safe_load((REPOSITORY / "recipes/accelerate/fsdp.yaml").read_text())
    return {**known, "num_processes": processes}


def alone(tmp_path: Path, *overrides: str) -> list[float]:
    """The losses of one process, without a launcher."""
    strict_float32()
    losses: list[float] = trained(tmp_path / "alone", *STEPS, *overrides)["losses"]
    return losses


def as_child(tmp_path: Path, *overrides: str, **more: Any) -> list[str]:
    settings = {
        "recipe": NANO,
        "overrides": [*STEPS, *overrides],
        "out": str(tmp_path / "run"),
        "strict": True,
        **more,
    }
    return [str(CHILD), json.dumps(settings)]


# Statistics of the 64 images of both processes, where each has 32.
SYNCHRONISED = (
    *("model.name=test_efficientnet", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "model.sync_bn=true", "data.train=resize"),
)


@pytest.mark.parametrize("more", [(), SYNCHRONISED], ids=["plain", "sync_bn"])
def test_two_processes_on_one_gpu_over_gloo(
    more: tuple[str, ...], tmp_path: Path, figure: Any
) -> None:
    """NCCL refuses two ranks of one GPU; gloo carries its tensors."""
    from forked_runs import read_train_losses

    kind, bound = ("sync_bn", 1e-3) if more else ("DDP", 1e-4)
    question = f"{kind}, two processes on one GPU (gloo), against one process"
    promise = f"the same losses within {bound:g}"
    environment = {} if ON_GPU else {"ACCELERATE_USE_CPU": "true"}
    done = launched(ddp(2), tmp_path, as_child(tmp_path, *more, backend="gloo"), **environment)
    if done.code:
        figure(question, promise, described(done))
    assert done.code == 0, done.err[-3000:]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    difference = apart(read_train_losses(tmp_path / "run"), alone(tmp_path, *more))
    figure(
        question,
        promise,
        f"{difference:.1e}, {record['num_processes']} processes, {done.seconds:.0f} s",
    )
    assert record["num_processes"] == 2
    assert difference < bound


@needs_gpu
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_more_processes_than_gpus(kind: str, tmp_path: Path, figure: Any) -> None:
    """What the user of one GPU is told who asks for two."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(NANO, encoding="utf-8")
    config = ddp(2) if kind == "DDP" else fsdp(2)
    command = ["-m", "finetune", "train", str(recipe), *STEPS, "--out", str(tmp_path / "run")]
    done = launched(config, tmp_path, command)
    ours = [
        line
        for line in done.err.splitlines()
        if "GPU" in line and "NCCL WARN" not in line and not line.startswith((" ", "W", "E", "["))
    ]
    figure(
        f"{kind}, two processes on one GPU (NCCL), as a user starts it",
        "ends with one message that names the GPUs, exit code 5 of the ranks, no traceback of "
        "ours, no hang",
        f"launcher's exit code {done.code} after {done.seconds:.0f} s; said: "
        f"{' / '.join(ours)[:400] or done.last_words[:300]}",
    )
    assert done.code not in (0, -9), "it hung, or trained on a GPU twice"
    assert done.seconds < 60
    assert "finetune/" not in "".join(
        line for line in done.err.splitlines() if line.strip().startswith("File ")
    )
    assert "exitcode  : 5" in done.err or "exit code 5" in done.err.lower() or done.code == 5
    assert ours


@needs_gpu
def test_ddp_of_one_process(tmp_path: Path, figure: Any) -> None:
    """NCCL with a single rank, through torchrun."""
    from forked_runs import read_train_losses

    question = "DDP, one process of torchrun (NCCL), against no launcher"
    promise = "the same losses within 1e-4"
    command = ["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}"]
    done = started([*command, *as_child(tmp_path)])
    if done.code:
        figure(question, promise, described(done))
    assert done.code == 0, done.err[-3000:]
    difference = apart(read_train_losses(tmp_path / "run"), alone(tmp_path))
    figure(question, promise, f"{difference:.1e}")
    assert difference < 1e-4


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_of_one_process(precision: str, tmp_path: Path, figure: Any) -> None:
    """recipes/accelerate/fsdp.yaml on one GPU: sharding, saving and publishing as on eight."""
    from forked_runs import read_train_losses

    question = "FSDP, one process (recipes/accelerate/fsdp.yaml, NCCL), against no launcher"
    promise = "the same losses within 1e-4 in float32, 3e-2 in bf16; model/ is published"
    wish = f"run.precision={precision}"
    done = launched(fsdp(1), tmp_path, as_child(tmp_path, wish, "run.save_every=4"))
    if done.code:
        figure(question, promise, f"{precision}: {described(done)}")
    assert done.code == 0, done.err[-3000:]
    difference = apart(read_train_losses(tmp_path / "run"), alone(tmp_path, wish))
    steps = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    figure(question, promise, f"{precision}: {difference:.1e}; {', '.join(steps)}")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert difference < (1e-4 if precision == "fp32" else 3e-2)


@needs_gpu
def test_fsdp_is_resumed_without_it(tmp_path: Path, figure: Any) -> None:
    """A checkpoint of a sharded network goes on in one process without sharding."""
    from forked_runs import read_train_losses

    from finetune.training.train import train

    question = "FSDP's checkpoint of step 4, resumed without FSDP, against no launcher"
    promise = "the same losses within 1e-4"
    more = ("run.save_every=4", "run.keep_checkpoints=5")
    done = launched(fsdp(1), tmp_path, as_child(tmp_path, *more, kill_before=6))
    steps = tmp_path / "run" / "checkpoints"
    saved = sorted(folder.name for folder in steps.iterdir()) if steps.is_dir() else []
    if not saved:
        figure(question, promise, described(done))
    assert saved, done.err[-3000:]
    strict_float32()
    train(recipe_of(NANO, *STEPS, *more), tmp_path / "run", resume=True)
    difference = apart(read_train_losses(tmp_path / "run"), alone(tmp_path))
    figure(question, promise, f"{difference:.1e} ({', '.join(saved)})")
    assert difference < 1e-4


@needs_gpu
def test_two_processes_of_fsdp_over_gloo(tmp_path: Path, figure: Any) -> None:
    from forked_runs import read_train_losses

    question = "FSDP, two processes on one GPU (gloo), against one process"
    promise = "the same losses within 1e-4"
    done = launched(fsdp(2), tmp_path, as_child(tmp_path, backend="gloo"))
    if done.code and ("gloo" in done.err.lower() and "support" in done.err.lower()):
        figure(question, promise, f"gloo cannot: {done.last_words[:240]}")
        pytest.skip(f"gloo cannot carry FSDP on a GPU: {done.last_words[:200]}")
    if done.code:
        figure(question, promise, described(done))
    assert done.code == 0, done.err[-3000:]
    difference = apart(read_train_losses(tmp_path / "run"), alone(tmp_path))
    figure(question, promise, f"{difference:.1e}, {done.seconds:.0f} s")
    assert difference < 1e-4

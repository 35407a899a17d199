"""Several processes on one GPU: DDP and FSDP through their launchers, and error messages."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_runs import (
    CHILD_PROGRAM,
    NANO_RECIPE,
    ON_GPU,
    REPOSITORY,
    describe_result,
    disable_tf32,
    make_recipe,
    max_relative_difference,
    needs_gpu,
    run_python,
    train_here,
)

STEP_OVERRIDES = ("optim.steps=8", "optim.warmup_steps=2", "run.timeout_seconds=60")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def launch_with_accelerate(
    config: dict[str, Any], tmp_path: Path, arguments: list[str], **environment: str
) -> Any:
    """Run `accelerate launch` as a user does, with a configuration file."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**config, "main_process_port": free_port()}), encoding="utf-8")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    return run_python([*launcher, *arguments], **environment)


def ddp_config(num_processes: int) -> dict[str, Any]:
    config = yaml.safe_load((REPOSITORY / "recipes/accelerate/gpu_8.yaml").read_text())
    return {**config, "num_processes": num_processes, "use_cpu": not ON_GPU}


def fsdp_config(num_processes: int) -> dict[str, Any]:
    config = yaml.safe_load((REPOSITORY / "recipes/accelerate/fsdp.yaml").read_text())
    return {**config, "num_processes": num_processes}


def single_process_losses(tmp_path: Path, *overrides: str) -> list[float]:
    """Train in one process without a launcher. Returns: the losses."""
    disable_tf32()
    losses: list[float] = train_here(tmp_path / "alone", *STEP_OVERRIDES, *overrides)["losses"]
    return losses


def child_arguments(tmp_path: Path, *overrides: str, **options: Any) -> list[str]:
    settings = {
        "recipe": NANO_RECIPE,
        "overrides": [*STEP_OVERRIDES, *overrides],
        "out": str(tmp_path / "run"),
        "strict": True,
        **options,
    }
    return [str(CHILD_PROGRAM), json.dumps(settings)]


# Batch norm statistics over the 64 images of both processes; each has 32.
SYNC_BN_OVERRIDES = (
    *("model.name=test_efficientnet", "model.pretrained=false", "model.head_init=default"),
    *("model.image_size=64", "model.sync_bn=true", "data.train=resize"),
)


@pytest.mark.parametrize("overrides", [(), SYNC_BN_OVERRIDES], ids=["plain", "sync_bn"])
def test_ddp_with_two_processes_on_one_gpu(
    overrides: tuple[str, ...], tmp_path: Path, figure: Any
) -> None:
    """NCCL refuses two ranks on one GPU; gloo accepts them."""
    from forked_runs import read_train_losses

    kind, bound = ("sync_bn", 1e-3) if overrides else ("DDP", 1e-4)
    question = f"{kind}, two processes on one GPU (gloo), against one process"
    promise = f"the same losses within {bound:g}"
    environment = {} if ON_GPU else {"ACCELERATE_USE_CPU": "true"}
    result = launch_with_accelerate(
        ddp_config(2),
        tmp_path,
        child_arguments(tmp_path, *overrides, backend="gloo"),
        **environment,
    )
    if result.exit_code:
        figure(question, promise, describe_result(result))
    assert result.exit_code == 0, result.err[-3000:]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    difference = max_relative_difference(
        read_train_losses(tmp_path / "run"), single_process_losses(tmp_path, *overrides)
    )
    figure(
        question,
        promise,
        f"{difference:.1e}, {record['num_processes']} processes, {result.seconds:.0f} s",
    )
    assert record["num_processes"] == 2
    assert difference < bound


@needs_gpu
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_more_processes_than_gpus(kind: str, tmp_path: Path, figure: Any) -> None:
    """Two processes on one GPU with NCCL give one error message."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(NANO_RECIPE, encoding="utf-8")
    config = ddp_config(2) if kind == "DDP" else fsdp_config(2)
    command = [
        "-m",
        "finetune",
        "train",
        str(recipe),
        *STEP_OVERRIDES,
        "--out",
        str(tmp_path / "run"),
    ]
    result = launch_with_accelerate(config, tmp_path, command)
    messages = [
        line
        for line in result.err.splitlines()
        if "GPU" in line and "NCCL WARN" not in line and not line.startswith((" ", "W", "E", "["))
    ]
    figure(
        f"{kind}, two processes on one GPU (NCCL), as a user starts it",
        "ends with one message that names the GPUs, exit code 5 of the ranks, no traceback of "
        "finetune, no hang",
        f"launcher's exit code {result.exit_code} after {result.seconds:.0f} s; message: "
        f"{' / '.join(messages)[:400] or result.last_message[:300]}",
    )
    assert result.exit_code not in (0, -9), "it hung, or trained on a GPU twice"
    assert result.seconds < 60
    assert "finetune/" not in "".join(
        line for line in result.err.splitlines() if line.strip().startswith("File ")
    )
    assert (
        "exitcode  : 5" in result.err
        or "exit code 5" in result.err.lower()
        or result.exit_code == 5
    )
    assert messages


@needs_gpu
def test_ddp_with_one_process(tmp_path: Path, figure: Any) -> None:
    """NCCL with a single rank, through torchrun."""
    from forked_runs import read_train_losses

    question = "DDP, one process of torchrun (NCCL), against no launcher"
    promise = "the same losses within 1e-4"
    command = ["-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={free_port()}"]
    result = run_python([*command, *child_arguments(tmp_path)])
    if result.exit_code:
        figure(question, promise, describe_result(result))
    assert result.exit_code == 0, result.err[-3000:]
    difference = max_relative_difference(
        read_train_losses(tmp_path / "run"), single_process_losses(tmp_path)
    )
    figure(question, promise, f"{difference:.1e}")
    assert difference < 1e-4


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_with_one_process(precision: str, tmp_path: Path, figure: Any) -> None:
    """recipes/accelerate/fsdp.yaml on one GPU: shards, saves and publishes as on eight."""
    from forked_runs import read_train_losses

    question = "FSDP, one process (recipes/accelerate/fsdp.yaml, NCCL), against no launcher"
    promise = "the same losses within 1e-4 in float32, 3e-2 in bf16; model/ is published"
    precision_override = f"run.precision={precision}"
    result = launch_with_accelerate(
        fsdp_config(1), tmp_path, child_arguments(tmp_path, precision_override, "run.save_every=4")
    )
    if result.exit_code:
        figure(question, promise, f"{precision}: {describe_result(result)}")
    assert result.exit_code == 0, result.err[-3000:]
    difference = max_relative_difference(
        read_train_losses(tmp_path / "run"), single_process_losses(tmp_path, precision_override)
    )
    steps = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    figure(question, promise, f"{precision}: {difference:.1e}; {', '.join(steps)}")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert difference < (1e-4 if precision == "fp32" else 3e-2)


@needs_gpu
def test_an_fsdp_checkpoint_resumes_without_fsdp(tmp_path: Path, figure: Any) -> None:
    """A checkpoint of a sharded network continues in one process without sharding."""
    from forked_runs import read_train_losses

    from finetune.training.train import train

    question = "FSDP checkpoint of step 4, resumed without FSDP, against no launcher"
    promise = "the same losses within 1e-4"
    overrides = ("run.save_every=4", "run.keep_checkpoints=5")
    result = launch_with_accelerate(
        fsdp_config(1), tmp_path, child_arguments(tmp_path, *overrides, kill_before=6)
    )
    checkpoints_folder = tmp_path / "run" / "checkpoints"
    saved = (
        sorted(folder.name for folder in checkpoints_folder.iterdir())
        if checkpoints_folder.is_dir()
        else []
    )
    if not saved:
        figure(question, promise, describe_result(result))
    assert saved, result.err[-3000:]
    disable_tf32()
    train(make_recipe(NANO_RECIPE, *STEP_OVERRIDES, *overrides), tmp_path / "run", resume=True)
    difference = max_relative_difference(
        read_train_losses(tmp_path / "run"), single_process_losses(tmp_path)
    )
    figure(question, promise, f"{difference:.1e} ({', '.join(saved)})")
    assert difference < 1e-4


@needs_gpu
def test_fsdp_with_two_processes_on_one_gpu(tmp_path: Path, figure: Any) -> None:
    from forked_runs import read_train_losses

    question = "FSDP, two processes on one GPU (gloo), against one process"
    promise = "the same losses within 1e-4"
    result = launch_with_accelerate(
        fsdp_config(2), tmp_path, child_arguments(tmp_path, backend="gloo")
    )
    if result.exit_code and ("gloo" in result.err.lower() and "support" in result.err.lower()):
        figure(question, promise, f"gloo cannot: {result.last_message[:240]}")
        pytest.skip(f"gloo cannot carry FSDP on a GPU: {result.last_message[:200]}")
    if result.exit_code:
        figure(question, promise, describe_result(result))
    crash = result.err.find("Fatal Python error")  # of the fault handler
    assert result.exit_code == 0, result.err[crash : crash + 3000] if crash >= 0 else result.err
    difference = max_relative_difference(
        read_train_losses(tmp_path / "run"), single_process_losses(tmp_path)
    )
    figure(question, promise, f"{difference:.1e}, {result.seconds:.0f} s")
    assert difference < 1e-4

"""Time whole training commands, from the start of the process to a saved model.

    python benchmarks/whole_job.py recipes/bench/vit_ti_224.yaml data.source=folder:PHOTOS \\
        data.train='random_resized_crop | flip' --timm-train PATH/train.py --trainer

All commands read the same image folder and the same initial model. Each run has its own process,
output folder and empty caches. These keys of the recipe are translated for the other programs:
model.name, model.compile, data.*, and in optim, for AdamW only: lr, betas, weight_decay, schedule
(constant or cosine), epochs, clip_norm and label_smoothing. All other keys must have their default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from throughput import training_arguments

from finetune.host_resources import num_cores
from finetune.models.save import save_model
from finetune.precision import resolve_precision
from finetune.recipe.load import load_recipe
from finetune.training.setup import TrainingSetup, build_setup
from finetune.transforms.spec_parser import parse_transform_spec

# JPEG and PNG, which all commands read
SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png"}
POLL_SECONDS = 0.05


def main() -> None:
    """Run all commands in alternating order, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--timm-train", metavar="PATH", help="train.py of timm's repository")
    parser.add_argument("--trainer", action="store_true", help="transformers' Trainer")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    precision = resolve_precision(recipe.run.precision, device)
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, f"run.precision={precision}"])
    setup = build_setup(recipe, device=device, show_progress=False)
    with TemporaryDirectory(prefix="whole-job-") as temporary:
        folder = Path(temporary)
        write_images(setup, folder)
        write_model_and_recipe(setup, folder)
        commands = {
            "finetune": [sys.executable, "-m", "finetune", "train", f"{folder}/recipe.yaml"]
        }
        if arguments.timm_train:
            script = str(Path(arguments.timm_train).absolute())
            commands["timm"] = [sys.executable, script, *timm_options(setup, folder)]
        if arguments.trainer:
            script = str(Path(__file__).with_name("trainer_job.py"))
            commands["trainer"] = [sys.executable, script]
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for number in range(arguments.repeats):
            for name in [*commands] if number % 2 == 0 else [*reversed(commands)]:
                print(f"turn {number + 1}: {name}", file=sys.stderr)
                with TemporaryDirectory(dir=folder, prefix=f"{name}-") as out:
                    turns[name].append(run(name, commands[name], setup, folder, Path(out)))
    print("| command | seconds | min–max | finetune takes | CPU seconds | first step | host |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, results in turns.items():
        seconds = [result["seconds"] for result in results]
        pairs = zip(turns["finetune"], results, strict=True)
        share = statistics.median(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
        cpu, first = (
            statistics.median(result[key] for result in results)
            for key in ("cpu_seconds", "first_step")
        )
        host = max(result["host_bytes"] for result in results) / 2**20
        print(
            f"| {name} | {statistics.median(seconds):.1f} | {min(seconds):.1f}–{max(seconds):.1f} "
            f"| {share:.2f} × | {cpu:.1f} | {first:.1f} s | {host:,.0f} MiB |"
        )


def class_folders(setup: TrainingSetup) -> list[str]:
    """Return class folder names: zero-padded numbers, which all commands sort the same way."""
    return [f"{label:06d}" for label in range(setup.num_classes)]


def write_images(setup: TrainingSetup, folder: Path) -> None:
    """Write images/train/CLASS/ and images/val/CLASS/: JPEG and PNG unchanged, others as PNG."""
    (folder / "classes.txt").write_text("\n".join(class_folders(setup)))
    for name in ("train", "val"):
        split = setup.source.splits[name]
        folders = [folder / "images" / name / each for each in class_folders(setup)]
        for each in folders:
            each.mkdir(parents=True)
        rows = zip(split.image_rows.tolist(), split.labels.tolist(), strict=True)
        for index, (row, label) in enumerate(rows):
            path, body = folders[label] / f"{index:08d}", split.images.read_bytes(row)
            suffix = next((SUFFIXES[start] for start in SUFFIXES if body.startswith(start)), None)
            if suffix is not None:
                path.with_suffix(suffix).write_bytes(body)
            else:
                Image.fromarray(split.decode(index)).save(path.with_suffix(".png"))


def write_model_and_recipe(setup: TrainingSetup, folder: Path) -> None:
    """Write the initial network as a model folder, and a recipe that fine-tunes it."""
    model, recipe = folder / "model", setup.recipe
    model.mkdir()
    state = setup.built.model.state_dict()
    names = class_folders(setup)
    save_model(model, setup.built, state, class_names=names, preprocessing=setup.preprocessing)
    changes: dict[str, dict[str, Any]] = {
        "model": {
            **{"name": str(model), "args": {}, "rename": {}, "pretrained": True},
            **{"image_size": None, "head_init": "keep"},
        },
        "data": {
            **{"source": f"folder:{folder / 'images'}", "merge_val": False},
            **dict.fromkeys(("num_train", "num_val", "num_test", "classes", "long_tail")),
            **dict.fromkeys(("image_column", "label_column")),
        },
        "run": {"log_every": 1},  # the first log line marks the first step
    }
    sections = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()
    }
    text = recipe.model_copy(update={**sections, "claims": ()}).to_yaml()
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


def timm_options(setup: TrainingSetup, folder: Path) -> list[str]:
    """Return the arguments of timm's train.py."""
    recipe, optim, precision = setup.recipe, setup.recipe.optim, setup.recipe.run.precision
    values: dict[str, Any] = {
        "data-dir": folder / "images",
        "val-split": "val",
        "class-map": folder / "classes.txt",
        "model": f"local-dir:{folder / 'model'}",
        "num-classes": setup.num_classes,
        "train-interpolation": setup.preprocessing.interpolation,
        "batch-size": recipe.data.batch_size,
        "validation-batch-size": recipe.data.eval_batch_size,
        "epochs": round(optim.epochs or 0),
        "opt": optim.name,
        "lr": optim.lr,
        "opt-betas": optim.betas,
        "weight-decay": optim.weight_decay,
        "sched": optim.schedule,
        "warmup-epochs": 0,
        "clip-grad": optim.clip_norm,
        "smoothing": optim.label_smoothing,
        "amp-dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(precision),
        "seed": recipe.run.seed,
        "workers": setup.num_workers,
        "device": setup.device.type,
        # train.py always crops; unless the recipe crops, the crop is the whole image: a resize
        **{"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "color-jitter": 0},
    }
    for call in parse_transform_spec(setup.train_pipeline.transform_spec):
        if call.name == "random_resized_crop":
            values |= {name: tuple(call.arguments[name]) for name in ("scale", "ratio")}
        elif call.name == "flip":
            values["hflip"] = call.arguments["p"]
        elif call.name not in ("resize", "center_crop", "normalise"):
            raise SystemExit(f"data.train: timm's train.py has no equivalent of {call.name}")
    flags = {
        "pretrained": True,
        "amp": precision != "fp32",
        "torchcompile": recipe.model.compile is True,
        "pin-mem": setup.device.type == "cuda",
    }
    words = [f"--{name}" for name, is_set in flags.items() if is_set]
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def trainer_job(setup: TrainingSetup, folder: Path, out: Path) -> dict[str, Any]:
    """Return the content of JOB.json for `trainer_job.py`."""
    recipe = setup.recipe
    return {
        "model": str(folder / "model"),
        "data": str(folder / "images"),
        "transforms": setup.train_pipeline.transform_spec,
        "interpolation": setup.preprocessing.interpolation,
        "arguments": {
            **training_arguments(recipe, setup.device, setup.num_workers),
            "output_dir": str(out / "run"),
            "num_train_epochs": round(recipe.optim.epochs or 0),
            "per_device_train_batch_size": recipe.data.batch_size,
            "per_device_eval_batch_size": recipe.data.eval_batch_size,
            "lr_scheduler_type": recipe.optim.schedule,
            "label_smoothing_factor": recipe.optim.label_smoothing,
            "seed": recipe.run.seed,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_total_limit": recipe.run.keep_checkpoints,
        },
    }


def run(
    name: str, command: list[str], setup: TrainingSetup, folder: Path, out: Path
) -> dict[str, Any]:
    """Run a command in its own folder. Returns: its times and the memory of its largest process."""
    log = out / "log"
    marked, mark = log, b"Train: 0 ["  # timm's first log line of training
    if name == "finetune":
        command = [*command, "--out", str(out / "run")]
        marked, mark = out / "run" / "metrics.jsonl", b'"step"'
    elif name == "trainer":
        mark = b"first step done"
        (out / "job.json").write_text(json.dumps(trainer_job(setup, folder, out)))
        command = [*command, str(out / "job.json")]
    else:
        command = [*command, "--output", str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(setup.recipe.run.threads or num_cores()),
        "HF_HUB_OFFLINE": "1",
        "FINETUNE_CACHE": str(out / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "compiled"),
        # hide other GPUs: a command that finds several would use all of them
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }
    first_step, ended = float("nan"), 0
    with log.open("wb") as file:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=out, env=environment
        )
        while not ended:
            time.sleep(POLL_SECONDS)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            seconds = time.perf_counter() - start
            if first_step != first_step and marked.exists() and mark in marked.read_bytes():
                first_step = seconds
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{log.read_text('utf-8', 'replace')[-3000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "first_step": first_step,
        "host_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


if __name__ == "__main__":
    main()

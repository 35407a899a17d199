"""A whole small training as a command, by us and by others, in turn: from images to a saved model.

All commands read the same folder of images and the same model folder, and each one has a process,
an output folder and caches of its own. What the others are not told is as they have it by default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from finetune.bench.markdown import check_page, write_section
from finetune.bench.peers import trainer_arguments
from finetune.bench.run import OWN, check_package, command_of
from finetune.bench.timer import spread
from finetune.bench.torchvision_transforms import translate
from finetune.bench.trainer_job import FIRST_STEP
from finetune.console import bar, say_nothing
from finetune.data.decode_all import readable
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import RecipeError, SetupError, masked, nearest
from finetune.models.saved import save_model
from finetune.processes import end_with_parent, num_cores
from finetune.recipe.identity import learned
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.environment import describe_machine, pick_precision
from finetune.training.setup import TrainingSetup, open_setup
from finetune.transforms.grammar import parse

__all__ = ["JOBS", "bench_jobs"]

JOBS = ("timm-train", "transformers-trainer")
# What the commands are told, or find in the folders; any other key has to be as it is by default.
_TOLD = {
    "model": "name args rename pretrained image_size posemb head_init compile",
    "data": "source val_fraction merge_val split_seed num_train num_val num_test classes long_tail "
    "image_column label_column train eval batch_size mean std interpolation crop_pct",
    "optim": "lr betas weight_decay schedule epochs clip_norm label_smoothing",
    "run": "seed precision test best max_skipped note",
}
_SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png"}  # that all read
_POLL_SECONDS = 0.05
_HELP_SECONDS = 120


@dataclass(frozen=True)
class _Job:
    """A training that is prepared.

    Attributes:
        setup: the recipe's own.
        folder: has the images, the model, and the files of each command.
        precision: fp32, bf16 or fp16.
        script: timm's train.py.
    """

    setup: TrainingSetup
    folder: Path
    precision: str
    script: Path | None

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def threads(self) -> int:
        return self.recipe.run.threads or num_cores()

    def command(self, name: str, out: Path) -> list[str]:
        """The words that do the job into the folder `out`."""
        if name == OWN:
            recipe = str(self.folder / "recipe.yaml")
            return [sys.executable, "-m", "finetune", "train", recipe, "--out", str(out / "run")]
        if name == "timm-train":
            return [sys.executable, str(self.script), *_timm_options(self), "--output", str(out)]
        (out / "job.json").write_text(json.dumps(_trainer_job(self, out / "run")))
        return [sys.executable, "-m", "finetune.bench.trainer_job", str(out / "job.json")]


def bench_jobs(
    path: str,
    overrides: Sequence[str] = (),
    *,
    against: Sequence[str] = (),
    repeats: int = 3,
    out: str | None = None,
) -> dict[str, Any]:
    """Time a recipe's whole training as a command, and the same job by commands of others.

    Args:
        path, overrides, out: as for `bench`.
        against: "timm-train:PATH" with the path of timm's train.py, "transformers-trainer".
        repeats: how often each command has its turn; every second round is in reverse order.
    Returns: "jobs", each {"name", "precision", "seconds", "cpu_seconds", "first_step", "share",
        "host_bytes"}: `spread`s of wall-clock and of processor time, of the time up to the first
        step, and of our wall-clock over this command's in the same round; "host_bytes" is the peak
        of the largest process. And what was done, on which machine.
    Raises: FinetuneError of the kind that DESIGN's exit codes list; SetupError for a command that
        fails.
    """
    recipe = load_recipe(path, overrides)
    script = _check(recipe, against)
    names = [OWN, *dict.fromkeys(wish.partition(":")[0] for wish in against)]
    load = os.getloadavg()[0]
    if out is not None:
        check_page(Path(out))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    setup = _readable(open_setup(recipe, device=device, notice=say_nothing, progress=False))
    precision = pick_precision(recipe.run.precision, device)
    with TemporaryDirectory(prefix="finetune-bench-") as temporary:
        job = _Job(setup, Path(temporary), precision, script)
        _write_model(job)
        _write_images(job)
        if script is not None:
            _check_timm(job, script)
        if "transformers-trainer" in names:  # refuses what torchvision has not
            translate(setup.train_pipeline.sentence, image_size=(1, 1), interpolation="bicubic")
        found = _rounds(job, names, repeats)
    machine = describe_machine(device, 1)
    machine["device"]["threads"] = job.threads
    if "transformers-trainer" in names:
        machine["versions"]["transformers"] = version("transformers")
    shown = ["timm-train:train.py" if name == "timm-train" else name for name in names[1:]]
    result = {
        "recipe": path,
        "overrides": [masked(word) for word in overrides],
        "command": command_of(path, overrides, shown, "--end-to-end", repeats=repeats),
        "repeats": repeats,
        "load": round(load, 2),
        **_facts(setup),
        "jobs": [_row(name, precision, found) for name in names],
        "machine": machine,
        "profile": None,
    }
    if out is not None:
        write_section(Path(out), result)
    return result


def _facts(setup: TrainingSetup) -> dict[str, Any]:
    return {
        "architecture": setup.built.architecture,
        "image_size": list(setup.preprocessing.image_size),
        "batch_size": setup.recipe.data.batch_size,
        "optimizer": setup.recipe.optim.name,
        "augmentation": setup.train_pipeline.sentence,
        "epochs": round(setup.recipe.optim.epochs or 0),
        "images": {name: len(setup.source.splits[name]) for name in ("train", "val")},
        "workers": setup.workers,
    }


def _row(name: str, precision: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    turns = found[name]
    firsts = [turn["first_step"] for turn in turns if turn["first_step"] is not None]
    pairs = zip(found[OWN], turns, strict=True)
    return {
        "name": name,
        "precision": precision,
        "seconds": spread([turn["seconds"] for turn in turns]),
        "cpu_seconds": spread([turn["cpu_seconds"] for turn in turns]),
        "first_step": spread(firsts) if firsts else None,
        "share": spread([ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]),
        "host_bytes": max(turn["host_bytes"] for turn in turns),
    }


def _check(recipe: Recipe, against: Sequence[str]) -> Path | None:
    """Refuse at once what could only fail later. Returns: timm's train.py, if it is named."""
    script = None
    for wish in against:
        name, _, path = wish.partition(":")
        if name not in JOBS or bool(path) != (name == "timm-train"):
            raise RecipeError(
                f"--against: unknown '{wish}'{nearest(name, JOBS)}; with --end-to-end choose from "
                "timm-train:PATH, the train.py of timm's repository, and transformers-trainer",
                code="recipe.unknown_name",
            )
        check_package(name)
        if path:
            script = Path(path).expanduser().absolute()
            if not script.is_file():
                raise RecipeError(f"--against {wish}: no such file", code="recipe.not_found")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SetupError(
            "bench --end-to-end: starts its own processes; run it without accelerate launch",
            code="setup.one_process",
        )
    if wrong := _not_told(recipe):
        raise RecipeError(
            f"{', '.join(sorted(wrong))}: the other commands of --end-to-end cannot be told this; "
            "leave it out: they know adamw, whole epochs, and the schedules cosine and constant",
            code="recipe.unsupported",
        )
    return script


def _not_told(recipe: Recipe) -> set[str]:
    """The keys that change what is learned and have no counterpart in the other commands."""
    wrong, optim = set(), recipe.optim
    for name, keys in learned(recipe).items():
        if name not in _TOLD:
            wrong |= {name} if getattr(recipe, name) else set()
            continue
        section = getattr(recipe, name)
        default = type(section).model_fields
        others = keys.keys() - {*_TOLD[name].split()}
        wrong |= {f"{name}.{k}" for k in others if getattr(section, k) != default[k].default}
    if optim.epochs is None or optim.epochs % 1:
        wrong.add("optim.epochs")
    return wrong if optim.schedule in ("constant", "cosine") else {*wrong, "optim.schedule"}


def _write_model(job: _Job) -> None:
    """Write the network as training begins with it, and the recipe that reads it.

    Raises: RecipeError for a network that timm does not have.
    """
    setup, recipe, built = job.setup, job.recipe, job.setup.built
    if type(built.model).__module__.partition(".")[0] != "timm":
        raise RecipeError(
            f"model.name: timm and transformers cannot load '{built.architecture}'; name one of "
            "timm's networks, for --end-to-end",
            code="recipe.unsupported",
        )
    folder = job.folder / "model"
    folder.mkdir()
    state, names = built.model.state_dict(), _class_folders(setup)
    save_model(folder, built, state, class_names=names, preprocessing=setup.preprocessing)
    chosen = ("num_train", "num_val", "num_test", "classes", "long_tail")
    columns = ("image_column", "label_column")
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(folder), "args": {}, "rename": {}, "pretrained": True}
        | {"image_size": None, "head_init": "keep"},
        "data": {"source": f"folder:{job.folder / 'images'}", "merge_val": False}
        | dict.fromkeys((*chosen, *columns)),
        # the first step is seen when its line is written
        "run": {"log_every": 1, "num_processes": None, "trackers": (), "push_to": None},
    }
    changed = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()
    }
    text = recipe.model_copy(update={**changed, "claims": ()}).to_yaml()
    (job.folder / "recipe.yaml").write_text(text, encoding="utf-8")


def _class_folders(setup: TrainingSetup) -> list[str]:
    """Names of the classes' folders: numbers, which every reader sorts alike."""
    return [f"{label:06d}" for label in range(setup.num_classes)]


def _readable(setup: TrainingSetup) -> TrainingSetup:
    """The setup with the images of train and val that can be read.

    Raises: RecipeError for streamed images, or without validation images; DataError for images that
        cannot be read, if data.unreadable is stop.
    """
    splits, data = setup.source.splits, setup.recipe.data
    if not len(splits.get("val", ())) or isinstance(splits["train"].items, ShardItems):
        raise RecipeError(
            "data.source: --end-to-end writes images of training and of validation into a folder, "
            f"and {data.source} has no validation split or is streamed; set data.val_fraction, or "
            "name a source on this machine",
            code="recipe.unsupported",
        )
    kept = {}
    for name in ("train", "val"):
        rows = readable(splits[name], workers=setup.workers, unreadable=data.unreadable)
        kept[name] = splits[name].subset(rows)
    source = dataclasses.replace(setup.source, splits=kept)
    setup = dataclasses.replace(setup, source=source)
    return setup.with_num_samples(len(kept["train"]), kept["train"].labels)


def _write_images(job: _Job) -> None:
    """Write the images into train/CLASS/ and val/CLASS/: their own bytes, or else as PNG."""
    splits, classes = job.setup.source.splits, _class_folders(job.setup)
    (job.folder / "classes.txt").write_text("\n".join(classes))
    for name in ("train", "val"):
        split, folders = splits[name], [job.folder / "images" / name / each for each in classes]
        for folder in folders:
            folder.mkdir(parents=True)
        pairs = zip(split.item_rows.tolist(), split.labels.tolist(), strict=True)
        for index, (row, label) in enumerate(pairs):
            place = folders[label] / f"{index:08d}"
            body = split.items.content(row)
            suffix = next((_SUFFIXES[start] for start in _SUFFIXES if body.startswith(start)), "")
            if suffix:
                place.with_suffix(suffix).write_bytes(body)
            else:
                Image.fromarray(split.read(index)).save(place.with_suffix(".png"))


def _timm_options(job: _Job) -> list[str]:
    """The arguments of timm's train.py. Raises: RecipeError for images that it cannot make."""
    recipe, optim, setup = job.recipe, job.recipe.optim, job.setup
    yes, no = (), None
    values: dict[str, Any] = {
        "data-dir": job.folder / "images",
        "val-split": "val",
        "class-map": job.folder / "classes.txt",
        "model": f"local-dir:{job.folder / 'model'}",
        "pretrained": yes,
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
        "amp": no if job.precision == "fp32" else yes,
        "amp-dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(job.precision),
        "torchcompile": yes if recipe.model.compile is True else no,
        "pin-mem": yes if setup.device.type == "cuda" else no,
        "seed": recipe.run.seed,
        "workers": setup.workers,
        "device": setup.device.type,
        **_timm_images(setup.train_pipeline.sentence),
    }
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def _timm_images(sentence: str) -> dict[str, Any]:
    """The options by which timm's train.py makes the images of a training sentence."""
    # by default an image is cut as large as it can be: a resize to a square
    options: dict[str, Any] = {"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "color-jitter": 0}
    for call in parse(sentence):
        if call.name == "random_resized_crop":
            options |= {name: tuple(call.arguments[name]) for name in ("scale", "ratio")}
        elif call.name == "flip":
            options["hflip"] = call.arguments["p"]
        elif call.name not in ("resize", "center_crop", "normalise"):
            raise RecipeError(
                f"data.train: timm's train.py has no {call.name} like ours; for --against "
                "timm-train write random_resized_crop, or resize, and flip",
                code="recipe.unsupported",
            )
    return options


def _trainer_job(job: _Job, out: Path) -> dict[str, Any]:
    """The argument of `trainer_job.train`."""
    recipe, setup = job.recipe, job.setup
    return {
        "model": str(job.folder / "model"),
        "data": str(job.folder / "images"),
        "sentence": setup.train_pipeline.sentence,
        "interpolation": setup.preprocessing.interpolation,
        "arguments": {
            **trainer_arguments(recipe, job.precision, setup.device, setup.workers),
            "output_dir": str(out),
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


def _check_timm(job: _Job, script: Path) -> None:
    """Ask the file for its help.

    Raises: RecipeError if it is not timm's train.py, or that of another version.
    """
    options = [word for word in _timm_options(job) if word.startswith("--")]
    known = ""
    with contextlib.suppress(subprocess.SubprocessError):
        words = [sys.executable, str(script), "--help"]
        known = subprocess.run(
            words, capture_output=True, text=True, timeout=_HELP_SECONDS, cwd=job.folder, check=True
        ).stdout
    missing = [word for word in options if not re.search(rf"{word}\b", known)]
    if missing:
        raise RecipeError(
            f"--against timm-train: {script} is not the train.py of timm {version('timm')}: its "
            f"--help does not name {', '.join(missing[:3])}; take the file of that version's tag",
            code="recipe.wrong_value",
        )


def _rounds(job: _Job, names: Sequence[str], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Let the commands take their turns. Returns: what each turn took, by command."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with bar(total=repeats * len(names), start=0, shown=True) as shown:
        for number in range(repeats):
            for name in names if number % 2 == 0 else [*reversed(names)]:
                shown.set_description(name)
                with TemporaryDirectory(dir=job.folder, prefix=f"{name}-") as folder:
                    found[name].append(_timed(job, name, Path(folder)))
                shown.update()
    return found


def _timed(job: _Job, name: str, folder: Path) -> dict[str, Any]:
    """Run a command in its folder. Raises: SetupError with its last words if it fails."""
    log = folder / "log"
    marked, mark = {
        OWN: (folder / "run" / "metrics.jsonl", b'"step"'),
        "timm-train": (log, b"Train: 0 ["),
    }.get(name, (log, FIRST_STEP.encode()))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "FINETUNE_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        # a command that finds several GPUs would spread over them
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }
    first, ended = None, 0
    with log.open("wb") as file:
        start = time.perf_counter()
        process = subprocess.Popen(
            job.command(name, folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            preexec_fn=end_with_parent,
        )
        while not ended:
            time.sleep(_POLL_SECONDS)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            seconds = time.perf_counter() - start
            if first is None and marked.exists() and mark in marked.read_bytes():
                first = seconds
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        words = " | ".join(log.read_text("utf-8", "replace").strip().splitlines()[-3:])
        raise SetupError(
            f"{name}: its command ended with code {process.returncode}: {masked(words)[-500:]}",
            code="setup.worker_ended",
        )
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "first_step": first,
        "host_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }

"""Time whole training commands, ours and other libraries', from images to a saved model.

All commands read the same image folder and the same model folder. Each command has its own process,
output folder and caches. Settings that we do not translate have the other command's defaults.
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
from finetune.bench.peers import training_arguments
from finetune.bench.run import OWN_LOOP, bench_command, check_package_installed
from finetune.bench.timer import value_range
from finetune.bench.torchvision_transforms import to_torchvision
from finetune.bench.trainer_job import FIRST_STEP
from finetune.data.decode_split import readable_indices
from finetune.errors import RecipeError, SetupError, did_you_mean, redact_secrets
from finetune.host_resources import num_cores
from finetune.log import quiet
from finetune.models.save import save_model
from finetune.precision import resolve_precision
from finetune.process_lifecycle import die_with_parent
from finetune.progress import step_bar
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys
from finetune.run.environment import collect_environment
from finetune.training.setup import TrainingSetup, build_setup
from finetune.transforms.spec_parser import parse_transform_spec

__all__ = ["END_TO_END_PEERS", "bench_end_to_end"]

END_TO_END_PEERS = ("timm-train", "transformers-trainer")
# Recipe keys that are translated to options of the other commands or baked into the image and model
# folders; all other keys must have their default values.
_SUPPORTED_KEYS = {
    "model": "name args rename pretrained image_size posemb head_init compile",
    "data": "source val_fraction merge_val split_seed num_train num_val num_test classes long_tail "
    "image_column label_column train eval batch_size mean std interpolation crop_pct",
    "optim": "lr betas weight_decay schedule epochs clip_norm label_smoothing",
    "run": "seed precision test best max_skipped note",
}
_SUFFIXES = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
}  # formats that all commands read
_POLL_SECONDS = 0.05
_HELP_SECONDS = 120


@dataclass(frozen=True)
class _TrainingJob:
    """A training to run with each command.

    Attributes:
        setup: the training setup of the recipe.
        folder: a folder for the images, the model and the files of each command.
        precision: fp32, bf16 or fp16.
        script: path of timm's train.py, if used.
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
        """Return the command line that trains into the folder `out`."""
        if name == OWN_LOOP:
            recipe = str(self.folder / "recipe.yaml")
            return [sys.executable, "-m", "finetune", "train", recipe, "--out", str(out / "run")]
        if name == "timm-train":
            return [sys.executable, str(self.script), *_timm_options(self), "--output", str(out)]
        (out / "job.json").write_text(json.dumps(_trainer_job_spec(self, out / "run")))
        return [sys.executable, "-m", "finetune.bench.trainer_job", str(out / "job.json")]


def bench_end_to_end(
    path: str,
    overrides: Sequence[str] = (),
    *,
    against: Sequence[str] = (),
    repeats: int = 3,
    out: str | None = None,
) -> dict[str, Any]:
    """Time a recipe's whole training command, and the same training by other commands.

    Args:
        path, overrides, out: see `bench`.
        against: "timm-train:PATH" with the path of timm's train.py, or "transformers-trainer".
        repeats: number of rounds; each runs every command once, in alternating order.
    Returns: a dict with key "jobs", each {"name", "precision", "seconds", "cpu_seconds",
        "first_step", "share", "host_bytes"}, and with the settings and the machine. "seconds"
        (wall-clock time), "cpu_seconds", "first_step" (time to the first step) and "share" (our
        wall-clock time divided by this command's in the same round) are `value_range`s;
        "host_bytes" is the peak memory of the largest process.
    Raises: FinetuneError, whose class sets the exit code; SetupError if a command fails.
    """
    recipe = load_recipe(path, overrides)
    script = _check_arguments(recipe, against)
    names = [OWN_LOOP, *dict.fromkeys(wish.partition(":")[0] for wish in against)]
    load = os.getloadavg()[0]
    if out is not None:
        check_page(Path(out))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with quiet():
        setup = _drop_unreadable(build_setup(recipe, device=device, show_progress=False))
    precision = resolve_precision(recipe.run.precision, device)
    with TemporaryDirectory(prefix="finetune-bench-") as temporary:
        job = _TrainingJob(setup, Path(temporary), precision, script)
        _write_model(job)
        _write_images(job)
        if script is not None:
            _check_timm_script(job, script)
        if "transformers-trainer" in names:  # raises for transforms that torchvision lacks
            to_torchvision(
                setup.train_pipeline.transform_spec, image_size=(1, 1), interpolation="bicubic"
            )
        found = _run_rounds(job, names, repeats)
    machine = collect_environment(device, 1)
    machine["device"]["threads"] = job.threads
    if "transformers-trainer" in names:
        machine["versions"]["transformers"] = version("transformers")
    shown = ["timm-train:train.py" if name == "timm-train" else name for name in names[1:]]
    result = {
        "recipe": path,
        "overrides": [redact_secrets(word) for word in overrides],
        "command": bench_command(path, overrides, shown, "--end-to-end", repeats=repeats),
        "repeats": repeats,
        "load": round(load, 2),
        **_describe_setup(setup),
        "jobs": [_result_row(name, precision, found) for name in names],
        "machine": machine,
        "profile": None,
    }
    if out is not None:
        write_section(Path(out), result)
    return result


def _describe_setup(setup: TrainingSetup) -> dict[str, Any]:
    return {
        "architecture": setup.built.architecture,
        "image_size": list(setup.preprocessing.image_size),
        "batch_size": setup.recipe.data.batch_size,
        "optimizer": setup.recipe.optim.name,
        "augmentation": setup.train_pipeline.transform_spec,
        "epochs": round(setup.recipe.optim.epochs or 0),
        "images": {name: len(setup.source.splits[name]) for name in ("train", "val")},
        "workers": setup.num_workers,
    }


def _result_row(
    name: str, precision: str, found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    turns = found[name]
    firsts = [turn["first_step"] for turn in turns if turn["first_step"] is not None]
    pairs = zip(found[OWN_LOOP], turns, strict=True)
    return {
        "name": name,
        "precision": precision,
        "seconds": value_range([turn["seconds"] for turn in turns]),
        "cpu_seconds": value_range([turn["cpu_seconds"] for turn in turns]),
        "first_step": value_range(firsts) if firsts else None,
        "share": value_range([ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]),
        "host_bytes": max(turn["host_bytes"] for turn in turns),
    }


def _check_arguments(recipe: Recipe, against: Sequence[str]) -> Path | None:
    """Check the arguments before measuring. Returns: the path of timm's train.py, if given."""
    script = None
    for wish in against:
        name, _, path = wish.partition(":")
        if name not in END_TO_END_PEERS or bool(path) != (name == "timm-train"):
            raise RecipeError(
                f"--against: unknown '{wish}'{did_you_mean(name, END_TO_END_PEERS) or '.'} With "
                "--end-to-end, choose from timm-train:PATH, the train.py of timm's repository, and "
                "transformers-trainer",
                code="recipe.unknown_name",
            )
        check_package_installed(name)
        if path:
            script = Path(path).expanduser().absolute()
            if not script.is_file():
                raise RecipeError(
                    f"--against {wish}: no such file; give the path of timm's train.py",
                    code="recipe.not_found",
                )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SetupError(
            "bench --end-to-end: this starts its own processes; run it without accelerate launch",
            code="setup.one_process",
        )
    if wrong := _unsupported_keys(recipe):
        raise RecipeError(
            f"{', '.join(sorted(wrong))}: not supported by the commands that --end-to-end compares "
            "with; omit it: they support adamw, whole epochs, and cosine and constant schedules",
            code="recipe.unsupported",
        )
    return script


def _unsupported_keys(recipe: Recipe) -> set[str]:
    """Return the keys that change the training and that the other commands do not support."""
    wrong, optim = set(), recipe.optim
    for name, keys in training_keys(recipe).items():
        if name not in _SUPPORTED_KEYS:
            wrong |= {name} if getattr(recipe, name) else set()
            continue
        section = getattr(recipe, name)
        default = type(section).model_fields
        others = keys.keys() - {*_SUPPORTED_KEYS[name].split()}
        wrong |= {f"{name}.{k}" for k in others if getattr(section, k) != default[k].default}
    if optim.epochs is None or optim.epochs % 1:
        wrong.add("optim.epochs")
    return wrong if optim.schedule in ("constant", "cosine") else {*wrong, "optim.schedule"}


def _write_model(job: _TrainingJob) -> None:
    """Write the initial network as a model folder, and a recipe that fine-tunes it.

    Raises: RecipeError if the network is not a timm model.
    """
    setup, recipe, built = job.setup, job.recipe, job.setup.built
    if type(built.model).__module__.partition(".")[0] != "timm":
        raise RecipeError(
            f"model.name: timm and transformers cannot load '{built.architecture}'; "
            "--end-to-end needs a timm model",
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
        # log every step: the first log line marks the first step
        "run": {"log_every": 1, "num_processes": None, "trackers": (), "push_to": None},
    }
    changed = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()
    }
    text = recipe.model_copy(update={**changed, "claims": ()}).to_yaml()
    (job.folder / "recipe.yaml").write_text(text, encoding="utf-8")


def _class_folders(setup: TrainingSetup) -> list[str]:
    """Return class folder names: zero-padded numbers, which all commands sort the same way."""
    return [f"{label:06d}" for label in range(setup.num_classes)]


def _drop_unreadable(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup without the unreadable images of train and val.

    Raises: RecipeError for streamed images or without a validation split; DataError for unreadable
        images if data.unreadable is stop.
    """
    splits, data = setup.source.splits, setup.recipe.data
    if not len(splits.get("val", ())) or splits["train"].is_streamed:
        raise RecipeError(
            "data.source: --end-to-end needs local training and validation images, but "
            f"{data.source} has no validation split or is streamed; set data.val_fraction, or "
            "use a local source",
            code="recipe.unsupported",
        )
    kept = {}
    for name in ("train", "val"):
        rows = readable_indices(
            splits[name], num_workers=setup.num_workers, unreadable=data.unreadable
        )
        kept[name] = splits[name].subset(rows)
    source = dataclasses.replace(setup.source, splits=kept)
    setup = dataclasses.replace(setup, source=source)
    return setup.with_num_samples(len(kept["train"]), kept["train"].labels)


def _write_images(job: _TrainingJob) -> None:
    """Write the images into train/CLASS/ and val/CLASS/: JPEG and PNG unchanged, others as PNG."""
    splits, classes = job.setup.source.splits, _class_folders(job.setup)
    (job.folder / "classes.txt").write_text("\n".join(classes))
    for name in ("train", "val"):
        split, folders = splits[name], [job.folder / "images" / name / each for each in classes]
        for folder in folders:
            folder.mkdir(parents=True)
        pairs = zip(split.image_rows.tolist(), split.labels.tolist(), strict=True)
        for index, (row, label) in enumerate(pairs):
            place = folders[label] / f"{index:08d}"
            body = split.images.read_bytes(row)
            suffix = next((_SUFFIXES[start] for start in _SUFFIXES if body.startswith(start)), "")
            if suffix:
                place.with_suffix(suffix).write_bytes(body)
            else:
                Image.fromarray(split.decode(index)).save(place.with_suffix(".png"))


def _timm_options(job: _TrainingJob) -> list[str]:
    """Return the arguments of timm's train.py. Raises: RecipeError for unsupported transforms."""
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
        "workers": setup.num_workers,
        "device": setup.device.type,
        **_timm_transform_options(setup.train_pipeline.transform_spec),
    }
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def _timm_transform_options(sentence: str) -> dict[str, Any]:
    """Translate a training transform spec to options of timm's train.py."""
    # by default a crop of the whole image: a resize to a square
    options: dict[str, Any] = {"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "color-jitter": 0}
    for call in parse_transform_spec(sentence):
        if call.name == "random_resized_crop":
            options |= {name: tuple(call.arguments[name]) for name in ("scale", "ratio")}
        elif call.name == "flip":
            options["hflip"] = call.arguments["p"]
        elif call.name not in ("resize", "center_crop", "normalise"):
            raise RecipeError(
                f"data.train: timm's train.py has no equivalent of {call.name}; for --against "
                "timm-train use random_resized_crop or resize, and flip",
                code="recipe.unsupported",
            )
    return options


def _trainer_job_spec(job: _TrainingJob, out: Path) -> dict[str, Any]:
    """Build the job spec that is passed to `trainer_job.train`."""
    recipe, setup = job.recipe, job.setup
    return {
        "model": str(job.folder / "model"),
        "data": str(job.folder / "images"),
        "sentence": setup.train_pipeline.transform_spec,
        "interpolation": setup.preprocessing.interpolation,
        "arguments": {
            **training_arguments(recipe, job.precision, setup.device, setup.num_workers),
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


def _check_timm_script(job: _TrainingJob, script: Path) -> None:
    """Check that the script's --help lists all options that we use.

    Raises: RecipeError if it is not the train.py of the installed timm version.
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
            f"--help lacks {', '.join(missing[:3])}; use the file from that version's tag",
            code="recipe.wrong_value",
        )


def _run_rounds(
    job: _TrainingJob, names: Sequence[str], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all commands, round by round. Returns: the measurements of each round, by command."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with step_bar(total=repeats * len(names), start=0, shown=True) as shown:
        for number in range(repeats):
            for name in names if number % 2 == 0 else [*reversed(names)]:
                shown.set_description(name)
                with TemporaryDirectory(dir=job.folder, prefix=f"{name}-") as folder:
                    found[name].append(_run_timed(job, name, Path(folder)))
                shown.update()
    return found


def _run_timed(job: _TrainingJob, name: str, folder: Path) -> dict[str, Any]:
    """Time a command in its folder. Raises: SetupError with its last output lines if it fails."""
    log = folder / "log"
    marked, mark = {
        OWN_LOOP: (folder / "run" / "metrics.jsonl", b'"step"'),
        "timm-train": (log, b"Train: 0 ["),
    }.get(name, (log, FIRST_STEP.encode()))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "FINETUNE_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        # hide other GPUs: a command that finds several would use all of them
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
            preexec_fn=die_with_parent,
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
            f"{name}: the command ended with code {process.returncode}: "
            f"{redact_secrets(words)[-500:]}",
            code="setup.worker_ended",
        )
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "first_step": first,
        "host_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }

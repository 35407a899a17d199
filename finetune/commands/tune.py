"""`finetune train SOURCE --minutes N`, `finetune tune RECIPE`: the best recipe in N minutes.

The configurations of `portfolio.py` or `search_space.py` are ordinary runs in `trials/`, which
`successive_halving.py` pauses and continues from their exact checkpoints (freeze-thaw). The chosen
one becomes the run of the folder: it is continued, not retrained, and it alone evaluates the test
split.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.commands.estimate import TRIAL_SECONDS, measure_recipe
from finetune.commands.portfolio import build_trials
from finetune.commands.ray_trials import check_ray_is_installed
from finetune.commands.run_search import (
    DATA_INPUT,
    SHARD_TIMES_INPUT,
    TRIAL_OVERRIDES,
    data_sha256,
    read_inputs,
    remove_weights,
    run_search,
)
from finetune.commands.search_space import draw_trials
from finetune.commands.start import StartResult, open_new_run, start, write_start_files
from finetune.commands.successive_halving import Search
from finetune.data.from_recipe import open_full_data
from finetune.errors import CheckpointError, RecipeError, SetupError, redact_urls
from finetune.formatting import format_duration, pluralize
from finetune.log import logger, only_warnings
from finetune.model_checksums import json_sha256
from finetune.recipe.load import parse_overrides, parse_recipe
from finetune.recipe.paths import resolve_data_source
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import LOCATION_KEYS, changed_training_keys
from finetune.report.search_page import write_search_page
from finetune.run.directory import SEARCH_FILE, RunDir, resume_command
from finetune.run.integrity import load_json
from finetune.run.record import read_record
from finetune.training.train import train

__all__ = ["read_search", "tune", "tune_recipe", "tune_source"]

_MEASURED_SHARE = 0.1  # of the time, to measure the steps of a recipe
_SEARCH = TypeAdapter(Search)


def tune_source(
    source: str | None,
    out: Path,
    *,
    minutes: float | None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    download: bool = False,
    on_ray: bool = False,
    seconds_before: float = 0.0,
) -> dict[str, Any]:
    """Find the best recipe for a source of images in some minutes, and train it.

    Args:
        source: a folder, or a source string as in `data.source`; None to continue the search in
            `out`.
        out: path of the run directory.
        minutes: time that the whole command may take; None for that of the search in `out`.
        overrides: overrides by the user; they are the same in all trials.
        resume: True to continue the search in `out`, if there is one.
        download: True to download better weights and to compare them too.
        on_ray: True to train trials at the same time, see `ray_trials.py`.
        seconds_before: seconds that the command has taken before this call.
    Returns: the content of results.json.
    Raises: RecipeError if the time is too short, or the search in `out` is another one.
    """
    started = time.perf_counter() - seconds_before
    if on_ray:
        check_ray_is_installed()
    if source is None:  # the address with its password or signature, to continue a search
        source = parse_overrides(overrides).get("data.source")
        overrides = [each for each in overrides if not each.startswith("data.source=")]
    source = source and resolve_data_source(source)
    search = _open_search(out, resume=resume, minutes=minutes, overrides=overrides, source=source)
    if search is None:
        assert source is not None, "there is a search to continue"
        assert minutes is not None, "there is a search to continue"
        created = start(source, overrides=overrides, download=download)
        used = time.perf_counter() - started
        search = _make_search(created, minutes=minutes, overrides=overrides, used_seconds=used)
        write_start_files(created, out)
    return tune(search, out, source_overrides=_secret_override(source), on_ray=on_ray)


def tune_recipe(
    recipe: Recipe,
    out: Path,
    *,
    minutes: float,
    overrides: Sequence[str] = (),
    resume: bool = False,
    on_ray: bool = False,
    seconds_before: float = 0.0,
) -> dict[str, Any]:
    """Find the best values of the keys in a recipe's section `tune`, and train them.

    Args:
        recipe: the recipe, with the overrides.

    The other arguments, the result and the errors are those of `tune_source`.
    """
    started = time.perf_counter() - seconds_before
    if on_ray:
        check_ray_is_installed()
    search = _open_search(out, resume=resume, minutes=minutes, overrides=overrides, recipe=recipe)
    if search is None:
        source = open_full_data(recipe.data, recipe.run.seed)
        has_val = "val" in source.splits and not recipe.data.merge_val
        _require_validation(has_val or recipe.data.val_fraction > 0)
        logger.info("measuring some steps of the recipe")
        seconds = min(TRIAL_SECONDS, _MEASURED_SHARE * 60 * minutes)
        with only_warnings():
            measured, _ = measure_recipe(recipe, lambda: None, seconds=seconds)
        gc.collect()  # the memory of the network
        search = Search(
            redact_urls(recipe.data.source),
            list(map(redact_urls, overrides)),
            minutes,
            "map" if recipe.data.task == "multilabel" else "top1",
            measured["num_images"],
            can_resplit=not has_val,
            trials=draw_trials(recipe, measured),
            space=recipe.tune,
            inputs={
                DATA_INPUT: data_sha256(source.whole_fingerprints(), source.classes_fingerprint)
            },
        )
        search.used_seconds = time.perf_counter() - started
        _check_time(search)
    return tune(search, out, source_overrides=_secret_override(recipe.data.source), on_ray=on_ray)


def tune(
    search: Search, out: Path, *, source_overrides: Sequence[str] = (), on_ray: bool = False
) -> dict[str, Any]:
    """Carry out a search, and make the chosen trial the run of a folder.

    Args:
        search: a new search, or one that was stopped.
        out: path of the run directory.
        source_overrides, on_ray: see `run_search`.
    Returns: the content of results.json.
    """
    chosen = run_search(search, out, source_overrides=source_overrides, on_ray=on_ray)
    folder = out / "trials" / chosen.name
    value = search.format_value(chosen.curve[-1].value)
    logger.info(
        f"chosen after {format_duration(search.used_seconds)}: {chosen.name} "
        f"({chosen.description}), {value} on {pluralize(chosen.num_images, 'validation image')}"
    )
    write_search_page(out, asdict(search))
    recipe = parse_recipe(chosen.recipe, name=chosen.name, overrides=source_overrides)
    # the run adds the seconds of its steps, which are a part of the search
    trained_seconds = sum(line["seconds"] for line in RunDir(folder).read_metrics()[-1:])
    results = train(
        recipe,
        out,
        resume=True,
        branch_from=folder,
        seconds_before=search.used_seconds - trained_seconds,
    )
    remove_weights(folder)
    return results


def _secret_override(source: str | None) -> list[str]:
    """Return an override of `data.source` if the recorded one lacks its password or signature."""
    if source is None or redact_urls(source) == source:
        return []
    return [f"data.source={json.dumps(source)}"]


def _open_search(
    out: Path,
    *,
    resume: bool,
    minutes: float | None,
    overrides: Sequence[str],
    source: str | None = None,
    recipe: Recipe | None = None,
) -> Search | None:
    """Return the search to continue; None to start one.

    Raises: RecipeError if the user asks for another search than the one in the folder; SetupError
        if there is a run, and it shall not be continued.
    """
    if not resume or not (out / SEARCH_FILE).is_file():
        if (out / "trials").exists() and not (out / SEARCH_FILE).exists():
            raise SetupError(
                f"{out}: contains the trials of a search, but no {SEARCH_FILE}; restore it from a "
                "copy, or search in another --out",
                code="setup.run_exists",
            )
        if out.exists():
            with open_new_run(out):  # fail now, not after minutes of trials
                pass
        return None
    search = read_search(out)
    redacted = list(map(redact_urls, overrides))
    own_source = parse_recipe(search.trials[0].recipe, name=SEARCH_FILE).data.source
    if source is not None and not _is_same_source(redact_urls(source), own_source):
        difference = f"{redact_urls(source)}: the search in {out} has {own_source}"
    elif minutes not in (None, search.minutes):
        difference = f"--minutes {minutes:g}: the search in {out} has {search.minutes:g} minutes"
    elif overrides and redacted != search.overrides:
        difference = (
            f"{' '.join(redacted)}: the search in {out} was started with "
            f"{' '.join(search.overrides) or 'no overrides'}"
        )
    elif recipe and (recipe.tune, recipe.to_yaml()) != (search.space, search.trials[0].recipe):
        difference = (
            f"the search in {out} has another recipe, or other values in its section `tune`"
        )
    else:
        _check_trial_folders(search, out)
        return search
    raise RecipeError(
        f"{difference}; continue it: {resume_command(out)}, or search in another --out",
        code="recipe.not_this_run",
    )


def _is_same_source(first: str, second: str) -> bool:
    """Return whether two sources are equal; local paths may be written in different ways."""
    (kind, _, path), (other_kind, _, other_path) = first.partition(":"), second.partition(":")
    is_same_path = Path(path).resolve() == Path(other_path).resolve()
    return first == second or (kind == other_kind and is_same_path)


def _check_trial_folders(search: Search, out: Path) -> None:
    """Raise CheckpointError unless the trials that may continue are those of tune.json."""
    for trial in search.trials:
        if not trial.curve or (trial.end_reason and trial.name != search.chosen):
            continue
        folder = out / "trials" / trial.name
        record = read_record(RunDir(folder))
        if not record:
            problem = "is missing, so the search cannot continue"
        else:
            recipe = parse_recipe(trial.recipe, name=trial.name, overrides=TRIAL_OVERRIDES)
            changed = set(changed_training_keys(record.get("training_keys", {}), recipe))
            changed -= set(LOCATION_KEYS)
            if recipe.model.head_init is None:  # the run has recorded what it has chosen
                changed.discard("model.head_init")
            inputs = read_inputs(recipe, record)
            changed |= {name for name in inputs if inputs[name] != trial.inputs.get(name)}
            changed -= {SHARD_TIMES_INPUT}  # they are newer in the folder after a kill
            problem = f"differs from {SEARCH_FILE} ({', '.join(sorted(changed))})" * bool(changed)
        if problem:
            raise CheckpointError(
                f"{folder}: {problem}; restore it and {SEARCH_FILE} from a copy, or search in "
                "another --out",
                code="checkpoint.damaged",
            )


def _make_search(
    created: StartResult, *, minutes: float, overrides: Sequence[str], used_seconds: float
) -> Search:
    """Make a search from the recipe that `finetune train SOURCE` trains.

    Raises: RecipeError if there are no validation images, or the time is too short for a recipe.
    """
    builder = created.builder
    _require_validation(builder.has_validation())
    search = Search(
        redact_urls(builder.source.name),
        list(map(redact_urls, overrides)),
        minutes,
        "map" if created.recipe.data.task == "multilabel" else "top1",
        builder.stats.num_train,
        can_resplit="val" not in builder.stats.split_sizes,
        trials=build_trials(created, max_seconds=60 * minutes / 2),
        used_seconds=used_seconds,
        inputs={
            DATA_INPUT: data_sha256(
                builder.source.whole_fingerprints(), builder.source.classes_fingerprint
            )
        },
    )
    _check_time(search)
    return search


def _require_validation(has_validation: bool) -> None:
    if not has_validation:
        raise RecipeError(
            "--minutes: data.val_fraction=0 leaves no validation images to choose by; remove it",
            code="recipe.conflict",
        )


def _check_time(search: Search) -> None:
    """Raise RecipeError if the time is too short for the fastest recipe."""
    fastest = min(search.trials, key=lambda trial: trial.estimated_seconds)
    seconds = fastest.estimated_seconds + fastest.final_seconds
    if seconds > search.remaining_seconds:
        raise RecipeError(
            f"--minutes {search.minutes:g}: too short for these images here: "
            f"{format_duration(search.used_seconds)} are used, and the fastest recipe takes about "
            f"{format_duration(seconds)}; give at least --minutes "
            f"{math.ceil(1.1 * (search.used_seconds + seconds) / 60)}, or train without a search",
            code="recipe.wrong_value",
        )


def read_search(folder: Path) -> Search:
    """Read the search of a folder. Raises: CheckpointError if its record is damaged."""
    path = folder / SEARCH_FILE
    try:
        content = load_json(path)
        search = _SEARCH.validate_python(content)
        if content.pop("checksum", None) != json_sha256(content):
            raise ValueError("it was changed after it was written")
        names = {*(decision.trial for decision in search.decisions), search.chosen} - {""}
        if unknown := names - {trial.name for trial in search.trials}:
            raise ValueError(f"no trial {min(unknown)!r}")
        return search
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read, or is not the record of a search "
            f"({str(error).splitlines()[0]}); restore it from a copy, or search in another --out",
            code="checkpoint.damaged",
        ) from error

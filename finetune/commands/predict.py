"""`finetune predict`: classify images, decoded and transformed as in evaluation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from finetune.commands.contact_sheet import ContactSheet, save_sheet
from finetune.commands.prediction_output import (
    PREDICTION_SUFFIXES,
    PredictionTable,
    check_holds_predictions,
    open_features_writer,
    open_prediction_writer,
    warn_of_separators,
)
from finetune.data.image_paths import list_cli_images
from finetune.evaluation.unknown_classes import FALSE_UNKNOWN_RATE
from finetune.files import check_not_overwriting_inputs, check_output_file
from finetune.inference import Classifier, PredictionRow
from finetune.log import logger
from finetune.models.fast_layers import limit_last_block_to_class_token

__all__ = ["predict"]


def predict(
    model: str,
    paths: Sequence[str],
    *,
    top_k: int = 3,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    features: str | Path | None = None,
    calibrated: bool = False,
    threshold: float | None = None,
    tta: Literal["flip"] | None = None,
    max_error: float | None = None,
    coverage: float | None = None,
    mark_unknown: bool = False,
    batch_size: int | None = None,
    device: str | None = None,
) -> PredictionTable:
    """Classify files and folders, and optionally write the results to files.

    Args:
        model: the model to load, see `Classifier.load`.
        paths: files, folders, glob patterns, or "-" for a list on standard input with one path per
            line (or NUL-separated, as from `find -print0`); listed paths are not glob patterns.
        top_k: number of predictions per image.
        out: a .csv or .jsonl file for the predictions, written atomically. In CSV, cells that a
            spreadsheet would run as a formula, or that begin with an apostrophe, are prefixed with
            an apostrophe, and several labels share one cell, as `cat|dog`. JSONL keeps every name
            unchanged.
        sheet: a .png file for a contact sheet of the first images, written atomically.
        features: a .parquet file for the path and the pre-logits of each image, written
            atomically; the model then needs no classifier.
        calibrated, threshold, tta, max_error, coverage, mark_unknown: see `Classifier.load`.
        batch_size: see `Classifier.predict`.
        device: the device to run on; None uses a GPU if available.
    Returns: one row per file, as from `Classifier.predict`. For an unreadable file the row has an
        "error" instead of predictions; `unreadable_files_error` turns these into an exception.
    Raises: RecipeError if an output file has an unknown suffix or is also an input; SetupError if
        it cannot be written; DataError for an empty list on standard input.
    """
    out_path = (
        None
        if out is None
        else check_output_file(out, option="--out", suffixes=PREDICTION_SUFFIXES)
    )
    sheet_path = (
        None if sheet is None else check_output_file(sheet, option="--sheet", suffixes=[".png"])
    )
    features_path = (
        None
        if features is None
        else check_output_file(features, option="--features", suffixes=[".parquet"])
    )
    if out_path is not None:
        check_holds_predictions(out_path)
    files = list_cli_images(paths)
    check_not_overwriting_inputs(
        (path for path, _ in files),
        {"--out": out_path, "--sheet": sheet_path, "--features": features_path},
    )
    classifier = Classifier.load(
        model,
        device=device,
        calibrated=calibrated,
        threshold=threshold,
        tta=tta,
        with_features=features_path is not None,
        max_error=max_error,
        coverage=coverage,
        mark_unknown=mark_unknown,
    )
    if mark_unknown:
        logger.info(
            "--unknown: marks images of no known class, and about "
            f"{100 * FALSE_UNKNOWN_RATE:g} % of the images of known classes"
        )
    limit_last_block_to_class_token(classifier.network)
    extra_keys = [
        key
        for key, is_used in (
            ("labels", classifier.thresholds is not None),
            ("abstained", max_error is not None),
            ("prediction_set", coverage is not None),
            ("unknown", mark_unknown),
        )
        if is_used
    ]
    if out_path is not None and out_path.suffix.lower() == ".csv":
        warn_of_separators(classifier.class_names, extra_keys)
    rows = PredictionTable(classifier.class_names, extra_keys=extra_keys)
    contact_sheet = ContactSheet() if sheet_path else None
    on_decoded = None if contact_sheet is None else contact_sheet.add_image
    predictions = classifier.iter_predictions(
        files, top_k=top_k, batch_size=batch_size, progress=True, on_decoded=on_decoded
    )
    num_predictions = min(top_k, len(classifier.class_names))
    with contextlib.ExitStack() as stack:
        consumers: list[Callable[[PredictionRow], None]] = [rows.append]
        if features_path is not None:  # first, because it removes the features from the rows
            consumers.insert(0, stack.enter_context(open_features_writer(features_path)))
        if contact_sheet is not None:
            consumers.append(contact_sheet.add_row)
        if out_path is not None:
            consumers.append(
                stack.enter_context(
                    open_prediction_writer(
                        out_path, num_predictions=num_predictions, extra_keys=extra_keys
                    )
                )
            )
        for row in predictions:
            for consume in consumers:
                consume(row)
    if contact_sheet is not None and sheet_path is not None:
        temperature = classifier.temperature
        note = (
            ""
            if temperature is None
            else f"confidences calibrated with temperature {temperature:.3f}"
        )
        name = Path(model).resolve().name if os.path.exists(model) else model
        save_sheet(contact_sheet.draw(title=name, note=note), sheet_path, option="--sheet")
    return rows

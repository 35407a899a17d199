"""Write a demo page that needs no server: the exported model runs in the browser.

The folder contains the page, the model, and onnxruntime-web from an npm package; it loads nothing
from another host. Any file host can serve it, also a static Space of the Hugging Face Hub.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from finetune.commands.export import export_model
from finetune.commands.export_runtimes import find_ort_web
from finetune.demo.markup import (
    NO_LABEL_TEXT,
    render_class,
    render_error,
    render_footer,
    render_header,
    stylesheet,
)
from finetune.demo.model_summary import model_title, pin_hub_commit, summarize_model
from finetune.demo.predictor import TOP_K
from finetune.demo.space import space_card
from finetune.errors import RecipeError, WeightsError, weights_changed_error
from finetune.files import explain_disk_errors, staging_folder
from finetune.inference import Classifier
from finetune.publish.permissions import check_rights
from finetune.publish.push import push_static_files
from finetune.report.html import render_html

__all__ = ["push_static_space", "write_static_page"]

# Files of onnxruntime-web, by their names in the folder: .js, because some file hosts do not know
# .mjs as JavaScript.
_ORT_FILES = {
    "ort.js": "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
}
_FILES = ("README.md", "certificate.json", "index.html", "model.onnx", *_ORT_FILES)
_SOURCES = (
    "img-src 'self' data: blob:; media-src blob:; connect-src 'self'; worker-src 'self' blob:"
)
_OPTION = "--static"


def write_static_page(
    model: str, folder: str | Path, *, ort_web: str | None = None
) -> dict[str, Any]:
    """Export a model, and write it into a folder with a page that runs it in the browser.

    Args:
        model: the model to export, see `export_model`.
        folder: a new or empty folder.
        ort_web: folder of the npm package onnxruntime-web, see `find_ort_web`.
    Returns: a dict with keys "model", "folder" and "files" (their names).
    Raises: RecipeError if the folder is not empty; SetupError if a package is missing or the folder
        cannot be written; WeightsError if the model cannot be exported or is too large.
    """
    target = Path(folder).expanduser()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        what = "already contains files" if target.is_dir() else "this is a file"
        raise RecipeError(
            f"{_OPTION} {folder}: {what}; give a new or empty folder", code="recipe.wrong_value"
        )
    package = find_ort_web(ort_web, option=_OPTION)[0]
    with explain_disk_errors(target, option=_OPTION):
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(target) as page:
            pinned = pin_hub_commit(model)
            export_model(pinned, out=str(page))
            if (page / "model.onnx.data").exists():
                raise WeightsError(
                    f"{model}: too large for a browser (more than 1.9 GB); use a smaller model",
                    code="weights.unsupported",
                )
            for name, source in _ORT_FILES.items():
                shutil.copyfile(package / "dist" / source, page / name)
            classifier = Classifier.load(pinned, device="cpu")
            certificate = json.loads((page / "certificate.json").read_bytes())
            if certificate["source"]["sha256"] != classifier.weights_sha256:
                raise weights_changed_error(model)
            text = _render_page(pinned, classifier, certificate["export"]["sha256"]["model.onnx"])
            (page / "index.html").write_text(text, encoding="utf-8")
            card = space_card(
                model_title(model),
                {"sdk": "static", "app_file": "index.html"},
                model,
                certificate["license"],
                "Choose an image: the page classifies it in the browser, and sends it nowhere. "
                "Any file host can serve this folder, such as `python -m http.server`.",
            )
            (page / "README.md").write_text(card, encoding="utf-8")
            os.replace(page, target)
    return {"model": model, "folder": str(target), "files": sorted(_FILES)}


def _render_page(model: str, classifier: Classifier, model_sha256: str) -> str:
    title = model_title(model)
    note = "Images stay in this browser: the model runs here, and no image is sent."
    return render_html(
        "static.html",
        script="static.js",
        package="finetune.demo",
        sources=_SOURCES,
        title=title,
        style=stylesheet(),
        header=render_header(title, summarize_model(model, classifier)),
        footer=render_footer(classifier.class_names, [note]),
        row=render_class(("", 0.0), 0.0),
        error=render_error(""),
        content={
            "classes": classifier.class_names,
            "thresholds": classifier.thresholds,
            "topK": TOP_K,
            "noLabel": NO_LABEL_TEXT,
            "modelSha256": model_sha256,
        },
    )


def push_static_space(
    model: str,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    ort_web: str | None = None,
) -> dict[str, Any]:
    """Push the static page of a model to the Hub as a Space.

    Args:
        model: see `write_static_page`.
        repository: owner/name of the Space; created if it does not exist.
        private, revision, message: see `push`.
        ort_web: see `find_ort_web`.
    Returns: see `push`.
    Raises: the errors of `write_static_page` and of `push`.
    """
    check_rights(repository, private=private, revision=revision, repo_type="space")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page"
        write_static_page(model, page, ort_web=ort_web)
        return push_static_files(
            page,
            _FILES,
            repository,
            model=model,
            private=private,
            revision=revision,
            message=message,
        )

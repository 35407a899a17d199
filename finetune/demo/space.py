"""Export the demo page as a folder that runs as a Space on the Hugging Face Hub.

The folder contains a copy of this package, because a package index may have another project of the
same name, and because the Space should run the same version of the code.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import yaml
from huggingface_hub import metadata_load
from timm.models import split_model_name_tag

from finetune import __version__
from finetune.demo.app import PageContent, build_app, import_gradio
from finetune.demo.model_summary import (
    copy_example_images,
    is_hub_name,
    local_model_folder,
    model_title,
    pin_hub_commit,
    split_hub_name,
    summarize_model,
)
from finetune.demo.server import run_server
from finetune.demo.uploads import temporary_workspace
from finetune.errors import Interrupted, RecipeError, SetupError, weights_changed_error
from finetune.files import file_sha256
from finetune.formatting import pluralize
from finetune.hub.download import download_hub_file
from finetune.inference import Classifier
from finetune.log import logger
from finetune.models.build import build_model
from finetune.models.weights.resolve import find_weights_file
from finetune.publish.model_card import license_metadata
from finetune.transforms.eval_transforms import build_pipeline

__all__ = ["export_space", "run_space", "space_card"]

_MARKER_FILE = "demo.json"
_MADE_BY = "finetune demo --export-space"
_EXPORTED_FILES = ("README.md", "app.py", "requirements.txt", ".gitattributes", _MARKER_FILE)
_EXPORTED_FOLDERS = ("model", "examples", "finetune")
# Packages that inference needs; their installed versions go into requirements.txt.
_REQUIRED_PACKAGES = (
    *("torch", "torchvision", "timm", "safetensors", "huggingface_hub", "numpy", "pillow"),
    *("simplejpeg", "pyarrow", "pydantic", "PyYAML", "tqdm", "click"),
)
_APP_SOURCE = '''"""The page of this Space; written by `finetune demo --export-space`."""

from pathlib import Path

from finetune.demo.space import run_space

if __name__ == "__main__":
    run_space(Path(__file__).resolve().parent)
'''
_GIT_ATTRIBUTES = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


def export_space(model: str, folder: str | Path) -> dict[str, Any]:
    """Write a folder to push to the Hub as a Space, or to run with `python app.py`.

    A Hub model is referenced by its commit and downloaded when the Space starts; a local model is
    copied into the folder.

    Args:
        model: the model to load, see `Classifier.load`.
        folder: a new or empty folder, or an earlier export. The files of an earlier export are
            replaced; other files, such as .git, are kept.
    Returns: a dict with keys "model", "folder" and "files" (paths relative to the folder).
    Raises: RecipeError if the folder contains other files or the model is a single file;
        WeightsError if the model cannot be loaded; SetupError if the folder cannot be written.
    """
    target = Path(folder)
    gradio_version = import_gradio().__version__
    _check_target(target)
    local_folder = local_model_folder(model)
    sha256_before = None if local_folder is None else _hash_model(local_folder)
    pinned = pin_hub_commit(model)
    # load the model first, so that no Space is written that cannot start
    classifier = Classifier.load(pinned, device="cpu")
    reference, license_id = _reference_and_license(pinned)
    export_info: dict[str, Any] = {
        "made_by": _MADE_BY,
        "model": reference,
        "eval": classifier.pipeline.transform_spec,
        "decode_size": classifier.pipeline.decode_size,
        "title": model_title(model),
        "facts": summarize_model(pinned, classifier),
    }
    try:
        _remove_earlier_export(target)
        (target / "examples").mkdir(parents=True)
        examples = copy_example_images(model, target / "examples")
        if reference is None:
            _copy_model(model, target / "model")
            export_info["model_sha256"] = _hash_model(target / "model")
            if export_info["model_sha256"] != sha256_before:
                _remove_earlier_export(target)
                raise weights_changed_error(model)
        _copy_package(target / "finetune")
        (target / "app.py").write_text(_APP_SOURCE, encoding="utf-8")
        (target / "requirements.txt").write_text(_requirements_text(), encoding="utf-8")
        (target / ".gitattributes").write_text(_GIT_ATTRIBUTES, encoding="utf-8")
        is_multilabel = classifier.thresholds is not None
        sdk = {
            "sdk": "gradio",
            "sdk_version": gradio_version,
            "python_version": ".".join(platform.python_version_tuple()[:2]),
            "app_file": "app.py",
        }
        body = _space_description(reference, is_multilabel=is_multilabel)
        card = space_card(str(export_info["title"]), sdk, reference, license_id, body)
        (target / "README.md").write_text(card, encoding="utf-8")
        # written last, because this file marks a complete export
        text = json.dumps(export_info, indent=2, ensure_ascii=False) + "\n"
        (target / _MARKER_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"--export-space {folder}: cannot be written ({error.strerror or error}); choose "
            "another folder",
            code="setup.not_writable",
        ) from error
    if examples:
        logger.info(
            f"{target / 'examples'}: has {pluralize(len(examples), 'image')}, which the Space will "
            "show; remove those that should stay private"
        )
    exported = [target / name for name in (*_EXPORTED_FILES, *_EXPORTED_FOLDERS)]
    files = [file for top in exported for file in ([top] if top.is_file() else top.rglob("*"))]
    names = sorted(str(file.relative_to(target)) for file in files if file.is_file())
    return {"model": model, "folder": str(target), "files": names}


def run_space(folder: Path) -> None:
    """Serve the demo page of an exported folder until the process ends.

    Args:
        folder: the folder that `export_space` wrote.
    """
    exported = json.loads((folder / _MARKER_FILE).read_text(encoding="utf-8"))
    if exported["model"] is None and exported["model_sha256"] != _hash_model(folder / "model"):
        raise SystemExit(
            f"{folder / 'model'}: is not the exported model, so the accuracy on this page would be "
            f"wrong; write the folder again: finetune demo MODEL --export-space {folder}"
        )
    classifier = _load_exported_classifier(
        exported["model"] or str(folder / "model"), exported["eval"], exported["decode_size"]
    )
    is_space = "SPACE_ID" in os.environ
    examples = sorted(file for file in (folder / "examples").glob("*") if file.is_file())
    with temporary_workspace() as workspace:
        copies = [workspace / "examples" / file.name for file in examples]
        for file, copy in zip(examples, copies, strict=True):
            shutil.copyfile(file, copy)
        content = PageContent(title=exported["title"], facts=exported["facts"], examples=copies)
        app = build_app(classifier, content)
        # on the Hub, Gradio's environment variables define where to listen
        host = None if is_space else os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
        try:
            run_server(app, workspace, host=host, port=None, is_space=is_space)
        except Interrupted as stop:
            raise SystemExit(stop.exit_code) from None


def _load_exported_classifier(
    model: str, transform_spec: str, decode_size: int | None
) -> Classifier:
    """Load the classifier with the exported transforms, which are not in the model's own files."""
    classifier = Classifier.load(model, mark_unknown=None)
    if (classifier.pipeline.transform_spec, classifier.pipeline.decode_size) != (
        transform_spec,
        decode_size,
    ):
        preprocessing = build_model(model).preprocessing
        classifier.pipeline = build_pipeline(preprocessing, transform_spec, decode_size=decode_size)
    return classifier


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise RecipeError(
            f"--export-space {target}: this is a file; give a folder", code="recipe.wrong_value"
        )
    other_files = [entry.name for entry in target.iterdir() if entry.name != ".git"]
    if other_files and not _is_exported_space(target / _MARKER_FILE):
        raise RecipeError(
            f"--export-space {target}: already contains other files "
            f"({', '.join(sorted(other_files)[:3])}); give a new or empty folder",
            code="recipe.wrong_value",
        )


def _is_exported_space(marker: Path) -> bool:
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("made_by") == _MADE_BY


def _remove_earlier_export(target: Path) -> None:
    """Remove the files of an earlier export, starting with the file that marks it as complete."""
    for name in reversed(_EXPORTED_FILES):
        (target / name).unlink(missing_ok=True)
    for name in _EXPORTED_FOLDERS:
        if (target / name).is_dir():
            shutil.rmtree(target / name)


def _reference_and_license(model: str) -> tuple[str | None, str | None]:
    """Return the reference for the Space (None for a local model), and the license or None."""
    if is_hub_name(model):
        repository, revision = split_hub_name(model)
        config = download_hub_file(repository, "config.json", revision)
        return model, _read_license(config.path.parent)
    folder = local_model_folder(model)
    if folder is not None:
        return None, _read_license(folder)
    if timm.is_model(split_model_name_tag(model)[0]):
        entry = timm.get_pretrained_cfg(model)
        return model, getattr(entry, "license", None)
    raise RecipeError(
        f"--export-space: {model} is a single file; give the model's folder, with its config.json",
        code="recipe.unsupported",
    )


def _read_license(folder: Path) -> str | None:
    """Read the license from the model card, else from config.json."""
    card, config = folder / "README.md", folder / "config.json"
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # no card, or a damaged one
        license_id = (metadata_load(card) or {}).get("license")
        if isinstance(license_id, str):
            return license_id
    content = json.loads(config.read_text(encoding="utf-8"))
    license_id = (content.get("pretrained_cfg") or {}).get("license")
    return license_id if isinstance(license_id, str) else None


def _copy_model(model: str, target: Path) -> None:
    folder = local_model_folder(model)
    assert folder is not None
    weights = find_weights_file(folder)
    if weights is None or weights.suffix != ".safetensors":
        raise RecipeError(
            f"--export-space needs .safetensors weights, which {model} does not have; fine-tune it "
            "first, then export the run",
            code="recipe.unsupported",
        )
    target.mkdir()
    shutil.copyfile(folder / "config.json", target / "config.json")
    shutil.copyfile(weights, target / "model.safetensors")


def _hash_model(folder: Path) -> list[str]:
    """Return the sha256 of config.json and weights."""
    files = (folder / "config.json", find_weights_file(folder))
    return [file_sha256(file) for file in files if file is not None and file.is_file()]


def _copy_package(target: Path) -> None:
    """Copy this package and, if it exists, its license file; leave out the embedded weights."""
    source = Path(__file__).resolve().parents[1]
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "embedded")
    shutil.copytree(source, target, ignore=ignore)
    candidates = [source.parent / "LICENSE"]
    candidates += sorted(source.parent.glob("finetune_vision-*.dist-info/licenses/LICENSE"))
    for candidate in candidates:
        if candidate.is_file():
            shutil.copyfile(candidate, target / "LICENSE")
            return


def _requirements_text() -> str:
    """Return requirements.txt, which pins the required packages to the installed versions."""
    lines = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _REQUIRED_PACKAGES]
    return "\n".join([*lines, f"gradio=={import_gradio().__version__}"]) + "\n"


def _space_description(reference: str | None, *, is_multilabel: bool) -> str:
    model_location = f"`{reference}`" if reference else "the folder `model`"
    shown_results = "its labels" if is_multilabel else "the five most likely classes"
    return (
        f"Upload an image: the page shows {shown_results} and the attention rollout.\n\n"
        f"The model is {model_location}. To run it elsewhere: `pip install -r requirements.txt`, "
        "then `python app.py`.\n\n"
        f"The folder `finetune` is a copy of the package that wrote this Space, version "
        f"{__version__}, under the Apache License 2.0."
    )


def space_card(
    title: str,
    sdk: Mapping[str, str],
    reference: str | None,
    license_name: str | None,
    description: str,
) -> str:
    """Return the README.md of a Space.

    Args:
        title: the model's name.
        sdk: metadata on how the Hub runs the Space.
        reference: the model; the card names it if it is on the Hub.
        license_name: the license of the model.
        description: Markdown.
    """
    front_matter: dict[str, Any] = {
        "title": title,
        "colorFrom": "yellow",
        "colorTo": "red",
        **sdk,
        "pinned": False,
        **license_metadata(license_name),
    }
    if reference is not None and is_hub_name(reference):
        front_matter["models"] = [split_hub_name(reference)[0]]
    header = yaml.safe_dump(front_matter, sort_keys=False, allow_unicode=True).strip()
    heading = html.escape(" ".join(title.split()))
    return f"---\n{header}\n---\n\n# {heading}\n\n{description}\n"

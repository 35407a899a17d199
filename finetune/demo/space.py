"""A folder that runs as a Space on the hub: the demo's page with everything it needs.

It carries a copy of this package: an index may hold another project under the same name, and the
Space should classify with the code that wrote it.
"""

from __future__ import annotations

import html
import json
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import yaml
from timm.models import split_model_name_tag

from finetune import __version__
from finetune.commands.predict import Classifier
from finetune.demo.app import About, build_app, gradio
from finetune.demo.model_facts import example_files, facts, is_hub_name, model_folder, title_of
from finetune.demo.server import show
from finetune.demo.uploads import workplace
from finetune.errors import RecipeError, SetupError
from finetune.hub.download import fetch
from finetune.models.build import build
from finetune.publish.model_card import licence_keys
from finetune.transforms.evaluation import make_pipeline

__all__ = ["export_space", "run_space"]

_MARK = "demo.json"
_MADE_BY = "finetune demo --export-space"
_OURS = ("README.md", "app.py", "requirements.txt", ".gitattributes", _MARK)
_OUR_FOLDERS = ("model", "examples", "finetune")
# What the copied package imports on its way from a picture to its classes.
_NEEDED = (
    *("torch", "torchvision", "timm", "safetensors", "huggingface_hub", "numpy", "pillow"),
    *("simplejpeg", "pyarrow", "pydantic", "PyYAML", "tqdm", "click"),
)
_APP = '''"""The page of this Space; written by `finetune demo --export-space`."""

from pathlib import Path

from finetune.demo.space import run_space

if __name__ == "__main__":
    run_space(Path(__file__).resolve().parent)
'''
_ATTRIBUTES = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


def export_space(model: str, folder: str | Path) -> dict[str, Any]:
    """Write a folder that can be pushed to the hub as a Space, or run with `python app.py`.

    A model of the hub is named by its commit and fetched when the Space starts; a local one is
    copied into the folder.

    Args:
        model: see `Classifier.load`.
        folder: new, empty, or written by this function before (then it is replaced; what else is
            in it, such as .git, stays).
    Returns: {"model", "folder", "files"}, the files as paths within the folder.
    Raises: RecipeError if the folder holds something else or the model is a single file,
        WeightsError if the model cannot be loaded, SetupError if the folder cannot be written.
    """
    target = Path(folder)
    version = gradio().__version__
    _check_target(target)
    classifier = Classifier.load(model, device="cpu")  # a Space that cannot start is not written
    reference, licence = _reference(model)
    about = {
        "made_by": _MADE_BY,
        "model": reference,
        "eval": classifier.pipeline.sentence,
        "decode_size": classifier.pipeline.decode_size,
        "title": title_of(model),
        "facts": facts(model, classifier),
    }
    try:
        _clear(target)
        (target / "examples").mkdir(parents=True)
        example_files(model, target / "examples")
        if reference is None:
            _copy_model(model, target / "model")
        _copy_package(target / "finetune")
        (target / "app.py").write_text(_APP, encoding="utf-8")
        (target / "requirements.txt").write_text(_requirements(), encoding="utf-8")
        (target / ".gitattributes").write_text(_ATTRIBUTES, encoding="utf-8")
        several = classifier.thresholds is not None
        card = _card(str(about["title"]), version, reference, licence, several=several)
        (target / "README.md").write_text(card, encoding="utf-8")
        # last: a folder with this file is whole
        text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
        (target / _MARK).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"--export-space {folder}: cannot be written ({error.strerror or error}); choose "
            "another folder",
            code="setup.not_writable",
        ) from error
    owned = [target / name for name in (*_OURS, *_OUR_FOLDERS)]
    files = [file for top in owned for file in ([top] if top.is_file() else top.rglob("*"))]
    names = sorted(str(file.relative_to(target)) for file in files if file.is_file())
    return {"model": model, "folder": str(target), "files": names}


def run_space(folder: Path) -> None:
    """Serve the page of an exported folder until the process is ended.

    Args:
        folder: written by `export_space`.
    """
    about = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    classifier = _load(about["model"] or str(folder / "model"), about["eval"], about["decode_size"])
    hosted = "SPACE_ID" in os.environ
    examples = sorted(file for file in (folder / "examples").glob("*") if file.is_file())
    with workplace() as place:
        copies = [place / "examples" / file.name for file in examples]
        for file, copy in zip(examples, copies, strict=True):
            shutil.copyfile(file, copy)
        shown = About(title=about["title"], facts=about["facts"], examples=copies)
        app = build_app(classifier, shown)
        # the hub says in its own variables where to listen
        host = None if hosted else os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
        show(app, place, host=host, port=None, hosted=hosted)


def _load(model: str, sentence: str, size: int | None) -> Classifier:
    """The classifier as it was exported: a recipe's evaluation is not in the model's files."""
    classifier = Classifier.load(model)
    if (classifier.pipeline.sentence, classifier.pipeline.decode_size) != (sentence, size):
        preprocessing = build(model).preprocessing
        classifier.pipeline = make_pipeline(preprocessing, sentence, decode_size=size)
    return classifier


def _check_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise RecipeError(
            f"--export-space {target}: is a file; name a folder", code="recipe.wrong_value"
        )
    others = [entry.name for entry in target.iterdir() if entry.name != ".git"]
    if others and not _is_ours(target / _MARK):
        raise RecipeError(
            f"--export-space {target}: holds other files ({', '.join(sorted(others)[:3])}); name "
            "a new or empty folder",
            code="recipe.wrong_value",
        )


def _is_ours(mark: Path) -> bool:
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("made_by") == _MADE_BY


def _clear(target: Path) -> None:
    """Remove what an earlier export wrote, its mark first."""
    for name in reversed(_OURS):
        (target / name).unlink(missing_ok=True)
    for name in _OUR_FOLDERS:
        if (target / name).is_dir():
            shutil.rmtree(target / name)


def _reference(model: str) -> tuple[str | None, str | None]:
    """The name of the model in the Space (None: a copy), and the license that the model states."""
    if is_hub_name(model):
        repository, _, revision = model.split(":", 1)[1].partition("@")
        config = fetch(repository, "config.json", revision or None)
        commit = config.commit or revision
        return f"hf-hub:{repository}@{commit}" if commit else model, _licence(config.path.parent)
    folder = model_folder(model)
    if folder is not None:
        return None, _licence(folder)
    if timm.is_model(split_model_name_tag(model)[0]):
        entry = timm.get_pretrained_cfg(model)
        return model, getattr(entry, "license", None)
    raise RecipeError(
        f"--export-space: {model} is a single file; give the model's folder, with its config.json",
        code="recipe.unsupported",
    )


def _licence(folder: Path) -> str | None:
    """The license in the model card, or in its configuration."""
    card, config = folder / "README.md", folder / "config.json"
    if card.is_file():
        parts = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
        try:
            head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
        except yaml.YAMLError:
            head = None
        if isinstance(head, dict) and isinstance(head.get("license"), str):
            return str(head["license"])
    content = json.loads(config.read_text(encoding="utf-8"))
    stated = (content.get("pretrained_cfg") or {}).get("license")
    return stated if isinstance(stated, str) else None


def _copy_model(model: str, target: Path) -> None:
    folder = model_folder(model)
    assert folder is not None
    weights = sorted(folder.glob("*.safetensors"), key=lambda f: f.name != "model.safetensors")
    if not weights:
        raise RecipeError(
            f"--export-space: {model} holds no .safetensors file, and others are not published; "
            "fine-tune it and export the run",
            code="recipe.unsupported",
        )
    target.mkdir()
    shutil.copyfile(folder / "config.json", target / "config.json")
    shutil.copyfile(weights[0], target / "model.safetensors")


def _copy_package(target: Path) -> None:
    """Copy this package without the weights that ship with it, and its license if it is there."""
    source = Path(__file__).resolve().parents[1]
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "embedded")
    shutil.copytree(source, target, ignore=unwanted)
    places = [source.parent / "LICENSE"]
    places += sorted(source.parent.glob("finetune-*.dist-info/licenses/LICENSE"))
    for place in places:
        if place.is_file():
            shutil.copyfile(place, target / "LICENSE")
            return


def _requirements() -> str:
    """The packages at the versions that are installed here, with which the export was tried."""
    lines = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _NEEDED]
    return "\n".join([*lines, f"gradio=={gradio().__version__}"]) + "\n"


def _card(
    title: str, version: str, reference: str | None, licence: str | None, *, several: bool = False
) -> str:
    head: dict[str, Any] = {
        "title": title,
        "colorFrom": "yellow",
        "colorTo": "red",
        "sdk": "gradio",
        "sdk_version": version,
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "app_file": "app.py",
        "pinned": False,
    }
    head |= licence_keys(licence)
    if reference is not None and is_hub_name(reference):
        head["models"] = [reference.split(":", 1)[1].partition("@")[0]]
    where = f"`{reference}`" if reference else "the folder `model`"
    shown = "its labels" if several else "the five most likely classes"
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [
        f"# {html.escape(' '.join(title.split()))}",
        "",
        f"Drop a picture: the page shows {shown} and where the model looked.",
        "",
        f"The model is {where}. To run it elsewhere: `pip install -r requirements.txt`, then "
        "`python app.py`.",
        "",
        f"The folder `finetune` is a copy of the program that wrote this, version "
        f"{__version__}, under the Apache License 2.0.",
        "",
    ]
    return "\n".join(lines)

"""The files of a push: an allow-list, without secrets, with a card that the hub accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import ModelCard, get_session
from huggingface_hub.utils import hf_raise_for_status
from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from finetune.console import say
from finetune.errors import CheckpointError, HubError, WeightsError
from finetune.hub.client import ANSWER_SECONDS, clean, parsed
from finetune.models.adapter import ADAPTER_FILES
from finetune.publish.artifacts import PUBLISHED
from finetune.publish.repository import Hub
from finetune.run.directory import RunDir
from finetune.run.record import read_record

__all__ = ["adapter_of", "check_card", "check_weights", "is_run", "published", "refuse_secrets"]

NEEDED = ("config.json", "model.safetensors")


def is_run(folder: Path) -> bool:
    """True for a run directory, False for a folder with a model.

    Raises: CheckpointError for a run that is not finished, WeightsError for anything else.
    """
    if (folder / "run.json").is_file():
        status = read_record(RunDir(folder)).get("status", "unknown")
        has_model = all((folder / "model" / name).is_file() for name in NEEDED)
        if not status.startswith("done") or not has_model:
            what = "has no model/" if status == "done" else f"is not finished ({status})"
            raise CheckpointError(
                f"{folder}: {what}; continue the run with --resume, then push",
                code="checkpoint.not_finished",
            )
        return True
    if not all((folder / name).is_file() for name in NEEDED):
        raise WeightsError(
            f"{folder}: no run directory, and no folder with {' and '.join(NEEDED)}; give the "
            "folder that `finetune train` wrote",
            code="weights.not_found",
        )
    return False


def published(folder: Path, names: Collection[str] = PUBLISHED) -> dict[str, Path]:
    """List the files to publish, by their name on the hub.

    Args:
        folder: with a model, or with an adapter.
        names: that it may hold.
    Raises: HubError for a link that leads out of the folder, or to a hidden file.
    """
    top = folder.resolve()
    files = {name: folder / name for name in names if (folder / name).is_file()}
    for name, path in files.items():
        real = path.resolve()
        if real.parent != (top / name).parent or (path.is_symlink() and real.name.startswith(".")):
            raise HubError(
                f"{path}: is a link that leads out of the folder or to a hidden file; copy the "
                "file itself",
                code="hub.not_pushable",
            )
    sent = {name.partition("/")[0] for name in files}
    others = sorted({path.name for path in folder.iterdir()} - sent)
    if others:
        say(f"{folder}: not pushed, as it is no part of a model: {', '.join(others)}")
    return files


def adapter_of(folder: Path) -> Path:
    """The folder of the adapter beside a model. Raises: WeightsError if there is none."""
    if not all((folder / "adapter" / name).is_file() for name in ADAPTER_FILES):
        raise WeightsError(
            f"{folder}: has no adapter; train with model.adapter, or push without --adapter",
            code="weights.not_found",
        )
    return folder / "adapter"


def check_weights(files: Mapping[str, Path]) -> None:
    """Refuse, under the name of weights, a file that others could not load, or should not."""
    path = next(path for path in files.values() if path.suffix == ".safetensors")
    try:
        with safe_open(path, framework="numpy") as weights:  # reads and checks the header
            weights.keys()
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: is no safetensors file, or a damaged one ({error}); train or download the "
            "model again",
            code="weights.damaged",
        ) from None


def refuse_secrets(files: Mapping[str, Path], text: str, run: Path, hub: Hub) -> None:
    """Look for what must not leave this machine: tokens, and where on it things are."""
    texts = {"the message": text.encode(), **{name: _readable(p) for name, p in files.items()}}
    home = Path.home()
    places = {str(p) for p in (home, home.resolve(), run.absolute(), run.resolve())} - {"/"}
    for name, content in texts.items():
        tokens = re.search(rb"\bhf_[A-Za-z0-9]{20,}\b", content)
        if tokens or (hub.token and hub.token.encode() in content):
            raise HubError(
                f"{name}: holds a token of the hub; remove it, and make a new token",
                code="hub.holds_secret",
            )
        for place in sorted(places, key=len, reverse=True):
            for form in (place, json.dumps(place)[1:-1]):
                # not a part of a longer name or of an address
                if re.search(rb"(?<![\w./~-])" + re.escape(form.encode()) + rb"(?![\w-])", content):
                    raise HubError(
                        f"{name}: names the local path {place}, which others need not know; "
                        "remove it, then push",
                        code="hub.holds_path",
                    )


def _readable(path: Path) -> bytes:
    """Read the text of a file; of weights, their header."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            return file.read(min(int.from_bytes(file.read(8), "little"), 1 << 24))
        return file.read()


def check_card(hub: Hub, files: Mapping[str, Path]) -> None:
    """Refuse a card that the hub would not accept, in its own words."""
    if "README.md" not in files:
        return
    path = files["README.md"]
    problem = ""
    try:
        text = path.read_text(encoding="utf-8")
        ModelCard(text)
    except (ValueError, YAMLError) as error:  # also for bytes that are no text
        problem = clean(str(error), hub.token)
    if not problem:
        problem = hub.call("checking the card", _ask_about_card, hub, text)
    if problem:
        raise HubError(
            f"{path}: the hub does not accept this card: {problem}; mend its head",
            code="hub.refused_card",
        )


def _ask_about_card(hub: Hub, text: str) -> str:
    # ModelCard.validate asks the public hub in older versions, whatever HF_ENDPOINT says
    url, token = f"{hub.api.endpoint}/api/validate-yaml", hub.token
    question = {"content": text, "repoType": "model"}
    response = get_session().post(url, json=question, timeout=ANSWER_SECONDS)
    if response.status_code != 400:
        hf_raise_for_status(response)
    answer = parsed(response, hub.repository)
    errors, warnings = (
        clean("; ".join(str(one.get("message")) for one in answer.get(kind) or []), token)
        for kind in ("errors", "warnings")
    )
    if warnings:
        say(f"README.md: the hub remarks: {warnings}")
    return errors or ("it gives no reason" if response.status_code == 400 else "")

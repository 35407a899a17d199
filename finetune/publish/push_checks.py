"""Select the files to push from an allowlist, and check weights, secrets and model card."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import RepoCard, constants, get_session, get_token
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from finetune.errors import CheckpointError, HubError, WeightsError, holds_secret
from finetune.files import file_sha256, is_outside_link
from finetune.hub.client import call_hub, redact
from finetune.log import logger
from finetune.models.lora import ADAPTER_FILES
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.run.directory import RunDir, resume_command
from finetune.run.integrity import MAX_LARGE_BYTES, load_json
from finetune.run.record import read_record

__all__ = [
    "adapter_folder",
    "check_card",
    "check_no_secrets",
    "check_results",
    "check_weights",
    "files_to_push",
    "is_run_dir",
]

REQUIRED_FILES = ("config.json", "model.safetensors")
_SHA256_IN_CARD = re.compile(r"model\.safetensors: sha256 `([0-9a-f]{64})`")
_LOADED_IN_CARD = re.compile(r"create_model\(['\"]hf-hub:([\w.-]+/[\w.-]+)")


def is_run_dir(folder: Path) -> bool:
    """Return True for a run directory, False for a model folder.

    Raises: CheckpointError if the run is not finished; WeightsError for any other folder.
    """
    if (folder / "run.json").is_file():
        status = read_record(RunDir(folder)).get("status", "unknown")
        has_model = all((folder / "model" / name).is_file() for name in REQUIRED_FILES)
        if not status.startswith("done") or not has_model:
            what = "has no model/" if status == "done" else f"is not finished ({status})"
            raise CheckpointError(
                f"{folder}: {what}; continue the run: {resume_command(folder)}",
                code="checkpoint.not_finished",
            )
        return True
    if not all((folder / name).is_file() for name in REQUIRED_FILES):
        raise WeightsError(
            f"{folder}: this is neither a run directory nor a folder with "
            f"{' and '.join(REQUIRED_FILES)}; give the folder that `finetune train` wrote",
            code="weights.not_found",
        )
    return False


def files_to_push(
    folder: Path, allowed_names: Collection[str] = PUBLISHED_FILES
) -> dict[str, Path]:
    """Return the files to push, by their name on the Hub.

    Args:
        folder: a folder with a model or an adapter.
        allowed_names: names of the files to push, if they exist.
    Raises: HubError for a symlink that points outside the folder or to a hidden file.
    """
    files = {name: folder / name for name in allowed_names if (folder / name).is_file()}
    for path in files.values():
        if is_outside_link(path, folder):
            raise HubError(
                f"{path}: this symlink points outside the folder or to a hidden file; replace it "
                "with a copy",
                code="hub.not_pushable",
            )
    sent = {name.partition("/")[0] for name in files}
    others = sorted({path.name for path in folder.iterdir()} - sent)
    if others:
        logger.info(f"{folder}: not part of a model and therefore not pushed: {', '.join(others)}")
    return files


def adapter_folder(folder: Path) -> Path:
    """Return the adapter's folder inside a model folder. Raises: WeightsError if it is missing."""
    if not all((folder / "adapter" / name).is_file() for name in ADAPTER_FILES):
        raise WeightsError(
            f"{folder}: this model has no adapter; train with model.adapter, or omit --adapter",
            code="weights.not_found",
        )
    return folder / "adapter"


def check_weights(files: Mapping[str, Path]) -> None:
    """Check that weights and adapter are valid safetensors files. Raises: WeightsError."""
    for name, path in files.items():
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="numpy") as weights:  # this parses the header
                weights.keys()
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{name}: not a valid safetensors file ({error}); train or download the model "
                "again",
                code="weights.damaged",
            ) from None


def check_results(files: Mapping[str, Path]) -> None:
    """Check that results.json, if it has a sha256 of weights, describes the weights to push.

    Raises: WeightsError.
    """
    if not {"results.json", "model.safetensors"} <= files.keys():
        return
    path = files["results.json"]
    try:
        results = load_json(path, max_bytes=MAX_LARGE_BYTES)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"results.json: cannot be read, or is not valid JSON ({error}); restore it from a "
            "copy, or remove it",
            code="weights.damaged",
        ) from None
    recorded = results.get("model_sha256") if isinstance(results, dict) else None
    if recorded is not None:
        _check_same_sha256(path.name, recorded, file_sha256(files["model.safetensors"]))


def check_no_secrets(files: Mapping[str, Path], commit_message: str, run_path: Path) -> None:
    """Check that the files and the commit message contain no secret and no local path.

    Raises: HubError.
    """
    contents = {
        "the commit message": commit_message.encode(),
        **{name: _searchable_bytes(path) for name, path in files.items()},
    }
    home = Path.home()
    folders = {
        str(path) for path in (home, home.resolve(), run_path.absolute(), run_path.resolve())
    }
    token = get_token()
    for name, content in contents.items():
        text = content.decode("utf-8", "replace")
        if holds_secret(text) or (token and token in text):
            raise HubError(
                f"{name}: contains a token, password, private key or signed URL; remove it, "
                "revoke it and create a new one",
                code="hub.holds_secret",
            )
        for folder in sorted(folders - {"/"}, key=len, reverse=True):
            for spelling in (folder, json.dumps(folder)[1:-1]):
                # a path that is part of a longer name or of a web URL is allowed
                start = r"(?:(?<![\w./~-])|(?<=file://)|(?<=file://localhost))"
                if spelling in text and re.search(rf"{start}{re.escape(spelling)}(?![\w-])", text):
                    raise HubError(
                        f"{name}: contains the local path {folder}, which should stay private; "
                        "remove it, then push again",
                        code="hub.holds_path",
                    )


def _searchable_bytes(path: Path) -> bytes:
    """Return the bytes of a file, or the header of a safetensors file."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            return file.read(min(int.from_bytes(file.read(8), "little"), 1 << 24))
        return file.read()


def check_card(repository: str, files: Mapping[str, Path], *, repo_type: str = "model") -> None:
    """Check that the card has the sha256 of the weights, and that the Hub accepts its metadata.

    Warns if its code loads the model of another repository, to which the folder was pushed before.

    Raises: WeightsError for the sha256 of other weights; HubError with the Hub's reason.
    """
    if "README.md" not in files:
        return
    path = files["README.md"]
    try:
        text = path.read_text(encoding="utf-8")
        if (match := _SHA256_IN_CARD.search(text)) and "model.safetensors" in files:
            _check_same_sha256(path.name, match[1], file_sha256(files["model.safetensors"]))
        if other := set(_LOADED_IN_CARD.findall(text)) - {repository}:
            logger.warning(
                f"README.md: its code loads {', '.join(sorted(other))}, not {repository}; correct "
                "it, or push the run itself, which rewrites the card"
            )
        RepoCard(text)
        errors, warnings = call_hub(repository, _validate_card_on_hub, text, repo_type)
    except (ValueError, YAMLError) as error:  # ValueError also covers bytes that are not UTF-8
        errors, warnings = redact(str(error)), ""
    if errors:
        raise HubError(
            f"README.md: the hub does not accept this card: {errors}; fix its YAML header",
            code="hub.refused_card",
        )
    if warnings:
        logger.info(f"README.md: the hub warns: {warnings}")


def _check_same_sha256(name: str, recorded: str, sha256: str) -> None:
    if sha256 != recorded:
        raise WeightsError(
            f"{name}: describes weights with sha256 {recorded}, but model.safetensors has "
            f"{sha256}; put the files of one model into the folder",
            code="weights.damaged",
        )


def _validate_card_on_hub(text: str, repo_type: str) -> tuple[str, str]:
    """Return the Hub's errors and warnings about a card."""
    # in older versions, ModelCard.validate ignores HF_ENDPOINT and asks huggingface.co
    response = get_session().post(
        f"{constants.ENDPOINT}/api/validate-yaml",
        json={"content": text, "repoType": repo_type},
        headers=build_hf_headers(),
    )
    if response.status_code != 400:
        hf_raise_for_status(response)
    reply = response.json()
    errors, warnings = (
        redact("; ".join(str(one["message"]) for one in reply.get(kind) or []))
        for kind in ("errors", "warnings")
    )
    return errors or ("the hub gives no reason" if response.status_code == 400 else ""), warnings

"""Checksums of a saved model in its config.json: written by `save_model`, verified by every reader.

The entry `checksums` of config.json has the sha256 of each file that was saved with config.json,
of recipe, results, plots and the results in the cards once they are written, and of the other
entries of config.json. So damage is found wherever the folder is copied. The run.json of a run also
has the sha256 of the weights, which reveals a model/ of another run. A folder without the entry
`checksums`, such as one from timm, is not verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import WeightsError
from finetune.files import file_sha256, read_untrusted_json, write_atomically

__all__ = [
    "DESCRIPTION_FILES",
    "MANIFEST",
    "add_checksums",
    "add_description_checksums",
    "json_sha256",
    "read_checkpoint_checksums",
    "read_checksums",
    "verify_card_results",
    "verify_checksum",
    "verify_model_folder",
    "weights_hashes",
    "with_checksums",
]

WEIGHTS_FILE = "model.safetensors"
MANIFEST = "manifest.json"  # of a checkpoint: sizes and sha256 of its files
# Files whose checksums are stored, if the folder has them.
_CHECKED_FILES = (
    WEIGHTS_FILE,
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
)
# Files that describe the weights, and are written after them. They may be removed.
DESCRIPTION_FILES = (
    *("recipe.yaml", "results.json"),
    *("curves.png", "confusion.png", "reliability.png"),
)
# Of a card, only the parts with results have a checksum; its other text may be edited.
_CARDS = ("README.md", "adapter/README.md")
_CARD_METADATA = re.compile(r"---\n(.*?)\n---\n", re.S)
_CARD_SECTIONS = re.compile(r"^## +(?:Results|Export|Claims) *\n(?:(?!## ).*\n)*", re.M)
_ADVICE = (
    "restore it from a copy or download it again; train --resume rebuilds the model/ of a run from "
    "its checkpoint"
)


def add_checksums(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of config.json with the checksums of itself and of the folder's files.

    Args:
        config: the content; an old entry `checksums` is replaced.
        folder: the folder with the weights and, if there is one, the adapter.
    """
    files = _hash_files(folder, (*_CHECKED_FILES, *DESCRIPTION_FILES))
    return with_checksums(config, files | _checksums_of_cards(config.get("checksums", {})))


def with_checksums(config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of config.json with the checksums of itself and of files.

    Args:
        config: the content; an old entry `checksums` is replaced.
        files: result of `read_checksums`.
    """
    content = json.loads(json.dumps(config))  # as a reader gets it, for example with lists
    return {**config, "checksums": {**files, "config.json": _config_sha256(content, files)}}


def add_description_checksums(folder: Path) -> None:
    """Replace the checksums of DESCRIPTION_FILES in a folder's config.json, if it has checksums.

    Those of the results in the cards are replaced, too. The checksums of the weights stay, so that
    damage to the weights is still found.

    Raises: WeightsError if config.json was changed.
    """
    stored = read_checksums(folder, source=str(folder))
    if not stored:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    files = {name: sha256 for name, sha256 in stored.items() if name not in DESCRIPTION_FILES}
    files |= {**_hash_files(folder, DESCRIPTION_FILES), **_hash_card_results(folder)}
    config = with_checksums(config, files)
    # not written in place: the file may be a hard link of the one that is replaced
    write_atomically(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of the files that exist."""
    return {name: file_sha256(folder / name) for name in names if (folder / name).is_file()}


def _hash_card_results(folder: Path) -> dict[str, str]:
    """Return the sha256 of the results in each card that has results, by "NAME: results".

    It also covers the temperature and the validation scores of config.json, which a card describes.
    """
    hashes = {}
    config = read_untrusted_json(folder / "config.json", str(folder / "config.json"))
    fitted = {key: config.get(key) for key in ("calibration", "validation_scores")}
    for name in _CARDS:
        if (path := folder / name).is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            metadata: Any = {}
            if match := _CARD_METADATA.match(text):
                with contextlib.suppress(yaml.YAMLError):  # the Hub refuses it
                    metadata = yaml.safe_load(match[1])
            index = metadata.get("model-index") if isinstance(metadata, dict) else None
            content = {"index": index, "sections": _CARD_SECTIONS.findall(text)}
            if any(content.values()):
                hashes[f"{name}: results"] = json_sha256(
                    json.loads(json.dumps({**content, **fitted}, default=str))
                )
    return hashes


def _checksums_of_cards(stored: Mapping[str, str]) -> dict[str, str]:
    names = {f"{name}: results" for name in _CARDS}
    return {name: sha256 for name, sha256 in stored.items() if name in names}


def read_checksums(folder: Path, *, source: str) -> dict[str, str]:
    """Verify config.json, and return the checksums of the other files, which are not read.

    Args:
        folder: the model folder.
        source: name of the model as the user gave it, for messages.
    Returns: {file name: sha256}; empty if config.json has no checksums.
    Raises: WeightsError if config.json was changed, or if the folder is the model/ of a run whose
        run.json has the sha256 of other weights.
    """
    content = read_untrusted_json(folder / "config.json", f"{source}: config.json")
    stored = content.get("checksums") if isinstance(content, dict) else None
    files = dict(stored) if isinstance(stored, dict) else {}
    if stored is not None and files.pop("config.json", None) != _config_sha256(content, files):
        raise WeightsError(
            f"{source}: config.json was changed after it was written (its sha256 differs); "
            f"{_ADVICE}; to edit it yourself, copy the folder and remove its entry 'checksums'",
            code="weights.damaged",
        )
    recorded = _weights_sha256_of_run(folder)
    if recorded not in (None, files.get(WEIGHTS_FILE)):
        raise WeightsError(
            f"{source}: model/ is not the one that this run wrote (the sha256 of "
            f"{WEIGHTS_FILE} is {recorded} in run.json, {files.get(WEIGHTS_FILE)} in config.json); "
            f"{_ADVICE}",
            code="weights.damaged",
        )
    return files


def weights_hashes(provenance: Mapping[str, Any]) -> list[str | None]:
    """Return the sha256 of a model's weights, and that of its network and preprocessing.

    Args:
        provenance: `provenance` of a built model.
    """
    return [provenance.get(key) for key in ("sha256", "config_sha256")]


def read_checkpoint_checksums(folder: Path) -> dict[str, str]:
    """Return {file name: sha256} of the files of a checkpoint; empty without a manifest.

    Raises: WeightsError if the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    content = read_untrusted_json(path, str(path))
    try:
        files = content["files"]
        if content["sha256"] != json_sha256(files):
            raise ValueError("it was changed after it was written")
        return {name: str(entry["sha256"]) for name, entry in files.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: is damaged ({type(error).__name__}: {error}); {_ADVICE}",
            code="weights.damaged",
        ) from None


def verify_checksum(name: str, sha256: str, checksums: Mapping[str, str], *, source: str) -> None:
    """Compare the sha256 of a file with its checksum.

    Args:
        name: name of the file in the folder.
        sha256: sha256 of the file.
        checksums: result of `read_checksums`; a file that it does not name is accepted.
        source: name of the model as the user gave it, for messages.
    Raises: WeightsError if the two differ.
    """
    if sha256 != (expected := checksums.get(name, sha256)):
        raise WeightsError(
            f"{source}: {name} is damaged or belongs to another model (its sha256 is {sha256}, "
            f"{expected} was recorded); {_ADVICE}",
            code="weights.damaged",
        )


def verify_model_folder(folder: Path, *, source: str) -> None:
    """Verify config.json and all files that have a checksum.

    Args: same as for `read_checksums`.
    Raises: WeightsError naming the file that was changed, is missing, or was added.
    """
    checksums = read_checksums(folder, source=source)
    for name in _CHECKED_FILES:
        if name not in checksums:
            if checksums and (folder / name).is_file():
                raise WeightsError(
                    f"{source}: {name} is not of this model (config.json has no sha256 of it); "
                    "remove the file, or restore the whole folder from a copy",
                    code="weights.damaged",
                )
            continue
        if not (folder / name).is_file():
            raise WeightsError(f"{source}: {name} is missing; {_ADVICE}", code="weights.damaged")
        verify_checksum(name, file_sha256(folder / name), checksums, source=source)
    for name, sha256 in _hash_files(folder, DESCRIPTION_FILES).items():
        verify_checksum(name, sha256, checksums, source=source)


def verify_card_results(folder: Path, *, source: str) -> None:
    """Raise WeightsError if the results in a card are not those that were written with the model.

    The same if a temperature was fitted after the card was written. A card without results is
    accepted.

    Args: same as for `read_checksums`.
    """
    stored = _checksums_of_cards(read_checksums(folder, source=source))
    for key, sha256 in _hash_card_results(folder).items():
        if stored.get(key, sha256) != sha256:
            raise WeightsError(
                f"{folder / key.partition(':')[0]}: its results were changed after it was written, "
                "or the temperature of the model was fitted again; restore both from a copy, or "
                "remove the sections with results and the model-index from the card",
                code="weights.damaged",
            )


def json_sha256(content: Any) -> str:
    """Return the sha256 of plain data, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _config_sha256(content: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Hash the content of a config.json, with `files` as its checksums."""
    return json_sha256({**content, "checksums": files})


def _weights_sha256_of_run(folder: Path) -> Any:
    """Return the sha256 that run.json has for this model/; None without one.

    While a run proceeds, run.json has none until its model/ is written.
    """
    for path in (folder.absolute(), folder.resolve()):  # either may be a link to the other
        record_path = path.parent / "run.json"
        if path.name == "model" and record_path.is_file():
            record = read_untrusted_json(record_path, str(record_path))
            return record.get("model_sha256") if isinstance(record, dict) else None
    return None

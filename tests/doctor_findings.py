"""Write the findings of `finetune data doctor` by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.data.source import Source

__all__ = ["class_problem", "image_of", "write_findings"]


def image_of(source: Source, split: str, index: int, **more: Any) -> dict[str, Any]:
    """Describe an image as doctor.json does."""
    opened = source.splits[split]
    digest = opened.digests[index].tobytes().hex()
    return {"split": split, "index": index, "path": opened.name_of(index), "digest": digest, **more}


def class_problem(kind: str, classes: list[str], score: float) -> dict[str, Any]:
    """Describe a class problem as doctor.json does."""
    sizes = [10 + number for number in range(len(classes))]
    examples = [[name, ["train/0", "train/3"]] for name in classes]
    return {
        **{"kind": kind, "classes": classes, "score": score, "images": 9},
        **{"sizes": sizes, "examples": examples},
    }


def write_findings(
    folder: Path, source: Source, *, num_errors: int = 3, **changes: Any
) -> dict[str, Any]:
    """Write doctor.json: label errors, and a finding of each other kind.

    Args:
        folder: the folder to write to.
        source: at least 4 training images, 2 test images and 2 classes.
        num_errors: number of label errors; they repeat the training images if there are more.
        changes: keys of doctor.json to replace.
    Returns: the content of doctor.json.
    """
    train, names = source.splits["train"], source.class_names
    similar = [f"train/{index}" for index in range(4)]
    errors = []
    for number in range(num_errors):
        index = number % len(train)
        given = [names[label] for label in train.class_indices(index)]
        others = [name for name in names if name not in given]
        errors.append(
            image_of(source, "train", index)
            | {
                "given": given if train.is_multilabel else given[0],
                "suggested": others[:1] if train.is_multilabel else others[number % len(others)],
                "score": round(1 - number / (num_errors + 1), 4),
                "similar": {"given": similar, "suggested": similar[::-1]},
            }
        )
    last = len(train) - 1
    content = {
        "source": source.name,
        "classes": names,
        "multilabel": train.is_multilabel,
        "weights": ["embedded:vit_nano"],
        "seen_in_training": {},
        "splits": {
            name: {"images": len(split), "fingerprint": split.fingerprint}
            for name, split in source.splits.items()
        },
        "label_errors": errors,
        "duplicates": [[image_of(source, "train", index) for index in (1, 2, last)]],
        "leaks": [[image_of(source, "train", last), image_of(source, "test", 0)]],
        "outliers": [image_of(source, "train", 3, given=names[0], reason="blank", score=1.0)],
        "class_problems": [
            class_problem("same", names[:2], score=0.4),
            class_problem("too_small", names[-1:], score=1.0),
        ],
        "groups": [],
        "expected": {"label_errors": {"count": 12.3, "low": 6, "high": 20}},
        "seconds": 1.0,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doctor.json").write_text(json.dumps(content))
    return content

"""Run as a process of its own: load models from the hub with each client and tell what they give.

    python hub_loaders.py JOB.json OUT.json

The job holds `models` ([name, revision or null]), `images` (a .pt file with input tensors) and
`picture` (a file that each client prepares by itself). A client finds nothing in the cache, and
has imported nothing of those that come later: timm is alone, and this package is the last.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

# B batch, C channels, H W pixels


def by_timm(name: str, revision: str | None, images_BCHW: Any, picture: str) -> dict[str, Any]:
    import timm
    from huggingface_hub import hf_hub_download

    where = f"hf-hub:{name}" + (f"@{revision}" if revision else "")
    model = timm.create_model(where, pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    prepared = timm.data.create_transform(**config, is_training=False)(Image.open(picture))
    with torch.inference_mode():
        logits, shown = model(images_BCHW), model(prepared[None])
    several = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text())
    scores = shown.sigmoid() if several.get("problem_type") else shown.softmax(1)
    return {
        "logits": logits,
        "labels": model.pretrained_cfg["label_names"],
        "preprocessing": config,
        "prepared": prepared,
        "confidences": scores[0],
    }


def by_transformers(
    name: str, revision: str | None, images_BCHW: Any, picture: str
) -> dict[str, Any]:
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    model = AutoModelForImageClassification.from_pretrained(name, revision=revision).eval()
    processor = AutoImageProcessor.from_pretrained(name, revision=revision)
    with torch.inference_mode():
        logits = model(images_BCHW).logits
    labels = [model.config.id2label[index] for index in range(logits.shape[1])]
    classify = pipeline("image-classification", model=name, revision=revision, device="cpu")
    scores = {row["label"]: row["score"] for row in classify(picture, top_k=len(labels))}
    return {
        "logits": logits,
        "labels": labels,
        "preprocessing": processor.data_config,
        "processor": type(processor).__name__,
        "prepared": processor(Image.open(picture), return_tensors="pt")["pixel_values"][0],
        "confidences": [scores[label] for label in labels],
    }


def by_finetune(name: str, revision: str | None, images_BCHW: Any, picture: str) -> dict[str, Any]:
    from finetune import Classifier
    from finetune.data.decode import decode
    from finetune.models.build import build

    where = f"hf-hub:{name}" + (f"@{revision}" if revision else "")
    model = Classifier.load(where, device="cpu")
    told = build(where).preprocessing
    row = model.predict(picture, top_k=len(model.class_names))[0]
    scores = {one["label"]: one["confidence"] for one in row["predictions"]}
    pixels_CHW = torch.from_numpy(decode(picture)).permute(2, 0, 1)
    return {
        "logits": model.logits(images_BCHW),
        "labels": model.class_names,
        "preprocessing": {**vars(told), "input_size": [3, *told.image_size]},
        "prepared": model.pipeline(pixels_CHW[None])[0],
        "confidences": [scores[label] for label in model.class_names],
    }


CLIENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "timm": by_timm,
    "transformers": by_transformers,
    "finetune": by_finetune,
}


def imported() -> set[str]:
    """Those of the clients that this process has imported."""
    return CLIENTS.keys() & sys.modules.keys()


def main() -> None:
    gc.disable()  # it would look through imports again and again
    from huggingface_hub import constants

    setup, out = sys.argv[1:]
    asked, found = json.loads(Path(setup).read_text()), {}
    images_BCHW = torch.load(asked["images"], weights_only=True)
    cache, earlier = Path(constants.HF_HUB_CACHE), set[str]()
    for client, load in CLIENTS.items():
        if importlib.util.find_spec(client) is None:
            continue
        assert imported() <= earlier, imported()
        assert not cache.exists(), "it is not the cold cache"
        found[client] = [
            load(name, revision, images_BCHW, asked["picture"])
            for name, revision in asked["models"]
        ]
        assert any(cache.rglob("model.safetensors")), "it was not the cold cache"
        shutil.rmtree(cache)
        earlier.add(client)
    as_list = lambda value: value.tolist()  # noqa: E731
    Path(out).write_text(json.dumps(found, default=as_list))


if __name__ == "__main__":
    main()

"""Load models from the hub with timm, transformers and finetune, and write their outputs.

    python hub_clients.py JOB.json OUT.json

Run as a process of its own. The job holds `models` ([name, revision or null, clients]), `images` (a
.pt file with input tensors) and `picture` (an image file that each client preprocesses itself).
Each client starts with an empty cache, and before the clients after it are imported: timm first,
finetune last. timm and transformers also run their code of the model card, where finetune cannot be
imported.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

# B batch, C channels, H W pixels


def load_with_timm(
    name: str, revision: str | None, images_BCHW: Any, picture: str
) -> dict[str, Any]:
    import timm
    from huggingface_hub import hf_hub_download

    model_name = f"hf-hub:{name}" + (f"@{revision}" if revision else "")
    model = timm.create_model(model_name, pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    prepared = timm.data.create_transform(**config, is_training=False)(Image.open(picture))
    with torch.inference_mode():
        logits, prepared_logits = model(images_BCHW), model(prepared[None])
    hub_config = json.loads(
        Path(hf_hub_download(name, "config.json", revision=revision)).read_text()
    )
    scores = (
        prepared_logits.sigmoid() if hub_config.get("problem_type") else prepared_logits.softmax(1)
    )
    return {
        "logits": logits,
        "labels": model.pretrained_cfg["label_names"],
        "preprocessing": config,
        "prepared": prepared,
        "confidences": scores[0],
    }


def load_with_transformers(
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


def load_with_finetune(
    name: str, revision: str | None, images_BCHW: Any, picture: str
) -> dict[str, Any]:
    from finetune import Classifier
    from finetune.data.decode import decode_image
    from finetune.models.build import build_model

    model_name = f"hf-hub:{name}" + (f"@{revision}" if revision else "")
    model = Classifier.load(model_name, device="cpu")
    preprocessing = build_model(model_name).preprocessing
    row = model.predict(picture, top_k=len(model.class_names))[0]
    scores = {one["label"]: one["confidence"] for one in row["predictions"]}
    pixels_CHW = torch.from_numpy(decode_image(picture)).permute(2, 0, 1)
    return {
        "logits": model.logits(images_BCHW),
        "labels": model.class_names,
        "preprocessing": {**vars(preprocessing), "input_size": [3, *preprocessing.image_size]},
        "prepared": model.pipeline(pixels_CHW[None])[0],
        "confidences": [scores[label] for label in model.class_names],
    }


CLIENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "timm": load_with_timm,
    "transformers": load_with_transformers,
    "finetune": load_with_finetune,
}


def imported_clients() -> set[str]:
    """Return the clients that this process has imported."""
    return {client for client in CLIENTS if sys.modules.get(client) is not None}


def run_card_code(client: str, name: str) -> None:
    """Run the code of a model card that imports the client; it reads photo.jpg."""
    from huggingface_hub import hf_hub_download

    card = Path(hf_hub_download(name, "README.md")).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if re.match(rf"(import|from) {client}\b", block)]
    exec(code, {})


def main() -> None:
    gc.disable()  # it would scan the imported modules again and again
    from huggingface_hub import constants

    job_path, out_path = sys.argv[1:]
    job, results = json.loads(Path(job_path).read_text()), {}
    images_BCHW = torch.load(job["images"], weights_only=True)
    cache, finished = Path(constants.HF_HUB_CACHE), set[str]()
    shutil.copyfile(job["picture"], "photo.jpg")
    sys.modules["finetune"] = None  # type: ignore[assignment]
    for client, load in CLIENTS.items():
        if client == "finetune":
            del sys.modules["finetune"]
        if importlib.util.find_spec(client) is None:
            continue
        assert imported_clients() <= finished, imported_clients()
        assert not cache.exists(), "the cache is not empty before the first load"
        results[client] = []
        for name, revision, clients in job["models"]:
            output = None
            if client in clients:
                output = load(name, revision, images_BCHW, job["picture"])
                if revision is None and client != "finetune":
                    run_card_code(client, name)
            results[client].append(output)
        assert any(cache.rglob("model.safetensors")), "the load did not use the cache"
        shutil.rmtree(cache)
        finished.add(client)
    to_list = lambda value: value.tolist()  # noqa: E731
    Path(out_path).write_text(json.dumps(results, default=to_list))


if __name__ == "__main__":
    main()

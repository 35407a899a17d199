"""A pushed model in fresh processes: timm, transformers and finetune match the training run."""

# B batch, C channels, H W pixels, K classes

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import HubServer, point_clients_at
from huggingface_hub import ModelCard, constants
from PIL import Image

from finetune import Classifier, load_recipe, train
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.publish.push import push

# test_train_and_push.py runs the code of a card, tests/models/test_save.py compares the logits
pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "hf_writewritewrite"
RECIPE = """
model: {name: "embedded:vit_nano", image_size: 32}
data: {source: embedded:digits, train: resize, batch_size: 64, eval: EVAL, DATA}
optim: {name: adamw, lr: 1e-3, steps: 2}
run: {log_every: 1}
"""
SMALL = "num_train: 128, num_test: 40"
# The first run overrides the preprocessing of the weights; the second keeps it; the third pads.
PREPROCESSING_OVERRIDES = [
    "data.mean=[0.4, 0.5, 0.6]",
    "data.std=[0.2, 0.25, 0.3]",
    "data.interpolation=bilinear",
]
OVERRIDDEN = {
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.25, 0.3],
    "input_size": [3, 32, 32],
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "center",
}
DEFAULT = {
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "input_size": [3, 32, 32],
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "squash",
}
PADDED = {**DEFAULT, "crop_mode": "border"}
PREPROCESSING = {
    "public": DEFAULT,
    "pinned": OVERRIDDEN,
    "private": OVERRIDDEN,
    "several": PADDED,
    "transformers": DEFAULT,
}
MULTILABEL_OVERRIDES = ["data.task=multilabel", "data.source=embedded:digit_pairs"]
MODELS = list(PREPROCESSING)
CLIENTS = ["timm", "transformers", "finetune"]
COMBINATIONS = [
    (client, model)
    for client in CLIENTS
    for model in MODELS
    if (client, model) != ("timm", "transformers")
]
# The documented tolerance; the same weights in the same code give no difference at all.
TOLERANCE = 1e-5


@dataclass
class Pushed:
    """The hub, the job file of the clients, and the outputs of the runs in this process.

    Attributes:
        logits: outputs of each of MODELS, (B, K).
        confidences: class probabilities of the test image from each of MODELS.
        prepared: the test image after the preprocessing of each of MODELS, (C, H, W).
        first: the result of the first push.
    """

    hub: HubServer
    setup: Path
    labels: list[str]
    logits: dict[str, torch.Tensor]
    confidences: dict[str, list[float]]
    prepared: dict[str, torch.Tensor]
    first: dict[str, Any]


def save_test_image(path: Path) -> Path:
    """Save an image that is rich in detail, and neither square nor of the model's size."""
    pixels = np.random.default_rng(0).integers(0, 256, size=(57, 91, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((182, 114), Image.Resampling.BICUBIC).save(path)
    return path


def confidences(model: Classifier, path: Path) -> list[float]:
    row = model.predict(path, top_k=len(model.class_names))[0]
    scores = {prediction["label"]: prediction["confidence"] for prediction in row["predictions"]}
    return [scores[name] for name in model.class_names]


def save_vit_of_transformers(folder: Path) -> str:
    """Save a tiny ViT for images of 64 px with transformers. Returns: its name."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    network = transformers.AutoModelForImageClassification.from_config(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, resample=3)
    processor.save_pretrained(folder)
    return f"transformers:{folder}"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, no_plots: None) -> Iterator[Pushed]:
    """Push the first run, also as a private model, then the second to the same repository."""
    top = tmp_path_factory.mktemp("clients")
    runs = []
    run_configs = [
        ("resize(40) | center_crop(32)", PREPROCESSING_OVERRIDES),
        ("resize", []),
        ("resize(fit='contain') | center_crop(fill='mean')", MULTILABEL_OVERRIDES),
        ("resize", [f"model.name={save_vit_of_transformers(top / 'vit')}"]),
    ]
    for number, (transform_spec, overrides) in enumerate(run_configs):
        path = top / f"recipe-{number}.yaml"
        path.write_text(RECIPE.replace("EVAL", transform_spec).replace("DATA", SMALL))
        train(load_recipe(path, [f"run.seed={number}", *overrides]), top / f"run-{number}")
        runs.append(top / f"run-{number}")
    models = [Classifier.load(run, device="cpu") for run in runs]
    images_BCHW = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.save(images_BCHW, top / "images.pt")
    image = save_test_image(top / "image.png")
    pixels_BCHW = torch.from_numpy(np.asarray(Image.open(image)).copy()).permute(2, 0, 1)[None]
    with pytest.MonkeyPatch.context() as patch, HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        point_clients_at(hub, patch, top / "home", TOKEN)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        first = push(runs[0], "alice/digits")
        push(runs[0], "alice/secret", private=True)
        push(runs[1], "alice/digits")
        push(runs[2], "alice/pairs")
        push(runs[3], "alice/vit")
        targets = [
            ("alice/digits", None, CLIENTS),
            ("alice/digits", first["commit"], CLIENTS),
            ("alice/secret", None, CLIENTS),
            ("alice/pairs", None, CLIENTS),
            ("alice/vit", None, CLIENTS[1:]),
        ]
        setup = {"models": targets, "images": str(top / "images.pt"), "picture": str(image)}
        (top / "job.json").write_text(json.dumps(setup))
        classifiers = dict(zip(MODELS, (models[1], models[0], models[0], *models[2:]), strict=True))
        yield Pushed(
            hub=hub,
            setup=top / "job.json",
            labels=models[0].class_names,
            logits={name: model.logits(images_BCHW) for name, model in classifiers.items()},
            confidences={name: confidences(model, image) for name, model in classifiers.items()},
            prepared={name: model.pipeline(pixels_BCHW)[0] for name, model in classifiers.items()},
            first=first,
        )
        assert hub.server_errors == []


@pytest.fixture(scope="module")
def loaded(pushed: Pushed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Load each of MODELS, and run its card's code, with each client in turn, in a new process."""
    home = tmp_path_factory.mktemp("loaded")
    script = Path(__file__).parents[1] / "hub_clients.py"
    completed = subprocess.run(
        [sys.executable, str(script), str(pushed.setup), str(home / "out.json")],
        env={**pushed.hub.environment(home / "cache", TOKEN), "PYTHONPATH": str(REPOSITORY)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    assert TOKEN not in completed.stdout + completed.stderr
    found: dict[str, Any] = json.loads((home / "out.json").read_text())
    return found


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def client_and_model(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A client, and one of MODELS that it can load."""
    client, model_name = request.param
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    return client, model_name


@pytest.fixture
def model_name(client_and_model: tuple[str, str]) -> str:
    return client_and_model[1]


@pytest.fixture
def client_output(client_and_model: tuple[str, str], loaded: dict[str, Any]) -> dict[str, Any]:
    """The outputs of the client for the model."""
    client, model_name = client_and_model
    output: dict[str, Any] = loaded[client][MODELS.index(model_name)]
    return output


def test_every_client_gives_the_same_answers(
    client_output: dict[str, Any], pushed: Pushed, model_name: str
) -> None:
    found = torch.tensor(client_output["logits"])
    torch.testing.assert_close(found, pushed.logits[model_name], rtol=0, atol=TOLERANCE)
    assert client_output["labels"] == pushed.labels
    expected = PREPROCESSING[model_name]
    assert {key: client_output["preprocessing"][key] for key in expected} == expected
    # PIL rounds to whole levels after each axis; the pipeline does not round
    std = torch.tensor(expected["std"])[:, None, None]
    difference_CHW = torch.tensor(client_output["prepared"]) - pushed.prepared[model_name]
    assert (difference_CHW * std * 255).abs().max() < 1.0
    confidences = np.array(client_output["confidences"])
    np.testing.assert_allclose(confidences, pushed.confidences[model_name], rtol=0, atol=1e-4)


def test_pushed_models_differ(pushed: Pushed) -> None:
    """Otherwise a client that loads the wrong revision would pass."""
    difference = (pushed.logits["public"] - pushed.logits["pinned"]).abs().max()
    assert difference > 100 * TOLERANCE
    assert torch.equal(pushed.logits["pinned"], pushed.logits["private"])


def test_pushed_files_and_cards(pushed: Pushed) -> None:
    files = pushed.hub.files("alice/digits", pushed.first["commit"])
    assert set(files) == {*PUBLISHED_FILES, ".gitattributes"}
    assert set(pushed.first["files"]) == set(PUBLISHED_FILES)
    card = ModelCard(files["README.md"].decode())
    assert card.data.to_dict()["library_name"] == "timm"
    assert 'create_model("hf-hub:alice/digits"' in files["README.md"].decode()
    secret = pushed.hub.files("alice/secret")
    assert 'create_model("hf-hub:alice/secret"' in secret["README.md"].decode()
    assert len(pushed.hub.commits("alice/digits")) == 3
    card = ModelCard(pushed.hub.files("alice/vit")["README.md"].decode())
    assert card.data.to_dict()["library_name"] == "transformers"
    assert "timm.create_model" not in card.text

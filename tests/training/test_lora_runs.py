"""Adapter runs: small checkpoints, bit-exact resume, two ranks, merging and pushing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from forked_runs import (
    check_same_run,
    read_train_losses,
    train_killed_and_resumed,
)
from hub_fixtures import folder, hub, sleep_durations
from hub_server import HubServer
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from refusals import refused
from safetensors.torch import load_file

from finetune.cli.main import main
from finetune.commands.evaluate import evaluate_model
from finetune.models.build import build_model
from finetune.publish.artifacts import PUBLISHED_ADAPTER_FILES
from finetune.publish.push import push
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = """
model:
  name: embedded:vit_nano
  image_size: 16
  adapter: {kind: dora, rank: 2, targets: [qkv, fc1], dropout: 0.1}
data:
  source: embedded:digits
  train: resize | random_crop(padding=2)
  eval: resize
  batch_size: 8
  num_train: 60
  num_val: 10
  num_test: 20
optim: {lr: 1e-2, steps: 4, ema_decay: 0.5}
run: {precision: fp32, log_every: 1, eval_every: 2, save_every: 2, threads: 1}
"""
# The ranks and the micro-batches draw their own dropout.
NO_DROPOUT = ["model.adapter.dropout=0", "run.test=false"]


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("adapter") / "run"
    return out, train(make_recipe(), out)


def test_checkpoint_holds_only_trained_parameters(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    run = RunDir(finished_run[0])
    folder = run.checkpoint_folder(run.checkpoint_steps()[-1])
    for name in ("model", "ema"):
        checkpoint = load_file(folder / f"{name}.safetensors")
        assert {"head.weight", "head.bias"} < checkpoint.keys()
        assert all("lora_" in key for key in checkpoint.keys() - {"head.weight", "head.bias"})
    published = (finished_run[0] / "model" / "model.safetensors").stat().st_size
    assert 10 * (folder / "model.safetensors").stat().st_size < published


def test_killed_run_resumes_bit_exactly(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    train_killed_and_resumed(4, make_recipe(), tmp_path / "run")
    check_same_run(tmp_path / "run", finished_run[0])
    name = "model/adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (finished_run[0] / name).read_bytes()


@pytest.fixture(scope="module")
def run_without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("no-dropout") / "run"
    train(make_recipe(*NO_DROPOUT), out)
    return out


@pytest.mark.faults
def test_two_ranks_give_the_losses_of_one(run_without_dropout: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "recipe.yaml", tmp_path / "two"
    path.write_text(RECIPE)
    run_two_ranks(run_rank_command, "train", str(path), *NO_DROPOUT, "--out", str(out))
    assert read_train_losses(out) == pytest.approx(read_train_losses(run_without_dropout), abs=1e-5)
    one, two = (
        load_file(run / "model" / "adapter" / "adapter_model.safetensors")
        for run in (run_without_dropout, out)
    )
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-4)


@pytest.mark.faults  # tests/models/test_lora.py checks the gradients
def test_grad_checkpointing_and_micro_batches_change_no_loss(
    run_without_dropout: Path, tmp_path: Path
) -> None:
    overrides = ["model.grad_checkpointing=true", "data.micro_batch=4"]
    train(make_recipe(*NO_DROPOUT, *overrides), tmp_path / "run")
    assert read_train_losses(tmp_path / "run") == pytest.approx(
        read_train_losses(run_without_dropout), abs=1e-4
    )


def test_merged_model_reproduces_the_reported_metrics(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    from peft import PeftModel

    out, results = finished_run
    for split in ("val", "test"):
        measured = evaluate_model(str(out), split=split)
        assert measured["loss"] == pytest.approx(results[split]["loss"], abs=1e-6)
        assert measured["confusion"] == results[split]["confusion"]
    merged = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).eval()
    base = build_model("embedded:vit_nano", num_classes=10, image_size=16).model
    adapted = PeftModel.from_pretrained(base, str(out / "model" / "adapter")).eval()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(adapted(images), merged(images), rtol=0, atol=1e-5)


def test_predict_and_info_accept_an_adapter_run(
    finished_run: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(finished_run[0])
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image)
    assert main(["predict", out, str(image)]) == 0
    assert main(["info", out, "--json"]) == 0
    info = json.loads(capsys.readouterr().out.split("\n{", 1)[-1].join(["{", ""]))
    assert info["adapter"] == "dora"
    plan = json.loads((finished_run[0] / "run.json").read_text())["plan"]
    assert info["parameters"]["trainable"] == plan["trainable_parameters"]
    assert info["parameters"]["total"] < plan["parameters"]


def test_push_adapter_uploads_only_the_adapter(
    finished_run: tuple[Path, dict[str, Any]], hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(finished_run[0]), "alice/adapter", "--adapter"]) == 0, (
        capsys.readouterr().err
    )
    files = hub.files("alice/adapter", "main")
    assert files.keys() - {".gitattributes"} == set(PUBLISHED_ADAPTER_FILES)
    card = files["README.md"].decode()
    assert "library_name: peft" in card
    assert 'PeftModel.from_pretrained(base, "alice/adapter")' in card
    code = card.split("```python\n", 1)[1].split("model = PeftModel", 1)[0]
    exec(code, {})  # its imports and its base model exist
    assert "DoRA of rank 2" in card
    assert main(["push", str(finished_run[0]), "alice/whole"]) == 0
    names = hub.files("alice/whole", "main").keys()
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= names
    hub.commit("alice/whole", {"model.onnx": b"of the merged model"})
    assert main(["push", str(finished_run[0]), "alice/whole", "--adapter"]) == 0
    assert hub.files("alice/whole", "main").keys() == files.keys()


def test_push_adapter_fails_without_an_adapter(hub: HubServer, folder: Path) -> None:
    with refused("weights.not_found", "--adapter"):
        push(folder, "alice/net", adapter=True)


@pytest.mark.faults  # slow: benchmarks the machine
def test_estimated_checkpoint_size_matches_the_files(
    finished_run: tuple[Path, dict[str, Any]],
) -> None:
    from finetune.commands.estimate import estimate_run

    predicted = estimate_run(str(finished_run[0] / "recipe.yaml"))
    run = RunDir(finished_run[0])
    folder = run.checkpoint_folder(run.checkpoint_steps()[-1])
    actual = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert predicted["disk"]["checkpoint"] == pytest.approx(actual, rel=0.1)
    assert predicted["parameters"]["trained"] < predicted["parameters"]["total"] / 10

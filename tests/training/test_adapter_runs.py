"""Runs that train an adapter: small checkpoints, resumed to the bit, alike on two ranks, pushed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from faults_runs import killed_before, losses, weights
from hub_samples import hub, slept
from hub_server import HubServer
from PIL import Image
from ranks import command, two_ranks
from refusals import refused
from safetensors.torch import load_file

from finetune.cli.main import main
from finetune.commands.evaluate import evaluate_model
from finetune.models.build import build
from finetune.publish.artifacts import ADAPTER
from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.train import train

__all__ = ["hub", "slept"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = """
model:
  name: embedded:vit_nano
  adapter: {kind: dora, rank: 2, targets: [attention, fc1], dropout: 0.1}
data:
  source: embedded:digits
  train: resize | random_crop(padding=2)
  eval: resize
  batch_size: 16
  num_train: 160
  val_fraction: 0.2
  num_test: 64
optim: {lr: 1e-2, steps: 4, ema_decay: 0.5}
run: {precision: fp32, log_every: 1, eval_every: 2, save_every: 2, threads: 1}
"""


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("adapter") / "run"
    return out, train(recipe(), out)


def test_a_checkpoint_holds_what_is_trained_alone(whole: tuple[Path, dict[str, Any]]) -> None:
    run = RunDir(whole[0])
    folder = run.folder(run.steps()[-1])
    for name in ("model", "ema"):
        kept = load_file(folder / f"{name}.safetensors")
        assert {"head.weight", "head.bias"} < kept.keys()
        assert all("lora_" in key for key in kept.keys() - {"head.weight", "head.bias"})
    published = (whole[0] / "model" / "model.safetensors").stat().st_size
    assert 10 * (folder / "model.safetensors").stat().st_size < published


def test_a_killed_run_is_resumed_to_the_bit(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    killed_before(4, recipe(), tmp_path / "run")
    train(recipe(), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(whole[0])
    assert weights(tmp_path / "run") == weights(whole[0])
    name = "model/adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (whole[0] / name).read_bytes()


@pytest.mark.slow
def test_two_ranks_train_the_same(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, plain = tmp_path / "recipe.yaml", ["model.adapter.dropout=0"]  # it is drawn by rank
    path.write_text(RECIPE)
    train(recipe(*plain), tmp_path / "one")
    two_ranks(command, "train", str(path), *plain, "--out", str(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    one, two = (
        load_file(tmp_path / name / "model" / "adapter" / "adapter_model.safetensors")
        for name in ("one", "two")
    )
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_it_is_computed_alike_however_the_network_is(tmp_path: Path) -> None:
    plain = ["model.adapter.dropout=0"]  # which is drawn by micro-batch
    train(recipe(*plain), tmp_path / "one")
    train(recipe(*plain, "model.grad_checkpointing=true", "data.micro_batch=8"), tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_the_merged_model_is_what_was_measured(whole: tuple[Path, dict[str, Any]]) -> None:
    from peft import PeftModel

    out, results = whole
    for split in ("val", "test"):
        measured = evaluate_model(str(out), split=split)
        assert measured["loss"] == pytest.approx(results[split]["loss"], abs=1e-6)
        assert measured["confusion"] == results[split]["confusion"]
    merged = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).eval()
    base = build("embedded:vit_nano", num_classes=10).model
    adapted = PeftModel.from_pretrained(base, str(out / "model" / "adapter")).eval()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(adapted(images), merged(images), rtol=0, atol=1e-5)


def test_the_verbs_take_it(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(whole[0])
    picture = tmp_path / "picture.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture)
    assert main(["predict", out, str(picture)]) == 0
    assert main(["export", out, "--format", "torch", "--out", str(tmp_path / "net.pt2")]) == 0
    assert main(["info", out, "--json"]) == 0
    info = json.loads(capsys.readouterr().out.split("\n{", 1)[-1].join(["{", ""]))
    assert info["adapter"] == "dora"
    plan = json.loads((whole[0] / "run.json").read_text())["plan"]
    assert info["parameters"]["trainable"] == plan["trainable_parameters"]
    assert info["parameters"]["total"] < plan["parameters"]


def test_the_adapter_is_pushed_alone(
    whole: tuple[Path, dict[str, Any]], hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(whole[0]), "alice/adapter", "--adapter"]) == 0, capsys.readouterr().err
    files = hub.files("alice/adapter", "main")
    assert files.keys() - {".gitattributes"} == set(ADAPTER)
    card = files["README.md"].decode()
    assert "library_name: peft" in card
    assert 'PeftModel.from_pretrained(base, "alice/adapter")' in card
    assert "DoRA of rank 2" in card
    assert main(["push", str(whole[0]), "alice/whole"]) == 0
    names = hub.files("alice/whole", "main").keys()
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= names


def test_a_run_without_one_has_none_to_push(tmp_path: Path, hub: HubServer) -> None:
    plain = recipe("model.adapter=null", "model.freeze=backbone", "optim.steps=1")
    train(plain, tmp_path / "run")
    from finetune.publish.push import push

    with refused("weights.not_found", "--adapter"):
        push(tmp_path / "run", "alice/net", adapter=True)


def test_it_is_not_continued_on_other_weights(tmp_path: Path) -> None:
    killed_before(4, recipe(), tmp_path / "run")
    record = RunDir(tmp_path / "run").read_json("run.json") or {}
    RunDir(tmp_path / "run").write_json("run.json", {**record, "weights_sha256": "0" * 64})
    with refused("recipe.not_this_run", "embedded:vit_nano"):
        train(recipe(), tmp_path / "run", resume=True)


@pytest.mark.faults  # it measures the machine, which takes long
def test_the_forecast_counts_what_is_kept(whole: tuple[Path, dict[str, Any]]) -> None:
    from finetune.commands.plan import forecast

    predicted = forecast(str(whole[0] / "recipe.yaml"))
    run = RunDir(whole[0])
    folder = run.folder(run.steps()[-1])
    actual = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert predicted["disk"]["checkpoint"] == pytest.approx(actual, rel=0.1)
    assert predicted["parameters"]["trained"] < predicted["parameters"]["total"] / 10

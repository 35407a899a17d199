"""`finetune average`: the formulas' weights, honest figures, a folder that the verbs take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hub_fixtures import hub, sleep_durations
from hub_server import HubServer
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor

from finetune.cli.main import main
from finetune.commands.average import average_runs, interpolate_weights, mean_weights
from finetune.commands.evaluate import evaluate_model
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.train import train

__all__ = ["hub", "sleep_durations"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_pictures")

DATA = "train: resize, eval: resize, batch_size: 32, num_train: 400, num_test: 100, split_seed: 0"


def tuned(base: Path, *overrides: str) -> Recipe:
    text = f"""
model: {{name: {base}, head_init: zeros}}
data: {{source: "embedded:digits", {DATA}}}
optim: {{lr: 3e-3, steps: 30}}
run: {{precision: fp32, threads: 1}}
"""
    return parse_recipe(text, overrides=overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `base`, and the runs `a`, `b`, `c` and `kept` that began with it."""
    folder = tmp_path_factory.mktemp("runs")
    text = tiny_recipe_text(DATA, optim="lr: 3e-3, steps: 150", width=64)
    train(parse_recipe(text), folder / "first")
    base = folder / "first" / "model"
    for name, overrides in {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["run.seed=3", "optim.lr=2e-4"],
        "kept": ["model.head_init=keep"],
    }.items():
        train(tuned(base, *overrides), folder / name)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def figures(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return result


@pytest.mark.parametrize("run,head_moves", [("a", False), ("kept", True)])
def test_wise_ft_is_the_papers_formula(
    runs: Path, tmp_path: Path, run: str, head_moves: bool
) -> None:
    average_runs([str(runs / run)], alphas=[0.25], out=str(tmp_path / "out"))
    start, end = tensors(runs / "first" / "model"), tensors(runs / run / "model")
    assert start.keys() == end.keys()
    for key, tensor in tensors(tmp_path / "out").items():
        expected = 0.75 * start[key] + 0.25 * end[key]
        if key.startswith("head.") and not head_moves:
            expected = end[key]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(start[key], end[key])


def test_the_ends_are_the_models_themselves(runs: Path, tmp_path: Path) -> None:
    several = average_runs([str(runs / "a")], alphas=[1.0, 0.0, 0.5], out=str(tmp_path / "several"))
    own, tried = figures(runs / "a"), several["tried"]
    assert [row["alpha"] for row in tried] == [0.0, 0.5, 1.0]
    assert tried[2]["top1"] == own["val"]["top1"]
    assert several["val"]["top1"] == max(row["top1"] for row in tried)
    result = average_runs([str(runs / "a")], alphas=[1.0], out=str(tmp_path / "out"))
    assert result["chosen"] == "alpha 1, the fine-tuned head"
    assert result["test"]["confusion"] == own["test"]["confusion"]
    assert result["temperature"] == pytest.approx(own["temperature"], rel=1e-4)


def test_a_uniform_soup_is_the_mean(runs: Path, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    result = average_runs([str(runs / name) for name in names], out=str(tmp_path / "out"))
    states = [tensors(runs / name / "model") for name in names]
    for key, tensor in tensors(tmp_path / "out").items():
        torch.testing.assert_close(tensor, sum(state[key] for state in states) / 3)
    measured = evaluate_model(str(tmp_path / "out"), data="embedded:digits", split="test")
    assert measured["examples"] > result["test"]["examples"] == 100
    assert figures(tmp_path / "out")["average"]["runs"] == names


def test_a_greedy_soup_is_no_worse_than_its_best_run(runs: Path, tmp_path: Path) -> None:
    paths = [str(runs / name) for name in ("c", "a", "b")]
    result = average_runs(paths, greedy=True, out=str(tmp_path / "out"))
    single = {row["name"]: row["top1"] for row in result["tried"][:3]}
    assert result["val"]["top1"] >= max(single.values())
    taken = result["chosen"].split(", ")
    assert single[taken[0]] == max(single.values())
    best, used = single[taken[0]], [taken[0]]  # the recipe of the paper, once more
    for name in sorted(single, key=lambda name: -single[name])[1:]:
        (row,) = (row for row in result["tried"] if row["name"] == f"with {name}")
        if row["top1"] >= best:
            best, used = row["top1"], [*used, name]
    assert taken == used
    expected = mean_weights([tensors(runs / name / "model") for name in taken])
    for key, tensor in tensors(tmp_path / "out").items():
        assert torch.equal(tensor, expected[key])


def test_the_same_weights_may_have_had_another_name(runs: Path, tmp_path: Path) -> None:
    other = shutil.copytree(runs / "b", tmp_path / "other")
    config = json.loads((other / "model" / "config.json").read_text())
    config["pretrained_cfg"]["license"] = "of-another-copy"
    (other / "model" / "config.json").write_text(json.dumps(config))
    average_runs([str(runs / "a"), str(other)], out=str(tmp_path / "out"))


def test_an_adapter_is_measured_as_it_was_merged(tmp_path: Path) -> None:
    text = """
model: {name: embedded:vit_nano, adapter: {kind: dora, rank: 2}}
data: {source: "embedded:digits", eval: resize, batch_size: 16, num_train: 100, val_fraction: 0.2}
optim: {lr: 2e-2, steps: 6}
run: {precision: fp32, threads: 1, test: false}
"""
    own = train(parse_recipe(text), tmp_path / "run")
    result = average_runs([str(tmp_path / "run")], alphas=[1.0], out=str(tmp_path / "out"))
    assert result["val"]["loss"] == pytest.approx(own["val"]["loss"], abs=1e-5)
    for key, tensor in tensors(tmp_path / "run" / "model").items():
        assert torch.equal(tensors(tmp_path / "out")[key], tensor)


def test_the_verbs_take_it(runs: Path, tmp_path: Path, hub: HubServer) -> None:
    out = str(tmp_path / "out")
    assert main(["average", str(runs / "a"), "--alpha", "0.5", "--out", out]) == 0
    picture = tmp_path / "picture.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture)
    assert main(["predict", out, str(picture)]) == 0
    assert main(["export", out, "--format", "torch", "--out", str(tmp_path / "net.pt2")]) == 0
    assert main(["push", out, "alice/soup"]) == 0
    card = hub.files("alice/soup", "main")["README.md"].decode()
    assert "averaged weights (WiSE-FT: alpha 0.5, the fine-tuned head) of `a`" in card
    assert str(tmp_path) not in card
    network = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


def test_two_ranks_make_the_same(runs: Path, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    words = [str(runs / "a"), str(runs / "b"), "--greedy"]
    assert main(["average", *words, "--out", one]) == 0
    run_two_ranks(run_rank_command, "average", *words, "--out", two)
    assert (Path(one) / "model.safetensors").read_bytes() == (
        Path(two) / "model.safetensors"
    ).read_bytes()
    measured = [figures(Path(folder))["test"] for folder in (one, two)]
    assert measured[0]["confusion"] == measured[1]["confusion"]
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], abs=1e-6)


def test_what_cannot_be_averaged_is_refused(runs: Path, tmp_path: Path) -> None:
    out, a, b = str(tmp_path / "out"), str(runs / "a"), str(runs / "b")
    for alpha in (-0.1, 1.5, float("nan")):
        with refused("recipe.wrong_value", "--alpha"):
            average_runs([a], alphas=[0.5, alpha], out=out)
    with refused("recipe.conflict", "--alpha"):
        average_runs([a, b], alphas=[0.5], out=out)
    with refused("recipe.conflict", "--greedy"):
        average_runs([a], alphas=[0.5], greedy=True, out=out)
    with refused("recipe.missing_option", a, "--alpha"):
        average_runs([a], out=out)
    with refused("recipe.conflict", "twice"):
        average_runs([a, f"{a}/"], out=out)
    with refused("weights.unsupported", "model folder"):
        average_runs([str(runs / "a" / "model"), b], out=out)
    with refused("weights.unsupported", "random weights"):
        average_runs([str(runs / "first"), b], out=out)
    cut = shutil.copytree(a, tmp_path / "cut") / "model" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with refused("weights.damaged", "model.safetensors"):
        average_runs([str(tmp_path / "cut"), b], out=out)
    config = shutil.copytree(b, tmp_path / "hurt") / "model" / "config.json"
    config.write_text("{")
    with refused("weights.damaged", "config.json"):
        average_runs([a, str(tmp_path / "hurt")], out=out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with refused("setup.exists", "--out"):
        average_runs([a, b], out=str(tmp_path / "full"))
    assert not Path(out).exists()


def test_runs_that_do_not_belong_together_are_refused(runs: Path, tmp_path: Path) -> None:
    base, out = runs / "first" / "model", str(tmp_path / "out")
    a = str(runs / "a")
    train(tuned(base, "data.split_seed=1", "optim.steps=1"), tmp_path / "split")
    with refused("data.split_mismatch", "data.split_seed"):
        average_runs([a, str(tmp_path / "split")], out=out)
    train(tuned(base, "data.mean=[0.1, 0.2, 0.3]", "optim.steps=1"), tmp_path / "mean")
    with refused("data.split_mismatch", tmp_path / "mean", "data.mean"):
        average_runs([a, str(tmp_path / "mean")], out=out)
    train(tuned(base, "data.classes=['1', '2']", "data.num_train=90", "optim.steps=1",
                "data.num_test=20"), tmp_path / "two")  # fmt: skip
    with refused("weights.wrong_shape", tmp_path / "two", a):
        average_runs([a, str(tmp_path / "two")], out=out)
    train(tuned(runs / "b" / "model", "optim.steps=1"), tmp_path / "other")
    with refused("weights.wrong_version", tmp_path / "other"):
        average_runs([a, str(tmp_path / "other")], out=out)
    train(tuned(base, "data.val_fraction=0", "optim.steps=1"), tmp_path / "none")
    with refused("data.no_split", tmp_path / "none"):
        average_runs([str(tmp_path / "none")], alphas=[0.5], out=out)


def test_counters_and_halves() -> None:
    first = {"steps": torch.tensor(3), "w": torch.tensor([1.0, 1e-8], dtype=torch.float32)}
    second = {"steps": torch.tensor(7), "w": torch.tensor([2.0, -1e-8], dtype=torch.float32)}
    assert mean_weights([first, second])["steps"] == 3
    assert mean_weights([first, second])["w"].tolist() == [1.5, 0.0]
    half = interpolate_weights(first, second, 0.5, head_names=[])
    assert half["steps"] == 7
    assert half["w"].tolist() == [1.5, 0.0]

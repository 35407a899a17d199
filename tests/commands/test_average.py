"""`finetune average`: weights match their formulas, and every command accepts the result."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hub_fixtures import hub, sleep_durations, upload_in_fork
from hub_server import HubServer
from logs import logged
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file
from small_datasets import write_image_folder
from torch import Tensor

from finetune.cli.main import main
from finetune.commands import average, evaluate
from finetune.commands.average import average_runs, interpolate_weights, mean_weights
from finetune.commands.evaluate import evaluate_model
from finetune.files import file_sha256
from finetune.model_checksums import add_checksums
from finetune.publish.push import push
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.record import read_record, write_record
from finetune.training.train import train

__all__ = ["hub", "sleep_durations", "upload_in_fork"]  # fixtures

pytestmark = pytest.mark.usefixtures("no_plots")

DATA = "train: resize, eval: resize, batch_size: 32, num_train: 200, num_test: 100, split_seed: 0"


def finetune_recipe(base: Path, *overrides: str) -> Recipe:
    text = f"""
model: {{name: {base}, head_init: zeros}}
data: {{source: "embedded:digits", {DATA}}}
optim: {{lr: 3e-3, steps: 6}}
run: {{precision: fp32, threads: 1}}
"""
    return parse_recipe(text, overrides=overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `first`, and `a`, `b`, `c` and `kept` fine-tuned from its model."""
    folder = tmp_path_factory.mktemp("runs")
    text = tiny_recipe_text(DATA, optim="lr: 1e-2, steps: 30")
    train(parse_recipe(text), folder / "first")
    base = folder / "first" / "model"
    for name, overrides in {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["run.seed=3", "optim.lr=2e-4"],
        "kept": ["model.head_init=keep"],
    }.items():
        train(finetune_recipe(base, *overrides), folder / name)
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def read_results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("run,head_is_averaged", [("a", False), ("kept", True)])
def test_wise_ft_interpolates_weights(
    runs: Path, tmp_path: Path, run: str, head_is_averaged: bool
) -> None:
    average_runs([str(runs / run)], alphas=[0.25], out=str(tmp_path / "out"))
    start, end = read_weights(runs / "first" / "model"), read_weights(runs / run / "model")
    assert start.keys() == end.keys()
    for key, tensor in read_weights(tmp_path / "out").items():
        expected = 0.75 * start[key] + 0.25 * end[key]
        if key.startswith("head.") and not head_is_averaged:
            expected = end[key]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(start[key], end[key])


def test_alpha_0_and_1_give_the_original_models(runs: Path, tmp_path: Path) -> None:
    best_of_three = average_runs(
        [str(runs / "a")], alphas=[1.0, 0.0, 0.5], out=str(tmp_path / "several")
    )
    run_results, tried = read_results(runs / "a"), best_of_three["tried"]
    assert [row["alpha"] for row in tried] == [0.0, 0.5, 1.0]
    assert tried[2]["top1"] == run_results["val"]["top1"]
    assert best_of_three["val"]["top1"] == max(row["top1"] for row in tried)
    result = average_runs([str(runs / "a")], alphas=[1.0], out=str(tmp_path / "out"))
    assert result["chosen"] == "alpha 1, head as fine-tuned"
    assert result["test"]["confusion"] == run_results["test"]["confusion"]
    assert result["temperature"] == pytest.approx(run_results["temperature"], rel=1e-4)
    first, averaged = (
        json.loads((folder / "config.json").read_text("utf-8"))["validation_scores"]
        for folder in (runs / "a" / "model", tmp_path / "out")
    )
    assert averaged["label"] == first["label"]


def test_uniform_soup_is_the_mean_of_the_weights(runs: Path, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    result = average_runs([str(runs / name) for name in names], out=str(tmp_path / "out"))
    states = [read_weights(runs / name / "model") for name in names]
    for key, tensor in read_weights(tmp_path / "out").items():
        torch.testing.assert_close(tensor, sum(state[key] for state in states) / 3)
    evaluated = evaluate_model(str(tmp_path / "out"), data="embedded:digits", split="test")
    assert evaluated["examples"] > result["test"]["examples"] == 100
    assert read_results(tmp_path / "out")["average"]["runs"] == names


@pytest.mark.parametrize(
    "change, during",
    [
        ("other weights", "evaluate"),
        ("longer run", "evaluate"),
        ("longer run", "write_averaged_artifacts"),
    ],
)
def test_a_run_that_changes_meanwhile_is_refused(
    change: str, during: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are mapped, so that a file that is copied over another one changes the average."""
    for name in ("a", "b"):
        shutil.copytree(runs / name, tmp_path / name)
    call = getattr(average, during)

    def replace_and_call(*args: Any, **kwargs: Any) -> Any:
        if change == "longer run":
            record = read_record(RunDir(tmp_path / "a"))
            record.pop("model_sha256", None)
            write_record(RunDir(tmp_path / "a"), record)
        else:
            weights = (runs / "c" / "model" / "model.safetensors").read_bytes()
            (tmp_path / "a" / "model" / "model.safetensors").write_bytes(weights)
        return call(*args, **kwargs)

    monkeypatch.setattr(average, during, replace_and_call)
    with refused("weights.changed", "while it was read"):
        average_runs([str(tmp_path / name) for name in ("a", "b")], out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_greedy_soup_follows_the_papers_algorithm(runs: Path, tmp_path: Path) -> None:
    paths = [str(runs / name) for name in ("c", "a", "b")]
    result = average_runs(paths, greedy=True, out=str(tmp_path / "out"))
    single = {row["name"]: row["top1"] for row in result["tried"][:3]}
    assert result["val"]["top1"] >= max(single.values())
    chosen = result["chosen"].split(", ")
    assert single[chosen[0]] == max(single.values())
    best, used = single[chosen[0]], [chosen[0]]  # the paper's greedy algorithm
    for name in sorted(single, key=lambda name: -single[name])[1:]:
        (row,) = (row for row in result["tried"] if row["name"] == f"with {name}")
        if row["top1"] >= best:
            best, used = row["top1"], [*used, name]
    assert chosen == used
    expected = mean_weights([read_weights(runs / name / "model") for name in chosen])
    for key, tensor in read_weights(tmp_path / "out").items():
        assert torch.equal(tensor, expected[key])


def test_runs_with_the_same_base_weights_but_other_metadata_are_averaged(
    runs: Path, tmp_path: Path
) -> None:
    relicensed = shutil.copytree(runs / "b", tmp_path / "other")
    config = json.loads((relicensed / "model" / "config.json").read_text())
    config["pretrained_cfg"]["license"] = "of-another-copy"
    config = add_checksums(config, relicensed / "model")
    (relicensed / "model" / "config.json").write_text(json.dumps(config))
    average_runs([str(runs / "a"), str(relicensed)], out=str(tmp_path / "out"))


def test_adapter_run_is_averaged_with_its_merged_weights(tmp_path: Path) -> None:
    text = """
model: {name: embedded:vit_nano, adapter: {kind: dora, rank: 2}}
data: {source: "embedded:digits", eval: resize, batch_size: 16, num_train: 60, val_fraction: 0.2}
optim: {lr: 2e-2, steps: 3}
run: {precision: fp32, threads: 1, test: false}
"""
    run_results = train(parse_recipe(text), tmp_path / "run")
    result = average_runs([str(tmp_path / "run")], alphas=[1.0], out=str(tmp_path / "out"))
    assert result["val"]["loss"] == pytest.approx(run_results["val"]["loss"], abs=1e-5)
    for key, tensor in read_weights(tmp_path / "run" / "model").items():
        assert torch.equal(read_weights(tmp_path / "out")[key], tensor)


def test_predict_and_push_accept_the_result(
    runs: Path, tmp_path: Path, hub: HubServer, upload_in_fork: None
) -> None:
    out = str(tmp_path / "out")
    assert main(["average", str(runs / "a"), "--alpha", "0.5", "--out", out]) == 0
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image)
    assert main(["predict", out, str(image)]) == 0
    assert main(["push", out, "alice/soup"]) == 0
    card = hub.files("alice/soup", "main")["README.md"].decode()
    assert "averaged weights (WiSE-FT: alpha 0.5, head as fine-tuned) of `a`" in card
    assert str(tmp_path) not in card
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    # the card would describe the old temperature
    evaluate_model(out, data="embedded:digits", split="test", fit_temperature=True)
    with refused("weights.damaged", "README.md", "temperature"):
        push(out, "alice/soup")
    (tmp_path / "out" / "README.md").write_text("# A soup\n")
    assert push(out, "alice/soup")["changed"]


def test_card_of_a_soup_lists_every_run(runs: Path, tmp_path: Path) -> None:
    members = [runs / "a", runs / "b"]
    result = average_runs([str(run) for run in members], out=str(tmp_path / "out"))
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    for run, tried in zip(members, result["tried"], strict=False):
        (row,) = [line for line in lines if line.startswith(f"| `{run.name}`")]
        assert f"{tried['top1']:.4f}" in row
        assert file_sha256(run / "model" / "model.safetensors") in row


def test_two_ranks_give_the_same_soup(runs: Path, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    args = [str(runs / "a"), str(runs / "b"), "--greedy"]
    assert main(["average", *args, "--out", one]) == 0
    run_two_ranks(run_rank_command, "average", *args, "--out", two)
    assert (Path(one) / "model.safetensors").read_bytes() == (
        Path(two) / "model.safetensors"
    ).read_bytes()
    test_results = [read_results(Path(folder))["test"] for folder in (one, two)]
    assert test_results[0]["confusion"] == test_results[1]["confusion"]
    assert test_results[0]["loss"] == pytest.approx(test_results[1]["loss"], abs=1e-6)


def test_invalid_arguments_and_damaged_runs_are_refused(runs: Path, tmp_path: Path) -> None:
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
        average_runs([a, b, str(shutil.copytree(a, tmp_path / "copy"))], out=out)
    with refused("weights.unsupported", "model folder"):
        average_runs([str(runs / "a" / "model"), b], out=out)
    with refused("weights.unsupported", "random weights"):
        average_runs([str(runs / "first"), b], out=out)
    damaged_weights = shutil.copytree(a, tmp_path / "cut") / "model" / "model.safetensors"
    for content in (
        damaged_weights.read_bytes()[:-100],
        (runs / "b/model" / damaged_weights.name).read_bytes(),
    ):
        damaged_weights.write_bytes(content)
        with refused("weights.damaged", "model.safetensors"):
            average_runs([str(tmp_path / "cut"), b], out=out)
    config = shutil.copytree(b, tmp_path / "damaged") / "model" / "config.json"
    config.write_text("{")
    with refused("weights.damaged", "config.json"):
        average_runs([a, str(tmp_path / "damaged")], out=out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with refused("setup.exists", "--out"):
        average_runs([a, b], out=str(tmp_path / "full"))
    assert not Path(out).exists()


@pytest.mark.parametrize("split", ["val", "test", "classes"])
def test_changed_images_are_refused(runs: Path, tmp_path: Path, split: str) -> None:
    path = shutil.copytree(runs / "a", tmp_path / "a") / "run.json"
    record = json.loads(path.read_text())
    record["split_fingerprints"][split] = "0" * 64
    path.write_text(json.dumps(record))
    with refused("data.changed", f"'{split}'"):
        average_runs([str(path.parent)], alphas=[0.5], out=str(tmp_path / "out"))


def test_leaks_of_a_run_are_named(runs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(runs / "a", tmp_path / "a") / "run.json"
    leak = "split 'val': 3 of 9 images are copies"
    path.write_text(json.dumps({**json.loads(path.read_text()), "leakage": [leak]}))
    with logged() as messages:
        average_runs([str(path.parent)], alphas=[0.5], out=str(tmp_path / "out"))
    assert f"{path.parent}: {leak}" in messages
    average_runs([str(runs / "b"), str(path.parent)], out=str(tmp_path / "soup"))
    assert f"> **Leak:** a: {leak}" in (tmp_path / "soup" / "README.md").read_text()


def test_images_of_a_run_without_test_split_are_searched_for_test_images(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(runs / "b", tmp_path / "b") / "run.json"
    record = json.loads(path.read_text())
    del record["split_fingerprints"]["test"]
    path.write_text(json.dumps(record))
    monkeypatch.setattr(evaluate, "find_leakage", lambda source: [f"found in {source.name}"])
    average_runs([str(runs / "a"), str(path.parent)], out=str(tmp_path / "soup"))
    card = (tmp_path / "soup" / "README.md").read_text()
    assert re.findall("Leak:.*", card) == ["Leak:** b: found in embedded:digits."]


def test_incompatible_runs_are_refused(runs: Path, tmp_path: Path) -> None:
    base, out = runs / "first" / "model", str(tmp_path / "out")
    a = str(runs / "a")
    train(finetune_recipe(base, "data.split_seed=1", "optim.steps=1"), tmp_path / "split")
    with refused("data.split_mismatch", "data.split_seed"):
        average_runs([a, str(tmp_path / "split")], out=out)
    train(finetune_recipe(base, "data.mean=[0.1, 0.2, 0.3]", "optim.steps=1"), tmp_path / "mean")
    with refused("data.split_mismatch", tmp_path / "mean", "data.mean"):
        average_runs([a, str(tmp_path / "mean")], out=out)
    train(finetune_recipe(base, "data.classes=['1', '2']", "data.num_train=90", "optim.steps=1",
                "data.num_test=20"), tmp_path / "two")  # fmt: skip
    with refused("data.split_mismatch", tmp_path / "two", a, "2 and 10 classes"):
        average_runs([a, str(tmp_path / "two")], out=out)
    train(finetune_recipe(runs / "b" / "model", "optim.steps=1"), tmp_path / "other")
    with refused("weights.wrong_version", tmp_path / "other"):
        average_runs([a, str(tmp_path / "other")], out=out)
    record = json.loads((runs / "a" / "run.json").read_text())
    preprocessing = {**record["preprocessing"], "mean": [0.7, 0.8, 0.9]}
    for changes, *names in (
        ({"weights_sha256": "0" * 64}, "0" * 64, file_sha256(base / "model.safetensors")),
        ({"preprocessing": preprocessing}, "[0.7, 0.8, 0.9]", base),
        ({"network": {**record["network"], "num_heads": 1}}, "num_heads: the run has 1", base),
    ):
        replaced = shutil.copytree(a, tmp_path / "replaced", dirs_exist_ok=True)
        (replaced / "run.json").write_text(json.dumps({**record, **changes}))
        with refused("weights.wrong_version", *names):
            average_runs([str(replaced)], alphas=[0.5], out=out)
    (replaced / "run.json").write_text(json.dumps({**record, "shard_times": {"train": "a"}}))
    other = shutil.copytree(runs / "b", tmp_path / "streamed")
    other_record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**other_record, "shard_times": {"train": "b"}}))
    with logged() as messages:
        average_runs([str(replaced), str(other)], out=str(tmp_path / "soup"))
    assert any("shards were written or copied between the runs" in each for each in messages)
    (replaced / "run.json").write_text(json.dumps({**record, **changes}))
    with refused("weights.wrong_shape", replaced, "arguments"):  # also of the same shapes
        average_runs([a, str(replaced)], out=out)
    fingerprints = {**record["split_fingerprints"], "test": "0" * 64}
    (replaced / "run.json").write_text(json.dumps({**record, "split_fingerprints": fingerprints}))
    with refused("data.split_mismatch", replaced, "test images"):
        average_runs([a, str(replaced)], out=out)
    train(finetune_recipe(base, "data.val_fraction=0", "optim.steps=1"), tmp_path / "none")
    with refused("data.no_split", tmp_path / "none"):
        average_runs([str(tmp_path / "none")], alphas=[0.5], out=out)


def test_data_that_has_moved_is_given_with_data(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {f"{split}/{name}": 4 for split in ("train", "val") for name in "ab"}
    source = write_image_folder(tmp_path / "photos", counts)
    data = [f"data.source={source}", "data.num_train=null", "data.num_test=null"]
    train(finetune_recipe(runs / "first" / "model", *data, "optim.steps=1"), tmp_path / "run")
    moved = (tmp_path / "photos").rename(tmp_path / "moved")
    arguments = ["average", str(tmp_path / "run"), "--alpha", "0.5", "--out", str(tmp_path / "out")]
    assert main(arguments) == 3
    assert main([*arguments, "--data", f"folder:{moved}"]) == 0
    average = read_results(tmp_path / "out")
    assert average["val"]["examples"] == 8
    assert "cannot be opened" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    (moved / "val" / "a" / "0.png").rename(moved / "val" / "b" / "changed.png")
    with refused("data.changed", moved, "'val'"):
        average_runs([str(tmp_path / "run")], alphas=[0.5], out=str(tmp_path / "out"),
                     data=f"folder:{moved}")  # fmt: skip


def test_integer_counters_are_kept_and_floats_averaged() -> None:
    first = {"steps": torch.tensor(3), "w": torch.tensor([1.0, 1e-8], dtype=torch.float32)}
    second = {"steps": torch.tensor(7), "w": torch.tensor([2.0, -1e-8], dtype=torch.float32)}
    assert mean_weights([first, second])["steps"] == 3
    assert mean_weights([first, second])["w"].tolist() == [1.5, 0.0]
    half = interpolate_weights(first, second, 0.5, head_names=[])
    assert half["steps"] == 7
    assert half["w"].tolist() == [1.5, 0.0]

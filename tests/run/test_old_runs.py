"""Runs of an older version, in tests/run/old_runs: every verb still reads them, and they go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from faults_runs import digest, losses, weights, without_pictures
from hub_samples import hub, slept
from hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file

from finetune import Classifier, load_recipe, train
from finetune.cli.main import main
from finetune.commands.evaluate import evaluate_model
from finetune.commands.probe import probe_model
from finetune.commands.show import show
from finetune.data.source import open_source
from finetune.publish.artifacts import PUBLISHED
from finetune.publish.push import push
from finetune.recipe.identity import learned
from finetune.report.page import report
from finetune.run.directory import RunDir

__all__ = ["hub", "slept"]  # fixtures

OLD = Path(__file__).parent / "old_runs"
STOPPED_AT, STEPS, LOG_EVERY = 13, 40, 4
CAPABILITY = "AVX512"  # of the CPU that the old runs were made on
# Other kernels round otherwise: AVX2 and plain ones were off by 2.4e-7 at the end, where weights
# had moved by up to 0.07 since the checkpoint.
ROUNDING = 1e-5


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return shutil.copytree(OLD / "finished", tmp_path / "finished")


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    return shutil.copytree(OLD / "stopped", tmp_path / "stopped")


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are left out where nobody looks at them."""
    without_pictures(monkeypatch)


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def same_arithmetic(run: Path) -> bool:
    """True if the torch and the kind of CPU are those that began the run."""
    old, new = read(OLD / "stopped" / "run.json"), read(run / "run.json")
    same = old["versions"]["torch"] == new["versions"]["torch"] and old["device"] == new["device"]
    return same and torch.backends.cpu.get_cpu_capability() == CAPABILITY


def assert_same_weights(path: Path, expected: Path, *, exact: bool) -> None:
    """Compare two files of weights: byte for byte, or up to rounding."""
    ours, theirs = load_file(path), load_file(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0 if exact else ROUNDING)
    assert not exact or path.read_bytes() == expected.read_bytes()


def on_hub(hub: HubServer) -> dict[str, bytes]:
    return {k: held for k, held in hub.files("alice/net").items() if k != ".gitattributes"}


def schedule(run: Path) -> list[Any]:
    """Of each logged line what no rounding changes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for key in ("step", "split", "samples_seen", "lr")] for line in lines]


def assert_as_undisturbed(run: Path) -> None:
    """The stopped run has come to the end that it would have had without the stop."""
    exact, expected = same_arithmetic(run), OLD / "undisturbed"
    assert len(losses(run)) == STEPS // LOG_EVERY
    assert losses(run) == pytest.approx(losses(expected), rel=0, abs=0 if exact else ROUNDING)
    assert schedule(run) == schedule(expected)
    last = RunDir(run).folder(STEPS) / "model.safetensors"
    assert_same_weights(last, expected / "last.safetensors", exact=exact)
    published = run / "model" / "model.safetensors"
    assert_same_weights(published, expected / "published.safetensors", exact=exact)


class TestAStoppedRun:
    def test_it_goes_on_to_the_same_weights(self, stopped: Path, unpainted: None) -> None:
        before = (stopped / "metrics.jsonl").read_bytes()
        recipe = load_recipe(stopped / "recipe.yaml")
        results = train(recipe, stopped, resume=True)
        assert (stopped / "metrics.jsonl").read_bytes().startswith(before)  # nothing twice
        assert_as_undisturbed(stopped)
        assert STOPPED_AT < results["best_step"] < STEPS
        record, old = read(stopped / "run.json"), read(OLD / "stopped" / "run.json")
        assert record["status"] == "done"
        for key in ("started", "data_fingerprint", "split_fingerprints", "precision"):
            assert record[key] == old[key], key
        for key in ("steps", "images", "parameters", "train_pipeline", "lr", "batch_size"):
            assert record["plan"][key] == old["plan"][key], key
        written, given = (
            yaml.safe_load((run / "recipe.yaml").read_text()) for run in (stopped, OLD / "stopped")
        )
        assert written.pop("claims") == given.pop("claims") == []
        assert set(given) == {"model", "data", "optim", "run"}
        for section, keys in given.items():  # there may be new ones beside them
            assert written[section] | keys == written[section]
        assert learned(load_recipe(stopped / "recipe.yaml")) == learned(recipe)

    def test_the_command_takes_the_recipe_that_it_began_with(
        self, stopped: Path, unpainted: None
    ) -> None:
        given = str(OLD / "stopped.yaml")
        assert main(["train", given, "--out", str(stopped), "--resume"]) == 0
        assert_as_undisturbed(stopped)

    def test_it_falls_back_from_a_damaged_checkpoint(self, stopped: Path, unpainted: None) -> None:
        run = RunDir(stopped)
        assert [run.verify(step) for step in (10, STOPPED_AT)] == [None, None]
        (run.folder(STOPPED_AT) / "ema.safetensors").write_bytes(b"")
        train(load_recipe(stopped / "recipe.yaml"), stopped, resume=True)
        assert_as_undisturbed(stopped)

    def test_another_recipe_is_refused(
        self, stopped: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = digest(stopped)
        words = ["train", str(OLD / "stopped.yaml"), "optim.lr=2e-2", "--resume"]
        assert main([*words, "--out", str(stopped)]) == 2
        assert "optim.lr: the run has 0.01, now 0.02" in capsys.readouterr().err
        assert digest(stopped) == before


class TestAFinishedRun:
    @pytest.mark.parametrize("recipe", ["finished/recipe.yaml", "finished.yaml"])
    def test_resuming_answers_and_changes_nothing(self, finished: Path, recipe: str) -> None:
        before = digest(finished)
        assert len(before) == 15
        results = train(load_recipe(OLD / recipe), finished, resume=True)
        assert results == read(OLD / "finished" / "results.json")
        assert digest(finished) == before

    def test_other_claims_are_answered_from_its_record(
        self, finished: Path, tmp_path: Path, unpainted: None
    ) -> None:
        before = digest(finished)
        text = (OLD / "finished.yaml").read_text()
        changed = tmp_path / "changed.yaml"
        changed.write_text(text.replace("value: 0.9", "value: 0.54"))
        results = train(load_recipe(changed), finished, resume=True)
        old = read(OLD / "finished" / "results.json")
        assert [claim["verdict"] for claim in old["claims"]] == ["not met", "met"]
        assert [claim["verdict"] for claim in results["claims"]] == ["met", "met"]
        # run.json holds the steps of an epoch, which a slope counts in, with three decimals
        slopes = [found["claims"][1]["measured"] for found in (results, old)]
        assert slopes[0] == pytest.approx(slopes[1], rel=1e-4)
        unchanged = {
            name for name, sha256 in digest(finished).items() if before.get(name) == sha256
        }
        assert {"metrics.jsonl", "run.json", "model/model.safetensors"} <= unchanged
        assert not {"recipe.yaml", "results.json", "model/README.md"} & unchanged

    def test_a_lost_model_comes_back_from_its_checkpoint(
        self, finished: Path, unpainted: None
    ) -> None:
        shutil.rmtree(finished / "model")
        results = train(load_recipe(finished / "recipe.yaml"), finished, resume=True)
        assert weights(finished) == weights(OLD / "finished")
        old_config = read(OLD / "finished" / "model" / "config.json")
        config = read(finished / "model" / "config.json")
        fitted = [each.pop("calibration")["temperature"] for each in (config, old_config)]
        assert fitted[0] == pytest.approx(fitted[1], rel=1e-4)
        assert config == old_config
        old = read(OLD / "finished" / "results.json")
        assert results["test"]["confusion"] == old["test"]["confusion"]

    def test_its_figures_are_measured_again(self, finished: Path) -> None:
        old = read(finished / "results.json")
        for split in ("val", "test"):
            found = evaluate_model(str(finished), split=split)
            for key in ("confusion", "top1", "top5", "examples", "per_class"):
                assert found[key] == old[split][key], (split, key)
            for key in ("loss", "ece"):
                assert found[key] == pytest.approx(old[split][key], abs=1e-6), (split, key)
        assert found["calibrated"]["temperature"] == old["temperature"]
        assert found["calibrated"]["loss"] == pytest.approx(
            old["test"]["calibrated"]["loss"], abs=1e-6
        )
        assert [one["index"] for one in found["mistakes"]] == [
            one["index"] for one in old["test"]["mistakes"]
        ]

    def test_its_mistakes_are_predicted_again(self, finished: Path, tmp_path: Path) -> None:
        mistakes = read(finished / "results.json")["test"]["mistakes"]
        assert len(mistakes) == 24
        split = open_source("embedded:digits").splits["test"]
        paths = [tmp_path / f"{number:02}.png" for number in range(len(mistakes))]
        for path, one in zip(paths, mistakes, strict=True):
            Image.fromarray(split.read(one["index"])).save(path)
        found = Classifier.load(finished, device="cpu").predict(paths, top_k=1)
        for row, one in zip(found, mistakes, strict=True):
            (best,) = row["predictions"]
            assert best["index"] == one["predicted"]
            assert best["confidence"] == pytest.approx(one["confidence"], abs=1e-6)

    def test_it_is_probed_and_shown(self, finished: Path, tmp_path: Path) -> None:
        shots = probe_model(str(finished), shots=[25], seeds=1)["shots"]
        # as accurate as its own head, which learned from five times as many images
        assert shots[25]["accuracy"] > 0.4
        image = tmp_path / "digit.png"
        Image.fromarray(open_source("embedded:digits").splits["test"].read(0)).save(image)
        shown = show(finished, [image], out=tmp_path / "shown")
        pictures = ("filters", "positions", "rollout", "distances")
        assert shown["files"] == [str(tmp_path / "shown" / f"{name}.png") for name in pictures]
        assert shown["skipped"] == {}

    def test_its_model_folder_is_pushed_byte_for_byte(self, hub: HubServer, finished: Path) -> None:
        push(finished / "model", "alice/net")
        old = OLD / "finished" / "model"
        assert on_hub(hub) == {path.name: path.read_bytes() for path in old.iterdir()}
        assert len(on_hub(hub)) == 5

    def test_it_is_pushed_with_its_evidence_drawn_anew(
        self, hub: HubServer, finished: Path
    ) -> None:
        push(finished, "alice/net")
        held = on_hub(hub)
        assert held == {path.name: path.read_bytes() for path in (finished / "model").iterdir()}
        assert held.keys() == set(PUBLISHED)
        for name in ("config.json", "model.safetensors", "results.json"):
            assert held[name] == (OLD / "finished" / "model" / name).read_bytes(), name
        assert b"hf-hub:alice/net" in held["README.md"]


def test_pages_of_both_and_one_that_compares_them(finished: Path, stopped: Path) -> None:
    written = report([str(finished), str(stopped)])
    assert written["reports"] == [str(run / "report.html") for run in (finished, stopped)]
    done, halfway, both = (
        Path(page).read_text() for page in (*written["reports"], written["comparison"])
    )
    top1 = read(OLD / "finished" / "results.json")["test"]["top1"]
    assert f"{100 * top1:.2f}" in done
    assert "digits row 33" in done  # the worst mistake
    assert "stopped (143): 12 of 40 steps are logged" in halfway
    for text in ("2 recipes: finished, stopped", f"{100 * top1:.2f}", "data.train"):
        assert text in both, text

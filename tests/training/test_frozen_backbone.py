"""A head trained on features is the head trained through the net, and nothing is computed twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_runs import killed_before
from ranks import command, two_ranks
from recipe_texts import tiny_text
from refusals import refused
from safetensors.torch import load_file
from samples import make_folder
from timm.models import VisionTransformer

from finetune.commands.evaluate import evaluate_model
from finetune.commands.probe import probe_model
from finetune.evaluation import features
from finetune.recipe.load import Recipe, parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_text(
    "train: resize, eval: resize, batch_size: 64, num_train: 320",
    model="pretrained: false, freeze: backbone, compile: false",
    optim="name: adamw, lr: 3e-2, epochs: 3",
    run="precision: fp32, log_every: 1",
)
# Random by name, the same pixels by probability: so each step computes them.
THROUGH = "data.train=resize | flip(0)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of images that went through the blocks of a network, call by call."""
    seen: list[int] = []
    body = VisionTransformer.forward_features

    def counted(self: VisionTransformer, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        if not x.is_meta:  # a look at the size computes nothing
            seen.append(len(x))
        return body(self, x, **rest)

    monkeypatch.setattr(VisionTransformer, "forward_features", counted)
    return seen


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


def lines(run: Path, split: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] == split]


def same_training(one: Path, other: Path, *, tolerance: float = 1e-6) -> None:
    """The same losses, accuracies and weights, but for the order in which numbers are added."""
    for split in ("train", "val"):
        mine, theirs = lines(one, split), lines(other, split)
        assert [line["step"] for line in mine] == [line["step"] for line in theirs] != []
        for key in ("loss", "top1", "lr", "samples_seen"):
            expected = pytest.approx([line[key] for line in theirs], abs=tolerance)
            assert [line[key] for line in mine] == expected, key
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        if name.startswith("head."):
            assert tensor.any()
            torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=10 * tolerance)
        else:
            assert torch.equal(tensor, weights[1][name])
    tests = [json.loads((run / "results.json").read_text())["test"] for run in (one, other)]
    assert tests[0]["confusion"] == tests[1]["confusion"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.ema_decay=0.9", "data.micro_batch=16", "optim.label_smoothing=0.1"],
        ["model.args.drop_rate=0.3", "optim.clip_norm=0.1", "model.head_init=default"],
        # at the images' own size: else training resamples in bf16, and features are of float32
        ["run.precision=bf16", "model.image_size=8", "model.args.patch_size=2"],
    ],
    ids=["ema", "head-dropout", "bf16"],
)
def test_the_head_is_trained_as_through_the_net(
    overrides: list[str], tmp_path: Path, computed: list[int]
) -> None:
    train(recipe(*overrides), tmp_path / "features")
    # two looks at two images of noise; then train, val and test once each
    assert sum(computed) == 3 * 2 + 320 + 355
    train(recipe(*overrides, THROUGH), tmp_path / "through")
    rounding = 2e-2 if "run.precision=bf16" in overrides else 1e-6
    same_training(tmp_path / "features", tmp_path / "through", tolerance=rounding)


def test_later_runs_evaluation_and_probes_find_the_features(
    tmp_path: Path, computed: list[int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(recipe(), tmp_path / "first")
    assert "features were computed in" in capsys.readouterr().err
    kept = sorted(path.name for path in cache.iterdir())
    assert len(kept) == 3
    computed.clear()
    train(recipe("optim.lr=1e-2"), tmp_path / "second")
    assert "features were read from the cache" in capsys.readouterr().err
    for split in ("val", "test"):
        measured = evaluate_model(str(tmp_path / "first"), split=split)
        assert measured["loss"] == first[split]["loss"]
        assert measured["confusion"] == first[split]["confusion"]
    assert sum(computed) == (3 + 2 * 2) * 2, "only looks at noise"
    probed = probe_model(str(tmp_path / "first"), split="val", shots=[1], seeds=1, knn=3)
    assert all(split["cached"] for split in probed["features"].values())
    assert sorted(path.name for path in cache.iterdir()) == kept


def test_random_augmentation_goes_through_the_net(
    tmp_path: Path, computed: list[int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe("data.train=resize | flip", "run.test=false"), tmp_path / "run")
    assert sum(computed) == 14 * 64 + 3 * 30  # steps; validation after each epoch
    assert not cache.exists()
    said = capsys.readouterr().err
    assert "computes all images anew: data.train is random; with 'resize' each is computed" in said


def test_a_reason_of_the_network_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe("model.dropout=0.1", "optim.epochs=1", "run.test=false"), tmp_path / "run")
    assert "dropout before the classifier" in capsys.readouterr().err
    train(recipe("model.freeze=none", "optim.epochs=1", "run.test=false"), tmp_path / "another")
    assert "model.freeze" not in capsys.readouterr().err


def test_a_run_that_was_begun_through_the_net_goes_on_with_features(
    tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(), tmp_path / "whole")
    shutil.rmtree(tmp_path / "cache")
    with monkeypatch.context() as before:
        before.setattr(
            "finetune.training.frozen_backbone.accept_features", lambda *_, **__: "as it was"
        )
        killed_before(10, recipe(), tmp_path / "run")
    computed.clear()
    train(recipe(), tmp_path / "run", resume=True)
    assert sum(computed) == 3 * 2 + 320 + 355
    same_training(tmp_path / "run", tmp_path / "whole")


def test_a_killed_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    train(recipe("optim.ema_decay=0.9"), tmp_path / "whole")
    killed_before(8, recipe("optim.ema_decay=0.9"), tmp_path / "run")
    train(recipe("optim.ema_decay=0.9"), tmp_path / "run", resume=True)
    same_training(tmp_path / "run", tmp_path / "whole", tolerance=0)


def test_unreadable_images_are_left_out_or_stop_the_run(tmp_path: Path) -> None:
    counts = {"train/cat": 6, "train/dog": 6, "val/cat": 2, "val/dog": 2}
    source = make_folder(tmp_path / "set", counts)
    broken = tmp_path / "set" / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    square = "resize((16, 16))"
    overrides = [f"data.source={source}", "data.num_train=null", "data.batch_size=4"]
    overrides += [f"data.train={square}", f"data.eval={square}"]
    with refused("data.unreadable", "1.png"):
        train(recipe(*overrides), tmp_path / "stopped")
    train(recipe(*overrides, "data.unreadable=quarantine"), tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]
    assert plan["images_read"] == 11
    assert lines(tmp_path / "run", "train")[-1]["step"] == 9  # 3 epochs of 11 images


def test_the_compiler_has_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "finetune.training.build_state.compiles", lambda choice, **told: asked.append(told)
    )
    short = ["optim.epochs=1", "run.test=false"]
    train(recipe(*short), tmp_path / "run")
    train(recipe(*short, THROUGH), tmp_path / "through")
    assert [told["images"] for told in asked] == [0, 5 * 64]


class TestTwoProcesses:
    """Two ranks, of which the second reads the file of the first, or gets the rows from it."""

    @pytest.mark.slow
    @pytest.mark.parametrize("place", ["a folder", "a file"])
    def test_they_train_as_one(self, place: str, tmp_path: Path) -> None:
        train(recipe(), tmp_path / "one")
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        kept = tmp_path / "other-cache"
        if place == "a file":
            kept.write_text("so nothing can be kept")
        words = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "two")]
        done = two_ranks(command, *words, environment={"FINETUNE_CACHE": str(kept)})
        assert json.loads((tmp_path / "two" / "run.json").read_text())["num_processes"] == 2
        assert done.stderr.count("are not kept") == 3 * (place == "a file")
        same_training(tmp_path / "two", tmp_path / "one", tolerance=1e-5)
        if place == "a folder":
            mine, theirs = (
                {path.name for path in folder.iterdir()}
                for folder in (tmp_path / "cache" / "features", kept / "features")
            )
            # the names carry the sha256 of the features: they are equal to the last bit
            assert mine == theirs
            assert len(mine) == 3


def test_features_come_in_pieces_where_no_file_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank ends with rank 0's rows, whatever fits into one message."""
    values = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    values[4] = np.nan  # of an image that cannot be read
    monkeypatch.setattr(features, "_SENT_VALUES", 7)
    sent: list[torch.Tensor] = []

    class Rank:
        device = torch.device("cpu")

        def __init__(self, *, main: bool) -> None:
            self.is_main_process = main
            self._place = 0

        def reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
            """Rank 0 goes first here; the other adds what is its own."""
            assert how == "sum"
            if self.is_main_process:
                # the third message counts who has no file: the other
                sent.append(tensor + 1 if len(sent) == 1 else tensor)
                return sent[-1]
            self._place += 1
            return sent[self._place - 1] + (tensor if self._place != 2 else 0)

    main: Any = Rank(main=True)
    other: Any = Rank(main=False)
    assert features._everywhere(values, "a" * 64, 10, main) is values
    found = features._everywhere(None, "", 10, other)
    np.testing.assert_array_equal(found, values)
    assert len(sent) == 2 + 5

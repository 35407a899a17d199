"""Training a head on cached features matches training through the backbone, without recompute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_runs import train_killed_and_resumed, train_until_killed
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file
from small_datasets import write_image_folder
from timm.models import VisionTransformer

from finetune.commands.evaluate import evaluate_model
from finetune.commands.probe import probe_model
from finetune.data.feature_loader import FeatureLoader
from finetune.evaluation import feature_extraction
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.accelerator import create_accelerator
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.setup import build_setup
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe_text(
    "train: resize, eval: resize, batch_size: 32, num_train: 160, num_test: 100",
    model="pretrained: false, freeze: backbone, compile: false",
    optim="name: adamw, lr: 3e-2, epochs: 3",
    run="precision: fp32, log_every: 1",
)
# flip(0) counts as random but changes no pixel, so every step runs the backbone.
THROUGH_BACKBONE = "data.train=resize | flip(0)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def forward_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The batch size of each forward pass through the backbone."""
    batch_sizes: list[int] = []
    forward_features = VisionTransformer.forward_features

    def counting_forward(self: VisionTransformer, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        if not x.is_meta:  # shape inference computes nothing
            batch_sizes.append(len(x))
        return forward_features(self, x, **rest)

    monkeypatch.setattr(VisionTransformer, "forward_features", counting_forward)
    return batch_sizes


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


EMA = "optim.ema_decay=0.9"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on features."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(make_recipe(EMA), out)
    return out


def metrics_lines(run: Path, split: str) -> list[dict[str, Any]]:
    all_lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in all_lines if line["split"] == split]


def check_same_training(actual: Path, reference: Path, *, tolerance: float = 1e-6) -> None:
    """Check that losses, accuracies and weights are equal up to the order of summation."""
    for split in ("train", "val"):
        actual_lines, expected_lines = metrics_lines(actual, split), metrics_lines(reference, split)
        assert (
            [line["step"] for line in actual_lines]
            == [line["step"] for line in expected_lines]
            != []
        )
        for key in ("loss", "top1", "lr", "samples_seen"):
            expected = pytest.approx([line[key] for line in expected_lines], abs=tolerance)
            assert [line[key] for line in actual_lines] == expected, key
    weights = [load_file(run / "model" / "model.safetensors") for run in (actual, reference)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        if name.startswith("head."):
            assert tensor.any()
            torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=10 * tolerance)
        else:
            assert torch.equal(tensor, weights[1][name])
    test_results = [
        json.loads((run / "results.json").read_text())["test"] for run in (actual, reference)
    ]
    assert test_results[0]["confusion"] == test_results[1]["confusion"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.ema_decay=0.9", "data.micro_batch=16", "optim.label_smoothing=0.1"],
        pytest.param(
            ["model.args.drop_rate=0.3", "optim.clip_norm=0.1", "model.head_init=default"],
            marks=pytest.mark.faults,
        ),
        # at the images' native size; otherwise training resizes in bf16 and features in float32
        ["run.precision=bf16", "model.image_size=8", "model.args.patch_size=2"],
    ],
    ids=["ema", "head-dropout", "bf16"],
)
def test_training_on_features_matches_training_through_the_backbone(
    overrides: list[str], tmp_path: Path, forward_batch_sizes: list[int]
) -> None:
    train(make_recipe(*overrides), tmp_path / "features")
    # three probes of two noise images; then train, val and test once each
    assert sum(forward_batch_sizes) == 3 * 2 + 160 + 100
    train(make_recipe(*overrides, THROUGH_BACKBONE), tmp_path / "through")
    rounding = 2e-2 if "run.precision=bf16" in overrides else 1e-6
    check_same_training(tmp_path / "features", tmp_path / "through", tolerance=rounding)


def test_later_runs_evaluate_and_probe_reuse_cached_features(
    tmp_path: Path, forward_batch_sizes: list[int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(make_recipe(), tmp_path / "first")
    assert "which were computed in" in capsys.readouterr().err
    assert first["learning_curve"]["sizes"][-1] == 140
    cached_files = sorted(path.name for path in cache.iterdir())
    assert len(cached_files) == 3
    forward_batch_sizes.clear()
    train(make_recipe("optim.lr=1e-2"), tmp_path / "second")
    assert "which were read from the cache" in capsys.readouterr().err
    for split in ("val", "test"):
        evaluated = evaluate_model(str(tmp_path / "first"), split=split)
        assert evaluated["loss"] == first[split]["loss"]
        assert evaluated["confusion"] == first[split]["confusion"]
    assert sum(forward_batch_sizes) == (3 + 2 * 2) * 2, "only probes with noise images"
    probe = probe_model(str(tmp_path / "first"), split="val", shots=[1], seeds=1, knn=3)
    assert all(split["cached"] for split in probe["features"].values())
    assert sorted(path.name for path in cache.iterdir()) == cached_files


def test_random_augmentation_disables_feature_caching(
    tmp_path: Path, forward_batch_sizes: list[int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_recipe("data.train=resize | flip", "run.test=false"), tmp_path / "run")
    assert sum(forward_batch_sizes) == 14 * 32 + 3 * 20  # steps; validation after each epoch
    assert not cache.exists()
    stderr = capsys.readouterr().err
    assert "features are not cached: data.train is random; with data.train='resize'" in stderr


def test_reason_for_not_caching_features_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_recipe("model.dropout=0.1", "optim.epochs=1", "run.test=false"), tmp_path / "run")
    assert "dropout before the classifier" in capsys.readouterr().err
    train(
        make_recipe("model.freeze=none", "optim.epochs=1", "run.test=false"), tmp_path / "another"
    )
    assert "model.freeze" not in capsys.readouterr().err


def test_run_started_without_features_resumes_with_features(
    whole_run: Path,
    tmp_path: Path,
    forward_batch_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "finetune.training.frozen_backbone.enable_feature_input", lambda *_, **__: "as it was"
        )
        train_until_killed(10, make_recipe(EMA), tmp_path / "run")
    train(make_recipe(EMA), tmp_path / "run", resume=True)
    assert sum(forward_batch_sizes) == 3 * 2 + 160 + 100
    check_same_training(tmp_path / "run", whole_run)


def test_killed_run_resumes_bit_exactly(whole_run: Path, tmp_path: Path) -> None:
    train_killed_and_resumed(8, make_recipe(EMA), tmp_path / "run")
    check_same_training(tmp_path / "run", whole_run, tolerance=0)


def test_unreadable_images_are_quarantined_or_stop_the_run(tmp_path: Path) -> None:
    counts = {"train/cat": 6, "train/dog": 6, "val/cat": 2, "val/dog": 2}
    source = write_image_folder(tmp_path / "set", counts)
    broken = tmp_path / "set" / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    square = "resize((16, 16))"
    overrides = [
        f"data.source={source}",
        "data.num_train=null",
        "data.num_test=null",
        "data.batch_size=4",
    ]
    overrides += [f"data.train={square}", f"data.eval={square}"]
    with refused("data.unreadable", "1.png"):
        train(make_recipe(*overrides), tmp_path / "stopped")
    train(make_recipe(*overrides, "data.unreadable=quarantine"), tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]
    assert plan["images_read"] == 11
    assert metrics_lines(tmp_path / "run", "train")[-1]["step"] == 9  # 3 epochs of 11 images


def test_train_images_of_another_interpolation_are_computed_again() -> None:
    """data.eval may name a filter for the published model that training does not use."""

    def train_features(*overrides: str) -> torch.Tensor:
        recipe = make_recipe(*overrides)
        accelerator = create_accelerator(recipe.run)
        setup = build_setup(recipe, device=accelerator.device, show_progress=False)
        split = setup.source.splits["train"]
        loader = FrozenBackbone(setup, accelerator).build_loader(split, train=True)
        assert isinstance(loader, FeatureLoader)
        return loader.get_features(np.arange(len(split)))

    bicubic = train_features("data.eval=resize(interpolation='nearest')")
    nearest = train_features("data.interpolation=nearest")
    assert not torch.equal(bicubic, nearest)
    assert torch.equal(bicubic, train_features())


def test_cached_features_need_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "finetune.training.build_state.should_compile",
        lambda choice, **kwargs: calls.append(kwargs),
    )
    short = ["optim.epochs=1", "run.test=false"]
    train(make_recipe(*short), tmp_path / "run")
    train(make_recipe(*short, THROUGH_BACKBONE), tmp_path / "through")
    assert [kwargs["num_images"] for kwargs in calls] == [0, 5 * 32]


class TestTwoProcesses:
    """Two ranks: the second reads the first one's cache file, or receives the rows from it."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        # the function below broadcasts without a folder, too
        "place",
        ["a folder", pytest.param("a file", marks=pytest.mark.faults)],
    )
    def test_two_ranks_give_the_losses_of_one(self, place: str, tmp_path: Path) -> None:
        train(make_recipe(), tmp_path / "one")
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        other_cache = tmp_path / "other-cache"
        if place == "a file":
            other_cache.write_text("a file, so no cache folder can be created")
        args = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "two")]
        finished = run_two_ranks(
            run_rank_command, *args, environment={"FINETUNE_CACHE": str(other_cache)}
        )
        assert json.loads((tmp_path / "two" / "run.json").read_text())["num_processes"] == 2
        assert finished.stderr.count("are not kept") == 3 * (place == "a file")
        check_same_training(tmp_path / "two", tmp_path / "one", tolerance=1e-5)
        if place == "a folder":
            mine, theirs = (
                {path.name for path in folder.iterdir()}
                for folder in (tmp_path / "cache" / "features", other_cache / "features")
            )
            # file names contain the sha256 of the features, so they are bit-identical
            assert mine == theirs
            assert len(mine) == 3


def test_features_are_broadcast_in_pieces_without_a_shared_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank ends with rank 0's rows, however few fit into one broadcast."""
    values = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    values[4] = np.nan  # an unreadable image
    monkeypatch.setattr(feature_extraction, "VALUES_PER_BROADCAST", 7)
    sent: list[torch.Tensor] = []

    class Rank:
        device = torch.device("cpu")

        def __init__(self, *, main: bool) -> None:
            self.is_main_process = main
            self._place = 0

        def reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
            """Rank 0 calls this first; the other rank adds its own tensor."""
            assert how == "sum"
            if self.is_main_process:
                # the second broadcast counts the ranks without a file: here the other rank
                sent.append(tensor + 1 if len(sent) == 1 else tensor)
                return sent[-1]
            self._place += 1
            return sent[self._place - 1] + (tensor if self._place != 2 else 0)

    main: Any = Rank(main=True)
    other: Any = Rank(main=False)
    assert feature_extraction._broadcast_features(values, "a" * 64, 10, main) is values
    received = feature_extraction._broadcast_features(None, "", 10, other)
    np.testing.assert_array_equal(received, values)
    assert len(sent) == 2 + 5

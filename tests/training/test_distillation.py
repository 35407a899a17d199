"""Distillation: loss formulas, the teacher's inputs and classes, equivalent and resumed runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from forked_runs import (
    check_same_run,
    read_train_losses,
    train_killed_and_resumed,
    train_until_killed,
)
from networks import build_network, forget_checksums, random_images, randomize_head, save_network
from ranks import run_rank_command, run_two_ranks
from recipe_texts import recipe_error, tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file, save_file
from timm.task.distillation import LogitDistillationTask
from torch import Tensor, nn

from finetune.commands.evaluate import evaluate_model
from finetune.data import decode as image_decoder
from finetune.data.encoded_images import ArrayImages
from finetune.errors import DataError
from finetune.models.build import build_model
from finetune.models.save import BuiltModel
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training import distillation
from finetune.training.accelerator import create_accelerator
from finetune.training.batch_size_finder import find_micro_batch_size
from finetune.training.build_state import build_trainer_state
from finetune.training.distillation import Teacher, distillation_loss
from finetune.training.setup import build_setup
from finetune.training.stages import stage_folder
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

DATA = "eval: resize, num_train: 160, num_test: 40"
TEACHER = tiny_recipe_text(
    f"train: resize | flip, {DATA}, batch_size: 32, mean: [0.4, 0.5, 0.6], std: [0.3, 0.4, 0.5]",
    optim="name: adamw, lr: 1e-2, steps: 4",
)
RECIPE = tiny_recipe_text(
    f"train: 'resize | random_crop(padding=2) | mixup(0.4)', {DATA}, batch_size: 16",
    optim="name: adamw, lr: 3e-3, steps: 6, ema_decay: 0.5",
    run="precision: fp32, log_every: 1, eval_every: 3, save_every: 2",
    width=16,
)
ADAPTED = """
model: {name: embedded:vit_nano, adapter: {rank: 2, targets: [attention]}}
data: {source: embedded:digits, eval: resize, batch_size: 16, num_train: 60, num_test: 40}
optim: {lr: 3e-3, steps: 4, ema_decay: 0.5}
run: {precision: fp32, log_every: 1, eval_every: 4, save_every: 2, threads: 1}
"""
FEATURES = "distill.kind=features"
# flip(0) counts as random but changes no pixel, so the teacher runs at every step.
TEACHER_EVERY_STEP, TEACHER_ONCE = "data.train=resize | flip(0)", "data.train=resize"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(parse_recipe(TEACHER), folder)
    return folder


@pytest.fixture(scope="module")
def logits_run(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("logits") / "run"
    train(make_recipe(teacher), out)
    return out


@pytest.fixture(scope="module")
def features_run(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features") / "run"
    train(make_recipe(teacher, FEATURES), out)
    return out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def make_recipe(teacher: Path | str, *overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=[f"distill.teacher={teacher}", *overrides])


def make_trainer(recipe: Recipe, folder: Path) -> TrainerState:
    """A run before its first step."""
    accelerator = create_accelerator(recipe.run)
    setup = build_setup(recipe, device=accelerator.device, show_progress=False)
    return build_trainer_state(setup, accelerator, RunDir(folder))


def logged_values(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["split"] == "train"]


def check_same_distillation(run: Path, expected: Path) -> None:
    """Check that a resumed run is bit-exactly the same, and that its teacher had an effect."""
    check_same_run(run, expected)
    losses = logged_values(run, "distill_loss")
    assert losses == logged_values(expected, "distill_loss")
    assert 0 < losses[-1] != losses[0]


class TestLoss:
    student = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("temperature", [1.0, 4.0])
    def test_logits_loss_is_scaled_kl_divergence(self, temperature: float) -> None:
        def softmax(logits: Tensor) -> np.ndarray:
            powers = np.exp(logits.double().numpy() / temperature)
            return powers / powers.sum(1, keepdims=True)

        student_probs, teacher_probs = softmax(self.student), softmax(self.teacher)
        expected = temperature**2 * (teacher_probs * np.log(teacher_probs / student_probs)).sum()
        loss = distillation_loss(self.student, self.teacher, kind="logits", temperature=temperature)
        assert loss.item() == pytest.approx(expected, rel=1e-5)

    def test_features_loss_is_squared_distance_of_unit_vectors(self) -> None:
        student, teacher = (
            values.double().numpy() / np.linalg.norm(values.double().numpy(), axis=1)[:, None]
            for values in (self.student, 3 * self.teacher)
        )
        loss = distillation_loss(self.student, 3 * self.teacher, kind="features", temperature=1.0)
        assert loss.item() == pytest.approx(((student - teacher) ** 2).sum() / 2, rel=1e-5)

    def test_step_loss_matches_timms_logit_distillation_task(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        overrides = ["distill.weight=0.3", "distill.temperature=2", TEACHER_EVERY_STEP]
        trainer = make_trainer(make_recipe(teacher, *overrides), tmp_path / "run")
        network = trainer.setup.built.model.train()
        randomize_head(network)
        loader = trainer.build_loader(trainer.setup.source.splits["train"], train=True)
        trainer.setup = trainer.setup.with_num_samples(len(loader.labels))
        _, batches = next(loader.train_steps(trainer.setup.sampler, range(1)))
        batch = next(batches)
        total_loss, _, distill_loss = trainer.forward(batch)
        task = LogitDistillationTask(
            network,
            build_model(str(teacher)).model,
            criterion=nn.CrossEntropyLoss(),
            task_loss_weight=0.7,
            distill_loss_weight=0.3,
            temperature=2.0,
            device=torch.device("cpu"),
            verbose=False,
        )
        timm_losses = task(batch.images_BCHW, batch.labels_B)
        assert (total_loss / 16).item() == pytest.approx(timm_losses["loss"].item(), rel=1e-5)
        assert (distill_loss / 16).item() == pytest.approx(timm_losses["kd_loss"].item(), rel=1e-4)


class TestTeacher:
    def teacher_inputs(self, teacher: BuiltModel, pixels_BCHW: Tensor) -> Tensor:
        """Return the pixels that the teacher's network gets for a student with mean 0 and std 1."""
        inputs: list[Tensor] = []
        teacher.model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        student_preprocessing = dataclasses.replace(
            teacher.preprocessing, image_size=(96, 96), mean=(0.0,) * 3, std=(1.0,) * 3
        )
        Teacher(teacher, student_preprocessing=student_preprocessing, kind="logits")(pixels_BCHW)
        return inputs[0]

    def test_teacher_gets_the_same_colors_at_its_own_image_size(self) -> None:
        teacher = build_network("vit")
        pixels = torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1).expand(2, 3, 96, 96)
        teacher_inputs = self.teacher_inputs(teacher, pixels)
        preprocessing = teacher.preprocessing
        expected = [
            (c - m) / s
            for c, m, s in zip((0.1, 0.5, 0.9), preprocessing.mean, preprocessing.std, strict=True)
        ]
        assert teacher_inputs.shape == (2, 3, 32, 32)
        torch.testing.assert_close(teacher_inputs[1, :, 5, 9], torch.tensor(expected))

    def test_downscaling_for_the_teacher_is_antialiased(self) -> None:
        teacher = build_network("vit")
        checkerboard = (torch.arange(96)[:, None] + torch.arange(96)) % 2
        teacher_inputs = self.teacher_inputs(teacher, checkerboard.float().expand(1, 3, 96, 96))
        gray = (0.5 - teacher.preprocessing.mean[0]) / teacher.preprocessing.std[0]
        assert (teacher_inputs[0, 0, 4:-4, 4:-4] - gray).abs().max() < 0.05

    def test_teacher_is_frozen_and_in_eval_mode(self) -> None:
        teacher = build_network("vit")
        frozen = Teacher(teacher, student_preprocessing=teacher.preprocessing, kind="features")
        assert not any(p.requires_grad for p in frozen.parameters())
        assert not any(module.training for module in frozen.network.modules())
        assert frozen(random_images(32)).shape == (2, 32)


class TestClasses:
    def test_teacher_classes_are_matched_by_name(self, teacher: Path, tmp_path: Path) -> None:
        model = build_model(str(teacher))
        randomize_head(model.model)
        original = save_network(tmp_path / "teacher", model, [str(number) for number in range(10)])
        order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
        for name in ("weight", "bias"):
            parameter = getattr(model.model.head, name)
            parameter.data = parameter.data[order]
        reordered = save_network(tmp_path / "other", model, [str(number) for number in order])
        for number, path in enumerate((original, reordered)):
            overrides = ["model.head_init=default", "optim.steps=2", "run.test=false"]
            train(make_recipe(path, *overrides), tmp_path / str(number))
        expected = logged_values(tmp_path / "0", "distill_loss")
        assert logged_values(tmp_path / "1", "distill_loss") == pytest.approx(expected, rel=1e-5)

    def test_teacher_without_class_names_is_said(
        self, teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        nameless = shutil.copytree(teacher / "model", tmp_path / "other")
        config = json.loads((nameless / "config.json").read_text())
        kept = {key: config[key] for key in config if key not in ("checksums", "label_names")}
        (nameless / "config.json").write_text(json.dumps(kept))
        train(make_recipe(nameless, "optim.steps=1", "run.test=false"), tmp_path / "run")
        assert "has no class names, so its outputs are taken in the order" in caplog.text

    def test_teacher_with_other_classes_is_refused(self, teacher: Path, tmp_path: Path) -> None:
        for names in ("abcdefghij", "0123456788"):
            other = save_network(tmp_path / names, build_model(str(teacher)), list(names))
            with refused("weights.wrong_classes", other, "distill.kind=features"):
                train(make_recipe(other), tmp_path / "run")
        with refused("weights.wrong_classes", "200"):
            train(make_recipe("embedded:vit_ti"), tmp_path / "run")

    def test_multilabel_teacher_is_refused(self, teacher: Path, tmp_path: Path) -> None:
        shutil.copytree(teacher / "model", tmp_path / "other")
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        config |= {"problem_type": "multi_label_classification"}
        del config["checksums"]
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        with refused("weights.wrong_classes", "multi-label"):
            train(make_recipe(tmp_path / "other"), tmp_path / "run")

    def test_feature_distillation_needs_no_matching_classes(self, tmp_path: Path) -> None:
        other = save_network(tmp_path / "other", build_network("resnet"))
        train(make_recipe(other, FEATURES, "optim.steps=1", "run.test=false"), tmp_path / "run")
        assert np.isfinite(logged_values(tmp_path / "run", "distill_loss")).all()


class TestRuns:
    def test_killed_run_resumes_bit_exactly_with_the_same_teacher_only(
        self, teacher: Path, logits_run: Path, tmp_path: Path
    ) -> None:
        other, run = tmp_path / "teacher", tmp_path / "run"
        forget_checksums(shutil.copytree(teacher / "model", other))
        train_until_killed(5, make_recipe(other), run)
        config_text = (other / "config.json").read_text()
        config = json.loads(config_text)
        preprocessing = {**config["pretrained_cfg"], "mean": [0.1, 0.2, 0.3]}
        for change in (
            {"label_names": config["label_names"][::-1]},
            {"pretrained_cfg": preprocessing},
        ):
            (other / "config.json").write_text(json.dumps({**config, **change}))
            with refused("recipe.not_this_run", other):
                train(make_recipe(other), run, resume=True)
        (other / "config.json").write_text(config_text)
        path = other / "model.safetensors"
        weights, tensors = path.read_bytes(), load_file(path)
        save_file({key: 1.01 * value for key, value in tensors.items()}, path)
        with refused("recipe.not_this_run", other):
            train(make_recipe(other), run, resume=True)
        with refused("recipe.not_this_run", "distill.weight"):
            train(make_recipe(other, "distill.weight=0.6"), run, resume=True)
        with refused("recipe.not_this_run", "distill.teacher"):
            train(parse_recipe(RECIPE), run, resume=True)
        path.write_bytes(weights)
        train(make_recipe(other), run, resume=True)
        check_same_distillation(run, logits_run)

    def test_killed_run_resumes_its_projection(
        self, teacher: Path, features_run: Path, tmp_path: Path
    ) -> None:
        train_killed_and_resumed(5, make_recipe(teacher, FEATURES), tmp_path / "run")
        check_same_distillation(tmp_path / "run", features_run)

    @pytest.mark.faults
    def test_adapter_run_with_feature_distillation_resumes_bit_exactly(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        overrides = [FEATURES, f"distill.teacher={teacher}"]
        recipe = parse_recipe(ADAPTED, overrides=overrides)
        results = train(recipe, tmp_path / "whole")
        train_killed_and_resumed(3, recipe, tmp_path / "run")
        check_same_distillation(tmp_path / "run", tmp_path / "whole")
        run = RunDir(tmp_path / "whole")
        last = load_file(run.checkpoint_folder(4) / "model.safetensors")
        layers = {name.partition(".")[0] for name in last}
        assert layers == {"blocks", "head", "distill_projection"}
        first = load_file(run.checkpoint_folder(2) / "model.safetensors")
        assert not any(torch.equal(first[name], last[name]) for name in last)
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert not any("distill" in name for name in load_file(run.path / "model" / file))
        evaluated = evaluate_model(str(run.path), split="test")
        assert evaluated["loss"] == pytest.approx(results["test"]["loss"], abs=1e-6)

    @pytest.mark.parametrize("kind", ["logits", "features"])
    def test_teacher_outputs_are_cached_without_random_augmentation(
        self, kind: str, teacher: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch_sizes: list[int] = []
        forward = Teacher.forward

        def counted(self: Teacher, images_BCHW: Tensor) -> Tensor:
            batch_sizes.append(len(images_BCHW))
            return forward(self, images_BCHW)

        monkeypatch.setattr(Teacher, "forward", counted)
        monkeypatch.setattr(Teacher, "forward_features", counted)
        overrides = [f"distill.kind={kind}", "optim.steps=8", "run.eval_every=8"]
        overrides += ["data.num_train=60", "run.test=false"]
        train(make_recipe(teacher, *overrides, TEACHER_ONCE), tmp_path / "once")
        assert sum(batch_sizes) == 2 + 50, (
            "two blank images for the output shape, then each image once"
        )
        batch_sizes.clear()
        train(make_recipe(teacher, *overrides, TEACHER_EVERY_STEP), tmp_path / "every_step")
        assert sum(batch_sizes) == 2 + 8 * 16
        for key in ("loss", "distill_loss"):
            once, every_step = (
                logged_values(tmp_path / name, key) for name in ("once", "every_step")
            )
            assert once == pytest.approx(every_step, abs=1e-5)
        assert len(list(cache.iterdir())) == 1
        if kind == "features":
            return
        # a teacher with another classifier has the same features but other logits
        other = build_model(str(teacher))
        randomize_head(other.model)
        path = save_network(tmp_path / "other", other, [str(number) for number in range(10)])
        overrides.append("optim.lr=1e-3")
        for name, images in ((teacher, 0), (path, 50)):
            batch_sizes.clear()
            train(make_recipe(name, *overrides, TEACHER_ONCE), tmp_path / str(images))
            assert sum(batch_sizes) == 2 + images

    def test_cached_outputs_are_those_of_the_images_that_the_student_reads(
        self, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without pillow-heif, a run cannot read some images of an earlier run."""
        overrides = ["data.unreadable=quarantine", "data.num_train=60", "run.test=false"]
        monkeypatch.setattr(image_decoder, "heif_decoder_version", lambda: "1.0")
        train(make_recipe(teacher, *overrides, TEACHER_ONCE), tmp_path / "all")
        decode = ArrayImages.decode

        def decode_some(self: ArrayImages, row: int, *arguments: Any) -> np.ndarray:
            if row in (10, 570):
                raise DataError(f"{row}: a HEIC photo", code="data.wrong_format")
            return decode(self, row, *arguments)

        monkeypatch.setattr(image_decoder, "heif_decoder_version", lambda: None)
        monkeypatch.setattr(ArrayImages, "decode", decode_some)
        for name, transforms in (("once", TEACHER_ONCE), ("every_step", TEACHER_EVERY_STEP)):
            train(make_recipe(teacher, *overrides, transforms), tmp_path / name)
        losses = [logged_values(tmp_path / name, "distill_loss") for name in ("once", "every_step")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)

    @pytest.mark.faults
    def test_frozen_backbone_gives_the_same_losses_with_cached_logits(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        train(make_recipe(teacher, "model.freeze=backbone", TEACHER_ONCE), tmp_path / "features")
        train(
            make_recipe(teacher, "model.freeze=backbone", TEACHER_EVERY_STEP), tmp_path / "through"
        )
        expected = pytest.approx(read_train_losses(tmp_path / "through"), abs=1e-5)
        assert read_train_losses(tmp_path / "features") == expected

    def test_projection_is_saved_in_checkpoints_but_not_published(self, features_run: Path) -> None:
        out = features_run
        folder = RunDir(out).checkpoint_folder(6)
        names = {"distill_projection.weight", "distill_projection.bias"}
        first = load_file(RunDir(out).checkpoint_folder(4) / "model.safetensors")[
            "distill_projection.weight"
        ]
        last = load_file(folder / "model.safetensors")
        assert first.shape == (32, 16)
        assert not torch.equal(first, last["distill_projection.weight"])
        assert names < load_file(folder / "ema.safetensors").keys()
        moments = load_file(folder / "optimizer.safetensors").keys()
        assert "distill_projection.weight/exp_avg" in moments
        published = load_file(out / "model" / "model.safetensors").keys()
        assert published == last.keys() - names
        plan = json.loads((out / "run.json").read_text())["plan"]
        assert plan["parameters"] == sum(
            p.numel() for p in build_model(str(out)).model.parameters()
        )
        assert json.loads((out / "results.json").read_text())["test"]["examples"] == 40

    @pytest.mark.slow
    def test_two_ranks_give_the_losses_of_one(
        self, teacher: Path, features_run: Path, tmp_path: Path
    ) -> None:
        path, out = tmp_path / "recipe.yaml", tmp_path / "two"
        path.write_text(make_recipe(teacher, FEATURES, "data.micro_batch=4").to_yaml())
        run_two_ranks(run_rank_command, "train", str(path), "--out", str(out))
        for key in ("loss", "distill_loss"):
            expected = pytest.approx(logged_values(features_run, key), abs=1e-5)
            assert logged_values(out, key) == expected

    @pytest.mark.faults  # slow: compiles; tests/training/test_train.py compiles, too
    def test_compiled_model_gives_the_same_losses(self, teacher: Path, tmp_path: Path) -> None:
        for name in ("true", "false"):
            train(make_recipe(teacher, FEATURES, f"model.compile={name}"), tmp_path / name)
        expected = pytest.approx(read_train_losses(tmp_path / "false"), abs=1e-3)
        assert read_train_losses(tmp_path / "true") == expected

    @pytest.mark.faults
    def test_bf16_with_grad_checkpointing_gives_similar_losses(
        self, teacher: Path, features_run: Path, tmp_path: Path
    ) -> None:
        overrides = ["model.grad_checkpointing=true", "run.precision=bf16"]
        train(make_recipe(teacher, FEATURES, *overrides), tmp_path / "other")
        assert read_train_losses(tmp_path / "other") == pytest.approx(
            read_train_losses(features_run), abs=2e-2
        )

    def test_earlier_stages_train_without_the_teacher(self, teacher: Path, tmp_path: Path) -> None:
        stages = "optim.stages=[{freeze: backbone, steps: 2, train: resize}]"
        train(make_recipe(teacher, FEATURES, stages), tmp_path / "run")
        assert len(logged_values(tmp_path / "run", "distill_loss")) == 6
        stage = stage_folder(tmp_path / "run", 1)
        assert len(read_train_losses(stage)) == 2
        assert "distill_loss" not in (stage / "metrics.jsonl").read_text()
        assert "teacher" not in json.loads((stage / "run.json").read_text())

    @pytest.mark.parametrize("overrides", [(), (FEATURES,)])
    def test_auto_micro_batch_runs_the_teacher_too(
        self, teacher: Path, tmp_path: Path, overrides: tuple[str, ...]
    ) -> None:
        recipe = make_recipe(teacher, "data.micro_batch=auto", *overrides)
        trainer = make_trainer(recipe, tmp_path / "run")
        assert trainer.distillation is not None
        with (
            mock.patch.object(
                trainer.distillation, "compute_loss", side_effect=torch.OutOfMemoryError
            ),
            refused("setup.memory", "data.micro_batch=auto"),
        ):
            find_micro_batch_size(trainer)
        assert find_micro_batch_size(trainer) == recipe.data.batch_size


class TestRecords:
    def test_plan_record_and_card_name_the_teacher(
        self, teacher: Path, logits_run: Path, tmp_path: Path
    ) -> None:
        out = logits_run
        plan = train(make_recipe(teacher), tmp_path / "run", dry_run=True)
        record = json.loads((out / "run.json").read_text())["teacher"]
        top1 = json.loads((teacher / "results.json").read_text())["test"]["top1"]
        assert record == plan["teacher"]
        assert (record["name"], record["top1"], record["examples"]) == (str(teacher), top1, 40)
        card = (out / "model" / "README.md").read_text()
        assert "teacher `run`: kind logits at temperature 4, weight 0.5" in card
        assert f"{100 * top1:.2f} % accuracy on its own 40 test images" in card
        assert str(teacher.parent) not in card
        sha256 = json.loads((teacher / "results.json").read_text())["model_sha256"]
        assert distillation._recorded_accuracy(str(teacher), sha256)["top1"] == top1
        assert distillation._recorded_accuracy(str(teacher), "0" * 64) == {}
        copy = shutil.copytree(teacher / "model", tmp_path / "copy")
        results = json.loads((copy / "results.json").read_text())
        (copy / "results.json").write_text(
            json.dumps({**results, "test": {**results["test"], "top1": 1.0}})
        )
        with refused("weights.damaged", copy, "results.json"):
            train(make_recipe(copy), tmp_path / "other")

    def test_recipe_without_teacher_has_no_distill_section(self) -> None:
        assert "distill" not in parse_recipe(RECIPE).to_yaml()
        recipe = make_recipe("x", FEATURES)
        assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    "overrides, key",
    [
        ([FEATURES, "distill.temperature=2"], "distill.temperature"),
        ([FEATURES, "distill.weight=1"], "distill.weight"),
        ([FEATURES, "model.freeze=backbone"], "model.freeze"),
        (["distill.weight=1", "optim.label_smoothing=0.1"], "label_smoothing"),
        (["distill.weight=1", "optim.class_weights=balanced"], "class_weights"),
    ],
)
def test_conflicting_distill_keys_are_refused(overrides: list[str], key: str) -> None:
    assert key in recipe_error("conflict", RECIPE, "distill.teacher=x", *overrides)

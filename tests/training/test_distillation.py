"""A teacher in the loss: formulas, its pixels and classes, and runs that are alike and resumed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_runs import killed_before, losses, weights
from networks import built, images, save, shuffle
from ranks import command, two_ranks
from recipe_texts import problem, tiny_text
from refusals import refused
from safetensors.torch import load_file, save_file
from timm.task.distillation import LogitDistillationTask
from torch import Tensor, nn

from finetune.commands.evaluate import evaluate_model
from finetune.console import say_nothing
from finetune.models.build import build
from finetune.models.saved import Built
from finetune.recipe.load import Recipe, parse_recipe
from finetune.run.directory import RunDir
from finetune.training.build_state import build_trainer_state
from finetune.training.distillation import Teacher, distillation_loss
from finetune.training.launch import launch
from finetune.training.lr_range import lr_range
from finetune.training.memory import NO_NEED
from finetune.training.micro_batch import find_micro_batch
from finetune.training.setup import open_setup
from finetune.training.stages import folder_of
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

DATA = "eval: resize, num_train: 160, num_test: 40"
TEACHER = tiny_text(
    f"train: resize | flip, {DATA}, batch_size: 32, mean: [0.4, 0.5, 0.6], std: [0.3, 0.4, 0.5]",
    optim="name: adamw, lr: 1e-2, steps: 4",
)
RECIPE = tiny_text(
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
# Random by name, the same pixels by probability: so the teacher is beside each step.
BESIDE, ONCE = "data.train=resize | flip(0)", "data.train=resize"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(parse_recipe(TEACHER), folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def recipe(teacher: Path | str, *overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=[f"distill.teacher={teacher}", *overrides])


def trainer_of(chosen: Recipe, folder: Path) -> TrainerState:
    """A run before its first step."""
    accelerator = launch(chosen.run)
    setup = open_setup(chosen, device=accelerator.device, notice=say_nothing, progress=False)
    return build_trainer_state(setup, accelerator, RunDir(folder))


def figures(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["split"] == "train"]


class TestLoss:
    student = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("temperature", [1.0, 4.0])
    def test_of_logits(self, temperature: float) -> None:
        def softened(logits: Tensor) -> np.ndarray:
            powers = np.exp(logits.double().numpy() / temperature)
            return powers / powers.sum(1, keepdims=True)

        own, theirs = softened(self.student), softened(self.teacher)
        expected = temperature**2 * (theirs * np.log(theirs / own)).sum()
        loss = distillation_loss(self.student, self.teacher, kind="logits", temperature=temperature)
        assert loss.item() == pytest.approx(expected, rel=1e-5)

    def test_of_features(self) -> None:
        own, theirs = (
            values.double().numpy() / np.linalg.norm(values.double().numpy(), axis=1)[:, None]
            for values in (self.student, 3 * self.teacher)
        )
        loss = distillation_loss(self.student, 3 * self.teacher, kind="features", temperature=1.0)
        assert loss.item() == pytest.approx(((own - theirs) ** 2).sum() / 2, rel=1e-5)

    def test_of_a_step_is_that_of_timms_task(self, teacher: Path, tmp_path: Path) -> None:
        chosen = recipe(teacher, "distill.weight=0.3", "distill.temperature=2", BESIDE)
        trainer = trainer_of(chosen, tmp_path / "run")
        network = trainer.setup.built.model.train()
        shuffle(network)
        loader = trainer.loader(trainer.setup.source.splits["train"], train=True)
        trainer.setup = trainer.setup.with_num_samples(len(loader.labels))
        _, batches = next(loader.train(trainer.setup.sampler, range(1)))
        batch = next(batches)
        whole, _, part = trainer.forward(batch)
        task = LogitDistillationTask(
            network,
            build(str(teacher)).model,
            criterion=nn.CrossEntropyLoss(),
            task_loss_weight=0.7,
            distill_loss_weight=0.3,
            temperature=2.0,
            device=torch.device("cpu"),
            verbose=False,
        )
        theirs = task(batch.images_BCHW, batch.labels_B)
        assert (whole / 16).item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
        assert (part / 16).item() == pytest.approx(theirs["kd_loss"].item(), rel=1e-4)


class TestTeacher:
    def seen(self, made: Built, pixels_BCHW: Tensor) -> Tensor:
        """The pixels that a teacher's network gets, for those of a network with mean 0, std 1."""
        given: list[Tensor] = []
        made.model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
        sees = dataclasses.replace(
            made.preprocessing, image_size=(96, 96), mean=(0.0,) * 3, std=(1.0,) * 3
        )
        Teacher(made, sees=sees, kind="logits")(pixels_BCHW)
        return given[0]

    def test_it_sees_the_same_colours_at_its_own_size(self) -> None:
        made = built("vit")
        pixels = torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1).expand(2, 3, 96, 96)
        seen = self.seen(made, pixels)
        own = made.preprocessing
        expected = [(c - m) / s for c, m, s in zip((0.1, 0.5, 0.9), own.mean, own.std, strict=True)]
        assert seen.shape == (2, 3, 32, 32)
        torch.testing.assert_close(seen[1, :, 5, 9], torch.tensor(expected))

    def test_what_is_too_fine_for_it_becomes_grey(self) -> None:
        made = built("vit")
        board = (torch.arange(96)[:, None] + torch.arange(96)) % 2
        seen = self.seen(made, board.float().expand(1, 3, 96, 96))
        grey = (0.5 - made.preprocessing.mean[0]) / made.preprocessing.std[0]
        assert (seen[0, 0, 4:-4, 4:-4] - grey).abs().max() < 0.05

    def test_nothing_of_it_is_trained(self) -> None:
        made = built("vit")
        frozen = Teacher(made, sees=made.preprocessing, kind="features")
        assert not any(p.requires_grad for p in frozen.parameters())
        assert not any(module.training for module in frozen.network.modules())
        assert frozen(images(32)).shape == (2, 32)


class TestClasses:
    def test_they_are_found_by_name_in_any_order(self, teacher: Path, tmp_path: Path) -> None:
        made = build(str(teacher))
        shuffle(made.model)
        one = save(tmp_path / "teacher", made, [str(number) for number in range(10)])
        order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
        for name in ("weight", "bias"):
            parameter = getattr(made.model.head, name)
            parameter.data = parameter.data[order]
        other = save(tmp_path / "other", made, [str(number) for number in order])
        for number, path in enumerate((one, other)):
            chosen = ["model.head_init=default", "optim.steps=2", "run.test=false"]
            train(recipe(path, *chosen), tmp_path / str(number))
        expected = figures(tmp_path / "0", "distill_loss")
        assert figures(tmp_path / "1", "distill_loss") == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("names", [list("abcdefghij"), list("0123456788")])
    def test_others_are_refused(self, teacher: Path, tmp_path: Path, names: list[str]) -> None:
        other = save(tmp_path / "other", build(str(teacher)), names)
        with refused("weights.wrong_classes", other, "distill.kind=features"):
            train(recipe(other), tmp_path / "run")
        with refused("weights.wrong_classes", "200"):
            train(recipe("embedded:vit_ti"), tmp_path / "run")

    def test_one_of_several_labels_is_refused(self, teacher: Path, tmp_path: Path) -> None:
        shutil.copytree(teacher / "model", tmp_path / "other")
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        config |= {"problem_type": "multi_label_classification"}
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        with refused("weights.wrong_classes", "any number of labels"):
            train(recipe(tmp_path / "other"), tmp_path / "run")

    def test_features_have_none(self, tmp_path: Path) -> None:
        other = save(tmp_path / "other", built("resnet"))
        train(recipe(other, FEATURES, "optim.steps=1", "run.test=false"), tmp_path / "run")
        assert np.isfinite(figures(tmp_path / "run", "distill_loss")).all()


class TestRuns:
    @pytest.mark.parametrize("kind", ["logits", "features"])
    def test_a_killed_one_is_resumed_to_the_bit(
        self, kind: str, teacher: Path, tmp_path: Path
    ) -> None:
        chosen = recipe(teacher, f"distill.kind={kind}", "model.dropout=0.1")
        train(chosen, tmp_path / "whole")
        killed_before(5, chosen, tmp_path / "run")
        train(chosen, tmp_path / "run", resume=True)
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")
        parts = figures(tmp_path / "run", "distill_loss")
        assert parts == figures(tmp_path / "whole", "distill_loss")
        assert 0 < parts[-1] != parts[0]
        assert weights(tmp_path / "run") == weights(tmp_path / "whole")

    def test_an_adapter_learns_from_it_and_is_resumed_to_the_bit(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        words = [FEATURES, f"distill.teacher={teacher}"]
        chosen = parse_recipe(ADAPTED, overrides=words)
        results = train(chosen, tmp_path / "whole")
        killed_before(3, chosen, tmp_path / "run")
        train(chosen, tmp_path / "run", resume=True)
        for key in ("loss", "distill_loss"):
            assert figures(tmp_path / "run", key) == figures(tmp_path / "whole", key)
        assert weights(tmp_path / "run") == weights(tmp_path / "whole")
        run = RunDir(tmp_path / "whole")
        kept = load_file(run.folder(4) / "model.safetensors")
        layers = {name.partition(".")[0] for name in kept}
        assert layers == {"blocks", "head", "distill_projection"}
        first = load_file(run.folder(2) / "model.safetensors")
        assert not any(torch.equal(first[name], kept[name]) for name in kept)
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert not any("distill" in name for name in load_file(run.path / "model" / file))
        measured = evaluate_model(str(run.path), split="test")
        assert measured["loss"] == pytest.approx(results["test"]["loss"], abs=1e-6)

    @pytest.mark.parametrize("kind", ["logits", "features"])
    def test_the_teacher_answers_once_where_nothing_is_random(
        self, kind: str, teacher: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answered: list[int] = []
        forward = Teacher.forward

        def counted(self: Teacher, images_BCHW: Tensor) -> Tensor:
            answered.append(len(images_BCHW))
            return forward(self, images_BCHW)

        monkeypatch.setattr(Teacher, "forward", counted)
        monkeypatch.setattr(Teacher, "forward_features", counted)
        chosen = [f"distill.kind={kind}", "optim.steps=20", "run.eval_every=20"]
        train(recipe(teacher, *chosen, ONCE), tmp_path / "once")
        assert sum(answered) == 2 + 140, "a look at two black images, and each image"
        train(recipe(teacher, *chosen, ONCE, "optim.lr=1e-3"), tmp_path / "again")
        assert sum(answered) == 2 * 2 + 140
        train(recipe(teacher, *chosen, BESIDE), tmp_path / "beside")
        assert sum(answered) == 3 * 2 + 140 + 20 * 16
        for key in ("loss", "distill_loss"):
            once, beside = (figures(tmp_path / name, key) for name in ("once", "beside"))
            assert once == pytest.approx(beside, abs=1e-5)
        assert len(list(cache.iterdir())) == 1

    def test_one_cache_serves_no_other_teacher(self, teacher: Path, tmp_path: Path) -> None:
        """Features are the same with another classifier; logits are not."""
        other = build(str(teacher))
        shuffle(other.model)
        names = [str(number) for number in range(10)]
        path = save(tmp_path / "other", other, names)
        parts = []
        for number, name in enumerate((teacher, path)):
            train(recipe(name, ONCE, "optim.steps=1"), tmp_path / str(number))
            parts += figures(tmp_path / str(number), "distill_loss")
        assert parts[0] != pytest.approx(parts[1], rel=1e-3)

    def test_a_frozen_backbone_learns_from_cached_logits(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        train(recipe(teacher, "model.freeze=backbone", ONCE), tmp_path / "features")
        train(recipe(teacher, "model.freeze=backbone", BESIDE), tmp_path / "through")
        expected = pytest.approx(losses(tmp_path / "through"), abs=1e-5)
        assert losses(tmp_path / "features") == expected

    def test_the_projection_is_kept_in_checkpoints_alone(
        self, teacher: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        results = train(recipe(teacher, FEATURES), out)
        folder = RunDir(out).folder(6)
        names = {"distill_projection.weight", "distill_projection.bias"}
        first = load_file(RunDir(out).folder(4) / "model.safetensors")["distill_projection.weight"]
        last = load_file(folder / "model.safetensors")
        assert first.shape == (32, 16)
        assert not torch.equal(first, last["distill_projection.weight"])
        assert names < load_file(folder / "ema.safetensors").keys()
        moments = load_file(folder / "optimizer.safetensors").keys()
        assert "distill_projection.weight/exp_avg" in moments
        published = load_file(out / "model" / "model.safetensors").keys()
        assert published == last.keys() - names
        plan = json.loads((out / "run.json").read_text())["plan"]
        assert plan["parameters"] == sum(p.numel() for p in build(str(out)).model.parameters())
        assert results["test"]["examples"] == 40

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["logits", "features"])
    def test_two_ranks_train_as_one(self, kind: str, teacher: Path, tmp_path: Path) -> None:
        path, words = tmp_path / "recipe.yaml", [f"distill.kind={kind}"]
        path.write_text(recipe(teacher).to_yaml())
        train(recipe(teacher, *words, "data.micro_batch=4"), tmp_path / "one")
        two_ranks(command, "train", str(path), *words, "--out", str(tmp_path / "two"))
        for key in ("loss", "distill_loss"):
            one, two = (figures(tmp_path / name, key) for name in ("one", "two"))
            assert two == pytest.approx(one, abs=1e-5)

    @pytest.mark.faults  # compiling takes seconds; tests/training/test_train.py compiles, too
    def test_the_compiled_network_learns_the_same(self, teacher: Path, tmp_path: Path) -> None:
        for name in ("true", "false"):
            train(recipe(teacher, FEATURES, f"model.compile={name}"), tmp_path / name)
        expected = pytest.approx(losses(tmp_path / "false"), abs=1e-3)
        assert losses(tmp_path / "true") == expected

    def test_half_precision_and_recomputed_activations(self, teacher: Path, tmp_path: Path) -> None:
        train(recipe(teacher, FEATURES), tmp_path / "plain")
        words = ["model.grad_checkpointing=true", "run.precision=bf16"]
        train(recipe(teacher, FEATURES, *words), tmp_path / "other")
        assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), abs=2e-2)

    def test_stages_have_no_teacher(self, teacher: Path, tmp_path: Path) -> None:
        stages = "optim.stages=[{freeze: backbone, steps: 2, train: resize}]"
        train(recipe(teacher, FEATURES, stages), tmp_path / "run")
        assert len(figures(tmp_path / "run", "distill_loss")) == 6
        stage = folder_of(tmp_path / "run", 1)
        assert len(losses(stage)) == 2
        assert "distill_loss" not in (stage / "metrics.jsonl").read_text()
        assert "teacher" not in json.loads((stage / "run.json").read_text())

    def test_the_range_test_has_it(self, teacher: Path) -> None:
        rates = {"lowest": 1e-4, "highest": 1e-3, "steps": 1}
        mixed = lr_range(recipe(teacher, "distill.weight=0.75"), **rates).loss[0]
        alone = lr_range(recipe(teacher, "distill.weight=0.25"), **rates).loss[0]
        assert alone - mixed > 0.5, "the teacher knows little yet, and so its part is small"

    def test_the_micro_batch_leaves_room_for_it(
        self, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = trainer_of(recipe(teacher, "data.micro_batch=auto"), tmp_path / "run")
        room = trainer.distillation
        assert room is not None
        need = room.need(8)
        assert need.per_image > 0
        monkeypatch.setattr("finetune.training.micro_batch.available_bytes", lambda *_: 300_000)
        beside = find_micro_batch(trainer)
        monkeypatch.setattr(room, "need", lambda images: NO_NEED)
        assert beside < find_micro_batch(trainer)


class TestRecords:
    def test_the_teacher_is_named_everywhere(self, teacher: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        plan = train(recipe(teacher), out, dry_run=True)
        train(recipe(teacher), out)
        record = json.loads((out / "run.json").read_text())["teacher"]
        top1 = json.loads((teacher / "results.json").read_text())["test"]["top1"]
        assert record == plan["teacher"]
        assert (record["name"], record["top1"], record["examples"]) == (str(teacher), top1, 40)
        card = (out / "model" / "README.md").read_text()
        assert "teacher `run`: kind logits at temperature 4, weight 0.5" in card
        assert f"{100 * top1:.2f} % of its own 40 test images" in card
        assert str(teacher.parent) not in card

    def test_a_changed_teacher_is_refused(self, teacher: Path, tmp_path: Path) -> None:
        other = tmp_path / "teacher"
        shutil.copytree(teacher / "model", other)
        killed_before(5, recipe(other), tmp_path / "run")
        state = load_file(other / "model.safetensors")
        save_file({key: value * 1.01 for key, value in state.items()}, other / "model.safetensors")
        with refused("recipe.not_this_run", other):
            train(recipe(other), tmp_path / "run", resume=True)
        with refused("recipe.not_this_run", "distill.weight"):
            train(recipe(other, "distill.weight=0.6"), tmp_path / "run", resume=True)
        with refused("recipe.not_this_run", "distill.teacher"):
            train(parse_recipe(RECIPE), tmp_path / "run", resume=True)

    @pytest.mark.parametrize("inside", ["", "model"])
    def test_a_run_is_not_its_own_teacher(self, inside: str, tmp_path: Path) -> None:
        with refused("recipe.conflict", "distill.teacher", tmp_path / "run"):
            train(recipe(tmp_path / "run" / inside), tmp_path / "run")

    def test_a_recipe_without_one_does_not_mention_it(self) -> None:
        assert "distill" not in parse_recipe(RECIPE).to_yaml()
        chosen = recipe("x", FEATURES)
        assert parse_recipe(chosen.to_yaml()) == chosen


@pytest.mark.parametrize(
    "overrides, named",
    [
        ([FEATURES, "distill.temperature=2"], "distill.temperature"),
        ([FEATURES, "distill.weight=1"], "distill.weight"),
        ([FEATURES, "model.freeze=backbone"], "model.freeze"),
        (["distill.weight=1", "optim.label_smoothing=0.1"], "label_smoothing"),
        (["distill.weight=1", "optim.class_weights=balanced"], "class_weights"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], named: str) -> None:
    assert named in problem("conflict", RECIPE, "distill.teacher=x", *overrides)


@pytest.mark.faults  # it measures the machine, which takes long
def test_the_forecast_counts_the_teacher(teacher: Path, tmp_path: Path) -> None:
    from finetune.commands.plan import forecast

    path = tmp_path / "recipe.yaml"
    path.write_text(recipe(teacher).to_yaml())
    parts: dict[str, Any] = forecast(str(path))["memory"]["parts"]
    assert parts["teacher"] == pytest.approx(
        (teacher / "model/model.safetensors").stat().st_size, rel=0.2
    )
    parts = forecast(str(path), [ONCE])["memory"]["parts"]
    assert (parts["teacher"], parts["features"]) == (0, 4 * 10 * 140)

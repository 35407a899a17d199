"""`finetune train SOURCE --minutes N`, `finetune tune`: trials, decisions, time, kills, the run."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles import Double
from logs import logged
from networks import save_random_network
from PIL import Image
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import write_image_folder

from finetune.cli import main as cli
from finetune.commands import (
    portfolio,
    search_space,
    successive_halving,
    tune,
    weight_selection,
)
from finetune.commands import start as start_module
from finetune.commands.portfolio import Config, build_trials
from finetune.commands.run_search import Progress, run_search, train_until
from finetune.commands.search_space import draw_trials
from finetune.commands.start import Choice, RecipeBuilder, StartResult
from finetune.commands.successive_halving import Decision, Point, Search, Trial, best_trial, decide
from finetune.commands.tune import read_search
from finetune.commands.weight_selection import Candidate, Score
from finetune.errors import DivergedError, Interrupted, WeightsError
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys
from finetune.report.search_page import write_search_page
from finetune.run.directory import RunDir
from finetune.run.record import read_record
from finetune.training import finalize
from finetune.training.train import train

RECIPE = tiny_recipe_text("eval: resize", optim="lr: 1e-3, epochs: 10")
EPOCH = 10  # steps


DEFAULTS = dict(run_search.__kwdefaults__)


class Killed(BaseException):
    """SIGKILL, in the middle of an epoch."""


@dataclass
class Machine:
    """Runs that cost simulated time; each keeps its steps in a file, as a checkpoint.

    Attributes:
        accuracies: final accuracy of each trial; 0.5 if missing.
        epochs: epochs of each trial; 10 if missing.
        step_seconds: seconds of a step of each trial; 1 if missing.
        kill_at, kill: time of the kill, and what it raises.
        fail: error of a trial.
        trained: the steps that were trained, by trial.
    """

    accuracies: dict[str, float] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    kill_at: float = 1e9
    kill: BaseException = field(default_factory=Killed)
    fail: dict[str, Exception] = field(default_factory=dict)
    num_images: int = 1000
    start_seconds: float = 2.0
    inputs: dict[str, str] = field(default_factory=lambda: {"images or labels": "a"})
    now: float = 0.0
    trained: dict[str, list[int]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.kill_at:
            raise self.kill

    def train_until(
        self, recipe: Recipe, folder: Path, pause: Callable[[int, int], bool]
    ) -> Progress:
        name, checkpoint = folder.name, folder / "step.json"
        self._wait(self.start_seconds)
        if name in self.fail:
            raise self.fail[name]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text("{}")
        base = name.partition("-split")[0]
        step = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
        num_steps = EPOCH * round(self.epochs.get(base, recipe.optim.epochs or 0))
        while step < num_steps:
            self._wait(EPOCH * self.step_seconds.get(base, 1.0))
            step += EPOCH
            self.trained.setdefault(name, []).append(step)
            checkpoint.write_text(json.dumps(step))
            if pause(step, num_steps):
                break
        final = self.accuracies.get(base, 0.5)
        curve = [
            Point(each, final * (0.5 + 0.5 * each / num_steps), 1.0)
            for each in range(EPOCH, step + 1, EPOCH)
        ]
        train_seconds = step * self.step_seconds.get(base, 1.0)
        return Progress(num_steps, self.num_images, curve, train_seconds, self.inputs)

    def run(self, search: Search, folder: Path) -> Trial:
        return run_search(search, folder, clock=self.clock, train_until=self.train_until)


def make_search(
    names: str = "start a b c d e f g",
    *,
    minutes: float = 10,
    num_train: int = 5000,
    can_resplit: bool = False,
) -> Search:
    """A search whose trials take 100 s by their estimate."""
    trials = [
        Trial(name, f"trial {name}", "full", RECIPE, estimated_seconds=100, final_seconds=5)
        for name in names.split()
    ]
    return Search("photos", [], minutes, "top1", num_train, can_resplit, trials)


def plan(search: Search) -> list[tuple[str, float]]:
    return [(each.trial, each.until) for each in search.decisions]


class TestDecisions:
    def test_the_first_recipe_is_trained_to_its_end_before_any_other(self, tmp_path: Path) -> None:
        search = make_search()
        assert Machine().run(search, tmp_path).name == "start"
        assert plan(search)[:2] == [("start", 1.0), ("a", 0.25)]

    def test_the_better_half_continues_from_where_it_paused(self, tmp_path: Path) -> None:
        machine, search = Machine(accuracies={"b": 0.9}), make_search(minutes=20)
        assert machine.run(search, tmp_path).name == "b"
        assert [until for name, until in plan(search) if name == "b"] == [0.25, 0.5, 1.0]
        assert machine.trained["b"] == list(range(10, 101, 10))  # no step twice

    def test_a_clearly_worse_trial_ends_at_its_first_pause(self, tmp_path: Path) -> None:
        search = make_search(minutes=30)
        Machine(accuracies={"start": 0.8, "a": 0.3}).run(search, tmp_path)
        assert plan(search).count(("a", 0.25)) == 1
        assert "clearly worse than start" in search["a"].end_reason
        assert search["a"].step == 30

    def test_a_difference_within_the_noise_does_not_replace_the_first(self, tmp_path: Path) -> None:
        machine = Machine(accuracies={"start": 0.80, "a": 0.82}, num_images=100)
        assert machine.run(make_search(), tmp_path / "small").name == "start"
        machine = Machine(accuracies={"start": 0.80, "a": 0.82}, num_images=2000)
        assert machine.run(make_search(), tmp_path / "large").name == "a"

    def test_the_most_promising_configuration_is_next(self, tmp_path: Path) -> None:
        search = make_search("start a b c")
        for name, accuracy in (("start", 0.5), ("a", 0.4), ("c", 0.9)):
            search[name].recorded = {"tiles": accuracy}
        Machine().run(search, tmp_path)
        started = list(dict.fromkeys(name for name, _ in plan(search)))
        assert started == ["start", "c", "a", "b"]  # nothing is recorded of b

    def test_the_page_lists_what_was_not_tried(self, no_plots: None, tmp_path: Path) -> None:
        search = make_search(minutes=3)
        Machine().run(search, tmp_path)
        write_search_page(tmp_path, asdict(search))
        page = (tmp_path / "trials.html").read_text(encoding="utf-8")
        assert "2 of 8 configurations tried" in page
        assert "Not tried: b, c, d, e, f, g." in page

    def test_few_images_decide_only_with_other_splits(self, tmp_path: Path) -> None:
        """0.7 and 0.9 on 40 images differ; further splits confirm it on more than 200."""
        machine = Machine(accuracies={"start": 0.7, "a": 0.9}, num_images=40)
        search = make_search("start a", num_train=160, minutes=30, can_resplit=True)
        assert machine.run(search, tmp_path).name == "a"
        splits = [name for name, _ in plan(search) if "-split" in name]
        assert splits == [f"{name}-split{k}" for k in (2, 3, 4, 5) for name in ("a", "start")]
        recipes = [parse_recipe(search[name].recipe) for name in splits[::2]]
        assert [recipe.data.split_seed for recipe in recipes] == [1, 2, 3, 4]

    def test_a_decision_depends_on_the_record_alone(self, tmp_path: Path) -> None:
        Machine(accuracies={"b": 0.9}).run(make_search(), tmp_path)
        search = read_search(tmp_path)
        assert best_trial(search) == search[search.chosen]
        first = make_search()
        assert decide(first) == decide(make_search()) == Decision("start", 1.0, ANY_TEXT, 0.0)

    def test_a_trial_that_diverges_loses_and_the_search_continues(self, tmp_path: Path) -> None:
        error = DivergedError("the loss is not finite; lower optim.lr")
        search = make_search(minutes=30)
        machine = Machine(accuracies={"b": 0.9}, fail={"a": error})
        lines: list[str] = []
        with logged(lines):
            assert machine.run(search, tmp_path).name == "b"
        assert search["a"].end_reason == f"failed: {error}"
        assert f"a failed: {error}" in lines

    def test_trials_are_not_pushed(self, tmp_path: Path) -> None:
        search, pushed = make_search("start a"), []
        run = "push_to: me/x, trackers: [tensorboard]"
        text = tiny_recipe_text("eval: resize", optim="lr: 1e-3, epochs: 10", run=run)
        search.trials[0].recipe = search.trials[1].recipe = text
        machine = Machine()

        def train_until(recipe: Recipe, *args: Any) -> Progress:
            pushed.append((recipe.run.push_to, recipe.run.trackers))
            return machine.train_until(recipe, *args)

        run_search(search, tmp_path, clock=machine.clock, train_until=train_until)
        assert set(pushed) == {(None, ())}
        assert parse_recipe(search["a"].recipe).run.push_to == "me/x"  # for the chosen run

    def test_the_error_of_the_first_trial_is_raised_if_all_fail(self, tmp_path: Path) -> None:
        error = DivergedError("the loss is not finite; lower optim.lr", code="diverged")
        machine = Machine(fail={"start": error, "a": error})
        with refused("diverged", "optim.lr"):
            machine.run(make_search("start a"), tmp_path)


class AnyText(str):
    """Equal to any text."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)


ANY_TEXT = AnyText()


class TestTime:
    @pytest.mark.parametrize("minutes, speed", [(5, 1.0), (5, 0.5), (10, 1.9), (20, 1.0)])
    def test_the_time_is_used_and_kept(self, tmp_path: Path, minutes: float, speed: float) -> None:
        """The estimates are off by up to a factor of two, and runs differ by a factor of two."""
        names = ["start", *"abcdefghijklmnopqrstuvwxyz"]
        step_seconds = {name: speed * (1 + i % 3 / 2) for i, name in enumerate(names)}
        accuracies = {name: 0.6 + 0.01 * (i % 5) for i, name in enumerate(names)}
        search = make_search(" ".join(names), minutes=minutes)
        machine = Machine(accuracies, step_seconds=step_seconds)
        chosen = machine.run(search, tmp_path)
        seconds = machine.now + chosen.final_seconds
        assert 0.85 * 60 * minutes <= seconds <= 1.05 * 60 * minutes

    def test_the_best_paused_run_is_finished_before_others_start(self, tmp_path: Path) -> None:
        """Each is better than the first one at its end, but not at a quarter of its steps."""
        search = make_search(minutes=6)
        machine = Machine(accuracies={"start": 0.6, "c": 0.7})
        search["start"].kind = "head"
        machine.run(search, tmp_path)
        finished = [trial.name for trial in search.trials if trial.is_finished]
        assert len(finished) > 1
        assert all(trial.is_finished or trial.end_reason for trial in search.trials)

    def test_a_slow_machine_pauses_a_trial_that_cannot_finish(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=5)
        machine = Machine(step_seconds={"a": 9.0})  # 900 s instead of 100
        assert machine.run(search, tmp_path).name == "start"
        assert machine.now <= 330
        assert "not enough time" in search["a"].end_reason

    def test_a_configuration_is_shortened_to_the_time_left(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=3)
        Machine().run(search, tmp_path)
        assert search["a"].description == "trial a, shortened to 6 epochs"
        assert search["a"].is_finished
        assert search["a"].num_steps == 60
        assert len(search.decisions) == 2  # it does not pause

    def test_steps_and_the_warmup_are_shortened_too(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=3)
        optim = "lr: 1e-3, steps: 100, warmup_epochs: 2"
        search["a"].recipe = tiny_recipe_text("eval: resize", optim=optim)
        Machine(epochs={"a": 6}).run(search, tmp_path)
        shortened = parse_recipe(search["a"].recipe).optim
        assert shortened.steps in range(50, 70)
        assert shortened.warmup_epochs == pytest.approx(2 * shortened.steps / 100)
        assert f"shortened to {shortened.steps} steps" in search["a"].description

    def test_a_first_recipe_that_is_too_long_is_shortened(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=2)
        search.trials[0].estimated_seconds = 200
        assert Machine().run(search, tmp_path).name == "start"
        assert search["start"].description == "trial start, shortened to 5 epochs"

    def test_a_recipe_of_the_user_gives_way_to_shorter_ones_instead(self, tmp_path: Path) -> None:
        search = make_search("recipe draw-01", minutes=2)
        search.trials[0].estimated_seconds, search.space = 200, {"optim.lr": [1e-3, 1e-2]}
        assert Machine().run(search, tmp_path).name == "draw-01"
        assert search["recipe"].recipe == RECIPE

    @pytest.mark.parametrize("epochs, chosen", [(13, "start"), (14, "a")])
    def test_a_first_recipe_that_is_slower_than_estimated_may_take_a_fifth_more(
        self, epochs: int, chosen: str, tmp_path: Path
    ) -> None:
        search = make_search("start a", minutes=2)
        search.trials[0].estimated_seconds = 115
        machine = Machine(epochs={"start": epochs})
        assert machine.run(search, tmp_path).name == chosen
        assert machine.now + search[chosen].final_seconds <= 144

    def test_a_run_that_is_too_slow_pauses_at_its_first_evaluation(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=5)
        machine = Machine(step_seconds={"a": 7.0})
        machine.run(search, tmp_path)
        assert machine.trained["a"] == [EPOCH]

    def test_a_classifier_that_has_paused_does_not_take_the_time_of_another_run(
        self, tmp_path: Path
    ) -> None:
        """After a quarter, `a` has 40 % and `head` 50 %, and there is no time for `b` and `a`."""
        search = make_search("start a head b", minutes=4.6)
        search["start"].kind = search["head"].kind = "head"
        accuracies = {"start": 0.1, "a": 0.64, "head": 0.8}
        Machine(accuracies).run(search, tmp_path)
        assert search["a"].is_finished

    def test_the_start_of_a_run_is_not_counted_as_its_steps(self, tmp_path: Path) -> None:
        search = make_search("start a", minutes=10)
        Machine({"a": 0.1}, epochs={"a": 4}, start_seconds=30).run(search, tmp_path)
        assert search["a"].step == EPOCH  # one evaluation, after which it is clearly worse
        assert (search["a"].start_seconds, search["a"].step_seconds) == (30, 1)

    def test_no_other_run_starts_if_the_best_paused_one_would_not_fit_then(
        self, tmp_path: Path
    ) -> None:
        """A run has one evaluation before its pause, at half of its steps."""
        search = make_search("start a b", minutes=4.15)
        search["start"].kind, search["b"].estimated_seconds = "head", 80
        epochs = dict.fromkeys("ab", 2)
        step_seconds = dict.fromkeys("ab", 5.0)
        Machine({"a": 0.8}, epochs=epochs, step_seconds=step_seconds).run(search, tmp_path)
        assert search["a"].is_finished

    def test_a_search_whose_time_is_over_still_finishes_the_fastest_run(
        self, tmp_path: Path
    ) -> None:
        """Both runs are ten times slower than estimated; the second one is shorter."""
        machine = Machine(epochs={"a": 4}, step_seconds={"start": 10.0, "a": 10.0})
        search = make_search("start a", minutes=5)
        search["a"].estimated_seconds = 40
        assert machine.run(search, tmp_path).name == "a"
        assert machine.trained["start"] == [EPOCH]  # it pauses once it is clear


class TestKills:
    def test_twenty_kills_give_the_same_choice(self, tmp_path: Path) -> None:
        accuracies = {"start": 0.6, "a": 0.5, "b": 0.63, "c": 0.7, "d": 0.66, "e": 0.3}
        whole = make_search()
        expected = Machine(accuracies).run(whole, tmp_path / "whole").name
        out, kills, used = tmp_path / "killed", 0, 0.0
        search = make_search()
        while True:
            machine = Machine(accuracies, kill_at=37.0)
            try:
                chosen = machine.run(search, out)
            except Killed:
                kills += 1
                search = read_search(out)
                assert search.used_seconds >= used  # the time that was used is kept
                used = search.used_seconds
                continue
            break
        assert kills >= 10
        assert chosen.name == expected
        # The starts after kills take time, so that the last trial may be shortened.
        assert [name for name, _ in plan(search)] == [name for name, _ in plan(whole)]

    def test_a_signal_keeps_the_time_and_says_how_to_continue(self, tmp_path: Path) -> None:
        machine = Machine(kill_at=37.0, kill=Interrupted("stopped", signal.SIGTERM))
        with refused("interrupted", f"finetune train {tmp_path} --resume") as caught:
            machine.run(make_search(), tmp_path)
        assert caught.value.exit_code == 128 + signal.SIGTERM
        search = read_search(tmp_path)
        assert search.used_seconds == machine.now == 42
        Machine().run(search, tmp_path)
        assert plan(search)[0] == ("start", 1.0)
        assert search.decisions[1].used_seconds == pytest.approx(42 + 70, abs=20)

    def test_a_finished_search_trains_nothing(self, tmp_path: Path) -> None:
        search = make_search()
        Machine({"b": 0.9}).run(search, tmp_path)
        machine = Machine()
        assert machine.run(read_search(tmp_path), tmp_path).name == "b"
        assert not machine.trained

    @pytest.mark.parametrize(
        "old, new",
        [
            ('"source"', '"sauce"'),
            ('"chosen": "b"', '"chosen": "x"'),
            ('"name": "c"', '"name": "../c"'),
            ('"value": 0.9', '"value": 0.99'),
            ("epochs: 10", "epochs: 40"),
        ],
    )
    def test_a_damaged_record_is_refused(self, tmp_path: Path, old: str, new: str) -> None:
        Machine({"b": 0.9}).run(make_search("start b c"), tmp_path)
        path = tmp_path / "tune.json"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        with refused("checkpoint.damaged", path):
            read_search(tmp_path)

    def test_trials_of_other_images_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(Killed):
            Machine(kill_at=140.0).run(make_search(), tmp_path)
        search = read_search(tmp_path)
        assert [trial.name for trial in search.trials if trial.inputs] == ["start", "a"]
        with refused("data.changed", "photos", "start", tmp_path / "trials" / "b", "--resume"):
            Machine(inputs={"images or labels": "b"}).run(search, tmp_path)
        shutil.rmtree(tmp_path / "trials" / "b")
        assert Machine({"b": 0.9}).run(read_search(tmp_path), tmp_path).name == "b"

    def test_images_that_change_before_the_first_trial_are_refused(self, tmp_path: Path) -> None:
        search = make_search()
        search.inputs = {"images or labels": "b"}
        with refused("data.changed", "have changed since the start of the search"):
            Machine(inputs={"images or labels": "a"}).run(search, tmp_path)

    def test_trials_with_other_weights_are_refused(self, tmp_path: Path) -> None:
        name = "the pretrained weights net"
        with pytest.raises(Killed):
            Machine(kill_at=140.0, inputs={name: "a"}).run(make_search(), tmp_path)
        with refused("weights.wrong_version", f"{name} have changed since trial start"):
            Machine(inputs={name: "b"}).run(read_search(tmp_path), tmp_path)

    def test_copied_shards_are_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(Killed):
            Machine(kill_at=140.0, inputs={"times of the shards": "a"}).run(make_search(), tmp_path)
        Machine(inputs={"times of the shards": "b"}).run(read_search(tmp_path), tmp_path)
        assert caplog.text.count("shards were written or copied after trial start") == 1

    def test_two_searches_in_one_folder_are_refused(self, tmp_path: Path) -> None:
        search = make_search("start a")

        def train_until(*_: Any) -> Progress:
            with refused("setup.in_use", tmp_path):
                Machine().run(make_search(), tmp_path)
            raise Killed

        with pytest.raises(Killed):
            run_search(search, tmp_path, train_until=train_until)


# The portfolio ------------------------------------------------------------------------------------


def fake_start(tmp_path: Path, *overrides: str, num_images: int = 100) -> StartResult:
    """The recipe of `finetune train` for photos, with measured features of three networks."""
    write_image_folder(tmp_path / "photos", {"a": num_images // 2, "b": num_images // 2})
    scores = [
        Score(Candidate(name, size, 1e-3, "here"), accuracy, 64, 80, 1e-3, "resize", False)
        for name, size, accuracy in (
            *(("embedded:vit_ti", 32, 0.9), ("embedded:vit_ti", 64, 0.85)),
            ("embedded:vit_nano", 32, 0.86),
            ("embedded:digits_vit", 32, 0.7),  # clearly worse
        )
    ]
    builder = RecipeBuilder.open(str(tmp_path / "photos"), list(overrides))
    return builder.build(Choice(scores[0], True, 0, "a trial", scores, 0.1))


class TestPortfolio:
    def test_it_begins_with_the_recipe_of_train_and_has_each_recipe_once(
        self, tmp_path: Path
    ) -> None:
        made = build_trials(fake_start(tmp_path))
        names = [each.name for each in made]
        assert names[:3] == ["start", "lora", "augmented"]
        # "head" is the same recipe as "start", and there are no third weights
        left_out = {each.name for each in portfolio.PORTFOLIO} - set(names)
        assert left_out == {"head", "third-head"}
        kinds = {each.name: each.kind for each in made}
        assert [kinds[name] for name in ("start", "lora", "full")] == ["head", "lora", "full"]
        recipes = {each.name: parse_recipe(each.recipe) for each in made}
        assert recipes["full-low"].optim.lr == pytest.approx(1e-3 / 3, rel=0.02)
        assert recipes["draw-15"].optim.epochs == 20
        assert recipes["draw-15"].optim.layer_decay == 0.85
        assert recipes["augmented"].optim.label_smoothing == 0.1
        assert recipes["second-head"].model.name == "embedded:vit_nano"
        assert recipes["other-size"].model.image_size == 64
        assert str(recipes["mixup"].data.train).endswith("trivial_augment | mixup(0.2)")

    def test_what_the_user_sets_is_the_same_in_all(self, tmp_path: Path) -> None:
        asked = ("model.freeze=none", "optim.lr=0.01", "data.train=resize", "run.push_to=me/x")
        made = build_trials(fake_start(tmp_path, *asked))
        names = {each.name for each in made}
        assert {"start", "lora", "augmented", "layer-decay", "mixup", "draw-00"} <= names
        # without rate and transforms, they are the recipe of another one
        assert names.isdisjoint({"head", "full", "full-low", "draw-06"})
        recipes = [parse_recipe(each.recipe) for each in made]
        assert {(each.optim.lr, each.data.train) for each in recipes} == {(0.01, "resize")}

    def test_long_runs_have_fewer_epochs_but_evaluate_four_times(self, tmp_path: Path) -> None:
        made = build_trials(fake_start(tmp_path), max_seconds=0.6)
        (full,) = (parse_recipe(each.recipe) for each in made if each.name == "full")
        assert (full.optim.epochs, full.run.eval_every) == (2, 3)  # 80 images in batches of 16

    def test_the_measured_time_of_training_corrects_the_estimates(self, tmp_path: Path) -> None:
        created = fake_start(tmp_path)
        score = replace(created.choice.score, forward_seconds=0.01)

        def seconds(measured: float | None) -> float:
            choice = replace(created.choice, score=score, frozen=False, epochs=10, seconds=measured)
            made = {each.name: each for each in build_trials(replace(created, choice=choice))}
            return made["draw-15"].estimated_seconds

        # 20 epochs of 80 images, each with an evaluation of 20 images
        assert seconds(1000) - seconds(500) == pytest.approx(1000)
        assert seconds(None) - seconds(80 * 0.01 * 10) == pytest.approx(2.5 * 20 * 80 * 0.01)


# Draws from the section `tune` -------------------------------------------------------------------

SPACE = """
tune:
  optim.lr: {low: 1.0e-4, high: 1.0e-2, log: true}
  optim.warmup_steps: {low: 1, high: 9}
  optim.layer_decay: [null, 0.75, 0.65]
  data.train: ["resize(16)", "resize(16) | flip"]
"""
TIMES = {"evaluated_per_second": 100, "features_seconds": 0.0, "run_seconds": 50.0}
MEASURED = {"num_images": 640, "split_sizes": {"train": 640, "val": 80, "test": 20}, "time": TIMES}


def draw(space: str, optim: str = "lr: 1e-3, epochs: 10", run: str = "seed: 0") -> list[Trial]:
    return draw_trials(parse_recipe(tiny_recipe_text(optim=optim, run=run) + space), MEASURED)


class TestDraws:
    def test_they_are_within_the_bounds_and_the_same_each_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert search_space._LOG2_DRAWS == 6  # 64 draws, which take a second
        monkeypatch.setattr(search_space, "_LOG2_DRAWS", 4)
        made = draw(SPACE)
        assert draw(SPACE) == made != draw(SPACE, run="seed: 1")
        assert [each.name for each in made] == ["recipe", *(f"draw-{n:02}" for n in range(1, 17))]
        first, *others = (parse_recipe(each.recipe) for each in made)
        assert first == parse_recipe(tiny_recipe_text(optim="lr: 1e-3, epochs: 10", run="seed: 0"))
        rates = sorted(each.optim.lr for each in others)
        assert 1e-4 <= rates[0] < 1.4e-4
        assert rates[7] <= 1e-3 <= rates[8]  # the range is logarithmic
        assert 0.7e-2 < rates[-1] <= 1e-2
        assert {each.optim.warmup_steps for each in others} == set(range(1, 10))
        assert {each.optim.layer_decay for each in others} == {None, 0.75, 0.65}
        assert {each.data.train for each in others} == {"resize(16)", "resize(16) | flip"}
        assert len({each.recipe for each in made}) == len(made)
        changes = [each.partition("=")[0] for each in made[1].description.split(", ")]
        assert set(changes) <= {"optim.lr", "optim.warmup_steps", "optim.layer_decay", "data.train"}

    def test_invalid_and_repeated_combinations_are_left_out(self) -> None:
        made = draw("tune: {optim.lr: [1e-3, 1e-2, 1e-1], optim.min_lr: [0, 5e-3]}")
        assert {each.description for each in made} == {
            *("the recipe as it is", "optim.lr=0.01", "optim.lr=0.1"),
            *("optim.lr=0.01, optim.min_lr=0.005", "optim.lr=0.1, optim.min_lr=0.005"),
        }

    def test_the_cost_is_that_of_the_measured_steps(self) -> None:
        costs = {each.description: each for each in draw("tune: {optim.epochs: [2, 20]}")}
        seconds = [
            costs[name].estimated_seconds for name in ("the recipe as it is", "optim.epochs=20")
        ]
        assert seconds == pytest.approx([55, 105])
        assert costs["optim.epochs=2"].final_seconds == pytest.approx(9)
        recipe = parse_recipe(costs["optim.epochs=2"].recipe)
        assert recipe.run.eval_every == 5  # 20 steps: it can pause only where it evaluates

    def test_kills_give_the_same_choice(self, tmp_path: Path) -> None:
        accuracies = {"recipe": 0.6, "draw-02": 0.75, "draw-05": 0.7}
        whole = Search("photos", [], 9, "top1", 5000, False, draw(SPACE)[:6])
        assert Machine(accuracies).run(whole, tmp_path / "whole").name == "draw-02"
        search, kills = Search("photos", [], 9, "top1", 5000, False, draw(SPACE)[:6]), 0
        while not search.chosen:
            with contextlib.suppress(Killed):
                Machine(accuracies, kill_at=61.0).run(search, tmp_path / "killed")
            kills, search = kills + 1, read_search(tmp_path / "killed")
        assert kills > 5
        assert search.chosen == "draw-02"
        assert plan(search) == plan(whole)


# Real runs ----------------------------------------------------------------------------------------

NUM_TEST = 14  # images; no other split has as many


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise images of two classes, with a test split."""
    root, rng = tmp_path_factory.mktemp("tune") / "photos", np.random.default_rng(0)
    for split, count in (("train", 20), ("test", NUM_TEST // 2)):
        for shade, name in enumerate(("cats", "dogs")):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = (rng.integers(0, 200, (32, 32, 3)) + 30 * shade).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


SHORT = ("model.name=embedded:vit_nano", "optim.epochs=2", "run.precision=fp32")


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection of objects from other tests."""
    monkeypatch.setattr(tune, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture
def two_configs(no_collection: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of `finetune train`, of the classifier, and two others.

    The choice of the first one measures times, so a busy machine would choose another one.
    """
    for module in (start_module, weight_selection):
        monkeypatch.setattr(module, "measure_seconds_per_image", lambda setup, train: 1e-4)
    monkeypatch.setattr(start_module, "_HEAD_EPOCHS", 2)
    monkeypatch.setattr(start_module, "find_reason_to_freeze", lambda recipe: "they suffice")
    monkeypatch.setattr(
        start_module, "compare_frozen_and_full", lambda *_, **__: (False, "a trial")
    )
    configs = (Config("full"), Config("low", lr_factor=1 / 3))
    monkeypatch.setattr(portfolio, "PORTFOLIO", configs)


@pytest.mark.usefixtures("two_configs", "no_plots")
class TestRuns:
    def test_the_folder_holds_the_chosen_run_as_if_it_had_been_trained_alone(
        self, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evaluated = []
        evaluator = finalize.Evaluator

        def count(loader: Any, *args: Any, **kwargs: Any) -> Any:
            evaluated.append(len(loader.labels))
            return evaluator(loader, *args, **kwargs)

        monkeypatch.setattr(finalize, "Evaluator", count)
        monkeypatch.setattr(successive_halving, "_SMALL_TRAIN_IMAGES", 0)  # no further splits
        out = tmp_path / "run"
        arguments = ["train", str(photos), *SHORT, "--out", str(out), "--minutes", "30"]
        assert cli.main(arguments) == 0
        assert evaluated.count(NUM_TEST) == 1  # the test split is read once
        search = read_search(out)
        assert {"start", "full", "low"} <= {trial.name for trial in search.trials}
        assert all(trial.is_finished or trial.end_reason for trial in search.trials)
        assert (out / "start.yaml").is_file()
        assert "low" in (out / "trials.html").read_text(encoding="utf-8")
        results = json.loads((out / "results.json").read_text())
        assert results["test"]["examples"] == NUM_TEST
        assert not list((out / "trials").rglob("model.safetensors"))  # no disk space is left in use

        # the same recipe in one go has the same weights
        recipe = load_recipe(out / "recipe.yaml")
        train(recipe, tmp_path / "alone")
        weights = [(path / "model" / "model.safetensors") for path in (out, tmp_path / "alone")]
        assert weights[0].read_bytes() == weights[1].read_bytes()

        # the finished search is not repeated
        assert cli.main([*arguments, "--resume"]) == 0
        assert evaluated.count(NUM_TEST) == 2  # only by the run alone
        with refused("recipe.not_this_run", "--minutes 20", "30 minutes"):
            tune.tune_source(str(photos), out, minutes=20, resume=True)
        with refused("recipe.not_this_run", "optim.lr=1"):
            tune.tune_source(str(photos), out, minutes=30, resume=True, overrides=["optim.lr=1"])
        other = Path(shutil.copytree(photos, tmp_path / "other"))
        with refused("recipe.not_this_run", other, f"the search in {out} has", photos):
            tune.tune_source(str(other), out, minutes=30, resume=True)

        assert tune.tune_source(f"{photos}/", out, minutes=30, resume=True) == results

        # trials of another search, or none
        folder = out / "trials" / search.chosen
        record = json.loads((folder / "run.json").read_text())
        optim = {**record["training_keys"]["optim"], "lr": 7}
        for changes, name in (
            ({"training_keys": {**record["training_keys"], "optim": optim}}, "optim.lr"),
            ({"whole_fingerprints": {"train": "0" * 64}}, "images or labels"),
        ):
            (folder / "run.json").write_text(json.dumps({**record, **changes}))
            with refused("checkpoint.damaged", folder, "differs from tune.json", name):
                tune.tune_source(None, out, minutes=None, resume=True)
        shutil.rmtree(folder)
        with refused("checkpoint.damaged", folder, "is missing"):
            tune.tune_source(None, out, minutes=None, resume=True)

    def test_a_paused_run_is_not_evaluated_on_the_test_split(
        self, photos: Path, tmp_path: Path
    ) -> None:
        recipe = load_recipe_for(photos)
        first = train_until(recipe, tmp_path / "run", lambda step, _: step >= 2)
        assert first.curve[-1].step == 2
        for _ in range(2):  # the second call finds all steps done
            progress = train_until(recipe, tmp_path / "run", lambda *_: False)
        assert progress.curve[-1].step == 4
        assert (progress.num_steps, progress.num_images) == (4, 8)
        assert not (tmp_path / "run" / "results.json").exists()
        assert read_record(RunDir(tmp_path / "run"))["status"] == "stopped (0)"

    def test_a_trial_and_its_repetition_on_another_split_have_the_same_inputs(
        self, photos: Path, tmp_path: Path
    ) -> None:
        recipe = load_recipe_for(photos)
        data = recipe.data.model_copy(update={"split_seed": 1})
        repetition = recipe.model_copy(update={"data": data})
        runs = [
            train_until(each, tmp_path / name, lambda *_: True)
            for name, each in (("first", recipe), ("again", repetition))
        ]
        first, again = (each.inputs for each in runs)
        common = first.keys() & again.keys()
        assert "images or labels" in common
        assert all(first[name] == again[name] for name in common)
        assert first.keys() - common == {"the images of the splits with data.split_seed=None"}
        splits = [
            read_record(RunDir(tmp_path / name))["split_fingerprints"]
            for name in ("first", "again")
        ]
        assert splits[0]["val"] != splits[1]["val"]
        assert splits[0]["val"] in first["the images of the splits with data.split_seed=None"]


def load_recipe_for(photos: Path) -> Recipe:
    text = tiny_recipe_text(
        "eval: resize, batch_size: 32, val_fraction: 0.2",
        source=f"folder:{photos}",
        optim="lr: 1e-3, steps: 4",
        run="precision: fp32, eval_every: 2, best: last",
    )
    return parse_recipe(text)


@pytest.fixture
def tuned(no_collection: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of a tiny network with a section `tune` of two other configurations."""
    monkeypatch.setattr(tune, "TRIAL_SECONDS", 0.1)
    path = tmp_path / "digits.yaml"
    data = "eval: resize, batch_size: 32, num_train: 120, num_test: 30, val_fraction: 0.2"
    optim, run = "lr: 1e-3, steps: 6", "precision: fp32, eval_every: 3"
    space = "tune: {optim.lr: [1e-3, 3e-3], optim.momentum: [0.9], data.batch_size: [32, 16]}\n"
    path.write_text(tiny_recipe_text(data, optim=optim, run=run) + space)
    return path


@pytest.mark.usefixtures("no_plots")
class TestTuneRecipe:
    def test_a_search_that_was_killed_ends_with_the_run_of_its_choice(
        self, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "run"
        arguments = ["tune", str(tuned), "--out", str(out), "--minutes", "30"]

        def kill(recipe: Recipe, folder: Path, pause: Callable[[int, int], bool]) -> Progress:
            if folder.name == "draw-02":
                raise Killed
            return train_until(recipe, folder, pause)

        monkeypatch.setattr(tune.run_search, "__kwdefaults__", {**DEFAULTS, "train_until": kill})
        with pytest.raises(Killed):
            cli.main(arguments)
        monkeypatch.setattr(tune.run_search, "__kwdefaults__", DEFAULTS)
        assert cli.main([*arguments, "--resume"]) == 0
        search = read_search(out)
        assert [each.name for each in search.trials if not each.repeat_of] == [
            *("recipe", "draw-01", "draw-02", "draw-03"),
        ]
        assert [each.until for each in search.decisions if each.trial == "recipe"] == [1.0]
        assert all(trial.is_finished or trial.end_reason for trial in search.trials)
        chosen, run_recipe = search[search.chosen], load_recipe(out / "recipe.yaml")
        assert training_keys(run_recipe) == training_keys(parse_recipe(chosen.recipe))
        results = json.loads((out / "results.json").read_text())
        assert results["test"]["examples"] == 30
        assert "optim.lr" in (out / "trials.html").read_text(encoding="utf-8")

        # `finetune train` ignores the section: the same run as the first trial
        assert cli.main(["train", str(tuned), "--out", str(tmp_path / "alone")]) == 0
        (*_, last) = RunDir(tmp_path / "alone").read_metrics()
        assert search["recipe"].curve[-1].loss == pytest.approx(last["loss"], abs=1e-6)
        assert "tune" not in (tmp_path / "alone" / "recipe.yaml").read_text()

        with refused("recipe.not_this_run", "--minutes 20", "30 minutes"):
            tune.tune_recipe(load_recipe(tuned), out, minutes=20, resume=True)
        with refused("recipe.not_this_run", "has another recipe"):
            recipe = load_recipe(tuned, ["optim.weight_decay=0.1"])
            tune.tune_recipe(recipe, out, minutes=30, resume=True)

    def test_teachers_of_a_search_may_differ(self, tuned: Path, tmp_path: Path) -> None:
        first, second = (
            save_random_network(tmp_path / name, "vit") for name in ("first", "second")
        )
        text = tuned.read_text().partition("tune:")[0]
        text += f"distill: {{teacher: {first}, kind: features}}\n"
        tuned.write_text(f"{text}tune: {{distill.teacher: [{first}, {second}]}}\n")
        out = tmp_path / "run"
        assert cli.main(["tune", str(tuned), "--out", str(out), "--minutes", "30"]) == 0
        assert {trial.is_finished for trial in read_search(out).trials} == {True}

    @pytest.mark.parametrize(
        "arguments, named",
        [
            (["optim.lr=1e-3", "data.batch_size=32", "optim.momentum=0.9"], "section `tune`"),
            (["--minutes", "0"], "--minutes 0"),
            (["--minutes", "0.001"], "give at least --minutes"),
            (["run.patience=2"], "run.patience"),
            (["data.val_fraction=0"], "data.val_fraction"),
        ],
    )
    def test_what_cannot_be_searched(
        self,
        tuned: Path,
        tmp_path: Path,
        arguments: list[str],
        named: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        out = tmp_path / "out"
        command = ["tune", "--minutes", "20", str(tuned), "--out", str(out)]
        assert cli.main([*command, *arguments]) == 2
        assert named in capsys.readouterr().err
        assert not out.exists()

    def test_what_is_given_does_not_vary(
        self, tuned: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        searched = Double({"val": {}})
        monkeypatch.setattr(tune, "tune_recipe", searched)
        assert cli.main(["tune", str(tuned), "--minutes", "5", "optim.lr=0.1", "--json"]) == 0
        ((recipe, out), options) = searched.calls[0]
        assert (out, options["minutes"], options["resume"]) == (Path("runs/digits"), 5, False)
        assert recipe.optim.lr == 0.1
        assert set(recipe.tune) == {"optim.momentum", "data.batch_size"}


def test_what_was_measured_of_a_paused_trial_is_kept(tmp_path: Path) -> None:
    """Its folder may be edited, or its weights replaced, before it continues."""
    machine = Machine(accuracies={"a": 0.9}, kill_at=145.0)
    with pytest.raises(Killed):
        machine.run(make_search("start a"), tmp_path)
    search = read_search(tmp_path)
    paused = [*search["a"].curve]
    assert paused
    error = WeightsError("base: these weights have another sha256; restore them")
    broken = Machine(fail={"a": error}, now=145.0)
    with refused("weights", "restore them"):
        broken.run(search, tmp_path)
    search = read_search(tmp_path)
    assert search["a"].end_reason == ""
    Machine(accuracies={"a": 0.2}, now=145.0).run(search, tmp_path)
    assert search["a"].curve[: len(paused)] == paused


def test_a_killed_trial_continues_with_its_weights_only(tmp_path: Path) -> None:
    """It had checkpoints, although nothing of it is in the record of the search."""
    with pytest.raises(Killed):
        Machine(kill_at=15.0).run(make_search("start a"), tmp_path)
    search = read_search(tmp_path)
    assert not search["start"].curve
    broken = Machine(fail={"start": WeightsError("base: other weights; restore them")}, now=15.0)
    with refused("weights", "restore them"):
        broken.run(search, tmp_path)


def test_trials_without_their_search_are_not_continued(tmp_path: Path, photos: Path) -> None:
    (tmp_path / "run" / "trials").mkdir(parents=True)
    with refused("setup.run_exists", "tune.json"):
        tune.tune_source(str(photos), tmp_path / "run", minutes=20)


def test_trials_that_a_ray_cluster_has_left_are_continued(tmp_path: Path) -> None:
    """Each counts its own time, not that of the others."""
    search = make_search("start a")
    search.used_seconds = 50.0
    search.decisions = [
        Decision("start", 1.0, "", 0.0, on_ray=True),
        Decision("a", 0.25, "", 0.0, on_ray=True),
    ]
    Machine(accuracies={"start": 0.9, "a": 0.1}).run(search, tmp_path)
    assert [trial.start_seconds for trial in search.trials] == pytest.approx([2.0, 2.0])
    assert [trial.seconds for trial in search.trials] == pytest.approx([102.0, 32.0])


class TestMessages:
    @pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
    def test_no_time(self, photos: Path, minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["train", str(photos), "--minutes", minutes]) == 2
        assert f"--minutes {float(minutes):g}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments, named",
        [
            (["recipes/quickstart.yaml"], "a folder of images"),
            (["PHOTOS", "run.patience=2"], "run.patience"),
            (["PHOTOS", "--dry-run"], "--dry-run"),
            (["PHOTOS", "data.val_fraction=0", *SHORT], "data.val_fraction"),
            (["PHOTOS", *SHORT, "--minutes", "0.001"], "give at least --minutes"),
        ],
    )
    def test_what_cannot_be_searched(
        self,
        photos: Path,
        tmp_path: Path,
        arguments: list[str],
        named: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        given = [str(photos) if each == "PHOTOS" else each for each in arguments]
        out = str(tmp_path / "out")
        assert cli.main(["train", "--minutes", "20", "--out", out, *given]) == 2
        assert named in capsys.readouterr().err

    def test_an_unfinished_search_is_not_overwritten(
        self, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine = Machine(kill_at=50.0)
        with pytest.raises(Killed):
            machine.run(make_search(), tmp_path)
        for more in ([], ["--minutes", "10"]):
            assert cli.main(["train", str(photos), *SHORT, "--out", str(tmp_path), *more]) == 5
            assert f"finetune train {tmp_path} --resume" in capsys.readouterr().err
        for more in ([], ["--minutes", "10"]):
            assert cli.main(["train", str(tmp_path), *more]) == 2
            assert f"finetune train {tmp_path} --resume" in capsys.readouterr().err
        recipe = tmp_path / "own.yaml"
        recipe.write_text(tiny_recipe_text())
        assert cli.main(["train", str(recipe), "--resume", "--out", str(tmp_path)]) == 5
        assert f"finetune train {tmp_path} --resume" in capsys.readouterr().err

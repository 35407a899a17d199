"""Recipe sections: defaults, keys that conflict with each other, and claims."""

from __future__ import annotations

import re

import pytest
from recipe_texts import BASE_RECIPE, recipe_error, recipe_errors

from finetune.recipe.load import parse_recipe
from finetune.recipe.training_keys import training_keys

MULTILABEL, LORA, TEACHER = "data.task=multilabel", "model.adapter.kind=lora", "distill.teacher=x"
# (text in the problem, override, override, …)
CONFLICTS = [
    # model
    ("model.pretrained", "model.head_init=keep", "model.pretrained=false"),
    ("model.adapter", LORA, "model.pretrained=false"),
    ("model.freeze", LORA, "model.freeze=2"),
    ("model.compile", "model.adapter.kind=dora", "model.compile=true"),
    ("model.sync_bn", "model.sync_bn=true", "model.freeze_bn=true"),
    ("model.sync_bn", "model.sync_bn=true", "model.freeze=backbone"),
    ("model.compile", "model.sync_bn=true", "model.compile=true"),
    ("model.freeze_bn", LORA, "model.freeze_bn=true"),
    ("model.freeze_bn", "model.freeze_bn=true", "model.pretrained=false"),
    # data
    ("multilabel", "data.label_column=[a,b]"),
    ("data.sampling", MULTILABEL, "data.sampling=class_balanced"),
    ("data.long_tail", MULTILABEL, "data.long_tail=10"),
    ("data.sampling", "data.streaming=true", "data.source=tar:x", "data.sampling=square_root"),
    ("data.source", "data.streaming=true", "data.source=csv:x"),
    ("data.keep", "data.source=tar:https://x/a.tar", "data.keep=device"),
    ("data.unreadable", "data.source=tar:https://x/a.tar", "data.unreadable=quarantine"),
    # optim
    ("optim.steps", "optim.steps=null"),
    ("optim.min_lr", "optim.min_lr=1"),
    ("optim.step_every", "optim.schedule=step"),
    ("optim.step_every", "optim.step_every=2"),
    ("class_weights", "optim.class_weights=balanced", "optim.logit_adjustment=1"),
    ("class_weights", "optim.class_weights=balanced", "data.sampling=class_balanced"),
    ("logit_adjustment", "optim.logit_adjustment=1", "data.sampling=class_balanced"),
    ("class_weights", MULTILABEL, "optim.class_weights=balanced"),
    ("focal_gamma", MULTILABEL, "optim.focal_gamma=2"),
    ("logit_adjustment", MULTILABEL, "optim.logit_adjustment=1"),
    ("data.task", "optim.asymmetric_loss.clip=0"),
    ("optim.stages", "optim.stages=[{freeze: backbone}]"),
    ("steps and epochs", "optim.stages=[{steps: 1, epochs: 1}]"),
    ("min_lr", "optim.min_lr=1e-4", "optim.stages=[{steps: 1, lr: 1e-5}]"),
    ("freeze=backbone", LORA, "optim.stages=[{steps: 1}]"),
    # distill
    ("data.task", MULTILABEL, TEACHER),
    ("distill.temperature", TEACHER, "distill.kind=features", "distill.temperature=2"),
    ("distill.weight", TEACHER, "distill.kind=features", "distill.weight=1"),
    ("model.freeze", TEACHER, "distill.kind=features", "model.freeze=backbone"),
    ("label_smoothing", TEACHER, "distill.weight=1", "optim.label_smoothing=0.1"),
    # run
    ("val.top1", MULTILABEL, "run.best=val.top1"),
    ("val.map", "run.best=val.map"),
    ("run.patience", "run.best=last", "run.patience=2"),
]


def test_publishing_and_selection_keys_round_trip() -> None:
    overrides = ["run.push_to=alice/net", "run.test=false", "data.num_train=1000", "run.note=a try"]
    recipe = parse_recipe(BASE_RECIPE, overrides=overrides)
    assert recipe.run.push_to == "alice/net"
    assert not recipe.run.test
    assert recipe.data.num_train == 1000
    assert parse_recipe(recipe.to_yaml()) == recipe


class TestConflicts:
    @pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: " ".join(row[1:]))
    def test_conflicting_overrides(self, row: tuple[str, ...]) -> None:
        expected, *overrides = row
        line = recipe_error("conflict", BASE_RECIPE, *overrides)
        for override in overrides:
            line = line.replace(f"override '{override}'", "")
        assert expected in line

    @pytest.mark.parametrize(
        "lines,key,digits",
        [
            ("", "steps", ""),
            ("steps: 3, epochs: 3", "steps", ""),
            ("steps: 3, min_lr: '2'", "min_lr", "21"),
            ("epochs: 1, warmup_epochs: 1, warmup_steps: 1", "warmup_steps", ""),
            ("steps: 3, schedule: step", "step_every", ""),
        ],
    )
    def test_conflicts_in_a_file_have_a_location(self, lines: str, key: str, digits: str) -> None:
        text = "model: {name: x}\ndata: {source: x}\noptim: {lr: 1, " + lines + "}\n"
        line = recipe_error("conflict", text)
        place, _, rest = line.partition(f" optim.{key}: ")
        assert place.startswith("r.yaml:3:")
        assert re.sub(r"\D", "", rest) == digits
        # also next to another error in the same section
        assert line in recipe_errors("wrong_value", text.replace("lr: 1", "momentum: 2, lr: 1"))

    def test_wrong_values_cause_no_conflict_error(self) -> None:
        text = BASE_RECIPE.replace("100", "many") + "  epochs: 200\n"
        assert "'many'" in recipe_error("wrong_value", text)

    @pytest.mark.parametrize(
        "lines",
        [
            "steps: 3, warmup_steps: 4",
            "epochs: 1, warmup_epochs: 1.5",
            "epochs: 0.5",
            "steps: 9, schedule: step, step_every: 3",
        ],
    )
    def test_compatible_keys(self, lines: str) -> None:
        parse_recipe("model: {name: x}\ndata: {source: x}\noptim: {lr: 1, " + lines + "}\n")


class TestClaims:
    @pytest.mark.parametrize(
        "claim",
        [
            "metric: val.top1, value: 0.9",
            "metric: test.top1, value: 0.9, tolerance: 0.01",
            "metric: val.loss, between: [0.2, 0.3], when: epoch 10",
            "metric: val.loss, trend: rising, when: after epoch 6",
            "metric: val.loss, below: train.loss, when: best",
        ],
    )
    def test_valid_claims(self, claim: str) -> None:
        (result,) = parse_recipe(BASE_RECIPE + f"claims: [{{{claim}, source: s}}]\n").claims
        assert result.source == "s"

    @pytest.mark.parametrize(
        "claim,code,expected",
        [
            ("metric: val.top1, source: s", "conflict", ".metric: "),
            ("metric: val.top1, value: 0.9, trend: rising, source: s", "conflict", "'trend'"),
            ("metric: val.top1, value: 0.9", "missing_key", ".source: "),
            ("metric: accuracy, value: 0.9, source: s", "wrong_value", "'accuracy'"),
            ("metric: val.top1, value: 94.5, source: s", "conflict", ".value: "),
            ("metric: val.top1, between: [85, 90], source: s", "conflict", ".between: "),
            ("metric: val.loss, between: [0.3, 0.2], source: s", "conflict", ".between: "),
            ("metric: val.loss, between: [0.3], source: s", "wrong_value", "[0.3]"),
            ("metric: val.loss, when: later, value: 1, source: s", "wrong_value", "'later'"),
            ("metric: val.loss, when: epoch 0, value: 1, source: s", "wrong_value", "'epoch 0'"),
            ("metric: test.top1, when: first, value: 0.9, source: s", "conflict", ".when: "),
            ("metric: run.epochs, when: first, value: 9, source: s", "conflict", ".when: "),
            ("metric: val.loss, trend: up, source: s", "wrong_value", "'rising' or 'falling'"),
            ("metric: val.loss, below: loss, source: s", "wrong_value", ".below: "),
            ("metrics: val.loss, value: 1, source: s", "unknown_key", "'metric'"),
        ],
    )
    def test_invalid_claims(self, claim: str, code: str, expected: str) -> None:
        line = recipe_error(code, BASE_RECIPE + f"claims: [{{{claim}}}]\n")
        assert line.startswith("r.yaml:6: claims[0]")
        assert expected in line

    @pytest.mark.parametrize("value", ["", "{metric: val.top1}", "x"])
    def test_claims_must_be_a_list(self, value: str) -> None:
        line = recipe_error("wrong_value", BASE_RECIPE + f"claims: {value}\n")
        assert line.startswith("r.yaml:6: claims: ")


SPACE = """\
tune:
  optim.lr: {low: 1.0e-4, high: 1.0e-2, log: true}
  optim.layer_decay: [null, 0.75]
  model.adapter: [null, {kind: lora}]
  data.train: [resize(32), resize(32) | flip]
"""


class TestSearchSpace:
    def test_it_is_no_part_of_a_run(self) -> None:
        recipe, plain = parse_recipe(BASE_RECIPE + SPACE), parse_recipe(BASE_RECIPE)
        assert recipe.tune["optim.lr"] == {"low": 1e-4, "high": 1e-2, "log": True}
        assert recipe.to_yaml() == plain.to_yaml()
        assert training_keys(recipe) == training_keys(plain)

    @pytest.mark.parametrize(
        "code, space, named",
        [
            ("unknown_key", "optim.lrr: [1]", "optim.lrr: unknown key; did you mean 'lr'?"),
            ("unknown_key", "lr: [1]", "'optim.lr=1'"),
            ("wrong_value", "optim.lr: {low: 1, high: 0.1}", "tune.optim.lr: low, 1"),
            ("wrong_value", "optim.min_lr: {low: 0, high: 1, log: true}", "a low above 0, got 0"),
            ("wrong_value", "optim.lr: {low: 1, high: 2, log: 3}", "a range {low"),
            ("wrong_value", "optim.lr: {low: 1, high: .inf}", "a finite number"),
            ("wrong_value", "optim.lr: {low: 1, high: x}", "a number"),
            ("wrong_value", "optim.lr: {lowest: 1, high: 3}", "a range {low"),
            ("wrong_value", "optim.lr: []", "a list of values"),
            ("wrong_value", "optim.lr: 3", "a list of values"),
            ("wrong_value", "optim.layer_decay: {low: 0.5, high: 2}", "of at most 1, got 2"),
            ("wrong_value", "optim.layer_decay: [0.5, null, 2]", "of at most 1, got 2"),
            ("wrong_value", "model.adapter.rank: [2.5]", "a whole number, got 2.5"),
            ("unknown_name", "data.train: [resiz]", "did you mean 'resize'?"),
            ("conflict", "run.seed: [1, 2]", "tune.run.seed: has to be the same"),
            ("conflict", "data.source: [a, b]", "tune.data.source: has to be the same"),
            ("conflict", "data.split_seed: [1, 2]", "tune.data.split_seed: has to be the same"),
        ],
    )
    def test_what_cannot_be_searched(self, code: str, space: str, named: str) -> None:
        line = recipe_error(code, f"{BASE_RECIPE}tune:\n  {space}\n")
        assert line.startswith("r.yaml:7: ")
        assert named in line

    def test_its_problems_are_reported_with_all_others(self) -> None:
        text = BASE_RECIPE.replace("1e-3", "-1") + "tune: {optim.lr: [-2], run.seed: [1]}\n"
        assert len(recipe_errors("wrong_value", text)) == 3
        (line,) = recipe_errors("wrong_value", f"{BASE_RECIPE}tune: [1]\n")
        assert "a mapping" in line

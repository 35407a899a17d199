"""Recipes: what loads, resolves and is shipped, and which keys do not go together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from recipe_texts import BASE, problem, problems

from finetune.recipe.load import Recipe, load_recipe, parse_recipe
from finetune.recipe.validate import sections_of


class TestLoading:
    def test_defaults(self) -> None:
        recipe = parse_recipe(BASE)
        assert recipe.model.pretrained is True
        assert recipe.model.posemb == "paper"
        assert recipe.data.batch_size == 64
        assert recipe.data.val_fraction == 0.1
        assert recipe.optim.name == "adamw"
        assert (recipe.optim.steps, recipe.optim.epochs) == (100, None)
        assert recipe.run.precision == "auto"
        assert recipe.claims == ()

    def test_a_byte_order_mark_windows_lines_and_json_are_fine(self) -> None:
        plain = parse_recipe(BASE)
        assert parse_recipe("\ufeff" + BASE) == plain
        assert parse_recipe(BASE.replace("\n", "\r\n")) == plain
        assert parse_recipe(json.dumps(yaml.safe_load(BASE))) == plain

    def test_a_recipe_is_frozen(self) -> None:
        recipe = parse_recipe(BASE)
        with pytest.raises(ValidationError, match="frozen"):
            recipe.optim.lr = 1.0  # type: ignore[misc]

    def test_python_is_as_strict_as_yaml(self) -> None:
        sections: dict[str, Any] = {"model": {"name": "x"}, "data": {"source": "x"}}
        assert Recipe(**sections, optim={"lr": 1, "steps": 1}).optim.lr == 1
        with pytest.raises(ValidationError, match="missing; give steps or epochs"):
            Recipe(**sections, optim={"lr": 1})

    def test_environment_variables_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = parse_recipe(BASE)
        for name in ("lr", "LR", "OPTIM_LR", "FINETUNE_LR", "optim__lr", "model", "HOME"):
            monkeypatch.setenv(name, "7")
        monkeypatch.setenv("X", "vit_tiny")
        assert parse_recipe(BASE) == before
        assert parse_recipe(BASE.replace("vit_tiny", "$X")).model.name == "$X"

    def test_no_torch(self) -> None:
        code = (
            "import sys, finetune; finetune.load_recipe(sys.argv[1]); print('torch' in sys.modules)"
        )
        path = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=path.parents[1]
        )
        assert done.stdout.strip() == "False"


class TestRoundTrip:
    FULL = """\
model: {name: "no", args: {a: '1e-3', b: '010', c: '', d: 'null', e: [1, 1.5, true, null, {f: ~}]}}
data: {source: "folder:/a b/é #1: x", mean: [0.5, 0.25, 1e-1], train: "resize | flip(p=0.25)"}
optim: {lr: 1e-05, epochs: 2.5, betas: [0.9, 0.999], warmup_epochs: 1, args: {eps: 1e-30}}
run: {trackers: [tensorboard], seed: 4294967295, patience: 3}
claims:
  - {metric: val.loss, when: after epoch 3, trend: rising, source: "a paper: table 1", note: "'x'"}
  - {metric: test.top1, value: 0.9, tolerance: 1e-4, source: "1:30"}
  - {metric: val.loss, below: train.loss, source: s}
  - {metric: val.loss, between: [0.2, 3e-1], source: s}
"""

    @pytest.mark.parametrize("text", [BASE, FULL])
    def test_the_resolved_recipe_loads_back_equal(self, text: str) -> None:
        recipe = parse_recipe(text)
        resolved = recipe.to_yaml()
        assert parse_recipe(resolved) == recipe
        assert parse_recipe(resolved).to_yaml() == resolved

    def test_the_resolved_recipe_has_every_key(self) -> None:
        whole = parse_recipe(BASE, overrides=["distill.teacher=x"])
        resolved = yaml.safe_load(whole.to_yaml())
        sections = sections_of(Recipe)
        assert {"model", "data", "optim", "run", "distill"} == sections.keys()
        for name, section in sections.items():
            assert set(resolved[name]) == set(section.model_fields)

    def test_other_readers_see_the_same_values(self) -> None:
        recipe = parse_recipe(self.FULL)
        other = yaml.safe_load(recipe.to_yaml())
        assert other["model"]["args"] == recipe.model.args
        assert other["model"]["name"] == "no"
        assert other["optim"]["lr"] == 1e-5
        assert other["claims"][1]["source"] == "1:30"


class TestAgreement:
    def test_nothing_is_waited_for_where_the_last_is_the_best(self) -> None:
        text = "model: {name: x}\ndata: {source: x}\noptim: {lr: 1, steps: 1}\n"
        line = problem("conflict", text + "run: {best: last, patience: 2}\n")
        assert line.startswith("r.yaml:4:")
        assert " run.patience: " in line

    @pytest.mark.parametrize(
        "lines,key,figures",
        [
            ("", "steps", ""),
            ("steps: 3, epochs: 3", "steps", ""),
            ("steps: 3, min_lr: '2'", "min_lr", "21"),
            ("epochs: 1, warmup_epochs: 1, warmup_steps: 1", "warmup_steps", ""),
            ("steps: 3, schedule: step", "step_every", ""),
            ("steps: 3, step_every: 1", "step_every", ""),
            ("steps: 3, min_lr: 2", "min_lr", "21"),
        ],
    )
    def test_keys_that_do_not_go_together(self, lines: str, key: str, figures: str) -> None:
        text = "model: {name: x}\ndata: {source: x}\noptim: {lr: 1, " + lines + "}\n"
        line = problem("conflict", text)
        place, _, rest = line.partition(f" optim.{key}: ")
        assert place.startswith("r.yaml:3:")
        assert re.sub(r"\D", "", rest) == figures
        # and beside another mistake in the same section
        assert line in problems("wrong_value", text.replace("lr: 1", "momentum: 2, lr: 1"))

    def test_values_that_are_wrong_themselves_are_in_no_conflict(self) -> None:
        text = BASE.replace("100", "many") + "  epochs: 200\n"
        assert "'many'" in problem("wrong_value", text)

    @pytest.mark.parametrize(
        "lines",
        [
            "steps: 3, warmup_steps: 4",
            "epochs: 1, warmup_epochs: 1.5",
            "epochs: 0.5",
            "steps: 9, schedule: step, step_every: 3",
        ],
    )
    def test_keys_that_do(self, lines: str) -> None:
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
    def test_good(self, claim: str) -> None:
        (found,) = parse_recipe(BASE + f"claims: [{{{claim}, source: s}}]\n").claims
        assert found.source == "s"

    @pytest.mark.parametrize(
        "claim,code,named",
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
            ("metric: val.loss, trend: up, source: s", "wrong_value", "'rising' or 'falling'"),
            ("metric: val.loss, below: loss, source: s", "wrong_value", ".below: "),
            ("metrics: val.loss, value: 1, source: s", "unknown_key", "'metric'"),
        ],
    )
    def test_bad(self, claim: str, code: str, named: str) -> None:
        line = problem(code, BASE + f"claims: [{{{claim}}}]\n")
        assert line.startswith("r.yaml:6: claims[0]")
        assert named in line

    @pytest.mark.parametrize("value", ["", "{metric: val.top1}", "x"])
    def test_a_list(self, value: str) -> None:
        line = problem("wrong_value", BASE + f"claims: {value}\n")
        assert line.startswith("r.yaml:6: claims: ")


RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(
    path
    for path in RECIPES.rglob("*.yaml")
    if path.parent.name != "accelerate" and path.name != "plan.yaml"
)


class TestShippedRecipes:
    def test_there_are_some(self) -> None:
        names = {str(path.relative_to(RECIPES)) for path in SHIPPED}
        assert {"quickstart.yaml", "cifar10/vit_b16_384.yaml"} <= names
        assert {f"paper_review/experiment_{n}.yaml" for n in (1, 2, 3)} <= names

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_each_loads_resolves_and_says_how_it_is_run(self, path: Path) -> None:
        recipe = load_recipe(path)
        assert parse_recipe(recipe.to_yaml()) == recipe
        lines = path.read_text(encoding="utf-8").splitlines()
        name = path.relative_to(RECIPES.parent)
        assert lines[0] == f"# accelerate launch -m finetune train {name}"
        assert lines[1].startswith("# Source: ")

    def test_the_papers_settings(self) -> None:
        for size in (224, 384):
            recipe = load_recipe(RECIPES / "cifar10" / f"vit_b16_{size}.yaml")
            optim = recipe.optim
            assert recipe.model.image_size == size
            assert recipe.data.batch_size == 512
            assert (optim.name, optim.momentum, optim.weight_decay) == ("sgd", 0.9, 0.0)
            assert (optim.steps, optim.warmup_steps, optim.clip_norm) == (10000, 500, 1.0)
            assert optim.schedule == "cosine"

    def test_the_reviews_settings(self) -> None:
        recipes = [
            load_recipe(RECIPES / "paper_review" / f"experiment_{n}.yaml") for n in (1, 2, 3)
        ]
        for recipe in recipes:
            assert recipe.model.name == "vit_base_patch16_224.augreg_in21k"
            assert (recipe.model.dropout, recipe.model.attention_dropout) == (0.1, 0.1)
            assert recipe.data.mean == (0.485, 0.456, 0.406)
            assert (recipe.data.batch_size, recipe.optim.name) == (64, "adamw")
            assert recipe.claims
        assert [recipe.optim.lr for recipe in recipes] == [1e-4, 3e-4, 3e-4]
        assert [recipe.optim.epochs for recipe in recipes] == [10, 10, 50]
        third = recipes[2]
        assert (third.optim.weight_decay, third.optim.label_smoothing) == (1e-4, 0.1)
        assert {"flip(0.5)", "rotate(15)"} <= set((third.data.train or "").split(" | "))
        assert "color_jitter" in (third.data.train or "")

    def test_launcher_files_name_their_command(self) -> None:
        from accelerate.commands.config.config_args import load_config_from_file

        found = sorted((RECIPES / "accelerate").glob("*.yaml"))
        names = {"cpu_2", "gpu_1", "gpu_8", "fsdp", "two_machines"}
        assert {path.stem for path in found} == names
        for path in found:
            command = f"accelerate launch --config_file recipes/accelerate/{path.name} "
            assert command in path.read_text(encoding="utf-8")
            load_config_from_file(str(path))

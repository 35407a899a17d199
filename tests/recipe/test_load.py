"""Recipes: loading, round trip and the shipped recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from recipe_texts import BASE_RECIPE
from refusals import refused

from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.validate import section_classes


class TestLoading:
    def test_defaults(self) -> None:
        recipe = parse_recipe(BASE_RECIPE)
        assert recipe.model.pretrained is True
        assert recipe.model.posemb == "auto"
        assert recipe.data.batch_size == 64
        assert recipe.data.val_fraction == 0.1
        assert recipe.optim.name == "adamw"
        assert (recipe.optim.steps, recipe.optim.epochs) == (100, None)
        assert recipe.run.precision == "auto"
        assert recipe.claims == ()

    def test_accepts_byte_order_mark_crlf_and_json(self) -> None:
        plain = parse_recipe(BASE_RECIPE)
        assert parse_recipe("\ufeff" + BASE_RECIPE) == plain
        assert parse_recipe(BASE_RECIPE.replace("\n", "\r\n")) == plain
        assert parse_recipe(json.dumps(yaml.safe_load(BASE_RECIPE))) == plain

    def test_a_recipe_with_a_secret_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "canary0wandb0key0f00d")
        with refused("recipe.holds_secret", "recipe", "run.note", "HF_TOKEN") as caught:
            parse_recipe(BASE_RECIPE, overrides=["run.note=canary0wandb0key0f00d"])
        assert "canary" not in str(caught.value)

    @pytest.mark.parametrize("secret", ["it's: a secret", "first line\nsecond line"])
    def test_a_secret_that_yaml_quotes_or_folds_is_refused(
        self, secret: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SOME_PASSWORD", secret)
        with refused("recipe.holds_secret", "recipe"):
            parse_recipe(BASE_RECIPE, overrides=[f"run.note={json.dumps(secret)}"])

    def test_a_signature_in_the_url_of_the_data_is_no_secret_of_the_recipe(self) -> None:
        source = "tar:https://me:hunter2hunter2@host/x.tar?X-Amz-Signature=0a1b2c3d4e5f"
        recipe = parse_recipe(BASE_RECIPE, overrides=[f"data.source={source}"])
        assert recipe.data.source == source
        assert "hunter2" not in recipe.to_yaml()
        with refused("recipe.holds_secret", "recipe"):
            parse_recipe(BASE_RECIPE, overrides=[f"run.note={source}"])

    def test_recipe_is_frozen(self) -> None:
        recipe = parse_recipe(BASE_RECIPE)
        with pytest.raises(ValidationError, match="frozen"):
            recipe.optim.lr = 1.0  # type: ignore[misc]

    def test_python_constructor_validates_like_yaml(self) -> None:
        sections: dict[str, Any] = {"model": {"name": "x"}, "data": {"source": "x"}}
        assert Recipe(**sections, optim={"lr": 1, "steps": 1}).optim.lr == 1
        with pytest.raises(ValidationError, match="missing; give steps or epochs"):
            Recipe(**sections, optim={"lr": 1})

    def test_ignores_environment_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = parse_recipe(BASE_RECIPE)
        for name in ("lr", "LR", "OPTIM_LR", "FINETUNE_LR", "optim__lr", "model", "HOME"):
            monkeypatch.setenv(name, "7")
        monkeypatch.setenv("X", "vit_tiny")
        assert parse_recipe(BASE_RECIPE) == before
        assert parse_recipe(BASE_RECIPE.replace("vit_tiny", "$X")).model.name == "$X"

    def test_loading_does_not_import_torch(self) -> None:
        code = (
            "import sys, finetune; finetune.load_recipe(sys.argv[1]); print('torch' in sys.modules)"
        )
        path = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
        command = [sys.executable, "-c", code, str(path)]
        completed = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=path.parents[1]
        )
        assert completed.stdout.strip() == "False"


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

    @pytest.mark.parametrize("text", [BASE_RECIPE, FULL])
    def test_resolved_recipe_round_trips(self, text: str) -> None:
        recipe = parse_recipe(text)
        resolved = recipe.to_yaml()
        assert parse_recipe(resolved) == recipe
        assert parse_recipe(resolved).to_yaml() == resolved

    def test_resolved_recipe_has_every_key(self) -> None:
        recipe = parse_recipe(BASE_RECIPE, overrides=["distill.teacher=x"])
        resolved = yaml.safe_load(recipe.to_yaml())
        sections = section_classes(Recipe)
        assert {"model", "data", "optim", "run", "distill"} == sections.keys()
        for name, section in sections.items():
            assert set(resolved[name]) == set(section.model_fields)

    def test_plain_yaml_loader_reads_the_same_values(self) -> None:
        recipe = parse_recipe(self.FULL)
        loaded = yaml.safe_load(recipe.to_yaml())
        assert loaded["model"]["args"] == recipe.model.args
        assert loaded["model"]["name"] == "no"
        assert loaded["optim"]["lr"] == 1e-5
        assert loaded["claims"][1]["source"] == "1:30"


RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(
    path
    for path in RECIPES.rglob("*.yaml")
    if path.parent.name != "accelerate" and path.name != "plan.yaml"
)


class TestShippedRecipes:
    def test_expected_recipes_are_shipped(self) -> None:
        names = {str(path.relative_to(RECIPES)) for path in SHIPPED}
        assert {"quickstart.yaml", "cifar10/vit_b16_384.yaml"} <= names
        assert {f"paper_review/experiment_{n}.yaml" for n in (1, 2, 3)} <= names

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_each_round_trips_and_starts_with_its_command(self, path: Path) -> None:
        recipe = load_recipe(path)
        run_recipe = recipe.model_copy(update={"tune": {}})
        assert parse_recipe(recipe.to_yaml()) == run_recipe
        lines = path.read_text(encoding="utf-8").splitlines()
        name = path.relative_to(RECIPES.parent)
        assert lines[0] == f"# accelerate launch -m finetune train {name}"
        assert lines[1].startswith("# Source: ")

    def test_cifar10_recipes_use_the_paper_settings(self) -> None:
        for size in (224, 384):
            recipe = load_recipe(RECIPES / "cifar10" / f"vit_b16_{size}.yaml")
            optim = recipe.optim
            assert recipe.model.image_size == size
            assert recipe.data.batch_size == 512
            assert (optim.name, optim.momentum, optim.weight_decay) == ("sgd", 0.9, 0.0)
            assert (optim.steps, optim.warmup_steps, optim.clip_norm) == (10000, 500, 1.0)
            assert optim.schedule == "cosine"

    def test_paper_review_recipes_use_the_reported_settings(self) -> None:
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

    def test_accelerate_configs_state_their_command(self) -> None:
        from accelerate.commands.config.config_args import load_config_from_file

        result = sorted((RECIPES / "accelerate").glob("*.yaml"))
        names = {"cpu_2", "gpu_1", "gpu_8", "fsdp", "two_machines"}
        assert {path.stem for path in result} == names
        for path in result:
            command = f"accelerate launch --config_file recipes/accelerate/{path.name} "
            assert command in path.read_text(encoding="utf-8")
            load_config_from_file(str(path))

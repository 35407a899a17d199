"""All errors of a recipe in one report, each with its location and the nearest valid key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from recipe_texts import BASE_RECIPE, recipe_error, recipe_errors
from refusals import refused

from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import OptimSection
from finetune.recipe.validate import check_override_conflicts


class TestKeys:
    def test_unknown_key_suggests_the_nearest(self) -> None:
        line = recipe_error("unknown_key", BASE_RECIPE + "  warmup_step: 5\n")
        assert line.startswith("r.yaml:6: optim.warmup_step: ")
        assert "'warmup_steps'" in line

    def test_unknown_section_suggests_the_nearest_and_is_one_error(self) -> None:
        line = recipe_error("unknown_key", BASE_RECIPE.replace("model:", "modl:"))
        assert line.startswith("r.yaml:1: modl: ")
        assert "'model'" in line

    @pytest.mark.parametrize(
        "text,hint",
        [
            ("run: {lr: 3}\n", "'optim.lr'"),
            ("lr: 3\n", "'optim.lr'"),
            ("  seed: 1\n", "'run.seed'"),
            ("run: {batchsize: 3}\n", "'data.batch_size'"),
            ("run: {qqqq: 3}\n", "seed, precision"),
        ],
    )
    def test_misplaced_key_suggests_its_section(self, text: str, hint: str) -> None:
        assert hint in recipe_error("unknown_key", BASE_RECIPE + text)

    def test_missing_key_shows_its_description(self) -> None:
        line = recipe_error("missing_key", BASE_RECIPE.replace("  lr: 1e-3\n", ""))
        assert line.startswith("r.yaml:3: optim.lr: ")
        assert line.endswith(str(OptimSection.model_fields["lr"].description))

    def test_missing_sections(self) -> None:
        lines = recipe_errors("missing_key", "model: {name: x}\n")
        assert [line.split(": ")[:2] for line in lines] == [["r.yaml", "data"], ["r.yaml", "optim"]]

    def test_alias_is_one_error(self) -> None:
        line = recipe_error("unknown_key", BASE_RECIPE.replace("  lr:", "  learning_rate:"))
        assert line.startswith("r.yaml:4: optim.learning_rate: ")
        assert "'optim.lr'" in line  # not reported as missing as well


class TestErrorCollection:
    @pytest.mark.parametrize("value", ["", "fast", "[1]"])
    def test_section_must_be_a_mapping(self, value: str) -> None:
        line = recipe_error("wrong_value", BASE_RECIPE + f"run: {value}\n")
        assert line.startswith("r.yaml:6: run: ")

    def test_reports_all_errors_in_file_order(self) -> None:
        lines = recipe_errors(
            "unknown_key",
            "modl: {name: x}\n"
            "data: {source: no, batch_size: 0, batch_size: 1, train: resise}\n"
            "optim:\n"
            "  lr: -1\n"
            "  warmup_step: 5\n"
            "  epochs: 3\n"
            "  steps: 3\n"
            "  args: !!python/name:os.system x\n"
            "claims: [{metric: val.acc}, 5]\n",
            "lr=3",
            "run.seed=x",
        )
        expected = [
            "r.yaml:1: modl: ",
            "r.yaml:2: data.batch_size: ",  # a duplicate
            "r.yaml:2: data.batch_size: ",  # the first of the two
            "r.yaml:2: data.source: ",
            "r.yaml:2: data.train: ",
            "r.yaml:4: optim.lr: ",
            "r.yaml:5: optim.warmup_step: ",
            "r.yaml:7: optim.steps: ",
            "r.yaml:8: optim.args: ",
            "r.yaml:9: claims[0].metric: ",  # an unknown metric
            "r.yaml:9: claims[0].metric: ",  # a claim without a condition
            "r.yaml:9: claims[0].source: ",
            "r.yaml:9: claims[1]: ",
        ]
        locations = [re.match(r"r\.yaml:\d+: [\w.\[\]]+: ", line) for line in lines[:-2]]
        assert sorted(location[0] for location in locations if location) == expected
        numbers = [int(re.findall(r"\d+", line)[0]) for line in lines[:-2]]
        assert numbers == sorted(numbers)
        assert [line.split(": ")[0] for line in lines[-2:]] == [
            "override 'lr=3'",
            "override 'run.seed=x'",
        ]


class TestOverrides:
    @pytest.mark.parametrize(
        "override,section,key,expected",
        [
            ("optim.lr=1e-2", "optim", "lr", 0.01),
            ("optim.lr = 3 ", "optim", "lr", 3.0),
            ("optim.clip_norm=null", "optim", "clip_norm", None),
            ("model.pretrained=no", "model", "pretrained", False),
            ("model.args.patch_size=4", "model", "args", {"patch_size": 4}),
            ("model.args.a.b=1e-3", "model", "args", {"a": {"b": 0.001}}),
            ("model.args={patch_size: 4, x: [1]}", "model", "args", {"patch_size": 4, "x": [1]}),
            ("model.image_size=[32, 48]", "model", "image_size", (32, 48)),
            ("model.name='no'", "model", "name", "no"),
            ("model.name=hf-hub:a/b@c", "model", "name", "hf-hub:a/b@c"),
            ("data.source=folder:/a #1/x: y", "data", "source", "folder:/a #1/x: y"),
            ("data.source=folder:a=b", "data", "source", "folder:a=b"),
            ("data.train=random_crop(32, padding=4) | flip", "data", "train", None),
            ("run.trackers=[tensorboard]", "run", "trackers", ("tensorboard",)),
            ("run.trackers=tensorboard", "run", "trackers", ("tensorboard",)),
        ],
    )
    def test_override_values(self, override: str, section: str, key: str, expected: Any) -> None:
        recipe = parse_recipe(BASE_RECIPE, overrides=[override])
        expected = override.split("=", 1)[1] if key == "train" else expected
        assert getattr(getattr(recipe, section), key) == expected
        assert parse_recipe(recipe.to_yaml()) == recipe

    def test_last_override_wins_and_replaces_a_broken_value(self) -> None:
        broken = BASE_RECIPE.replace("1e-3", "fast")
        assert parse_recipe(broken, overrides=["optim.lr=x", "optim.lr=2"]).optim.lr == 2

    @pytest.mark.parametrize(
        "override,expected",
        [
            ("optim.steps=20", (20, None, 0, 1.0)),
            ("optim.epochs=3", (None, 3.0, 0, 1.0)),
            ("optim.warmup_steps=2", (None, 5.0, 2, None)),
            ("optim.warmup_epochs=0.5", (None, 5.0, 0, 0.5)),
            ("optim.warmup_steps=0", (None, 5.0, 0, None)),
            ("optim.steps=null", (None, 5.0, 0, 1.0)),
        ],
    )
    def test_steps_and_epochs_overrides_replace_each_other(
        self, override: str, expected: tuple[float | None, ...]
    ) -> None:
        written = BASE_RECIPE.replace("steps: 100", "epochs: 5") + "  warmup_epochs: 1\n"
        resolved = parse_recipe(written).to_yaml()
        for text in (written, resolved):
            optim = parse_recipe(text, overrides=[override]).optim
            lengths = (optim.steps, optim.epochs, optim.warmup_steps, optim.warmup_epochs)
            assert lengths == expected

    def test_switch_from_steps_to_epochs(self) -> None:
        for overrides in (["optim.epochs=3"], ["optim.steps=null", "optim.epochs=3"]):
            recipe = parse_recipe(BASE_RECIPE, overrides=overrides)
            assert (recipe.optim.steps, recipe.optim.epochs) == (None, 3)
            check_override_conflicts(overrides)

    @pytest.mark.parametrize("key", ["steps", "warmup_steps"])
    def test_steps_and_epochs_overrides_together_are_an_error(self, key: str) -> None:
        other = key.replace("steps", "epochs")
        for first, second in ((key, other), (other, key)):
            with refused("recipe.conflict", f"'optim.{first}=1'", f"'optim.{second}=2'"):
                check_override_conflicts([f"optim.{first}=1", f"optim.{second}=2"])

    @pytest.mark.parametrize(
        "first,second",
        [("optim.lr=1", "optim.lr=2"), ("model.args.depth=2", "model.args={depth: 1}")],
    )
    def test_a_key_may_be_overridden_once(self, first: str, second: str) -> None:
        with refused("recipe.conflict", f"'{first}'", f"'{second}'"):
            check_override_conflicts([first, second])

    def test_an_override_that_is_not_utf8(self) -> None:
        assert r"run.note=\udcff" in recipe_error("syntax", BASE_RECIPE, "run.note=\udcff")

    @pytest.mark.parametrize(
        "override,code,expected",
        [
            ("optim.lr", "syntax", "optim.lr=1e-3"),
            ("=3", "syntax", "optim.lr=1e-3"),
            ("optim..lr=3", "syntax", "optim.lr=1e-3"),
            ("data.mean=[0.5", "syntax", "data.mean: "),
            ("data.mean=[&a 0.5]", "syntax", "data.mean: "),
            ("name=3", "unknown_key", "'model.name=3' or 'optim.name=3'"),
            ("warmup_step=3", "unknown_key", "'optim.warmup_steps'"),
            ("zzz=3", "unknown_key", "'zzz'"),
            ("learning_rate=1e-3", "unknown_key", "'optim.lr=1e-3'"),
            ("kd_temperature=4", "unknown_key", "'distill.temperature=4'"),
            ("class_weights=balanced", "unknown_key", "'optim.class_weights=balanced'"),
            ("model.imgsz=64", "unknown_key", "'model.image_size'"),
            ("model.lora_rank=4", "unknown_key", "adapter.rank"),
            ("model.adapter.rnk=4", "unknown_key", "'rank'"),
            ("optim.stages=[{steps: 1, freze: backbone}]", "unknown_key", "'freeze'"),
            ("optim.lr.x=3", "unknown_key", "optim.lr is a single value"),
            ("claims.0.value=1", "unknown_key", "claims "),
            ("distill.weight=0.5", "missing_key", "teacher"),
            ("optim.learning-rate=3", "unknown_key", "'optim.lr'"),
            ("data.num_workers=3", "unknown_key", "'data.workers'"),
            ("fp16=true", "unknown_key", "'run.precision=fp16'"),
            ("run.output_dir=x", "unknown_key", "--out"),
            ("resume=true", "unknown_key", "--resume"),
            ("gradient_accumulation_steps=4", "unknown_key", "'data.micro_batch'"),
            ("modl.name=x", "unknown_key", "'model'"),
            ("run.lr=3", "unknown_key", "'optim.lr'"),
            ("optim={lr: 3}", "unknown_key", "'optim.name=…'"),
            ("claims=[]", "unknown_key", "claims "),
            ("optim.lr=", "wrong_value", "optim.lr: "),
            ("model.args={a: &x 1, b: *x}", "syntax", "& and *"),
            ("model.name=no", "wrong_value", "'no'"),
        ],
    )
    def test_errors_quote_the_override(self, override: str, code: str, expected: str) -> None:
        line = recipe_error(code, BASE_RECIPE, override)
        start = f"override '{override}': "
        assert line.startswith(start)
        assert expected in line.removeprefix(start)

    def test_line_numbers_stay_correct_with_an_override(self) -> None:
        lines = recipe_errors("wrong_value", BASE_RECIPE + "  min_lr: -1\n", "optim.lr=-2")
        assert lines[0].startswith("r.yaml:6: optim.min_lr")
        assert lines[1].startswith("override 'optim.lr=-2': optim.lr")

    def test_errors_in_an_overridden_list_quote_the_override(self) -> None:
        text = BASE_RECIPE.replace('digits"', 'digits", mean: [0.5, 0.5, 0.5]')
        line = recipe_error("wrong_value", text, "data.mean=[1, 128, 1]")
        assert line.startswith("override 'data.mean=[1, 128, 1]'")
        line = recipe_error("wrong_value", BASE_RECIPE, "data.classes=[cat, 7]")
        assert line.endswith("'7'")  # shows how to write this item, not the whole list

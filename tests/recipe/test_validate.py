"""Mistakes in words: every one at once, with its place and the nearest right key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from recipe_texts import BASE, problem, problems, with_line

from finetune.recipe.load import parse_recipe


class TestKeys:
    def test_unknown_key_names_the_nearest(self) -> None:
        line = problem(with_line("warmup_step: 5", section="optim"))
        assert line == "r.yaml:6: optim.warmup_step: unknown key; did you mean 'warmup_steps'?"

    def test_unknown_section_names_the_nearest_and_is_one_problem(self) -> None:
        line = problem(BASE.replace("model:", "modl:"))
        assert line == "r.yaml:1: modl: unknown section; did you mean 'model'?"

    @pytest.mark.parametrize(
        "text,hint",
        [
            (
                with_line("lr: 3", section="run"),
                "run.lr: unknown key; it belongs to optim: 'optim.lr'",
            ),
            (BASE + "lr: 3\n", "lr: unknown section; it belongs to optim: 'optim.lr'"),
            (with_line("batchsize: 3", section="run"), "did you mean 'data.batch_size'?"),
            (with_line("qqqq: 3", section="run"), "known: seed, precision"),
        ],
    )
    def test_a_key_in_the_wrong_place_is_told_the_right_one(self, text: str, hint: str) -> None:
        assert hint in problem(text)

    def test_missing_keys_say_what_they_are(self) -> None:
        line = problem(BASE.replace("  lr: 1e-3\n", ""))
        assert line == "r.yaml:3: optim.lr: missing: peak learning rate"

    def test_missing_sections(self) -> None:
        lines = problems("model: {name: x}\n")
        assert [line.split(";")[0] for line in lines] == [
            "r.yaml: data: missing section",
            "r.yaml: optim: missing section",
        ]


class TestAllAtOnce:
    @pytest.mark.parametrize("value", ["", "fast", "[1]"])
    def test_a_section_is_a_mapping(self, value: str) -> None:
        assert "run: expected a mapping of keys, got" in problem(BASE + f"run: {value}\n")

    def test_every_problem_is_reported_at_once_from_top_to_bottom(self) -> None:
        lines = problems(
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
            ":1: modl: unknown",
            ":2: data.source: expected text",
            ":2: data.batch_size: duplicate",
            ":2: data.batch_size: expected",
            ":2: data.train: unknown operation 'resise'; did you mean 'resize'?",
            ":4: optim.lr: expected",
            ":5: optim.warmup_step: unknown key",
            ":7: optim.steps: given beside epochs",
            ":8: optim.args: the tag",
            ":9: claims[0].metric: expected",
            ":9: claims[0].metric: give exactly one of",
            ":9: claims[0].source: missing",
            ":9: claims[1]: expected a mapping",
            "override 'lr=3': ",
            "override 'run.seed=x': ",
        ]
        assert len(lines) == len(expected)
        for text in expected:
            assert sum(text in line for line in lines) == 1, text
        numbers = [int(found[1]) for line in lines if (found := re.match(r"r\.yaml:(\d+)", line))]
        assert numbers == sorted(numbers)


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
        ],
    )
    def test_values(self, override: str, section: str, key: str, expected: Any) -> None:
        recipe = parse_recipe(BASE, overrides=[override])
        expected = override.split("=", 1)[1] if key == "train" else expected
        assert getattr(getattr(recipe, section), key) == expected
        assert parse_recipe(recipe.to_yaml()) == recipe

    def test_later_ones_win_and_mend_the_file(self) -> None:
        broken = BASE.replace("1e-3", "fast")
        assert parse_recipe(broken, overrides=["optim.lr=x", "optim.lr=2"]).optim.lr == 2

    def test_from_steps_to_epochs(self) -> None:
        recipe = parse_recipe(BASE, overrides=["optim.steps=null", "optim.epochs=3"])
        assert (recipe.optim.steps, recipe.optim.epochs) == (None, 3)
        assert "keep one: optim.steps=null" in problem(BASE, "optim.epochs=3")

    @pytest.mark.parametrize(
        "override,said",
        [
            ("lr=3", "no section; did you mean 'optim.lr=3'?"),
            ("name=3", "no section; did you mean 'model.name=3' or 'optim.name=3'?"),
            ("warmup_step=3", "no section; did you mean 'optim.warmup_steps'?"),
            ("zzz=3", "unknown key 'zzz', and no section"),
            ("optim.warmup_step=5", "optim.warmup_step: unknown key; did you mean 'warmup_steps'?"),
            ("modl.name=x", "modl: unknown section; did you mean 'model'?"),
            ("run.lr=3", "run.lr: unknown key; it belongs to optim: 'optim.lr'"),
            ("optim={lr: 3}", "a whole section; set its keys one by one: 'optim.name=…'"),
            ("claims=[]", "claims is not changed from the command line"),
            ("claims.0.value=1", "claims is not changed from the command line"),
            ("optim.lr", "expected section.key=value, for example optim.lr=1e-3"),
            ("=3", "expected section.key=value"),
            ("optim..lr=3", "expected section.key=value"),
            ("optim.lr.x=3", "optim.lr holds one value; it has no keys below it"),
            ("optim.lr=", "expected a number, got nothing"),
            ("optim.lr=-1", "expected a number above 0, got -1"),
            ("data.mean=[1", "not valid YAML"),
            ("model.args={a: &x 1, b: *x}", "anchors and aliases"),
            ("model.name=no", "quote it to mean text: 'no'"),
        ],
    )
    def test_mistakes_name_the_override(self, override: str, said: str) -> None:
        line = problem(BASE, override)
        assert line.startswith(f"override '{override}': ")
        assert said in line

    def test_places_in_the_file_stay_right_beside_an_override(self) -> None:
        lines = problems(BASE + "  min_lr: -1\n", "optim.lr=-2")
        assert lines[0].startswith("r.yaml:6: optim.min_lr")
        assert lines[1].startswith("override 'optim.lr=-2': optim.lr")

    def test_items_of_an_overridden_list_are_the_overrides(self) -> None:
        text = with_line("mean: [0.5, 0.5, 0.5]", section="data")
        assert problem(text, "data.mean=[1, 128, 1]").startswith("override 'data.mean=[1, 128, 1]'")

"""All problems of a recipe at once, each with its place and the nearest right key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from recipe_texts import BASE, problem, problems, with_line
from refusals import refused

from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import OptimSection
from finetune.recipe.validate import refuse_undone


class TestKeys:
    def test_unknown_key_names_the_nearest(self) -> None:
        line = problem("unknown_key", with_line("warmup_step: 5", section="optim"))
        assert line.startswith("r.yaml:6: optim.warmup_step: ")
        assert "'warmup_steps'" in line

    def test_unknown_section_names_the_nearest_and_is_one_problem(self) -> None:
        line = problem("unknown_key", BASE.replace("model:", "modl:"))
        assert line.startswith("r.yaml:1: modl: ")
        assert "'model'" in line

    @pytest.mark.parametrize(
        "text,hint",
        [
            (with_line("lr: 3", section="run"), "'optim.lr'"),
            (BASE + "lr: 3\n", "'optim.lr'"),
            (with_line("batchsize: 3", section="run"), "'data.batch_size'"),
            (with_line("qqqq: 3", section="run"), "seed, precision"),
        ],
    )
    def test_the_right_place_of_a_key_is_named(self, text: str, hint: str) -> None:
        assert hint in problem("unknown_key", text)

    def test_missing_keys_are_described(self) -> None:
        line = problem("missing_key", BASE.replace("  lr: 1e-3\n", ""))
        assert line.startswith("r.yaml:3: optim.lr: ")
        assert line.endswith(str(OptimSection.model_fields["lr"].description))

    def test_missing_sections(self) -> None:
        lines = problems("missing_key", "model: {name: x}\n")
        assert [line.split(": ")[:2] for line in lines] == [["r.yaml", "data"], ["r.yaml", "optim"]]

    def test_a_name_from_elsewhere_is_one_problem(self) -> None:
        line = problem("unknown_key", BASE.replace("  lr:", "  learning_rate:"))
        assert line.startswith("r.yaml:4: optim.learning_rate: ")
        assert "'optim.lr'" in line  # and it is not missing, too


class TestAllAtOnce:
    @pytest.mark.parametrize("value", ["", "fast", "[1]"])
    def test_a_section_is_a_mapping(self, value: str) -> None:
        line = problem("wrong_value", BASE + f"run: {value}\n")
        assert line.startswith("r.yaml:6: run: ")

    def test_every_problem_is_reported_at_once_from_top_to_bottom(self) -> None:
        lines = problems(
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
            "r.yaml:9: claims[0].metric: ",  # wrong by itself
            "r.yaml:9: claims[0].metric: ",  # a claim of nothing
            "r.yaml:9: claims[0].source: ",
            "r.yaml:9: claims[1]: ",
        ]
        places = [re.match(r"r\.yaml:\d+: [\w.\[\]]+: ", line) for line in lines[:-2]]
        assert sorted(place[0] for place in places if place) == expected
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
    def test_values(self, override: str, section: str, key: str, expected: Any) -> None:
        recipe = parse_recipe(BASE, overrides=[override])
        expected = override.split("=", 1)[1] if key == "train" else expected
        assert getattr(getattr(recipe, section), key) == expected
        assert parse_recipe(recipe.to_yaml()) == recipe

    def test_later_ones_win_and_mend_the_file(self) -> None:
        broken = BASE.replace("1e-3", "fast")
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
    def test_one_length_takes_the_place_of_the_other(
        self, override: str, expected: tuple[float | None, ...]
    ) -> None:
        written = BASE.replace("steps: 100", "epochs: 5") + "  warmup_epochs: 1\n"
        resolved = parse_recipe(written).to_yaml()
        for text in (written, resolved):
            optim = parse_recipe(text, overrides=[override]).optim
            lengths = (optim.steps, optim.epochs, optim.warmup_steps, optim.warmup_epochs)
            assert lengths == expected

    def test_from_steps_to_epochs(self) -> None:
        for overrides in (["optim.epochs=3"], ["optim.steps=null", "optim.epochs=3"]):
            recipe = parse_recipe(BASE, overrides=overrides)
            assert (recipe.optim.steps, recipe.optim.epochs) == (None, 3)
            refuse_undone(overrides)

    @pytest.mark.parametrize("key", ["steps", "warmup_steps"])
    def test_both_on_one_command_line_are_refused(self, key: str) -> None:
        other = key.replace("steps", "epochs")
        for first, second in ((key, other), (other, key)):
            with refused("recipe.conflict", f"'optim.{first}=1'", f"'optim.{second}=2'"):
                refuse_undone([f"optim.{first}=1", f"optim.{second}=2"])

    @pytest.mark.parametrize(
        "override,code,named",
        [  # beside the rows of tests/faults/test_bad_recipes.py
            ("name=3", "unknown_key", "'model.name=3' or 'optim.name=3'"),
            ("warmup_step=3", "unknown_key", "'optim.warmup_steps'"),
            ("zzz=3", "unknown_key", "'zzz'"),
            ("optim.learning-rate=3", "unknown_key", "'optim.lr'"),
            ("data.num_workers=3", "unknown_key", "'data.workers'"),
            ("fp16=true", "unknown_key", "'run.precision=fp16'"),
            ("run.output_dir=x", "unknown_key", "--out"),
            ("resume=true", "unknown_key", "--resume"),
            ("optim.class_weight=balanced", "unknown_key", "'optim.class_weights'"),
            ("gradient_accumulation_steps=4", "unknown_key", "'data.micro_batch'"),
            ("optim.warmup_step=5", "unknown_key", "'warmup_steps'"),
            ("modl.name=x", "unknown_key", "'model'"),
            ("run.lr=3", "unknown_key", "'optim.lr'"),
            ("optim={lr: 3}", "unknown_key", "'optim.name=…'"),
            ("claims=[]", "unknown_key", "claims "),
            ("optim.lr=", "wrong_value", "optim.lr: "),
            ("optim.lr=-1", "wrong_value", "optim.lr: "),
            ("model.args={a: &x 1, b: *x}", "syntax", "& and *"),
            ("model.name=no", "wrong_value", "'no'"),
        ],
    )
    def test_mistakes_name_the_override(self, override: str, code: str, named: str) -> None:
        line = problem(code, BASE, override)
        start = f"override '{override}': "
        assert line.startswith(start)
        assert named in line.removeprefix(start)

    def test_places_in_the_file_stay_right_beside_an_override(self) -> None:
        lines = problems("wrong_value", BASE + "  min_lr: -1\n", "optim.lr=-2")
        assert lines[0].startswith("r.yaml:6: optim.min_lr")
        assert lines[1].startswith("override 'optim.lr=-2': optim.lr")

    def test_items_of_an_overridden_list_are_the_overrides(self) -> None:
        text = with_line("mean: [0.5, 0.5, 0.5]", section="data")
        line = problem("wrong_value", text, "data.mean=[1, 128, 1]")
        assert line.startswith("override 'data.mean=[1, 128, 1]'")
        line = problem("wrong_value", BASE, "data.classes=[cat, 7]")
        assert line.endswith("'7'")  # how to write this one, not the whole list

"""The command line: dispatch, what goes to which stream, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles import Double, replace
from recipe_texts import BASE as RECIPE

from finetune import __version__
from finetune.cli.main import cli, main
from finetune.errors import DataError
from finetune.recipe.load import load_recipe

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("no_pictures")

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = {
    "val": {"top1": 0.5, "loss": 1.25, "examples": 10, "per_class": [1, 2]},
    "test": {"top1": 0.75, "loss": float("nan"), "examples": 20},
    "claims": [{"metric": "test.top1", "verdict": "met", "measured": 0.75}],
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: Patch) -> str:
    """A recipe in the working directory, which is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return "mine.yaml"


def trained(monkeypatch: Patch, answer: Any = RESULTS) -> Double:
    double = Double(answer)
    replace(monkeypatch, "finetune.training.train", train=double)
    return double


class TestStart:
    def test_nothing_heavy_is_imported(self) -> None:
        code = (
            "import sys, finetune.cli.main; finetune.cli.main.main(['--help']); "
            "print([n for n in ('torch', 'numpy', 'pydantic', 'yaml') if n in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert done.stdout.rstrip().endswith("[]")
        assert "train" in done.stdout

    def test_a_wrong_path_key_or_verb_is_refused_without_torch(self, recipe: str) -> None:
        cases = {
            "trian x": 2,
            "train nope.yaml": 2,
            f"train {recipe} optim.lrr=1": 2,
            "eval runs/nope": 4,
            "eval embedded:vit_nano --data folder:nope": 3,
            "predict runs/nope x.jpg": 4,
            "info runs/nope": 4,
            "info nope.yaml --plan": 2,
            f"info {recipe} optim.lrr=1 --plan": 2,
            "show runs/nope --out d": 4,
            "show embedded:vit_nano nope.jpg --out d": 3,
            "probe runs/nope": 4,
            "probe embedded:vit_nano --data parquet:nope": 3,
            "reproduce nope": 2,
            "report runs/nope": 2,
            "push runs/nope me/nope": 4,
            "export runs/nope": 4,
            "export embedded:vit_nano --format onx": 2,
            "demo runs/nope": 4,
            "bench nope.yaml": 2,
            f"bench {recipe} optim.lrr=1": 2,
            "data info folder:nope": 3,
            "data scan embedded:nope": 3,
            "recipes check nope.yaml": 2,
            "recipes help nope": 2,
            "recipes list nope": 2,
        }
        code = (
            "import json, sys; from finetune.cli.main import main\n"
            "ends = {line: (main(line.split()), 'torch' in sys.modules) for line in sys.argv[1:]}\n"
            "print(json.dumps(ends))"
        )
        done = subprocess.run([sys.executable, "-c", code, *cases], capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == {line: [exit_code, False] for line, exit_code in cases.items()}

    @pytest.mark.parametrize("words, said", [("mine.yaml", "runs/mine"), ("photos", "photos")])
    def test_training_announces_itself_before_torch_is_loaded(
        self, recipe: str, words: str, said: str
    ) -> None:
        Path("photos", "a").mkdir(parents=True)
        code = (
            "import os, sys; from finetune.cli.main import main\n"
            "class Torch:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'torch': os._exit(77)\n"
            "sys.meta_path.insert(0, Torch())\n"
            "main(['train', sys.argv[1], '--dry-run'])"
        )
        done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True)
        (line,) = done.stderr.splitlines()
        assert line.startswith("finetune: ")
        assert said in line
        assert done.returncode == 77

    def test_as_a_module(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "finetune", "trian"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert "no such verb 'trian'; did you mean 'train'?" in done.stderr

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        command = f"{sys.executable} -m finetune recipes schema"
        # the pipe's buffer is 64 KiB: only a closed one is sure to break
        done = subprocess.run(
            ["bash", "-c", f"{{ sleep 1; {command}; echo $? >&2; }} | true"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        )
        assert done.stderr.strip() == "141"

    def test_version(self, capsys: Captured) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"finetune {__version__}\n"

    def test_the_package_finds_its_public_names_late(self) -> None:
        import finetune

        assert finetune.load_recipe is load_recipe
        assert {"train", "Classifier", "load_recipe"} <= set(dir(finetune))
        with pytest.raises(AttributeError, match="no attribute 'trian'"):
            finetune.trian  # noqa: B018

    @pytest.mark.parametrize("words", [["-h"], ["train", "--help"], ["recipes", "-h"]])
    def test_help(self, words: list[str], capsys: Captured) -> None:
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("Usage: finetune")

    def test_every_verb_takes_json_and_debug(self) -> None:
        found = 0
        for name, command in {**cli.commands, **_below("recipes"), **_below("data")}.items():
            options = {text for parameter in command.params for text in parameter.opts}
            assert "--debug" in options, name
            assert "--json" in options or name in ("recipes", "data"), name
            assert command.help, name
            found += 1
        assert found == 22


def _below(group: str) -> dict[str, Any]:
    commands: dict[str, Any] = cli.commands[group].commands  # type: ignore[attr-defined]
    return {f"{group} {name}": command for name, command in commands.items()}


class TestUsage:
    @pytest.mark.parametrize(
        "words,said",
        [
            (["trian"], "no such verb 'trian'; did you mean 'train'?"),
            (["recipes", "chek"], "no such verb 'chek'; did you mean 'check'?"),
            (["qqq"], "no such verb 'qqq'"),
            (["train"], "Missing argument 'RECIPE|SOURCE'"),
            (["train", "x.yaml", "--resum"], "--resume"),
            (["--nonsense"], "No such option"),
            (["predict", "model"], "Missing argument"),
            (["predict", "model", "x.png", "--top-k", "0"], "--top-k"),
            ([], "Usage: finetune"),
        ],
    )
    def test_mistakes_are_exit_2(self, words: list[str], said: str, capsys: Captured) -> None:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert said in captured.err


class TestTrain:
    def test_arguments(self, recipe: str, monkeypatch: Patch) -> None:
        double = trained(monkeypatch)
        assert main(["train", recipe, "optim.lr=0.5", "--out", "here", "--resume"]) == 0
        ((args, kwargs),) = double.calls
        assert args == (load_recipe(recipe, ["optim.lr=0.5"]), Path("here"))
        assert kwargs == {"resume": True, "dry_run": False}

    def test_options_may_stand_anywhere(self, recipe: str, monkeypatch: Patch) -> None:
        double = trained(monkeypatch)
        assert main(["train", "--out", "here", recipe, "--dry-run", "run.seed=1"]) == 0
        args, kwargs = double.calls[0]
        assert args[0].run.seed == 1
        assert kwargs["dry_run"] is True

    def test_the_run_is_named_after_the_recipe(self, recipe: str, monkeypatch: Patch) -> None:
        double = trained(monkeypatch)
        assert main(["train", recipe]) == 0
        assert double.calls[0][0][1] == Path("runs/mine")

    def test_a_run_directory_is_resumed_with_its_own_recipe(
        self, recipe: str, monkeypatch: Patch
    ) -> None:
        double = trained(monkeypatch)
        run = Path("runs/old")
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(RECIPE)
        (run / "run.json").write_text("{}")
        assert main(["train", "runs/old", "--resume"]) == 0
        assert main(["train", "runs/old/recipe.yaml", "--resume"]) == 0
        assert [call[0][1] for call in double.calls] == [run, run]
        assert main(["train", "runs/old"]) == 2  # without --resume it is a folder, not a recipe

    @pytest.mark.parametrize("out", ["", " "])
    def test_an_empty_out_is_no_folder(self, recipe: str, out: str, capsys: Captured) -> None:
        assert main(["train", recipe, "--out", out]) == 2
        assert "--out: is empty" in capsys.readouterr().err

    def test_text(self, recipe: str, monkeypatch: Patch, capsys: Captured) -> None:
        trained(monkeypatch)
        assert main(["train", recipe]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "test: accuracy 75.00 % (95 % interval 53.1–88.8 %), loss nan, "
            "on 20 images (too few to judge by)",
            "val: accuracy 50.00 % (95 % interval 23.7–76.3 %), loss 1.2500, "
            "on 10 images (too few to judge by)",
            "claim test.top1: met: measured 75.00 %",
            "next: finetune predict runs/mine IMAGE",
            "next: finetune demo runs/mine",
            "run: runs/mine",
        ]

    def test_json(self, recipe: str, monkeypatch: Patch, capsys: Captured) -> None:
        trained(monkeypatch)
        assert main(["train", recipe, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["val"] == RESULTS["val"]
        assert found["test"]["loss"] is None  # JSON has no NaN

    def test_a_bad_recipe_never_reaches_the_engine(
        self, recipe: str, monkeypatch: Patch, capsys: Captured
    ) -> None:
        double = trained(monkeypatch)
        assert main(["train", recipe, "lr=3"]) == 2
        assert double.calls == []
        captured = capsys.readouterr()
        assert captured.err == "override 'lr=3': no section; did you mean 'optim.lr=3'?\n"
        assert main(["train", "https://example.org/r.yaml"]) == 2
        assert capsys.readouterr().err.startswith("https://example.org/r.yaml: a recipe is a local")


class TestEvalAndPredict:
    @pytest.fixture(autouse=True)
    def workplace(self, tmp_path: Path, monkeypatch: Patch) -> None:
        """What the verbs name: what is missing is refused before they are asked."""
        monkeypatch.chdir(tmp_path)
        Path("runs/x").mkdir(parents=True)
        Path("y").mkdir()

    def test_eval(self, monkeypatch: Patch, capsys: Captured) -> None:
        double, written = Double(RESULTS["val"]), Double(["e/results.json"])
        doubles = {"describe": Double("val: top1 0.5000"), "write_results": written}
        replace(monkeypatch, "finetune.commands.evaluate", evaluate_model=double, **doubles)
        arguments = ["--data", "folder:y", "--split", "val", "--out", "e", "--fit-temperature"]
        assert main(["eval", "runs/x", *arguments, "--corrupt", "all"]) == 0
        asked = {"data": "folder:y", "split": "val", "fit_temperature": True, "out": "e"}
        asked["corrupt"] = "all"
        assert double.calls == [(("runs/x",), asked)]
        assert written.calls == [((RESULTS["val"], "e"), {})]
        assert capsys.readouterr().out == "val: top1 0.5000\ne/results.json\n"
        assert main(["eval", "runs/x", "--json"]) == 0
        asked = {"data": None, "split": None, "fit_temperature": False, "out": None}
        asked["corrupt"] = None
        assert double.calls[1] == (("runs/x",), asked)
        assert json.loads(capsys.readouterr().out) == RESULTS["val"]
        assert len(written.calls) == 1

    def test_predict(self, monkeypatch: Patch, capsys: Captured) -> None:
        rows = [{"path": "a.png", "predictions": []}, {"path": "b.png", "error": "no image"}]
        classify = Double(rows)
        replace(monkeypatch, "finetune.commands.predict", predict=classify)
        doubles = {"describe": Double("a table"), "unreadable": Double(None)}
        replace(monkeypatch, "finetune.commands.predict_io", **doubles)
        arguments = ["--top-k", "2", "--out", "o.csv", "--sheet", "s.png", "--calibrated"]
        assert main(["predict", "runs/x", "a.png", "-", *arguments]) == 0
        (model, paths), kwargs = classify.calls[0]
        assert (model, list(paths)) == ("runs/x", ["a.png", "-"])
        asked = {"top_k": 2, "out": "o.csv", "sheet": "s.png", "calibrated": True}
        assert kwargs == {**asked, "batch_size": None, "threshold": None}
        assert capsys.readouterr().out == "a table\n"

        monkeypatch.setattr(
            sys.modules["finetune.commands.predict_io"],
            "unreadable",
            lambda rows: DataError("b.png: bad"),
        )
        assert main(["predict", "runs/x", "a.png", "b.png", "--json"]) == 3
        captured = capsys.readouterr()
        assert json.loads(captured.out) == rows  # what could be read is not lost
        assert captured.err == "b.png: bad\n"


class TestRecipes:
    def test_list(self, recipe: str, capsys: Captured) -> None:
        os.mkdir("recipes")
        (Path("recipes") / "a.yaml").write_text(RECIPE)
        assert main(["recipes", "list"]) == 0
        assert capsys.readouterr().out == "recipes/a.yaml  vit_tiny on embedded:digits\n"
        assert main(["recipes", "list", ".", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2
        assert main(["recipes", "list", "nowhere"]) == 2

    def test_check_prints_the_problems_of_all(self, recipe: str, capsys: Captured) -> None:
        Path("bad.yaml").write_text(RECIPE.replace("lr", "learning_rate").replace("name", "nam"))
        assert main(["recipes", "check", recipe]) == 0
        assert capsys.readouterr().out == "mine.yaml: ok\n"
        assert main(["recipes", "check", "bad.yaml", recipe, "nowhere.yaml"]) == 2
        captured = capsys.readouterr()
        assert captured.out.splitlines() == [
            "bad.yaml: not valid",
            "mine.yaml: ok",
            "nowhere.yaml: not valid",
        ]
        problems = captured.err.splitlines()
        assert [line.split(":")[0] for line in problems] == ["bad.yaml"] * 2 + ["nowhere.yaml"]
        assert main(["recipes", "check", "bad.yaml", "--json"]) == 2
        (row,) = json.loads(capsys.readouterr().out)
        assert row["valid"] is False
        assert row["problems"] == problems[:2]

    def test_help(self, capsys: Captured) -> None:
        assert main(["recipes", "help"]) == 0
        assert "optim.warmup_steps  (whole number; default 0)" in capsys.readouterr().out
        assert main(["recipes", "help", "data.train"]) == 0
        assert "random_erasing(" in capsys.readouterr().out
        assert main(["recipes", "help", "optim.lr", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["required"] is True
        assert main(["recipes", "help", "lr"]) == 2
        assert "did you mean 'optim.lr'?" in capsys.readouterr().err

    def test_schema(self, capsys: Captured) -> None:
        assert main(["recipes", "schema"]) == 0
        plain = capsys.readouterr().out
        assert json.loads(plain)["title"] == "finetune recipe"
        assert main(["recipes", "schema", "--json"]) == 0
        assert capsys.readouterr().out == plain


class TestData:
    def test_info(self, image_folder: Path, capsys: Captured) -> None:
        assert main(["data", "info", f"folder:{image_folder}"]) == 0
        out = capsys.readouterr().out
        assert "splits.train.images: 24" in out
        assert "class_names: blue, green, red" in out
        assert main(["data", "info", f"folder:{image_folder}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["splits"]["test"]["images"] == 12

    def test_scan(self, image_folder: Path, capsys: Captured) -> None:
        source = f"folder:{image_folder}"
        assert main(["data", "scan", source]) == 0
        assert "every image can be read" in capsys.readouterr().out
        (image_folder / "train" / "red" / "red-0.png").write_bytes(b"not an image")
        assert main(["data", "scan", source]) == 3
        captured = capsys.readouterr()
        assert "red-0.png" in captured.out
        assert "1 of 36 images cannot be read" in captured.err
        assert main(["data", "scan", source, "--json"]) == 3
        (row,) = json.loads(capsys.readouterr().out)
        assert row["split"] == "train"

    def test_no_such_source(self, capsys: Captured) -> None:
        assert main(["data", "info", "foldr:x"]) == 3
        assert "folder" in capsys.readouterr().err

"""The verbs after training: what they hand over, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles import Double, replace
from plan_files import write_plan
from recipe_texts import BASE as RECIPE

from finetune.cli.main import main

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: Patch) -> None:
    """A folder with what the verbs name: what is missing is refused before they are asked."""
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    Path("a.png").touch()
    for run in ("runs/x", "a", "b"):
        Path(run).mkdir(parents=True)
        Path(run, "recipe.yaml").write_text(RECIPE)
        Path(run, "run.json").write_text("{}")


class TestPublishing:
    def test_push(self, monkeypatch: Patch, capsys: Captured) -> None:
        pushed = {"url": "http://hub/a/b", "commit": "abc", "changed": True}
        double = Double(pushed)
        replace(monkeypatch, "finetune.publish.push", push=double)
        arguments = ["--private", "--revision", "v2", "--message", "better"]
        assert main(["push", "runs/x", "a/b", *arguments]) == 0
        asked = {"private": True, "revision": "v2", "message": "better", "adapter": False}
        assert double.calls == [(("runs/x", "a/b"), asked)]
        assert capsys.readouterr().out == "http://hub/a/b\ncommit abc\n"
        pushed["changed"] = False
        assert main(["push", "runs/x", "a/b"]) == 0
        assert "no new commit" in capsys.readouterr().out

    def test_export(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"file": "x.pt2"})
        replace(
            monkeypatch, "finetune.commands.export", export_model=double, describe=Double("x.pt2")
        )
        arguments = ["--format", "torch", "--out", "x.pt2", "--images", "a", "--images", "b"]
        assert main(["export", "runs/x", *arguments, "--image-size", "96"]) == 0
        asked = {"format": "torch", "out": "x.pt2", "images": ("a", "b"), "image_size": 96}
        assert double.calls == [(("runs/x",), asked)]
        assert capsys.readouterr().out == "x.pt2\n"

    def test_report(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"reports": ["a/report.html", "b/report.html"], "comparison": None})
        replace(monkeypatch, "finetune.report.page", report=double)
        assert main(["report", "a", "b", "--out", "c"]) == 0
        assert double.calls == [((("a", "b"),), {"out": "c"})]
        assert capsys.readouterr().out == "a/report.html\nb/report.html\n"

    def test_demo(self, monkeypatch: Patch, capsys: Captured) -> None:
        serve, export = Double({}), Double({"folder": "space", "files": ["app.py"]})
        replace(monkeypatch, "finetune.demo.server", serve=serve)
        replace(monkeypatch, "finetune.demo.space", export_space=export)
        assert main(["demo", "runs/x", "--port", "0"]) == 0
        assert serve.calls == [(("runs/x",), {"host": "127.0.0.1", "port": 0, "share": False})]
        assert main(["demo", "runs/x", "--export-space", "space"]) == 0
        assert export.calls == [(("runs/x", "space"), {})]
        assert capsys.readouterr().out == "space: 1 files\n"
        assert main(["demo", "runs/x", "--export-space", ""]) == 2

    def test_reproduce(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"table": "t.md", "comparison": None, "page": "p.md"})
        replace(
            monkeypatch, "finetune.commands.reproduce", reproduce=double, describe=Double("# A")
        )
        arguments = ["data.source=x", "--only", "a", "--only", "b", "--scale", "smoke"]
        arguments += ["--data", "hub:a/b=parquet:c=d", "--done", "--page", "p.md"]
        assert main(["reproduce", "grids", *arguments]) == 0
        asked = {"only": ("a", "b"), "scale": "smoke", "overrides": ("data.source=x",)}
        asked |= {"sources": {"hub:a/b": "parquet:c=d"}, "done": True, "page": "p.md"}
        assert double.calls == [(("grids",), {**asked, "out": None})]
        assert capsys.readouterr().out == "# A\nt.md\np.md\n"
        for wrong in (["--data", "hub:a/b"], ["--data", "=x"], ["--page", ""]):
            assert main(["reproduce", "grids", *wrong]) == 2
        assert len(double.calls) == 1


class TestLooking:
    def test_info(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"parameters": {"total": 5}})
        replace(
            monkeypatch,
            "finetune.commands.info",
            model_info=double,
            describe=Double("5 parameters"),
        )
        assert main(["info", "resnet50", "--image-size", "96"]) == 0
        assert double.calls == [(("resnet50",), {"image_size": 96})]
        assert capsys.readouterr().out == "5 parameters\n"

    def test_the_plan_of_a_recipe(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"memory": {"peak": 5}})
        peak = Double("peak 5")
        replace(monkeypatch, "finetune.commands.plan", forecast=double, describe=peak)
        assert main(["info", "r.yaml", "--plan", "data.batch_size=8"]) == 0
        assert double.calls == [(("r.yaml", ("data.batch_size=8",)), {})]
        assert capsys.readouterr().out == "peak 5\n"
        assert main(["info", "--plan", "r.yaml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"memory": {"peak": 5}}
        told = {
            ("info", "r.yaml"): "is a recipe; add --plan",
            ("info", "resnet50", "data.batch_size=8"): "info takes it with --plan",
            ("info", "r.yaml", "--plan", "--image-size", "96"): "write model.image_size=96",
            ("info", "r.yaml", "--plan", "optim.lr=1", "optim.lr=2"): "undoes 'optim.lr=1'",
        }
        for words, said in told.items():
            assert main(list(words)) == 2
            assert said in capsys.readouterr().err
        assert len(double.calls) == 2

    def test_the_plan_of_a_run(self, monkeypatch: Patch) -> None:
        double = Double({})
        replace(monkeypatch, "finetune.commands.plan", forecast=double, describe=Double(""))
        assert main(["info", "runs/x", "--plan"]) == 0
        assert double.calls == [(("runs/x/recipe.yaml", ()), {})]

    def test_show(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"files": ["o/filters.png"], "skipped": {"rollout": "no images"}})
        replace(monkeypatch, "finetune.commands.show", show=double)
        assert main(["show", "runs/x", "a.png", "--out", "o"]) == 0
        assert double.calls == [(("runs/x", ("a.png",)), {"out": "o"})]
        assert capsys.readouterr().out == "o/filters.png\nrollout: no images\n"
        assert main(["show", "runs/x"]) == 2

    def test_probe(self, monkeypatch: Patch, capsys: Captured) -> None:
        double = Double({"shots": {}})
        doubles = {"describe": Double("a table"), "shots_of": Double([1, 5])}
        replace(monkeypatch, "finetune.commands.probe", probe_model=double, **doubles)
        assert main(["probe", "runs/x", "--data", "folder:a", "--linear", "--knn", "20"]) == 0
        asked = {"data": "folder:a", "split": None, "shots": [1, 5], "seeds": 3, "linear": True}
        asked["linear_sgd"] = False
        assert double.calls == [(("runs/x",), {**asked, "knn": 20, "out": None})]
        assert capsys.readouterr().out == "a table\n"

"""Commands that take a model: the functions they call, and what they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from doubles import Double, replace_module

from finetune.cli.main import main
from finetune.errors import DataError, Interrupted

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("workspace")

METRICS = {"top1": 0.5, "loss": 1.25, "examples": 10, "per_class": [1, 2]}


def test_eval(monkeypatch: Patch, capsys: Captured) -> None:
    Path("y").mkdir()
    evaluate, write = Double(METRICS), Double(["e/results.json"])
    doubles = {"format_evaluation": Double("val: top1 0.5000"), "write_evaluation": write}
    replace_module(monkeypatch, "finetune.commands.evaluate", evaluate_model=evaluate, **doubles)
    arguments = ["--data", "folder:y", "--split", "val", "--out", "e", "--fit-temperature"]
    assert main(["eval", "runs/x", *arguments, "--corrupt", "all"]) == 0
    options = {"data": "folder:y", "split": "val", "fit_temperature": True, "out": "e"}
    assert evaluate.calls == [(("runs/x",), {**options, "corrupt": "all", "tta": None})]
    assert write.calls == [((METRICS, "e"), {})]
    assert capsys.readouterr().out == "val: top1 0.5000\ne/results.json\n"
    assert main(["eval", "runs/x", "--json"]) == 0
    options = {"data": None, "split": None, "fit_temperature": False, "out": None}
    assert evaluate.calls[1] == (("runs/x",), {**options, "corrupt": None, "tta": None})
    assert json.loads(capsys.readouterr().out) == METRICS
    assert len(write.calls) == 1


def test_predict(monkeypatch: Patch, capsys: Captured) -> None:
    rows = [{"path": "a.png", "predictions": []}, {"path": "b.png", "error": "no image"}]
    predict = Double(rows)
    replace_module(monkeypatch, "finetune.commands.predict", predict=predict)
    doubles = {"format_predictions": Double("a table"), "unreadable_files_error": Double(None)}
    replace_module(monkeypatch, "finetune.commands.prediction_output", **doubles)
    arguments = ["--top-k", "2", "--out", "o.csv", "--sheet", "s.png", "--calibrated"]
    arguments += ["--tta", "flip", "--features", "f.parquet"]
    assert main(["predict", "runs/x", "a.png", "-", *arguments]) == 0
    (model, paths), kwargs = predict.calls[0]
    assert (model, list(paths)) == ("runs/x", ["a.png", "-"])
    options = {"top_k": 2, "out": "o.csv", "sheet": "s.png", "calibrated": True}
    options |= {"tta": "flip", "features": "f.parquet"}
    options |= {"max_error": None, "coverage": None, "mark_unknown": False}
    assert kwargs == {**options, "batch_size": None, "threshold": None}
    assert capsys.readouterr().out == "a table\n"

    monkeypatch.setattr(
        sys.modules["finetune.commands.prediction_output"],
        "unreadable_files_error",
        lambda rows: DataError("b.png: bad"),
    )
    assert main(["predict", "runs/x", "a.png", "b.png", "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out) == rows  # the predictions of readable images are printed
    assert captured.err == "b.png: bad\n"


def test_export(monkeypatch: Patch, capsys: Captured) -> None:
    export = Double({"file": "x.pt2"})
    doubles = {"export_model": export, "format_export": Double("x.pt2")}
    replace_module(monkeypatch, "finetune.commands.export", **doubles)
    arguments = ["--format", "torch", "--out", "x.pt2", "--images", "a", "--images", "b"]
    assert main(["export", "runs/x", *arguments, "--image-size", "96"]) == 0
    options = {"format": "torch", "out": "x.pt2", "images": ("a", "b"), "image_size": 96}
    options |= {"certify_in": [], "ort_web": None, "precision": None, "max_drop": 0.5, "data": None}
    assert export.calls == [(("runs/x",), options | {"preprocessing": True})]
    assert main(["export", "runs/x", *arguments, "--image-size", "96", "--no-preprocessing"]) == 0
    assert export.calls[1] == (("runs/x",), options | {"preprocessing": False})
    assert main(["export", "runs/x", "--certify", "openvino,web", "--ort-web", "ort"]) == 0
    assert export.calls[2][1]["certify_in"] == ["openvino", "web"]
    assert export.calls[2][1]["ort_web"] == "ort"
    assert capsys.readouterr().out == "x.pt2\n" * 3


def test_demo(monkeypatch: Patch, capsys: Captured) -> None:
    serve, export = (
        Double(Interrupted("the demo has ended", 15)),
        Double({"folder": "space", "files": ["app.py"]}),
    )
    replace_module(monkeypatch, "finetune.demo.server", serve=serve)
    replace_module(monkeypatch, "finetune.demo.space", export_space=export)
    assert main(["demo", "runs/x", "--port", "0"]) == 143
    assert serve.calls == [(("runs/x",), {"host": "127.0.0.1", "port": 0, "share": False})]
    assert main(["demo", "runs/x", "--export-space", "space"]) == 0
    assert export.calls == [(("runs/x", "space"), {})]
    static = Double({"folder": "page", "files": ["index.html"]})
    replace_module(monkeypatch, "finetune.demo.static_page", write_static_page=static)
    assert main(["demo", "runs/x", "--static", "page", "--ort-web", "ort"]) == 0
    assert static.calls == [(("runs/x", "page"), {"ort_web": "ort"})]
    assert capsys.readouterr().out == "space: 1 files\npage: 1 files\n"
    assert main(["demo", "runs/x", "--export-space", ""]) == 2


def test_average(monkeypatch: Patch, capsys: Captured) -> None:
    average = Double({"folder": "soup"})
    doubles = {"average_runs": average, "format_average": Double("a table")}
    replace_module(monkeypatch, "finetune.commands.average", **doubles)
    assert main(["average", "a", "b", "--greedy", "--out", "soup"]) == 0
    assert main(["average", "a", "--alpha", "0.5", "--alpha", "1", "--out", "wise"]) == 0
    assert average.calls == [
        ((("a", "b"),), {"out": "soup", "alphas": (), "greedy": True, "data": None}),
        ((("a",),), {"out": "wise", "alphas": (0.5, 1.0), "greedy": False, "data": None}),
    ]
    assert capsys.readouterr().out == "a table\n" * 2


def test_info(monkeypatch: Patch, capsys: Captured) -> None:
    info = Double({"parameters": {"total": 5}})
    doubles = {"model_info": info, "format_model_info": Double("5 parameters")}
    replace_module(monkeypatch, "finetune.commands.info", **doubles)
    assert main(["info", "resnet50", "--image-size", "96"]) == 0
    assert info.calls == [(("resnet50",), {"image_size": 96})]
    assert capsys.readouterr().out == "5 parameters\n"


def test_info_plan(monkeypatch: Patch, capsys: Captured) -> None:
    estimate = Double({"memory": {"peak": 5}})
    doubles = {"estimate_run": estimate, "format_run_estimate": Double("peak 5")}
    replace_module(monkeypatch, "finetune.commands.estimate", **doubles)
    assert main(["info", "mine.yaml", "--plan", "data.batch_size=8"]) == 0
    assert estimate.calls == [(("mine.yaml", ("data.batch_size=8",)), {})]
    assert capsys.readouterr().out == "peak 5\n"
    assert main(["info", "--plan", "mine.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"memory": {"peak": 5}}
    assert main(["info", "runs/x", "--plan"]) == 0
    assert estimate.calls[2] == (("runs/x/recipe.yaml", ()), {})


def test_show(monkeypatch: Patch, capsys: Captured) -> None:
    show = Double({"files": ["o/filters.png"], "skipped": {"rollout": "no images"}})
    replace_module(monkeypatch, "finetune.commands.show", show_model=show)
    assert main(["show", "runs/x", "a.png", "--out", "o"]) == 0
    assert show.calls == [(("runs/x", ("a.png",)), {"out": "o"})]
    assert capsys.readouterr().out == "o/filters.png\nrollout: no images\n"
    assert main(["show", "runs/x"]) == 2


def test_probe(monkeypatch: Patch, capsys: Captured) -> None:
    Path("photos").mkdir()
    probe = Double({"shots": {}})
    doubles = {"format_probe": Double("a table"), "parse_shots": Double([1, 5])}
    replace_module(monkeypatch, "finetune.commands.probe", probe_model=probe, **doubles)
    assert main(["probe", "runs/x", "--data", "folder:photos", "--linear", "--knn", "20"]) == 0
    options = {"data": "folder:photos", "split": None, "shots": [1, 5], "seeds": 3, "linear": True}
    options |= {
        "linear_sgd": False,
        "logreg": False,
        "folds": None,
        "learning_curve": False,
        "knn": 20,
        "out": None,
    }
    assert probe.calls == [(("runs/x",), options)]
    assert capsys.readouterr().out == "a table\n"


def test_report(monkeypatch: Patch, capsys: Captured) -> None:
    write = Double({"reports": ["a/report.html", "b/report.html"], "comparison": None})
    replace_module(monkeypatch, "finetune.report.page", write_report_pages=write)
    assert main(["report", "a", "b", "--out", "c"]) == 0
    assert write.calls == [((("a", "b"),), {"out": "c", "doctor": None})]
    assert capsys.readouterr().out == "a/report.html\nb/report.html\n"


RUN_OF_MINE = {"runs/mine/run.json": '{"status": "done"}'}
WRONG_ARGUMENTS = {
    "info: a recipe without --plan": BadInput("info mine.yaml", "recipe.conflict", "--plan"),
    "info: an override of a model": BadInput(
        "info resnet50 data.batch_size=8", "recipe.conflict", "--plan"
    ),
    "info --plan: --image-size": BadInput(
        "info mine.yaml --plan --image-size 96", "recipe.conflict", "model.image_size=96"
    ),
    "info --plan: an override twice": BadInput(
        "info mine.yaml --plan optim.lr=1 optim.lr=2", "recipe.conflict", "'optim.lr=1'"
    ),
    "predict: no such run": BadInput("predict runs/y a.png", "weights.not_found", "'runs/y'"),
    "predict: a mistyped run": BadInput(
        "predict runs/frst a.png", "weights.not_found", "'runs/first'", {"runs/first/run.json": ""}
    ),
    "predict: an unknown user": BadInput(
        "predict ~nobody-here/run a.png", "weights.not_found", "'~nobody-here/run'"
    ),
    "predict: a mistyped timm name": BadInput(
        "predict resnt50 a.png", "weights.unknown_name", "'resnet50'"
    ),
    "predict: a name without a prefix": BadInput(
        "predict alice/digits a.png", "weights.not_found", "'hf-hub:alice/digits'"
    ),
    **{
        f"{name}: a recipe": BadInput(arguments, "recipe.conflict", "finetune train mine.yaml")
        for name, arguments in {
            "eval": "eval mine.yaml",
            "predict": "predict mine.yaml a.png",
            "probe": "probe mine.yaml",
            "export": "export mine.yaml",
            "demo": "demo mine.yaml",
            "average": "average mine.yaml --alpha 0.5 --out o",
        }.items()
    },
    "eval: a recipe that has been trained": BadInput(
        "eval mine.yaml", "recipe.conflict", "runs/mine", RUN_OF_MINE
    ),
}


@parametrize_bad_inputs(WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused(bad: BadInput) -> None:
    message = check_bad_input(bad)
    assert "model.name" not in message  # a key that the user did not type

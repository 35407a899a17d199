"""Bad options and files of every command: refused before any work, and no file is changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input import PROMISE, BadInput, check_bad_input, check_result, parametrize_bad_inputs
from networks import write_timm_folder
from PIL import Image
from small_datasets import random_png

PLAN = "title: A plan\nruns:\n- {name: one, recipe: r.yaml}\n"
RECIPE = "model: {name: net}\ndata: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n"


@pytest.fixture(scope="module")
def sample_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network, images, a recipe and results of an earlier command."""
    top = tmp_path_factory.mktemp("good")
    write_timm_folder(top / "net")
    for name in ("a.png", "b.png", "in.csv.png"):
        Image.new("RGB", (32, 32), (9, 90, 200)).save(top / name)
    shutil.copy(top / "a.png", top / "a.csv")
    for name in ("ant", "bee", "cat"):
        (top / "d" / name).mkdir(parents=True)
        (top / "d" / name / "1.png").write_bytes(random_png(1))
    (top / "kept.csv").write_text("path\nkept\n")
    (top / "file").write_text("a file\n")
    (top / "r.yaml").write_text(RECIPE)
    return top


@pytest.fixture(autouse=True)
def in_tmp_path(sample_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sample_files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr("sys.stdin", None)  # as if it were closed


def symlink_to_image(path: Path) -> None:
    path.symlink_to("a.png")


def plan_case(text: str, code: str, named: str) -> BadInput:
    return BadInput("reproduce plan.yaml", code, named, {"plan.yaml": text})


BENCH_OPTIONS = {
    "bench: --decode of images that are kept": BadInput(
        "bench r.yaml --decode", "recipe.conflict", "data.keep=none"
    ),
    "bench: a file for --profile": BadInput(
        "bench r.yaml --profile file", "setup.not_writable", "file"
    ),
    "bench: no steps": BadInput("bench r.yaml --steps 0", "usage", "--steps"),
}

BAD_OPTIONS = {
    **BENCH_OPTIONS,
    "an unknown command": BadInput("trian", "usage", "'train'"),
    "an unknown option": BadInput("train r.yaml --resum", "usage", "--resume"),
    "no argument": BadInput("train", "usage", "RECIPE"),
    "an option without its value": BadInput("train r.yaml --out", "usage", "--out"),
    "train: an empty --out": BadInput(
        ["train", "r.yaml", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "train: a file for --out": BadInput("train r.yaml --out file", "setup.not_writable", "file"),
    "average: one run": BadInput("average net --out o", "recipe.missing_option", "--alpha"),
    "average: an alpha above 1": BadInput(
        "average net --alpha 1.5 --out o", "recipe.wrong_value", "--alpha"
    ),
    "average: an alpha of NaN": BadInput(
        "average net --alpha nan --out o", "recipe.wrong_value", "--alpha"
    ),
    "average: an alpha for a soup": BadInput(
        "average net d --alpha 0.5 --out o", "recipe.conflict", "--alpha"
    ),
    "average: a model folder": BadInput(
        "average net --alpha 0.5 --out o", "weights.unsupported", "net"
    ),
    "average: no such run": BadInput(
        "average gone --alpha 0.5 --out o", "weights.not_found", "gone"
    ),
    "eval: no model": BadInput("eval", "usage", "MODEL"),
    "eval: two models": BadInput("eval net net", "usage", "net"),
    "eval: an unknown split": BadInput(
        "eval net --data folder:d --split tests", "recipe.unknown_name", "'test'"
    ),
    "eval: an empty split": BadInput(
        ["eval", "net", "--data", "folder:d", "--split", ""], "recipe.unknown_name", "--split"
    ),
    "eval: a missing split": BadInput(
        "eval net --data folder:d --split test", "data.no_split", "'test'"
    ),
    "eval: no data": BadInput("eval net", "recipe.missing_option", "--data"),
    "eval: data with other classes": BadInput(
        "eval net --data embedded:digits", "data.wrong_classes", "embedded:digits"
    ),
    "eval: an empty --out": BadInput(["eval", "net", "--out", ""], "recipe.wrong_value", "--out"),
    **{
        f"eval: corrupted by {name}": BadInput(
            ["eval", "net", "--data", "folder:d", "--corrupt", word], "recipe.unknown_name", word
        )
        for name, word in {
            "a typo": "nose",
            "severity 0": "noise:0",
            "severity 6": "noise:6",
            "a fractional severity": "noise:2.5",
            "no severity": "blur:",
            "a severity for all": "all:3",
            "an operation": "corrupt('noise',3)",
        }.items()
    },
    "eval: an empty --corrupt": BadInput(
        ["eval", "net", "--data", "folder:d", "--corrupt", ""], "recipe.unknown_name", "--corrupt"
    ),
    "eval: --corrupt without a kind": BadInput("eval net --corrupt", "usage", "--corrupt"),
    "eval: a file for --out": BadInput(
        "eval net --data folder:d --out file", "setup.not_writable", "--out"
    ),
    "eval: a file above --out": BadInput(
        "eval net --data folder:d --out file/x", "setup.not_writable", "--out"
    ),
    "predict: no image": BadInput("predict net", "usage", "PATH"),
    "predict: no such image": BadInput("predict net c.png", "data.unreadable", "c.png"),
    "predict: no match": BadInput(["predict", "net", "*.gif"], "data.unreadable", "*.gif"),
    "predict: an empty folder": BadInput(
        "predict net e", "data.unreadable", "e", {"e": Path.mkdir}
    ),
    "predict: a text file": BadInput("predict net file", "data.unreadable", "file"),
    "predict: a URL": BadInput(
        "predict net https://x.org/a.png", "data.unreadable", "https://x.org/a.png"
    ),
    "predict: an empty list": BadInput("predict net -", "data.empty", "standard input"),
    "predict: two lists": BadInput("predict net - -", "recipe.conflict", "standard input"),
    "predict: no predictions": BadInput("predict net a.png --top-k 0", "usage", "--top-k"),
    "predict: a batch size of 0": BadInput(
        "predict net a.png --batch-size 0", "usage", "--batch-size"
    ),
    "predict: an unknown suffix": BadInput(
        "predict net a.png --out a.xlsx", "recipe.wrong_value", "'a.xlsx'"
    ),
    "predict: no suffix": BadInput(
        "predict net a.png --out result", "recipe.wrong_value", "'result'"
    ),
    "predict: an empty --out": BadInput(
        ["predict", "net", "a.png", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "predict: a missing folder for --out": BadInput(
        "predict net a.png --out x/a.csv", "setup.not_writable", "'x'"
    ),
    "predict: a folder for --out": BadInput(
        "predict net a.png --out x.csv", "setup.not_writable", "'x.csv'", {"x.csv": Path.mkdir}
    ),
    "predict: a sheet over the image": BadInput(
        "predict net a.png --sheet a.png", "recipe.conflict", "a.png"
    ),
    "predict: a sheet over an image in the folder": BadInput(
        "predict net . --sheet ./d/ant/1.png", "recipe.conflict", "d/ant/1.png"
    ),
    "predict: a sheet over a link": BadInput(
        "predict net a.png --sheet l.png", "recipe.conflict", "a.png", {"l.png": symlink_to_image}
    ),
    "predict: a table over the image": BadInput(
        "predict net a.csv --out a.csv", "recipe.conflict", "a.csv"
    ),
    "predict: a sheet that is a table": BadInput(
        "predict net a.png --sheet s.csv", "recipe.wrong_value", "'s.csv'"
    ),
    "predict: one file for table and sheet": BadInput(
        "predict net a.png --out s.png --sheet s.png", "recipe.wrong_value", "'s.png'"
    ),
    "probe: no data": BadInput("probe net", "recipe.missing_option", "--data"),
    "probe: a string for shots": BadInput(
        "probe net --data folder:d --shots few", "recipe.wrong_value", "--shots"
    ),
    "probe: no shots": BadInput(
        "probe net --data folder:d --shots 0", "recipe.wrong_value", "--shots"
    ),
    "probe: shots twice": BadInput(
        "probe net --data folder:d --shots 1,1", "recipe.wrong_value", "--shots"
    ),
    "probe: shots of 5000 digits": BadInput(
        f"probe net --data folder:d --shots {'9' * 5000}", "recipe.wrong_value", "--shots"
    ),
    "probe: more shots than images": BadInput(
        "probe net --data embedded:digits --shots 999", "data.too_few_images", "999 shots"
    ),
    "probe: no seeds": BadInput("probe net --data folder:d --seeds 0", "usage", "--seeds"),
    "probe: an unknown split": BadInput(
        "probe net --data folder:d --split tets", "recipe.unknown_name", "'test'"
    ),
    "probe: no split to measure on": BadInput(
        "probe net --data folder:d --shots 1", "data.no_split", "folder:d"
    ),
    "probe: more neighbors than images": BadInput(
        "probe net --data embedded:digits --shots 1 --knn 9999", "data.too_few_images", "9999"
    ),
    "probe: a file for --out": BadInput(
        "probe net --data embedded:digits --out file", "setup.not_writable", "--out"
    ),
    "show: no --out": BadInput("show net a.png", "usage", "--out"),
    "show: an empty --out": BadInput(["show", "net", "--out", ""], "recipe.wrong_value", "--out"),
    "show: a file for --out": BadInput("show net --out file", "setup.not_writable", "--out"),
    "show: a recipe without --images": BadInput(
        "show r.yaml --out s", "recipe.conflict", "--images"
    ),
    "show --images: a model": BadInput("show net --images", "data.empty", "folder:net"),
    "show --images: no such recipe": BadInput(
        "show no.yaml --images", "recipe.not_found", "no.yaml"
    ),
    "show --images: no such CSV file": BadInput("show no.csv --images", "data.not_found", "no.csv"),
    "show --images: an override for a source": BadInput(
        "show embedded:digits optim.lr=1 --images", "recipe.conflict", "optim.lr=1"
    ),
    "show --images: an unknown suffix": BadInput(
        "show embedded:digits --images --out s.gif", "recipe.wrong_value", ".png or .jpg"
    ),
    "show --images: no such folder": BadInput(
        "show embedded:digits --images --out no/s.png", "setup.not_writable", "'no'"
    ),
    "data info --sheet: an unknown suffix": BadInput(
        "data info embedded:digits --sheet s.gif", "recipe.wrong_value", "--sheet"
    ),
    "show: no such image": BadInput("show net c.png --out s", "data.not_found", "c.png"),
    "show: a text file": BadInput("show net file --out s", "data.unreadable", "file:"),
    "show: weights that are not cached": BadInput(
        "show test_byobnet --out s", "hub.unreachable", "test_byobnet"
    ),
    "info: an image size of 0": BadInput("info net --image-size 0", "usage", "--image-size"),
    "info: an image size of a million": BadInput(
        "info net --image-size 1000000", "usage", "--image-size"
    ),
    "info: a string for an image size": BadInput(
        "info net --image-size big", "usage", "--image-size"
    ),
    "info: a size that the patches do not divide": BadInput(
        "info net --image-size 33", "recipe.wrong_size", "33 px"
    ),
    "report: no run": BadInput("report", "usage", "RUN"),
    "report: no such run": BadInput("report runs/x", "recipe.not_found", "runs/x"),
    "report: a folder that is no run": BadInput("report net", "recipe.not_a_run", "net"),
    "report: an empty name": BadInput(["report", ""], "recipe.not_a_run", "finetune train"),
    "report: a damaged record": BadInput(
        "report run",
        "checkpoint.damaged",
        "run.json",
        {"run/run.json": "{", "run/recipe.yaml": RECIPE},
    ),
    "report: a record that is a list": BadInput(
        "report run",
        "checkpoint.damaged",
        "run.json",
        {"run/run.json": "[]", "run/recipe.yaml": RECIPE},
    ),
    "export: an unknown format": BadInput("export net --format onx", "usage", "'onnx'"),
    "export: the suffix of another format": BadInput(
        "export net --out x.pt2", "recipe.wrong_value", ".onnx"
    ),
    "export: an empty --out": BadInput(
        ["export", "net", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "export: no such image": BadInput(
        "export net --images c.png --format torch", "data.unreadable", "c.png"
    ),
    "export: a file above --out": BadInput(
        "export net --out file/x.pt2 --format torch", "setup.not_writable", "--out"
    ),
    "export: an image size of a million": BadInput(
        "export net --image-size 1000000", "usage", "--image-size"
    ),
    "push: no repository": BadInput("push net", "usage", "REPO"),
    "push: a name with three parts": BadInput("push net a/b/c", "recipe.wrong_value", "'a/b/c'"),
    "push: a name with a space": BadInput(
        ["push", "net", "a/b c"], "recipe.wrong_value", "'a/b-c'"
    ),
    "push: a name with ..": BadInput("push net ../x", "recipe.wrong_value", "'../x'"),
    "push: an empty name": BadInput(["push", "net", ""], "recipe.wrong_value", "'owner/name'"),
    "push: a branch with a space": BadInput(
        ["push", "net", "a/b", "--revision", "x y"], "recipe.wrong_value", "--revision"
    ),
    "push: a commit for a branch": BadInput(
        f"push net a/b --revision {'a' * 40}", "recipe.wrong_value", "--revision"
    ),
    "demo: a string for a port": BadInput("demo net --port http", "usage", "--port"),
    "demo: a port above 65535": BadInput("demo net --port 99999", "usage", "--port"),
    "demo: an empty folder name": BadInput(
        ["demo", "net", "--export-space", ""], "recipe.wrong_value", "--export-space"
    ),
    "demo: a file for the Space": BadInput(
        "demo net --export-space file", "recipe.wrong_value", "--export-space"
    ),
    "demo: no such model": BadInput("demo nett/", "weights.not_found", "'nett/'"),
    "reproduce: no such plan": BadInput("reproduce cifar", "recipe.not_found", "cifar"),
    "reproduce: an empty name": BadInput(["reproduce", ""], "recipe.not_found", "recipes/"),
    "reproduce: an unknown scale": BadInput(
        "reproduce plan.yaml --scale fll", "recipe.unknown_name", "'full'", {"plan.yaml": PLAN}
    ),
    "reproduce: no such run": BadInput(
        "reproduce plan.yaml --only on", "recipe.unknown_name", "'one'", {"plan.yaml": PLAN}
    ),
    "reproduce: an override twice": BadInput(
        "reproduce plan.yaml run.seed=1 run.seed=2",
        "recipe.conflict",
        "'run.seed=1'",
        {"plan.yaml": PLAN},
    ),
    "reproduce: an empty plan": plan_case("", "recipe.missing_key", "plan.yaml"),
    "reproduce: a plan without runs": plan_case(
        "title: x\n", "recipe.missing_key", "plan.yaml: runs"
    ),
    "reproduce: an empty list of runs": plan_case(
        "title: x\nruns: []\n", "recipe.wrong_value", "plan.yaml:2: runs"
    ),
    "reproduce: a plan with a missing recipe": plan_case(
        PLAN.replace("r.yaml", "x.yaml"), "recipe.wrong_value", "x.yaml"
    ),
    "reproduce: one name for two runs": plan_case(
        PLAN + "- {name: one, recipe: r.yaml}\n", "recipe.wrong_value", "'one'"
    ),
    "reproduce: no seeds": plan_case(
        PLAN.replace("}", ", seeds: []}"), "recipe.wrong_value", "one.seeds"
    ),
    "reproduce: a grid with one value": plan_case(
        PLAN.replace("}", ", grid: {optim.lr: 1}}"), "recipe.wrong_value", "optim.lr"
    ),
    "reproduce: a claim without a metric": plan_case(
        PLAN.replace("}", ", claims: [{value: 1}]}"), "recipe.missing_key", "metric"
    ),
    "reproduce: a run outside its folder": plan_case(
        PLAN.replace("one", "../one"), "recipe.wrong_value", "plan.yaml"
    ),
    "recipes check: no file": BadInput("recipes check", "usage", "FILE"),
    "recipes check: no such file": BadInput("recipes check x.yaml", "recipe.wrong_value", "x.yaml"),
    "recipes list: no such folder": BadInput("recipes list nowhere", "recipe.not_found", "nowhere"),
    "recipes help: no such key": BadInput("recipes help lr", "recipe.unknown_key", "'optim.lr'"),
    "recipes: an unknown command": BadInput("recipes chek", "usage", "'check'"),
    "data: an unknown command": BadInput("data inf", "usage", "'info'"),
    "data: no source": BadInput("data scan", "usage", "SOURCE"),
}

SLOW_OPTIONS = {
    "demo: an invalid address": BadInput(
        "demo net --host 300.1.1.1", "setup.wrong_address", "--host"
    )
}


@parametrize_bad_inputs(BAD_OPTIONS)
def test_bad_options(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: options of every command", PROMISE)


@pytest.mark.faults
@parametrize_bad_inputs(SLOW_OPTIONS)
def test_slow_bad_options(bad: BadInput, fault: Callable[..., None]) -> None:
    check_bad_input(bad)
    fault("bad input: options of every command", PROMISE)


@pytest.mark.faults
@pytest.mark.parametrize(
    "name",
    [
        "an unknown command",
        "train: an empty --out",
        "eval: an unknown split",
        "predict: a sheet over the image",
        "predict: a text file",
        "info: a size that the patches do not divide",
    ],
)
def test_bad_options_in_a_subprocess(name: str, fault: Callable[..., None]) -> None:
    """Most cases run in this process; these run as a shell would start them."""
    bad = BAD_OPTIONS[name]
    command = [sys.executable, "-m", "finetune", *bad.command("--json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    check_result(bad, result.returncode, result.stdout, result.stderr)
    fault("bad input: options, in a subprocess", PROMISE)

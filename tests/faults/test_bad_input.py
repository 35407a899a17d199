"""Options and files of every verb: refused before any work, and nothing there is touched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, check_message, parametrised, refuse
from networks import timm_folder
from PIL import Image
from samples import png

PLAN = "title: A plan\nruns:\n- {name: one, recipe: r.yaml}\n"
RECIPE = "model: {name: net}\ndata: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network, two pictures, results of an earlier call and a folder with a class each."""
    top = tmp_path_factory.mktemp("good")
    timm_folder(top / "net")
    for name in ("a.png", "b.png", "in.csv.png"):
        Image.new("RGB", (32, 32), (9, 90, 200)).save(top / name)
    shutil.copy(top / "a.png", top / "a.csv")
    for name in ("ant", "bee", "cat"):
        (top / "d" / name).mkdir(parents=True)
        (top / "d" / name / "1.png").write_bytes(png(1))
    (top / "kept.csv").write_text("path\nkept\n")
    (top / "file").write_text("a file\n")
    (top / "r.yaml").write_text(RECIPE)
    return top


@pytest.fixture(autouse=True)
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr("sys.stdin", None)  # as where it was closed


def link(path: Path) -> None:
    path.symlink_to("a.png")


def plan(text: str, said: str) -> Bad:
    return Bad("reproduce plan.yaml", 2, said, {"plan.yaml": text})


USAGE = {
    "an unknown verb": Bad("trian", 2, "did you mean 'train'"),
    "an unknown option": Bad("train r.yaml --resum", 2, "--resume"),
    "no argument": Bad("train", 2, "Missing argument 'RECIPE'"),
    "an option without its value": Bad("train r.yaml --out", 2, "requires an argument"),
    "train: an empty --out": Bad(["train", "r.yaml", "--out", ""], 2, "--out: is empty"),
    "train: a file for --out": Bad("train r.yaml --out file", 5, "file"),
    "eval: no model": Bad("eval", 2, "Missing argument"),
    "eval: two models": Bad("eval net net", 2, "unexpected extra argument"),
    "eval: an unknown split": Bad("eval net --data folder:d --split tests", 2, "did you mean"),
    "eval: an empty split": Bad(["eval", "net", "--data", "folder:d", "--split", ""], 2, "--split"),
    "eval: a split that is not there": Bad("eval net --data folder:d --split test", 3, "'test'"),
    "eval: no data": Bad("eval net", 2, "--data"),
    "eval: data of other classes": Bad("eval net --data embedded:digits", 3, "class"),
    "eval: an empty --out": Bad(["eval", "net", "--out", ""], 2, "--out: is empty"),
    "eval: a file for --out": Bad("eval net --data folder:d --out file", 5, "file"),
    "eval: a file above --out": Bad("eval net --data folder:d --out file/x", 5, "file"),
    "predict: no picture": Bad("predict net", 2, "Missing argument"),
    "predict: no such picture": Bad("predict net c.png", 3, "no such file"),
    "predict: no match": Bad(["predict", "net", "*.gif"], 3, "no file matches"),
    "predict: an empty folder": Bad("predict net e", 3, "without images", {"e": Path.mkdir}),
    "predict: a text": Bad("predict net file", 3, "not an image"),
    "predict: an address": Bad("predict net https://x.org/a.png", 3, "addresses are not read"),
    "predict: an empty list": Bad("predict net -", 3, "is empty"),
    "predict: two lists": Bad("predict net - -", 2, "read once"),
    "predict: no predictions": Bad("predict net a.png --top-k 0", 2, "--top-k"),
    "predict: a batch of nothing": Bad("predict net a.png --batch-size 0", 2, "--batch-size"),
    "predict: an unknown suffix": Bad("predict net a.png --out a.xlsx", 2, "unknown suffix"),
    "predict: no suffix": Bad("predict net a.png --out result", 2, "unknown suffix"),
    "predict: an empty --out": Bad(["predict", "net", "a.png", "--out", ""], 2, "is empty"),
    "predict: no folder for --out": Bad("predict net a.png --out x/a.csv", 5, "make it first"),
    "predict: a folder for --out": Bad(
        "predict net a.png --out x.csv", 5, "a folder", {"x.csv": Path.mkdir}
    ),
    "predict: a sheet over the picture": Bad("predict net a.png --sheet a.png", 2, "would replace"),
    "predict: a sheet over one of a folder": Bad(
        "predict net . --sheet ./d/ant/1.png", 2, "would replace"
    ),
    "predict: a sheet over a link": Bad(
        "predict net a.png --sheet l.png",
        2,
        "would replace",
        {"l.png": link},
    ),
    "predict: a table over the picture": Bad("predict net a.csv --out a.csv", 2, "would replace"),
    "predict: a sheet that is a table": Bad("predict net a.png --sheet s.csv", 2, "use .png"),
    "predict: one file for both": Bad("predict net a.png --out s.png --sheet s.png", 2, "suffix"),
    "probe: no data": Bad("probe net", 2, "--data"),
    "probe: words for shots": Bad("probe net --data folder:d --shots few", 2, "--shots"),
    "probe: no shots": Bad("probe net --data folder:d --shots 0", 2, "--shots"),
    "probe: shots twice": Bad("probe net --data folder:d --shots 1,1", 2, "--shots"),
    "probe: endless shots": Bad(f"probe net --data folder:d --shots {'9' * 5000}", 2, "--shots"),
    "probe: more shots than images": Bad(
        "probe net --data embedded:digits --shots 999", 3, "--shots"
    ),
    "probe: no seeds": Bad("probe net --data folder:d --seeds 0", 2, "--seeds"),
    "probe: an unknown split": Bad("probe net --data folder:d --split tets", 2, "did you mean"),
    "probe: nothing to measure on": Bad("probe net --data folder:d --shots 1", 3, "neither"),
    "probe: more neighbours than images": Bad(
        "probe net --data embedded:digits --shots 1 --knn 9999", 3, "--knn"
    ),
    "probe: a file for --out": Bad(
        "probe net --data embedded:digits --out file", 5, "not a folder"
    ),
    "show: no --out": Bad("show net a.png", 2, "Missing option '--out'"),
    "show: an empty --out": Bad(["show", "net", "--out", ""], 2, "--out: is empty"),
    "show: a file for --out": Bad("show net --out file", 5, "file"),
    "show: no such picture": Bad("show net c.png --out s", 3, "no such file"),
    "show: a text": Bad("show net file --out s", 3, "not an image"),
    "show: weights that are not here": Bad("show test_byobnet --out s", 7, "not in the cache"),
    "info: a size of nothing": Bad("info net --image-size 0", 2, "--image-size"),
    "info: a size of a million": Bad("info net --image-size 1000000", 2, "--image-size"),
    "info: a word for a size": Bad("info net --image-size big", 2, "--image-size"),
    "info: a size beside the patches": Bad("info net --image-size 33", 2, "use 32 or 40"),
    "report: no run": Bad("report", 2, "Missing argument"),
    "report: no such run": Bad("report runs/x", 2, "does not exist"),
    "report: a folder that is no run": Bad("report net", 2, "not a run directory"),
    "report: an empty name": Bad(["report", ""], 2, "not a run directory"),
    "report: a damaged record": Bad(
        "report run", 4, "run.json", {"run/run.json": "{", "run/recipe.yaml": RECIPE}
    ),
    "report: a record of another kind": Bad(
        "report run", 4, "run.json", {"run/run.json": "[]", "run/recipe.yaml": RECIPE}
    ),
    "export: an unknown format": Bad("export net --format onx", 2, "did you mean 'onnx'"),
    "export: the suffix of another": Bad("export net --out x.pt2", 2, ".onnx"),
    "export: an empty --out": Bad(["export", "net", "--out", ""], 2, "--out: is empty"),
    "export: no such picture": Bad("export net --images c.png --format torch", 3, "no such file"),
    "export: a file above --out": Bad("export net --out file/x.pt2 --format torch", 5, "file"),
    "export: a size of a million": Bad("export net --image-size 1000000", 2, "--image-size"),
    "push: no repository": Bad("push net", 2, "Missing argument"),
    "push: a name of three parts": Bad("push net a/b/c", 2, "no repository's name"),
    "push: a name with a space": Bad(["push", "net", "a/b c"], 2, "did you mean 'a/b-c'"),
    "push: a name upwards": Bad("push net ../x", 2, "no repository's name"),
    "push: an empty name": Bad(["push", "net", ""], 2, "no repository's name"),
    "push: a branch with a space": Bad(
        ["push", "net", "a/b", "--revision", "x y"], 2, "--revision"
    ),
    "push: a commit for a branch": Bad(f"push net a/b --revision {'a' * 40}", 2, "is a commit"),
    "demo: a word for a port": Bad("demo net --port http", 2, "--port"),
    "demo: a port beyond the last": Bad("demo net --port 99999", 2, "--port"),
    "demo: an empty folder name": Bad(["demo", "net", "--export-space", ""], 2, "is empty"),
    "demo: a file for the Space": Bad("demo net --export-space file", 2, "is a file"),
    "demo: no such model": Bad("demo nett/", 4, "no such file or folder"),
    "reproduce: no such plan": Bad("reproduce cifar", 2, "no such plan"),
    "reproduce: an empty name": Bad(["reproduce", ""], 2, "no such plan"),
    "reproduce: an unknown scale": Bad(
        "reproduce plan.yaml --scale fll", 2, "did you mean 'full'", {"plan.yaml": PLAN}
    ),
    "reproduce: no such run": Bad(
        "reproduce plan.yaml --only on", 2, "did you mean 'one'", {"plan.yaml": PLAN}
    ),
    "reproduce: an override twice": Bad(
        "reproduce plan.yaml run.seed=1 run.seed=2", 2, "undoes", {"plan.yaml": PLAN}
    ),
    "reproduce: an empty plan": plan("", "empty"),
    "reproduce: a plan without runs": plan("title: x\n", "runs: missing"),
    "reproduce: a plan of no runs": plan("title: x\nruns: []\n", "run"),
    "reproduce: a plan of a recipe that is not there": plan(
        PLAN.replace("r.yaml", "x.yaml"), "no such file"
    ),
    "reproduce: one name for two runs": plan(
        PLAN + "- {name: one, recipe: r.yaml}\n", "two runs are called"
    ),
    "reproduce: no seeds": plan(PLAN.replace("}", ", seeds: []}"), "at least one"),
    "reproduce: a grid of one value": plan(PLAN.replace("}", ", grid: {optim.lr: 1}}"), "list"),
    "reproduce: a run outside of its folder": plan(PLAN.replace("one", "../one"), "name"),
    "recipes check: no file": Bad("recipes check", 2, "Missing argument"),
    "recipes check: no such file": Bad("recipes check x.yaml", 2, "no such file"),
    "recipes list: no such folder": Bad("recipes list nowhere", 2, "no such folder"),
    "recipes help: no such key": Bad("recipes help lr", 2, "did you mean 'optim.lr'"),
    "recipes: an unknown verb": Bad("recipes chek", 2, "did you mean 'check'"),
    "data: an unknown verb": Bad("data inf", 2, "did you mean 'info'"),
    "data: no source": Bad("data scan", 2, "Missing argument"),
}

SLOW = {
    "demo: an address of nobody": Bad("demo net --host 300.1.1.1", 5, "--host"),
}


@parametrised(USAGE)
def test_options(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: options of every verb", PROMISE)


@pytest.mark.faults
@parametrised(SLOW)
def test_options_that_take_long(bad: Bad, fault: Callable[..., None]) -> None:
    refuse(bad)
    fault("bad input: options of every verb", PROMISE)


@pytest.mark.faults
@pytest.mark.parametrize(
    "name",
    [
        "an unknown verb",
        "train: an empty --out",
        "eval: an unknown split",
        "predict: a sheet over the picture",
        "predict: a text",
        "info: a size beside the patches",
    ],
)
def test_a_process_of_its_own_ends_alike(name: str, fault: Callable[..., None]) -> None:
    """The rows above run in this process; some of them as a shell would start them."""
    bad = USAGE[name]
    words = bad.words.split() if isinstance(bad.words, str) else bad.words
    command = [sys.executable, "-m", "finetune", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == bad.code, done.stderr
    assert bad.said in done.stderr
    check_message(done.stderr)
    fault("bad input: options, in a process of its own", PROMISE)

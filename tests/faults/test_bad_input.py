"""Options and files of every verb: refused before any work, and nothing there is touched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, check_answer, parametrised, refuse
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


def plan(text: str, code: str, named: str) -> Bad:
    return Bad("reproduce plan.yaml", code, named, {"plan.yaml": text})


WHOLE = "bench r.yaml optim.steps=null optim.epochs=1 --end-to-end"
BENCH = {
    "bench: our own loop in no precision": Bad(
        "bench r.yaml --against finetune", "recipe.unknown_name", "finetune:fp32"
    ),
    "bench: a whole training by steps": Bad(
        "bench r.yaml --end-to-end", "recipe.unsupported", "optim.epochs"
    ),
    "bench: steps of a whole training": Bad(f"{WHOLE} --steps 9", "recipe.conflict", "--steps"),
    "bench: a whole training in a loop": Bad(
        f"{WHOLE} --against timm-loop", "recipe.unknown_name", "timm-train:PATH"
    ),
    "bench: a whole training by no file": Bad(
        f"{WHOLE} --against timm-train", "recipe.unknown_name", "timm-train:PATH"
    ),
    "bench: a whole training by a file that is missing": Bad(
        f"{WHOLE} --against timm-train:no.py", "recipe.not_found", "no.py"
    ),
    "bench: a whole training by another script": Bad(
        f"{WHOLE} --against timm-train:t.py", "recipe.wrong_value", "t.py", {"t.py": "print(1)"}
    ),
    "bench: a whole training by a script that fails": Bad(
        f"{WHOLE} --against timm-train:t.py", "recipe.wrong_value", "t.py", {"t.py": "--data-dir"}
    ),
    "bench: a whole training that streams": Bad(
        f"{WHOLE} data.source=parquet:x data.streaming=true", "recipe.unsupported", "data.streaming"
    ),
    "bench: a whole training without validation": Bad(
        f"{WHOLE} data.val_fraction=0", "recipe.unsupported", "data.val_fraction"
    ),
    "bench: a whole training by other methods": Bad(
        f"{WHOLE} optim.ema_decay=0.9 optim.schedule=linear",
        "recipe.unsupported",
        "optim.ema_decay, optim.schedule",
    ),
    "bench: a whole training with other images": Bad(
        f"{WHOLE} 'data.train=resize | rotate(9)' --against timm-train:t.py",
        "recipe.unsupported",
        "rotate",
        {"t.py": "print(1)"},
    ),
}

USAGE = {
    **BENCH,
    "an unknown verb": Bad("trian", "usage", "'train'"),
    "an unknown option": Bad("train r.yaml --resum", "usage", "--resume"),
    "no argument": Bad("train", "usage", "RECIPE"),
    "an option without its value": Bad("train r.yaml --out", "usage", "--out"),
    "train: an empty --out": Bad(["train", "r.yaml", "--out", ""], "recipe.wrong_value", "--out"),
    "train: a file for --out": Bad("train r.yaml --out file", "setup.not_writable", "file"),
    "average: one run": Bad("average net --out o", "recipe.missing_option", "--alpha"),
    "average: an alpha above 1": Bad(
        "average net --alpha 1.5 --out o", "recipe.wrong_value", "--alpha"
    ),
    "average: an alpha that is no number": Bad(
        "average net --alpha nan --out o", "recipe.wrong_value", "--alpha"
    ),
    "average: an alpha of a soup": Bad(
        "average net d --alpha 0.5 --out o", "recipe.conflict", "--alpha"
    ),
    "average: a model folder": Bad("average net --alpha 0.5 --out o", "weights.unsupported", "net"),
    "average: no such run": Bad("average gone --alpha 0.5 --out o", "weights.not_found", "gone"),
    "eval: no model": Bad("eval", "usage", "MODEL"),
    "eval: two models": Bad("eval net net", "usage", "net"),
    "eval: an unknown split": Bad(
        "eval net --data folder:d --split tests", "recipe.unknown_name", "'test'"
    ),
    "eval: an empty split": Bad(
        ["eval", "net", "--data", "folder:d", "--split", ""], "recipe.unknown_name", "--split"
    ),
    "eval: a split that is not there": Bad(
        "eval net --data folder:d --split test", "data.no_split", "'test'"
    ),
    "eval: no data": Bad("eval net", "recipe.missing_option", "--data"),
    "eval: data of other classes": Bad(
        "eval net --data embedded:digits", "data.wrong_classes", "embedded:digits"
    ),
    "eval: an empty --out": Bad(["eval", "net", "--out", ""], "recipe.wrong_value", "--out"),
    **{
        f"eval: corrupted by {name}": Bad(
            ["eval", "net", "--data", "folder:d", "--corrupt", word], "recipe.unknown_name", word
        )
        for name, word in {
            "a slip of the pen": "nose",
            "severity 0": "noise:0",
            "severity 6": "noise:6",
            "half a severity": "noise:2.5",
            "no severity": "blur:",
            "a severity of all": "all:3",
            "an operation": "corrupt('noise',3)",
        }.items()
    },
    "eval: an empty --corrupt": Bad(
        ["eval", "net", "--data", "folder:d", "--corrupt", ""], "recipe.unknown_name", "--corrupt"
    ),
    "eval: --corrupt without a kind": Bad("eval net --corrupt", "usage", "--corrupt"),
    "eval: a file for --out": Bad(
        "eval net --data folder:d --out file", "setup.not_writable", "--out"
    ),
    "eval: a file above --out": Bad(
        "eval net --data folder:d --out file/x", "setup.not_writable", "--out"
    ),
    "predict: no picture": Bad("predict net", "usage", "PATH"),
    "predict: no such picture": Bad("predict net c.png", "data.unreadable", "c.png"),
    "predict: no match": Bad(["predict", "net", "*.gif"], "data.unreadable", "*.gif"),
    "predict: an empty folder": Bad("predict net e", "data.unreadable", "e", {"e": Path.mkdir}),
    "predict: a text": Bad("predict net file", "data.unreadable", "file"),
    "predict: an address": Bad(
        "predict net https://x.org/a.png", "data.unreadable", "https://x.org/a.png"
    ),
    "predict: an empty list": Bad("predict net -", "data.empty", "standard input"),
    "predict: two lists": Bad("predict net - -", "recipe.conflict", "standard input"),
    "predict: no predictions": Bad("predict net a.png --top-k 0", "usage", "--top-k"),
    "predict: a batch of nothing": Bad("predict net a.png --batch-size 0", "usage", "--batch-size"),
    "predict: an unknown suffix": Bad(
        "predict net a.png --out a.xlsx", "recipe.wrong_value", "'a.xlsx'"
    ),
    "predict: no suffix": Bad("predict net a.png --out result", "recipe.wrong_value", "'result'"),
    "predict: an empty --out": Bad(
        ["predict", "net", "a.png", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "predict: no folder for --out": Bad(
        "predict net a.png --out x/a.csv", "setup.not_writable", "'x'"
    ),
    "predict: a folder for --out": Bad(
        "predict net a.png --out x.csv", "setup.not_writable", "'x.csv'", {"x.csv": Path.mkdir}
    ),
    "predict: a sheet over the picture": Bad(
        "predict net a.png --sheet a.png", "recipe.conflict", "a.png"
    ),
    "predict: a sheet over one of a folder": Bad(
        "predict net . --sheet ./d/ant/1.png", "recipe.conflict", "d/ant/1.png"
    ),
    "predict: a sheet over a link": Bad(
        "predict net a.png --sheet l.png", "recipe.conflict", "a.png", {"l.png": link}
    ),
    "predict: a table over the picture": Bad(
        "predict net a.csv --out a.csv", "recipe.conflict", "a.csv"
    ),
    "predict: a sheet that is a table": Bad(
        "predict net a.png --sheet s.csv", "recipe.wrong_value", "'s.csv'"
    ),
    "predict: one file for both": Bad(
        "predict net a.png --out s.png --sheet s.png", "recipe.wrong_value", "'s.png'"
    ),
    "probe: no data": Bad("probe net", "recipe.missing_option", "--data"),
    "probe: words for shots": Bad(
        "probe net --data folder:d --shots few", "recipe.wrong_value", "--shots"
    ),
    "probe: no shots": Bad("probe net --data folder:d --shots 0", "recipe.wrong_value", "--shots"),
    "probe: shots twice": Bad(
        "probe net --data folder:d --shots 1,1", "recipe.wrong_value", "--shots"
    ),
    "probe: endless shots": Bad(
        f"probe net --data folder:d --shots {'9' * 5000}", "recipe.wrong_value", "--shots"
    ),
    "probe: more shots than images": Bad(
        "probe net --data embedded:digits --shots 999", "data.too_few_images", "999 shots"
    ),
    "probe: no seeds": Bad("probe net --data folder:d --seeds 0", "usage", "--seeds"),
    "probe: an unknown split": Bad(
        "probe net --data folder:d --split tets", "recipe.unknown_name", "'test'"
    ),
    "probe: nothing to measure on": Bad(
        "probe net --data folder:d --shots 1", "data.no_split", "folder:d"
    ),
    "probe: more neighbours than images": Bad(
        "probe net --data embedded:digits --shots 1 --knn 9999", "data.too_few_images", "9999"
    ),
    "probe: a file for --out": Bad(
        "probe net --data embedded:digits --out file", "setup.not_writable", "--out"
    ),
    "show: no --out": Bad("show net a.png", "usage", "--out"),
    "show: an empty --out": Bad(["show", "net", "--out", ""], "recipe.wrong_value", "--out"),
    "show: a file for --out": Bad("show net --out file", "setup.not_writable", "--out"),
    "show: a recipe without --images": Bad("show r.yaml --out s", "recipe.conflict", "--images"),
    "show --images: a model": Bad("show net --images", "data.empty", "folder:net"),
    "show --images: no such recipe": Bad("show no.yaml --images", "recipe.not_found", "no.yaml"),
    "show --images: no such table": Bad("show no.csv --images", "data.not_found", "no.csv"),
    "show --images: a key of a source": Bad(
        "show embedded:digits optim.lr=1 --images", "recipe.conflict", "optim.lr=1"
    ),
    "show --images: another kind of file": Bad(
        "show embedded:digits --images --out s.gif", "recipe.wrong_value", ".png or .jpg"
    ),
    "show --images: no such folder": Bad(
        "show embedded:digits --images --out no/s.png", "setup.not_writable", "'no'"
    ),
    "data info --sheet: another kind of file": Bad(
        "data info embedded:digits --sheet s.gif", "recipe.wrong_value", "--sheet"
    ),
    "show: no such picture": Bad("show net c.png --out s", "data.not_found", "c.png"),
    "show: a text": Bad("show net file --out s", "data.unreadable", "file:"),
    "show: weights that are not here": Bad(
        "show test_byobnet --out s", "hub.unreachable", "test_byobnet"
    ),
    "info: a size of nothing": Bad("info net --image-size 0", "usage", "--image-size"),
    "info: a size of a million": Bad("info net --image-size 1000000", "usage", "--image-size"),
    "info: a word for a size": Bad("info net --image-size big", "usage", "--image-size"),
    "info: a size beside the patches": Bad(
        "info net --image-size 33", "recipe.wrong_size", "33 px"
    ),
    "report: no run": Bad("report", "usage", "RUN"),
    "report: no such run": Bad("report runs/x", "recipe.not_found", "runs/x"),
    "report: a folder that is no run": Bad("report net", "recipe.not_a_run", "net"),
    "report: an empty name": Bad(["report", ""], "recipe.not_a_run", "finetune train"),
    "report: a damaged record": Bad(
        "report run",
        "checkpoint.damaged",
        "run.json",
        {"run/run.json": "{", "run/recipe.yaml": RECIPE},
    ),
    "report: a record of another kind": Bad(
        "report run",
        "checkpoint.damaged",
        "run.json",
        {"run/run.json": "[]", "run/recipe.yaml": RECIPE},
    ),
    "export: an unknown format": Bad("export net --format onx", "usage", "'onnx'"),
    "export: the suffix of another": Bad("export net --out x.pt2", "recipe.wrong_value", ".onnx"),
    "export: an empty --out": Bad(["export", "net", "--out", ""], "recipe.wrong_value", "--out"),
    "export: no such picture": Bad(
        "export net --images c.png --format torch", "data.unreadable", "c.png"
    ),
    "export: a file above --out": Bad(
        "export net --out file/x.pt2 --format torch", "setup.not_writable", "--out"
    ),
    "export: a size of a million": Bad("export net --image-size 1000000", "usage", "--image-size"),
    "push: no repository": Bad("push net", "usage", "REPO"),
    "push: a name of three parts": Bad("push net a/b/c", "recipe.wrong_value", "'a/b/c'"),
    "push: a name with a space": Bad(["push", "net", "a/b c"], "recipe.wrong_value", "'a/b-c'"),
    "push: a name upwards": Bad("push net ../x", "recipe.wrong_value", "'../x'"),
    "push: an empty name": Bad(["push", "net", ""], "recipe.wrong_value", "'owner/name'"),
    "push: a branch with a space": Bad(
        ["push", "net", "a/b", "--revision", "x y"], "recipe.wrong_value", "--revision"
    ),
    "push: a commit for a branch": Bad(
        f"push net a/b --revision {'a' * 40}", "recipe.wrong_value", "--revision"
    ),
    "demo: a word for a port": Bad("demo net --port http", "usage", "--port"),
    "demo: a port beyond the last": Bad("demo net --port 99999", "usage", "--port"),
    "demo: an empty folder name": Bad(
        ["demo", "net", "--export-space", ""], "recipe.wrong_value", "--export-space"
    ),
    "demo: a file for the Space": Bad(
        "demo net --export-space file", "recipe.wrong_value", "--export-space"
    ),
    "demo: no such model": Bad("demo nett/", "weights.not_found", "'nett/'"),
    "reproduce: no such plan": Bad("reproduce cifar", "recipe.not_found", "cifar"),
    "reproduce: an empty name": Bad(["reproduce", ""], "recipe.not_found", "recipes/"),
    "reproduce: an unknown scale": Bad(
        "reproduce plan.yaml --scale fll", "recipe.unknown_name", "'full'", {"plan.yaml": PLAN}
    ),
    "reproduce: no such run": Bad(
        "reproduce plan.yaml --only on", "recipe.unknown_name", "'one'", {"plan.yaml": PLAN}
    ),
    "reproduce: an override twice": Bad(
        "reproduce plan.yaml run.seed=1 run.seed=2",
        "recipe.conflict",
        "'run.seed=1'",
        {"plan.yaml": PLAN},
    ),
    "reproduce: an empty plan": plan("", "recipe.missing_key", "plan.yaml"),
    "reproduce: a plan without runs": plan("title: x\n", "recipe.missing_key", "plan.yaml: runs"),
    "reproduce: a plan of no runs": plan(
        "title: x\nruns: []\n", "recipe.wrong_value", "plan.yaml:2: runs"
    ),
    "reproduce: a plan of a recipe that is not there": plan(
        PLAN.replace("r.yaml", "x.yaml"), "recipe.wrong_value", "x.yaml"
    ),
    "reproduce: one name for two runs": plan(
        PLAN + "- {name: one, recipe: r.yaml}\n", "recipe.wrong_value", "'one'"
    ),
    "reproduce: no seeds": plan(
        PLAN.replace("}", ", seeds: []}"), "recipe.wrong_value", "one.seeds"
    ),
    "reproduce: a grid of one value": plan(
        PLAN.replace("}", ", grid: {optim.lr: 1}}"), "recipe.wrong_value", "optim.lr"
    ),
    "reproduce: a claim that lacks its figure": plan(
        PLAN.replace("}", ", claims: [{value: 1}]}"), "recipe.missing_key", "metric"
    ),
    "reproduce: a run outside of its folder": plan(
        PLAN.replace("one", "../one"), "recipe.wrong_value", "plan.yaml"
    ),
    "recipes check: no file": Bad("recipes check", "usage", "FILE"),
    "recipes check: no such file": Bad("recipes check x.yaml", "recipe.wrong_value", "x.yaml"),
    "recipes list: no such folder": Bad("recipes list nowhere", "recipe.not_found", "nowhere"),
    "recipes help: no such key": Bad("recipes help lr", "recipe.unknown_key", "'optim.lr'"),
    "recipes: an unknown verb": Bad("recipes chek", "usage", "'check'"),
    "data: an unknown verb": Bad("data inf", "usage", "'info'"),
    "data: no source": Bad("data scan", "usage", "SOURCE"),
}

SLOW = {
    "demo: an address of nobody": Bad("demo net --host 300.1.1.1", "setup.wrong_address", "--host")
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
    command = [sys.executable, "-m", "finetune", *bad.command("--json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    check_answer(bad, done.returncode, done.stdout, done.stderr)
    fault("bad input: options, in a process of its own", PROMISE)

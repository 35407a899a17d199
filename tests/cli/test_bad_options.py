"""Invalid options of every command are refused before any work, and no file is changed.

What the function behind a command refuses is tested beside this function.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import BadInput, check_bad_input, check_result, parametrize_bad_inputs
from networks import write_timm_folder
from PIL import Image
from small_datasets import random_png

PLAN = "title: A plan\nruns:\n- {name: one, recipe: r.yaml}\n"
RECIPE = "model: {name: net}\ndata: {source: 'embedded:digits'}\noptim: {lr: 1, steps: 1}\n"


@pytest.fixture(scope="module")
def sample_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network, images and a recipe."""
    top = tmp_path_factory.mktemp("good")
    write_timm_folder(top / "net")
    Image.new("RGB", (32, 32), (9, 90, 200)).save(top / "a.png")
    shutil.copy(top / "a.png", top / "a.csv")
    for name in ("ant", "bee", "cat"):
        (top / "d" / name).mkdir(parents=True)
        (top / "d" / name / "1.png").write_bytes(random_png(1))
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


BAD_OPTIONS = {
    "bench: --decode of images that are kept": BadInput(
        "bench r.yaml --decode", "recipe.conflict", "data.keep=none"
    ),
    "bench: no steps": BadInput("bench r.yaml --steps 0", "usage", "--steps"),
    "train: an option without its value": BadInput("train r.yaml --out", "usage", "--out"),
    "train: a file for --out": BadInput("train r.yaml --out file", "setup.not_writable", "file"),
    "export: a URL for --out": BadInput(
        "export net --out https://me:pw@h.invalid/x",
        "setup.not_writable",
        "'https://***@h.invalid/x'",
    ),
    "demo: a URL for --static": BadInput(
        "demo net --static s3://bucket/x?token=abc", "setup.not_writable", "'s3://bucket/x?***'"
    ),
    "tune: no --minutes": BadInput("tune r.yaml", "usage", "--minutes"),
    "tune: no minutes": BadInput("tune r.yaml --minutes 0", "recipe.wrong_value", "--minutes 0"),
    "tune: no section": BadInput("tune r.yaml --minutes 1", "recipe.missing_key", "`tune`"),
    "average: an alpha of NaN": BadInput(
        "average net --alpha nan --out o", "recipe.wrong_value", "--alpha"
    ),
    "average: no such run": BadInput(
        "average gone --alpha 0.5 --out o", "weights.not_found", "gone"
    ),
    "eval: no model": BadInput("eval", "usage", "MODEL"),
    "eval: two models": BadInput("eval net net", "usage", "net"),
    "eval: an empty split": BadInput(
        ["eval", "net", "--data", "folder:d", "--split", ""], "recipe.unknown_name", "--split"
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
    "compare: one model": BadInput("compare net", "usage", "B"),
    "compare: a recipe": BadInput("compare net r.yaml", "recipe.conflict", "r.yaml"),
    "compare: no such folder": BadInput("compare gone/ net", "weights.not_found", "gone"),
    "compare: one model twice": BadInput("compare net ./net", "recipe.conflict", "./net"),
    "compare: no data": BadInput(
        "compare net embedded:vit_nano", "recipe.missing_option", "--data"
    ),
    "compare: an unknown condition": BadInput(
        ["compare", "net", "embedded:vit_nano", "--fail-if", "top1 falls 1"],
        *("recipe.wrong_value", "'top1 falls 1'"),
    ),
    "compare: a negative limit": BadInput(
        ["compare", "net", "embedded:vit_nano", "--fail-if", "top1 drops -1"],
        *("recipe.wrong_value", "'top1 drops -1'"),
    ),
    "compare: an empty --out": BadInput(
        ["compare", "net", "embedded:vit_nano", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "predict: no such image": BadInput("predict net c.png", "data.unreadable", "c.png"),
    "predict: no match": BadInput(["predict", "net", "*.gif"], "data.unreadable", "*.gif"),
    "predict: an empty folder": BadInput(
        "predict net e", "data.unreadable", "e", {"e": Path.mkdir}
    ),
    "predict: a text file": BadInput("predict net file", "data.unreadable", "file"),
    "predict: a URL": BadInput(
        "predict net https://x.org/a.png", "data.unreadable", "https://x.org/a.png"
    ),
    "predict: a list on closed standard input": BadInput("predict net -", "data.empty", "-: "),
    "predict: a batch size of 0": BadInput(
        "predict net a.png --batch-size 0", "usage", "--batch-size"
    ),
    "predict: an empty --out": BadInput(
        ["predict", "net", "a.png", "--out", ""], "recipe.wrong_value", "--out"
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
    "probe: shots of 5000 digits": BadInput(
        f"probe net --data folder:d --shots {'9' * 5000}", "recipe.wrong_value", "--shots"
    ),
    "probe: no seeds": BadInput("probe net --data folder:d --seeds 0", "usage", "--seeds"),
    "probe: an unknown split": BadInput(
        "probe net --data folder:d --split tets", "recipe.unknown_name", "'test'"
    ),
    "probe: more neighbors than images": BadInput(
        "probe net --data embedded:digits --shots 1 --knn 9999", "data.too_few_images", "9999"
    ),
    "show: no --out": BadInput("show net a.png", "usage", "--out"),
    "show: an empty --out": BadInput(["show", "net", "--out", ""], "recipe.wrong_value", "--out"),
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
    "report: an empty name": BadInput(["report", ""], "recipe.not_a_run", "finetune train"),
    "export: an unknown format": BadInput("export net --format onx", "usage", "'onnx'"),
    "export: an empty --out": BadInput(
        ["export", "net", "--out", ""], "recipe.wrong_value", "--out"
    ),
    "export: an image size of a million": BadInput(
        "export net --image-size 1000000", "usage", "--image-size"
    ),
    "export: an unknown runtime": BadInput("export net --certify tf", "usage", "'tf'"),
    "push: no repository": BadInput("push net", "usage", "REPO"),
    "push: a name with a space": BadInput(
        ["push", "net", "a/b c"], "recipe.wrong_value", "'a/b c'"
    ),
    "push: a name with ..": BadInput("push net ../x", "recipe.wrong_value", "'../x'"),
    "demo: a string for a port": BadInput("demo net --port http", "usage", "--port"),
    "demo: a port above 65535": BadInput("demo net --port 99999", "usage", "--port"),
    "demo: a file for the Space": BadInput(
        "demo net --export-space file", "recipe.wrong_value", "--export-space"
    ),
    "demo: a page and a Space": BadInput(
        "demo net --static a --export-space b", "recipe.conflict", "--export-space"
    ),
    "demo: no such model": BadInput("demo nett/", "weights.not_found", "'nett/'"),
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
    "reproduce: a plan without runs": BadInput(
        "reproduce plan.yaml", "recipe.missing_key", "runs", {"plan.yaml": "title: x\n"}
    ),
    "recipes check: no file": BadInput("recipes check", "usage", "FILE"),
    "recipes check: no such file": BadInput("recipes check x.yaml", "recipe.wrong_value", "x.yaml"),
    "recipes list: no such folder": BadInput("recipes list nowhere", "recipe.not_found", "nowhere"),
    "data: no source": BadInput("data scan", "usage", "SOURCE"),
}


@parametrize_bad_inputs(BAD_OPTIONS)
def test_bad_options(bad: BadInput) -> None:
    check_bad_input(bad)


def test_a_claim_without_a_metric_is_refused() -> None:
    text = PLAN.replace("}", ", claims: [{value: 1}]}")
    files = {"plan.yaml": text}
    check_bad_input(BadInput("reproduce plan.yaml", "recipe.missing_key", "metric", files))


@pytest.mark.slow
def test_demo_refuses_an_invalid_address() -> None:
    check_bad_input(BadInput("demo net --host 300.1.1.1", "setup.wrong_address", "--host"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "train: an option without its value",
        pytest.param(
            "info: a size that the patches do not divide", marks=pytest.mark.faults
        ),  # repeats the path of the one before it, with torch
    ],
)
def test_bad_options_in_a_subprocess(name: str) -> None:
    """Most cases run in this process; these run as a shell would start them."""
    bad = BAD_OPTIONS[name]
    command = [sys.executable, "-m", "finetune", *bad.command("--json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    check_result(bad, result.returncode, result.stdout, result.stderr)

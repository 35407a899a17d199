"""Every command of README.md, carried out on small data, in the order of the page."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import hub_server
import numpy as np
import pytest
from PIL import Image
from samples import make_parquet, png

from finetune.cli import main as cli

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SHORT = ("optim.steps=2", "run.eval_every=2", "run.save_every=2", "data.batch_size=8")

# Commands that are not carried out here, and where they are.
ELSEWHERE = {
    "pip": "the two commands of tests/test_project.py, which CI runs",
    "accelerate": "several GPUs and machines: their words are read below",
    "ACCELERATE_USE_CPU=true": "two processes: tests/faults/test_signals.py",
    "finetune info recipes/quickstart.yaml --plan": "tests/commands/test_plan.py",
    "finetune demo": "serves until it is stopped: tests/demo",
    "finetune bench": "minutes: tests/bench",
    "finetune reproduce": "hours: tests/commands/test_reproduce.py",
    "finetune export": "tests/commands/test_export.py",
}


def commands() -> list[str]:
    """The lines of the page's bash blocks, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def kind(command: str) -> str | None:
    return next((head for head in ELSEWHERE if command.startswith(head)), None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, photos, a picture and tables of a small CIFAR-10."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(REPOSITORY / "recipes", folder / "recipes")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for shade, name in enumerate(("cats", "dogs")):
            (folder / "photos" / split / name).mkdir(parents=True)
            for index in range(12):
                pixels = (rng.integers(0, 100, (40, 44, 3)) + 100 * shade).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / name / f"{index}.png")
    (folder / "cat.jpg").write_bytes(png(1, (40, 40)))
    for split in ("train", "test"):
        labels = [number % 2 for number in range(60)]
        make_parquet(folder / "PATH/cifar10" / f"{split}-0.parquet", labels, names=["cats", "dogs"])
    return folder


def test_every_command_is_either_tried_or_named() -> None:
    assert len(commands()) > 25
    used = {kind(command) for command in commands()} - {None}
    assert used == set(ELSEWHERE), "ELSEWHERE names what the page no longer has"
    tried = [command for command in commands() if kind(command) is None]
    assert len(tried) >= 15
    assert all(command.startswith("finetune ") for command in tried)


def shortened(words: list[str]) -> list[str]:
    """The words of a command with less to do."""
    if words[0] == "train" and "photos" in words[1]:
        fixed = [word for word in words if not word.startswith("optim.epochs")]
        name = [] if "model.name=embedded:vit_nano" in words else ["model.name=embedded:vit_nano"]
        return [*fixed, *name, "optim.steps=2", "model.freeze=backbone"]
    if words[0] == "train":
        return [*words, *SHORT, "data.source=parquet:PATH/cifar10"]
    if words[0] == "probe":
        return [word.replace("1,5,10,25", "1").replace("20", "2") for word in words]
    return words


@pytest.mark.timeout(600)
def test_every_command_does_what_it_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_pictures: None
) -> None:
    monkeypatch.chdir(place)
    quick = "run.threads=1"
    for name in ("nano_32", "nano_48"):  # runs that later lines of the page look at
        words = ["train", f"recipes/cifar10/{name}.yaml", *SHORT, quick]
        assert cli.main([*words, "data.source=parquet:PATH/cifar10"]) == 0
    with hub_server.HubServer() as hub:
        hub.add_user("owner", token="hf_readme")
        hub_server.point_at(hub, monkeypatch, tmp_path / "home", token="hf_readme")
        for command in commands():
            if kind(command) is None:
                words = shortened(shlex.split(command)[1:])
                if "push_to" in command:
                    words += ["--out", "runs/pushed"]
                assert cli.main(words) == 0, command
    for written in ("predictions.csv", "predictions.png", "photos-eval", "inside"):
        assert Path(written).exists()
    assert Path("runs/photos/start.yaml").is_file()


@pytest.mark.parametrize("command", [line for line in commands() if "accelerate launch" in line])
def test_launchers_take_their_words(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import launch_command_parser

    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command.partition("accelerate launch")[2])
    parsed = launch_command_parser().parse_args(words)
    assert parsed.training_script == "finetune"
    assert parsed.module
    assert parsed.config_file is None or Path(parsed.config_file).is_file()
    verb, recipe = parsed.training_script_args[:2]
    assert verb == "train"
    assert Path(recipe).is_file()

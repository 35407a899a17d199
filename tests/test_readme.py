"""Run every command of README.md and docs/ on small data, in the order of the pages."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import hub_server
import numpy as np
import pytest
from PIL import Image
from small_datasets import random_png, write_parquet

from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.recipe.load import load_recipe

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    REPOSITORY / "README.md",
    *(
        REPOSITORY / "docs" / f"{name}.md"
        for name in (
            *("README", "photos", "tune", "doctor", "data-sources", "recipes", "methods"),
            *("distributed", "predict", "uncertainty", "compare", "export", "hub"),
            *("reproducibility", "performance"),
        )
    ),
]
SHORT = ("optim.steps=2", "run.eval_every=2", "run.save_every=2", "data.batch_size=8")

# Commands that this file does not run, and the reason or the test that runs them.
ELSEWHERE = {
    "pip": "the two commands of tests/test_project.py, which CI runs",
    "accelerate": "several GPUs and machines: a test below parses their arguments",
    "ACCELERATE_USE_CPU=true": "two processes: tests/faults/test_signals.py",
    "finetune info recipes/quickstart.yaml --plan": "tests/commands/test_estimate.py",
    "finetune train photos/ --minutes": "takes minutes: tests/commands/test_tune.py",
    "finetune tune": "the same file",
    "finetune train runs/digits --resume": "the same file",
    "finetune train runs/photos --resume": "the same file",
    "finetune demo": "serves until it is stopped: tests/demo",
    "finetune train runs/short --resume": "tests/training/test_train.py",
    "finetune bench": "takes minutes: tests/bench",
    "finetune reproduce": "takes hours: tests/commands/test_reproduce.py",
    "finetune export": "tests/commands/test_export.py",
    **dict.fromkeys(
        ("finetune eval int8/", "finetune predict int8/", "finetune compare exported/"),
        "need an exported file: tests/commands/test_exported_models.py",
    ),
    "finetune predict runs/quickstart": "needs a trained model: tests/commands/test_predict.py",
    **dict.fromkeys(("openvino=", "g++", "./classify"), "tests/commands/test_export_examples.py"),
    "python -m http.server": "serves until it is stopped: tests/demo/test_static_page.py",
    "finetune push runs/photos --static-space": "needs npm: tests/demo/test_static_page.py",
    "finetune compare runs/photos": "needs a second run: tests/commands/test_compare.py",
    "finetune compare runs/nano_32 runs/nano_48 --fail-if": "may fail, as it should: the same file",
    "finetune average": "needs several finished runs: tests/commands/test_average.py",
}


def commands() -> list[str]:
    """Return the lines of the bash blocks of all pages, each once and without its comment."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(
            r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


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
    shutil.copytree(folder / "photos" / "test", folder / "other_photos")
    (folder / "cat.jpg").write_bytes(random_png(1, (40, 40)))
    for split in ("train", "test"):
        labels = [number % 2 for number in range(60)]
        write_parquet(
            folder / "PATH/cifar10" / f"{split}-0.parquet", labels, names=["cats", "dogs"]
        )
    return folder


def test_every_command_is_either_tried_or_named() -> None:
    assert len(commands()) > 40
    used = {kind(command) for command in commands()} - {None}
    assert used == set(ELSEWHERE), "ELSEWHERE names a command that no page has"
    tried = [command for command in commands() if kind(command) is None]
    assert len(tried) >= 25
    assert all(command.startswith("finetune ") for command in tried)


def shortened(words: list[str]) -> list[str]:
    """Return the words of a command, changed so that it takes seconds."""
    if words[0] in ("train", "start") and "photos" in words[1]:
        fixed = [word for word in words if not word.startswith("optim.epochs")]
        name = [] if "model.name=embedded:vit_nano" in words else ["model.name=embedded:vit_nano"]
        return [*fixed, *name, "optim.steps=2", "model.freeze=backbone"]
    if words[0] == "train":
        threads = ["run.threads=1"] if "--resume" in words else []  # as the run that it resumes
        return [*words, *SHORT, *threads, "data.source=parquet:PATH/cifar10"]
    if words[0] == "probe":
        return [word.replace("1,5,10,25", "1").replace("20", "2") for word in words]
    return words


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("finetune ")])
def test_every_command_has_known_options_and_keys(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    words, command = shlex.split(line)[1:], cli.cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    try:
        parsed = command.make_context(command.name, words).params
    except FinetuneError as error:  # the runs and photos of the pages do not exist
        if not error.code.endswith("not_found"):
            raise
        return
    path = next((word for word in words if word.endswith(".yaml") and Path(word).is_file()), None)
    if path and "overrides" in parsed:
        load_recipe(path, parsed["overrides"])


@pytest.mark.faults  # the sibling above parses all commands, and most have tests of their own
@pytest.mark.timeout(600)
def test_every_command_does_what_it_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_plots: None
) -> None:
    monkeypatch.chdir(place)
    quick = "run.threads=1"
    for name in ("nano_32", "nano_48"):  # runs that other commands read
        words = ["train", f"recipes/cifar10/{name}.yaml", *SHORT, quick]
        assert cli.main([*words, "data.source=parquet:PATH/cifar10"]) == 0
    with hub_server.HubServer() as hub:
        hub.add_user("owner", token="hf_readme")
        hub_server.point_clients_at(hub, monkeypatch, tmp_path / "home", token="hf_readme")
        for command in commands():
            if kind(command) is None:
                words = shortened(shlex.split(command)[1:])
                if "push_to" in command:
                    words += ["--out", "runs/pushed"]
                assert cli.main(words) == 0, command
    pictures = ("photos.jpg", "training.png", "predictions.png", "inside")
    for written in ("predictions.csv", "photos-eval", "my.yaml", *pictures):
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
    subcommand, recipe = parsed.training_script_args[:2]
    assert subcommand == "train"
    assert Path(recipe).is_file()


def test_docs_has_no_other_pages_with_commands() -> None:
    listed = {page.name for page in PAGES if page.parent.name == "docs"} | {"messages.md"}
    assert {page.name for page in (REPOSITORY / "docs").glob("*.md")} == listed
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [name for name in listed - {"README.md"} if f"]({name})" not in index]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_readme_is_short_and_its_picture_small() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 160
    assert (REPOSITORY / "docs" / "report.png").stat().st_size < 150_000


def test_no_page_installs_extras_by_a_name_that_the_index_gives_to_another_project() -> None:
    for page in PAGES:
        assert "finetune[" not in page.read_text(encoding="utf-8"), page

"""A signal where there is nothing to save: the run stops at once with a message and can go on."""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from recipe_texts import tiny_text

from finetune.cli.main import main
from finetune.data import image_cache
from finetune.errors import Interrupted
from finetune.training import launch
from finetune.training.meter import StopSignals

RECIPE = tiny_text(
    "eval: 'resize(18) | center_crop', unreadable: quarantine, batch_size: 4",
    source="folder:FOLDER",
)
FILES = ["model/config.json", "model/model.safetensors", "model/README.md"]
FILES += ["metrics.jsonl", "results.json", "report.html"]

CREATE, DECODE = "finetune.models.build.timm.create_model", "PIL.Image.open"
# When the signal comes: a function, and at which of its calls; of decoding, since it began.
BEFORE = {
    "building": (CREATE, 1),
    "looking at some images": (DECODE, 2),
    "decoding": (DECODE, 60),  # past the samples
}
AFTER = {
    "the temperature": ("finetune.evaluation.calibration.fit_temperature", 1),
    "evaluation of test": ("finetune.training.finalize.Examination", 2),
    "publishing": ("finetune.training.finalize.save_model", 1),
    "publishing again": ("finetune.training.finalize.refresh", 1),
    "the report": ("finetune.report.page.write_report", 1),
}

pytestmark = pytest.mark.usefixtures("no_pictures")


class Bell:
    """Stands for a function, and sends this process a signal at one of its calls."""

    def __init__(self, name: str, call: int, number: signal.Signals) -> None:
        self.function: Callable[..., Any] = pkgutil.resolve_name(name)
        self.call, self.number = call, number
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            os.kill(os.getpid(), self.number)
        return self.function(*args, **kwargs)


def trained(recipe: Path, out: Path, *options: str) -> int:
    return main(["train", str(recipe), "--out", str(out), *options])


def status(out: Path) -> str:
    return str(json.loads((out / "run.json").read_text())["status"])


def weights(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stops")
    for split, count in (("train", 20), ("val", 4), ("test", 4)):
        for name, color in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
            (folder / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (18, 18), tuple(part + number for part in color))
                image.save(folder / "images" / split / name / f"{number}.png")
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder / "images")))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, no_pictures: None) -> Path:
    out = recipe.parent / "undisturbed"
    assert trained(recipe, out) == 0
    return out


def check_stopped(recipe: Path, out: Path, bell: Bell, capsys: pytest.CaptureFixture[str]) -> None:
    """The signal ends the run, which says so and nothing else that it did not do."""
    assert trained(recipe, out) == 128 + bell.number
    assert bell.calls == bell.call, "it came, and nothing of the kind was done after it"
    said = capsys.readouterr().err
    assert f"{out}: stopped; continue with --resume" in said
    assert "left out" not in said


def check_resumed(recipe: Path, out: Path, undisturbed: Path) -> None:
    """The run goes on to its end, and ends as if nothing had been."""
    assert trained(recipe, out, "--resume") == 0
    assert status(out) == "done"
    assert [name for name in FILES if not (out / name).is_file()] == []
    assert weights(out) == weights(undisturbed)
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
@pytest.mark.parametrize("place", BEFORE)
def test_before_training_a_signal_stops_the_run_at_once(
    place: str,
    number: signal.Signals,
    recipe: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, (name, call), visit = tmp_path / "run", BEFORE[place], image_cache.visit
    bell = Bell(name, call, number)

    def decode_all(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(name, bell)
        return visit(*args, **kwargs)

    if name == DECODE:
        monkeypatch.setattr(image_cache, "visit", decode_all)
    else:
        monkeypatch.setattr(name, bell)
    check_stopped(recipe, out, bell, capsys)
    if name == DECODE:  # the network is made before there is a record
        assert status(out) == f"stopped ({128 + number})"
        assert (out / "metrics.jsonl").read_text() == ""
    else:
        assert not out.exists()
    monkeypatch.undo()
    check_resumed(recipe, out, undisturbed)


@pytest.mark.parametrize("place", AFTER)
def test_after_training_a_stopped_run_is_not_done_and_resuming_finishes_it(
    place: str,
    recipe: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, (name, call) = tmp_path / "run", AFTER[place]
    bell = Bell(name, call, signal.SIGTERM)
    monkeypatch.setattr(name, bell)
    check_stopped(recipe, out, bell, capsys)
    assert status(out) == "stopped (143)"
    assert not (out / "report.html").exists()
    monkeypatch.undo()
    check_resumed(recipe, out, undisturbed)


def test_ranks_that_wait_for_rank_0_get_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(launch, "broadcast_object_list", sent.extend)
    main_process: Any = SimpleNamespace(is_main_process=True)
    with StopSignals() as stop, pytest.raises(Interrupted), stop.at_once("run: stopped"):
        launch.on_main(main_process, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sent == [None, ("rank 0: run: stopped", 143, "internal")]

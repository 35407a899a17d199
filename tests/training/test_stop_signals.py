"""A signal outside the training loop: the run stops immediately with a message and can resume."""

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
from recipe_texts import tiny_recipe_text

from finetune.cli.main import main
from finetune.data import pixel_cache
from finetune.errors import Interrupted
from finetune.training import accelerator
from finetune.training.signals import StopSignals

RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop', unreadable: quarantine, batch_size: 4",
    source="folder:FOLDER",
)
FILES = ["model/config.json", "model/model.safetensors", "model/README.md"]
FILES += ["metrics.jsonl", "results.json", "report.html"]

CREATE, DECODE = "finetune.models.build.timm.create_model", "PIL.Image.open"
# The function and the call at which the signal is sent; PIL.Image.open counts from decoding on.
BEFORE_TRAINING = {
    "building": (CREATE, 1),
    "inspecting sample images": (DECODE, 2),
    "decoding": (DECODE, 60),  # after the sample images
}
AFTER_TRAINING = {
    "the temperature": ("finetune.evaluation.calibration.fit_temperature", 1),
    "publishing": ("finetune.training.finalize.save_model", 1),
    "the report": ("finetune.report.page.write_run_report", 1),
}

pytestmark = pytest.mark.usefixtures("no_plots")


class SignalAtCall:
    """Replaces a function and sends this process a signal at one of its calls."""

    def __init__(self, name: str, call: int, number: signal.Signals) -> None:
        self.function: Callable[..., Any] = pkgutil.resolve_name(name)
        self.call, self.number = call, number
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            os.kill(os.getpid(), self.number)
        return self.function(*args, **kwargs)


def train(recipe: Path, out: Path, *options: str) -> int:
    return main(["train", str(recipe), "--out", str(out), *options])


def read_status(out: Path) -> str:
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
def undisturbed_run(recipe: Path, no_plots: None) -> Path:
    out = recipe.parent / "undisturbed"
    assert train(recipe, out) == 0
    return out


def check_stopped(
    recipe: Path, out: Path, signal_at_call: SignalAtCall, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the signal ends the run with its message alone."""
    assert train(recipe, out) == 128 + signal_at_call.number
    assert signal_at_call.calls == signal_at_call.call, (
        "the signal was not sent, or the function ran again after it"
    )
    stderr = capsys.readouterr().err
    assert f"{out}: stopped; continue: finetune train {out} --resume" in stderr
    assert "left out" not in stderr


def check_resumed(recipe: Path, out: Path, undisturbed_run: Path) -> None:
    """Resume the run, and check that it ends like an undisturbed one."""
    assert train(recipe, out, "--resume") == 0
    assert read_status(out) == "done"
    assert [name for name in FILES if not (out / name).is_file()] == []
    assert weights(out) == weights(undisturbed_run)
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("place", BEFORE_TRAINING)
def test_signal_before_training_stops_the_run_immediately(
    place: str,
    recipe: Path,
    undisturbed_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, decode_split = tmp_path / "run", pixel_cache.decode_split
    name, call = BEFORE_TRAINING[place]
    number = signal.SIGINT if place == "decoding" else signal.SIGTERM
    signal_at_call = SignalAtCall(name, call, number)

    def patch_and_decode(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(name, signal_at_call)
        yield from decode_split(*args, **kwargs)

    if name == DECODE:
        monkeypatch.setattr(pixel_cache, "decode_split", patch_and_decode)
    else:
        monkeypatch.setattr(name, signal_at_call)
    check_stopped(recipe, out, signal_at_call, capsys)
    if name == DECODE:  # the model is built before run.json is written
        assert read_status(out) == f"stopped ({128 + number})"
        assert (out / "metrics.jsonl").read_text() == ""
    else:
        assert not out.exists()
    monkeypatch.undo()
    check_resumed(recipe, out, undisturbed_run)


@pytest.mark.parametrize("place", AFTER_TRAINING)
def test_signal_after_training_leaves_a_run_that_resume_finishes(
    place: str,
    recipe: Path,
    undisturbed_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, (name, call) = tmp_path / "run", AFTER_TRAINING[place]
    signal_at_call = SignalAtCall(name, call, signal.SIGTERM)
    monkeypatch.setattr(name, signal_at_call)
    check_stopped(recipe, out, signal_at_call, capsys)
    assert read_status(out) == "stopped (143)"
    assert not (out / "report.html").exists()
    monkeypatch.undo()
    check_resumed(recipe, out, undisturbed_run)


def test_interruption_on_rank_0_is_broadcast_to_waiting_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(accelerator, "broadcast_object_list", sent.extend)
    main_process: Any = SimpleNamespace(is_main_process=True)
    with StopSignals() as stop, pytest.raises(Interrupted), stop.raise_immediately("run: stopped"):
        accelerator.run_on_main(main_process, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sent == [None, ("rank 0: run: stopped", 143, "internal")]

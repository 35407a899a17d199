"""`finetune bench`: figures, text, rejected arguments, and no leftovers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import Double, replace_module
from forked_runs import TINY_RECIPE, fork_process
from launches import default_sigint_handler
from refusals import refused

from finetune.bench.run import bench, format_bench
from finetune.cli.main import main

SMALL = ["data.batch_size=8", "data.num_train=64", "run.test=false"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return str(path)


def test_figures(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    arguments = ["--steps", "2", "--repeats", "2", "--profile", str(tmp_path / "p"), "--json"]
    code = main(["bench", recipe, *SMALL, *arguments])
    output = capfd.readouterr()
    assert code == 0, output.err
    found = json.loads(output.out)
    for name in ("train", "without_input", "evaluation", "matrix_rate"):
        assert 0 < found[name]["min"] <= found[name]["median"] <= found[name]["max"]
        assert len(found[name]["values"]) == 2
    pairs = zip(found["train"]["values"], found["without_input"]["values"], strict=True)
    assert found["input_share"]["values"] == [max(0, 1 - real / without) for real, without in pairs]
    assert found["fraction"] == pytest.approx(
        found["train"]["median"] * found["operations_per_image"] / found["matrix_rate"]["median"]
    )
    assert found["seconds_to_first_step"] > 0
    assert found["host_bytes"] > 50 * 2**20
    assert found["inputs"] is None
    assert Path(found["profile"]["trace"]).is_file()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.faults  # the small sibling is test_both_decode_every_image_in_every_round
def test_workers_are_compared_with_decoding(recipe: str) -> None:
    overrides = [*SMALL, "data.keep=none", "data.workers=1"]
    found = bench(recipe, overrides, steps=1, repeats=1, decode=True)
    assert len(found["inputs"]["decode"]) == len(found["inputs"]["workers"]) == 1
    assert "workers deliver" in format_bench(found)


def make_range(*values: float) -> dict[str, Any]:
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return {"median": middle, "min": ordered[0], "max": ordered[-1], "values": list(values)}


def test_text() -> None:
    result = {
        "architecture": "vit_tiny",
        "image_size": [224, 192],
        "batch_size": 32,
        "precision": "bf16",
        "compiled": True,
        "optimizer": "adamw",
        "augmentation": "resize | flip",
        "steps": 20,
        "repeats": 3,
        "warmup_steps": 3,
        "load": 1.25,
        "train": make_range(90.0, 100.0, 110.0),
        "without_input": make_range(100.0, 120.0, 130.0),
        "evaluation": make_range(1234.5),
        "input_share": make_range(0.01, 0.02, 0.03),
        "matrix_rate": make_range(900e9, 920e9, 940e9),
        "operations_per_image": 7.0e9,
        "fraction": 0.512,
        "seconds_to_first_step": 4.25,
        "host_bytes": 2**30,
        "device_bytes": None,
        "inputs": None,
        "profile": {
            "trace": "p/trace.json",
            "operations": [{"name": "aten::mm", "calls": 10.0, "milliseconds": 1.5, "share": 0.25}],
        },
        "machine": {
            "versions": {"python": "3.11", "torch": "2.15"},
            "device": {"type": "cpu", "name": "A Processor", "threads": 2},
            "num_processes": 2,
            "distributed": "DDP",
            "commit": "abc",
        },
    }
    golden = Path(__file__).with_name("bench.txt").read_text(encoding="utf-8")
    assert format_bench(result) + "\n" == golden


class TestRejected:
    def test_decoding_needs_images_that_are_not_kept(self, recipe: str) -> None:
        for overrides in (["data.keep=memory"], ["data.keep=none", "data.workers=0"]):
            with refused("recipe.conflict", "data.keep=none data.workers=auto"):
                bench(recipe, overrides, decode=True)

    def test_multiple_processes(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with refused("recipe.conflict", "run.num_processes=1"):
            bench(recipe, ["run.num_processes=2"])
        monkeypatch.setenv("WORLD_SIZE", "2")
        with refused("setup.one_process", "accelerate launch"):
            bench(recipe, profile="p")

    def test_profile_folder_is_a_file(self, recipe: str) -> None:
        with refused("setup.not_writable", recipe):
            bench(recipe, profile=recipe)


def test_command(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    double = Double({"train": {}})
    replace_module(monkeypatch, "finetune.bench.run", bench=double, format_bench=Double("a table"))
    arguments = ["--steps", "7", "--repeats", "2", "--profile", "p"]
    assert main(["bench", recipe, "optim.lr=1", *arguments]) == 0
    options = {"steps": 7, "repeats": 2, "decode": False, "profile": "p"}
    assert double.calls == [((recipe, ("optim.lr=1",)), options)]
    assert capsys.readouterr().out == "a table\n"
    assert main(["bench", recipe, "--profile", ""]) == 2
    assert main(["bench", recipe, "--steps", "0"]) == 2
    assert len(double.calls) == 1


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore SIGINT: a suite started in the background ignores it, as would its children."""
    with default_sigint_handler():
        yield


@pytest.mark.slow
def test_interrupt_ends_all_processes(recipe: str, tmp_path: Path, interruptible: None) -> None:
    """Send it as a terminal does, to every process of the group."""
    (tmp_path / "tmp").mkdir()

    def work() -> None:
        os.setsid()
        tempfile.tempdir = str(tmp_path / "tmp")
        arguments = ["--steps", "1000000", "--repeats", "1"]
        raise SystemExit(main(["bench", recipe, *SMALL, *arguments]))

    with tempfile.TemporaryFile() as stream:
        process = fork_process(work, stream.fileno())
        ended, deadline = 0, time.monotonic() + 120
        try:
            while not list((tmp_path / "tmp").glob("*/run/metrics.jsonl")):
                assert time.monotonic() < deadline
                assert os.waitpid(process, os.WNOHANG) == (0, 0)
                time.sleep(0.05)
            os.killpg(process, signal.SIGINT)
            while not ended:
                assert time.monotonic() < deadline
                ended, status = os.waitpid(process, os.WNOHANG)
                time.sleep(0.05)
        finally:
            if not ended:
                os.killpg(process, signal.SIGKILL)
        stream.seek(0)
        output = stream.read().decode()
    assert os.waitstatus_to_exitcode(status) == 130
    assert output.splitlines()[-1].endswith("interrupted")
    assert "Traceback" not in output
    assert not list((tmp_path / "tmp").iterdir())
    deadline = time.monotonic() + 60
    while is_group_alive(process):  # the helper process of multiprocessing exits a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)

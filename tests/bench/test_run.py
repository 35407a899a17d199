"""Loops in alternation, derived metrics, and arguments that are rejected before any loop starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from doubles import Double, replace_module
from forked_runs import TINY_RECIPE
from launches import default_sigint_handler

from finetune.bench import losses_and_sizes, run
from finetune.bench.run import WARMUP_STEPS, bench
from finetune.bench.timer import value_range
from finetune.cli.main import main
from finetune.errors import FinetuneError, RecipeError, SetupError

BATCH = 64  # of TINY_RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return str(path)


class FakeLoopProcess:
    """Replaces a loop process: returns values that are easy to check."""

    instances: ClassVar[list[FakeLoopProcess]] = []

    def __init__(self, name: str, make: type, arguments: dict[str, Any], **options: Any) -> None:
        self.name, self.make, self.arguments = name, make.__name__, arguments
        self.options = options
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.closed = False
        self.turns = 0
        self.instances.append(self)

    def __enter__(self) -> FakeLoopProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append((method, arguments))
        if method == "train":
            self.options["on_steps"](arguments["warmup"] + arguments["steps"])
            self.turns += not arguments.get("synthetic")
            rate = {"finetune": 100.0, "timm-loop": 50.0}.get(self.name, 25.0)
            return 200.0 if arguments.get("synthetic") else rate * self.turns
        return getattr(self, method)(**arguments)

    def prepare(self) -> dict[str, Any]:
        if self.make == "PeerLoop":
            found = {"seconds_to_first_step": 2.0, "workers": 2, "operations": BATCH * 1500}
            return {**found, "compiled": True}
        return {
            **{"device": "cpu", "precision": "bf16", "batch_size": BATCH, "image_size": [16, 16]},
            **{"num_images": 9, "architecture": "vit", "augmentation": "resize"},
            **{"micro_batch": None, "compiled": False, "of_features": False},
            **{"seconds_to_first_step": 1.0, "operations": BATCH * 1000},
            "machine": {
                "versions": {"python": "3"},
                "device": {"type": "cpu", "name": "A Processor", "threads": 1},
                "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
                "distributed": "DDP",
                "commit": None,
            },
        }

    def evaluate(self, images: int) -> float:
        return float(images)

    def matrix_rate(self) -> float:
        return 400_000.0

    def memory(self) -> dict[str, Any]:
        return {"host": 7, "device": None}

    def empty_cache(self) -> None:
        """Nothing to free."""

    def losses(self, steps: int, every: int) -> dict[str, Any]:
        plain = self.arguments["recipe"].run.precision == "fp32"
        curve = [2.0 + 0.5 * (not plain)] * (steps // every)
        return {"losses": curve, "precision": "bf16", "compiled": True}

    def inputs(self, images: int, repeats: int) -> dict[str, Any]:
        return {"decode": [float(images)] * repeats, "workers": [9.0] * repeats, "share": 0.9}

    def train_on_size(self, images: int, warmup: int, steps: int) -> dict[str, Any]:
        self.options["on_steps"](warmup + 1 + steps)
        self.turns += 1
        return {"images": images, "rate": 100.0 * self.turns, "own_bytes": 1000 + 16 * images}

    def profile(self, folder: str) -> dict[str, Any]:
        assert Path(folder).is_dir()
        return {"trace": f"{folder}/trace.json", "steps": 3, "operations": []}


@pytest.fixture
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeLoopProcess]:
    monkeypatch.setattr(FakeLoopProcess, "instances", [])
    monkeypatch.setattr(run, "LoopProcess", FakeLoopProcess)
    monkeypatch.setattr(losses_and_sizes, "LoopProcess", FakeLoopProcess)
    return FakeLoopProcess.instances


ALL_LOOPS = ("synthetic", "transformers", "timm-loop")


def test_loops_alternate(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, against=ALL_LOOPS, steps=5, repeats=3)
    turn = ["finetune", "synthetic", "transformers", "transformers:fp32"]
    turn += ["timm-loop", "timm-loop:fp32", "evaluation", "matrix"]
    assert found["order"] == turn * 3
    assert [row["name"] for row in found["rows"]] == turn[:6]
    assert [(s.name, s.make) for s in fake_processes] == [
        ("finetune", "FinetuneLoop"),
        *[(name, "PeerLoop") for name in turn[2:6]],
    ]
    assert [s.arguments["precision"] for s in fake_processes[1:]] == ["bf16", "fp32"] * 2
    assert {s.arguments["loop"] for s in fake_processes[1:]} == {"transformers", "timm-loop"}
    assert all(s.closed for s in fake_processes)
    timed = {"warmup": WARMUP_STEPS, "steps": 5}
    for process in fake_processes:
        assert all(
            arguments.items() >= timed.items() for m, arguments in process.calls if m == "train"
        )
        # memory after the first training, before later work raises the peak
        names = [method for method, _ in process.calls]
        assert names[:3] == ["prepare", "train", "memory"]
        assert names.count("memory") == 1


def test_derived_metrics(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, against=ALL_LOOPS, steps=5, repeats=3)
    ours, synthetic, *_, timm, timm_fp32 = found["rows"]
    assert ours["train"] == {"median": 200, "min": 100, "max": 300, "values": [100, 200, 300]}
    assert (ours["ratio"], synthetic["ratio"], timm["ratio"]) == (1.0, 1.0, 2.0)
    assert [row["operations_per_image"] for row in (ours, synthetic, timm)] == [1000, 1000, 1500]
    assert (ours["fraction"], timm["fraction"]) == (200 * 1000 / 400_000, 100 * 1500 / 400_000)
    assert timm_fp32["fraction"] is None  # its dtype differs from that of the rate
    assert [row["compiled"] for row in (ours, synthetic, timm)] == [False, False, True]
    # 100, 200 and 300 against 200: a half, zero, and noise clipped to zero
    assert found["input_share"]["values"] == [0.5, 0.0, 0.0]
    assert ours["evaluation"]["median"] == 5 * BATCH // 2
    assert (ours["seconds_to_first_step"], timm["seconds_to_first_step"]) == (1.0, 2.0)
    assert synthetic["seconds_to_first_step"] is None
    assert (ours["host_bytes"], timm["host_bytes"], timm["workers"]) == (7, 7, 2)
    assert {"transformers", "timm"} <= set(found["machine"]["versions"])
    assert found["load"] >= 0
    json.dumps(found)


def test_input_share_is_always_measured(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune"]
    assert found["input_share"]["median"] == 0.5
    assert len(fake_processes) == 1


def test_float32_run_has_no_second_peer_row(
    recipe: str, fake_processes: list[FakeLoopProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = FakeLoopProcess.prepare
    monkeypatch.setattr(
        FakeLoopProcess, "prepare", lambda self: {**prepare(self), "precision": "fp32"}
    )
    found = bench(recipe, against=["timm-loop", "timm-loop"], repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune", "timm-loop"]


def test_peer_loop_in_one_precision(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, against=["timm-loop:bf16", "transformers:fp32"], repeats=1)
    names = [row["name"] for row in found["rows"]]
    assert names == ["finetune", "timm-loop", "transformers:fp32"]
    assert {"timm", "transformers"} <= set(found["machine"]["versions"])


def test_finetune_loop_in_float32(
    recipe: str, fake_processes: list[FakeLoopProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench(recipe, ["run.precision=auto"], against=["finetune:fp32"], steps=5, repeats=2)
    _, plain = found["rows"]
    assert (plain["name"], plain["evaluation"], plain["workers"]) == ("finetune:fp32", None, None)
    assert plain["ratio"] == 4  # 25 against 100
    assert [process.make for process in fake_processes] == ["FinetuneLoop", "FinetuneLoop"]
    assert [process.arguments["recipe"].run.precision for process in fake_processes] == [
        "auto",
        "fp32",
    ]
    prepare = FakeLoopProcess.prepare
    monkeypatch.setattr(
        FakeLoopProcess, "prepare", lambda self: {**prepare(self), "precision": "fp32"}
    )
    found = bench(recipe, against=["finetune:fp32"], repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune"]


def test_recorded_command_reproduces_the_benchmark(
    recipe: str, fake_processes: list[FakeLoopProcess], tmp_path: Path
) -> None:
    page, traces = tmp_path / "B.md", tmp_path / "traces"
    overrides = ["data.train=resize | flip"]
    found = bench(recipe, overrides, against=["synthetic"], profile=str(traces), out=str(page))
    assert found["command"] == (
        f"finetune bench {recipe} 'data.train=resize | flip' --against synthetic --steps 20 "
        "--repeats 3"
    )
    assert found["profile"]["trace"] == f"{traces}/trace.json"
    assert found["command"] in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_main_process_reports(
    rank: str,
    recipe: str,
    fake_processes: list[FakeLoopProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    page = tmp_path / "B.md"
    found = bench(recipe, against=["synthetic"], repeats=1, out=str(page))
    assert [process.name for process in fake_processes] == ["finetune"]
    assert found["command"].startswith(
        "env ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m finetune "
    )
    if rank == "1":
        assert not page.exists()
        assert not capsys.readouterr().err
    else:
        text = page.read_text(encoding="utf-8")
        assert "A Processor, 2 processes\n" in text
        assert "2 processes (DDP), 1 threads each" in text


def test_comparison_with_decode_only_processes(
    recipe: str, fake_processes: list[FakeLoopProcess]
) -> None:
    found = bench(recipe, ["data.keep=none"], against=["decode"], steps=4, repeats=2)
    assert [row["name"] for row in found["rows"]] == ["finetune"]
    batch_size = found["batch_size"]
    assert found["inputs"] == {"decode": [4.0 * batch_size] * 2, "workers": [9.0] * 2, "share": 0.9}
    assert bench(recipe, repeats=1)["inputs"] is None


def test_losses_compared_with_float32(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, ["run.precision=bf16"], repeats=1, losses=40)
    assert found["command"].endswith("--repeats 1 --losses 40")
    assert [row["difference"] for row in found["losses"]["rows"]] == [0.5, 0.5]
    curves = [process for process in fake_processes if process.make == "LossCurveLoop"]
    assert len(curves) == 2
    plain = curves[1].arguments["recipe"]
    assert (plain.run.precision, plain.model.compile) == ("fp32", False)
    assert all(process.closed for process in curves)


def test_dataset_sizes(recipe: str, fake_processes: list[FakeLoopProcess]) -> None:
    found = bench(recipe, repeats=3, steps=4, sizes=[1000, 10, 1000])
    assert found["command"].endswith(
        "--steps 4 --repeats 3 --images 1000 --images 10 --images 1000"
    )
    small, large = found["sizes"]["rows"]
    assert small["train"] == large["train"] == value_range([100.0, 200.0, 300.0])
    assert (small["images"], large["images"]) == (10, 1000)
    assert found["sizes"]["per_image"] == 16
    assert bench(recipe, repeats=1, sizes=[10])["sizes"]["per_image"] is None
    grown = [process for process in fake_processes if process.make == "DatasetSizeLoop"]
    assert [process.name for process in grown] == ["10 images", "1,000 images", "10 images"]
    assert all(process.closed for process in grown)


def bench_error(recipe: str, *overrides: str, **arguments: Any) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        bench(recipe, overrides, **arguments)
    assert not FakeLoopProcess.instances
    assert "\n" not in str(caught.value)
    return caught.value


class TestRejected:
    @pytest.fixture(autouse=True)
    def no_process_starts(self, fake_processes: list[FakeLoopProcess]) -> None:
        """`bench_error` checks that no process has started."""

    @pytest.mark.parametrize(
        "loop", ["timm", "timm-loop:int8", "timm-loop:", "synthetic:bf16", "finetune"]
    )
    def test_unknown_loop_or_precision(self, loop: str, recipe: str) -> None:
        error = bench_error(recipe, against=[loop])
        assert isinstance(error, RecipeError)
        assert str(error).startswith(f"--against: unknown '{loop}'")
        assert "synthetic, decode, finetune, transformers, timm-loop" in str(error)

    def test_decode_comparison_needs_uncached_images(self, recipe: str) -> None:
        for change in ("data.keep=memory", "data.workers=0"):
            error = bench_error(recipe, "data.keep=none", change, against=["decode"])
            assert "data.keep=none data.workers=auto" in str(error)

    def test_peer_package_is_not_installed(
        self, recipe: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        error = bench_error(recipe, against=["transformers"])
        assert isinstance(error, SetupError)
        assert "finetune-vision[transformers]" in str(error)

    @pytest.mark.parametrize("steps", [0, -20, 50])
    def test_losses_must_be_a_multiple_of_20(self, steps: int, recipe: str) -> None:
        assert "give a multiple of 20" in str(bench_error(recipe, losses=steps))

    def test_multiple_processes(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "add run.num_processes=1" in str(bench_error(recipe, "run.num_processes=2"))
        monkeypatch.setenv("WORLD_SIZE", "2")
        for arguments in (
            {"against": ["timm-loop"]},
            {"losses": 20},
            {"sizes": [9]},
            {"profile": "p"},
        ):
            assert "or run without accelerate launch" in str(bench_error(recipe, **arguments))

    def test_augmentation_that_peers_lack(self, recipe: str) -> None:
        change = "data.train=resize | mixup"
        assert "mixup" in str(bench_error(recipe, change, against=["timm-loop"]))

    def test_profile_folder_is_a_file(self, recipe: str) -> None:
        assert "--profile" in str(bench_error(recipe, profile=recipe))

    def test_page_that_cannot_be_written(
        self, recipe: str, fake_processes: list[FakeLoopProcess]
    ) -> None:
        """Fails before any measurement."""
        assert "is not a benchmark page" in str(bench_error(recipe, out=recipe))
        assert "is not a folder" in str(bench_error(recipe, out=f"{recipe}/B.md"))
        assert not fake_processes


def test_finetune_loop_may_use_augmentations_that_peers_lack(
    recipe: str, fake_processes: list[FakeLoopProcess]
) -> None:
    assert bench(recipe, ["data.train=resize | mixup"], against=["synthetic"], repeats=1)["rows"]


def test_bench_command(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    double = Double({"rows": []})
    replace_module(monkeypatch, "finetune.bench.run", bench=double)
    replace_module(monkeypatch, "finetune.bench.markdown", render_text=Double("a table"))
    arguments = ["--against", "synthetic", "--against", "timm-loop", "--steps", "7"]
    arguments += ["--repeats", "2", "--losses", "60", "--images", "9"]
    arguments += ["--profile", "p", "--out", "B.md"]
    assert main(["bench", recipe, "optim.lr=1", *arguments]) == 0
    expected = {"against": ("synthetic", "timm-loop"), "steps": 7, "repeats": 2}
    expected |= {"losses": 60, "sizes": (9,), "profile": "p"}
    assert double.calls == [((recipe, ("optim.lr=1",)), {**expected, "out": "B.md"})]
    assert capsys.readouterr().out == "a table\n"
    assert main(["bench", recipe, "--out", ""]) == 2
    assert main(["bench", recipe, "--steps", "0"]) == 2
    assert len(double.calls) == 1


# Real processes ------------------------------------------------------------------------------

SMALL = ["data.batch_size=8", "data.num_train=64", "run.test=false"]


def command(recipe: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "finetune", "bench", recipe, *SMALL, *arguments]


@pytest.mark.slow
def test_full_benchmark(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run finetune and a timm loop in separate processes; no temporary files remain.

    They are forked from this one, which has imported torch; the next test starts them as users do.
    """
    monkeypatch.setattr("finetune.bench.loop_process._START_METHOD", "fork")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    arguments = ["--against", "timm-loop", "--steps", "2", "--repeats", "2", "--json"]
    code = main(["bench", recipe, *SMALL, *arguments])
    output = capfd.readouterr()
    assert code == 0, output.err
    found = json.loads(output.out)
    assert [row["name"] for row in found["rows"]] == ["finetune", "timm-loop"]
    assert found["order"][:4] == found["order"][5:9]
    for row in found["rows"]:
        assert 0 < row["train"]["min"] <= row["train"]["median"] <= row["train"]["max"]
        assert 0 < row["seconds_to_first_step"] < 300
        assert row["host_bytes"] > 50 * 2**20
        assert row["fraction"] > 0
    assert 0 <= found["input_share"]["min"] <= found["input_share"]["max"] < 1
    assert not list((tmp_path / "tmp").iterdir())


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
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    arguments = ["--steps", "1000000", "--repeats", "1"]
    with subprocess.Popen(
        command(recipe, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not list((tmp_path / "tmp").glob("*/run/metrics.jsonl")):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
            _, output = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 130
    assert output.splitlines()[-1].endswith("interrupted")
    assert "Traceback" not in output
    assert not list((tmp_path / "tmp").iterdir())
    deadline = time.monotonic() + 60
    while is_group_alive(process.pid):  # the helper process of multiprocessing exits a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)

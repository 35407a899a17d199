"""The loops in turn, what follows from their figures, and what is refused at once."""

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

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
BATCH = 64  # TINY's


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return str(path)


class Stand:
    """Stands for a process: answers with figures that are easy to check."""

    made: ClassVar[list[Stand]] = []

    def __init__(self, name: str, make: type, arguments: dict[str, Any], **told: Any) -> None:
        self.name, self.make, self.arguments = name, make.__name__, arguments
        self.told = told
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = False
        self.turns = 0
        self.made.append(self)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def call(self, method: str, **given: Any) -> Any:
        self.asked.append((method, given))
        if method == "train":
            self.told["on_steps"](given["warmup"] + given["steps"])
            self.turns += not given.get("synthetic")
            rate = {"finetune": 100.0, "timm-loop": 50.0}.get(self.name, 25.0)
            return 200.0 if given.get("synthetic") else rate * self.turns
        return getattr(self, method)(**given)

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
        """Nothing to give back."""

    def losses(self, steps: int, every: int) -> dict[str, Any]:
        plain = self.arguments["recipe"].run.precision == "fp32"
        curve = [2.0 + 0.5 * (not plain)] * (steps // every)
        return {"losses": curve, "precision": "bf16", "compiled": True}

    def inputs(self, images: int, repeats: int) -> dict[str, Any]:
        return {"decode": [float(images)] * repeats, "workers": [9.0] * repeats, "share": 0.9}

    def train_on_size(self, images: int, warmup: int, steps: int) -> dict[str, Any]:
        self.told["on_steps"](warmup + 1 + steps)
        self.turns += 1
        return {"images": images, "rate": 100.0 * self.turns, "own_bytes": 1000 + 16 * images}

    def profile(self, folder: str) -> dict[str, Any]:
        assert Path(folder).is_dir()
        return {"trace": f"{folder}/trace.json", "steps": 3, "operations": []}


@pytest.fixture
def stands(monkeypatch: Patch) -> list[Stand]:
    monkeypatch.setattr(Stand, "made", [])
    monkeypatch.setattr(run, "LoopProcess", Stand)
    monkeypatch.setattr(losses_and_sizes, "LoopProcess", Stand)
    return Stand.made


EVERYTHING = ("synthetic", "transformers", "timm-loop")


def test_the_loops_take_turns(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, against=EVERYTHING, steps=5, repeats=3)
    turn = ["finetune", "synthetic", "transformers", "transformers:fp32"]
    turn += ["timm-loop", "timm-loop:fp32", "evaluation", "matrix"]
    assert found["order"] == turn * 3
    assert [row["name"] for row in found["rows"]] == turn[:6]
    assert [(s.name, s.make) for s in stands] == [
        ("finetune", "FinetuneLoop"),
        *[(name, "PeerLoop") for name in turn[2:6]],
    ]
    assert [s.arguments["precision"] for s in stands[1:]] == ["bf16", "fp32"] * 2
    assert {s.arguments["loop"] for s in stands[1:]} == {"transformers", "timm-loop"}
    assert all(s.closed for s in stands)
    timed = {"warmup": WARMUP_STEPS, "steps": 5}
    for stand in stands:
        assert all(given.items() >= timed.items() for m, given in stand.asked if m == "train")
        # of the first training, before anything else of this process has its peak
        names = [method for method, _ in stand.asked]
        assert names[:3] == ["prepare", "train", "memory"]
        assert names.count("memory") == 1


def test_what_follows_from_the_figures(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, against=EVERYTHING, steps=5, repeats=3)
    ours, synthetic, *_, timm, timm32 = found["rows"]
    assert ours["train"] == {"median": 200, "min": 100, "max": 300, "values": [100, 200, 300]}
    assert (ours["ratio"], synthetic["ratio"], timm["ratio"]) == (1.0, 1.0, 2.0)
    assert [row["operations_per_image"] for row in (ours, synthetic, timm)] == [1000, 1000, 1500]
    assert (ours["fraction"], timm["fraction"]) == (200 * 1000 / 400_000, 100 * 1500 / 400_000)
    assert timm32["fraction"] is None  # another dtype than the rate's
    assert [row["compiled"] for row in (ours, synthetic, timm)] == [False, False, True]
    # 100, 200 and 300 beside 200: a half, nothing, and noise that does not count
    assert found["input_share"]["values"] == [0.5, 0.0, 0.0]
    assert ours["evaluation"]["median"] == 5 * BATCH // 2
    assert (ours["seconds_to_first_step"], timm["seconds_to_first_step"]) == (1.0, 2.0)
    assert synthetic["seconds_to_first_step"] is None
    assert (ours["host_bytes"], timm["host_bytes"], timm["workers"]) == (7, 7, 2)
    assert {"transformers", "timm"} <= set(found["machine"]["versions"])
    assert found["load"] >= 0
    json.dumps(found)


def test_the_share_of_input_is_measured_without_being_asked_for(
    recipe: str, stands: list[Stand]
) -> None:
    found = bench(recipe, repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune"]
    assert found["input_share"]["median"] == 0.5
    assert len(stands) == 1


def test_a_loop_in_float32_has_no_second_row(
    recipe: str, stands: list[Stand], monkeypatch: Patch
) -> None:
    prepare = Stand.prepare
    monkeypatch.setattr(Stand, "prepare", lambda self: {**prepare(self), "precision": "fp32"})
    found = bench(recipe, against=["timm-loop", "timm-loop"], repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune", "timm-loop"]


def test_a_loop_in_one_precision(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, against=["timm-loop:bf16", "transformers:fp32"], repeats=1)
    names = [row["name"] for row in found["rows"]]
    assert names == ["finetune", "timm-loop", "transformers:fp32"]
    assert {"timm", "transformers"} <= set(found["machine"]["versions"])


def test_our_own_training_in_float32(recipe: str, stands: list[Stand], monkeypatch: Patch) -> None:
    found = bench(recipe, ["run.precision=auto"], against=["finetune:fp32"], steps=5, repeats=2)
    _, plain = found["rows"]
    assert (plain["name"], plain["evaluation"], plain["workers"]) == ("finetune:fp32", None, None)
    assert plain["ratio"] == 4  # 25 beside 100
    assert [stand.make for stand in stands] == ["FinetuneLoop", "FinetuneLoop"]
    assert [stand.arguments["recipe"].run.precision for stand in stands] == ["auto", "fp32"]
    prepare = Stand.prepare
    monkeypatch.setattr(Stand, "prepare", lambda self: {**prepare(self), "precision": "fp32"})
    found = bench(recipe, against=["finetune:fp32"], repeats=1)
    assert [row["name"] for row in found["rows"]] == ["finetune"]


def test_the_command_gives_the_same_again(recipe: str, stands: list[Stand], tmp_path: Path) -> None:
    page, traces = tmp_path / "B.md", tmp_path / "traces"
    changes = ["data.train=resize | flip"]
    found = bench(recipe, changes, against=["synthetic"], profile=str(traces), out=str(page))
    assert found["command"] == (
        f"finetune bench {recipe} 'data.train=resize | flip' --against synthetic --steps 20 "
        "--repeats 3"
    )
    assert found["profile"]["trace"] == f"{traces}/trace.json"
    assert found["command"] in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_one_tells(
    rank: str,
    recipe: str,
    stands: list[Stand],
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    page = tmp_path / "B.md"
    found = bench(recipe, against=["synthetic"], repeats=1, out=str(page))
    assert [stand.name for stand in stands] == ["finetune"]
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


def test_beside_processes_that_only_decode(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, ["data.keep=none"], against=["decode"], steps=4, repeats=2)
    assert [row["name"] for row in found["rows"]] == ["finetune"]
    batch_size = found["batch_size"]
    assert found["inputs"] == {"decode": [4.0 * batch_size] * 2, "workers": [9.0] * 2, "share": 0.9}
    assert bench(recipe, repeats=1)["inputs"] is None


def test_losses_beside_those_in_float32(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, ["run.precision=bf16"], repeats=1, losses=40)
    assert found["command"].endswith("--repeats 1 --losses 40")
    assert [row["difference"] for row in found["losses"]["rows"]] == [0.5, 0.5]
    curves = [stand for stand in stands if stand.make == "LossCurveLoop"]
    assert len(curves) == 2
    plain = curves[1].arguments["recipe"]
    assert (plain.run.precision, plain.model.compile) == ("fp32", False)
    assert all(stand.closed for stand in curves)


def test_sets_of_other_sizes(recipe: str, stands: list[Stand]) -> None:
    found = bench(recipe, repeats=3, steps=4, sizes=[1000, 10, 1000])
    assert found["command"].endswith(
        "--steps 4 --repeats 3 --images 1000 --images 10 --images 1000"
    )
    small, large = found["sizes"]["rows"]
    assert small["train"] == large["train"] == value_range([100.0, 200.0, 300.0])
    assert (small["images"], large["images"]) == (10, 1000)
    assert found["sizes"]["per_image"] == 16
    assert bench(recipe, repeats=1, sizes=[10])["sizes"]["per_image"] is None
    grown = [stand for stand in stands if stand.make == "DatasetSizeLoop"]
    assert [stand.name for stand in grown] == ["10 images", "1,000 images", "10 images"]
    assert all(stand.closed for stand in grown)


def refused(recipe: str, *overrides: str, **given: Any) -> FinetuneError:
    with pytest.raises(FinetuneError) as caught:
        bench(recipe, overrides, **given)
    assert not Stand.made
    assert "\n" not in str(caught.value)
    return caught.value


class TestRefused:
    @pytest.fixture(autouse=True)
    def nothing_starts(self, stands: list[Stand]) -> None:
        """Each test looks at it again."""

    @pytest.mark.parametrize(
        "loop", ["timm", "timm-loop:int8", "timm-loop:", "synthetic:bf16", "finetune"]
    )
    def test_an_unknown_loop_or_precision(self, loop: str, recipe: str) -> None:
        error = refused(recipe, against=[loop])
        assert isinstance(error, RecipeError)
        assert str(error).startswith(f"--against: unknown '{loop}'")
        assert "synthetic, decode, finetune, transformers, timm-loop" in str(error)

    def test_decoding_what_is_kept(self, recipe: str) -> None:
        for change in ("data.keep=memory", "data.workers=0"):
            error = refused(recipe, "data.keep=none", change, against=["decode"])
            assert "data.keep=none data.workers=auto" in str(error)

    def test_a_loop_that_is_not_installed(self, recipe: str, monkeypatch: Patch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        error = refused(recipe, against=["transformers"])
        assert isinstance(error, SetupError)
        assert "finetune-vision[transformers]" in str(error)

    @pytest.mark.parametrize("steps", [0, -20, 50])
    def test_a_curve_of_no_whole_points(self, steps: int, recipe: str) -> None:
        assert "give a multiple of 20" in str(refused(recipe, losses=steps))

    def test_several_processes(self, recipe: str, monkeypatch: Patch) -> None:
        assert "add run.num_processes=1" in str(refused(recipe, "run.num_processes=2"))
        monkeypatch.setenv("WORLD_SIZE", "2")
        for given in ({"against": ["timm-loop"]}, {"losses": 20}, {"sizes": [9]}, {"profile": "p"}):
            assert "or run without accelerate launch" in str(refused(recipe, **given))

    def test_an_augmentation_that_the_others_have_not(self, recipe: str) -> None:
        change = "data.train=resize | mixup"
        assert "mixup" in str(refused(recipe, change, against=["timm-loop"]))

    def test_a_place_for_traces_that_is_a_file(self, recipe: str) -> None:
        assert "--profile" in str(refused(recipe, profile=recipe))

    def test_a_page_that_could_not_be_written(self, recipe: str, stands: list[Stand]) -> None:
        """Before anything is measured."""
        assert "is not a benchmark page" in str(refused(recipe, out=recipe))
        assert "is not a folder" in str(refused(recipe, out=f"{recipe}/B.md"))
        assert not stands


def test_our_own_training_may_use_what_the_others_have_not(
    recipe: str, stands: list[Stand]
) -> None:
    assert bench(recipe, ["data.train=resize | mixup"], against=["synthetic"], repeats=1)["rows"]


def test_the_verb(recipe: str, monkeypatch: Patch, capsys: Captured) -> None:
    double = Double({"rows": []})
    replace_module(monkeypatch, "finetune.bench.run", bench=double)
    replace_module(monkeypatch, "finetune.bench.markdown", render_text=Double("a table"))
    arguments = ["--against", "synthetic", "--against", "timm-loop", "--steps", "7"]
    arguments += ["--repeats", "2", "--losses", "60", "--images", "9"]
    arguments += ["--profile", "p", "--out", "B.md"]
    assert main(["bench", recipe, "optim.lr=1", *arguments]) == 0
    asked = {"against": ("synthetic", "timm-loop"), "steps": 7, "repeats": 2}
    asked |= {"losses": 60, "sizes": (9,), "profile": "p"}
    assert double.calls == [((recipe, ("optim.lr=1",)), {**asked, "out": "B.md"})]
    assert capsys.readouterr().out == "a table\n"
    assert main(["bench", recipe, "--out", ""]) == 2
    assert main(["bench", recipe, "--steps", "0"]) == 2
    assert len(double.calls) == 1


# Real processes ------------------------------------------------------------------------------

SMALL = ["data.batch_size=8", "data.num_train=64", "run.test=false"]


def command(recipe: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "finetune", "bench", recipe, *SMALL, *words]


@pytest.mark.slow
def test_a_whole_call(recipe: str, tmp_path: Path, monkeypatch: Patch, capfd: Captured) -> None:
    """Ours and a loop over timm in processes of their own; nothing is left behind.

    They are forked from this one, which has imported torch; the next test starts them as users do.
    """
    monkeypatch.setattr("finetune.bench.loop_process._START_METHOD", "fork")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    words = ["--against", "timm-loop", "--steps", "2", "--repeats", "2", "--json"]
    code = main(["bench", recipe, *SMALL, *words])
    said = capfd.readouterr()
    assert code == 0, said.err
    found = json.loads(said.out)
    assert [row["name"] for row in found["rows"]] == ["finetune", "timm-loop"]
    assert found["order"][:4] == found["order"][5:9]
    for row in found["rows"]:
        assert 0 < row["train"]["min"] <= row["train"]["median"] <= row["train"]["max"]
        assert 0 < row["seconds_to_first_step"] < 300
        assert row["host_bytes"] > 50 * 2**20
        assert row["fraction"] > 0
    assert 0 <= found["input_share"]["min"] <= found["input_share"]["max"] < 1
    assert not list((tmp_path / "tmp").iterdir())


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A suite that was started in the background ignores interrupts, and so would its children."""
    with default_sigint_handler():
        yield


@pytest.mark.slow
def test_an_interrupt_ends_all_of_it(recipe: str, tmp_path: Path, interruptible: None) -> None:
    """As a terminal sends it: to every process of the group."""
    places = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    words = ["--steps", "1000000", "--repeats", "1"]
    with subprocess.Popen(
        command(recipe, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=places,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not list((tmp_path / "tmp").glob("*/run/metrics.jsonl")):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 130
    assert said.splitlines()[-1].endswith("interrupted")
    assert "Traceback" not in said
    assert not list((tmp_path / "tmp").iterdir())
    deadline = time.monotonic() + 60
    while group_lives(process.pid):  # multiprocessing's own helper leaves a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)

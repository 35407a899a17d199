"""The results table in a terminal, and the sections of a benchmark page."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from finetune.bench.markdown import check_page, render_section, render_text, write_section


def make_range(*values: float) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "min": ordered[0],
        "max": ordered[-1],
        "values": list(values),
    }


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "precision": "bf16",
        "compiled": False,
        "train": make_range(90.0, 100.0, 110.0),
        "evaluation": None,
        "seconds_to_first_step": None,
        "host_bytes": None,
        "device_bytes": None,
        "workers": None,
        "operations_per_image": 7.0e9,
        "ratio": 1.0,
        "fraction": None,
        **changes,
    }


RESULT: dict[str, Any] = {
    "recipe": "recipes/a.yaml",
    "overrides": ["data.source=parquet:x", "data.batch_size=32"],
    "command": "finetune bench recipes/a.yaml data.source=parquet:x data.batch_size=32",
    "steps": 20,
    "warmup_steps": 3,
    "repeats": 3,
    "architecture": "vit_tiny",
    "precision": "bf16",
    "compiled": False,
    "batch_size": 32,
    "image_size": [224, 192],
    "num_images": 1000,
    "optimizer": "adamw",
    "augmentation": "resize | flip",
    "rows": [
        row("finetune", evaluation=make_range(1234.5), seconds_to_first_step=4.25, fraction=0.512),
        row(
            "timm-loop",
            **{"train": make_range(50.0), "ratio": 2.0, "workers": 2, "host_bytes": 2**30},
            operations_per_image=7.5e9,
        ),
    ],
    "input_share": make_range(0.01, 0.02, 0.03),
    "matrix_rate": make_range(900e9, 920e9, 940e9),
    "order": [],
    "load": 1.25,
    "machine": {
        "versions": {"python": "3.11", "torch": "2.15"},
        "device": {"type": "cpu", "name": "A Processor", "threads": 2},
        "num_processes": 1,
        "distributed": None,
        "commit": "abc",
    },
    "inputs": None,
    "losses": None,
    "sizes": None,
    "profile": None,
}
PROFILE = {
    "trace": "p/trace.json",
    "steps": 3,
    "operations": [{"name": "aten::mm", "calls": 10.0, "milliseconds": 1.5, "share": 0.25}],
}


def changed_result(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(RESULT), **changes}


@pytest.mark.parametrize("page", [render_text, render_section], ids=["terminal", "section"])
def test_matches_the_golden_file(page: Callable[[dict[str, Any]], str]) -> None:
    golden = Path(__file__).with_name(f"bench_{page.__name__}.md").read_text(encoding="utf-8")
    assert page(changed_result(profile=PROFILE)).rstrip("\n") + "\n" == golden


def test_end_to_end_section() -> None:
    found = {name: RESULT[name] for name in RESULT if name not in ("rows", "inputs", "losses")}
    times = {
        "seconds": make_range(30.0, 40.0, 50.0),
        "cpu_seconds": make_range(60.0),
        "host_bytes": 2**30,
    }
    ours = {"name": "finetune", "precision": "bf16", **times, "share": make_range(1.0)}
    theirs = {**ours, "name": "timm-train", "share": make_range(0.7, 0.8, 0.9), "first_step": None}
    jobs = [{**ours, "first_step": make_range(12.5)}, theirs]
    counts = {"images": {"train": 320, "val": 260}, "epochs": 1, "workers": 2}
    machine = copy.deepcopy(RESULT["machine"])
    machine["device"]["instructions"] = ["AVX512", "avx512_bf16"]
    text = render_section({**found, **counts, "jobs": jobs, "machine": machine})
    assert text.splitlines()[0].endswith("A Processor, end to end")
    assert "| finetune | bf16 | 40.0 | 30.0–50.0 |  |  | 60.0 | 60.0–60.0 | 12.5 s | 1," in text
    assert "| timm-train | bf16 | 40.0 | 30.0–50.0 | 0.80 × | 0.70–0.90 | 60.0 |" in text
    assert "2 threads, AVX512 avx512_bf16; commit" in text
    assert "320 training images, 1 epoch, each followed by 260 validation images" in text
    machine["device"]["instructions"] = ["AVX2"]
    assert "2 threads, AVX2 without native bf16; commit" in render_section(
        changed_result(machine=machine)
    )


def test_unmeasured_values_are_omitted() -> None:
    text = render_text(changed_result(matrix_rate=None, rows=[row("finetune")]))
    assert "GFLOP" not in text
    assert "loading processes" not in text
    assert "None" not in text


def headings(path: Path) -> list[str]:
    return re.findall(r"^## .*$", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_page_has_one_section_per_recipe(tmp_path: Path) -> None:
    path = tmp_path / "BENCHMARKS.md"
    write_section(path, RESULT)
    first = path.read_text(encoding="utf-8")
    assert first.startswith("# Benchmarks\n")
    write_section(path, changed_result(recipe="recipes/b.yaml"))
    expected = [f"## recipes/{name}.yaml data.batch_size=32, A Processor" for name in "ab"]
    assert headings(path) == expected
    # another source of the same data is the same benchmark
    updated = changed_result(overrides=["data.batch_size=32"], command="finetune bench again")
    write_section(path, updated)
    assert headings(path) == expected
    text = path.read_text(encoding="utf-8")
    assert "finetune bench again" in text
    assert text.count(RESULT["command"]) == 1  # in the other section
    write_section(path, updated)
    assert path.read_text(encoding="utf-8") == text


def test_another_machine_gets_its_own_section(tmp_path: Path) -> None:
    path = tmp_path / "BENCHMARKS.md"
    write_section(path, RESULT)
    other = changed_result()
    other["machine"]["device"] |= {"type": "cuda", "name": "A Card"}
    write_section(path, other)
    assert len(headings(path)) == 2
    assert "A Card, cuda;" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_folder_or_fifo_as_page_fails_without_blocking(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "B.md")
    with refused("recipe.unreadable", "--out", "B.md"):
        check_page(tmp_path / "B.md")


def test_unrelated_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Something else\n")
    with refused("recipe.wrong_value", "--out", path):
        write_section(path, RESULT)
    assert path.read_text() == "# Something else\n"


LOSSES = {
    "rows": [
        {"step": 20, "loss": 2.3021, "plain": 2.3026, "difference": -0.0005},
        {"step": 40, "loss": 1.9, "plain": 1.8975, "difference": 0.0025},
    ],
    "largest": 0.0025,
    "precision": "bf16",
    "compiled": True,
}


@pytest.mark.parametrize("write", [render_text, render_section])
def test_losses_compared_with_float32(write: Any) -> None:
    text = write({**RESULT, "losses": LOSSES})
    table = [re.findall(r"[^\s|]+", line) for line in text.splitlines()]
    assert ["20", "2.3021", "2.3026", "-0.0005"] in table
    assert ["40", "1.9000", "1.8975", "+0.0025"] in table
    assert "loss, bf16, compiled" in text
    assert "at most 0.0025 apart" in text
    assert "apart" not in write(RESULT)


@pytest.mark.parametrize("write", [render_text, render_section])
def test_dataset_sizes(write: Any) -> None:
    rows = [
        {"images": 1000, "train": make_range(90.0, 100.0, 110.0), "own_bytes": 2**30},
        {"images": 1_000_000, "train": make_range(99.0), "own_bytes": 2**30 + 16 * 999_000},
    ]
    text = write({**RESULT, "sizes": {"rows": rows, "per_image": 16.0}})
    table = [re.findall(r"[^\s|]+", line) for line in text.splitlines()]
    assert ["1,000", "100.0", "90.0–110.0", "1,024", "MiB"] in table
    assert ["1,000,000", "99.0", "99.0–99.0", "1,039", "MiB"] in table
    assert "16 bytes of memory" in text
    single_size = write({**RESULT, "sizes": {"rows": rows[:1], "per_image": None}})
    assert "additional image" not in single_size


def test_workers_compared_with_decode_only_processes() -> None:
    inputs = {"decode": [90.0, 100.0, 400.0], "workers": [80.0, 91.0, 99.0], "share": 0.91}
    text = render_text({**RESULT, "inputs": inputs})
    assert "workers deliver 91.0 images/s" in text
    assert "only decode reach 100.0: 91%" in text
    assert "only decode" not in render_text(RESULT)


def test_compiled_model_is_marked() -> None:
    own, other = "finetune", "timm-loop"
    (ours, theirs) = RESULT["rows"]
    lines = render_text({**RESULT, "rows": [{**ours, "compiled": True}, theirs]}).splitlines()
    lines_by_name = {
        name: [line for line in lines if line.startswith(f"{name} ")] for name in (own, other)
    }
    assert "compiled" in lines_by_name[own][0]
    assert "compiled" not in lines_by_name[other][0]

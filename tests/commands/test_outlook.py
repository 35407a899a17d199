"""A forecast as text says every figure that it has."""

from __future__ import annotations

from typing import Any

from finetune.commands.plan import describe

MIB = 2**20


def found(**changes: Any) -> dict[str, Any]:
    """A forecast of round figures."""
    parts = {"program": 300, "weights": 20, "gradients": 19, "moments": 40, "average": 0}
    parts |= {
        "images": 7,
        "features": 0,
        "snapshot": 60,
        "activations": 100,
        "activations_per_image": 5,
    }
    return {
        "recipe": "r.yaml",
        "architecture": "vit_x",
        "image_size": [32, 48],
        "precision": "bf16",
        "machine": {"device": {"name": "A chip", "type": "cpu"}},
        "parameters": {"total": 5000, "trained": 1000},
        "num_images": 1200,
        "batch_size": 20,
        "micro_batch": 10,
        "memory": {
            "where": "host",
            "parts": {name: number * MIB for name, number in parts.items()},
            "phases": {"training": 546 * MIB, "evaluation": 2048 * MIB},
            "peak": 2048 * MIB,
            "measured": 525 * MIB,
        },
        "steps": 5,
        "time": {
            "images_per_second": 50.0,
            "turns": [40.0, 60.0],
            "input_share": 0.07,
            "evaluated_per_second": 150.0,
            "epoch_seconds": 24.0,
            "features_seconds": 0.0,
            "run_seconds": 7200.0,
            "run_steps": 600,
            "evaluations": 1,
        },
        "disk": {"checkpoint": 120 * MIB, "needed": 520 * MIB, "free_here": 4096 * MIB},
        "options": [
            {"change": "a=1", "peak": 1024 * MIB, "images_per_second": 100.0, "halves": ["memory"]},
            {"change": "b=22", "peak": 2048 * MIB, "images_per_second": None, "halves": []},
        ],
        **changes,
    }


def test_every_figure_is_said() -> None:
    lines = describe(found()).splitlines()
    text = "\n".join(lines)
    assert lines[0] == "r.yaml"
    assert "vit_x, 32 x 48 px, bf16, A chip (cpu)" in text
    assert "5,000 parameters, 4,000 of them frozen" in text
    assert "1,200 images, 20 a step, 10 at once" in text
    words = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert words["weights"][1:] == ["20.0", "MiB"]
    assert words["activations"][1:] == ["100.0", "MiB", "5.0", "MiB", "an", "image"]
    assert "average" not in words  # there is none
    assert words["peak"][1:] == ["2.0", "GiB"]
    assert words["measured"][1:3] == ["525.0", "MiB"]
    assert words["measured"][-1] == "+4%"
    assert "2 turns of 5 steps" in text
    assert words["images/s"][1:] == ["50.0", "(40.0,", "60.0)"]
    assert words["input"][1] == "7%"
    assert "24.0 s" in text
    assert "2.0 h  600 steps, 1 evaluation" in text
    assert "520.0 MiB  of 4.0 GiB free here" in text


def test_features_are_computed_once() -> None:
    time = {**found()["time"], "features_seconds": 240.0}
    text = describe(found(time=time, options=[]))
    assert "4.0 min  once; then they are kept" in text
    assert text.endswith("only the classifier is trained: no other setting was tried")


def test_a_line_for_each_other_setting() -> None:
    lines = describe(found()).splitlines()
    first, second = lines[-2:]
    assert first.split() == [
        *("a=1", "1.0", "GiB", "x0.50", "100.0", "x2.00", "halves", "memory"),
    ]
    assert second.split() == ["b=22", "2.0", "GiB", "x1.00", "-"]
    header = lines[-3]
    assert first.index("x0.50") == second.index("x1.00")
    assert header.index("peak") + len("peak") == first.index("GiB") + len("GiB")
    assert describe(found(options=[])).endswith("takes less memory or time")

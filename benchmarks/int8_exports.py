"""INT8 exports of runs: accuracy, size and speed, next to float and to dynamic quantization.

    python benchmarks/int8_exports.py runs/lite0 runs/vit_ti --images 1000

Each run is exported to float and INT8, whatever the drop, and its float file is also quantized with
onnxruntime's `quantize_dynamic`, as many tutorials do. Then all three files classify the same test
images in turn, each with one thread; the dynamic file at most 1,000 of them, because its
convolutions are slow. The drop has its paired 95 % interval. Bytes and images/s are relative to
float; images/s is from the median times of an image.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

from finetune.commands.export import export_model
from finetune.data.from_recipe import open_full_data
from finetune.evaluation.paired import compare_correct
from finetune.run.record import load_run_recipe

MAX_DYNAMIC_IMAGES = 1000


def main() -> None:
    """Export each run, and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--images", type=int, default=10_000)
    arguments = parser.parse_args()
    print("| run | file | drop, points | images | bytes | images/s | layers in float |")
    print("|---|---|--:|--:|--:|--:|--:|", flush=True)
    for run in arguments.runs:
        with tempfile.TemporaryDirectory() as folder:
            for row in compare(run, Path(folder), arguments.images):
                print(f"| {Path(run).name} | {' | '.join(row)} |", flush=True)


def compare(run: str, folder: Path, num_images: int) -> list[list[str]]:
    """Return the rows of the table for one run."""
    int8 = export_model(run, out=str(folder / "int8"), precision="int8", max_drop=100)
    files = {
        "float": export_model(run, out=str(folder / "float"))["file"],
        "INT8": int8["file"],
        "dynamic": str(folder / "dynamic.onnx"),
    }
    logging.disable(logging.WARNING)
    quantize_dynamic(files["float"], files["dynamic"], weight_type=QuantType.QInt8)
    logging.disable(logging.NOTSET)
    sessions = {name: open_session(file) for name, file in files.items()}
    recipe = load_run_recipe(run)
    assert recipe is not None
    test = open_full_data(recipe.data, recipe.run.seed).splits["test"]
    chosen = np.random.default_rng(0).permutation(len(test))[:num_images]
    correct: dict[str, list[bool]] = {name: [] for name in files}
    seconds: dict[str, list[float]] = {name: [] for name in files}
    for index in chosen:
        image = np.array(test.decode(int(index)))[None]
        for name, session in sessions.items():
            if name == "dynamic" and len(correct[name]) == MAX_DYNAMIC_IMAGES:
                continue
            start = time.perf_counter()
            [[probabilities_K]] = session.run(None, {"image": image})
            seconds[name].append(time.perf_counter() - start)
            correct[name].append(bool(probabilities_K.argmax() == test.labels[index]))
    size, reduced = Path(files["float"]).stat().st_size, int8["reduced"]
    rows = [["float", f"accuracy {100 * np.mean(correct['float']):.2f} %", *[""] * 4]]
    rows[0][2] = str(len(chosen))
    for name in ("INT8", "dynamic"):
        count = len(correct[name])
        result = compare_correct(np.array(correct["float"][:count]), np.array(correct[name]))
        low, high = (-100 * bound for bound in reversed(result["interval"]))
        in_float = f"{len(reduced['float_layers'])} of {reduced['num_layers']}"
        rows.append(
            [
                name,
                f"{-100 * result['difference']:.2f} ({low:.2f} to {high:.2f})",
                str(count),
                f"{Path(files[name]).stat().st_size / size:.2f}",
                f"{median(seconds['float']) / median(seconds[name]):.2f}",
                in_float if name == "INT8" else "",
            ]
        )
    return rows


def open_session(file: str) -> Any:
    """Open a file with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(file, options)


if __name__ == "__main__":
    main()

"""Render benchmark results as tables, for the terminal and for a Markdown page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.files import (
    explain_disk_errors,
    make_writable_folder,
    open_regular_file,
    write_atomically,
)
from finetune.formatting import MISSING, aligned_table, markdown_table, pluralize

__all__ = ["check_page", "render_section", "render_text", "write_section"]

_HEAD = (
    "# Benchmarks\n\nWritten by `finetune bench RECIPE --out`; each section names the command that "
    "measures it again.\n"
)
_COLUMNS = (
    *("loop", "numbers", "train images/s", "min–max", "finetune is", "of matrix rate"),
    *("evaluation images/s", "first step", "host", "device"),
)
_Rows = list[list[str]]  # header first


def render_text(result: dict[str, Any]) -> str:
    """Render a result for the terminal: the setup, the tables and their notes."""
    lines = _setup_lines(result)
    for rows, notes in _tables(result):
        texts = 2 if rows[0][1] == _COLUMNS[1] else 1
        lines += [
            "",
            *aligned_table(rows, num_text_columns=texts),
            *([""] if notes else []),
            *notes,
        ]
    return "\n".join([*lines, *([result["profile"]["trace"]] if result["profile"] else [])])


def render_section(result: dict[str, Any]) -> str:
    """Render a result as a section of the page, with its command at the top."""
    lines = [_heading(result), "", f"```bash\n{result['command']}\n```", ""]
    lines += [f"- {line}" for line in _setup_lines(result)]
    for rows, notes in _tables(result):
        head, _, *body = markdown_table(rows[0], rows[1:])
        ruler = f"| --- |{' --: |' * (len(rows[0]) - 1)}"
        lines += ["", head, ruler, *body, *([""] if notes else [])]
        lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _tables(result: dict[str, Any]) -> Iterator[tuple[_Rows, list[str]]]:
    """Yield the tables of a result, each with its notes."""
    if "jobs" in result:
        yield _end_to_end_table(result)
        return
    yield _loop_table(result), _loop_notes(result)
    if losses := result["losses"]:
        yield _loss_table(losses)
    if sizes := result["sizes"]:
        yield _dataset_size_table(sizes)
    if profile := result["profile"]:
        rows = [["operation", "calls a step", "ms a step", "share"]]
        for row in profile["operations"]:
            figures = [f"{row['calls']:g}", f"{row['milliseconds']:.2f}", f"{row['share']:.1%}"]
            rows.append([row["name"], *figures])
        yield rows, []


def check_page(path: Path) -> None:
    """Check before measuring that the page can be written, and create its folder.

    Raises: same as `write_section`.
    """
    make_writable_folder(path.parent, option="--out")
    _read_page(path)


def write_section(path: Path, result: dict[str, Any]) -> None:
    """Write the result's section into a page, replacing a section with the same heading.

    Raises: RecipeError if the file is not a benchmark page; SetupError if it cannot be written.
    """
    parts = re.split(r"^(?=## )", _read_page(path), flags=re.MULTILINE)
    by_heading = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}
    by_heading[_heading(result)] = render_section(result)
    write_atomically(path, "\n".join(by_heading.values()))


def _read_page(path: Path) -> str:
    """Return the current text of a page, or the header of a new one."""
    if not path.exists():
        return _HEAD
    try:
        with explain_disk_errors(path, needed_bytes=4096), open_regular_file(path) as file:
            text = file.read().decode("utf-8", "replace")
    except ValueError as error:
        raise RecipeError(
            f"--out: '{path}' {error}; choose another file", code="recipe.unreadable"
        ) from error
    if not text.startswith(_HEAD.split("\n")[0] + "\n"):
        raise RecipeError(
            f"--out: '{path}' is not a benchmark page; choose another file",
            code="recipe.wrong_value",
        )
    return text


def _heading(result: dict[str, Any]) -> str:
    """Return the heading that identifies a section: recipe, overrides, device and processes."""
    changes = [word for word in result["overrides"] if not word.startswith("data.source=")]
    machine = result["machine"]
    processes = machine["num_processes"]
    spread = "" if processes == 1 else f", {processes} processes"
    spread += ", end to end" if "jobs" in result else ""
    return f"## {' '.join([result['recipe'], *changes])}, {machine['device']['name']}{spread}"


def _setup_lines(result: dict[str, Any]) -> list[str]:
    machine, size = result["machine"], result["image_size"]
    device = machine["device"]
    on = f"{device['threads']} threads" if device["type"] == "cpu" else device["type"]
    if sets := device.get("instructions"):
        on += f", {' '.join(sets)}" + ("" if len(sets) > 1 else " without native bf16")
    if machine["num_processes"] > 1:
        on = f"{machine['num_processes']} processes ({machine['distributed']}), {on} each"
    versions = " ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return [
        f"{result['architecture']} at {size[0]}×{size[1]}, {result['batch_size']} images a step, "
        f"{result['optimizer']}, {result['augmentation']}",
        f"{device['name']}, {on}; commit {machine['commit'] or 'unknown'}; {versions}",
        f"median of {pluralize(result['repeats'], 'turn')} {_describe_round(result)}; load before "
        f"{result['load']:.1f}",
    ]


def _describe_round(result: dict[str, Any]) -> str:
    if "jobs" in result:
        return (
            "of the whole command, from the start to the end of its process, in alternating order"
        )
    return (
        f"of {result['steps']} steps, each after {result['warmup_steps']} warm-up steps, the loops "
        "in turn"
    )


def _end_to_end_table(result: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [["command", "numbers", "seconds", "min–max", "finetune takes", "min–max"]]
    rows[0] += ["CPU seconds", "min–max", "first step", "host"]
    for row in result["jobs"]:
        share, first = row["share"], row["first_step"]
        shares = [f"{share['median']:.2f} ×", f"{share['min']:.2f}–{share['max']:.2f}"]
        rows.append(
            [
                row["name"],
                row["precision"],
                *_median_and_range(row["seconds"]),
                *(["", ""] if row["name"] == "finetune" else shares),
                *_median_and_range(row["cpu_seconds"]),
                MISSING if first is None else f"{first['median']:.1f} s",
                _format_mib(row["host_bytes"]),
            ]
        )
    images, epochs = result["images"], pluralize(result["epochs"], "epoch")
    return rows, [
        f"{images['train']:,} training images, {epochs}, each followed by {images['val']:,} "
        "validation images; all commands read the same images and weights, with empty caches",
        f"{pluralize(result['workers'], 'loading process', 'loading processes')} each; memory is "
        "that of the largest process; the time to the first step includes the start of the process",
    ]


def _loop_table(result: dict[str, Any]) -> _Rows:
    rows = [list(_COLUMNS)]
    for row in result["rows"]:
        evaluation, first = row["evaluation"], row["seconds_to_first_step"]
        rows.append(
            [
                row["name"],
                _precision_label(row),
                *_median_and_range(row["train"]),
                "" if row["name"] == "finetune" else f"{row['ratio']:.2f} ×",
                MISSING if row["fraction"] is None else f"{row['fraction']:.1%}",
                MISSING if evaluation is None else _format_rate(evaluation["median"]),
                MISSING if first is None else f"{first:.1f} s",
                _format_mib(row["host_bytes"]),
                _format_mib(row["device_bytes"]),
            ]
        )
    return rows


def _format_flops(rows: list[dict[str, Any]]) -> str:
    """Format the FLOPs per image of our loop, and those of other loops if they differ."""
    own, *others = dict.fromkeys(f"{row['operations_per_image'] / 1e9:,.3g}" for row in rows)
    return f"{own} GFLOP" + (f" ({' or '.join(others)} in the other loops)" if others else "")


def _loop_notes(result: dict[str, Any]) -> list[str]:
    share, matrix = result["input_share"], result["matrix_rate"]
    notes = [
        f"input takes {share['median']:.1%} of a step ({share['min']:.1%}–{share['max']:.1%}): "
        "compared with steps that repeat the same batches"
    ]
    if result["inputs"] is not None:
        rates = {name: statistics.median(result["inputs"][name]) for name in ("workers", "decode")}
        notes.append(
            f"without the network, workers deliver {_format_rate(rates['workers'])} images/s, and "
            f"as many processes that only decode reach {_format_rate(rates['decode'])}: "
            f"{result['inputs']['share']:.0%}"
        )
    if matrix is not None:
        low, high = matrix["min"] / 1e9, matrix["max"] / 1e9
        notes.append(
            f"this machine multiplies {result['precision']} matrices of this network's shapes at "
            f"{matrix['median'] / 1e9:,.0f} GFLOP/s ({low:,.0f}–{high:,.0f}); an image of training "
            f"takes {_format_flops(result['rows'])}"
        )
    others = [row for row in result["rows"] if row["workers"] is not None]
    if others:
        workers = ", ".join(f"{row['name']} {row['workers']}" for row in others)
        notes += [
            f"loading processes, the faster of none and one per core: {workers}",
            "the other loops repeat some of the images, decoded in memory, so their first step and "
            "their memory exclude the rest; each loop has its own process",
        ]
    return notes


def _loss_table(losses: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [
        [
            "up to step",
            f"loss, {_precision_label(losses)}",
            "loss, fp32, not compiled",
            "difference",
        ]
    ]
    for row in losses["rows"]:
        figures = [f"{row['loss']:.4f}", f"{row['plain']:.4f}", f"{row['difference']:+.4f}"]
        rows.append([str(row["step"]), *figures])
    return rows, [
        f"mean training losses over {rows[1][0]} steps each, from the first step, with the same "
        f"images and random numbers; at most {losses['largest']:.4f} apart"
    ]


def _dataset_size_table(sizes: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [["images in the set", "train images/s", "min–max", "labels, rows and order"]]
    for row in sizes["rows"]:
        rows.append(
            [f"{row['images']:,}", *_median_and_range(row["train"]), _format_mib(row["own_bytes"])]
        )
    notes = ["the images of the dataset, repeated in a memory-mapped uint8 file; sizes in turn"]
    if sizes["per_image"] is not None:
        notes.append(f"{sizes['per_image']:.0f} bytes of memory per additional image")
    return rows, notes


def _precision_label(row: dict[str, Any]) -> str:
    return f"{row['precision']}{', compiled' if row['compiled'] else ''}"


def _median_and_range(rates: dict[str, Any]) -> tuple[str, str]:
    """Format the median and the range."""
    return _format_rate(
        rates["median"]
    ), f"{_format_rate(rates['min'])}–{_format_rate(rates['max'])}"


def _format_rate(value: float) -> str:
    """Format a rate with one decimal below 1000, else without decimals."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _format_mib(number: int | None) -> str:
    return MISSING if number is None else f"{number / 2**20:,.0f} MiB"

"""The figures of a bench as a table, for the terminal and for a page of Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.files import disk_errors, make_folder, open_regular, write_atomically
from finetune.text import MISSING, aligned_table, counted, markdown_table

__all__ = ["check_page", "describe", "section", "write_section"]

_HEAD = (
    "# Benchmarks\n\nWritten by `finetune bench RECIPE --out`; each section names the command that "
    "measures it again.\n"
)
_COLUMNS = (
    *("loop", "numbers", "train images/s", "min–max", "finetune is", "of matrix rate"),
    *("evaluation images/s", "first step", "host", "device"),
)
_Rows = list[list[str]]  # of a table, its head first


def describe(result: dict[str, Any]) -> str:
    """Write the result for a terminal: what was measured, the table, and what it means."""
    lines = _facts(result)
    for rows, notes in _tables(result):
        texts = 2 if rows[0][1] == _COLUMNS[1] else 1
        lines += ["", *aligned_table(rows, texts=texts), *([""] if notes else []), *notes]
    return "\n".join([*lines, *([result["profile"]["trace"]] if result["profile"] else [])])


def section(result: dict[str, Any]) -> str:
    """Write the result as a section of a page, headed by the command."""
    lines = [_heading(result), "", f"```bash\n{result['command']}\n```", ""]
    lines += [f"- {line}" for line in _facts(result)]
    for rows, notes in _tables(result):
        head, _, *body = markdown_table(rows[0], rows[1:])
        ruler = f"| --- |{' --: |' * (len(rows[0]) - 1)}"
        lines += ["", head, ruler, *body, *([""] if notes else [])]
        lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _tables(result: dict[str, Any]) -> Iterator[tuple[_Rows, list[str]]]:
    """The tables of what was measured, each with what is to be said of it."""
    if "jobs" in result:
        yield _jobs(result)
        return
    yield _loops(result), _notes(result)
    if losses := result["losses"]:
        yield _losses(losses)
    if sizes := result["sizes"]:
        yield _sizes(sizes)
    if profile := result["profile"]:
        rows = [["operation", "calls a step", "ms a step", "share"]]
        for row in profile["operations"]:
            figures = [f"{row['calls']:g}", f"{row['milliseconds']:.2f}", f"{row['share']:.1%}"]
            rows.append([row["name"], *figures])
        yield rows, []


def check_page(path: Path) -> None:
    """Refuse a place for a page before anything is measured; its folder is made.

    Raises: as for `write_section`.
    """
    make_folder(path.parent, option="--out")
    _text_of(path)


def write_section(path: Path, result: dict[str, Any]) -> None:
    """Put the result's section into a page, in the place of an earlier one of the same heading.

    Raises: RecipeError for a file that is no page of benchmarks; SetupError where it cannot be
        written.
    """
    parts = re.split(r"^(?=## )", _text_of(path), flags=re.MULTILINE)
    by_heading = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}
    by_heading[_heading(result)] = section(result)
    write_atomically(path, "\n".join(by_heading.values()))


def _text_of(path: Path) -> str:
    """A page's text so far."""
    if not path.exists():
        return _HEAD
    try:
        with disk_errors(path, needed=4096), open_regular(path) as file:
            text = file.read().decode("utf-8", "replace")
    except ValueError as error:
        raise RecipeError(
            f"--out: '{path}' {error}; name another", code="recipe.unreadable"
        ) from error
    if not text.startswith(_HEAD.split("\n")[0] + "\n"):
        raise RecipeError(
            f"--out: '{path}' is no page of benchmarks; name another file",
            code="recipe.wrong_value",
        )
    return text


def _heading(result: dict[str, Any]) -> str:
    """The section's identity: the recipe, what was changed of it, and the machine's device."""
    changes = [word for word in result["overrides"] if not word.startswith("data.source=")]
    machine = result["machine"]
    processes = machine["num_processes"]
    spread = "" if processes == 1 else f", {processes} processes"
    spread += ", end to end" if "jobs" in result else ""
    return f"## {' '.join([result['recipe'], *changes])}, {machine['device']['name']}{spread}"


def _facts(result: dict[str, Any]) -> list[str]:
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
        f"median of {counted(result['repeats'], 'turn')} {_turn(result)}; load before "
        f"{result['load']:.1f}",
    ]


def _turn(result: dict[str, Any]) -> str:
    if "jobs" in result:
        return "of the whole job, from the start of a process to its end, in turn and in reverse"
    return (
        f"of {result['steps']} steps, each after {result['warmup_steps']} that do not count, the "
        "loops in turn"
    )


def _jobs(result: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [["command", "numbers", "seconds", "min–max", "finetune takes", "min–max"]]
    rows[0] += ["CPU seconds", "min–max", "first step", "host"]
    for row in result["jobs"]:
        share, first = row["share"], row["first_step"]
        shares = [f"{share['median']:.2f} ×", f"{share['min']:.2f}–{share['max']:.2f}"]
        rows.append(
            [
                row["name"],
                row["precision"],
                *_rates(row["seconds"]),
                *(["", ""] if row["name"] == "finetune" else shares),
                *_rates(row["cpu_seconds"]),
                MISSING if first is None else f"{first['median']:.1f} s",
                _memory(row["host_bytes"]),
            ]
        )
    images, epochs = result["images"], counted(result["epochs"], "epoch")
    return rows, [
        f"{images['train']:,} images of training, {epochs}, each followed by {images['val']:,} of "
        "validation: one folder of images and one of the weights for all commands, empty caches",
        f"{counted(result['workers'], 'loading process', 'loading processes')} each; the memory is "
        "that of the largest process; a first step counts from the start of the process",
    ]


def _loops(result: dict[str, Any]) -> _Rows:
    rows = [list(_COLUMNS)]
    for row in result["rows"]:
        evaluation, first = row["evaluation"], row["seconds_to_first_step"]
        rows.append(
            [
                row["name"],
                _way(row),
                *_rates(row["train"]),
                "" if row["name"] == "finetune" else f"{row['ratio']:.2f} ×",
                MISSING if row["fraction"] is None else f"{row['fraction']:.1%}",
                MISSING if evaluation is None else _figure(evaluation["median"]),
                MISSING if first is None else f"{first:.1f} s",
                _memory(row["host_bytes"]),
                _memory(row["device_bytes"]),
            ]
        )
    return rows


def _operations(rows: list[dict[str, Any]]) -> str:
    """Operations of an image here, and in the loops of others where these differ."""
    own, *others = dict.fromkeys(f"{row['operations_per_image'] / 1e9:,.3g}" for row in rows)
    return f"{own} GFLOP" + (f" ({' or '.join(others)} in the other loops)" if others else "")


def _notes(result: dict[str, Any]) -> list[str]:
    share, matrix = result["input_share"], result["matrix_rate"]
    notes = [
        f"input takes {share['median']:.1%} of a step ({share['min']:.1%}–{share['max']:.1%}): the "
        "rest is a step on the same batches again and again"
    ]
    if result["inputs"] is not None:
        rates = {name: statistics.median(result["inputs"][name]) for name in ("workers", "decode")}
        notes.append(
            f"without the network the workers hand over {_figure(rates['workers'])} images/s, and "
            f"as many processes that only decode reach {_figure(rates['decode'])}: "
            f"{result['inputs']['share']:.0%}"
        )
    if matrix is not None:
        low, high = matrix["min"] / 1e9, matrix["max"] / 1e9
        notes.append(
            f"this machine multiplies {result['precision']} matrices of this network's shapes at "
            f"{matrix['median'] / 1e9:,.0f} GFLOP/s ({low:,.0f}–{high:,.0f}); an image of training "
            f"takes {_operations(result['rows'])}"
        )
    others = [row for row in result["rows"] if row["workers"] is not None]
    if others:
        workers = ", ".join(f"{row['name']} {row['workers']}" for row in others)
        notes += [
            f"loading processes, the better of none and one for each core: {workers}",
            "the other loops go round some of the images, decoded in memory: their first step and "
            "their memory are without the others; each loop has a process of its own",
        ]
    return notes


def _losses(losses: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [["up to step", f"loss, {_way(losses)}", "loss, fp32, not compiled", "difference"]]
    for row in losses["rows"]:
        figures = [f"{row['loss']:.4f}", f"{row['plain']:.4f}", f"{row['difference']:+.4f}"]
        rows.append([str(row["step"]), *figures])
    return rows, [
        f"mean training losses of {rows[1][0]} steps each, from the first one on: the same "
        f"images, the same draws; at most {losses['largest']:.4f} apart"
    ]


def _sizes(sizes: dict[str, Any]) -> tuple[_Rows, list[str]]:
    rows = [["images in the set", "train images/s", "min–max", "labels, rows and order"]]
    for row in sizes["rows"]:
        rows.append([f"{row['images']:,}", *_rates(row["train"]), _memory(row["own_bytes"])])
    notes = [
        "the set's images over and over in a file of uint8 that is mapped into memory, in turn"
    ]
    if sizes["per_image"] is not None:
        notes.append(f"{sizes['per_image']:.0f} bytes of memory for each image more")
    return rows, notes


def _way(row: dict[str, Any]) -> str:
    return f"{row['precision']}{', compiled' if row['compiled'] else ''}"


def _rates(rates: dict[str, Any]) -> tuple[str, str]:
    """The median, and from where to where the others go."""
    return _figure(rates["median"]), f"{_figure(rates['min'])}–{_figure(rates['max'])}"


def _figure(value: float) -> str:
    """Three digits at least; a rate of thousands needs no decimals."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _memory(number: int | None) -> str:
    return MISSING if number is None else f"{number / 2**20:,.0f} MiB"

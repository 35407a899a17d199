"""A forecast as text: memory by part, time, disk, and what would make either smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.data.decode import counted

__all__ = ["describe"]

_PARTS = {
    "program": "interpreter, libraries, threads",
    "weights": "",
    "gradients": "",
    "moments": "the optimiser's",
    "average": "optim.ema_decay",
    "images": "decoded and kept",
    "features": "computed once, in a file that is mapped",
    "snapshot": "a checkpoint that is being written",
}


def describe(found: Mapping[str, Any]) -> str:
    """Write a forecast for a terminal.

    Args:
        found: from `forecast`.
    Returns: a block each for the run, memory, time and disk, then a table of other settings.
    """
    height, width = found["image_size"]
    device = found["machine"]["device"]
    parameters = found["parameters"]
    frozen = parameters["total"] - parameters["trained"]
    lines = [
        found["recipe"],
        f"  {found['architecture']}, {height} x {width} px, {found['precision']}, "
        f"{device['name']} ({device['type']})",
        f"  {parameters['total']:,} parameters"
        + (f", {frozen:,} of them frozen" if frozen else ", all trained"),
        f"  {found['num_images']:,} images, {found['batch_size']} a step, "
        f"{found['micro_batch']} at once",
        "",
        *_memory(found),
        "",
        *_time(found["time"], found["steps"]),
        "",
        *_disk(found["disk"]),
        "",
        *_options(found),
    ]
    return "\n".join(lines)


def _memory(found: Mapping[str, Any]) -> Iterator[str]:
    memory = found["memory"]
    parts = memory["parts"]
    yield f"memory of the {memory['where']}, predicted"
    for name, about in _PARTS.items():
        if parts[name]:
            yield f"  {name:14}{_size(parts[name]):>10}  {about}".rstrip()
    each = f"{_size(parts['activations_per_image'])} an image"
    yield f"  {'activations':14}{_size(parts['activations']):>10}  {each}"
    for phase, number in memory["phases"].items():
        yield f"  {'in ' + phase:14}{_size(number):>10}"
    yield f"  {'peak':14}{_size(memory['peak']):>10}"
    measured = memory["measured"]
    if measured:
        training = memory["phases"]["training"]
        yield (
            f"  {'measured':14}{_size(measured):>10}  in the steps of this trial; "
            f"predicted for them {_percent(training / measured - 1)}"
        )


def _time(time: Mapping[str, Any], steps: int) -> Iterator[str]:
    turns = ", ".join(f"{rate:,.1f}" for rate in time["turns"])
    yield f"time, from {counted(len(time['turns']), 'turn')} of {counted(steps, 'step')}"
    if time["features_seconds"]:
        features = _duration(time["features_seconds"])
        yield f"  {'features':14}{features:>10}  once; then they are kept"
    yield f"  {'images/s':14}{time['images_per_second']:>10,.1f}  ({turns})"
    yield f"  {'input':14}{time['input_share']:>10.0%}  of a step"
    yield f"  {'evaluation':14}{time['evaluated_per_second']:>10,.1f}  images/s"
    yield f"  {'an epoch':14}{_duration(time['epoch_seconds']):>10}"
    evaluations = counted(time["evaluations"], "evaluation")
    yield (
        f"  {'the run':14}{_duration(time['run_seconds']):>10}  "
        f"{counted(time['run_steps'], 'step')}, {evaluations}"
    )


def _disk(disk: Mapping[str, int]) -> Iterator[str]:
    yield "disk"
    yield f"  {'a checkpoint':14}{_size(disk['checkpoint']):>10}"
    yield f"  {'the run':14}{_size(disk['needed']):>10}  of {_size(disk['free_here'])} free here"


def _options(found: Mapping[str, Any]) -> Iterator[str]:
    peak, rate = found["memory"]["peak"], found["time"]["images_per_second"]
    options = found["options"]
    if found["time"]["features_seconds"]:
        yield "only the classifier is trained: no other setting was tried"
        return
    if not options:
        yield "no setting that was tried takes less memory or time"
        return
    title = "what would be less"
    wide = max(len(title) - 2, *(len(option["change"]) for option in options))
    yield f"{title:{wide + 2}}  {'peak':>10}        {'images/s':>10}"
    for option in options:
        faster = option["images_per_second"]
        speed = f"{faster:>10,.1f}  x{faster / rate:<5.2f}" if faster else f"{'-':>10}        "
        memory = f"{_size(option['peak']):>10}  x{option['peak'] / peak:<5.2f}"
        halves = f"halves {' and '.join(option['halves'])}" if option["halves"] else ""
        yield f"  {option['change']:{wide}}  {memory}{speed} {halves}".rstrip()


def _size(number: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:,.1f} {unit}"
    return f"{number:.0f} B"


def _percent(share: float) -> str:
    return f"{share:+.0%}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"

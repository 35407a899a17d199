"""`finetune bench`: measure a recipe's training speed, also in other libraries' loops."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finetune.bench.loop_process import LoopProcess
from finetune.bench.losses_and_sizes import (
    LOSSES_EVERY,
    REFERENCE_OVERRIDES,
    study_losses,
    study_sizes,
)
from finetune.bench.markdown import check_page, write_section
from finetune.bench.ours import FinetuneLoop
from finetune.bench.peers import PeerLoop
from finetune.bench.timer import value_range
from finetune.bench.torchvision_transforms import to_torchvision
from finetune.errors import RecipeError, SetupError, did_you_mean, install_hint, redact_secrets
from finetune.files import make_writable_folder
from finetune.log import logger
from finetune.precision import DTYPES
from finetune.progress import step_bar
from finetune.ranks import is_main_process
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import Recipe

__all__ = [
    "COMPARISONS",
    "OWN_LOOP",
    "WARMUP_STEPS",
    "bench",
    "bench_command",
    "check_package_installed",
]

OWN_LOOP = "finetune"
COMPARISONS = ("synthetic", "decode", OWN_LOOP, "transformers", "timm-loop")
_WITHOUT_OWN_LOOP = {"synthetic", "decode"}
WARMUP_STEPS = 3  # untimed steps each time that a loop resumes
_PACKAGES = {
    "transformers": "transformers",
    "timm-loop": "timm",
    "transformers-trainer": "transformers",
}


def bench(
    path: str,
    overrides: Sequence[str] = (),
    *,
    against: Sequence[str] = (),
    steps: int = 20,
    repeats: int = 3,
    losses: int | None = None,
    sizes: Sequence[int] = (),
    profile: str | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Measure the training speed of a recipe and of other loops, in several alternating turns.

    Args:
        path: path of the recipe.
        overrides: overrides of the recipe, each `section.key=value`.
        against: names in COMPARISONS. "synthetic" is our training with synthetic input. Other
            libraries' loops run in our precision and in fp32, or only in PRECISION if written as
            LOOP:PRECISION; our own loop needs a PRECISION. "decode" measures as many decoding
            processes as workers.
        steps: timed steps per turn.
        repeats: number of turns per loop.
        losses: number of steps, from the first, whose losses are compared with float32 training; a
            multiple of `LOSSES_EVERY`.
        sizes: further dataset sizes to measure, in images.
        profile: folder for a profiler trace.
        out: Markdown file in which the recipe's section is added or replaced.
    Returns: a dict with keys "rows", each {"name", "precision", "compiled", "train", "evaluation",
        "seconds_to_first_step", "host_bytes", "device_bytes", "workers", "operations_per_image",
        "ratio", "fraction"}; "matrix_rate", "input_share"; "inputs" (see `input_rates`), "losses"
        (see `study_losses`) and "sizes" (see `study_sizes`), each None unless requested; "load",
        the load average before the measurement; and the settings and the machine. Rates are
        `value_range`s of images (or operations) per second; "ratio" is our rate divided by this
        row's, "fraction" the achieved fraction of the matrix rate.
    Raises: FinetuneError; its class sets the exit code.
    """
    recipe, against = load_recipe(path, overrides), tuple(dict.fromkeys(against))
    plain = load_recipe(path, (*overrides, *REFERENCE_OVERRIDES))
    _check_arguments(
        recipe, against, single_process_only=bool(sizes or losses or profile), losses=losses
    )
    load = os.getloadavg()[0]  # other work on this machine affects every result
    if profile is not None:
        make_writable_folder(Path(profile), option="--profile")
    if out is not None and is_main_process():
        check_page(Path(out))
    measured = _run_measurements(recipe, against, steps=steps, repeats=repeats, profile=profile)
    counts = {"steps": steps, "repeats": repeats}
    result = {
        "recipe": path,
        "overrides": [redact_secrets(word) for word in overrides],
        "command": bench_command(path, overrides, against, **counts, losses=losses, images=sizes),
        **counts,
        "warmup_steps": WARMUP_STEPS,
        "load": round(load, 2),
        **measured,
        "losses": None if losses is None else study_losses(recipe, plain, steps=losses),
        "sizes": study_sizes(recipe, sizes, warmup=WARMUP_STEPS, **counts) if sizes else None,
    }
    if out is not None and is_main_process():
        write_section(Path(out), result)
    return result


def _run_measurements(
    recipe: Recipe, against: Sequence[str], *, steps: int, repeats: int, profile: str | None
) -> dict[str, Any]:
    """Measure all loops in alternating turns. Returns: the results, with "inputs" and "profile"."""
    with (
        step_bar(total=1, start=0, shown=is_main_process()) as shown,
        contextlib.ExitStack() as hosts,
    ):
        session = _BenchSession(recipe, shown, hosts)
        session.prepare(against, steps=steps, repeats=repeats)
        for _ in range(repeats):
            session.take_turns(steps)
        own, traced, inputs = session.hosts[OWN_LOOP], None, None
        if "decode" in against:
            images = steps * recipe.data.batch_size
            inputs = own.call("inputs", images=images, repeats=repeats)
        if profile is not None:
            traced = own.call("profile", folder=profile)
        result = session.result(shown_synthetic="synthetic" in against)
    return {**result, "inputs": inputs, "profile": traced}


class _BenchSession:
    """The loops of one `bench` call, each in its own process, and their measurements."""

    def __init__(self, recipe: Recipe, shown: tqdm[Any], stack: contextlib.ExitStack) -> None:
        self.recipe = recipe
        self.shown = shown
        self.stack = stack
        self.hosts: dict[str, LoopProcess] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.rates: dict[str, list[Any]] = {}
        self.order: list[str] = []

    def prepare(self, against: Sequence[str], *, steps: int, repeats: int) -> None:
        """Start the processes one after another, and run the first steps of each."""
        self._start(OWN_LOOP, FinetuneLoop, recipe=self.recipe)
        facts = self.facts[OWN_LOOP]
        if facts["of_features"]:
            logger.info(
                "model.freeze: finetune train computes the features once; this benchmark runs the "
                "whole network in every step (finetune info --plan estimates the time of the run)"
            )
        own = facts["precision"]
        # the micro-batch size that "auto" resolved to
        data = self.recipe.data.model_copy(update={"micro_batch": facts["micro_batch"]})
        same = {"recipe": self.recipe.model_copy(update={"data": data}), "device": facts["device"]}
        for wish in [name for name in against if name not in _WITHOUT_OWN_LOOP]:
            loop, _, one = wish.partition(":")
            for precision in dict.fromkeys((one,) if one else (own, "fp32")):
                name = loop if precision == own else f"{loop}:{precision}"
                if loop == OWN_LOOP:
                    self._start_own(name, precision)
                    continue
                self._start(name, PeerLoop, loop=loop, precision=precision, **same)
                self.facts[name]["precision"] = precision
        ahead = sum(2 * facts.get("workers", 0) for facts in self.facts.values())
        turns = (len(self.hosts) + 1) * (WARMUP_STEPS + steps) + ahead
        self.shown.total = self.shown.n + repeats * turns
        self.shown.refresh()

    def _start_own(self, name: str, precision: str) -> None:
        """Start our own loop in another precision."""
        if name in self.hosts:
            logger.info(
                f"--against {OWN_LOOP}:{precision}: skipped, because {OWN_LOOP} already uses it"
            )
            return
        run = self.recipe.run.model_copy(update={"precision": precision})
        self._start(name, FinetuneLoop, recipe=self.recipe.model_copy(update={"run": run}))

    def _start(self, name: str, make: type, **arguments: Any) -> None:
        self.shown.set_description(f"preparing {name}")
        host = LoopProcess(name, make, arguments, on_steps=self._advance)
        self.hosts[name] = self.stack.enter_context(host)
        self.facts[name] = host.call("prepare")

    def _advance(self, steps: int) -> None:
        self.shown.total = max(self.shown.total, self.shown.n + steps)
        self.shown.update(steps)

    def take_turns(self, steps: int) -> None:
        """Measure every loop once, one after another."""
        timed = {"warmup": WARMUP_STEPS, "steps": steps}
        for name, host in self.hosts.items():
            self._measure(name, host, "train", **timed)
            if "memory" not in self.facts[name]:  # before evaluation raises the peak
                self.facts[name]["memory"] = host.call("memory")
            if name == OWN_LOOP:
                self._measure("synthetic", host, "train", synthetic=True, **timed)
            host.call("empty_cache")
        own, images = self.hosts[OWN_LOOP], max(steps * self.recipe.data.batch_size // 2, 1)
        self._measure("evaluation", own, "evaluate", images=images)
        self._measure("matrix", own, "matrix_rate")
        own.call("empty_cache")

    def _measure(self, name: str, host: LoopProcess, method: str, **arguments: Any) -> None:
        self.shown.set_description(name)
        self.order.append(name)
        self.rates.setdefault(name, []).append(host.call(method, **arguments))

    def result(self, *, shown_synthetic: bool) -> dict[str, Any]:
        """Return the measurements as JSON-serializable values."""
        facts, rates = self.facts[OWN_LOOP], self.rates
        pairs = zip(rates[OWN_LOOP], rates["synthetic"], strict=True)
        shares = [
            max(0.0, 1 - real / without) for real, without in pairs
        ]  # max, because noise can make it negative
        matrix = None if None in rates["matrix"] else value_range(rates["matrix"])
        kept = ("architecture", "precision", "compiled", "batch_size", "image_size", "num_images")
        loops = {name.partition(":")[0] for name in self.hosts}
        facts["machine"]["versions"] |= {
            package: version(package) for loop, package in _PACKAGES.items() if loop in loops
        }
        shown = [*self.hosts]
        if shown_synthetic:
            shown.insert(1, "synthetic")
        return {
            **{key: facts[key] for key in kept},
            "optimizer": self.recipe.optim.name,
            "augmentation": facts["augmentation"],
            "rows": [self._row(name, matrix) for name in shown],
            "input_share": value_range(shares),
            "matrix_rate": matrix,
            "order": self.order,
            "machine": facts["machine"],
        }

    def _row(self, name: str, matrix: dict[str, Any] | None) -> dict[str, Any]:
        own, train = self.facts[OWN_LOOP], value_range(self.rates[name])
        nothing = {"seconds_to_first_step": None, "memory": {"host": None, "device": None}}
        facts = {**own, **nothing, **self.facts.get(name, {})}
        per_image = facts["operations"] / self.recipe.data.batch_size
        fraction = None
        if matrix is not None and facts["precision"] == own["precision"]:
            fraction = train["median"] * per_image / matrix["median"]
        return {
            "name": name,
            "precision": facts["precision"],
            "compiled": facts["compiled"],
            "train": train,
            "evaluation": value_range(self.rates["evaluation"]) if name == OWN_LOOP else None,
            "seconds_to_first_step": facts["seconds_to_first_step"],
            "host_bytes": facts["memory"]["host"],
            "device_bytes": facts["memory"]["device"],
            "workers": facts.get("workers"),
            "operations_per_image": per_image,
            "ratio": statistics.median(self.rates[OWN_LOOP]) / train["median"],
            "fraction": fraction,
        }


def bench_command(
    path: str,
    overrides: Sequence[str],
    against: Sequence[str],
    *flags: str,
    **options: int | Sequence[int] | None,
) -> str:
    """Return the command line that repeats a benchmark; options that are None are omitted."""
    words = ["finetune", "bench", path, *overrides, *flags]
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
        launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", started, "-m"]
        words = [*(["env", "ACCELERATE_USE_CPU=true"] if on_cpu else []), *launch, *words]
    for option, given in {"against": against, **options}.items():
        values = [given] if isinstance(given, int) else given or ()
        words += [word for value in values for word in (f"--{option}", str(value))]
    return redact_secrets(shlex.join(words))


def _check_arguments(
    recipe: Recipe, against: Sequence[str], *, single_process_only: bool, losses: int | None
) -> None:
    """Check the arguments before measuring; `single_process_only` forbids several processes."""
    if losses is not None and (losses < 1 or losses % LOSSES_EVERY):
        raise RecipeError(
            f"--losses: {losses} steps; give a multiple of {LOSSES_EVERY}, such as 200",
            code="recipe.wrong_value",
        )
    for loop in against:
        name, colon, precision = loop.partition(":")
        needs_colon, has_none = name == OWN_LOOP and not colon, colon and name in _WITHOUT_OWN_LOOP
        if (
            name not in COMPARISONS
            or needs_colon
            or has_none
            or (colon and precision not in DTYPES)
        ):
            raise RecipeError(
                f"--against: unknown '{loop}'{did_you_mean(name, COMPARISONS) or '.'} Choose from "
                f"{', '.join(COMPARISONS)}; "
                f"a loop in one precision: {OWN_LOOP}:{'|'.join(DTYPES)}; --end-to-end "
                "compares whole training commands",
                code="recipe.unknown_name",
            )
        check_package_installed(name)
    if recipe.data.task == "multilabel" and set(against) - _WITHOUT_OWN_LOOP:
        raise RecipeError(
            "--against: other libraries' loops support one label per image, but the recipe has "
            "data.task=multilabel; omit --against",
            code="recipe.conflict",
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and (set(against) - _WITHOUT_OWN_LOOP or single_process_only):
        raise SetupError(
            f"bench: other loops, --losses, --images and --profile need one process, but {started} "
            "were started; omit them, or run without accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, started):
        raise RecipeError(
            f"run.num_processes: the recipe asks for {recipe.run.num_processes}, but {started} "
            f"started; add run.num_processes={started}",
            code="recipe.conflict",
        )
    if "decode" in against and (recipe.data.keep != "none" or not recipe.data.workers):
        raise RecipeError(
            "--against decode: requires workers that decode images in every epoch; add "
            "data.keep=none data.workers=auto",
            code="recipe.conflict",
        )
    theirs = [
        loop for loop in against if loop.partition(":")[0] not in (*_WITHOUT_OWN_LOOP, OWN_LOOP)
    ]
    if theirs and recipe.data.train is not None:
        to_torchvision(recipe.data.train, image_size=(1, 1), interpolation="bicubic")


def check_package_installed(name: str) -> None:
    """Check that a peer's package is installed. Raises: SetupError with the pip command."""
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        raise SetupError(
            f"--against {name}: {package} is not installed; {install_hint(package)}",
            code="setup.missing_package",
        )

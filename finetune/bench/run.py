"""Measure a recipe's training on this machine, beside the same training in the loops of others."""

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

from finetune.bench.losses_and_sizes import LOSSES_EVERY, PLAINLY, study_losses, study_sizes
from finetune.bench.markdown import check_page, write_section
from finetune.bench.ours import Ours
from finetune.bench.peers import Peer
from finetune.bench.subprocess import Host
from finetune.bench.timer import spread
from finetune.bench.torchvision_transforms import translate
from finetune.console import bar, say, say_nothing
from finetune.errors import RecipeError, SetupError, masked, nearest
from finetune.files import make_folder
from finetune.processes import is_first_rank
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.environment import DTYPES

__all__ = ["AGAINST", "OWN", "WARMUP_STEPS", "bench", "check_package", "command_of"]

OWN = "finetune"
AGAINST = ("synthetic", "decode", OWN, "transformers", "timm-loop")
_NO_LOOPS = {"synthetic", "decode"}
WARMUP_STEPS = 3  # before the clock starts, each time that a loop has waited for another
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
    """Measure a recipe's training, each loop in turn, several times over.

    Args:
        path: of the recipe.
        overrides: `section.key=value` each.
        against: of AGAINST; the same training without input, and in other loops, each in our
            precision and in fp32 unless one is named (LOOP:PRECISION), which our own needs;
            "decode": as many processes as there are workers that only decode.
        steps: that are timed each time.
        repeats: how often each loop has its turn.
        losses: of that many first steps, beside those in float32; a multiple of `LOSSES_EVERY`.
        sizes: numbers of images to train on, besides the set's own.
        profile: a folder for a trace.
        out: a Markdown file, in which the recipe's section is added or replaced.
    Returns: "rows", each {"name", "precision", "compiled", "train", "evaluation",
        "seconds_to_first_step", "host_bytes", "device_bytes", "workers", "operations_per_image",
        "ratio", "fraction"}; "matrix_rate", "input_share"; "inputs" of `input_rates`, "losses" of
        `study_losses` and "sizes" of `study_sizes`, or None; "load", the processes that wanted to
        run before; what was measured, and on which machine. Rates are {"median", "min", "max",
        "values"} of images (or operations) a second; "ratio" is ours over this row's, "fraction"
        the share of the matrix rate.
    Raises: FinetuneError of the kind that DESIGN's exit codes list.
    """
    recipe, against = load_recipe(path, overrides), tuple(dict.fromkeys(against))
    plain = load_recipe(path, (*overrides, *PLAINLY))
    _check(recipe, against, alone=bool(sizes or losses or profile), losses=losses)
    load = os.getloadavg()[0]  # what else this machine is busy with is in every figure
    if profile is not None:
        make_folder(Path(profile), option="--profile")
    if out is not None and is_first_rank():
        check_page(Path(out))
    measured = _measured(recipe, against, steps=steps, repeats=repeats, profile=profile)
    counts = {"steps": steps, "repeats": repeats}
    result = {
        "recipe": path,
        "overrides": [masked(word) for word in overrides],
        "command": command_of(path, overrides, against, **counts, losses=losses, images=sizes),
        **counts,
        "warmup_steps": WARMUP_STEPS,
        "load": round(load, 2),
        **measured,
        "losses": None if losses is None else study_losses(recipe, plain, steps=losses),
        "sizes": study_sizes(recipe, sizes, warmup=WARMUP_STEPS, **counts) if sizes else None,
    }
    if out is not None and is_first_rank():
        write_section(Path(out), result)
    return result


def _measured(
    recipe: Recipe, against: Sequence[str], *, steps: int, repeats: int, profile: str | None
) -> dict[str, Any]:
    """Let the loops take their turns. Returns: what was found, and the "profile"."""
    with (
        bar(total=1, start=0, shown=is_first_rank()) as shown,
        contextlib.ExitStack() as hosts,
    ):
        session = _Session(recipe, shown, hosts)
        session.prepare(against, steps=steps, repeats=repeats)
        for _ in range(repeats):
            session.take_turns(steps)
        own, traced, inputs = session.hosts[OWN], None, None
        if "decode" in against:
            images = steps * recipe.data.batch_size
            inputs = own.ask("inputs", images=images, repeats=repeats)
        if profile is not None:
            traced = own.ask("profile", folder=profile)
        result = session.result(shown_synthetic="synthetic" in against)
    return {**result, "inputs": inputs, "profile": traced}


class _Session:
    """The loops of one call, each in its process, and what they have measured."""

    def __init__(self, recipe: Recipe, shown: tqdm[Any], stack: contextlib.ExitStack) -> None:
        self.recipe = recipe
        self.shown = shown
        self.stack = stack
        self.notice = say if is_first_rank() else say_nothing
        self.hosts: dict[str, Host] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.rates: dict[str, list[Any]] = {}
        self.order: list[str] = []

    def prepare(self, against: Sequence[str], *, steps: int, repeats: int) -> None:
        """Start the processes, one after the other, each up to its first steps."""
        self._start(OWN, Ours, recipe=self.recipe)
        facts = self.facts[OWN]
        if facts["of_features"]:
            self.notice(
                "model.freeze: train computes each image's features once and trains on them; here "
                "every step goes through the network (info --plan has the time of such a run)"
            )
        own = facts["precision"]
        # what `auto` came to
        data = self.recipe.data.model_copy(update={"micro_batch": facts["micro_batch"]})
        same = {"recipe": self.recipe.model_copy(update={"data": data}), "device": facts["device"]}
        for wish in [name for name in against if name not in _NO_LOOPS]:
            loop, _, one = wish.partition(":")
            for precision in dict.fromkeys((one,) if one else (own, "fp32")):
                name = loop if precision == own else f"{loop}:{precision}"
                if loop == OWN:
                    self._start_own(name, precision)
                    continue
                self._start(name, Peer, loop=loop, precision=precision, **same)
                self.facts[name]["precision"] = precision
        ahead = sum(2 * facts.get("workers", 0) for facts in self.facts.values())
        turns = (len(self.hosts) + 1) * (WARMUP_STEPS + steps) + ahead
        self.shown.total = self.shown.n + repeats * turns
        self.shown.refresh()

    def _start_own(self, name: str, precision: str) -> None:
        """Start our own training in another precision."""
        if name in self.hosts:
            self.notice(f"--against {OWN}:{precision}: that is what {OWN} computes with here")
            return
        run = self.recipe.run.model_copy(update={"precision": precision})
        self._start(name, Ours, recipe=self.recipe.model_copy(update={"run": run}))

    def _start(self, name: str, make: type, **arguments: Any) -> None:
        self.shown.set_description(f"preparing {name}")
        host = Host(name, make, arguments, steps=self._advance, notice=self.notice)
        self.hosts[name] = self.stack.enter_context(host)
        self.facts[name] = host.ask("prepare")

    def _advance(self, steps: int) -> None:
        self.shown.total = max(self.shown.total, self.shown.n + steps)
        self.shown.update(steps)

    def take_turns(self, steps: int) -> None:
        """Measure everything once, one after the other."""
        timed = {"warmup": WARMUP_STEPS, "steps": steps}
        for name, host in self.hosts.items():
            self._measure(name, host, "train", **timed)
            if "memory" not in self.facts[name]:  # evaluation and other turns are not training
                self.facts[name]["memory"] = host.ask("memory")
            if name == OWN:
                self._measure("synthetic", host, "train", synthetic=True, **timed)
            host.ask("rest")
        own, images = self.hosts[OWN], max(steps * self.recipe.data.batch_size // 2, 1)
        self._measure("evaluation", own, "evaluate", images=images)
        self._measure("matrix", own, "matrix_rate")
        own.ask("rest")

    def _measure(self, name: str, host: Host, method: str, **arguments: Any) -> None:
        self.shown.set_description(name)
        self.order.append(name)
        self.rates.setdefault(name, []).append(host.ask(method, **arguments))

    def result(self, *, shown_synthetic: bool) -> dict[str, Any]:
        """The measurements in plain values."""
        facts, rates = self.facts[OWN], self.rates
        pairs = zip(rates[OWN], rates["synthetic"], strict=True)
        shares = [max(0.0, 1 - real / without) for real, without in pairs]  # noise is not negative
        matrix = None if None in rates["matrix"] else spread(rates["matrix"])
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
            "input_share": spread(shares),
            "matrix_rate": matrix,
            "order": self.order,
            "machine": facts["machine"],
        }

    def _row(self, name: str, matrix: dict[str, Any] | None) -> dict[str, Any]:
        own, train = self.facts[OWN], spread(self.rates[name])
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
            "evaluation": spread(self.rates["evaluation"]) if name == OWN else None,
            "seconds_to_first_step": facts["seconds_to_first_step"],
            "host_bytes": facts["memory"]["host"],
            "device_bytes": facts["memory"]["device"],
            "workers": facts.get("workers"),
            "operations_per_image": per_image,
            "ratio": statistics.median(self.rates[OWN]) / train["median"],
            "fraction": fraction,
        }


def command_of(
    path: str,
    overrides: Sequence[str],
    against: Sequence[str],
    *flags: str,
    **options: int | Sequence[int] | None,
) -> str:
    """The command that measures these figures again; `options`: one value each, several or none."""
    words = ["finetune", "bench", path, *overrides, *flags]
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
        launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", started, "-m"]
        words = [*(["env", "ACCELERATE_USE_CPU=true"] if on_cpu else []), *launch, *words]
    for option, given in {"against": against, **options}.items():
        values = [given] if isinstance(given, int) else given or ()
        words += [word for value in values for word in (f"--{option}", str(value))]
    return masked(shlex.join(words))


def _check(recipe: Recipe, against: Sequence[str], *, alone: bool, losses: int | None) -> None:
    """Refuse at once what could only fail later; `alone`: something is asked of one process."""
    if losses is not None and (losses < 1 or losses % LOSSES_EVERY):
        raise RecipeError(
            f"--losses: {losses} steps; give a multiple of {LOSSES_EVERY}, such as 200",
            code="recipe.wrong_value",
        )
    for loop in against:
        name, colon, precision = loop.partition(":")
        needs_colon, has_none = name == OWN and not colon, colon and name in _NO_LOOPS
        if name not in AGAINST or needs_colon or has_none or (colon and precision not in DTYPES):
            raise RecipeError(
                f"--against: unknown '{loop}'{nearest(name, AGAINST)}; choose from "
                f"{', '.join(AGAINST)}; a loop in one precision: {OWN}:{'|'.join(DTYPES)}; whole "
                "trainings by others need --end-to-end",
                code="recipe.unknown_name",
            )
        check_package(name)
    if recipe.data.task == "multilabel" and set(against) - _NO_LOOPS:
        raise RecipeError(
            "--against: the loops of others have one label for each image, the recipe "
            "data.task=multilabel; leave it out",
            code="recipe.conflict",
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and (set(against) - _NO_LOOPS or alone):
        raise SetupError(
            f"bench: other loops, --losses, --images and --profile are for one process, {started} "
            "were started; leave them out, or run it without accelerate launch",
            code="setup.one_process",
        )
    if recipe.run.num_processes not in (None, started):
        raise RecipeError(
            f"run.num_processes: the recipe asks for {recipe.run.num_processes} and {started} "
            f"started; add run.num_processes={started}",
            code="recipe.conflict",
        )
    if "decode" in against and (recipe.data.keep != "none" or not recipe.data.workers):
        raise RecipeError(
            "--against decode: is for images that workers decode in every epoch; add "
            "data.keep=none data.workers=auto",
            code="recipe.conflict",
        )
    theirs = [loop for loop in against if loop.partition(":")[0] not in (*_NO_LOOPS, OWN)]
    if theirs and recipe.data.train is not None:
        translate(recipe.data.train, image_size=(1, 1), interpolation="bicubic")


def check_package(name: str) -> None:
    """Refuse a peer whose package is not installed. Raises: SetupError with the line for pip."""
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        raise SetupError(
            f"--against {name}: {package} is not installed; pip install 'finetune[{package}]'",
            code="setup.missing_package",
        )

"""Measure a recipe's training on this machine, beside the same training in the loops of others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finetune.bench.markdown import check_page, write_section
from finetune.bench.studies import LOSSES_EVERY, PLAINLY, study_losses, study_sizes
from finetune.bench.subprocess import Host
from finetune.bench.timer import spread
from finetune.console import bar, say
from finetune.errors import RecipeError, SetupError, masked, nearest
from finetune.files import make_folder
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.environment import DTYPES

__all__ = ["AGAINST", "WARMUP_STEPS", "bench"]

AGAINST = ("synthetic", "decode", "transformers", "timm-loop")
_NO_LOOPS = {"synthetic", "decode"}
WARMUP_STEPS = 3  # before the clock starts, each time that a loop has waited for another
_OWN = "finetune"
_PACKAGES = {"transformers": "transformers", "timm-loop": "timm"}


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
            precision and in fp32 unless one is named (LOOP:PRECISION); "decode": as many processes
            as there are workers that only decode.
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
    if out is not None and _speaks():
        check_page(Path(out))
    measured = _measured(recipe, against, steps=steps, repeats=repeats, profile=profile)
    counts = {"steps": steps, "repeats": repeats}
    result = {
        "recipe": path,
        "overrides": [masked(word) for word in overrides],
        "command": _command(path, overrides, against, losses=losses, sizes=sizes, **counts),
        **counts,
        "warmup_steps": WARMUP_STEPS,
        "load": round(load, 2),
        **measured,
        "losses": None if losses is None else study_losses(recipe, plain, steps=losses),
        "sizes": study_sizes(recipe, sizes, warmup=WARMUP_STEPS, **counts) if sizes else None,
    }
    if out is not None and _speaks():
        write_section(Path(out), result)
    return result


def _measured(
    recipe: Recipe, against: Sequence[str], *, steps: int, repeats: int, profile: str | None
) -> dict[str, Any]:
    """Let the loops take their turns. Returns: what was found, and the "profile"."""
    with (
        tempfile.TemporaryDirectory(prefix="finetune-bench-") as folder,
        bar(total=1, start=0, shown=_speaks()) as shown,
        contextlib.ExitStack() as hosts,
    ):
        session = _Session(recipe, folder, shown, hosts)
        session.prepare(against, steps=steps, repeats=repeats)
        for _ in range(repeats):
            session.take_turns(steps)
        own, traced, inputs = session.hosts[_OWN], None, None
        if "decode" in against:
            images = steps * recipe.data.batch_size
            inputs = own.ask("inputs", images=images, repeats=repeats)
        if profile is not None:
            traced = own.ask("profile", folder=profile)
        result = session.result(shown_synthetic="synthetic" in against)
    return {**result, "inputs": inputs, "profile": traced}


class _Session:
    """The loops of one call, each in its process, and what they have measured."""

    def __init__(
        self, recipe: Recipe, folder: str, shown: tqdm[Any], stack: contextlib.ExitStack
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.shown = shown
        self.stack = stack
        self.hosts: dict[str, Host] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.rates: dict[str, list[Any]] = {}
        self.order: list[str] = []

    def prepare(self, against: Sequence[str], *, steps: int, repeats: int) -> None:
        """Start the processes, one after the other, each up to its first steps."""
        from finetune.bench.ours import Ours

        self._start(_OWN, Ours, {"recipe": self.recipe, "folder": self.folder})
        facts = self.facts[_OWN]
        if facts["of_features"]:
            _say(
                "model.freeze: train computes each image's features once and trains on them; here "
                "every step goes through the network (info --plan has the time of such a run)"
            )
        own = facts["precision"]
        # what `auto` came to
        data = self.recipe.data.model_copy(update={"micro_batch": facts["micro_batch"]})
        recipe = self.recipe.model_copy(update={"data": data})
        for wish in [name for name in against if name not in _NO_LOOPS]:
            from finetune.bench.peers import Peer

            loop, _, one = wish.partition(":")
            for precision in dict.fromkeys((one,) if one else (own, "fp32")):
                arguments = {
                    "recipe": recipe,
                    "loop": loop,
                    "precision": precision,
                    "device": facts["device"],
                    "folder": self.folder,
                }
                name = loop if precision == own else f"{loop}:{precision}"
                self._start(name, Peer, arguments)
                self.facts[name]["precision"] = precision
        ahead = sum(2 * facts.get("workers", 0) for facts in self.facts.values())
        turns = (len(self.hosts) + 1) * (WARMUP_STEPS + steps) + ahead
        self.shown.total = self.shown.n + repeats * turns
        self.shown.refresh()

    def _start(self, name: str, make: type, arguments: dict[str, Any]) -> None:
        self.shown.set_description(f"preparing {name}")
        host = Host(name, make, arguments, steps=self._advance, notice=_say)
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
            if name == _OWN:
                self._measure("synthetic", host, "train", synthetic=True, **timed)
            host.ask("rest")
        own, images = self.hosts[_OWN], max(steps * self.recipe.data.batch_size // 2, 1)
        self._measure("evaluation", own, "evaluate", images=images)
        self._measure("matrix", own, "matrix_rate")
        own.ask("rest")

    def _measure(self, name: str, host: Host, method: str, **arguments: Any) -> None:
        self.shown.set_description(name)
        self.order.append(name)
        self.rates.setdefault(name, []).append(host.ask(method, **arguments))

    def result(self, *, shown_synthetic: bool) -> dict[str, Any]:
        """The measurements in plain values."""
        facts, rates = self.facts[_OWN], self.rates
        pairs = zip(rates[_OWN], rates["synthetic"], strict=True)
        shares = [_share(real, without) for real, without in pairs]
        matrix = None if None in rates["matrix"] else spread(rates["matrix"])
        kept = ("architecture", "precision", "compiled", "batch_size", "image_size", "num_images")
        machine = facts["machine"]
        machine["versions"] |= {
            package: version(package)
            for loop, package in _PACKAGES.items()
            if any(name.partition(":")[0] == loop for name in self.hosts)
        }
        row = {
            "precision": facts["precision"],
            "compiled": facts["compiled"],
            "seconds_to_first_step": None,
            "memory": {"host": None, "device": None},
            "operations": facts["operations"],
        }
        names = [name for name in rates if name not in ("evaluation", "matrix")]
        rows = [
            self._row(name, {**row, **self.facts.get(name, {})}, matrix)
            for name in names
            if name != "synthetic" or shown_synthetic
        ]
        return {
            **{key: facts[key] for key in kept},
            "optimizer": self.recipe.optim.name,
            "augmentation": facts["augmentation"],
            "rows": rows,
            "input_share": spread(shares),
            "matrix_rate": matrix,
            "order": self.order,
            "machine": machine,
        }

    def _row(
        self, name: str, facts: dict[str, Any], matrix: dict[str, Any] | None
    ) -> dict[str, Any]:
        train, own = spread(self.rates[name]), spread(self.rates[_OWN])
        comparable = facts["precision"] == self.facts[_OWN]["precision"]
        per_image = facts["operations"] / self.recipe.data.batch_size
        return {
            "name": name,
            "precision": facts["precision"],
            "compiled": facts["compiled"],
            "train": train,
            "evaluation": spread(self.rates["evaluation"]) if name == _OWN else None,
            "seconds_to_first_step": facts["seconds_to_first_step"],
            "host_bytes": facts["memory"]["host"],
            "device_bytes": facts["memory"]["device"],
            "workers": facts.get("workers"),
            "operations_per_image": per_image,
            "ratio": own["median"] / train["median"],
            "fraction": train["median"] * per_image / matrix["median"]
            if comparable and matrix is not None
            else None,
        }


def _share(real: float, without: float) -> float:
    """The share of a step that is its input's; noise does not make it negative."""
    return max(0.0, 1 - real / without)


def _command(
    path: str,
    overrides: Sequence[str],
    against: Sequence[str],
    *,
    steps: int,
    repeats: int,
    losses: int | None,
    sizes: Sequence[int],
) -> str:
    """The command that measures these figures again."""
    words = ["finetune", "bench", path, *overrides]
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
        launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", started, "-m"]
        words = [*(["env", "ACCELERATE_USE_CPU=true"] if on_cpu else []), *launch, *words]
    options = [("--against", name) for name in against]
    options += [("--steps", str(steps)), ("--repeats", str(repeats))]
    options += [] if losses is None else [("--losses", str(losses))]
    options += [("--images", str(size)) for size in sizes]
    return masked(shlex.join([*words, *(word for option in options for word in option)]))


def _speaks() -> bool:
    """True in the one process of a launch that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def _say(message: str) -> None:
    if _speaks():
        say(message)


def _check(recipe: Recipe, against: Sequence[str], *, alone: bool, losses: int | None) -> None:
    """Refuse at once what could only fail later; `alone`: something is asked of one process."""
    if losses is not None and (losses < 1 or losses % LOSSES_EVERY):
        raise RecipeError(
            f"--losses: {losses} steps; give a multiple of {LOSSES_EVERY}, such as 200",
            code="recipe.wrong_value",
        )
    for loop in against:
        name, colon, precision = loop.partition(":")
        if name not in AGAINST or (colon and (name in _NO_LOOPS or precision not in DTYPES)):
            raise RecipeError(
                f"--against: unknown '{loop}'{nearest(name, AGAINST)}; choose from "
                f"{', '.join(AGAINST)}; a loop in one precision: transformers:{'|'.join(DTYPES)}",
                code="recipe.unknown_name",
            )
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise SetupError(
                f"--against {name}: {package} is not installed; pip install 'finetune[{package}]'",
                code="setup.missing_package",
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
            "data.keep=none data.workers=2",
            code="recipe.conflict",
        )
    if set(against) - _NO_LOOPS and recipe.data.train is not None:
        from finetune.bench.torchvision_transforms import translate

        translate(recipe.data.train, image_size=(1, 1), interpolation="bicubic")

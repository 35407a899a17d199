"""Measure a recipe's training on this machine, beside the same training in the loops of others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finetune.bench.hosts import Host
from finetune.bench.page import write_section
from finetune.errors import RecipeError, SetupError, masked, nearest
from finetune.files import make_folder
from finetune.progress import bar, say
from finetune.recipe import Recipe, load_recipe

__all__ = ["AGAINST", "WARMUP_STEPS", "bench"]

AGAINST = ("synthetic", "transformers", "timm-loop")
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
    profile: str | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Measure a recipe's training, each loop in turn, several times over.

    Args:
        path: of the recipe.
        overrides: `section.key=value` each.
        against: of AGAINST; the same training without input, and in other loops.
        steps: that are timed each time.
        repeats: how often each loop has its turn.
        profile: a folder for a trace.
        out: a Markdown file, in which the recipe's section is added or replaced.
    Returns: "rows", each {"name", "precision", "train", "evaluation", "seconds_to_first_step",
        "host_bytes", "device_bytes", "workers", "ratio", "fraction"}; "matrix_rate",
        "input_share"; "load", the processes that wanted to run before; what was measured, and on
        which machine. Rates are {"median", "min", "max", "values"} of images (or operations) a
        second; "ratio" is ours over this row's, "fraction" the share of the matrix rate.
    Raises: FinetuneError of the kind that DESIGN's exit codes list.
    """
    recipe, against = load_recipe(path, overrides), tuple(dict.fromkeys(against))
    _check(recipe, against)
    load = os.getloadavg()[0]  # what else this machine is busy with is in every figure
    if profile is not None:
        make_folder(Path(profile), option="--profile")
    with (
        tempfile.TemporaryDirectory(prefix="finetune-bench-") as folder,
        bar(total=1, start=0, shown=True) as shown,
        contextlib.ExitStack() as hosts,
    ):
        session = _Session(recipe, folder, shown, hosts)
        session.prepare(against, steps=steps, repeats=repeats)
        for _ in range(repeats):
            session.take_turns(steps)
        traced = None
        if profile is not None:
            traced = session.hosts[_OWN].ask("profile", folder=profile)
    result = {
        "recipe": path,
        "overrides": [masked(word) for word in overrides],
        "command": _command(path, overrides, against, steps, repeats),
        "steps": steps,
        "warmup_steps": WARMUP_STEPS,
        "repeats": repeats,
        "load": round(load, 2),
        **session.result(shown_synthetic="synthetic" in against),
        "profile": traced,
    }
    if out is not None:
        write_section(Path(out), result)
    return result


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
        from finetune.bench.subjects import Ours

        self._start(_OWN, Ours, {"recipe": self.recipe, "folder": self.folder})
        facts = self.facts[_OWN]
        own = facts["precision"]
        for loop in [name for name in against if name != "synthetic"]:
            from finetune.bench.peers import Peer

            for precision in dict.fromkeys((own, "fp32")):
                arguments = {
                    "recipe": self.recipe,
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
        host = Host(name, make, arguments, steps=self._advance, notice=say)
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
        """What was found, in plain values."""
        facts, rates = self.facts[_OWN], self.rates
        pairs = zip(rates[_OWN], rates["synthetic"], strict=True)
        shares = [_share(real, without) for real, without in pairs]
        matrix = None if None in rates["matrix"] else _spread(rates["matrix"])
        per_image = facts["operations"] / facts["batch_size"]
        kept = ("architecture", "precision", "batch_size", "image_size", "num_images")
        machine = facts["machine"]
        machine["versions"] |= {
            package: version(package) for loop, package in _PACKAGES.items() if loop in self.hosts
        }
        row = {"seconds_to_first_step": None, "memory": {"host": None, "device": None}}
        names = [name for name in rates if name not in ("evaluation", "matrix")]
        rows = [
            self._row(name, {**row, **self.facts.get(name, {})}, matrix, per_image)
            for name in names
            if name != "synthetic" or shown_synthetic
        ]
        return {
            **{key: facts[key] for key in kept},
            "optimizer": self.recipe.optim.name,
            "augmentation": facts["augmentation"],
            "rows": rows,
            "input_share": _spread(shares),
            "matrix_rate": matrix,
            "operations_per_image": per_image,
            "order": self.order,
            "machine": machine,
        }

    def _row(
        self, name: str, facts: dict[str, Any], matrix: dict[str, Any] | None, per_image: float
    ) -> dict[str, Any]:
        train, own = _spread(self.rates[name]), _spread(self.rates[_OWN])
        precision = facts.get("precision", self.facts[_OWN]["precision"])
        comparable = precision == self.facts[_OWN]["precision"]
        return {
            "name": name,
            "precision": precision,
            "train": train,
            "evaluation": _spread(self.rates["evaluation"]) if name == _OWN else None,
            "seconds_to_first_step": facts["seconds_to_first_step"],
            "host_bytes": facts["memory"]["host"],
            "device_bytes": facts["memory"]["device"],
            "workers": facts.get("workers"),
            "ratio": own["median"] / train["median"],
            "fraction": train["median"] * per_image / matrix["median"]
            if comparable and matrix is not None
            else None,
        }


def _share(real: float, without: float) -> float:
    """The share of a step that is its input's; noise does not make it negative."""
    return max(0.0, 1 - real / without)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "values": list(values)}


def _command(
    path: str, overrides: Sequence[str], against: Sequence[str], steps: int, repeats: int
) -> str:
    """What gives these figures again."""
    words = ["finetune", "bench", path, *overrides]
    for name in against:
        words += ["--against", name]
    return masked(shlex.join([*words, "--steps", str(steps), "--repeats", str(repeats)]))


def _check(recipe: Recipe, against: Sequence[str]) -> None:
    """Refuse at once what could only fail later."""
    for name in against:
        if name not in AGAINST:
            raise RecipeError(
                f"--against: unknown '{name}'{nearest(name, AGAINST)}; choose from "
                f"{', '.join(AGAINST)}"
            )
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise SetupError(
                f"--against {name}: {package} is not installed; pip install 'finetune[{package}]'"
            )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise SetupError(
            f"bench: measures one process, and {started} were started; run it without accelerate "
            "launch"
        )
    if recipe.run.num_processes not in (None, 1):
        raise RecipeError(
            f"run.num_processes: bench measures one process, and the recipe asks for "
            f"{recipe.run.num_processes}; add run.num_processes=1"
        )
    if set(against) - {"synthetic"} and recipe.data.train is not None:
        from finetune.bench.transforms import translate

        translate(recipe.data.train, image_size=(1, 1), interpolation="bicubic")

"""Rename the tensors of another implementation to timm's names, by regular expressions.

`python -m finetune.models.weights.rename FILE ARCHITECTURE` proposes such a mapping from the order
of shapes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import timm
import yaml
from torch import Tensor

from finetune.errors import FinetuneError, WeightsError
from finetune.models.head import classifier_names
from finetune.models.weights.read import read_tensors

__all__ = ["main", "matched", "propose", "renamed"]

# Last parts of a name that mean the same in every network of PyTorch.
_KINDS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def renamed(
    state: Mapping[str, Tensor], rename: Mapping[str, str], *, source: str
) -> dict[str, Tensor]:
    """Rename tensors: every pattern is replaced in every name, one pattern after the other.

    Args:
        rename: regular expression to replacement, as of re.sub.
        source: what the user calls the weights, for messages.
    Raises: WeightsError for a pattern that is found in no name, two tensors of one name, and a
        tensor that cannot be what its new name says.
    """
    names = {name: name for name in state}
    for pattern, replacement in rename.items():
        after = {old: re.sub(pattern, replacement, new) for old, new in names.items()}
        if not any(re.search(pattern, new) for new in names.values()):
            shown = ", ".join(list(names.values())[:3])
            raise WeightsError(
                f"{source}: model.rename: '{pattern}' is found in no name ({shown}, …); correct "
                f"it or remove it",
                code="weights.wrong_rename",
            )
        names = after
    result: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    for old, new in names.items():
        if new in result:
            raise WeightsError(
                f"{source}: model.rename: both {before[new]} and {old} become {new}; make the "
                f"patterns narrower",
                code="weights.wrong_rename",
            )
        result[new], before[new] = state[old], old
        if problem := _contradiction(old, new, state[old]):
            raise WeightsError(
                f"{source}: model.rename: {old} cannot become {new}: {problem}; correct the "
                f"patterns",
                code="weights.wrong_rename",
            )
    return result


def _contradiction(old: str, new: str, tensor: Tensor) -> str | None:
    """The reason why a tensor cannot have this new name; None if it can."""
    kinds = _kind(old), _kind(new)
    if kinds[0] != kinds[1] and _KINDS.issuperset(kinds):
        return f"a {kinds[0]} is no {kinds[1]}"
    if kinds[1] == "running_var" and bool((tensor < 0).any()):
        return "a variance is not below 0"
    return None


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def matched(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], *, free: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Pairs (their name, the network's) where every shape fits in order; [] where one does not.

    A weight never stands in the place of a bias, whatever their shapes.

    Args:
        state: the weights, in the order of their file.
        own: the network's, in its order.
        free: modules of the network, such as its head, whose first dimension may differ.
    """
    if len(state) != len(own):
        return []
    pairs = list(zip(state, own, strict=True))
    for theirs, ours in pairs:
        start = 1 if ours.rpartition(".")[0] in free else 0
        one, other = state[theirs].shape, own[ours].shape
        fits = len(one) == len(other) and one[start:] == other[start:]
        if not fits or _contradiction(theirs, ours, state[theirs]):
            return []
    return pairs


def propose(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Patterns, one for each module, that turn the first name of each pair into the second.

    Raises: WeightsError if the names overlap so that no order of the patterns does it.
    """
    modules: dict[str, str] = {}
    for theirs, ours in pairs:
        (before, _, one), (after, _, other) = theirs.rpartition("."), ours.rpartition(".")
        alike = bool(before and after) and one == other
        old, new = (f"{before}.", f"{after}.") if alike else (theirs, ours)
        if old != new:
            modules[f"^{re.escape(old)}{'' if alike else '$'}"] = new
    for rename in (modules, dict(reversed(modules.items()))):
        names = [theirs for theirs, _ in pairs]
        for pattern, new in rename.items():
            names = [re.sub(pattern, lambda _, new=new: new, name) for name in names]  # type: ignore[misc]
        if names == [ours for _, ours in pairs]:
            return rename
    raise WeightsError(
        "the names overlap: no order of patterns renames them; write it by hand",
        code="weights.wrong_rename",
    )


def main(arguments: list[str]) -> int:
    """Print the mapping for a file and an architecture of timm as YAML. Returns: the exit code."""
    if len(arguments) != 2 or not timm.is_model(arguments[1]):
        sys.stderr.write(
            "use: python -m finetune.models.weights.rename FILE ARCHITECTURE (timm's name)\n"
        )
        return 2
    file, architecture = arguments
    try:
        network = timm.create_model(architecture)
        free = classifier_names(network)
        pairs = matched(read_tensors(Path(file)), network.state_dict(), free=free)
        if not pairs:
            raise WeightsError(
                f"{file}: not the shapes of {architecture}, in order; check both",
                code="weights.wrong_shape",
            )
        rename = propose(pairs)
    except FinetuneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"# {file} to {architecture}, by the order of shapes alone: check each line\n")
    sys.stdout.write(yaml.safe_dump(rename, sort_keys=False, width=10_000))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

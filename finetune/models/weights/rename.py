"""Rename the tensors of another implementation to timm's names with regular expressions.

`python -m finetune.models.weights.rename FILE ARCHITECTURE` proposes the patterns: it pairs the
tensors of both implementations in order, if all shapes match.
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

__all__ = ["main", "match_by_shape", "propose_patterns", "rename_tensors"]

# Suffixes of tensor names that have the same meaning in every PyTorch network.
_KNOWN_SUFFIXES = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def rename_tensors(
    state: Mapping[str, Tensor], patterns: Mapping[str, str], *, source: str
) -> dict[str, Tensor]:
    """Rename tensors: apply each pattern in turn to every name with re.sub.

    Args:
        state: {name: tensor}.
        patterns: {regular expression: replacement}.
        source: name of the weights as the user gave it, for messages.
    Raises: WeightsError for a pattern that matches no name, two tensors with the same new name, or
        a new name of another kind (for example a weight renamed to a bias).
    """
    names = {name: name for name in state}
    for pattern, replacement in patterns.items():
        after = {old: re.sub(pattern, replacement, new) for old, new in names.items()}
        if not any(re.search(pattern, new) for new in names.values()):
            shown = ", ".join(list(names.values())[:3])
            raise WeightsError(
                f"{source}: model.rename: '{pattern}' matches no tensor name ({shown}, …); correct "
                f"or remove it",
                code="weights.wrong_rename",
            )
        names = after
    result: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    for old, new in names.items():
        if new in result:
            raise WeightsError(
                f"{source}: model.rename: both {before[new]} and {old} become {new}; make the "
                f"patterns more specific",
                code="weights.wrong_rename",
            )
        result[new], before[new] = state[old], old
        if problem := _rename_problem(old, new, state[old]):
            raise WeightsError(
                f"{source}: model.rename: {old} cannot become {new}: {problem}; correct the "
                f"patterns",
                code="weights.wrong_rename",
            )
    return result


def _rename_problem(old: str, new: str, tensor: Tensor) -> str | None:
    """Return the reason why a tensor cannot have this new name; None if it can."""
    kinds = _suffix(old), _suffix(new)
    if kinds[0] != kinds[1] and _KNOWN_SUFFIXES.issuperset(kinds):
        return f"a {kinds[0]} is not a {kinds[1]}"
    if kinds[1] == "running_var" and bool((tensor < 0).any()):
        return "a variance cannot be negative"
    return None


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def match_by_shape(
    state: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    *,
    head_names: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Pair the n-th tensor of the weights with the n-th of the network, if all shapes match.

    A weight never pairs with a bias, even if their shapes are equal.

    Args:
        state: the weights, in file order.
        model_state: the network's state dict.
        head_names: modules of the network whose number of classes may differ.
    Returns: pairs (name in the weights, name in the network); [] if any pair does not match.
    """
    if len(state) != len(model_state):
        return []
    pairs = list(zip(state, model_state, strict=True))
    for theirs, ours in pairs:
        start = 1 if ours.rpartition(".")[0] in head_names else 0
        one, other = state[theirs].shape, model_state[ours].shape
        fits = len(one) == len(other) and one[start:] == other[start:]
        if not fits or _rename_problem(theirs, ours, state[theirs]):
            return []
    return pairs


def propose_patterns(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return rename patterns, one per module, that map the first name of each pair to the second.

    Raises: WeightsError if neither order of the patterns works, because names overlap.
    """
    modules: dict[str, str] = {}
    for theirs, ours in pairs:
        (before, _, one), (after, _, other) = theirs.rpartition("."), ours.rpartition(".")
        same_suffix = bool(before and after) and one == other
        old, new = (f"{before}.", f"{after}.") if same_suffix else (theirs, ours)
        if old != new:
            modules[f"^{re.escape(old)}{'' if same_suffix else '$'}"] = new
    for patterns in (modules, dict(reversed(modules.items()))):
        names = [theirs for theirs, _ in pairs]
        for pattern, new in patterns.items():
            names = [re.sub(pattern, lambda _, new=new: new, name) for name in names]  # type: ignore[misc]
        if names == [ours for _, ours in pairs]:
            return patterns
    raise WeightsError(
        "tensor names overlap, so no order of the patterns works; write model.rename by hand",
        code="weights.wrong_rename",
    )


def main(argv: list[str]) -> int:
    """Print rename patterns for a weights file and a timm architecture as YAML.

    Returns: the exit code.
    """
    if len(argv) != 2 or not timm.is_model(argv[1]):
        sys.stderr.write(
            "usage: python -m finetune.models.weights.rename FILE ARCHITECTURE (timm's name)\n"
        )
        return 2
    file, architecture = argv
    try:
        network = timm.create_model(architecture)
        heads = classifier_names(network)
        pairs = match_by_shape(read_tensors(Path(file)), network.state_dict(), head_names=heads)
        if not pairs:
            raise WeightsError(
                f"{file}: the tensor shapes, in order, are not those of {architecture}; check the "
                "file and the architecture",
                code="weights.wrong_shape",
            )
        patterns = propose_patterns(pairs)
    except FinetuneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"# {file} to {architecture}, matched only by shape order: check each line\n")
    sys.stdout.write(yaml.safe_dump(patterns, sort_keys=False, width=10_000))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Forward hooks on named modules, for the duration of a `with` statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

__all__ = ["forward_hooks"]


@contextmanager
def forward_hooks(network: nn.Module, hooks: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Add forward hooks to modules of a network; remove them when the `with` block ends.

    Args:
        network: the network that contains the modules.
        hooks: {name of a module: hook}; hooks have the arguments (module, inputs, output), as in
            torch's `register_forward_hook`.
    """
    with ExitStack() as stack:
        for name, hook in hooks.items():
            stack.callback(network.get_submodule(name).register_forward_hook(hook).remove)
        yield

"""Fine-tune pretrained vision models from a recipe, and publish results that others can verify."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Classifier", "__version__", "load_recipe", "start", "train"]

__version__ = "0.1.0"

# Import these on first use, so that `import finetune` and `finetune --help` do not load torch.
_LAZY_IMPORTS = {
    "Classifier": "finetune.inference",
    "load_recipe": "finetune.recipe.load",
    "start": "finetune.commands.start",
    "train": "finetune.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

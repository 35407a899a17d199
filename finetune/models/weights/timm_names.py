"""Suggestions for misspelled timm model names, and ImageNet's class names."""

from __future__ import annotations

import difflib
import re
from collections import Counter

import timm
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.models import split_model_name_tag

from finetune.errors import did_you_mean

__all__ = ["imagenet_class_names", "suggest_model_name"]

# Model families that are not in timm, and the most similar timm model.
_NEAREST_TIMM_MODELS = {"cvt": "pvt_v2_b2", "pvt": "pvt_v2_b2", "t2t": "deit_small_patch16_224"}


def suggest_model_name(name: str) -> str:
    """Return the end of an error message that suggests the closest timm name.

    If the name has a tag, the closest name with a tag is preferred.
    """
    if family := re.match(r"(cvt|pvt|t2t)(?!_v2)", name.lower()):
        near = _NEAREST_TIMM_MODELS[family[1]]
        other = " (transformers has it: 'transformers:owner/name')" if family[1] != "t2t" else ""
        return f"; it is not in timm{other}; the nearest timm model is '{near}'"
    architecture, tag = split_model_name_tag(name)
    close = did_you_mean(architecture, timm.list_models())
    if not close:
        return "; see `timm.list_models()`; for a Hub repository write 'hf-hub:owner/name'"
    if tag:
        tagged = difflib.get_close_matches(name, timm.list_pretrained(), n=1)
        close = f"; did you mean '{tagged[0]}'?" if tagged else close
    return close


def imagenet_class_names(num_classes: int | None) -> list[str] | None:
    """Return the class names of the ImageNet version with this many classes, or None."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    names, synsets = info.label_descriptions(), info.label_names()
    twice = {name for name, count in Counter(names).items() if count > 1}  # the two cranes
    return [
        f"{name} ({synset})" if name in twice else name
        for name, synset in zip(names, synsets, strict=True)
    ]

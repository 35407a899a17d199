"""Names that timm knows: the nearest to a wrong one, and the class names of ImageNet."""

from __future__ import annotations

import difflib
import re
from collections import Counter

import timm
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.models import split_model_name_tag

from finetune.errors import nearest

__all__ = ["imagenet_names", "suggest"]

# Families that timm does not have, and its nearest network.
_ELSEWHERE = {"cvt": "pvt_v2_b2", "pvt": "pvt_v2_b2", "t2t": "deit_small_patch16_224"}


def suggest(name: str) -> str:
    """The nearest registry name: among the tags when the architecture is known, else overall."""
    if family := re.match(r"(cvt|pvt|t2t)(?!_v2)", name.lower()):
        near = _ELSEWHERE[family[1]]
        other = " (transformers has it: 'transformers:owner/name')" if family[1] != "t2t" else ""
        return f"; it is not in timm{other}; nearest there is '{near}'"
    architecture, tag = split_model_name_tag(name)
    close = nearest(architecture, timm.list_models())
    if not close:
        return "; see `timm.list_models()`; names of hub repositories begin with 'hf-hub:'"
    if tag:
        tagged = difflib.get_close_matches(name, timm.list_pretrained(), n=1)
        close = f"; did you mean '{tagged[0]}'?" if tagged else close
    return close


def imagenet_names(num_classes: int | None) -> list[str] | None:
    """ImageNet's class names for weights that do not carry them; None for other class counts."""
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

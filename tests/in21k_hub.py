"""The files of the hub for the recipes of ImageNet-21k weights, rebuilt at their true size.

The two weight repositories are laid out as timm wrote them (`save_for_hf`), the data set as its
card declares it; the numbers in them are random.
"""

# N rows of a split

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hub_routes
import pytest
import timm
import torch
import yaml
from hub_routes import Reply, Request
from hub_store import User
from safetensors.torch import save
from samples import make_parquet, png

__all__ = ["CIFAR10", "CLASSES", "ROWS", "cifar10_files", "name_of", "redirect", "weight_files"]

# The paper's own weights came without their head, which Google had set to zero.
CLASSES = {"orig_in21k": 0, "augreg_in21k": 21_843}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer"]
CIFAR10 += ["dog", "frog", "horse", "ship", "truck"]
ROWS = {"train": 20, "test": 5}


def name_of(tag: str) -> str:
    """timm's name of the weights."""
    return f"vit_base_patch16_224.{tag}"


def weight_files(tag: str, *, depth: int = 12) -> dict[str, bytes]:
    """The files of timm/vit_base_patch16_224.TAG; the pickle beside the weights is unreadable.

    Args:
        depth: blocks of the network; its own 12, or fewer.
    """
    weights = save(_tensors(tag, depth), metadata={"format": "pt"})
    return {
        "README.md": _card(
            {
                "tags": ["image-classification", "timm"],
                "library_name": "timm",
                "license": "apache-2.0",
                "datasets": ["imagenet-21k"],
            },
            f"Model card for {name_of(tag)}",
        ),
        "config.json": json.dumps(_config(tag), indent=2).encode(),
        "model.safetensors": weights,
        "pytorch_model.bin": b"nobody reads a pickle where there is a safetensors file",
    }


def _tensors(tag: str, depth: int) -> dict[str, torch.Tensor]:
    """Random tensors, none of them as timm initialises it: no zeros, no ones."""
    torch.manual_seed(len(tag))
    state = timm.create_model(name_of(tag), depth=depth).state_dict()
    return {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in state.items()}


def _config(tag: str) -> dict[str, Any]:
    return {
        "architecture": "vit_base_patch16_224",
        "num_classes": CLASSES[tag],
        "num_features": 768,
        "global_pool": "token",
        "pretrained_cfg": {
            "tag": tag,
            "custom_load": False,
            "input_size": [3, 224, 224],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": CLASSES[tag],
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def cifar10_files(folder: Path) -> dict[str, bytes]:
    """The files of uoft-cs/cifar10: lossless 32x32 images, parquet, declared in the card."""
    files = {"README.md": _card(_declared(), "Dataset Card for CIFAR-10")}
    for split, rows in ROWS.items():
        labels = [row % 10 for row in range(rows)]
        first = 0 if split == "train" else ROWS["train"]
        images = [{"bytes": png(first + row, (32, 32)), "path": None} for row in range(rows)]
        path = make_parquet(folder / f"{split}.parquet", labels, names=CIFAR10, images=images)
        files[f"plain_text/{split}-00000-of-00001.parquet"] = path.read_bytes()
    return files


def _declared() -> dict[str, Any]:
    names = {str(index): name for index, name in enumerate(CIFAR10)}
    splits = [{"name": s, "num_bytes": 3000 * n, "num_examples": n} for s, n in ROWS.items()]
    paths = [{"split": split, "path": f"plain_text/{split}-*"} for split in ROWS]
    return {
        "license": ["unknown"],
        "task_categories": ["image-classification"],
        "pretty_name": "Cifar10",
        "dataset_info": {
            "config_name": "plain_text",
            "features": [
                {"name": "img", "dtype": "image"},
                {"name": "label", "dtype": {"class_label": {"names": names}}},
            ],
            "splits": splits,
            "download_size": 3000 * sum(ROWS.values()),
            "dataset_size": 3000 * sum(ROWS.values()),
        },
        "configs": [{"config_name": "plain_text", "data_files": paths, "default": True}],
    }


def _card(head: dict[str, Any], title: str) -> bytes:
    return f"---\n{yaml.safe_dump(head)}---\n# {title}\n".encode()


def redirect(patch: pytest.MonkeyPatch) -> None:
    """Let the loopback hub send small files as the hub does: by another address of its own.

    Args:
        patch: of the caller's; undoing it ends this.
    """

    def resolve(
        hub: Any, request: Request, user: User | None, kind: str, name: str, **of: str
    ) -> Reply:
        reply = hub_routes.resolve(hub, request, user, kind, name, **of)
        if reply.status != 200:
            return reply
        commit = reply.headers["X-Repo-Commit"]
        path = quote(f"{kind or 'models'}/{name}/{commit}/{of['path']}")
        headers = {"X-Repo-Commit": commit, "Location": f"/api/resolve-cache/{path}"}
        return Reply(307, b"", headers)

    routes = [(p, resolve if r is hub_routes.resolve else r) for p, r in hub_routes.ROUTES]
    assert routes != hub_routes.ROUTES
    cached = (
        r"(?:GET|HEAD) /api/resolve-cache/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
        r"/(?P<revision>[0-9a-f]{40})/(?P<path>.+)"
    )
    patch.setattr(hub_routes, "ROUTES", [*routes, (cached, hub_routes.resolve)])

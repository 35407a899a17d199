"""Files of the hub repositories that the ImageNet-21k recipes need, in their real sizes.

The two weight repositories have the layout of timm (`save_for_hf`), the dataset has the layout of
its card. The weights and the images are random.
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
from small_datasets import random_png, write_parquet

__all__ = [
    "CIFAR10",
    "CLASSES",
    "ROWS",
    "cifar10_repo_files",
    "redirect_small_files",
    "timm_name",
    "weight_repo_files",
]

# Number of classes by tag. The weights of the paper have no head: Google had set it to zero.
CLASSES = {"orig_in21k": 0, "augreg_in21k": 21_843}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer"]
CIFAR10 += ["dog", "frog", "horse", "ship", "truck"]
ROWS = {"train": 20, "test": 5}


def timm_name(tag: str) -> str:
    """Return timm's name of the weights."""
    return f"vit_base_patch16_224.{tag}"


def weight_repo_files(tag: str, *, depth: int = 12) -> dict[str, bytes]:
    """Return the files of timm/vit_base_patch16_224.TAG; its pickle of the weights is unreadable.

    Args:
        tag: a key of CLASSES.
        depth: number of blocks, at most 12.
    """
    weights = save(random_state_dict(tag, depth), metadata={"format": "pt"})
    return {
        "README.md": card_text(
            {
                "tags": ["image-classification", "timm"],
                "library_name": "timm",
                "license": "apache-2.0",
                "datasets": ["imagenet-21k"],
            },
            f"Model card for {timm_name(tag)}",
        ),
        "config.json": json.dumps(timm_config(tag), indent=2).encode(),
        "model.safetensors": weights,
        "pytorch_model.bin": b"nobody reads a pickle where there is a safetensors file",
    }


def random_state_dict(tag: str, depth: int) -> dict[str, torch.Tensor]:
    """Return random tensors; none keeps an initial value of timm such as zeros or ones."""
    torch.manual_seed(len(tag))
    state = timm.create_model(timm_name(tag), depth=depth).state_dict()
    return {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in state.items()}


def timm_config(tag: str) -> dict[str, Any]:
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


def cifar10_repo_files(folder: Path) -> dict[str, bytes]:
    """Return the files of uoft-cs/cifar10: lossless 32x32 images in parquet, and the card."""
    files = {"README.md": card_text(cifar10_card_metadata(), "Dataset Card for CIFAR-10")}
    for split, rows in ROWS.items():
        labels = [row % 10 for row in range(rows)]
        first = 0 if split == "train" else ROWS["train"]
        images = [{"bytes": random_png(first + row, (32, 32)), "path": None} for row in range(rows)]
        path = write_parquet(folder / f"{split}.parquet", labels, names=CIFAR10, images=images)
        files[f"plain_text/{split}-00000-of-00001.parquet"] = path.read_bytes()
    return files


def cifar10_card_metadata() -> dict[str, Any]:
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


def card_text(metadata: dict[str, Any], title: str) -> bytes:
    return f"---\n{yaml.safe_dump(metadata)}---\n# {title}\n".encode()


def redirect_small_files(patch: pytest.MonkeyPatch) -> None:
    """Make the loopback hub redirect small files to its cache address, as the real hub does.

    Args:
        patch: its `undo` ends the redirects.
    """

    def resolve(
        hub: Any, request: Request, user: User | None, kind: str, name: str, **rest: str
    ) -> Reply:
        reply = hub_routes.resolve(hub, request, user, kind, name, **rest)
        if reply.status != 200:
            return reply
        commit = reply.headers["X-Repo-Commit"]
        path = quote(f"{kind or 'models'}/{name}/{commit}/{rest['path']}")
        headers = {"X-Repo-Commit": commit, "Location": f"/api/resolve-cache/{path}"}
        return Reply(307, b"", headers)

    routes = [(p, resolve if r is hub_routes.resolve else r) for p, r in hub_routes.ROUTES]
    assert routes != hub_routes.ROUTES
    cached_route = (
        r"(?:GET|HEAD) /api/resolve-cache/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
        r"/(?P<revision>[0-9a-f]{40})/(?P<path>.+)"
    )
    patch.setattr(hub_routes, "ROUTES", [*routes, (cached_route, hub_routes.resolve)])

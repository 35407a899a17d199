"""The loops of others take our batches: as many, of that shape, with those pixels."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_runs import tiny
from test_peers import CHANGES, CPU, peer_of
from torch import Tensor, nn

from finetune.bench.peer_loops import Images
from finetune.bench.peers import Peer
from finetune.training.setup import open_setup


class Seen:
    """Watches what a network is given, and under which numbers it computes."""

    def __init__(self, network: nn.Module) -> None:
        self.batches: list[Tensor] = []
        self.autocast: set[Any] = set()
        self.handle = network.register_forward_pre_hook(self.note)

    def note(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.batches.append(inputs[0].detach().clone())
        assert module.training
        enabled = torch.is_autocast_enabled("cpu")
        self.autocast.add(torch.get_autocast_dtype("cpu") if enabled else torch.float32)


def ours_of(peer: Peer) -> Tensor:
    """The images that our own pipeline makes of the peer's, without augmentation."""
    setup = open_setup(peer.recipe, device=CPU, notice=pytest.fail, progress=False)
    images = peer.setting.images.images
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    return setup.train_pipeline(pixels, keys=np.zeros(len(pixels), np.uint64))


def check_loop(peer: Peer, dtype: torch.dtype) -> None:
    """One turn: steps, shapes, pixels, numbers, and weights that move."""
    facts = peer.prepare()
    assert facts["workers"] in (0, 1)
    assert facts["seconds_to_first_step"] > 0
    network, seen = peer.setting.network, Seen(peer.setting.network)
    before = [p.detach().clone() for p in network.parameters()]
    steps = peer.line.steps
    assert peer.train(warmup=1, steps=2) > 0
    seen.handle.remove()
    taken = 3 + 2 * facts["workers"]
    assert peer.line.steps - steps == taken
    assert len(seen.batches) == 2 * taken  # micro-batches
    assert {tuple(batch.shape) for batch in seen.batches} == {(4, 3, 16, 16)}
    assert seen.autocast == {dtype}
    moved = [not torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True)]
    assert any(moved)
    # each image is one of ours, to a level or two, though in another order
    ours = ours_of(peer).flatten(1)
    theirs = torch.cat(seen.batches).float().flatten(1)
    nearest = (theirs[:, None] - ours[None]).abs().amax(dim=2).amin(dim=1)
    level = 1 / 255 / min(peer.setting.setup.preprocessing.std)
    assert nearest.max() <= 2 * level


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no trace of it: torch's handler would raise wherever another test's worker ends."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_timms_loop(tmp_path: Path) -> None:
    check_loop(peer_of(tmp_path, "timm-loop", precision="bf16"), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_transformers_trainer(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("transformers")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    check_loop(peer_of(tmp_path, "transformers", precision=precision), dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_optimiser_in_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_loop(peer_of(tmp_path, "transformers", "optim.name=sgd"), torch.float32)


def test_images_go_round() -> None:
    split = open_setup(
        tiny(*CHANGES), device=CPU, notice=pytest.fail, progress=False
    ).source.splits["train"]
    images = Images(split, [3, 1])
    images.length = 5
    assert len(images) == 5
    assert images[4][0] is images[0][0]
    assert images[4][1] == split.labels[3]

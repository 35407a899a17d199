"""Another loop gets our network and our images, and as many workers as serve it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import Recorder
from faults_runs import tiny
from refusals import refused
from torch import nn

from finetune.bench.peers import Peer
from finetune.bench.timer import Clock
from finetune.models.profile import count_macs
from finetune.training.setup import open_setup

CHANGES = (
    *("data.batch_size=8", "data.micro_batch=4", "data.num_train=64", "run.test=false"),
    # PIL cuts bicubic's overshoot off between its two passes, ours at the end
    *("data.train=resize", "data.interpolation=bilinear"),
    *("optim.ema_decay=0.9", "optim.label_smoothing=0.1"),
)
CPU = torch.device("cpu")


def peer_of(tmp_path: Path, loop: str, *overrides: str, precision: str = "fp32") -> Peer:
    return Peer(
        Recorder(),
        recipe=tiny(*CHANGES, *overrides),
        loop=loop,
        precision=precision,
        device="cpu",
        folder=str(tmp_path),
    )


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def test_the_network_and_the_images_are_those_of_our_first_steps(tmp_path: Path) -> None:
    peer = peer_of(tmp_path, "timm-loop", "model.dropout=0.3")
    peer.loop = lambda setting, steps, on_step: [on_step() for _ in range(steps)]
    peer.prepare()
    setup = open_setup(peer.recipe, device=CPU, notice=pytest.fail, progress=False)
    split, indices = setup.source.splits["train"], setup.sampler.order(0)
    images = peer.setting.images
    assert len(images.images) == setup.num_samples  # fewer than would be decoded of a large set
    for place, index in enumerate(indices.tolist()):
        assert np.array_equal(np.asarray(images.images[place]), split.read(index))
        assert images.labels[place] == split.labels[index]
    ours, theirs = setup.built.model.state_dict(), peer.setting.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rates = [m.p for m in peer.setting.network.modules() if isinstance(m, nn.Dropout)]
    assert 0.3 in rates


def test_workers_are_taken_where_they_serve(tmp_path: Path) -> None:
    for faster in (0, 1):
        peer, asked = peer_of(tmp_path, "timm-loop"), []

        def run(steps: int, *, warmup: int = 1, peer=peer, asked=asked, faster=faster) -> Any:
            asked.append(peer.setting.workers)
            clock = Clock(CPU, warmup=1, steps=steps, tick=peer.line.tick)
            clock.seconds = 1.0 if peer.setting.workers == faster else 2.0
            return clock

        peer._run = run  # type: ignore[assignment]
        assert peer.prepare()["workers"] == faster
        assert asked == [0, 0, 1]  # once more to count operations


@pytest.mark.parametrize("loop", ["transformers", "timm-loop"])
def test_its_operations_are_those_of_the_whole_network(tmp_path: Path, loop: str) -> None:
    """Three times the forward pass, but for the gradient of the images."""
    if loop == "transformers":
        pytest.importorskip("transformers")
    peer = peer_of(tmp_path, loop)
    found = peer.prepare()["operations"]
    macs = count_macs(peer.setting.network.eval(), (16, 16))
    assert 0.9 < found / (3 * 2 * 8 * macs) < 1.0


def test_what_workers_loaded_before_is_not_timed(tmp_path: Path) -> None:
    peer = peer_of(tmp_path, "timm-loop")
    peer.loop = lambda setting, steps, on_step: [on_step() for _ in range(steps)]
    peer.prepare()
    peer.setting.workers = 4
    before = peer.line.steps
    peer.train(warmup=3, steps=5)
    assert peer.line.steps - before == 3 + 5 + 4 * 2
    assert len(peer.setting.images) == 8 * (3 + 5 + 4 * 2)


def test_unequal_parts_are_refused(tmp_path: Path) -> None:
    peer = peer_of(tmp_path, "timm-loop", "data.micro_batch=3")
    with refused("recipe.unsupported", "data.micro_batch: 3", "8 images"):
        peer.prepare()

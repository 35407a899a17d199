"""Peer loops get our network and images, and as many batches of the same shape."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import StepCounter
from forked_runs import tiny_recipe
from logs import logging_nothing
from refusals import refused
from torch import Tensor, nn

from finetune.bench.peers import DecodedImages, PeerLoop
from finetune.bench.timer import StepTimer
from finetune.models.summary import summarize_model
from finetune.training.setup import build_setup

OVERRIDES = (
    *("data.batch_size=8", "data.micro_batch=4", "data.num_train=64", "run.test=false"),
    # PIL clips the bicubic overshoot between its two passes, our pipeline at the end
    *("data.train=resize", "data.interpolation=bilinear"),
    *("optim.ema_decay=0.9", "optim.label_smoothing=0.1"),
)
CPU = torch.device("cpu")


def create_peer(tmp_path: Path, loop: str, *overrides: str, precision: str = "fp32") -> PeerLoop:
    return PeerLoop(
        StepCounter(),
        recipe=tiny_recipe(*OVERRIDES, *overrides),
        loop=loop,
        precision=precision,
        device="cpu",
        folder=str(tmp_path),
    )


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use at most one worker.

    Restore the SIGCHLD handler: torch's would raise wherever a worker of another test ends.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_network_and_images_match_our_first_steps(tmp_path: Path) -> None:
    peer = create_peer(tmp_path, "timm-loop", "model.dropout=0.3")
    peer.loop = lambda peer, steps, on_step: [on_step() for _ in range(steps)]
    peer.prepare()
    with logging_nothing():
        setup = build_setup(peer.recipe, device=CPU, show_progress=False)
    split, indices = setup.source.splits["train"], setup.sampler.epoch_order(0)
    images = peer.images
    assert len(images.images) == setup.num_samples  # fewer than the maximum for a large dataset
    for position, index in enumerate(indices.tolist()):
        assert np.array_equal(np.asarray(images.images[position]), split.decode(index))
        assert images.labels[position] == split.labels[index]
    ours, theirs = setup.built.model.state_dict(), peer.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rates = [m.p for m in peer.network.modules() if isinstance(m, nn.Dropout)]
    assert 0.3 in rates


def test_picks_the_faster_number_of_workers(tmp_path: Path) -> None:
    for faster in (0, 1):
        peer, tried_workers = create_peer(tmp_path, "timm-loop"), []

        def run(
            steps: int, *, warmup: int = 1, peer=peer, tried_workers=tried_workers, faster=faster
        ) -> Any:
            tried_workers.append(peer.workers)
            clock = StepTimer(CPU, warmup=1, steps=steps, tick=peer.progress.tick)
            clock.seconds = 1.0 if peer.workers == faster else 2.0
            return clock

        peer._run_timed = run  # type: ignore[assignment]
        assert peer.prepare()["workers"] == faster
        assert tried_workers == [0, 0, 1]  # one extra run counts operations


@pytest.mark.parametrize("loop", ["transformers", "timm-loop"])
def test_operations_match_the_whole_network(tmp_path: Path, loop: str) -> None:
    """Three forward passes, minus the gradient of the images."""
    if loop == "transformers":
        pytest.importorskip("transformers")
    peer = create_peer(tmp_path, loop)
    found = peer.prepare()["operations"]
    macs = summarize_model(peer.network.eval(), (16, 16))["macs"]
    assert 0.9 < found / (3 * 2 * 8 * macs) < 1.0


def test_prefetched_batches_are_not_timed(tmp_path: Path) -> None:
    peer = create_peer(tmp_path, "timm-loop")
    peer.loop = lambda peer, steps, on_step: [on_step() for _ in range(steps)]
    peer.prepare()
    peer.workers = 4
    before = peer.progress.steps
    peer.train(warmup=3, steps=5)
    assert peer.progress.steps - before == 3 + 5 + 4 * 2
    assert len(peer.images) == 8 * (3 + 5 + 4 * 2)


def test_uneven_micro_batches_are_unsupported(tmp_path: Path) -> None:
    peer = create_peer(tmp_path, "timm-loop", "data.micro_batch=3")
    with refused("recipe.unsupported", "data.micro_batch: 3", "8 images"):
        peer.prepare()


class InputRecorder:
    """Records the inputs of a network and its autocast dtypes."""

    def __init__(self, network: nn.Module) -> None:
        self.batches: list[Tensor] = []
        self.autocast: set[Any] = set()
        self.handle = network.register_forward_pre_hook(self.record)

    def record(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.batches.append(inputs[0].detach().clone())
        assert module.training
        enabled = torch.is_autocast_enabled("cpu")
        self.autocast.add(torch.get_autocast_dtype("cpu") if enabled else torch.float32)


def our_images(peer: PeerLoop) -> Tensor:
    """The images of the peer after our own pipeline, without augmentation."""
    with logging_nothing():
        setup = build_setup(peer.recipe, device=CPU, show_progress=False)
    images = peer.images.images
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    return setup.train_pipeline(pixels, keys=np.zeros(len(pixels), np.uint64))


def check_loop(peer: PeerLoop, dtype: torch.dtype) -> None:
    """Check one round: steps, shapes, pixels, dtype, and changed weights."""
    prepared = peer.prepare()
    assert prepared["workers"] in (0, 1)
    assert prepared["seconds_to_first_step"] > 0
    network, recorder = peer.network, InputRecorder(peer.network)
    before = [p.detach().clone() for p in network.parameters()]
    steps = peer.progress.steps
    assert peer.train(warmup=1, steps=2) > 0
    recorder.handle.remove()
    num_steps = 3 + 2 * prepared["workers"]
    assert peer.progress.steps - steps == num_steps
    assert len(recorder.batches) == 2 * num_steps  # micro-batches
    assert {tuple(batch.shape) for batch in recorder.batches} == {(4, 3, 16, 16)}
    assert recorder.autocast == {dtype}
    changed = [not torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True)]
    assert any(changed)
    # each image equals one of ours within two levels, in another order
    ours = our_images(peer).flatten(1)
    theirs = torch.cat(recorder.batches).float().flatten(1)
    nearest = (theirs[:, None] - ours[None]).abs().amax(dim=2).amin(dim=1)
    level = 1 / 255 / min(peer.setup.preprocessing.std)
    assert nearest.max() <= 2 * level


def test_timm_loop(tmp_path: Path) -> None:
    check_loop(create_peer(tmp_path, "timm-loop", precision="bf16"), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_transformers_trainer(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("transformers")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    check_loop(create_peer(tmp_path, "transformers", precision=precision), dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_transformers_trainer_with_sgd(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_loop(create_peer(tmp_path, "transformers", "optim.name=sgd"), torch.float32)


def test_images_repeat_cyclically() -> None:
    with logging_nothing():
        split = build_setup(tiny_recipe(*OVERRIDES), device=CPU, show_progress=False).source.splits[
            "train"
        ]
    images = DecodedImages(split, [3, 1])
    images.num_samples = 5
    assert len(images) == 5
    assert images[4][0] is images[0][0]
    assert images[4][1] == split.labels[3]

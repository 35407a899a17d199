"""A trial: train a recipe for some steps and evaluate it, without a run directory."""

# B batch, N images, K classes

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from finetune.data.feature_loader import AnyLoader
from finetune.log import only_warnings
from finetune.models.freeze import set_train_mode
from finetune.models.lora import load_base_state_dict
from finetune.progress import step_bar
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.accelerator import create_accelerator
from finetune.training.build_state import build_trainer_state
from finetune.training.meter import TrainMeter
from finetune.training.setup import build_setup
from finetune.training.trainer_state import TrainerState

__all__ = ["TrialEvaluation", "run_trial"]


class TrialEvaluation(NamedTuple):
    """The evaluation of a trial on each image of the validation split.

    Attributes:
        loss_N: cross-entropy of each image; for multi-label data, its mean over classes.
        correct_N: 1 for each image that is classified correctly; for multi-label data, the fraction
            of its labels that are predicted correctly.
        state: the network's tensors, which change when the trial continues.
    """

    loss_N: NDArray[np.float64]
    correct_N: NDArray[np.float64]
    state: Mapping[str, Tensor]


def run_trial(
    recipe: Recipe, *, label: str, init_from: Mapping[str, Tensor] | None = None
) -> Generator[TrialEvaluation, None, None]:
    """Train a recipe on this process, and yield each evaluation on the validation split.

    Nothing is written except the cache of decoded images and features. Only warnings are logged.

    Args:
        recipe: the recipe; it evaluates every `run.eval_every` steps, and at the end.
        label: label of the progress bar.
        init_from: the network's tensors to start from; None for the pretrained weights.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-trial-") as folder, only_warnings():
        accelerator = create_accelerator(recipe.run)
        setup = build_setup(recipe, device=accelerator.device, show_progress=True)
        if init_from is not None:
            load_base_state_dict(setup.built.model, init_from)
        trainer = build_trainer_state(setup, accelerator, RunDir(folder))
        loader = trainer.build_train_loader()
        setup = trainer.setup  # counts readable images only
        val_loader = trainer.build_loader(setup.source.splits["val"], train=False)
        meter = TrainMeter(accelerator.device, 0.0)
        trainer.start(meter)
        all_steps = loader.train_steps(
            setup.sampler, range(setup.num_steps), micro_batch_size=trainer.micro_batch_size
        )
        with (
            contextlib.closing(all_steps) as steps,
            step_bar(total=setup.num_steps, start=0, label=label) as progress_bar,
        ):
            for num_micro_batches, micro_batches in steps:
                trainer.train_step(num_micro_batches, micro_batches, meter)
                progress_bar.update()
                if setup.is_eval_step(trainer.counters.step):
                    yield _evaluate(trainer, val_loader)
                    set_train_mode(trainer.model)


@torch.no_grad()
def _evaluate(trainer: TrainerState, loader: AnyLoader) -> TrialEvaluation:
    """Evaluate each image of the validation split."""
    network = trainer.eval_model().eval()
    losses, correct = [], []
    with trainer.accelerator.autocast():
        for batch in loader.eval_batches(batch_size=trainer.recipe.data.eval_batch_size):
            logits_BK = network(batch.images_BCHW).float()[: len(batch.labels_B)]
            labels = batch.labels_B
            if labels.ndim == 2:
                truth_BK = labels.float()
                loss_BK = binary_cross_entropy_with_logits(logits_BK, truth_BK, reduction="none")
                losses.append(loss_BK.mean(dim=1))
                correct.append(((logits_BK > 0) == (truth_BK > 0)).float().mean(dim=1))
            else:
                losses.append(cross_entropy(logits_BK, labels, reduction="none"))
                correct.append((logits_BK.argmax(dim=1) == labels).float())
    return TrialEvaluation(
        loss_N=torch.cat(losses).cpu().double().numpy(),
        correct_N=torch.cat(correct).cpu().double().numpy(),
        state=network.state_dict(),
    )

"""From a setup to the state that training begins with: kernels, EMA, optimiser, compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.utils import ModelEmaV3

from finetune.errors import RecipeError
from finetune.recipe.load import Recipe
from finetune.run.directory import RunDir
from finetune.run.environment import dtype_of
from finetune.training.compile import choose_kernels, compiles, training_operations
from finetune.training.distillation import Distillation
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.launch import is_sharded
from finetune.training.optim import build_optimizer
from finetune.training.setup import TrainingSetup
from finetune.training.trainer_state import TrainerState

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["build_trainer_state"]


def build_trainer_state(
    setup: TrainingSetup, accelerator: Accelerator, run: RunDir
) -> TrainerState:
    """Move the network to its device, make it fast, and add what trains it.

    Args:
        setup: its network is changed in place.
        run: where checkpoints will be written; nothing is written yet.
    Raises: RecipeError or SetupError for an optimiser or a setting that is not possible here.
    """
    recipe, device = setup.recipe, accelerator.device
    network, optim = setup.built.model, recipe.optim
    network.to(device)
    sharded = is_sharded(accelerator)
    if sharded:
        _refuse_sharded(recipe)
    choose_kernels(network, device=device, dtype=dtype_of(accelerator), sharded=sharded)
    distillation = None
    if recipe.distill is not None:
        distillation = Distillation(recipe.distill, setup, accelerator, run)
    frozen = None
    if recipe.model.freeze == "backbone":  # before the network is copied and wrapped
        frozen = FrozenBackbone(setup, accelerator)
    ema = ModelEmaV3(network, decay=optim.ema_decay) if optim.ema_decay else None
    optimizer = build_optimizer(
        network,
        name=optim.name,
        lr=optim.lr,
        momentum=optim.momentum,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        decay=optim.decay,
        layer_decay=optim.layer_decay,
        args=optim.args,
        sharded=sharded,
    )
    images = setup.steps * recipe.data.batch_size // accelerator.num_processes
    compiled = compiles(
        recipe.model.compile if _is_compilable(recipe, accelerator) else False,
        device=device,
        sharded=sharded,
        images=0 if frozen is not None and frozen.gives_features else images,
        operations=lambda: training_operations(network, setup.preprocessing.image_size),
        notice=setup.notice,
    )
    if compiled:
        network.compile()
    model, prepared = accelerator.prepare(network, optimizer)
    return TrainerState(
        setup,
        accelerator,
        run,
        model=model,
        optimizer=prepared,
        ema=ema,
        frozen=frozen,
        distillation=distillation,
        compiled=compiled,
    )


def _is_compilable(recipe: Recipe, accelerator: Accelerator) -> bool:
    """False for what torch.compile fails on, or would let wait for other processes."""
    adapter = recipe.model.adapter
    waits = recipe.model.sync_bn and accelerator.num_processes > 1
    return not waits and (adapter is None or adapter.kind != "dora")


def _refuse_sharded(recipe: Recipe) -> None:
    """Refuse what FSDP's pieces of the weights do not allow."""
    keys = {
        "optim.ema_decay": recipe.optim.ema_decay,
        "model.adapter": recipe.model.adapter,
        "model.sync_bn": recipe.model.sync_bn,
        "distill": recipe.distill,
    }
    for key, asked in keys.items():
        if asked:
            raise RecipeError(
                f"{key}: not with FSDP; remove the key or train with DDP", code="recipe.conflict"
            )

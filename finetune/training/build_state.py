"""Build the training state from a setup: kernels, EMA, optimizer, compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.utils import ModelEmaV3

from finetune.errors import RecipeError
from finetune.models.architectures.transformers_classifier import TransformersClassifier
from finetune.precision import autocast_dtype
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.training.accelerator import is_sharded
from finetune.training.compile import choose_kernels, should_compile, training_flops
from finetune.training.distillation import Distillation
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.optim import build_optimizer
from finetune.training.setup import TrainingSetup
from finetune.training.trainer_state import TrainerState

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["build_trainer_state"]


def build_trainer_state(
    setup: TrainingSetup, accelerator: Accelerator, run: RunDir
) -> TrainerState:
    """Move the network to its device, choose its kernels, and add optimizer, EMA and teacher.

    Args:
        setup: the training setup; its network is changed in place.
        run: the run directory; nothing is written to it.
    Raises: RecipeError or SetupError for an optimizer or a setting that is not supported here.
    """
    recipe, device = setup.recipe, accelerator.device
    network, optim = setup.built.model, recipe.optim
    network.to(device)
    sharded = is_sharded(accelerator)
    if sharded:
        _check_fsdp_support(recipe)
    choose_kernels(network, device=device, dtype=autocast_dtype(accelerator), sharded=sharded)
    distillation = None
    if recipe.distill is not None:
        distillation = Distillation(recipe.distill, setup, accelerator)
    frozen_backbone = None
    if recipe.model.freeze == "backbone":  # before the network is copied or wrapped
        frozen_backbone = FrozenBackbone(setup, accelerator)
    ema = None
    if optim.ema_decay:
        ema = ModelEmaV3(network, decay=optim.ema_decay, use_warmup=optim.ema_warmup)
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
    images_per_process = setup.num_steps * recipe.data.batch_size // accelerator.num_processes
    is_compiled = should_compile(
        recipe.model.compile if _supports_compile(recipe, accelerator) else False,
        device=device,
        sharded=sharded,
        num_images=0
        if frozen_backbone is not None and frozen_backbone.uses_cached_features
        else images_per_process,
        count_flops=lambda: training_flops(network, setup.preprocessing.image_size),
    )
    if is_compiled:
        network.compile()
    if accelerator.ddp_handler is not None and isinstance(network, TransformersClassifier):
        # The logits may not depend on every parameter: SigLIP's do not use its pooling head.
        accelerator.ddp_handler.find_unused_parameters = True
    model, prepared_optimizer = accelerator.prepare(network, optimizer)
    return TrainerState(
        setup,
        accelerator,
        run,
        model=model,
        optimizer=prepared_optimizer,
        ema=ema,
        frozen_backbone=frozen_backbone,
        distillation=distillation,
        is_compiled=is_compiled,
    )


def _supports_compile(recipe: Recipe, accelerator: Accelerator) -> bool:
    """False if torch.compile would fail (DoRA) or make ranks wait for one another (sync_bn)."""
    adapter = recipe.model.adapter
    syncs_ranks = recipe.model.sync_bn and accelerator.num_processes > 1
    return not syncs_ranks and (adapter is None or adapter.kind != "dora")


def _check_fsdp_support(recipe: Recipe) -> None:
    """Raise RecipeError for settings that do not work with FSDP's sharded weights."""
    unsupported = {
        "optim.ema_decay": recipe.optim.ema_decay,
        "model.adapter": recipe.model.adapter,
        "model.sync_bn": recipe.model.sync_bn,
        "distill": recipe.distill,
    }
    for key, value in unsupported.items():
        if value:
            raise RecipeError(
                f"{key}: not supported with FSDP; remove the key or train with DDP",
                code="recipe.conflict",
            )

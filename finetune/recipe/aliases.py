"""Aliases: option names of other libraries and the recipe keys for them; mutually exclusive keys.

The option names are from the training scripts of timm and transformers, Ultralytics and Lightning.
"""

from __future__ import annotations

import re

__all__ = ["ALIASES", "MUTUALLY_EXCLUSIVE_KEYS", "alias_hint", "resolve_alias"]

# Overriding the left key on the command line removes the right one from the recipe.
MUTUALLY_EXCLUSIVE_KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("optim", "steps"): ("optim", "epochs"),
    ("optim", "epochs"): ("optim", "steps"),
    ("optim", "warmup_steps"): ("optim", "warmup_epochs"),
    ("optim", "warmup_epochs"): ("optim", "warmup_steps"),
}

_MICRO_BATCH_HINT = (
    "set 'data.micro_batch' to data.batch_size / (accumulation steps * processes), where "
    "data.batch_size is the number of images per optimizer step, over all processes"
)
_WARMUP_HINT = "use 'optim.warmup_steps' or 'optim.warmup_epochs'"
_CROP_HINT = "use random_resized_crop in 'data.train'"
_TRAIN_HINT = "write it into 'data.train'; see: finetune recipes help data.train"
_OUT_HINT = "use the option --out DIR"
_RESUME_HINT = "use the option --resume"
_PROCESSES_HINT = "use accelerate launch --num_processes N"
_DEVICE_HINT = "choose the GPU with the environment variable CUDA_VISIBLE_DEVICES"
_CLASSES_HINT = "remove it, the classes come from the data"

# {option name of another library: recipe key, key=value, or advice}.
ALIASES = {
    # learning rate and optimizer
    "learning_rate": "optim.lr",
    "base_lr": "optim.lr",
    "lr_base": "optim.lr",
    "max_lr": "optim.lr",
    "lr0": "optim.lr",
    "lrf": "set 'optim.min_lr', the final learning rate itself, not a fraction of the initial one",
    "eta_min": "optim.min_lr",
    "lr_min": "optim.min_lr",
    "warmup_bias_lr": "optim.warmup_lr",
    "opt": "optim.name",
    "optimizer": "optim.name",
    "optimiser": "optim.name",
    "wd": "optim.weight_decay",
    "l2": "optim.weight_decay",
    "opt_betas": "optim.betas",
    "adam_beta1": "use 'optim.betas', a list of two",
    "adam_beta2": "use 'optim.betas', a list of two",
    "opt_eps": "use 'optim.args.eps'",
    "eps": "use 'optim.args.eps'",
    "adam_epsilon": "use 'optim.args.eps'",
    "clip_grad": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "gradient_clip_val": "optim.clip_norm",
    "sched": "optim.schedule",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "cos_lr": "optim.schedule=cosine",
    "decay_rate": "optim.step_factor",
    "decay_epochs": "use 'optim.step_every', in steps",
    "layer_wise_lr_decay": "optim.layer_decay",
    "llrd": "optim.layer_decay",
    # training length
    "num_epochs": "optim.epochs",
    "max_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "num_steps": "optim.steps",
    "max_steps": "optim.steps",
    "max_iters": "optim.steps",
    "iterations": "optim.steps",
    "warmup": _WARMUP_HINT,
    "warmup_ratio": _WARMUP_HINT,
    "early_stopping": "run.patience",
    "early_stopping_patience": "run.patience",
    "early_stop": "run.patience",
    # loss and weight averaging
    "smoothing": "optim.label_smoothing",
    "label_smoothing_factor": "optim.label_smoothing",
    "class_weight": "optim.class_weights",
    "focal_loss": "set 'optim.focal_gamma', for example 2",
    "fl_gamma": "optim.focal_gamma",
    "gamma": "use 'optim.focal_gamma' for the focal loss, 'optim.step_factor' for the schedule",
    "focal_alpha": "use 'optim.class_weights'",
    "tau": "use 'optim.logit_adjustment'",
    "bce_loss": "data.task=multilabel",
    "problem_type": "data.task=multilabel",
    "multi_label": "data.task=multilabel",
    "asl": "use 'optim.asymmetric_loss'",
    "gamma_neg": "use 'optim.asymmetric_loss.gamma_neg'",
    "gamma_pos": "use 'optim.asymmetric_loss.gamma_pos'",
    "ema": "set 'optim.ema_decay', for example 0.9998",
    "model_ema": "set 'optim.ema_decay', for example 0.9998",
    "model_ema_decay": "optim.ema_decay",
    "model_ema_warmup": "optim.ema_warmup",
    # batch
    "batch": "data.batch_size",
    "bs": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "per_device_train_batch_size": "set 'data.batch_size', the images of one optimizer step "
    "over all processes",
    "validation_batch_size": "data.eval_batch_size",
    "per_device_eval_batch_size": "data.eval_batch_size",
    "accumulation": _MICRO_BATCH_HINT,
    "accumulation_steps": _MICRO_BATCH_HINT,
    "accumulate_grad_batches": _MICRO_BATCH_HINT,
    "gradient_accumulation": _MICRO_BATCH_HINT,
    "gradient_accumulation_steps": _MICRO_BATCH_HINT,
    "grad_accum": _MICRO_BATCH_HINT,
    "grad_accum_steps": _MICRO_BATCH_HINT,
    # data
    "dataset": "data.source",
    "dataset_name": "data.source",
    "data_dir": "use 'data.source', for example folder:PATH",
    "data_path": "use 'data.source', for example folder:PATH",
    "train_dir": "use 'data.source', for example folder:PATH with train/ and val/ in it",
    "image_column_name": "data.image_column",
    "label_column_name": "data.label_column",
    "val_split": "data.val_fraction",
    "train_val_split": "data.val_fraction",
    "val_size": "data.val_fraction",
    "max_train_samples": "data.num_train",
    "max_eval_samples": "data.num_val",
    "num_workers": "data.workers",
    "dataloader_num_workers": "data.workers",
    "weighted_sampler": "use 'data.sampling', class_balanced or square_root",
    "imb_factor": "use 'data.long_tail', which is 1 / imb_factor: 100 instead of 0.01",
    "num_classes": _CLASSES_HINT,
    "num_labels": _CLASSES_HINT,
    "mixup": _TRAIN_HINT,
    "cutmix": _TRAIN_HINT,
    "auto_augment": _TRAIN_HINT,
    "aa": _TRAIN_HINT,
    "augment": _TRAIN_HINT,
    "augmentation": _TRAIN_HINT,
    "transforms": _TRAIN_HINT,
    "operations": _TRAIN_HINT,
    "reprob": _TRAIN_HINT,
    "erasing": _TRAIN_HINT,
    "hflip": _TRAIN_HINT,
    "vflip": _TRAIN_HINT,
    "fliplr": _TRAIN_HINT,
    "flipud": _TRAIN_HINT,
    "degrees": _TRAIN_HINT,
    "color_jitter": _TRAIN_HINT,
    "scale": _CROP_HINT,
    "ratio": _CROP_HINT,
    # model
    "model_name_or_path": "model.name",
    "architecture": "model.name",
    "arch": "model.name",
    "backbone": "model.name",
    "checkpoint": "model.name",
    "initial_checkpoint": "model.name",
    "weights": "model.name",
    "imgsz": "model.image_size",
    "img_size": "model.image_size",
    "input_size": "model.image_size",
    "resolution": "model.image_size",
    "drop": "model.dropout",
    "drop_rate": "model.dropout",
    "attn_drop_rate": "model.attention_dropout",
    "drop_path_rate": "model.drop_path",
    "stochastic_depth": "model.drop_path",
    "freeze_backbone": "model.freeze=backbone",
    "lp_ft": "use 'optim.stages'",
    "linear_probe_epochs": "use 'optim.stages'",
    "lora": "set 'model.adapter.kind=lora'",
    "dora": "set 'model.adapter.kind=dora'",
    "use_dora": "set 'model.adapter.kind=dora'",
    "peft": "use 'model.adapter'",
    "lora_rank": "use 'model.adapter.rank'",
    "lora_r": "use 'model.adapter.rank'",
    "lora_alpha": "use 'model.adapter.alpha'",
    "lora_dropout": "use 'model.adapter.dropout'",
    "target_modules": "use 'model.adapter.targets'",
    "gradient_checkpointing": "model.grad_checkpointing",
    "sync_batchnorm": "model.sync_bn",
    "syncbn": "model.sync_bn",
    "dist_bn": "set 'model.sync_bn'; without it, evaluation averages running statistics over "
    "processes",
    "freeze_batchnorm": "model.freeze_bn",
    "freeze_batch_norm": "model.freeze_bn",
    "norm_eval": "model.freeze_bn",
    "channels_last": "remove it, convolutional models use it automatically if it is faster",
    "torch_compile": "model.compile",
    "torchcompile": "model.compile",
    # distillation
    "teacher_model": "distill.teacher",
    "kd_model_name": "distill.teacher",
    "distillation_type": "use 'distill.kind', logits or features",
    "kd_distill_type": "use 'distill.kind', logits or features",
    "kd_temperature": "distill.temperature",
    "distillation_tau": "distill.temperature",
    "distillation_alpha": "distill.weight",
    "distill_loss_weight": "use 'distill.weight', a fraction of the total loss",
    # run
    "fp16": "run.precision=fp16",
    "bf16": "run.precision=bf16",
    "amp": "use 'run.precision', auto, bf16, fp16 or fp32",
    "mixed_precision": "run.precision",
    "dtype": "run.precision",
    "random_seed": "run.seed",
    "output": _OUT_HINT,
    "output_dir": _OUT_HINT,
    "out": _OUT_HINT,
    "out_dir": _OUT_HINT,
    "save_dir": _OUT_HINT,
    "default_root_dir": _OUT_HINT,
    "project": _OUT_HINT,
    "resume": _RESUME_HINT,
    "resume_from_checkpoint": _RESUME_HINT,
    "log_interval": "run.log_every",
    "logging_steps": "run.log_every",
    "log_every_n_steps": "run.log_every",
    "eval_steps": "run.eval_every",
    "val_check_interval": "use 'run.eval_every', in steps",
    "save_steps": "run.save_every",
    "save_period": "use 'run.save_every', in steps",
    "save_total_limit": "run.keep_checkpoints",
    "checkpoint_hist": "run.keep_checkpoints",
    "metric_for_best_model": "run.best",
    "eval_metric": "run.best",
    "report_to": "run.trackers",
    "logger": "run.trackers",
    "log_wandb": "run.trackers=wandb",
    "hub_model_id": "run.push_to",
    "push_to_hub": "set 'run.push_to', owner/name on the Hub",
    "hub_private_repo": "run.push_private",
    "nproc_per_node": _PROCESSES_HINT,
    "num_gpus": _PROCESSES_HINT,
    "gpus": _PROCESSES_HINT,
    "devices": _PROCESSES_HINT,
    "device": _DEVICE_HINT,
}


def resolve_alias(name: str) -> tuple[str, str] | None:
    """Return the (section, key) for an option name of another library.

    None for an unknown name, or if no single key corresponds to it.
    """
    match = re.fullmatch(r"(\w+)\.(\w+)(=.*)?", _look_up_alias(name))
    return (match[1], match[2]) if match else None


def alias_hint(name: str, value: str = "") -> str:
    """Return the end of an error message about an option name of another library.

    Args:
        name: the option name, with underscores or hyphens.
        value: the value as the user wrote it, to include in the suggestion; "" to omit it.
    Returns: "; did you mean 'optim.lr=3'?" or "; <advice>"; "" for an unknown name.
    """
    replacement = _look_up_alias(name)
    if not replacement or resolve_alias(name) is None:
        return replacement and f"; {replacement}"
    suggestion = replacement if "=" in replacement or not value else f"{replacement}={value}"
    return f"; did you mean '{suggestion}'?"


def _look_up_alias(name: str) -> str:
    return ALIASES.get(name.lower().replace("-", "_"), "")

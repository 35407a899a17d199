"""Names of other libraries and the keys that mean the same here; keys that replace one another.

The names are those of timm's and transformers' training scripts, Ultralytics and Lightning.
"""

from __future__ import annotations

import re

__all__ = ["REPLACES", "hint_of", "key_of"]

# An override of the one takes the other out of the recipe.
REPLACES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("optim", "steps"): ("optim", "epochs"),
    ("optim", "epochs"): ("optim", "steps"),
    ("optim", "warmup_steps"): ("optim", "warmup_epochs"),
    ("optim", "warmup_epochs"): ("optim", "warmup_steps"),
}

_MICRO_BATCH = (
    "set 'data.micro_batch', the images at once: data.batch_size, which counts all images of a "
    "step, divided by the steps of accumulation"
)
_WARMUP = "use 'optim.warmup_steps' or 'optim.warmup_epochs'"
_CROP = "use random_resized_crop in 'data.train'"
_TRAIN = "write it into 'data.train'; see: finetune recipes help data.train"
_OUT = "use the option --out DIR"
_RESUME = "use the option --resume"
_PROCESSES = "use accelerate launch --num_processes N"
_DEVICE = "choose the GPU with CUDA_VISIBLE_DEVICES"
_CLASSES = "remove it: the classes come from the data"

# Another library's name to our key, to a key with its value, or to advice in words.
_OTHER_NAMES = {
    # learning rate and optimiser
    "learning_rate": "optim.lr",
    "base_lr": "optim.lr",
    "lr_base": "optim.lr",
    "max_lr": "optim.lr",
    "lr0": "optim.lr",
    "lrf": "set 'optim.min_lr', the last learning rate itself and not a share of the first",
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
    # length
    "num_epochs": "optim.epochs",
    "max_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "num_steps": "optim.steps",
    "max_steps": "optim.steps",
    "max_iters": "optim.steps",
    "iterations": "optim.steps",
    "warmup": _WARMUP,
    "warmup_ratio": _WARMUP,
    "early_stopping": "run.patience",
    "early_stopping_patience": "run.patience",
    "early_stop": "run.patience",
    # loss and average of the weights
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
    # batch
    "batch": "data.batch_size",
    "bs": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "per_device_train_batch_size": "set 'data.batch_size', which counts the images of a step over "
    "all processes",
    "validation_batch_size": "data.eval_batch_size",
    "per_device_eval_batch_size": "data.eval_batch_size",
    "accumulation": _MICRO_BATCH,
    "accumulation_steps": _MICRO_BATCH,
    "accumulate_grad_batches": _MICRO_BATCH,
    "gradient_accumulation": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "grad_accum": _MICRO_BATCH,
    "grad_accum_steps": _MICRO_BATCH,
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
    "imb_factor": "use 'data.long_tail', whose 100 is a factor of 0.01",
    "num_classes": _CLASSES,
    "num_labels": _CLASSES,
    "mixup": _TRAIN,
    "cutmix": _TRAIN,
    "auto_augment": _TRAIN,
    "aa": _TRAIN,
    "augment": _TRAIN,
    "reprob": _TRAIN,
    "erasing": _TRAIN,
    "hflip": _TRAIN,
    "vflip": _TRAIN,
    "fliplr": _TRAIN,
    "flipud": _TRAIN,
    "degrees": _TRAIN,
    "color_jitter": _TRAIN,
    "scale": _CROP,
    "ratio": _CROP,
    # network
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
    "dist_bn": "set 'model.sync_bn'; without it, an evaluation averages running statistics over "
    "processes",
    "freeze_batchnorm": "model.freeze_bn",
    "freeze_batch_norm": "model.freeze_bn",
    "norm_eval": "model.freeze_bn",
    "channels_last": "remove it: networks that convolve have theirs last where that is faster",
    "torch_compile": "model.compile",
    "torchcompile": "model.compile",
    # teacher
    "teacher_model": "distill.teacher",
    "kd_model_name": "distill.teacher",
    "distillation_type": "use 'distill.kind', logits or features",
    "kd_distill_type": "use 'distill.kind', logits or features",
    "kd_temperature": "distill.temperature",
    "distillation_tau": "distill.temperature",
    "distillation_alpha": "distill.weight",
    "distill_loss_weight": "use 'distill.weight', a share of the whole loss",
    # run
    "fp16": "run.precision=fp16",
    "bf16": "run.precision=bf16",
    "amp": "use 'run.precision', auto, bf16, fp16 or fp32",
    "mixed_precision": "run.precision",
    "dtype": "run.precision",
    "random_seed": "run.seed",
    "output": _OUT,
    "output_dir": _OUT,
    "out": _OUT,
    "out_dir": _OUT,
    "save_dir": _OUT,
    "default_root_dir": _OUT,
    "project": _OUT,
    "resume": _RESUME,
    "resume_from_checkpoint": _RESUME,
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
    "push_to_hub": "set 'run.push_to', owner/name on the hub",
    "hub_private_repo": "run.push_private",
    "nproc_per_node": _PROCESSES,
    "num_gpus": _PROCESSES,
    "gpus": _PROCESSES,
    "devices": _PROCESSES,
    "device": _DEVICE,
}


def key_of(name: str) -> tuple[str, str] | None:
    """Return the (section, key) that another library's name stands for; None if there is none."""
    match = re.fullmatch(r"(\w+)\.(\w+)(=.*)?", _meaning(name))
    return (match[1], match[2]) if match else None


def hint_of(name: str, value: str = "") -> str:
    """Return the end of a message about a key that only another library has.

    Args:
        name: of the key, with underscores or hyphens.
        value: as written with it, to be shown behind the right key; "" for none.
    Returns: "; did you mean 'optim.lr=3'?", or advice; "" if no library is known to have the name.
    """
    meaning = _meaning(name)
    if not meaning or key_of(name) is None:
        return meaning and f"; {meaning}"
    written = meaning if "=" in meaning or not value else f"{meaning}={value}"
    return f"; did you mean '{written}'?"


def _meaning(name: str) -> str:
    return _OTHER_NAMES.get(name.lower().replace("-", "_"), "")

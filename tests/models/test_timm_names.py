"""models/weights/timm_names.py: suggestions for wrong names, and ImageNet class names."""

from __future__ import annotations

from finetune.models.weights.timm_names import imagenet_class_names, suggest_model_name


def test_suggests_the_nearest_name() -> None:
    assert "did you mean 'vit_base_patch16_224'" in suggest_model_name("vit_bse_patch16_224")
    assert "'vit_base_patch16_224.augreg_in21k'" in suggest_model_name(
        "vit_base_patch16_224.augreg_in21"
    )
    assert "hf-hub:" in suggest_model_name("nothing_like_it_at_all_1234")


def test_suggestions_for_families_that_timm_lacks() -> None:
    assert "transformers has it" in suggest_model_name("cvt_13")
    assert "'deit_small_patch16_224'" in suggest_model_name("t2t_vit_14")
    assert "not in timm" not in suggest_model_name("pvt_v2_b9")


def test_imagenet_class_names_are_distinct() -> None:
    names = imagenet_class_names(1000)
    assert names is not None
    assert len(set(names)) == 1000
    assert names[0].startswith("tench")
    assert imagenet_class_names(7) is None

"""Groups of images: found in a column or in names, and kept in one split (`data.group`)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from recipe_texts import recipe_error, tiny_recipe_text
from refusals import refused
from small_datasets import (
    class_counts,
    random_png,
    write_file,
    write_image_folder,
    write_parquet,
)
from tar_shards import tar_bytes

from finetune.data.leakage import find_leakage
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.data.splits import hold_out_validation, merge_val


def write_grouped_csv(folder: Path, groups: dict[str, dict[str, int]]) -> str:
    """Write images of groups; groups: {"p0": {"a": 3}}. Returns: the source string."""
    lines = []
    for group, counts in groups.items():
        for label, count in counts.items():
            for number in range(count):
                path = f"{label}/{group}_{number}.png"
                write_file(folder / path, random_png(len(lines)))
                lines.append(f"{path},{label},{group}")
    (folder / "labels.csv").write_text("\n".join(["path,label,patient", *lines]))
    return f"csv:{folder / 'labels.csv'}"


def groups_of(source: Source) -> dict[str, set[str]]:
    """The groups of each split, from the names of the images."""
    return {
        name: {re.findall(r"/(\w+)_", split.name_of(i))[0] for i in range(len(split))}
        for name, split in source.splits.items()
    }


@pytest.mark.parametrize("group", ["patient", r"/(p\d+)_", r"(p[0-9]+)(?:_\d)"])
def test_groups_stay_together(tmp_path: Path, group: str) -> None:
    # 24 patients: 12 of class a, 8 of class b, 4 with both; from 1 to 5 images each
    groups = {f"p{n}": {"a": 1 + n % 5} for n in range(12)}
    groups |= {f"p{n}": {"b": 1 + n % 4} for n in range(12, 20)}
    groups |= {f"p{n}": {"a": 1, "b": 2} for n in range(20, 24)}
    source = open_source(write_grouped_csv(tmp_path, groups), group=group)
    total = np.array(class_counts(source)["train"])
    drawn = []
    for seed in range(5):
        split = hold_out_validation(source, 0.25, seed)
        by_split = groups_of(split)
        assert not by_split["train"] & by_split["val"]
        assert by_split["train"] | by_split["val"] == set(groups)
        counts = class_counts(split)
        assert np.array_equal(np.add(counts["train"], counts["val"]), total)
        assert np.abs(counts["val"] / total - 0.25).max() < 0.07
        drawn.append(by_split["val"])
        assert groups_of(hold_out_validation(source, 0.25, seed)) == by_split
        assert find_leakage(split) == []
    assert len({frozenset(one) for one in drawn}) > 1


def test_single_images_are_drawn_as_without_groups() -> None:
    plain = hold_out_validation(open_source("embedded:digits"), 0.2, 3)
    grouped = hold_out_validation(open_source("embedded:digits", group=r"row (\d+)"), 0.2, 3)
    assert np.array_equal(plain.splits["val"].rows, grouped.splits["val"].rows)


def test_a_class_in_few_groups_keeps_a_training_image(tmp_path: Path) -> None:
    groups = {"p0": {"a": 9}, "p1": {"a": 1, "b": 4}, "p2": {"b": 5}, "p3": {"c": 6}}
    source = open_source(write_grouped_csv(tmp_path, groups), group="patient")
    for seed in range(5):
        counts = class_counts(hold_out_validation(source, 0.1, seed))
        assert min(counts["train"]) > 0
        assert counts["val"][1] > 0
        assert counts["val"][2] == 0  # class c has one group
    single = {"p0": {"a": 9}, "p1": {"b": 4}}
    source = open_source(write_grouped_csv(tmp_path / "single", single), group="patient")
    with refused("data.too_few_images", "data.group"):
        hold_out_validation(source, 0.1, 0)


def test_groups_of_multilabel_images_stay_together(tmp_path: Path) -> None:
    labels = [["a"], ["a", "b"], ["b"], [], ["a", "b", "c"], ["c"]] * 10
    write_parquet(tmp_path / "train.parquet", labels, site=[n // 3 for n in range(60)])
    source = open_source(f"parquet:{tmp_path}", group="site", multilabel=True)
    split = hold_out_validation(source, 0.2, 0).splits
    assert not {*split["train"].groups} & {*split["val"].groups}
    assert 0.1 < len(split["val"]) / 60 < 0.3
    assert min(split["val"].labels.sum(axis=0)) > 0


def test_the_number_of_a_tar_shard_is_no_group(tmp_path: Path) -> None:
    members = [
        (f"patient{patient}_{index}.{suffix}", content)
        for patient in (3, 5)
        for index in range(2)
        for suffix, content in (("cls", str(index).encode()), ("png", random_png(patient + index)))
    ]
    write_file(tmp_path / "set-0000.tar", tar_bytes(members))
    source = open_source(f"tar:{tmp_path}/set-0000.tar", group=r"(\d+)")
    groups = source.splits["train"].groups
    assert groups is not None
    assert groups.tolist() == ["3", "3", "5", "5"]


def test_warns_of_groups_in_train_and_test(tmp_path: Path) -> None:
    for name, sites in (("train", ["x", "x", "y", None]), ("test", ["y", "z", None, "y"])):
        images = [{"bytes": random_png(ord(name[1]) + n), "path": None} for n in range(4)]
        write_parquet(tmp_path / f"{name}.parquet", [0, 1, 0, 1], images=images, site=sites)
    for streaming in (False, True):
        source = open_source(f"parquet:{tmp_path}", group="site", streaming=streaming)
        (warning,) = find_leakage(source)
        assert "2 of 4 images" in warning
        assert "'y'" in warning
    assert find_leakage(open_source(f"parquet:{tmp_path}")) == []


@pytest.mark.parametrize(
    "group, code, named",
    [
        ("pateint", "data.no_column", "patient"),
        (r"(q\d+)", "data.wrong_format", "q"),
    ],
)
def test_refuses_groups_that_do_not_exist(
    tmp_path: Path, group: str, code: str, named: str
) -> None:
    source = write_grouped_csv(tmp_path, {"p0": {"a": 1}, "p1": {"b": 1}})
    with refused(code, named):
        open_source(source, group=group)


def test_refuses_a_group_column_of_a_folder(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 1, "b": 1})
    with refused("data.no_column", "patient"):
        open_source(source, group="patient")


def test_refuses_wrong_expressions() -> None:
    for value in (r"'(p'", r"'(p)(\d)'", r"'(?:p)'"):
        text = tiny_recipe_text(f"group: {value}")
        assert "data.group" in recipe_error("wrong_value", text)
    text = tiny_recipe_text(r"group: '(p\d)', streaming: true", source="parquet:data")
    assert "data.group" in recipe_error("conflict", text)


def test_merge_val_keeps_groups(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_parquet(tmp_path / f"{name}.parquet", [0, 1] * 4, site=list("aabbccdd"))
    source = merge_val(open_source(f"parquet:{tmp_path}", group="site"))
    split = hold_out_validation(source, 0.3, 0).splits
    assert not {*split["train"].groups} & {*split["val"].groups}

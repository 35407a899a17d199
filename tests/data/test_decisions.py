"""Decisions about images: the file, what it changes, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from logs import logged, logging_nothing
from refusals import refused
from small_datasets import class_counts, random_png, write_file, write_image_folder, write_parquet

from finetune.data.decisions import (
    Decision,
    DecisionSummary,
    apply_decisions,
    read_decisions,
    write_decisions,
)
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.data.splits import hold_out_validation, subsample

HEADER = "action,split,index,path,given,label,digest"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Three classes; train has 4, 3 and 2 images, test 2 of each."""
    counts = {"train/cat": 4, "train/cow": 3, "train/dog": 2}
    counts |= {"test/cat": 2, "test/cow": 2, "test/dog": 2}
    return open_source(write_image_folder(tmp_path / "photos", counts))


def apply_text(
    source: Source, tmp_path: Path, text: str, *, on_test: bool = False
) -> tuple[Source, DecisionSummary]:
    """Write the text of a decisions file, read it, and apply it."""
    file = tmp_path / "decisions.csv"
    file.write_bytes(text.encode())
    return apply_decisions(source, read_decisions(file), on_test=on_test)


def test_drops_relabels_and_merges(source: Source, tmp_path: Path) -> None:
    train = source.splits["train"]
    digest = train.digests[2].tobytes().hex()
    text = (
        f"{HEADER}\ndrop,train,0,train/cat/0.png,cat,,\nrelabel,train,2,,cat,dog,{digest}\n"
        "keep,,,train/cow/1.png,,,\nkeep,,,,cat,dog,\nmerge,,,,cow,cat,\n"
    )
    with logging_nothing():
        changed, summary = apply_text(source, tmp_path, text)
    assert changed.class_names == ["cat", "dog"]
    assert class_counts(changed) == {"train": [5, 3], "test": [4, 2]}
    names = [changed.splits["train"].name_of(index) for index in range(8)]
    assert names == [train.name_of(index) for index in range(1, 9)]
    assert changed.splits["train"].labels.tolist() == [0, 1, 0, 0, 0, 0, 1, 1]
    assert summary == DecisionSummary({"train": {"dropped": 1, "relabeled": 1}}, {"cow": "cat"}, 0)
    assert changed.splits["train"].fingerprint != train.fingerprint


def test_changes_test_images_only_on_request(source: Source, tmp_path: Path) -> None:
    text = "action,path,label\ndrop,test/cat/0.png,\nrelabel,test/cow/1.png,dog\n"
    unchanged, summary = apply_text(source, tmp_path, text)
    assert unchanged.splits["test"] is source.splits["test"]
    assert summary == DecisionSummary({}, {}, 2)
    changed, summary = apply_text(source, tmp_path, text, on_test=True)
    assert class_counts(changed)["test"] == [1, 1, 3]
    assert summary == DecisionSummary({"test": {"dropped": 1, "relabeled": 1}}, {}, 0)


def test_changes_multilabel_images(tmp_path: Path) -> None:
    for number in range(3):
        write_file(tmp_path / f"{number}.png", random_png(number))
    (tmp_path / "labels.csv").write_text("path,label\n0.png,cat|dog\n1.png,cow\n2.png,dog\n")
    source = open_source(f"csv:{tmp_path / 'labels.csv'}", multilabel=True)
    text = (
        "action,path,given,label\nrelabel,0.png,dog|cat,cow\nrelabel,2.png,dog,[]\n"
        "relabel,1.png,,cat|dog\nmerge,,cow,cat"
    )
    changed, summary = apply_text(source, tmp_path, text)
    assert changed.class_names == ["cat", "dog"]
    assert changed.splits["train"].labels.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert summary.splits == {"train": {"dropped": 0, "relabeled": 3}}


def test_other_images_keep_their_split(tmp_path: Path) -> None:
    """So that the accuracies with and without decisions can be compared."""
    digits = open_source("embedded:digits")
    text = "action,split,index,label\ndrop,train,0,\ndrop,train,700,\nrelabel,train,9,3\n"
    changed, _ = apply_text(digits, tmp_path, text)
    before, after = (
        {*hold_out_validation(source, 0.2, 0).splits["val"].image_rows}
        for source in (digits, changed)
    )
    assert len(before) > 250
    assert len(before ^ after) <= 4
    before, after = (
        {*subsample(source, "train", 500, 0).splits["train"].image_rows}
        for source in (digits, changed)
    )
    assert len(before ^ after) <= 6


def test_small_classes(source: Source, tmp_path: Path) -> None:
    """One image less is a warning; an empty class may be merged."""
    text = "action,path,given,label\ndrop,train/dog/0.png,,\n"
    with logged() as messages:
        apply_text(source, tmp_path, text)
    assert any("single training image of dog" in message for message in messages)
    text += "relabel,train/dog/1.png,,cat\nmerge,,dog,cow\n"
    changed, _ = apply_text(source, tmp_path, text)
    assert changed.class_names == ["cat", "cow"]


def test_merges_follow_each_other(source: Source, tmp_path: Path) -> None:
    lines = ["action,given,label", "merge,dog,cow", "merge,cow,cat"]
    for order in (lines, [lines[0], lines[2], lines[1]]):
        with refused("data.one_class"):
            apply_text(source, tmp_path, "\n".join(order))
    changed, summary = apply_text(source, tmp_path, "\n".join(lines[:2]))
    assert class_counts(changed)["train"] == [4, 5]
    assert summary.merged == {"dog": "cow"}


def test_reads_what_it_writes(tmp_path: Path) -> None:
    decisions = [
        Decision("relabel", "train", 7, ' =a,"b"\n.png', "-cat", "hot dog", "0f" * 16),
        Decision("drop", path="'é.png"),
        Decision("merge", given="@x", label="'=y"),
    ]
    file = tmp_path / "decisions.csv"
    write_decisions(file, decisions)
    assert read_decisions(file) == decisions
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.csv"]


def test_reads_a_file_that_a_spreadsheet_has_saved(tmp_path: Path) -> None:
    file = tmp_path / "decisions.csv"
    lines = [
        "Label;Path;Note;ACTION ;Index",
        "dog;cat/ä, b.png;looks odd;Relabel;",
        ";cow/1.png;;drop",
        ";;;;",
        ";;;;",
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_decisions(file) == [
        Decision("relabel", path="cat/ä, b.png", label="dog"),
        Decision("drop", path="cow/1.png"),
    ]


@pytest.mark.parametrize(
    "lines, code, named",
    [
        ("path,label\na.png,dog", "data.no_column", "action"),
        ("action,path,path\ndrop,a.png,b.png", "data.ambiguous", "path"),
        ("action,path\nremove,train/cat/0.png", "data.wrong_format", "remove"),
        ("action,path\ndrop,a,b.png", "data.wrong_format", "line 2"),
        ("action,path\ndrop,", "data.no_image", "path"),
        ("action,index\ndrop,3", "data.no_image", "split"),
        ("action,split,index\ndrop,train,1.5", "data.wrong_format", "1.5"),
        ("action,split,index\ndrop,holdout,1", "data.wrong_format", "holdout"),
        ("action,split,index\ndrop,val,1", "data.not_found", "'val'"),
        ("action,split,index\ndrop,train,9", "data.not_found", "number 9"),
        ("action,path\nkeep,train/cat/9.png", "data.not_found", "train/cat/9.png"),
        ("action,split,path\ndrop,test,train/cat/0.png", "data.not_found", "train/cat/0.png"),
        ("action,split,index,path\ndrop,train,1,train/cat/0.png", "data.not_found", "number 1"),
        ("action,path\ndrop,train/cat/0.png\nkeep,train/cat/0.png", "data.ambiguous", "line 2"),
        ("action,path\nrelabel,train/cat/0.png", "data.no_labels", "label"),
        ("action,path,given,label\nkeep,train/cat/0.png,cat,dog", "data.wrong_format", "relabel"),
        ("action,path,label\nrelabel,train/cat/0.png,dgo", "data.wrong_labels", "'dog'"),
        ("action,path,label\nrelabel,test/cat/0.png,bird", "data.wrong_labels", "bird"),
        ("action,path,given\ndrop,train/cat/0.png,dog", "data.changed", "cat"),
        (f"action,path,digest\ndrop,train/cat/0.png,{'0f' * 16}", "data.changed", "line 2"),
        ("action,path,digest\ndrop,train/cat/0.png,0f", "data.wrong_format", "0f"),
        ("action,path\ndrop,train/dog/0.png\ndrop,train/dog/1.png", "data.empty", "dog"),
        ("action,path,given,label\nmerge,x.png,cat,dog", "data.wrong_format", "path"),
        ("action,given,label\nmerge,cat,", "data.wrong_format", "label"),
        ("action,given,label\nmerge,cat,bird", "data.wrong_labels", "bird"),
        ("action,given,label\nmerge,cat,cat", "data.ambiguous", "cat"),
        ("action,given,label\nmerge,cat,dog\nmerge,cat,cow", "data.ambiguous", "line 3"),
        ("action,given,label\nmerge,cat,dog\nmerge,dog,cat", "data.ambiguous", "line 3"),
    ],
)
def test_refuses(source: Source, tmp_path: Path, lines: str, code: str, named: str) -> None:
    with refused(code, named):
        apply_text(source, tmp_path, lines)


def test_refuses_a_missing_file_and_no_text(tmp_path: Path) -> None:
    with refused("data.not_found", "none.csv"):
        read_decisions(tmp_path / "none.csv")
    (tmp_path / "table.xlsx").write_bytes(b"PK\3\4\0\0")
    with refused("data.wrong_format", "table.xlsx"):
        read_decisions(tmp_path / "table.xlsx")


def test_refuses_a_digest_of_an_image_that_changed(source: Source, tmp_path: Path) -> None:
    digests = [digest.tobytes().hex() for digest in source.splits["train"].digests]
    write_file(tmp_path / "photos/train/cat/1.png", random_png(99))
    for index, is_changed in ((0, False), (1, True)):
        text = f"action,split,index,digest\ndrop,train,{index},{digests[index]}"
        if is_changed:
            with refused("data.changed", "train/cat/1.png"):
                apply_text(source, tmp_path, text)
        else:
            apply_text(source, tmp_path, text)


def test_needs_split_and_index_if_names_repeat(tmp_path: Path) -> None:
    for split, labels in (("train", [0, 0, 1, 1]), ("test", [0, 1])):
        write_parquet(tmp_path / "data" / split / "0.parquet", labels)
    source = open_source(f"parquet:{tmp_path / 'data'}")
    with refused("data.ambiguous", "2 images"):
        apply_text(source, tmp_path, "action,path\ndrop,0.parquet row 1")
    changed, _ = apply_text(source, tmp_path, "action,split,path\ndrop,train,0.parquet row 1")
    assert class_counts(changed) == {"train": [1, 2], "test": [1, 1]}


def test_refuses_to_give_test_images_a_class_without_training_images(
    source: Source, tmp_path: Path
) -> None:
    names = [*source.class_names, "owl"]
    declared = dataclasses.replace(source, class_names=names)
    text = "action,path,label\nrelabel,test/cat/0.png,owl"
    assert np.array_equal(
        apply_text(declared, tmp_path, text)[0].splits["test"].labels, source.splits["test"].labels
    )
    with refused("data.split_mismatch", "owl"):
        apply_text(declared, tmp_path, text, on_test=True)

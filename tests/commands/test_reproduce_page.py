"""The page beside the recipes: figures with seeds, machine and commit, claims, and hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from plan_runs import MACHINE, load_entry_results, write_plan, write_plan_runs
from refusals import refused

from finetune.commands.reproduce_page import (
    RUN_FILES,
    hardware_and_commit,
    render_page,
    run_hash,
    summarize_recipe,
)
from finetune.commands.reproduce_plan import load_plan
from finetune.errors import RecipeError
from finetune.recipe.load import load_recipe

BESIDE = (
    "beside: [{program: another 1.0, command: another --lr 1, machine: A GPU, seeds: [0, 1], "
    "top1: [0.5, 0.52], seconds: [30, 32]}]"
)
DIRECTIONS = "The review's three experiments, on a smaller network"
CLAIMS = "What the sources report"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a plan whose runs are done."""
    path = write_plan(tmp_path)
    write_plan_runs(tmp_path, path)
    return path


def runs_of(path: Path) -> Path:
    return path.parents[2] / "runs"


def page(path: Path, *left_out: str, notice: str | None = None) -> str:
    plan = load_plan(path)
    outcomes = load_entry_results(plan, runs_of(path))
    kept = [one for one in outcomes if one.entry.name not in left_out]
    return render_page(plan, path, kept, disclaimer=notice)


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    assert lines, text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page(path: Path) -> None:
    text = page(path)
    assert "`finetune reproduce tables --page recipes/README.md` writes this page" in text
    (whole,) = [line for line in text.splitlines() if line.startswith("| `whole` |")]
    assert "| 55.00 ± 7.07 on 100 test images | 0, 1 | 13 ± 1 | A GPU, 0123456+changes |" in whole
    (less,) = [line for line in text.splitlines() if line.startswith("| `less` |")]
    assert "| test.top1: 30.00 % to 45.00 %; met by 1 of 2 |" in less
    assert "hub:owner/images, a copy" in less
    (few,) = [line for line in text.splitlines() if line.startswith("| `few`: ")]
    assert "| 15.00 ± 7.07 (expected 10.0 to 20.0) | 40.00 ± 14.14 (expected 30.0 to 40.0) |" in few
    assert few.endswith("| 1,000 | 2 | A GPU, 0123456+changes |")
    assert "| [`tables/small.yaml`](tables/small.yaml) |" in text
    assert "| a table, number 4 |" in text
    for run in sorted(runs_of(path).iterdir()):
        assert f"| `{run.name}` | A GPU | 0123456+changes | `{run_hash(run)}` |" in text
    assert "5 with python 3.11.7, torch 2.14.1." in text
    assert "copies/images" not in text, "where a copy lies is nobody's business"


def test_what_the_run_expected_counts_not_what_the_plan_says_now(path: Path) -> None:
    path.write_text(path.read_text().replace("[0.3, 0.45]", "[0.3, 0.9]"))
    assert "30.00 % to 45.00 %; met by 1 of 2" in page(path)


def test_a_notice_leads_and_nothing_is_judged(path: Path) -> None:
    text = page(path, notice="Not the experiment.")
    assert text.splitlines()[2] == "**Not the experiment.**"
    assert "test.top1: 30.00 % to 45.00 % |" in text


def test_notes_of_the_runs_stand_on_the_page(path: Path) -> None:
    for name in ("whole-s0", "whole-s1"):
        recipe = runs_of(path) / name / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("note: null", "note: copies of 30 dB"))
    text = page(path)
    assert text.count("copies of 30 dB") == 1
    assert "by a run, `whole`" in text, "a note makes it no other training"


def test_other_programs_stand_beside(path: Path) -> None:
    assert "## Comparison with other programs" not in page(path)
    text = path.read_text().replace("{name: whole,", f"{{name: whole, {BESIDE},")
    path.write_text(text)
    row = "| `whole` | another 1.0 | 51.00 ± 1.41 | 55.00 ± 7.07 | 31 ± 1 | – | 0, 1 | A GPU |"
    assert row in page(path)
    assert "```bash\nanother --lr 1\n```" in page(path)
    assert "another --lr 1" not in page(path, notice="Not the experiment.")
    for old, new, said in (
        ("top1: [0.5, 0.52]", "top1: [0.5]", "another 1.0: give one result for each"),
        ("seconds: [30, 32]", "seconds: [30]", "another 1.0: give one result for each"),
        ("seeds: [0, 1],", "seads: [0, 1],", "seads"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(RecipeError, match=said):
            page(path)


def test_earlier_figures_are_taken_over(path: Path) -> None:
    (path.parent / "earlier.md").write_text("A figure of old: 12.34\n")
    assert "## Earlier runs\n\nA figure of old: 12.34\n" in page(path)


def test_a_run_of_the_recipe_answers_and_a_smaller_one_does_not(path: Path) -> None:
    rows = cells(page(path), CLAIMS)
    top1 = [row for row in rows if row[1] == "test.top1"]
    assert [row[4:6] for row in top1] == [
        ["by a run, `whole`: met by 1 of 2", "55.00 ± 7.07 % (2 runs)"],
        ["by a smaller run, `less`", "47.50 ± 10.61 % (2 runs)"],
    ]
    assert top1[0][6] == "–"
    assert "4 epochs" in top1[1][6]
    assert "num_train" not in top1[1][6]
    assert {row[2] for row in rows} == {"a table"}, "what was expected is no source's claim"
    (trend,) = [row for row in rows if row[1].startswith("val.loss") and "`whole`" in row[4]]
    assert trend[4:6] == ["by a run, `whole`: met by 2 of 2", "+0.0500 ± 0.0000 per epoch (2 runs)"]


def test_without_a_run_a_claim_is_open(path: Path) -> None:
    rows = cells(page(path, "whole", "less"), CLAIMS)
    assert [row[4] for row in rows] == ["open", "open"]
    assert all("hub:owner/images" in row[6] for row in rows)
    (path.parent / "earlier.md").write_text("`recipes/tables/small.yaml` was run once")
    rows = cells(page(path, "whole", "less"), CLAIMS)
    assert [row[4] for row in rows] == ["open; see the earlier run below"] * 2


def test_a_reported_figure_is_a_claim_of_its_plan(path: Path) -> None:
    text = path.read_text().replace("{name: whole,", '{name: whole, reported: "0.6",')
    path.write_text(text)
    (row,) = [row for row in cells(page(path), CLAIMS) if "0.6" in row]
    assert row[:5] == ["`tables: whole`", "reported", "its plan", "0.6", "open"]


def test_directions_are_answered_for_each_seed(path: Path) -> None:
    rises, worse = cells(page(path), DIRECTIONS)
    assert rises[3] == "yes for 2 of 2 seeds"
    assert rises[4].startswith("val.loss, slope per epoch: +0.0750 ±")
    # seed 0: 0.4 and 0.5; seed 1: 0.55, above the 0.5 of the other seed, and 0.6
    assert worse[2:4] == ["yes", "yes for 2 of 2 seeds"]
    assert worse[4] == "test.top1: 47.50 ± 10.61 % and 55.00 ± 7.07 %"
    assert worse[5] == "`less`, `whole`"


def test_a_falling_loss_does_not_rise(path: Path) -> None:
    for name in ("less-s0", "less-s1"):
        log = runs_of(path) / name / "metrics.jsonl"
        lines = log.read_text().splitlines()[:2]
        last = '{"step": 40, "split": "val", "loss": 0.1}'
        log.write_text("\n".join([*lines, lines[1].replace("20", "30"), last]))
    rises, _ = cells(page(path), DIRECTIONS)
    assert rises[3] == "yes for 0 of 2 seeds"


@pytest.mark.parametrize(
    "left_out,answers",
    [(["whole"], ["yes for 2 of 2 seeds", "open"]), (["whole", "less"], ["open", "open"])],
)
def test_a_direction_stays_open_without_its_runs(
    path: Path, left_out: list[str], answers: list[str]
) -> None:
    assert [row[3] for row in cells(page(path, *left_out), DIRECTIONS)] == answers


def test_the_hash_is_that_of_the_four_files(path: Path) -> None:
    folder = runs_of(path)
    run = folder / "whole-s0"
    joined = b"".join((run / name).read_bytes() for name in RUN_FILES)
    assert run_hash(run) == hashlib.sha256(joined).hexdigest()
    assert run_hash(folder / "whole-s1") != run_hash(run)
    before = run_hash(run)
    (run / "report.html").write_text("a page")
    assert run_hash(run) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert run_hash(run) != before
    (run / "metrics.jsonl").unlink()
    with refused("checkpoint.not_found", "metrics.jsonl"):
        run_hash(run)
    probe = (folder / "few" / "probe.json").read_bytes()
    assert run_hash(folder / "few") == hashlib.sha256(probe).hexdigest()


def test_a_machine_in_words() -> None:
    assert hardware_and_commit({**MACHINE, "commit": None}) == ("A GPU", "not known")
    cpu = {"device": {"type": "cpu", "name": "A CPU", "threads": 1}, "commit": "0123456789"}
    assert hardware_and_commit(cpu) == ("A CPU, 1 thread", "0123456")


def test_a_training_in_words(path: Path) -> None:
    small = path.parent / "small.yaml"
    recipe = load_recipe(small, ["data.source=parquet:secret/place", "model.freeze=backbone"])
    text = summarize_recipe(recipe, planned_source="hub:owner/images")
    assert text == (
        "`embedded:vit_nano` at 32 px, classifier only; hub:owner/images, a copy; 4 epochs of "
        "batch 64, adamw at 0.001"
    )
    steps = load_recipe(small, ["optim.epochs=null", "optim.steps=7", "data.num_train=2000"])
    assert "; 2,000 images of hub:owner/images; 7 steps of batch 64" in summarize_recipe(steps)

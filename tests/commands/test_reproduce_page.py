"""The results page of a plan: results with seeds, hardware and commit, claims, and hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from logs import logged
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

OTHER_PROGRAM = (
    "beside: [{program: another 1.0, command: another --lr 1, machine: A GPU, seeds: [0, 1], "
    "top1: [0.5, 0.52], seconds: [30, 32]}]"
)
DIRECTIONS = "Directions that the sources claim, in smaller runs"
CLAIMS = "What the sources report"


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """The file of a plan with finished runs."""
    path = write_plan(tmp_path)
    write_plan_runs(tmp_path, path)
    return path


def runs_folder(plan_path: Path) -> Path:
    return plan_path.parents[2] / "runs"


def render(plan_path: Path, *excluded: str, disclaimer: str | None = None) -> str:
    plan = load_plan(plan_path)
    outcomes = load_entry_results(plan, plan_path, runs_folder(plan_path))
    included = [outcome for outcome in outcomes if outcome.entry.name not in excluded]
    return render_page(plan, plan_path, included, disclaimer=disclaimer)


def table_rows(text: str, title: str) -> list[list[str]]:
    """Return the rows of a section's table, without its header."""
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert lines, text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_page_contains_results_claims_and_hashes(plan_path: Path) -> None:
    text = render(plan_path)
    assert "`finetune reproduce tables --page recipes/README.md` writes this page" in text
    (whole_row,) = [line for line in text.splitlines() if line.startswith("| `whole` |")]
    assert (
        "| 55.00 ± 7.07 on 100 test images | 0, 1 | 13 ± 1 | A GPU, 0123456+changes |" in whole_row
    )
    (less_row,) = [line for line in text.splitlines() if line.startswith("| `less` |")]
    assert "| test.top1: 30.00 % to 45.00 %; met by 1 of 2 |" in less_row
    assert "hub:owner/images, a copy" in less_row
    (probe_row,) = [line for line in text.splitlines() if line.startswith("| `few`: ")]
    assert (
        "| 15.00 ± 7.07 (expected 10.0 to 20.0) | 40.00 ± 14.14 (expected 30.0 to 40.0) |"
        in probe_row
    )
    assert probe_row.endswith("| 1,000 | 2 | A GPU, 0123456+changes |")
    assert "| [`tables/small.yaml`](tables/small.yaml) |" in text
    assert "| a table, number 4 |" in text
    for run in sorted(runs_folder(plan_path).iterdir()):
        assert f"| `{run.name}` | A GPU | 0123456+changes | `{run_hash(run)}` |" in text
    assert "5 with python 3.11.7, torch 2.14.1." in text
    assert "copies/images" not in text, "local paths are not published"


def test_claims_are_those_recorded_by_the_run(plan_path: Path) -> None:
    plan_path.write_text(plan_path.read_text().replace("[0.3, 0.45]", "[0.3, 0.9]"))
    assert "30.00 % to 45.00 %; met by 1 of 2" in render(plan_path)


def test_disclaimer_comes_first_and_disables_verdicts(plan_path: Path) -> None:
    text = render(plan_path, disclaimer="Not the experiment.")
    assert text.splitlines()[2] == "**Not the experiment.**"
    assert "test.top1: 30.00 % to 45.00 % |" in text


def test_notes_of_the_runs_are_shown(plan_path: Path) -> None:
    for name in ("whole-s0", "whole-s1"):
        recipe = runs_folder(plan_path) / name / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("note: null", "note: copies of 30 dB"))
    text = render(plan_path)
    assert text.count("copies of 30 dB") == 1
    assert "by a run, `whole`" in text, "a note does not change the training"


def test_other_programs_are_compared(plan_path: Path) -> None:
    assert "## Comparison with other programs" not in render(plan_path)
    text = plan_path.read_text().replace("{name: whole,", f"{{name: whole, {OTHER_PROGRAM},")
    plan_path.write_text(text)
    row = "| `whole` | another 1.0 | 51.00 ± 1.41 | 55.00 ± 7.07 | 31 ± 1 | – | 0, 1 | A GPU |"
    assert row in render(plan_path)
    assert "```bash\nanother --lr 1\n```" in render(plan_path)
    assert "another --lr 1" not in render(plan_path, disclaimer="Not the experiment.")
    for old, new, expected in (
        ("top1: [0.5, 0.52]", "top1: [0.5]", "another 1.0: give one result for each"),
        ("seconds: [30, 32]", "seconds: [30]", "another 1.0: give one result for each"),
        ("seeds: [0, 1],", "seads: [0, 1],", "seads"),
    ):
        plan_path.write_text(text.replace(old, new, 1))
        with pytest.raises(RecipeError, match=expected):
            render(plan_path)


def test_earlier_results_are_included(plan_path: Path) -> None:
    (plan_path.parent / "earlier.md").write_text("An earlier result: 12.34\n")
    assert "## Earlier runs\n\nAn earlier result: 12.34\n" in render(plan_path)


def test_only_a_run_of_the_full_recipe_decides_a_claim(plan_path: Path) -> None:
    rows = table_rows(render(plan_path), CLAIMS)
    top1 = [row for row in rows if row[1] == "test.top1"]
    assert [row[4:6] for row in top1] == [
        ["by a run, `whole`: met by 1 of 2", "55.00 ± 7.07 % (2 runs)"],
        ["by a smaller run, `less`", "47.50 ± 10.61 % (2 runs)"],
    ]
    assert top1[0][6] == "–"
    assert "4 epochs" in top1[1][6]
    assert "num_train" not in top1[1][6]
    assert {row[2] for row in rows} == {"a table"}, "expected values of the plan are not claims"
    (trend,) = [row for row in rows if row[1].startswith("val.loss") and "`whole`" in row[4]]
    assert trend[4:6] == ["by a run, `whole`: met by 2 of 2", "+0.0500 ± 0.0000 per epoch (2 runs)"]


def test_a_run_that_the_plan_trained_on_other_data_decides_no_claim(plan_path: Path) -> None:
    other = "whole, claims: [], overrides: ['data.source=folder:other/images'],"
    plan_path.write_text(plan_path.read_text().replace("whole,", other, 1))
    (answer, *_) = [row[4] for row in table_rows(render(plan_path), CLAIMS) if "whole" in row[4]]
    assert answer == "by a smaller run, `whole`"


def test_claim_without_a_run_is_open(plan_path: Path) -> None:
    rows = table_rows(render(plan_path, "whole", "less"), CLAIMS)
    assert [row[4] for row in rows] == ["open", "open"]
    assert all("hub:owner/images" in row[6] for row in rows)
    (plan_path.parent / "earlier.md").write_text("`recipes/tables/small.yaml` was run once")
    rows = table_rows(render(plan_path, "whole", "less"), CLAIMS)
    assert [row[4] for row in rows] == ["open; see the earlier run below"] * 2


def test_reported_result_is_a_claim_of_its_plan(plan_path: Path) -> None:
    text = plan_path.read_text().replace("{name: whole,", '{name: whole, reported: "0.6",')
    plan_path.write_text(text)
    (row,) = [row for row in table_rows(render(plan_path), CLAIMS) if "0.6" in row]
    assert row[:5] == ["`tables: whole`", "reported", "its plan", "0.6", "open"]


def test_directions_are_decided_per_seed(plan_path: Path) -> None:
    rising, worse = table_rows(render(plan_path), DIRECTIONS)
    assert rising[3] == "yes for 2 of 2 seeds"
    assert rising[4].startswith("val.loss, slope per epoch: +0.0750 ±")
    # seed 0: 0.4 and 0.5; seed 1: 0.55, above the 0.5 of the other seed, and 0.6
    assert worse[2:4] == ["yes", "yes for 2 of 2 seeds"]
    assert worse[4] == "test.top1: 47.50 ± 10.61 % and 55.00 ± 7.07 %"
    assert worse[5] == "`less`, `whole`"


def test_falling_loss_does_not_count_as_rising(plan_path: Path) -> None:
    for name in ("less-s0", "less-s1"):
        log = runs_folder(plan_path) / name / "metrics.jsonl"
        lines = log.read_text().splitlines()[:2]
        last = '{"step": 40, "split": "val", "loss": 0.1}'
        log.write_text("\n".join([*lines, lines[1].replace("20", "30"), last]))
    rising, _ = table_rows(render(plan_path), DIRECTIONS)
    assert rising[3] == "yes for 0 of 2 seeds"


@pytest.mark.parametrize(
    "excluded,answers",
    [(["whole"], ["yes for 2 of 2 seeds", "open"]), (["whole", "less"], ["open", "open"])],
)
def test_direction_without_its_runs_is_open(
    plan_path: Path, excluded: list[str], answers: list[str]
) -> None:
    assert [row[3] for row in table_rows(render(plan_path, *excluded), DIRECTIONS)] == answers


def test_passwords_and_queries_of_sources_are_redacted(plan_path: Path) -> None:
    url = "tar:https://user:word@host/train-{0..9}.tar?X-Amz-Signature=5192"
    text = (plan_path.parent / "small.yaml").read_text().replace("hub:owner/images", url)
    (plan_path.parent / "unused.yaml").write_text(text)
    text = plan_path.read_text().replace("{name: whole,", '{name: whole, reported: "0.6",')
    plan_path.write_text(text.replace("recipe: small.yaml", "recipe: unused.yaml"))
    page = render(plan_path)
    tables = [page.partition(f"## {title}\n")[2] for title in ("All recipes", CLAIMS)]
    assert all("tar:https://***@host/train-{0..9}.tar?***" in table for table in tables)
    assert "word" not in page
    assert "5192" not in page


def test_runs_on_different_images_are_not_compared(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("data.num_train=20", "optim.lr=2e-3"))
    runs = write_plan_runs(tmp_path, plan)
    for name in ("whole-s0", "whole-s1", "less-s0", "less-s1"):
        record = json.loads((runs / name / "run.json").read_text())
        record["split_fingerprints"] = {"test": "0"}
        (runs / name / "run.json").write_text(json.dumps(record))
    assert table_rows(render(plan), DIRECTIONS)[1][3] == "yes for 2 of 2 seeds"
    for name in ("less-s0", "less-s1"):
        record["split_fingerprints"] = {"test": "1"}
        (runs / name / "run.json").write_text(json.dumps(record))
    with logged() as messages:
        assert table_rows(render(plan), DIRECTIONS)[1][3] == "open"
    assert any("less and whole: their runs used different images" in each for each in messages)


@pytest.mark.parametrize("whole, is_other", [({"train": "0"}, False), ({"train": "1"}, True)])
def test_copies_with_other_images_are_named_and_not_compared(
    plan_path: Path, whole: dict[str, str], is_other: bool
) -> None:
    """The entries draw other training images, and the runs read copies at different paths."""
    for name, fingerprints in (("whole", {"train": "0"}), ("less", whole)):
        for run in runs_folder(plan_path).glob(f"{name}-s*"):
            recipe = (run / "recipe.yaml").read_text()
            (run / "recipe.yaml").write_text(recipe.replace("copies/images", f"{name}/images"))
            record = json.loads((run / "run.json").read_text())
            record |= {"whole_fingerprints": fingerprints}
            (run / "run.json").write_text(json.dumps(record))
    with logged() as messages:
        text = render(plan_path)
    few = table_rows(text, "Few training images")[0][0]  # it read the images of `whole`
    assert ("its images or labels differ from those of `less`" in few) == is_other
    row = table_rows(text, "What was run")[1]
    assert ("its images or labels differ from those of `whole`, `few`" in row[1]) == is_other
    assert any("less: read other images" in each for each in messages) == is_other
    answer = table_rows(text, DIRECTIONS)[1][3]
    assert answer == ("open" if is_other else "yes for 2 of 2 seeds")


def test_entries_with_other_weights_of_one_name_are_named(plan_path: Path) -> None:
    for name in ("whole", "less"):
        for run in runs_folder(plan_path).glob(f"{name}-s*"):
            record = json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(json.dumps({**record, "weights_sha256": name}))
    with logged() as messages:
        text = render(plan_path)
    assert "pretrained weights differ" not in table_rows(text, "Few training images")[0][0]
    row = table_rows(text, "What was run")[1]
    assert "its pretrained weights differ from those of `whole`" in row[1]
    assert any("less: read other pretrained weights than `whole`" in each for each in messages)


def test_run_hash_covers_the_four_run_files(plan_path: Path) -> None:
    folder = runs_folder(plan_path)
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


def test_hardware_and_commit() -> None:
    assert hardware_and_commit({**MACHINE, "commit": None}) == ("A GPU", "not known")
    cpu = {"device": {"type": "cpu", "name": "A CPU", "threads": 1}, "commit": "0123456789"}
    assert hardware_and_commit(cpu) == ("A CPU, 1 thread", "0123456")


def test_summarize_recipe(plan_path: Path) -> None:
    small = plan_path.parent / "small.yaml"
    recipe = load_recipe(small, ["data.source=parquet:secret/place", "model.freeze=backbone"])
    text = summarize_recipe(recipe, planned_source="hub:owner/images")
    assert text == (
        "`embedded:vit_nano` at 32 px, classifier only; hub:owner/images, a copy; 4 epochs of "
        "batch 64, adamw at 0.001"
    )
    steps = load_recipe(small, ["optim.epochs=null", "optim.steps=7", "data.num_train=2000"])
    assert "; 2,000 images of hub:owner/images; 7 steps of batch 64" in summarize_recipe(steps)

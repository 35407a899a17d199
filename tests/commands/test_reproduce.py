"""Running plans: grids select without the test split, seeds give a spread, finished runs stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from logs import logged
from plan_files import write_plan
from plan_runs import MACHINE, write_probe
from ranks import run_rank_command, run_two_ranks
from refusals import refused

from finetune.commands import reproduce as experiments
from finetune.commands.probe import read_probe
from finetune.commands.reproduce import format_plan_results, run_plan
from finetune.errors import FinetuneError, Interrupted, RecipeError
from finetune.evaluation.claims import VERDICTS
from finetune.recipe.schema import Recipe
from finetune.run.directory import resume_command

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return write_plan(tmp_path)


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Recipe]]:
    """Replace training: validation accuracy is best at lr 0.3, test accuracy is seed / 10."""
    calls: list[tuple[Path, Recipe]] = []

    def train(
        recipe: Recipe, out: Path, *, resume: bool, keep_process_group: bool
    ) -> dict[str, Any]:
        assert keep_process_group
        assert resume  # a plan always continues existing runs
        calls.append((out, recipe))
        (out / "model").mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(recipe.to_yaml())
        (out / "run.json").write_text(json.dumps({**MACHINE, "status": "done"}))
        (out / "metrics.jsonl").touch()
        metrics = {"top5": 1.0, "loss": 2.0, "ece": 0.1, "examples": 10}
        results: dict[str, Any] = {"claims": []}
        if recipe.data.val_fraction:
            lead = "map" if recipe.data.task == "multilabel" else "top1"
            results["val"] = {**metrics, lead: 1 - abs(recipe.optim.lr - 0.3)}
        if recipe.run.test:
            results["test"] = {**metrics, "top1": recipe.run.seed / 10}
            claim = recipe.claims[0].model_dump()
            results["claims"] = [{**claim, "measured": results["test"]["top1"], "verdict": "met"}]
        (out / "results.json").write_text(json.dumps(results))
        return results

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr("finetune.report.page.write_comparison", lambda runs, out: out)
    monkeypatch.setattr(experiments, "destroy_process_group", lambda: None)
    # skip garbage collection of objects from other tests
    monkeypatch.setattr(experiments, "gc", SimpleNamespace(collect=lambda: 0))
    return calls


def test_grid_selects_on_validation_and_final_runs_use_the_test_split(
    plan: str, fake_training, tmp_path: Path
) -> None:
    summary = run_plan(plan, only=["chosen"], out=tmp_path / "out")
    grid, finals = fake_training[:6], fake_training[6:]
    assert [not recipe.run.test for _, recipe in grid] == [True] * 6
    assert {recipe.run.seed for _, recipe in grid} == {3}
    assert len({out for out, _ in fake_training}) == 8
    assert [recipe.optim.lr for _, recipe in finals] == [0.3, 0.3]
    assert [recipe.optim.weight_decay for _, recipe in finals] == [
        0,
        0,
    ]  # the first of equal values
    assert [recipe.run.seed for _, recipe in finals] == [3, 4]
    assert all(recipe.data.val_fraction == 0 and recipe.run.test for _, recipe in finals)
    (row,) = summary["runs"]
    assert row["top1"] == {"mean": pytest.approx(0.35), "std": pytest.approx(0.0707107)}
    chosen = [choice for choice in summary["choices"]["chosen"] if choice["chosen"]]
    assert [choice["overrides"] for choice in chosen] == [["optim.lr=0.3", "optim.weight_decay=0"]]
    text = Path(summary["table"]).read_text()
    assert "| chosen | 2 | 10 | 35.00 ± 7.07 | 100.00 ± 0.00 | 2.0000 ± 0.0000 |" in text
    assert "| optim.lr=0.3, optim.weight_decay=0 | 1.0000 | chosen |" in text
    assert "2 of 2 met" in text
    assert len(summary["runs"]) == 1  # the other entry has no runs yet
    assert "40.00 % | met | chosen-s4 |" in text


def test_grid_by_loss_selects_the_smallest(plan: str, fake_training, tmp_path: Path) -> None:
    text = Path(plan).read_text().replace("    seeds", "    by: val.loss\n    seeds")
    Path(plan).write_text(text)
    summary = run_plan(plan, only=["chosen"], out=tmp_path / "out")
    chosen = [choice["chosen"] for choice in summary["choices"]["chosen"]]
    assert chosen == [True] + [False] * 5  # all losses are equal


def test_multilabel_grid_selects_by_map(plan: str, fake_training, tmp_path: Path) -> None:
    overrides = ["data.task=multilabel", "data.source=embedded:digit_pairs"]
    summary = run_plan(plan, only=["chosen"], out=tmp_path / "out", overrides=overrides)
    (best,) = (choice for choice in summary["choices"]["chosen"] if choice["chosen"])
    assert (best["overrides"], best["val.map"]) == (["optim.lr=0.3", "optim.weight_decay=0"], 1)
    assert "| settings | val.map |  |" in format_plan_results(summary)


def test_smoke_results_are_marked_as_not_the_experiment(
    plan: str, fake_training, tmp_path: Path
) -> None:
    summary = run_plan(plan, scale="smoke", out=tmp_path / "out", overrides=["data.batch_size=32"])
    assert len(fake_training) == 4 + 2 + 1  # two values of each key, two seeds
    assert all(recipe.optim.steps == 1 for _, recipe in fake_training)
    assert all(recipe.data.batch_size == 32 for _, recipe in fake_training)
    assert all("not the experiment" in str(recipe.run.note) for _, recipe in fake_training)
    assert "It is not the experiment" in format_plan_results(summary)
    assert "It is not the experiment" in Path(summary["table"]).read_text()
    claims = format_plan_results(summary).partition("## Claims: not judged in a smoke test")[2]
    rows = [line for line in claims.splitlines() if "another table" in line]
    assert rows, claims
    assert not any(verdict in claims for verdict in VERDICTS)
    full = run_plan(plan, only=["plain"], out=tmp_path / "full")
    assert [claim["source"] for claim in full["claims"]] == ["another table"]
    assert "not the experiment" not in format_plan_results(full)
    assert fake_training[-1][1].run.note is None


def test_finished_runs_stay_in_the_table(plan: str, fake_training, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_plan(plan, out=out)
    full_table = (out / "table.md").read_text()
    num_trained = len(fake_training)
    summary = run_plan(plan, only=["plain"], out=out)
    assert len(fake_training) == num_trained + 1, "finished runs are not trained again"
    assert Path(summary["table"]).read_text() == full_table
    assert [row["name"] for row in summary["runs"]] == ["chosen", "plain"]
    edited = Path(plan).read_text().replace("optim.lr: [0.1", "optim.lr: [0.4")
    Path(plan).write_text(edited)
    summary = run_plan(plan, only=["plain"], out=out)
    assert [row["name"] for row in summary["runs"]] == ["plain"], "the grid has changed"


def test_changed_choice_names_the_run_to_remove(
    plan: str, fake_training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_plan(plan, out=tmp_path)

    def refuse_final_run(recipe: Recipe, out: Path, **_: Any) -> dict[str, Any]:
        if out.name == "chosen-s3":
            raise RecipeError("cannot continue with a different recipe")
        return json.loads((out / "results.json").read_text())

    monkeypatch.setattr(experiments, "train", refuse_final_run)
    with refused("recipe.not_this_run", "optim.lr=0.3", "chosen-s3"):
        run_plan(plan, out=tmp_path)


def test_interruption_says_how_to_continue_the_plan(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_interrupted(recipe: Recipe, out: Path, **_: Any) -> dict[str, Any]:
        raise Interrupted(f"stopped and saved; continue: {resume_command(out)}", 2)

    monkeypatch.setattr(experiments, "train", raise_interrupted)
    with pytest.raises(Interrupted, match="and saved; repeat the command to continue") as caught:
        run_plan(plan, out=tmp_path)
    assert caught.value.exit_code == 130


def test_reported_result_has_its_own_column(plan: str, fake_training, tmp_path: Path) -> None:
    assert "reported |" not in format_plan_results(run_plan(plan, out=tmp_path)).splitlines()[2]
    text = Path(plan).read_text().replace("name: plain", 'reported: "0.61382"\n    name: plain')
    Path(plan).write_text(text)
    lines = format_plan_results(run_plan(plan, out=tmp_path)).splitlines()
    assert lines[5].startswith("| plain | 1 | 10 | 0.00 | 100.00 | 2.0000 | 0.1000 |")
    assert lines[2].endswith("| reported |")
    assert lines[4].endswith("| – |")
    assert lines[5].endswith("| 0.61382 |")


def test_multilabel_metrics_have_their_own_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.report.page.write_comparison", lambda runs, out: out)

    def finished_entry(name: str, **metrics: float) -> Any:
        metrics |= {"loss": 2.0, "examples": 10}
        entry = SimpleNamespace(name=name, reported=None)
        attributes = {"probe": None, "choices": [], "paths": [tmp_path / "a", tmp_path / "b"]}
        attributes |= {"evaluate_claims": list, "data_identity": ("recipe", {})}
        attributes |= {"weights": ("random", None)}
        return SimpleNamespace(entry=entry, results=[{"test": metrics}] * 2, **attributes)

    pairs, digits = (
        finished_entry("pairs", map=0.35, micro_f1=0.5),
        finished_entry("digits", top1=0.9, ece=0.1),
    )
    summary = experiments.write_summary("pairs", "full", tmp_path, [pairs])
    assert summary["comparison"] is not None
    lines = format_plan_results(summary).splitlines()
    assert lines[2] == "| run | seeds | images | mAP, % | loss |"
    assert lines[4] == "| pairs | 2 | 10 | 35.00 ± 0.00 | 2.0000 ± 0.0000 |"
    mixed_summary = experiments.write_summary("both", "full", tmp_path, [pairs, digits])
    assert mixed_summary["comparison"] is None, "no metric applies to both"
    assert "| digits | 2 | 10 | 90.00 ± 0.00 | – |" in format_plan_results(mixed_summary)


def test_done_accepts_runs_copied_from_another_machine(
    plan: str, fake_training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    copies = {"embedded:digits": "parquet:of/another/machine"}
    note = ["run.note=read as copies"]
    run_plan(plan, out=out, only=["plain"], sources=copies, overrides=note)
    assert fake_training[-1][1].data.source == "parquet:of/another/machine"
    num_trained = len(fake_training)
    summary = run_plan(plan, out=out, done=True, page=page)
    assert len(fake_training) == num_trained, "nothing is trained"
    assert [row["name"] for row in summary["runs"]] == ["plain"]
    assert "| `plain-s0` |" in page.read_text()
    assert "parquet:of" not in page.read_text()
    assert "chosen: skipped" in capsys.readouterr().err
    edited = (
        Path(plan).read_text().replace("optim.steps=1]\n    claims", "optim.steps=9]\n    claims")
    )
    Path(plan).write_text(edited)
    assert run_plan(plan, out=out, done=True)["runs"] == [], "the recipe has changed"


def test_published_claims_are_those_of_today(plan: str, fake_training, tmp_path: Path) -> None:
    run_plan(plan, only=["plain"], out=tmp_path / "out")
    Path(plan).write_text(Path(plan).read_text().replace("value: 0.1,", "value: 0.0,"))
    (claim,) = run_plan(plan, done=True, out=tmp_path / "out")["claims"]
    assert (claim["value"], claim["measured"], claim["verdict"]) == (0, 0, "met")
    assert claim["run"] == "plain-s0"


def test_run_copied_without_its_model_is_not_trained_again(
    plan: str, fake_training, tmp_path: Path
) -> None:
    run_plan(plan, only=["plain"], out=tmp_path)
    run_plan(plan, only=["plain"], out=tmp_path)
    assert len(fake_training) == 2, "train() is called again to recheck the claims"
    (tmp_path / "plain-s0" / "model").rmdir()
    summary = run_plan(plan, only=["plain"], out=tmp_path)
    assert (len(fake_training), [row["name"] for row in summary["runs"]]) == (2, ["plain"])
    (tmp_path / "plain-s0" / "run.json").write_text('{"status": "stopped (130)"}')
    run_plan(plan, only=["plain"], out=tmp_path)
    assert len(fake_training) == 3


def test_done_names_the_seeds_that_are_left_out(plan: str, fake_training, tmp_path: Path) -> None:
    run_plan(plan, only=["chosen"], out=tmp_path)
    shutil.rmtree(tmp_path / "chosen-s3")
    with logged() as lines:
        (row,) = run_plan(plan, done=True, out=tmp_path)["runs"]
    assert row["name"] == "chosen"
    assert [line for line in lines if "left out" in line] == [
        f"{tmp_path / 'chosen-s3'}: left out, because it is not a finished run of this recipe"
    ]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("run", ["chosen-s3", "chosen-choose/*"])
def test_runs_of_other_images_are_neither_averaged_nor_compared(
    run: str, done: bool, plan: str, fake_training, tmp_path: Path
) -> None:
    """Runs without model/ are not resumed, which would compare the images."""
    run_plan(plan, only=["chosen"], out=tmp_path)
    folder, *_ = tmp_path.glob(run)
    (folder / "model").rmdir()
    record = json.loads((folder / "run.json").read_text())
    changed = {**record, "split_fingerprints": {"test": "0"}}
    (folder / "run.json").write_text(json.dumps(changed))
    with refused("data.changed", folder, "different images"):
        run_plan(plan, only=[] if done else ["chosen"], out=tmp_path, done=done)


def test_a_grid_over_another_key_of_the_data_does_not_hide_other_images(
    plan: str, fake_training, tmp_path: Path
) -> None:
    file = Path(plan)
    file.write_text(
        file.read_text().replace("optim.weight_decay: [0, 0.5]", "data.batch_size: [4, 8]")
    )
    test_runs_of_other_images_are_neither_averaged_nor_compared(
        "chosen-choose/*", False, plan, fake_training, tmp_path
    )


def test_shards_that_were_copied_between_runs_are_named(
    plan: str, fake_training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_plan(plan, only=["chosen"], out=tmp_path)
    for folder in (tmp_path / "chosen-s3", *tmp_path.glob("chosen-choose/*")):
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(
            json.dumps({**record, "shard_times": {"train": folder.name}})
        )
        (folder / "model").rmdir()  # such a run is not trained again
    capsys.readouterr()
    run_plan(plan, only=["chosen"], out=tmp_path)
    assert "chosen: shards were written or copied between its runs" in capsys.readouterr().err


def test_probe_entries_are_repeated_on_cached_features(
    plan: str, fake_training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_calls: list[dict[str, Any]] = []

    def probe(model: str, **kwargs: Any) -> dict[str, Any]:
        probe_calls.append({"model": model, **kwargs})
        result = read_probe(write_probe(kwargs["out"], model=model, data=kwargs["data"]))
        assert result is not None
        return result

    monkeypatch.setattr(experiments, "probe_model", probe)
    entry = "  - name: few\n    recipe: small.yaml\n    probe: {shots: [1, 5], draws: 2}\n"
    entry += "    overrides: ['model.name=embedded:vit_nano']\nsmoke:"
    Path(plan).write_text(Path(plan).read_text().replace("smoke:", entry))
    summary = run_plan(plan, only=["few"], out=tmp_path / "out")
    assert summary["probes"]["few"]["shots"][5]["accuracy"] == 0.4
    expected = {"data": "embedded:digits", "shots": (1, 5), "seeds": 2}
    out = tmp_path / "out" / "few"
    assert probe_calls == [{"model": "embedded:vit_nano", **expected, "out": out}]
    run_plan(plan, only=["few"], out=tmp_path / "out")
    summary = run_plan(plan, done=True, out=tmp_path / "out")
    assert (len(probe_calls), list(summary["probes"])) == (2, ["few"])
    other = {"embedded:digits": "parquet:other"}
    run_plan(plan, only=["few"], out=tmp_path / "out", sources=other)
    assert [call["data"] for call in probe_calls[1:]] == ["embedded:digits", "parquet:other"]
    assert "    5    0.4000" in format_plan_results(summary)
    Path(plan).write_text(Path(plan).read_text().replace("draws: 2", "draws: 3"))
    assert run_plan(plan, done=True, out=tmp_path / "out")["probes"] == {}
    assert not fake_training


def test_changed_probes_and_probes_of_other_weights_are_refused(plan: str, tmp_path: Path) -> None:
    entries = "".join(
        f"  - name: {name}\n    recipe: small.yaml\n    probe: {{shots: [1, 5], draws: 2}}\n"
        "    overrides: ['model.name=embedded:vit_nano']\n"
        for name in ("few", "again")
    )
    Path(plan).write_text(Path(plan).read_text().replace("smoke:", f"{entries}smoke:"))
    few, again = (write_probe(tmp_path / name) for name in ("few", "again"))
    assert list(run_plan(plan, done=True, out=tmp_path)["probes"]) == ["few", "again"]
    text = (few / "probe.json").read_text()
    (few / "probe.json").write_text(text.replace("0.5", "0.9"))
    with refused("checkpoint.damaged", few / "probe.json"):
        run_plan(plan, done=True, out=tmp_path)
    (few / "probe.json").write_text(text)
    write_probe(again, protocol={"test_images": 1000, "width": 8, "weights": "004f"})
    with refused("data.changed", "few", "again", "weights of embedded:vit_nano"):
        run_plan(plan, done=True, out=tmp_path)


def test_invalid_overrides_are_refused_before_training(
    plan: str, fake_training, tmp_path: Path
) -> None:
    with refused("recipe.conflict", "chosen", "data.val_fraction"):
        run_plan(plan, overrides=["data.val_fraction=0"], out=tmp_path)
    num_trained = len(fake_training)
    with pytest.raises(RecipeError, match=r"optim\.lrr"):  # before the first run
        run_plan(plan, overrides=["optim.lrr=1"], out=tmp_path)
    assert len(fake_training) == num_trained


@pytest.mark.slow
def test_interrupted_plan_continues_where_it_stopped(
    no_figures: None, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real_train: Callable[..., dict[str, Any]] = experiments.train
    started: list[str] = []

    def train(
        recipe: Recipe, out: Path, *, resume: bool, keep_process_group: bool
    ) -> dict[str, Any]:
        started.append(out.name)
        if len(started) == 3:
            raise FinetuneError("the power went out")
        return real_train(recipe, out, resume=resume, keep_process_group=keep_process_group)

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr(experiments, "gc", SimpleNamespace(collect=lambda: 0))
    text = Path(plan).read_text().replace("[0.1, 0.3, 0.2]", "[0.001, 0.01]")
    Path(plan).write_text(text.replace(", optim.weight_decay: [0, 0.5]", ""))
    with pytest.raises(FinetuneError, match="power"):
        run_plan(plan, only=["chosen"])
    before = (tmp_path / "runs" / "grids" / "chosen-choose" / "lr=0.01" / "run.json").stat()
    summary = run_plan(plan, only=["chosen"])
    assert (tmp_path / "runs" / "grids" / "chosen-choose" / "lr=0.01" / "run.json").stat() == (
        before
    )
    for choice in summary["choices"]["chosen"]:
        results = json.loads((Path(choice["run"]) / "results.json").read_text())
        assert "test" not in results
    assert summary["runs"][0]["top1"]["std"] is not None
    assert Path(summary["comparison"]).read_text().startswith("<!doctype html>")


@pytest.mark.faults
def test_two_processes_run_a_plan_together(plan: str, tmp_path: Path) -> None:
    text = Path(plan).read_text().replace("[0.1, 0.3, 0.2]", "[0.001]")
    Path(plan).write_text(text.replace(", optim.weight_decay: [0, 0.5]", ""))
    finished = run_two_ranks(
        run_rank_command, "reproduce", plan, "--only", "chosen", "--out", str(tmp_path / "out")
    )
    assert finished.stdout.startswith("# A grid and the chosen values")
    for name in ("chosen-choose/lr=0.001", "chosen-s3", "chosen-s4"):
        record = json.loads((tmp_path / "out" / name / "run.json").read_text())
        assert (record["status"], record["num_processes"]) == ("done", 2)

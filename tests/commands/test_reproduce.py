"""Plans: the grid chooses without the test split, seeds have a spread, nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_files import write_plan
from plan_runs import MACHINE, write_probe
from ranks import run_rank_command, run_two_ranks
from refusals import refused

from finetune.commands import reproduce as experiments
from finetune.commands.reproduce import format_plan_results, run_plan
from finetune.errors import FinetuneError, Interrupted, RecipeError
from finetune.evaluation.claims import VERDICTS
from finetune.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures("no_pictures")

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return write_plan(tmp_path)


@pytest.fixture
def trained(monkeypatch: Patch) -> list[tuple[Path, Recipe]]:
    """Runs that take no time: validation likes 0.3 best, the test figure is the seed's."""
    calls: list[tuple[Path, Recipe]] = []

    def train(
        recipe: Recipe, out: Path, *, resume: bool, keep_process_group: bool
    ) -> dict[str, Any]:
        assert keep_process_group
        assert resume  # a plan is always gone on with
        calls.append((out, recipe))
        (out / "model").mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(recipe.to_yaml())
        (out / "run.json").write_text(json.dumps({**MACHINE, "status": "done"}))
        (out / "metrics.jsonl").touch()
        figures = {"top5": 1.0, "loss": 2.0, "ece": 0.1, "examples": 10}
        results: dict[str, Any] = {"claims": []}
        if recipe.data.val_fraction:
            lead = "map" if recipe.data.task == "multilabel" else "top1"
            results["val"] = {**figures, lead: 1 - abs(recipe.optim.lr - 0.3)}
        if recipe.run.test:
            results["test"] = {**figures, "top1": recipe.run.seed / 10}
            claim = recipe.claims[0].model_dump()
            results["claims"] = [{**claim, "measured": results["test"]["top1"], "verdict": "met"}]
        (out / "results.json").write_text(json.dumps(results))
        return results

    monkeypatch.setattr(experiments, "train", train)
    monkeypatch.setattr("finetune.report.page.write_comparison", lambda runs, out: out)
    monkeypatch.setattr(experiments, "destroy_process_group", lambda: None)
    # nor is there a network to collect, among all that the other tests have left
    monkeypatch.setattr(experiments, "gc", SimpleNamespace(collect=lambda: 0))
    return calls


def test_the_grid_chooses_without_the_test_split(plan: str, trained, tmp_path: Path) -> None:
    told = run_plan(plan, only=["chosen"], out=tmp_path / "out")
    grid, finals = trained[:6], trained[6:]
    assert [not recipe.run.test for _, recipe in grid] == [True] * 6
    assert {recipe.run.seed for _, recipe in grid} == {3}
    assert len({out for out, _ in trained}) == 8
    assert [recipe.optim.lr for _, recipe in finals] == [0.3, 0.3]
    assert [recipe.optim.weight_decay for _, recipe in finals] == [0, 0]  # the first of equals
    assert [recipe.run.seed for _, recipe in finals] == [3, 4]
    assert all(recipe.data.val_fraction == 0 and recipe.run.test for _, recipe in finals)
    (row,) = told["runs"]
    assert row["top1"] == {"mean": pytest.approx(0.35), "std": pytest.approx(0.0707107)}
    chosen = [one for one in told["choices"]["chosen"] if one["chosen"]]
    assert [one["overrides"] for one in chosen] == [["optim.lr=0.3", "optim.weight_decay=0"]]
    text = Path(told["table"]).read_text()
    assert "| chosen | 2 | 10 | 35.00 ± 7.07 | 100.00 ± 0.00 | 2.0000 ± 0.0000 |" in text
    assert "| optim.lr=0.3, optim.weight_decay=0 | 1.0000 | chosen |" in text
    assert "2 of 2 met" in text
    assert len(told["runs"]) == 1  # the other entry is not done
    assert "40.00 % | met | chosen-s4 |" in text


def test_the_smallest_loss_is_the_best(plan: str, trained, tmp_path: Path) -> None:
    text = Path(plan).read_text().replace("    seeds", "    by: val.loss\n    seeds")
    Path(plan).write_text(text)
    told = run_plan(plan, only=["chosen"], out=tmp_path / "out")
    chosen = [one["chosen"] for one in told["choices"]["chosen"]]
    assert chosen == [True] + [False] * 5  # all losses are equal


def test_several_labels_are_chosen_by_their_own_figure(plan: str, trained, tmp_path: Path) -> None:
    changes = ["data.task=multilabel", "data.source=embedded:digit_pairs"]
    told = run_plan(plan, only=["chosen"], out=tmp_path / "out", overrides=changes)
    (best,) = (one for one in told["choices"]["chosen"] if one["chosen"])
    assert (best["overrides"], best["val.map"]) == (["optim.lr=0.3", "optim.weight_decay=0"], 1)
    assert "| settings | val.map |  |" in format_plan_results(told)


def test_smoke_says_everywhere_that_it_is_not_the_experiment(
    plan: str, trained, tmp_path: Path
) -> None:
    told = run_plan(plan, scale="smoke", out=tmp_path / "out", overrides=["data.batch_size=32"])
    assert len(trained) == 4 + 2 + 1  # two values of each key, two seeds
    assert all(recipe.optim.steps == 1 for _, recipe in trained)
    assert all(recipe.data.batch_size == 32 for _, recipe in trained)
    assert all("not the experiment" in str(recipe.run.note) for _, recipe in trained)
    assert "It is not the experiment" in format_plan_results(told)
    assert "It is not the experiment" in Path(told["table"]).read_text()
    claims = format_plan_results(told).partition("## Claims: not judged in a smoke test")[2]
    rows = [line for line in claims.splitlines() if "another table" in line]
    assert rows, claims
    assert not any(verdict in claims for verdict in VERDICTS)
    full = run_plan(plan, only=["plain"], out=tmp_path / "full")
    assert [claim["source"] for claim in full["claims"]] == ["another table"]
    assert "not the experiment" not in format_plan_results(full)
    assert trained[-1][1].run.note is None


def test_what_was_done_before_stays_in_the_table(plan: str, trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_plan(plan, out=out)
    whole = (out / "table.md").read_text()
    count = len(trained)
    told = run_plan(plan, only=["plain"], out=out)
    assert len(trained) == count + 1, "the others are only looked at"
    assert Path(told["table"]).read_text() == whole
    assert [row["name"] for row in told["runs"]] == ["chosen", "plain"]
    edited = Path(plan).read_text().replace("optim.lr: [0.1", "optim.lr: [0.4")
    Path(plan).write_text(edited)
    told = run_plan(plan, only=["plain"], out=out)
    assert [row["name"] for row in told["runs"]] == ["plain"], "the grid is another one now"


def test_another_choice_says_what_to_remove(
    plan: str, trained, tmp_path: Path, monkeypatch: Patch
) -> None:
    run_plan(plan, out=tmp_path)

    def refuse(recipe: Recipe, out: Path, **_: Any) -> dict[str, Any]:
        if out.name == "chosen-s3":
            raise RecipeError("cannot continue with a different recipe")
        return json.loads((out / "results.json").read_text())

    monkeypatch.setattr(experiments, "train", refuse)
    with refused("recipe.not_this_run", "optim.lr=0.3", "chosen-s3"):
        run_plan(plan, out=tmp_path)


def test_a_signal_says_how_a_plan_goes_on(plan: str, tmp_path: Path, monkeypatch: Patch) -> None:
    def stopped(*_: Any, **__: Any) -> dict[str, Any]:
        raise Interrupted("stopped at step 3 of 9 and saved; continue with --resume", 2)

    monkeypatch.setattr(experiments, "train", stopped)
    with pytest.raises(Interrupted, match="and saved; repeat the command to continue") as caught:
        run_plan(plan, out=tmp_path)
    assert caught.value.exit_code == 130


def test_a_reported_figure_stands_beside_the_runs_own(plan: str, trained, tmp_path: Path) -> None:
    assert "reported |" not in format_plan_results(run_plan(plan, out=tmp_path)).splitlines()[2]
    text = Path(plan).read_text().replace("name: plain", 'reported: "0.61382"\n    name: plain')
    Path(plan).write_text(text)
    lines = format_plan_results(run_plan(plan, out=tmp_path)).splitlines()
    assert lines[5].startswith("| plain | 1 | 10 | 0.00 | 100.00 | 2.0000 | 0.1000 |")
    assert lines[2].endswith("| reported |")
    assert lines[4].endswith("| – |")
    assert lines[5].endswith("| 0.61382 |")


def test_several_labels_have_a_column_of_their_own(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("finetune.report.page.write_comparison", lambda runs, out: out)

    def done(name: str, **figures: float) -> Any:
        figures |= {"loss": 2.0, "examples": 10}
        entry = SimpleNamespace(name=name, reported=None)
        facts = {"probe": None, "choices": [], "paths": [tmp_path / "a", tmp_path / "b"]}
        return SimpleNamespace(entry=entry, results=[{"test": figures}] * 2, **facts)

    pairs, digits = done("pairs", map=0.35, micro_f1=0.5), done("digits", top1=0.9, ece=0.1)
    told = experiments._write_summary("pairs", "full", tmp_path, [pairs])
    assert told["comparison"] is not None
    lines = format_plan_results(told).splitlines()
    assert lines[2] == "| run | seeds | images | mAP, % | loss |"
    assert lines[4] == "| pairs | 2 | 10 | 35.00 ± 0.00 | 2.0000 ± 0.0000 |"
    mixed = experiments._write_summary("both", "full", tmp_path, [pairs, digits])
    assert mixed["comparison"] is None, "no figure is of both"
    assert "| digits | 2 | 10 | 90.00 ± 0.00 | – |" in format_plan_results(mixed)


def test_done_takes_runs_that_were_copied_from_elsewhere(
    plan: str, trained, tmp_path: Path, capsys: Captured
) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    copies = {"embedded:digits": "parquet:of/another/machine"}
    note = ["run.note=read as copies"]
    run_plan(plan, out=out, only=["plain"], sources=copies, overrides=note)
    assert trained[-1][1].data.source == "parquet:of/another/machine"
    count = len(trained)
    told = run_plan(plan, out=out, done=True, page=page)
    assert len(trained) == count, "nothing is trained"
    assert [row["name"] for row in told["runs"]] == ["plain"]
    assert "| `plain-s0` |" in page.read_text()
    assert "parquet:of" not in page.read_text()
    assert "chosen: skipped" in capsys.readouterr().err
    edited = (
        Path(plan).read_text().replace("optim.steps=1]\n    claims", "optim.steps=9]\n    claims")
    )
    Path(plan).write_text(edited)
    assert run_plan(plan, out=out, done=True)["runs"] == [], "it is another run now"


def test_a_run_that_was_copied_without_its_model_is_not_trained_again(
    plan: str, trained, tmp_path: Path
) -> None:
    run_plan(plan, only=["plain"], out=tmp_path)
    run_plan(plan, only=["plain"], out=tmp_path)
    assert len(trained) == 2, "train itself sees what is done, and answers claims anew"
    (tmp_path / "plain-s0" / "model").rmdir()
    told = run_plan(plan, only=["plain"], out=tmp_path)
    assert (len(trained), [row["name"] for row in told["runs"]]) == (2, ["plain"])
    (tmp_path / "plain-s0" / "run.json").write_text('{"status": "stopped (130)"}')
    run_plan(plan, only=["plain"], out=tmp_path)
    assert len(trained) == 3


def test_features_are_measured_once(plan: str, trained, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[dict[str, Any]] = []

    def probe(model: str, **given: Any) -> dict[str, Any]:
        asked.append({"model": model, **given})
        return json.loads((write_probe(given["out"]) / "probe.json").read_text())

    monkeypatch.setattr(experiments, "probe_model", probe)
    entry = "  - name: few\n    recipe: small.yaml\n    probe: {shots: [1, 5], draws: 2}\n"
    entry += "    overrides: ['model.name=embedded:vit_nano', 'model.args={}']\nsmoke:"
    Path(plan).write_text(Path(plan).read_text().replace("smoke:", entry))
    told = run_plan(plan, only=["few"], out=tmp_path / "out")
    assert told["probes"]["few"]["shots"]["5"]["accuracy"] == 0.4
    wanted = {"data": "embedded:digits", "shots": (1, 5), "seeds": 2}
    out = tmp_path / "out" / "few"
    assert asked == [{"model": "embedded:vit_nano", **wanted, "out": out}]
    run_plan(plan, only=["few"], out=tmp_path / "out")
    told = run_plan(plan, done=True, out=tmp_path / "out")
    assert (len(asked), list(told["probes"])) == (1, ["few"])
    assert "    5    0.4000" in format_plan_results(told)
    Path(plan).write_text(Path(plan).read_text().replace("draws: 2", "draws: 3"))
    assert run_plan(plan, done=True, out=tmp_path / "out")["probes"] == {}
    assert not trained


def test_wrong_requests_are_refused(plan: str, trained, tmp_path: Path) -> None:
    with refused("recipe.conflict", "chosen", "data.val_fraction"):
        run_plan(plan, overrides=["data.val_fraction=0"], out=tmp_path)
    count = len(trained)
    with pytest.raises(RecipeError, match=r"optim\.lrr"):  # before the first run
        run_plan(plan, overrides=["optim.lrr=1"], out=tmp_path)
    assert len(trained) == count


@pytest.mark.slow
def test_a_real_plan_is_gone_on_with_where_it_stopped(
    plan: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    real: Callable[..., dict[str, Any]] = experiments.train
    begun: list[str] = []

    def train(
        recipe: Recipe, out: Path, *, resume: bool, keep_process_group: bool
    ) -> dict[str, Any]:
        begun.append(out.name)
        if len(begun) == 3:
            raise FinetuneError("the power went out")
        return real(recipe, out, resume=resume, keep_process_group=keep_process_group)

    monkeypatch.setattr(experiments, "train", train)
    text = Path(plan).read_text().replace("[0.1, 0.3, 0.2]", "[0.001, 0.01]")
    Path(plan).write_text(text.replace(", optim.weight_decay: [0, 0.5]", ""))
    with pytest.raises(FinetuneError, match="power"):
        run_plan(plan)
    before = (tmp_path / "runs" / "grids" / "chosen-choose" / "lr=0.01" / "run.json").stat()
    told = run_plan(plan)
    assert (tmp_path / "runs" / "grids" / "chosen-choose" / "lr=0.01" / "run.json").stat() == (
        before
    )
    for one in told["choices"]["chosen"]:
        results = json.loads((Path(one["run"]) / "results.json").read_text())
        assert "test" not in results
    assert told["runs"][0]["top1"]["std"] is not None
    assert Path(told["comparison"]).read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_two_processes_carry_out_a_plan_together(plan: str, tmp_path: Path) -> None:
    text = Path(plan).read_text().replace("[0.1, 0.3, 0.2]", "[0.001]")
    Path(plan).write_text(text.replace(", optim.weight_decay: [0, 0.5]", ""))
    done = run_two_ranks(
        run_rank_command, "reproduce", plan, "--only", "chosen", "--out", str(tmp_path / "out")
    )
    assert done.stdout.startswith("# A grid and the chosen values")
    for name in ("chosen-choose/lr=0.001", "chosen-s3", "chosen-s4"):
        record = json.loads((tmp_path / "out" / name / "run.json").read_text())
        assert (record["status"], record["num_processes"]) == ("done", 2)

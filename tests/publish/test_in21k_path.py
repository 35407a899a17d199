"""The recipes of ImageNet-21k weights, as they stand, from timm's name to the push.

The hub is on loopback (`imagenet21k_hub.py`).
A step is smaller than the recipe's: 2 images, once or
twice. They train in forked processes, and the weights have two of their twelve blocks. In the long
run these have all of them, and one recipe is launched as its header says.
"""

# B batch, C channels, D width, H W pixels, K classes, N tokens

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from forked_runs import check_child_success, disable_report_and_plots, run_in_child
from hub_server import HubServer, point_clients_at
from huggingface_hub import constants, get_session, hf_hub_download
from imagenet21k_hub import (
    CIFAR10,
    CLASSES,
    ROWS,
    cifar10_repo_files,
    redirect_small_files,
    timm_name,
    weight_repo_files,
)
from launches import REPOSITORY, launch_training
from safetensors.torch import load, load_file
from scipy.ndimage import zoom
from torch import Tensor

from finetune import Classifier
from finetune.cli.main import main
from finetune.evaluation.claims import format_claim
from finetune.hub.client import monitor_requests
from finetune.models.build import build_model
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.recipe.load import load_recipe

TOKEN = "hf_writewritewrite"
WIDTH, PARAMETERS = 768, 85_798_656  # D, and those without a head
DEPTH, FEWER, BLOCK = 12, 2, 7_087_872  # blocks, and the parameters of one
HALF_UNIT = 1e-6  # of float32 below 4, as in test_resize_posemb.py
SMALL = ("data.batch_size=2", "run.log_every=1", "run.threads=1")
ONE_STEP = ("optim.steps=1", "optim.warmup_steps=0")
TWO_STEPS = ("optim.epochs=0.4",)  # of 10 images: val takes one of each class


@dataclass(frozen=True)
class Case:
    """A recipe, and what a run of a step or two has to say to its claims.

    Attributes:
        lr: the farthest that a weight of AdamW goes in these steps; 0 where none of them moves.
        measured: of each claim in turn, whether so short a run can answer it with a figure.
    """

    tag: str
    image_size: int
    shorter: tuple[str, ...]
    lr: float
    measured: tuple[bool, ...]

    @property
    def source(self) -> str:
        return f"timm/{timm_name(self.tag)}"


CASES = {
    "cifar10/vit_b16_224": Case("orig_in21k", 224, ONE_STEP, 0.0, ()),
    "cifar10/vit_b16_384": Case("orig_in21k", 384, ONE_STEP, 0.0, (True,)),
    "paper_review/experiment_1": Case("augreg_in21k", 224, TWO_STEPS, 1e-4, (True, True, False)),
    "paper_review/experiment_2": Case("augreg_in21k", 224, TWO_STEPS, 3e-4, (True, True, True)),
    "paper_review/experiment_3": Case("augreg_in21k", 224, TWO_STEPS, 3e-4, (True, False)),
}
LAUNCHED = "cifar10/vit_b16_224"
# as experiment 1, and as at 384 px
IN_THE_LONG_RUN = ("paper_review/experiment_2", "paper_review/experiment_3", "cifar10/vit_b16_224")


def backbone(depth: int) -> int:
    """The parameters of the network without a head."""
    return PARAMETERS - (DEPTH - depth) * BLOCK


@pytest.fixture(scope="module", autouse=True)
def as_the_hub_answers() -> Iterator[None]:
    """Small files come from another address of the hub's own."""
    with pytest.MonkeyPatch.context() as patch:
        redirect_small_files(patch)
        yield


@pytest.fixture(
    scope="module",
    params=[FEWER, pytest.param(DEPTH, marks=pytest.mark.faults)],
    ids="{} blocks".format,
)
def depth(request: pytest.FixtureRequest) -> int:
    """The blocks of the weights on the hub."""
    depth: int = request.param
    return depth


@pytest.fixture(scope="module")
def hub(depth: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """The three repositories; large files announce Xet, which clients can do without."""
    with HubServer(xet=True) as hub:
        hub.add_user("alice", token=TOKEN)
        for tag in CLASSES:
            hub.add_repo(f"timm/{timm_name(tag)}", weight_repo_files(tag, depth=depth))
        data = cifar10_repo_files(tmp_path_factory.mktemp("cifar10"))
        hub.add_repo("uoft-cs/cifar10", data, kind="dataset")
        yield hub
        assert hub.server_errors == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for two gigabytes, which do not outlive the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_the_repositories_are_those_that_timm_registers(hub: HubServer, depth: int) -> None:
    for tag, classes in CLASSES.items():
        registered = timm.get_pretrained_cfg(timm_name(tag))
        assert registered.hf_hub_id == f"timm/{timm_name(tag)}"
        assert registered.num_classes == classes
        held = hub.files(registered.hf_hub_id)
        told = json.loads(held["config.json"])["pretrained_cfg"]
        for key in ("mean", "std", "input_size", "interpolation", "crop_pct", "classifier"):
            asked = getattr(registered, key)
            assert told[key] == (list(asked) if isinstance(asked, tuple) else asked), key
        parameters = backbone(depth) + (WIDTH + 1) * classes
        header_bytes = 50_000  # at most
        assert 0 < len(held["model.safetensors"]) - 4 * parameters < header_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tag", CLASSES)
def test_both_names_give_the_weights_with_the_head_that_they_have(
    hub: HubServer, depth: int, place: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    point_clients_at(hub, monkeypatch, place / "home")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    served = load(hub.files(f"timm/{timm_name(tag)}")["model.safetensors"])
    assert ("head.weight" in served) == bool(CLASSES[tag])
    for name in (timm_name(tag), f"hf-hub:timm/{timm_name(tag)}"):
        built = build_model(name, args={"depth": depth})
        state = built.model.state_dict()
        assert state.keys() == served.keys()
        assert all(torch.equal(state[key], served[key]) for key in served)
        assert len(built.class_names or []) == CLASSES[tag]
    assert hub.count("/api/resolve-cache/models/.*/config.json") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(c, marks=[pytest.mark.faults] * (c in IN_THE_LONG_RUN)) for c in CASES],
)
def test_from_the_name_to_the_push(
    hub: HubServer, depth: int, place: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    case, destination = CASES[recipe], f"alice/{Path(recipe).name}"
    asked = len(hub.requests)
    overrides = [*SMALL, *case.shorter, f"run.push_to={destination}"]
    overrides += [f"model.args.depth={depth}"] * (depth < DEPTH)
    launches = recipe == LAUNCHED and depth == DEPTH
    out, said = (launch if launches else run)(hub, place, recipe, *overrides)
    requests = [f"{method} {path}" for method, path in hub.requests[asked:]]

    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done"
    check_source(hub, case, record, requests, depth)
    check_weights(hub, case, out)
    check_claims(case, out, said)
    assert record["plan"]["images"] == {"train": 10, "val": 10, "test": ROWS["test"]}
    check_push(hub, destination, out, record)
    check_timm(hub, monkeypatch, place, destination, out, case.image_size)
    forget(hub, destination)


def test_what_the_client_asks_besides_may_fail_after_a_redirect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's other address is the hub's own, which makes no store of files of it."""
    with HubServer() as hub:
        hub.add_repo("timm/some", {"config.json": b"{}"})
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        hub.fail("GET /api/telemetry", times=None)
        with monitor_requests() as watch:
            path = hf_hub_download("timm/some", "config.json")
            answer = get_session().get(f"{hub.url}/api/telemetry/some")
        assert Path(path).read_bytes() == b"{}"
        assert hub.count("GET /api/resolve-cache/") == 1
        assert (answer.status_code, watch.last_error) == (503, None)


def text_of(recipe: str) -> str:
    """A recipe's text, with the command to launch it at the head."""
    text = (REPOSITORY / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# accelerate launch -m finetune train recipes/{recipe}.yaml\n")
    return text


def launch(hub: HubServer, place: Path, recipe: str, *overrides: str) -> tuple[Path, str]:
    """Train by the command at the head of a recipe, with a cold cache, to a good end.

    Returns: the run directory, and what was said.
    """
    environment = hub.environment(place / "home", TOKEN)
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options: dict[str, Any] = {"recipe": text_of(recipe), "options": (), "environment": environment}
    with launch_training(place, *overrides, **options) as ended:
        ended.wait_for_end()
    assert ended.process.returncode == 0, ended.text
    assert "Traceback" not in ended.text
    return ended.out, ended.text


def run(hub: HubServer, place: Path, recipe: str, *overrides: str) -> tuple[Path, str]:
    """Train in a forked process, which has imported torch already."""
    path, out = place / "recipe.yaml", place / "run"
    path.write_text(text_of(recipe))

    def work() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            raise SystemExit(main(["train", str(path), *overrides, "--out", str(out)]))

    with pytest.MonkeyPatch.context() as patch:
        point_clients_at(hub, patch, place / "home", TOKEN)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        disable_report_and_plots(patch)
        ended = run_in_child(work)
    check_child_success(ended)
    assert "Traceback" not in ended.output
    return out, ended.output


def check_source(
    hub: HubServer, case: Case, record: dict[str, Any], requests: list[str], depth: int
) -> None:
    """The weights came once, from the repository and the commit that the record names."""
    content = hub.files(case.source)["model.safetensors"]
    sha256 = hashlib.sha256(content).hexdigest()
    grid = case.image_size // 16
    expected = {
        "source": timm_name(case.tag),
        "tag": case.tag,
        "repository": case.source,
        "revision": hub.commits(case.source)[0],
        "file": "model.safetensors",
        "sha256": sha256,
        "license": "apache-2.0",
        "pretrained": True,
        "posemb": "none" if grid == 14 else "paper",
        "parameters": backbone(depth) + (grid**2 - 196) * WIDTH + (WIDTH + 1) * len(CIFAR10),
    }
    weights = record["plan"]["weights"]
    assert {key: weights.get(key) for key in expected} == expected
    assert record["weights_sha256"] == sha256
    assert requests.count(f"GET /cdn/{sha256}") == 1
    assert not [line for line in requests if "pytorch_model" in line]
    assert [line for line in requests if "/plain_text/train-00000-of-00001.parquet" in line]


def check_weights(hub: HubServer, case: Case, out: Path) -> None:
    """All tensors are the hub's but the head, which was zero: its gradient alone was not.

    So one step leaves the rest as it is, bit for bit; a second one goes no farther than AdamW can.
    """
    served = load(hub.files(case.source)["model.safetensors"])
    state = load_file(out / "model" / "model.safetensors")
    head_KD, _ = state.pop("head.weight"), state.pop("head.bias")
    assert head_KD.shape == (len(CIFAR10), WIDTH)
    assert head_KD.count_nonzero() > 0
    for name in [name for name in served if name.startswith("head.")]:
        del served[name]
    assert state.keys() == served.keys()
    if case.image_size == 384:
        posemb_1ND, source_1ND = state.pop("pos_embed"), served.pop("pos_embed")
        assert posemb_1ND.shape == (1, 1 + 24 * 24, WIDTH)
        assert torch.equal(posemb_1ND[:, :1], source_1ND[:, :1])
        np.testing.assert_allclose(posemb_1ND[:, 1:], zoomed(source_1ND), atol=HALF_UNIT, rtol=0)
    farthest = {name: float((state[name] - served[name]).abs().max()) for name in served}
    assert max(farthest.values()) <= case.lr
    assert min(farthest.values()) > 0 or case.lr == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == (2 if case.lr else 1)
    assert losses[0] == pytest.approx(math.log(len(CIFAR10)), abs=1e-6)


def zoomed(source_1ND: Tensor) -> np.ndarray[Any, Any]:
    """The grid at 24 x 24, by the function that the paper's code calls."""
    grid = source_1ND[0, 1:].double().numpy().reshape(14, 14, WIDTH)
    return zoom(grid, (24 / 14, 24 / 14, 1), order=1).reshape(1, -1, WIDTH)


def check_claims(case: Case, out: Path, said: str) -> None:
    """Each claim of the recipe is answered, in its order: with a figure or with why not."""
    claims = [claim.model_dump(mode="json") for claim in load_recipe(out / "recipe.yaml").claims]
    answers = json.loads((out / "results.json").read_text())["claims"]
    given = [{key: row[key] for key in claim} for row, claim in zip(answers, claims, strict=True)]
    assert given == claims
    assert tuple(row["measured"] is not None for row in answers) == case.measured
    for row in answers:
        assert (row["verdict"] == "not measured") == (row["measured"] is None)
        what, _, measured = format_claim(row)
        start = f"claim {what}: {row['verdict']}: "
        (line,) = {line for line in said.splitlines() if line.startswith(start)}
        assert (row["how"] if row["measured"] is None else measured) in line


def check_push(hub: HubServer, destination: str, out: Path, record: dict[str, Any]) -> None:
    """One commit holds the folder of the model, byte for byte."""
    (commit, *earlier) = hub.commits(destination)
    assert len(earlier) == 1  # the one that creates a repository
    assert record["pushed"]["commit"] == commit
    held = hub.files(destination)
    held.pop(".gitattributes")
    assert held.keys() == set(PUBLISHED_FILES)
    assert held == {path.name: path.read_bytes() for path in (out / "model").iterdir()}
    card = held["README.md"].decode()
    for line in (f"base_model: {record['plan']['weights']['repository']}", "- uoft-cs/cifar10"):
        assert line in card.splitlines()


def check_timm(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
    destination: str,
    out: Path,
    image_size: int,
) -> None:
    """timm alone loads what was pushed, and gives the same logits."""
    point_clients_at(hub, monkeypatch, place / "elsewhere")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    network = timm.create_model(f"hf-hub:{destination}", pretrained=True).eval()
    told = timm.data.resolve_model_data_config(network)
    ours = Classifier.load(out, device="cpu")
    assert network.pretrained_cfg["label_names"] == ours.class_names == CIFAR10
    assert tuple(told["input_size"]) == (3, image_size, image_size)
    assert tuple(told["mean"]) == tuple(load_recipe(out / "recipe.yaml").data.mean or [0.5] * 3)
    images_BCHW = torch.randn(1, 3, image_size, image_size)
    with torch.inference_mode():
        logits_BK = network(images_BCHW)
    torch.testing.assert_close(logits_BK, ours.logits(images_BCHW), rtol=0, atol=1e-5)
    assert logits_BK.std(dim=1).min() > 0


def forget(hub: HubServer, destination: str) -> None:
    """Let go of what was pushed: a third of a gigabyte."""
    weights = hub.store.repositories.pop(("model", destination)).find("main")
    assert weights is not None
    del hub.store.objects[weights.files["model.safetensors"].sha256]

"""The shipped recipes for ImageNet-21k weights, from timm's name to the push.

The hub is on loopback (`imagenet21k_hub.py`). Each run takes one or two steps of 2 images in a
forked process, and the weights have one of their twelve blocks. The long run (marker `faults`)
uses all twelve blocks and launches one recipe with the command in its header.
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
from huggingface_hub import constants
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
from finetune.models.build import build_model
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.recipe.load import load_recipe

TOKEN = "hf_writewritewrite"
WIDTH, PARAMETERS = 768, 85_798_656  # D, and the parameters without a head
DEPTH, REDUCED_DEPTH, BLOCK_PARAMETERS = 12, 1, 7_087_872  # blocks, and parameters per block
HALF_UNIT = 1e-6  # float32 rounding below 4, as in test_resize_posemb.py
SMALL = ("data.batch_size=2", "run.log_every=1", "run.threads=1")
ONE_STEP = ("optim.steps=1", "optim.warmup_steps=0")
TWO_STEPS = ("optim.epochs=0.4",)  # 10 training images; val takes one image of each class


@dataclass(frozen=True)
class Case:
    """A recipe, and the expected outcome of its run of one or two steps.

    Attributes:
        lr: the largest weight change that AdamW can make in these steps; 0 for no change.
        measured: for each claim, whether so short a run can measure it.
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
# the other weights have 21,843 classes; tests/models/test_resize_posemb.py resizes to 384 px
LONG_RUN_ONLY = CASES.keys() - {LAUNCHED}


def backbone_parameters(depth: int) -> int:
    """Number of parameters of the network without a head."""
    return PARAMETERS - (DEPTH - depth) * BLOCK_PARAMETERS


@pytest.fixture(scope="module", autouse=True)
def redirected_small_files() -> Iterator[None]:
    """Redirect requests for small files to another address of the same hub."""
    with pytest.MonkeyPatch.context() as patch:
        redirect_small_files(patch)
        yield


@pytest.fixture(
    scope="module",
    params=[REDUCED_DEPTH, pytest.param(DEPTH, marks=pytest.mark.faults)],
    ids="{} blocks".format,
)
def depth(request: pytest.FixtureRequest) -> int:
    """Number of blocks of the weights on the hub."""
    depth: int = request.param
    return depth


@pytest.fixture(scope="module")
def hub(depth: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """The data, and weights by `serve`. Large files announce Xet, but clients work without it."""
    with HubServer(xet=True) as hub:
        hub.add_user("alice", token=TOKEN)
        data = cifar10_repo_files(tmp_path_factory.mktemp("cifar10"))
        hub.add_repo("uoft-cs/cifar10", data, kind="dataset")
        yield hub
        assert hub.server_errors == []


@pytest.fixture
def large_tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder for two gigabytes; deleted right after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def serve(hub: HubServer, tag: str, depth: int) -> None:
    """Add the repository of weights to the hub, once."""
    if ("model", f"timm/{timm_name(tag)}") not in hub.store.repositories:
        hub.add_repo(f"timm/{timm_name(tag)}", weight_repo_files(tag, depth=depth))


TAGS = pytest.mark.parametrize(
    "tag", ["orig_in21k", pytest.param("augreg_in21k", marks=pytest.mark.faults)]
)


@pytest.mark.slow
@TAGS
def test_repositories_match_the_timm_registry(hub: HubServer, depth: int, tag: str) -> None:
    serve(hub, tag, depth)
    registered = timm.get_pretrained_cfg(timm_name(tag))
    assert registered.hf_hub_id == f"timm/{timm_name(tag)}"
    assert registered.num_classes == CLASSES[tag]
    files = hub.files(registered.hf_hub_id)
    config = json.loads(files["config.json"])["pretrained_cfg"]
    for key in ("mean", "std", "input_size", "interpolation", "crop_pct", "classifier"):
        value = getattr(registered, key)
        assert config[key] == (list(value) if isinstance(value, tuple) else value), key
    parameters = backbone_parameters(depth) + (WIDTH + 1) * CLASSES[tag]
    header_bytes = 50_000  # at most
    assert 0 < len(files["model.safetensors"]) - 4 * parameters < header_bytes


@pytest.mark.slow
@TAGS
def test_timm_and_hub_names_load_the_same_weights_and_head(
    hub: HubServer, depth: int, large_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    point_clients_at(hub, monkeypatch, large_tmp_path / "home")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    serve(hub, tag, depth)
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
    [pytest.param(c, marks=[pytest.mark.faults] * (c in LONG_RUN_ONLY)) for c in CASES],
)
def test_train_and_push_from_the_timm_name(
    hub: HubServer, depth: int, large_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    case, destination = CASES[recipe], f"alice/{Path(recipe).name}"
    serve(hub, case.tag, depth)
    num_earlier_requests = len(hub.requests)
    overrides = [*SMALL, *case.shorter, f"run.push_to={destination}"]
    overrides += [f"model.args.depth={depth}"] * (depth < DEPTH)
    with_launcher = recipe == LAUNCHED and depth == DEPTH
    out, output = (train_with_launcher if with_launcher else train_in_fork)(
        hub, large_tmp_path, recipe, *overrides
    )
    requests = [f"{method} {path}" for method, path in hub.requests[num_earlier_requests:]]

    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done"
    check_source(hub, case, record, requests, depth)
    check_weights(hub, case, out)
    check_claims(case, out, output)
    assert record["plan"]["images"] == {"train": 10, "val": 10, "test": ROWS["test"]}
    check_push(hub, destination, out, record)
    check_timm(hub, monkeypatch, large_tmp_path, destination, out, case.image_size)
    delete_pushed_weights(hub, destination)


def read_recipe(recipe: str) -> str:
    """Read a recipe; its first line must be the launch command."""
    text = (REPOSITORY / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# accelerate launch -m finetune train recipes/{recipe}.yaml\n")
    return text


def train_with_launcher(
    hub: HubServer, large_tmp_path: Path, recipe: str, *overrides: str
) -> tuple[Path, str]:
    """Train with the command in the header of a recipe and a cold cache; the run must succeed.

    Returns: the run directory, and the output.
    """
    environment = hub.environment(large_tmp_path / "home", TOKEN)
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options: dict[str, Any] = {
        "recipe": read_recipe(recipe),
        "launcher_options": (),
        "extra_environment": environment,
    }
    with launch_training(large_tmp_path, *overrides, **options) as finished:
        finished.wait_for_end()
    assert finished.process.returncode == 0, finished.text
    assert "Traceback" not in finished.text
    return finished.out, finished.text


def train_in_fork(
    hub: HubServer, large_tmp_path: Path, recipe: str, *overrides: str
) -> tuple[Path, str]:
    """Train in a forked process, which has imported torch already."""
    path, out = large_tmp_path / "recipe.yaml", large_tmp_path / "run"
    path.write_text(read_recipe(recipe))

    def work() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            raise SystemExit(main(["train", str(path), *overrides, "--out", str(out)]))

    with pytest.MonkeyPatch.context() as patch:
        point_clients_at(hub, patch, large_tmp_path / "home", TOKEN)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        disable_report_and_plots(patch)
        finished = run_in_child(work)
    check_child_success(finished)
    assert "Traceback" not in finished.output
    return out, finished.output


def check_source(
    hub: HubServer, case: Case, record: dict[str, Any], requests: list[str], depth: int
) -> None:
    """The run downloaded the weights once, from the repository and commit in its record."""
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
        "parameters": backbone_parameters(depth)
        + (grid**2 - 196) * WIDTH
        + (WIDTH + 1) * len(CIFAR10),
    }
    weights = record["plan"]["weights"]
    assert {key: weights.get(key) for key in expected} == expected
    assert record["weights_sha256"] == sha256
    assert requests.count(f"GET /cdn/{sha256}") == 1
    assert not [line for line in requests if "pytorch_model" in line]
    assert [line for line in requests if "/plain_text/train-00000-of-00001.parquet" in line]


def check_weights(hub: HubServer, case: Case, out: Path) -> None:
    """All tensors except the head match the hub's, up to the largest AdamW update.

    The head starts at zero, so in the first step only the head has a nonzero gradient, and the
    other tensors stay bit-identical. A second step changes them by at most the AdamW bound.
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
        np.testing.assert_allclose(
            posemb_1ND[:, 1:], zoom_posemb(source_1ND), atol=HALF_UNIT, rtol=0
        )
    farthest = {name: float((state[name] - served[name]).abs().max()) for name in served}
    assert max(farthest.values()) <= case.lr
    assert min(farthest.values()) > 0 or case.lr == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == (2 if case.lr else 1)
    assert losses[0] == pytest.approx(math.log(len(CIFAR10)), abs=1e-6)


def zoom_posemb(source_1ND: Tensor) -> np.ndarray[Any, Any]:
    """Resize the grid to 24 x 24 with the function that the paper's code calls."""
    grid = source_1ND[0, 1:].double().numpy().reshape(14, 14, WIDTH)
    return zoom(grid, (24 / 14, 24 / 14, 1), order=1).reshape(1, -1, WIDTH)


def check_claims(case: Case, out: Path, output: str) -> None:
    """Each claim of the recipe has a result, in recipe order: a value, or why it has none."""
    claims = [claim.model_dump(mode="json") for claim in load_recipe(out / "recipe.yaml").claims]
    answers = json.loads((out / "results.json").read_text())["claims"]
    reported_claims = [
        {key: row[key] for key in claim} for row, claim in zip(answers, claims, strict=True)
    ]
    assert reported_claims == claims
    assert tuple(row["measured"] is not None for row in answers) == case.measured
    for row in answers:
        assert (row["verdict"] == "not measured") == (row["measured"] is None)
        what, _, measured = format_claim(row)
        start = f"claim {what}: {row['verdict']}: "
        (line,) = {line for line in output.splitlines() if line.startswith(start)}
        assert (row["how"] if row["measured"] is None else measured) in line


def check_push(hub: HubServer, destination: str, out: Path, record: dict[str, Any]) -> None:
    """One commit contains the model folder, byte for byte."""
    (commit, *earlier) = hub.commits(destination)
    assert len(earlier) == 1  # the initial commit of the repository
    assert record["pushed"]["commit"] == commit
    files = hub.files(destination)
    files.pop(".gitattributes")
    assert files.keys() == set(PUBLISHED_FILES)
    assert files == {path.name: path.read_bytes() for path in (out / "model").iterdir()}
    card = files["README.md"].decode()
    for line in (f"base_model: {record['plan']['weights']['repository']}", "- uoft-cs/cifar10"):
        assert line in card.splitlines()


def check_timm(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    large_tmp_path: Path,
    destination: str,
    out: Path,
    image_size: int,
) -> None:
    """timm alone loads the pushed model and gives the same logits."""
    point_clients_at(hub, monkeypatch, large_tmp_path / "elsewhere")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    network = timm.create_model(f"hf-hub:{destination}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    classifier = Classifier.load(out, device="cpu")
    assert network.pretrained_cfg["label_names"] == classifier.class_names == CIFAR10
    assert tuple(config["input_size"]) == (3, image_size, image_size)
    assert tuple(config["mean"]) == tuple(load_recipe(out / "recipe.yaml").data.mean or [0.5] * 3)
    images_BCHW = torch.randn(1, 3, image_size, image_size)
    with torch.inference_mode():
        logits_BK = network(images_BCHW)
    torch.testing.assert_close(logits_BK, classifier.logits(images_BCHW), rtol=0, atol=1e-5)
    assert logits_BK.std(dim=1).min() > 0


def delete_pushed_weights(hub: HubServer, destination: str) -> None:
    """Free the pushed weights: a third of a gigabyte."""
    weights = hub.store.repositories.pop(("model", destination)).find("main")
    assert weights is not None
    del hub.store.objects[weights.files["model.safetensors"].sha256]

"""Pickles that run code when they are read, under every name that something here reads.

Each of them makes a file, the canary. The first test shows that they all work; nothing else may
set one off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forked_runs import disable_report_and_plots
from hub_fixtures import CARD, hub, sleep_durations
from hub_server import HubServer
from PIL import Image
from recipe_texts import tiny_recipe_text

from finetune.cli import main as cli
from finetune.evaluation.feature_cache import read_cached_features
from finetune.run.directory import RunDir

__all__ = ["hub", "sleep_durations"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("w.pt", "w.pth", "w.bin", "w.tar", "w.ckpt", "w.safetensors", "w.npz", "w.npy", "w.pkl")
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors")
# Words of the libraries' own messages, which say how to read such a file all the same.
ADVICE = re.compile(
    r"weights_only|allow_pickle|trust_remote|add_safe_globals|trust the source|trust it", re.I
)
RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop', batch_size: 256",
    optim="lr: 3e-3, steps: 2",
    run="precision: fp32, save_every: 1",
)


class Trap:
    """A pickle of this makes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


def _written(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def _tar(pickled: bytes) -> bytes:
    """The oldest of torch's formats."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("pickle", "tensors", "storages", "sys_info"):
            member = tarfile.TarInfo(name)
            member.size = len(pickled)
            archive.addfile(member, io.BytesIO(pickled))
    return stream.getvalue()


def _npz_zip(pickled: bytes) -> bytes:
    """An archive for NumPy whose member is no array but a pickle with an array's name."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", pickled)
    return stream.getvalue()


def traps(canary: Path) -> dict[str, bytes]:
    """The same trap in every format that carries pickles."""
    trap = Trap(canary)
    held = {"head.weight": torch.zeros(2, 2), "trap": trap}
    objects = np.array([trap], dtype=object)
    old = functools.partial(torch.save, _use_new_zipfile_serialization=False)
    return {
        "protocol 0": pickle.dumps(trap, 0),
        "protocol 2": pickle.dumps(trap, 2),
        "protocol 4": pickle.dumps(trap, 4),
        "torch zip": _written(lambda stream: torch.save(held, stream)),
        "torch zip, no tensors": _written(lambda stream: torch.save(trap, stream)),
        "torch before 1.6": _written(lambda stream: old(held, stream)),
        "torch tar": _tar(pickle.dumps(trap, 2)),
        "npy of objects": _written(lambda stream: np.save(stream, objects)),
        "npz of objects": _written(lambda stream: np.savez(stream, x=objects)),
        "npz of a pickle": _npz_zip(pickle.dumps(trap, 2)),
        "joblib": _written(lambda stream: joblib.dump(trap, stream)),
    }


KINDS = tuple(traps(Path("canary")))


class Tried:
    """Carries out a verb and looks whether a trap went off."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary
        self.count = 0

    def __call__(self, *arguments: object, codes: tuple[int, ...] = (4,)) -> str:
        """Returns: all that was said."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main([str(one) for one in arguments])
        text = said.getvalue()
        self.count += 1
        assert not self.canary.exists(), arguments
        assert code in codes, f"{arguments}: {code}\n{text}"
        assert not re.search("Traceback|internal error", text), text
        assert not ADVICE.search(text), text
        return text


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def tried(canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    # switches of the libraries that turn a default off: nothing here rests on a default
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("HF_DATASETS_TRUST_REMOTE_CODE", "1")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    trial = Tried(canary)
    yield trial
    assert not canary.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with its checkpoints."""
    top = tmp_path_factory.mktemp("trained")
    (top / "r.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        assert cli.main(["train", str(top / "r.yaml"), "--out", str(top / "run")]) == 0
    return top / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (18, 18), (9, 90, 200)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_every_trap_goes_off_where_nothing_holds_it(canary: Path) -> None:
    """The control: without this, the other tests would pass with traps that do nothing."""
    switch = {"weights" + "_only": False}, {"allow" + "_pickle": True}

    def as_torch(content: bytes) -> object:
        path = canary.with_name("w.tar")  # torch reads its oldest format from files only
        path.write_bytes(content)
        return torch.load(path, **switch[0])

    def as_numpy(content: bytes) -> object:
        found = np.load(io.BytesIO(content), **switch[1])
        return found["x"] if hasattr(found, "files") else found

    readers: list[Callable[[bytes], object]] = [pickle.loads, as_torch, as_numpy]
    readers.append(lambda content: joblib.load(io.BytesIO(content)))
    for kind, content in traps(canary).items():
        if kind == "npz of a pickle":  # NumPy itself takes such a member for bytes
            continue
        for reader in readers:
            with contextlib.suppress(Exception):
                reader(content)
        assert canary.exists(), kind
        canary.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_under_every_name(
    kind: str, tried: Tried, picture: Path, trained: Path, fault: Callable[..., None]
) -> None:
    content = traps(tried.canary)[kind]
    for name in NAMES:
        Path(name).write_bytes(content)
        shutil.copy(trained / "model" / "config.json", "config.json")
        text = tried("predict", name, picture)
        assert name in text
    fault(
        "A pickle that runs code, under the names of weights",
        "the code never runs, the file is refused with 4 and no advice to read it all the same",
        f"{len(KINDS)} formats × {len(NAMES)} names",
    )


VERBS: dict[str, tuple[tuple[int, ...], str]] = {
    "eval": ((4,), "eval RUN"),
    "predict": ((4,), "predict RUN a.png"),
    "show": ((4,), "show RUN a.png --out shown"),
    "probe": ((4,), "probe RUN --shots 1 --seeds 1"),
    "export": ((4,), "export RUN --format torch --out exported.pt2"),
    "export-space": ((4,), "demo RUN --export-space space"),
    "demo": ((4,), "demo RUN --port 0"),
    "info": ((0,), "info RUN"),  # reads no weights
    "report": ((0,), "report RUN"),  # nor does it
    "train": ((4,), "train again.yaml model.name=RUN --out again"),
    "dry": ((4,), "train again.yaml model.name=RUN --dry-run --out again"),
    "reproduce": ((4,), "reproduce plan.yaml model.name=RUN --out runs"),
}
PLAN = """
title: A plan
runs:
- {name: one, recipe: again.yaml, seeds: [0]}
"""


def poison(run: Path, content: bytes, name: str) -> None:
    """Put a trap in the place of a run's weights."""
    (run / "model" / "model.safetensors").unlink()
    (run / "model" / name).write_bytes(content)


def start_again(run: Path) -> None:
    """A recipe and a plan in this folder that start from a run's weights."""
    recipe = "model: {name: X}\ndata: {source: 'embedded:digits'}\noptim: {lr: 0.01, steps: 1}\n"
    Path("again.yaml").write_text(recipe)
    Path("plan.yaml").write_text(PLAN)


SLOW = ("demo", "export-space")  # they import Gradio


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=[pytest.mark.faults] * (v in SLOW)) for v in VERBS]
)
def test_every_verb(
    verb: str, tried: Tried, picture: Path, run: Path, fault: Callable[..., None]
) -> None:
    poison(run, traps(tried.canary)["torch zip"], "pytorch_model.bin")
    start_again(run)
    codes, line = VERBS[verb]
    text = tried(*line.replace("RUN", str(run)).split(), codes=codes)
    if codes == (4,):
        assert "pytorch_model.bin" in text
    fault(
        "A run whose weights are a pickle that runs code",
        "no verb runs it: 4 from those that read weights",
        f"{len(VERBS)} command lines",
    )


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_verb_with_every_format(
    kind: str, name: str, tried: Tried, picture: Path, run: Path, fault: Callable[..., None]
) -> None:
    poison(run, traps(tried.canary)[kind], name)
    start_again(run)
    for codes, line in VERBS.values():
        tried(*line.replace("RUN", str(run)).split(), codes=codes)
    fault(
        "The same with every format of pickle and every name of weights",
        "the code never runs",
        f"{len(KINDS)} formats × {len(WEIGHTS)} names × {len(VERBS)} command lines",
    )


def _sign(folder: Path) -> None:
    """Write a manifest that fits, as who can write into a run could."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, facts in manifest["files"].items():
        content = (folder / name).read_bytes()
        facts |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest["files"], sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("signed", [True, False])
def test_checkpoints(tried: Tried, run: Path, signed: bool, fault: Callable[..., None]) -> None:
    """Every file of every checkpoint in turn; with a manifest of the attacker's, too."""
    start = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    names = [
        p.name for p in RunDir(run).checkpoint_folder(2).iterdir() if p.name != "manifest.json"
    ]
    assert len(names) >= 4
    tries = 0
    for name in names:
        for kind in ("protocol 2", "torch zip"):
            for path, content in start.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            shutil.rmtree(run / "model")
            (run / "results.json").unlink()
            for step in RunDir(run).checkpoint_steps():
                folder = RunDir(run).checkpoint_folder(step)
                (folder / name).write_bytes(traps(tried.canary)[kind])
                if signed:
                    _sign(folder)
            tried("train", run, "--resume", codes=(4,))
            tries += 1
    fault(
        "Files of checkpoints that are pickles",
        "the code never runs, --resume ends with 4, also where the manifest was made to fit",
        f"{len(names)} files × 2 formats, with and without a manifest that fits",
    )


def test_a_cache_of_features(
    tried: Tried, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Callable[..., None]
) -> None:
    folder, key = tmp_path / "features", "0" * 64
    folder.mkdir()
    for kind in KINDS:
        content = traps(tried.canary)[kind]
        path = folder / f"{key}-{hashlib.sha256(key.encode() + content).hexdigest()}.npy"
        path.write_bytes(content)
        assert read_cached_features(folder, key, num_images=1) is None, kind
        assert not tried.canary.exists(), kind
        path.unlink(missing_ok=True)
    said = capsys.readouterr().err
    assert said.count("computed again") == len(KINDS)
    assert not ADVICE.search(said), said
    fault(
        "A pickle in the cache of features, under the sha256 of its own bytes",
        "the code never runs, the features are computed again",
        f"{len(KINDS)} formats",
    )


class TestTheHub:
    def test_repositories_with_pickled_weights_alone(
        self, hub: HubServer, tried: Tried, picture: Path, trained: Path, fault: Any
    ) -> None:
        config = (trained / "model" / "config.json").read_bytes()
        for number, (kind, content) in enumerate(traps(tried.canary).items()):
            files = {
                "config.json": config,
                "README.md": CARD.encode(),
                "pytorch_model.bin": content,
            }
            hub.add_repo(f"eve/net{number}", files)
            text = tried("predict", f"hf-hub:eve/net{number}", picture)
            assert "pytorch_model.bin" in text, kind
        fault(
            "A repository of the hub with nothing but pickled weights",
            "the code never runs; 4",
            f"{len(KINDS)} formats",
        )

    @pytest.mark.faults  # importing transformers takes seconds
    def test_a_repository_with_code_of_its_own(
        self, hub: HubServer, tried: Tried, picture: Path, fault: Any
    ) -> None:
        code = f"open({str(tried.canary)!r}, 'w')\nclass Net: pass\nclass Config: pass\n".encode()
        mapped = {
            "AutoConfig": "modeling.Config",
            "AutoModelForImageClassification": "modeling.Net",
        }
        for number, kind in enumerate(("vit", "evil")):
            config = {
                "model_type": kind,
                "auto_map": mapped,
                "trust_remote" + "_code": True,
                "custom_pipelines": {"image-classification": {"impl": "modeling.Net"}},
                **{"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 1},
                **{"num_attention_heads": 1, "intermediate_size": 8},
            }
            processor = {"auto_map": {"AutoImageProcessor": "modeling.Net"}}
            files = {
                "config.json": json.dumps(config).encode(),
                "preprocessor_config.json": json.dumps(processor).encode(),
                "pytorch_model.bin": traps(tried.canary)["torch zip"],
                **dict.fromkeys(("modeling.py", "__init__.py", "setup.py"), code),
            }
            hub.add_repo(f"eve/code{number}", files)
            tried("predict", f"transformers:eve/code{number}", picture)
            tried("predict", f"hf-hub:eve/code{number}", picture)
            tried("info", f"transformers:eve/code{number}", codes=(0, 4))
            folder = Path(f"code{number}")
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            tried("predict", f"transformers:{folder}", picture)
            tried("predict", f"./{folder}", picture)
        fault(
            "A repository that brings code for its network (auto_map)",
            "the code never runs; 4",
            f"{tried.count} command lines",
        )

    def test_data_sets_with_code(self, hub: HubServer, tried: Tried, fault: Any) -> None:
        code = f"open({str(tried.canary)!r}, 'w')\n".encode()
        tag = f"!!python/object/apply:builtins.open ['{tried.canary}', 'w']"
        card = f"---\nconfigs: {tag}\ndataset_info: {tag}\n---\n".encode()
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name in ("0.pyd", "0.pickle", "0.pkl", "0.pth", "0.npy", "0.npz", "0.cls"):
                content = b"1" if name == "0.cls" else traps(tried.canary)["protocol 2"]
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        sets = {
            "script": {"script.py": code, "README.md": b"# Data\n"},
            "card": {"README.md": card, "train.csv": b"image,label\n1,2\n"},
            "shards": {"train.tar": stream.getvalue()},
            "pickles": {"train.pkl": traps(tried.canary)["protocol 2"]},
            "parquet": {"train.parquet": hostile_parquet(tried.canary)},
        }
        for name, files in sets.items():
            hub.add_repo(f"eve/{name}", files, kind="dataset")
            tried("data", "info", f"hub:eve/{name}", codes=(0,) if name == "parquet" else (3, 7))
        fault(
            "Data sets of the hub with a loading script, pickles, or Python in the card's YAML",
            "the code never runs; 3",
            f"{len(sets)} data sets",
        )


def hostile_parquet(canary: Path) -> bytes:
    """Two images and their labels; the schema's metadata hold pickles, as some readers load."""
    pickled = traps(canary)["protocol 2"]
    extension = {"ARROW:extension:name": "arrow.py_extension_type"}
    bodies = []
    for shade in (10, 200):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(stream, "PNG")
        bodies.append(stream.getvalue())
    whole = {**extension, "ARROW:extension:metadata": pickled}
    schema = pa.schema(
        [
            pa.field("image", pa.binary(), metadata=whole),
            pa.field("label", pa.int64(), metadata=whole),
        ],
        metadata={"pandas": pickled, "python_pickle": pickled},
    )
    stream = io.BytesIO()
    pq.write_table(pa.table([bodies, [0, 1]], schema=schema), stream)
    return stream.getvalue()


def test_local_data(tried: Tried, tmp_path: Path, fault: Callable[..., None]) -> None:
    (tmp_path / "train.parquet").write_bytes(hostile_parquet(tried.canary))
    tried("data", "scan", "parquet:train.parquet", codes=(0,))
    for kind in KINDS:
        content = traps(tried.canary)[kind]
        (tmp_path / "other.parquet").write_bytes(content)
        tried("data", "info", "parquet:other.parquet", codes=(3,))
    folder = tmp_path / "pictures"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number, suffix in enumerate((".png", ".jpg", ".tiff", ".webp", ".npy", ".pkl")):
            content = traps(tried.canary)[KINDS[number]]
            (folder / name / f"{number}{suffix}").write_bytes(content)
        (folder / name / "script.py").write_text(f"open({str(tried.canary)!r}, 'w')\n")
    for script in ("pictures.py", "__init__.py", "dataset.py"):
        (folder / script).write_text(f"open({str(tried.canary)!r}, 'w')\n")
    text = tried("data", "scan", "folder:pictures", codes=(3,))
    assert text.count("cannot be read") >= 1
    tried("predict", "embedded:vit_nano", folder, codes=(3,))
    fault(
        "Local data with pickles: parquet files, their metadata, images, scripts beside them",
        "the code never runs; files that are no data are refused with 3",
        f"{tried.count} command lines",
    )


TAGS = (
    "!!python/object/apply:builtins.open ['{}', 'w']",
    "!!python/object/new:builtins.open ['{}', 'w']",
    '!!python/object/apply:os.system ["touch {}"]',
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!<tag:yaml.org,2002:python/object/apply:builtins.open> ['{}', 'w']",
)


@pytest.mark.parametrize("tag", TAGS)
def test_yaml(tag: str, tried: Tried, run: Path, fault: Callable[..., None]) -> None:
    value = tag.format(tried.canary)
    Path("bad.yaml").write_text(RECIPE.replace("vit_tiny_patch16_224", value))
    tried("train", "bad.yaml", codes=(2,))
    tried("recipes", "check", "bad.yaml", codes=(2,))
    Path("good.yaml").write_text(RECIPE)
    tried("train", "good.yaml", f"model.name={value}", codes=(4,))  # a name that is not known
    Path("plan.yaml").write_text(f"title: {value}\n{PLAN}")
    tried("reproduce", "plan.yaml", codes=(2,))
    (run / "recipe.yaml").write_text(RECIPE.replace("vit_tiny_patch16_224", value))
    tried("eval", run, codes=(2,))
    tried("probe", run, "--shots", "1", codes=(2,))
    tried("train", run, "--resume", codes=(2,))
    tried("report", run, codes=(0, 2, 4))
    (run / "model" / "README.md").write_text(f"---\nlicense: {value}\n---\n# Card\n")
    tried("demo", run / "model", "--export-space", "space", codes=(0,))
    fault(
        "Python objects in YAML: recipe, plan, a run's recipe, the card",
        "the code never runs; recipes and plans end with 2",
        f"{len(TAGS)} tags in {tried.count} command lines each",
    )


def test_json_that_steers_a_loader(
    tried: Tried, run: Path, picture: Path, fault: Callable[..., None]
) -> None:
    """timm would read weights from where a config.json says."""
    Path("trap.bin").write_bytes(traps(tried.canary)["torch zip"])
    trap = str(Path("trap.bin").absolute())
    start = json.loads((run / "model" / "config.json").read_text())
    places = {"file": trap, "url": f"file://{trap}", "custom_load": True, "state_dict": trap}
    steered = {**start, "pretrained_cfg": {**start["pretrained_cfg"], **places, "source": "file"}}
    (run / "model" / "config.json").write_text(json.dumps(steered))
    tried("predict", run, picture, codes=(0,))
    for key in ("checkpoint_path", "pretrained_cfg_overlay", "pretrained_cfg", "cache_dir"):
        wrong = {**start, "model_args": {**start["model_args"], key: trap}}
        (run / "model" / "config.json").write_text(json.dumps(wrong))
        assert key in tried("predict", run, picture)
    for name in ("run.json", "results.json", "metrics.jsonl", "model/config.json"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(traps(tried.canary)["protocol 2"])
        tried("report", run, codes=(0, 2, 3, 4))
        tried("eval", run, codes=(0, 2, 3, 4))
        (run / name).write_bytes(before)
    fault(
        "JSON of a model or run that points to a pickle, or is one",
        "the code never runs; keys that would steer timm's loader are refused with 4",
        f"{tried.count} command lines",
    )


def test_a_push_of_a_pickle(
    hub: HubServer, tried: Tried, run: Path, fault: Callable[..., None]
) -> None:
    (run / "model" / "model.safetensors").write_bytes(traps(tried.canary)["torch zip"])
    shutil.copytree(run / "model", "plain")
    for what in (run, "plain"):
        assert "model.safetensors" in tried("push", what, "alice/net")
    assert hub.count("POST /api/repos/create") == 0
    fault(
        "A push of a pickle that is called model.safetensors",
        "4 before anything is created on the hub",
        "2 command lines",
    )


@pytest.mark.faults
def test_in_processes_of_their_own(run: Path, tmp_path: Path, fault: Any) -> None:
    """An audit hook sees what a process unpickles and starts, whatever a trap would do."""
    canary = tmp_path / "canary"
    log = tmp_path / "audit"
    hook = (
        "import sys\n"
        f"log = open({str(log)!r}, 'a', buffering=1)\n"
        "def hear(event, args):\n"
        "    if event == 'pickle.find_class' and args[0] in ('io', '_io', 'builtins'):\n"
        "        log.write(f'{event} {args}\\n')\n"
        "sys.addaudithook(hear)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hook)
    (tmp_path / "a.png").write_bytes(_written(lambda s: Image.new("RGB", (18, 18)).save(s, "PNG")))
    poison(run, traps(canary)["torch zip"], "pytorch_model.bin")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    control = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    pickled = pickle.dumps(Trap(canary), 2).hex()
    subprocess.run([sys.executable, "-c", control, pickled], env=environment, check=True)
    assert "find_class" in log.read_text()
    assert canary.exists()
    canary.unlink()
    log.write_text("")
    lines = ("eval RUN", "predict RUN a.png", "export RUN --format torch --out x.pt2")
    for line in lines:
        ran = subprocess.run(
            [sys.executable, "-m", "finetune", *line.replace("RUN", str(run)).split()],
            **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True},
            timeout=300,
            check=False,
        )
        assert ran.returncode == 4, ran.stderr
        assert not canary.exists()
        assert log.read_text() == ""
    fault(
        "The same in processes of their own, under an audit hook",
        "no class of a trap is even looked up",
        f"{len(lines)} processes",
    )

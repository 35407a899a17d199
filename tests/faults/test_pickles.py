"""Pickles that run code when loaded, in every file of a run, a data set and a hub repository.

Each of them creates a file, the canary; no test may trigger one.
tests/models/test_pickled_weights.py shows that all of them work.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_runs import disable_report_and_plots
from hub_fixtures import CARD, hub, sleep_durations
from hub_server import HubServer
from malicious_pickles import (
    PICKLE_FORMATS,
    CommandRunner,
    MaliciousPickle,
    canary,
    image_path,
    malicious_files,
    runner,
    to_bytes,
)
from networks import forget_checksums
from PIL import Image
from recipe_texts import tiny_recipe_text

from finetune.cli import main as cli
from finetune.run.directory import RunDir

__all__ = ["canary", "hub", "image_path", "runner", "sleep_durations"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL_FILE_NAMES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors")
RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop', batch_size: 256",
    optim="lr: 3e-3, steps: 2",
    run="precision: fp32, save_every: 1",
)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "r.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        assert cli.main(["train", str(folder / "r.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run_dir(trained_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


COMMANDS: dict[str, tuple[tuple[int, ...], str]] = {
    "eval": ((4,), "eval RUN"),
    "predict": ((4,), "predict RUN a.png"),
    "show": ((4,), "show RUN a.png --out shown"),
    "probe": ((4,), "probe RUN --shots 1 --seeds 1"),
    "export": ((4,), "export RUN --format torch --out exported.pt2"),
    "export-space": ((4,), "demo RUN --export-space space"),
    "demo": ((4,), "demo RUN --port 0"),
    "info": ((0,), "info RUN"),  # reads no weights
    "report": ((0,), "report RUN"),  # reads no weights
    "train": ((4,), "train again.yaml model.name=RUN --out again"),
    "dry": ((4,), "train again.yaml model.name=RUN --dry-run --out again"),
    "reproduce": ((4,), "reproduce plan.yaml model.name=RUN --out runs"),
}
PLAN = """
title: A plan
runs:
- {name: one, recipe: again.yaml, seeds: [0]}
"""


def replace_weights(run_dir: Path, content: bytes, name: str) -> None:
    """Replace the weights of a run by a malicious file."""
    (forget_checksums(run_dir / "model") / "model.safetensors").unlink()
    (run_dir / "model" / name).write_bytes(content)


def write_recipe_and_plan(run_dir: Path) -> None:
    """Write a recipe and a plan that start from the weights of a run."""
    recipe = "model: {name: X}\ndata: {source: 'embedded:digits'}\noptim: {lr: 0.01, steps: 1}\n"
    Path("again.yaml").write_text(recipe)
    Path("plan.yaml").write_text(PLAN)


@pytest.mark.parametrize("pickle_format", PICKLE_FORMATS)
@pytest.mark.parametrize("name", MODEL_FILE_NAMES)
def test_every_command_on_a_run_with_pickled_weights(
    pickle_format: str,
    name: str,
    runner: CommandRunner,
    image_path: Path,
    run_dir: Path,
    fault: Callable[..., None],
) -> None:
    replace_weights(run_dir, malicious_files(runner.canary)[pickle_format], name)
    write_recipe_and_plan(run_dir)
    for codes, arguments in COMMANDS.values():
        text = runner(*arguments.replace("RUN", str(run_dir)).split(), codes=codes)
        assert name in text or codes != (4,)
    fault(
        "A run whose weights are a pickle that runs code",
        "no command runs it: 4 from those that read weights",
        f"{len(PICKLE_FORMATS)} formats × {len(MODEL_FILE_NAMES)} names × {len(COMMANDS)} "
        "command lines",
    )


def write_matching_manifest(folder: Path) -> None:
    """Write a matching manifest, as an attacker with write access could."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest["files"], sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("signed", [True, False])
def test_checkpoints(
    runner: CommandRunner, run_dir: Path, signed: bool, fault: Callable[..., None]
) -> None:
    """Replace each checkpoint file in turn, also with a manifest that matches."""
    original = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    names = [
        p.name for p in RunDir(run_dir).checkpoint_folder(2).iterdir() if p.name != "manifest.json"
    ]
    assert len(names) >= 4
    num_trials = 0
    for name in names:
        for pickle_format in ("protocol 2", "torch zip"):
            for path, content in original.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            shutil.rmtree(run_dir / "model")
            (run_dir / "results.json").unlink()
            for step in RunDir(run_dir).checkpoint_steps():
                folder = RunDir(run_dir).checkpoint_folder(step)
                (folder / name).write_bytes(malicious_files(runner.canary)[pickle_format])
                if signed:
                    write_matching_manifest(folder)
            runner("train", run_dir, "--resume", codes=(4,))
            num_trials += 1
    fault(
        "Files of checkpoints that are pickles",
        "the code never runs, --resume ends with 4, also with a matching manifest",
        f"{len(names)} files × 2 formats, with and without a matching manifest",
    )


class TestHub:
    def test_repositories_with_only_pickled_weights(
        self, hub: HubServer, runner: CommandRunner, image_path: Path, trained_run: Path, fault: Any
    ) -> None:
        config = (trained_run / "model" / "config.json").read_bytes()
        for number, (pickle_format, content) in enumerate(malicious_files(runner.canary).items()):
            files = {
                "config.json": config,
                "README.md": CARD.encode(),
                "pytorch_model.bin": content,
            }
            hub.add_repo(f"eve/net{number}", files)
            text = runner("predict", f"hf-hub:eve/net{number}", image_path)
            assert "pytorch_model.bin" in text, pickle_format
        fault(
            "A hub repository with only pickled weights",
            "the code never runs; 4",
            f"{len(PICKLE_FORMATS)} formats",
        )

    def test_repositories_with_custom_code(
        self, hub: HubServer, runner: CommandRunner, image_path: Path, fault: Any
    ) -> None:
        code = f"open({str(runner.canary)!r}, 'w')\nclass Net: pass\nclass Config: pass\n".encode()
        auto_map = {
            "AutoConfig": "modeling.Config",
            "AutoModelForImageClassification": "modeling.Net",
        }
        for number, model_type in enumerate(("vit", "evil")):
            config = {
                "model_type": model_type,
                "auto_map": auto_map,
                "trust_remote" + "_code": True,
                "custom_pipelines": {"image-classification": {"impl": "modeling.Net"}},
                **{"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 1},
                **{"num_attention_heads": 1, "intermediate_size": 8},
            }
            processor = {"auto_map": {"AutoImageProcessor": "modeling.Net"}}
            files = {
                "config.json": json.dumps(config).encode(),
                "preprocessor_config.json": json.dumps(processor).encode(),
                "pytorch_model.bin": malicious_files(runner.canary)["torch zip"],
                **dict.fromkeys(("modeling.py", "__init__.py", "setup.py"), code),
            }
            hub.add_repo(f"eve/code{number}", files)
            runner("predict", f"transformers:eve/code{number}", image_path)
            runner("predict", f"hf-hub:eve/code{number}", image_path)
            runner("info", f"transformers:eve/code{number}", codes=(0, 4))
            folder = Path(f"code{number}")
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            runner("predict", f"transformers:{folder}", image_path)
            runner("predict", f"./{folder}", image_path)
        fault(
            "A hub repository with code for its network (auto_map)",
            "the code never runs; 4",
            f"{runner.count} command lines",
        )

    def test_data_sets_with_code(self, hub: HubServer, runner: CommandRunner, fault: Any) -> None:
        code = f"open({str(runner.canary)!r}, 'w')\n".encode()
        tag = f"!!python/object/apply:builtins.open ['{runner.canary}', 'w']"
        card = f"---\nconfigs: {tag}\ndataset_info: {tag}\n---\n".encode()
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name in ("0.pyd", "0.pickle", "0.pkl", "0.pth", "0.npy", "0.npz", "0.cls"):
                content = b"1" if name == "0.cls" else malicious_files(runner.canary)["protocol 2"]
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        repositories = {
            "script": {"script.py": code, "README.md": b"# Data\n"},
            "card": {"README.md": card, "train.csv": b"image,label\n1,2\n"},
            "shards": {"train.tar": stream.getvalue()},
            "pickles": {"train.pkl": malicious_files(runner.canary)["protocol 2"]},
            "parquet": {"train.parquet": malicious_parquet(runner.canary)},
        }
        for name, files in repositories.items():
            hub.add_repo(f"eve/{name}", files, kind="dataset")
            runner("data", "info", f"hub:eve/{name}", codes=(0,) if name == "parquet" else (3, 7))
        fault(
            "Hub datasets with a loading script, pickles, or Python in the YAML of the card",
            "the code never runs; 3",
            f"{len(repositories)} datasets",
        )


def malicious_parquet(canary: Path) -> bytes:
    """Return two images with labels; the metadata of the schema hold pickles."""
    pickled = malicious_files(canary)["protocol 2"]
    extension = {"ARROW:extension:name": "arrow.py_extension_type"}
    images = []
    for brightness in (10, 200):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (brightness, 0, 0)).save(stream, "PNG")
        images.append(stream.getvalue())
    metadata = {**extension, "ARROW:extension:metadata": pickled}
    schema = pa.schema(
        [
            pa.field("image", pa.binary(), metadata=metadata),
            pa.field("label", pa.int64(), metadata=metadata),
        ],
        metadata={"pandas": pickled, "python_pickle": pickled},
    )
    stream = io.BytesIO()
    pq.write_table(pa.table([images, [0, 1]], schema=schema), stream)
    return stream.getvalue()


def test_local_data_with_pickles(
    runner: CommandRunner, tmp_path: Path, fault: Callable[..., None]
) -> None:
    (tmp_path / "train.parquet").write_bytes(malicious_parquet(runner.canary))
    runner("data", "scan", "parquet:train.parquet", codes=(0,))
    for pickle_format in PICKLE_FORMATS:
        content = malicious_files(runner.canary)[pickle_format]
        (tmp_path / "other.parquet").write_bytes(content)
        runner("data", "info", "parquet:other.parquet", codes=(3,))
    folder = tmp_path / "pictures"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number, suffix in enumerate((".png", ".jpg", ".tiff", ".webp", ".npy", ".pkl")):
            content = malicious_files(runner.canary)[PICKLE_FORMATS[number]]
            (folder / name / f"{number}{suffix}").write_bytes(content)
        (folder / name / "script.py").write_text(f"open({str(runner.canary)!r}, 'w')\n")
    for script in ("pictures.py", "__init__.py", "dataset.py"):
        (folder / script).write_text(f"open({str(runner.canary)!r}, 'w')\n")
    text = runner("data", "scan", "folder:pictures", codes=(3,))
    assert text.count("cannot be read") >= 1
    runner("predict", "embedded:vit_nano", folder, codes=(3,))
    fault(
        "Local data with pickles: parquet files, their metadata, images, scripts next to them",
        "the code never runs; files that are no data are refused with 3",
        f"{runner.count} command lines",
    )


YAML_TAGS = (
    "!!python/object/apply:builtins.open ['{}', 'w']",
    "!!python/object/new:builtins.open ['{}', 'w']",
    '!!python/object/apply:os.system ["touch {}"]',
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!<tag:yaml.org,2002:python/object/apply:builtins.open> ['{}', 'w']",
)


@pytest.mark.parametrize("tag", YAML_TAGS)
def test_yaml(tag: str, runner: CommandRunner, run_dir: Path, fault: Callable[..., None]) -> None:
    value = tag.format(runner.canary)
    Path("bad.yaml").write_text(RECIPE.replace("vit_tiny_patch16_224", value))
    runner("train", "bad.yaml", codes=(2,))
    runner("recipes", "check", "bad.yaml", codes=(2,))
    Path("good.yaml").write_text(RECIPE)
    runner("train", "good.yaml", f"model.name={value}", codes=(4,))  # an unknown name
    Path("plan.yaml").write_text(f"title: {value}\n{PLAN}")
    runner("reproduce", "plan.yaml", codes=(2,))
    (run_dir / "recipe.yaml").write_text(RECIPE.replace("vit_tiny_patch16_224", value))
    runner("eval", run_dir, codes=(2,))
    runner("probe", run_dir, "--shots", "1", codes=(2,))
    runner("train", run_dir, "--resume", codes=(2,))
    runner("report", run_dir, codes=(0, 2, 4))
    (run_dir / "model" / "README.md").write_text(f"---\nlicense: {value}\n---\n# Card\n")
    runner("demo", run_dir / "model", "--export-space", "space", codes=(0,))
    fault(
        "Python objects in YAML: recipe, plan, a run's recipe, the card",
        "the code never runs; recipes and plans end with 2",
        f"{len(YAML_TAGS)} tags in {runner.count} command lines each",
    )


def test_json_that_points_to_a_pickle(
    runner: CommandRunner, run_dir: Path, image_path: Path, fault: Callable[..., None]
) -> None:
    """timm would read weights from the path in config.json."""
    Path("trap.bin").write_bytes(malicious_files(runner.canary)["torch zip"])
    pickle_path = str(Path("trap.bin").absolute())
    original = json.loads((forget_checksums(run_dir / "model") / "config.json").read_text())
    loader_keys = {
        "file": pickle_path,
        "url": f"file://{pickle_path}",
        "custom_load": True,
        "state_dict": pickle_path,
    }
    changed = {
        **original,
        "pretrained_cfg": {**original["pretrained_cfg"], **loader_keys, "source": "file"},
    }
    (run_dir / "model" / "config.json").write_text(json.dumps(changed))
    runner("predict", run_dir, image_path, codes=(0,))
    for key in ("checkpoint_path", "pretrained_cfg_overlay", "pretrained_cfg", "cache_dir"):
        unsafe = {**original, "model_args": {**original["model_args"], key: pickle_path}}
        (run_dir / "model" / "config.json").write_text(json.dumps(unsafe))
        assert key in runner("predict", run_dir, image_path)
    for name in ("run.json", "results.json", "metrics.jsonl", "model/config.json"):
        content = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(malicious_files(runner.canary)["protocol 2"])
        runner("report", run_dir, codes=(0, 2, 3, 4))
        runner("eval", run_dir, codes=(0, 2, 3, 4))
        (run_dir / name).write_bytes(content)
    fault(
        "JSON of a model or run that points to a pickle, or is one",
        "the code never runs; keys that control timm's loader are refused with 4",
        f"{runner.count} command lines",
    )


def test_a_push_of_a_pickle(
    hub: HubServer, runner: CommandRunner, run_dir: Path, fault: Callable[..., None]
) -> None:
    (forget_checksums(run_dir / "model") / "model.safetensors").write_bytes(
        malicious_files(runner.canary)["torch zip"]
    )
    shutil.copytree(run_dir / "model", "plain")
    for folder in (run_dir, "plain"):
        assert "model.safetensors" in runner("push", folder, "alice/net")
    assert hub.count("POST /api/repos/create") == 0
    fault(
        "A push of a pickle named model.safetensors",
        "4 before anything is created on the hub",
        "2 command lines",
    )


def test_no_pickle_is_loaded_in_a_subprocess(run_dir: Path, tmp_path: Path, fault: Any) -> None:
    """An audit hook records every class that a process unpickles."""
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
    (tmp_path / "a.png").write_bytes(to_bytes(lambda s: Image.new("RGB", (18, 18)).save(s, "PNG")))
    replace_weights(run_dir, malicious_files(canary)["torch zip"], "pytorch_model.bin")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    control = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    pickled = pickle.dumps(MaliciousPickle(canary), 2).hex()
    subprocess.run([sys.executable, "-c", control, pickled], env=environment, check=True)
    assert "find_class" in log.read_text()
    assert canary.exists()
    canary.unlink()
    log.write_text("")
    commands = ("eval RUN", "predict RUN a.png", "export RUN --format torch --out x.pt2")
    for arguments in commands:
        result = subprocess.run(
            [sys.executable, "-m", "finetune", *arguments.replace("RUN", str(run_dir)).split()],
            **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True},
            timeout=300,
            check=False,
        )
        assert result.returncode == 4, result.stderr
        assert not canary.exists()
        assert log.read_text() == ""
    fault(
        "The same in subprocesses, with an audit hook",
        "no class of a pickle is looked up",
        f"{len(commands)} processes",
    )

"""What every test stands on: an offline, repeatable process, and the shared data where it is."""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import hashlib
import io
import ipaddress
import os
import random
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ("browsers", "results_pages")

REPOSITORY = Path(__file__).resolve().parents[1]

# What a launcher leaves in the environment; a suite started from such a shell must not notice.
_LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_")
_LAUNCHER_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def _from_launcher(name: str) -> bool:
    return name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)


def _prepare_environment() -> None:
    """Set what the libraries read when they are first imported, here and in subprocesses."""
    for name in [name for name in os.environ if _from_launcher(name)]:
        del os.environ[name]
    hub_home = tempfile.mkdtemp(prefix="finetune-tests-hub-")
    atexit.register(shutil.rmtree, hub_home, ignore_errors=True)
    cache = tempfile.mkdtemp(prefix="finetune-tests-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ.update(
        FINETUNE_CACHE=cache,
        HF_HOME=hub_home,  # nobody's cache decides whether a test passes
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        MPLBACKEND="Agg",
        OMP_NUM_THREADS="1",  # the networks are tiny, and sums of one thread are repeatable
        TOKENIZERS_PARALLELISM="false",
    )
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, and children inherit it
        signal.signal(signal.SIGHUP, lambda *_: None)
    sys.dont_write_bytecode = False  # each process of a test would compile the package: 0.5 s


_prepare_environment()  # before any test module imports torch or huggingface_hub


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `-m gpu` import its own folder alone: a machine with a GPU need not have all the rest."""
    asked, here = config.option.markexpr == "gpu", Path(__file__).parent
    mine = {here, here / "gpu"} & {collection_path, collection_path.parent}
    return True if asked and here in collection_path.parents and here / "gpu" not in mine else None


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for other processes."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Collecting imports nearly everything, as a command's start does."""
    from finetune import process_lifecycle as collector

    with collector.defer_garbage_collection():
        result = yield
    gc.freeze()  # what stays to the end need not be looked through again and again
    atexit.register(gc.unfreeze)  # or libraries that count what is never freed complain about it
    gc.set_threshold(2_000, 10, 50)  # nor what tests import: that took a twelfth of the time
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what ranks are forked from before a test changes the environment: it keeps a copy."""
    if "ranks" in sys.modules:
        sys.modules["ranks"].start_fork_server()


class NetworkBlocked(ConnectionError):
    """A test tried to leave this machine."""


def _is_local(host: str | bytes | None) -> bool:
    if host is None:
        return True
    text = host.decode() if isinstance(host, bytes) else host
    if text in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _refuse_if_remote(host: str | bytes | None) -> None:
    if not _is_local(host):
        raise NetworkBlocked(f"{host!r}: tests run without a network; use a local file or a double")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse names and connections beyond loopback in this process."""
    patch = pytest.MonkeyPatch()
    resolve = socket.getaddrinfo

    def local_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_if_remote(host)
        return resolve(host, *args, **kwargs)

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def local_connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _refuse_if_remote(address[0])
            return connect(self, address)

        return local_connect

    patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
    patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    # every client reads the world's certificates for itself, and none of them speaks TLS here
    patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def messages_are_printed() -> None:
    """Print messages as the command line does: pytest's own handlers would silence them."""
    from finetune.log import print_messages

    print_messages()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sum in one order: equal inputs then give equal bits; and let forked children train.

    They cannot where the process's first backward pass was one of fake tensors.
    """
    import torch

    torch.set_num_threads(1)
    torch.zeros(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True, scope="session")
def digits_are_read_once() -> Iterator[None]:
    """They are kept as text, and half of the tests train on them; none may change them."""
    import numpy as np
    import sklearn.datasets

    read = sklearn.datasets.load_digits

    @functools.cache
    def read_once(**options: Any) -> Any:
        digits = read(**options)
        for array in digits if isinstance(digits, tuple) else digits.values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        return digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", read_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and a tiny run waits forty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def versions_are_read_once() -> Iterator[None]:
    """Each run records the versions of ten packages."""
    from finetune.run import environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "version", functools.cache(environment.version))
        yield


@pytest.fixture(autouse=True, scope="session")
def equal_yaml_is_parsed_and_written_once() -> Iterator[None]:
    """A run reads its recipe eight times: a tenth of the time of a tiny run."""
    from finetune.recipe import strict_yaml

    dump_yaml = strict_yaml.dump_yaml
    texts: dict[str, str] = {}

    def dump_once(data: dict[str, Any]) -> str:
        key = repr(data)
        if key not in texts:
            texts[key] = dump_yaml(data)
        return texts[key]

    with pytest.MonkeyPatch.context() as patch:
        parse_once = functools.lru_cache(maxsize=1000)(strict_yaml._parse_node)
        patch.setattr(strict_yaml, "_parse_node", parse_once)
        patch.setattr(strict_yaml, "dump_yaml", dump_once)
        yield


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Start each test from the same seeds; leave no warnings or launcher variables to the next."""
    import numpy as np
    import torch
    from logs import forget_warnings

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    forget_warnings()
    before = {name: value for name, value in os.environ.items() if _from_launcher(name)}
    yield
    for name in [name for name in os.environ if _from_launcher(name)]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The top of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data and reference outputs: $FINETUNE_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("FINETUNE_SHARED") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist; set FINETUNE_SHARED to the folder")
    return folder


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """A data set that a small network can learn: 8 train and 4 test images in each of 3 classes.

    The class is the brightest channel; sizes differ from image to image, as in real folders.
    """
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    top = tmp_path / "colors"
    for split, count in (("train", 8), ("test", 4)):
        for channel, name in enumerate(("red", "green", "blue")):
            folder = top / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(20, 41, size=2)
                pixels = generator.integers(0, 96, size=(height, width, 3), dtype=np.uint8)
                pixels[..., channel] += 140
                Image.fromarray(pixels).save(folder / f"{name}-{number}.png")
    return top


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Leave the drawing out: where many small runs end, it takes most of the time."""
    from forked_runs import disable_report_and_plots

    with pytest.MonkeyPatch.context() as patch:
        disable_report_and_plots(patch)
        yield


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace figures with empty ones where a test ignores them; plotting takes 1 s a page."""
    from matplotlib.figure import Figure

    for name in (
        "plot_curves",
        "plot_confusion_matrix",
        "plot_reliability_diagram",
        "plot_run_comparison",
    ):
        monkeypatch.setattr(f"finetune.report.plots.{name}", lambda *_, **__: Figure())
    monkeypatch.setattr("finetune.report.page.to_svg", lambda *_, **__: "<svg></svg>")


@pytest.fixture(scope="session")
def exported_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int | None]:
    """Return `export_network` with a memory: an equal network is copied, not traced again.

    The processes of a parallel suite share it.
    """
    import torch

    from finetune.commands.export_formats import export_network

    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "exported-files"
    folder.mkdir(exist_ok=True)

    def export(network: Any, example: Any, path: Path, *names: str, **options: Any) -> int | None:
        content = io.BytesIO()
        torch.save((network, tuple(example.shape), names, options), content)
        kept = folder / hashlib.sha256(content.getvalue()).hexdigest()
        opset = kept.with_suffix(".opset")
        if opset.exists():
            shutil.copy(kept, path)
        else:
            number = export_network(network, example, path, *names, **options)
            for file, copied in ((kept, path.read_bytes()), (opset, repr(number).encode())):
                draft = file.with_suffix(f".{os.getpid()}")
                draft.write_bytes(copied)
                draft.replace(file)
        found: int | None = ast.literal_eval(opset.read_text())
        return found

    return export


@pytest.fixture(scope="module")
def equal_exports_run_once(exported_files: Callable[..., int | None]) -> Iterator[None]:
    """Trace each network once: that takes most of the time of an export."""
    from finetune.commands import export

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "export_network", exported_files)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """An open run directory with nothing in it."""
    from finetune.run.directory import RunDir

    run = RunDir(tmp_path / "run")
    run.open()
    yield run
    run.close()

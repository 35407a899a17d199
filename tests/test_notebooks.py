"""The notebooks: each runs from top to bottom, and what is kept of it is clean and up to date.

`python tests/test_notebooks.py` executes them anew, in full, and writes the outputs into them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from ranks import fork_context

import finetune

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LARGEST = 350_000  # bytes of a file
SECONDS = 1800  # of a cell; only a kernel that hangs takes so long
# Settings that make a test of what takes minutes, and runs that draw nothing of their own. The
# kept outputs are without them.
UNDRAWN = """\
import pytest
from forked_runs import disable_report_and_plots
disable_report_and_plots(pytest.MonkeyPatch())
"""
SHORT = {
    "1_quickstart": ["data.num_train=160", "data.num_test=40", "optim.epochs=1"],
    "2_three_experiments": ["data.num_train=80", "data.num_test=20", "optim.epochs=1"],
    "3_inside_a_vit": [],
}
PICTURES = {"1_quickstart": 5, "2_three_experiments": 5, "3_inside_a_vit": 5}


class Forked:
    """The process of a kernel, from one that has imported torch: as jupyter_client handles it."""

    stdin = stdout = stderr = None

    def __init__(self, words: Sequence[str], *, env: Any, cwd: str, **_: Any) -> None:
        self._process = fork_context.Process(target=serve, args=(words, env, cwd), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        while os.getpgid(self.pid) != self.pid:  # signals go to its group
            time.sleep(0.01)
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def serve(words: Sequence[str], env: dict[str, str], cwd: str) -> None:
    """Be a kernel."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID="1")  # it belongs to somebody, and ends with this suite
    os.chdir(cwd)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(list(words[words.index("ipykernel_launcher") + 1 :]))


def execute(path: Path, folder: Path, *, overrides: Sequence[str] = ()) -> Any:
    """Run a notebook in a folder that looks like the repository, so that nothing else is written.

    Args:
        path: of the notebook.
        folder: where to; the notebook finds ../recipes and writes to ../runs.
        overrides: given to the notebook after its cell that is tagged "parameters".
    Returns: the notebook with its outputs.
    """
    notebook = nbformat.read(path, as_version=4)
    if overrides:
        cells = notebook.cells
        (place,) = (n for n, cell in enumerate(cells, 1) if "parameters" in tags(cell))
        cells.insert(place, new_code_cell(f"{UNDRAWN}overrides = {list(overrides)!r}"))
    (folder / "notebooks").mkdir(parents=True)
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    searched = [str(Path(finetune.__file__).parents[1]), str(Path(__file__).parent)]
    searched.append(os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # sums of one thread are repeatable
        "IPYTHONDIR": str(folder / "ipython"),  # nobody's own profile
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),  # what is tested, and its like
    }
    # without any folder of kernels there is only that of this very Python
    specs = KernelSpecManager(kernel_dirs=[])
    with tempfile.TemporaryDirectory() as short:  # the name of a socket has room for 107 bytes
        manager = AsyncKernelManager(
            kernel_spec_manager=specs,
            transport="ipc",  # ports of several kernels that start at once could be the same
            connection_file=str(Path(short) / "kernel.json"),
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            record_timing=False,  # outputs are to change only with what they show
            resources={"metadata": {"path": str(folder / "notebooks")}},
        )
        # it leaves a kernel running whose manager is ours, unless told
        return client.execute(env=environment, cleanup_kc=True)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell.outputs]


def pictures(notebook: Any) -> list[str]:
    """The content of every picture that came out."""
    found = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [picture for picture in found if picture]


def said(notebook: Any) -> str:
    """All text that came out, whatever its kind."""
    texts = []
    for output in outputs(notebook):
        data = output.get("data", {})
        texts += [output.get("text", "")]
        texts += [text for kind, text in data.items() if kind.startswith("text/")]
    return "\n".join(texts)


def digest(notebook: Any) -> str:
    """Of the code that the outputs belong to."""
    text = "\0".join(cell.source for cell in code(notebook))
    return hashlib.sha256(text.encode()).hexdigest()


def cleaned(notebook: Any) -> Any:
    """The notebook as it is kept: results without progress, nothing of the machine or the hour."""
    for cell in code(notebook):
        cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        cell.metadata = {"tags": tags(cell)} if tags(cell) else {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "outputs_of": digest(notebook),
    }
    return notebook


def write(paths: Sequence[Path]) -> None:
    """Execute notebooks in full and keep their outputs."""
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            notebook = cleaned(execute(path, Path(folder) / "here"))
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


names = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_all_of_them_are_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SHORT) == list(PICTURES)


@names
def test_it_imports_what_exists(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    lines = "\n".join(cell.source for cell in code(notebook)).splitlines()
    tree = ast.parse("\n".join(line for line in lines if not line.startswith(("%", "!"))))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) > 3
    exec(compile(ast.Module(imports, []), str(path), "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path is NOTEBOOKS[0] else [pytest.mark.faults], id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "jupyter_client.provisioning.local_provisioner.launch_kernel"
    monkeypatch.setattr(place, Forked)
    notebook = execute(path, tmp_path / "here", overrides=SHORT[path.stem])
    assert len(pictures(notebook)) == PICTURES[path.stem]
    assert not [one for one in outputs(notebook) if one.output_type == "error"]
    assert "not the experiment" in said(notebook) or "experiments" not in path.stem


@names
def test_what_is_kept_is_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    assert len(set(pictures(notebook))) == PICTURES[path.stem]
    kinds = {(one.output_type, one.get("name")) for one in outputs(notebook)}
    assert kinds <= {("execute_result", None), ("display_data", None), ("stream", "stdout")}
    # run once, from top to bottom
    assert [cell.execution_count for cell in code(notebook)] == [
        number for number, _ in enumerate(code(notebook), 1)
    ]
    assert notebook == cleaned(nbformat.read(path, as_version=4)), WRITE


@names
def test_what_is_kept_tells_nothing_of_the_machine(path: Path) -> None:
    text = said(nbformat.read(path, as_version=4))
    assert len(text) > 500
    absolute = re.compile(r"(?<![\w.<:/])/[\w.-]+/|[A-Z]:\\|\bat 0x[0-9a-f]+|site-packages")
    assert absolute.search("see /tmp/runs and <b>more</b>")  # the pattern can find something
    assert not absolute.search("../runs/quickstart, owner/name, <td>1</td>")
    assert absolute.findall(text) == []


@names
def test_what_is_kept_came_from_this_code(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["outputs_of"] == digest(notebook), WRITE


WRITE = "changed since it was executed: python tests/test_notebooks.py"

if __name__ == "__main__":
    wanted = [Path(name).stem for name in sys.argv[1:]]
    write([path for path in NOTEBOOKS if not wanted or path.stem in wanted])

"""log.py: what a program that imports finetune sees, and how it silences or captures messages."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from logs import logged
from recipe_texts import tiny_recipe_text

from finetune.log import collect_warnings, logger, quiet, warn_once
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

Captured = pytest.CaptureFixture[str]


def run_program(text: str, **environment: str) -> tuple[str, str]:
    """Run a program that imports finetune; return what it prints on stdout and on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
    )
    return done.stdout, done.stderr


MESSAGE = "from finetune.log import logger; logger.info('hello')"


def test_messages_are_printed_on_stderr_by_default() -> None:
    assert run_program(MESSAGE) == ("", "finetune: hello\n")


def test_only_rank_0_prints() -> None:
    assert run_program(MESSAGE, RANK="1") == ("", "")


def test_the_level_silences_messages_whether_set_before_or_after_the_import() -> None:
    silence = "import logging; logging.getLogger('finetune').setLevel(logging.ERROR)\n"
    assert run_program(silence + MESSAGE) == ("", "")
    assert run_program("import finetune.log\n" + silence + MESSAGE) == ("", "")


def test_a_handler_of_the_program_takes_the_messages() -> None:
    root = "import logging, sys; logging.basicConfig(stream=sys.stdout, level=logging.INFO)\n"
    assert run_program(root + MESSAGE) == ("INFO:finetune:hello\n", "")
    own = "import logging; logging.getLogger('finetune').addHandler(logging.NullHandler())\n"
    assert run_program(own + MESSAGE) == ("", "")


def test_the_command_line_prints_whatever_other_handlers_exist() -> None:
    root = "import logging, sys; logging.basicConfig(stream=sys.stdout, level=logging.INFO)\n"
    command = "from finetune.cli.main import main; main(['recipes', 'schema'])\n"
    assert run_program(root + command + MESSAGE)[1] == "finetune: hello\n"


def test_training_prints_nothing_if_silenced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        train(parse_recipe(tiny_recipe_text()), tmp_path / "run")
    finally:
        logger.setLevel(level)
    assert capfd.readouterr() == ("", "")


def test_a_warning_is_logged_once_per_key() -> None:
    with logged() as messages:
        warn_once("first", key="a")
        warn_once("second", key="a")
        warn_once("third")
        warn_once("third")
    assert messages == ["first", "third"]


def test_quiet_hides_messages_and_keeps_warnings_for_later() -> None:
    with logged() as messages:
        with quiet():
            logger.info("hidden")
            warn_once("later")
            logger.error("shown")
        warn_once("later")
    assert messages == ["shown", "later"]


def test_control_characters_are_escaped(capsys: Captured) -> None:
    logger.info("name\x1b[2J")
    assert capsys.readouterr().err == "finetune: name\\x1b[2J\n"


def test_a_worker_collects_warnings_for_its_parent() -> None:
    import multiprocessing

    def work(connection: object) -> None:
        collect_warnings()
        warn_once("from the worker", key="k")
        connection.send(collect_warnings())  # type: ignore[attr-defined]

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(sender,))
    worker.start()
    assert receiver.recv() == [("from the worker", "k")]
    worker.join()

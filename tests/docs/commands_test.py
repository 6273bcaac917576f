"""Shell commands of README and docs: run where that is short, otherwise taken apart and checked.

Each command of a page is of a kind that this file knows how to check without what it needs (a GPU,
a broker, a network): a program of ours parses its command line, a target is known to make, a file
is there. The way from a model to an answer of its server is run as the README says it. With
`MONOLITH_SOAK=1` the longer commands run as well.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf  # imported before the processes below are forked, which then need not

from tests import free_ports
from tests.keras_versions import for_this_keras
from tests.serving import server_process

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
# Values for an ellipsis.
_LEFT_OUT = "--kafka_servers=kafka:9092 --model_dir=/models/clicks --task=my_module:Clicks"
_TIMEOUT_SECS = 300


def _blocks(page: pathlib.Path) -> list[str]:
  return re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _commands(block: str) -> list[list[str]]:
  """Returns the words of each command of a block, aliases put in and assignments left out."""
  aliases = dict(re.findall(r'^alias (\w+)="(.*)"$', block, re.MULTILINE))
  text = re.sub(r"<([\w ]+)>", r"\1", block.replace("\\\n", " "))
  text = re.sub(r"\$\w+", "1", text)
  commands = []
  for line in text.splitlines():
    for part in line.split(" && "):
      words = shlex.split(re.sub(r" \.\.\.$", f" {_LEFT_OUT}", part), comments=True)
      while words and re.match(r"[A-Z_0-9]+=", words[0]):
        words = words[1:]
      if words and words[0] in aliases:
        words = shlex.split(aliases[words[0]]) + words[1:]
      if words and words[0] != "alias":
        commands.append(words)
  return commands


class _ParsedError(Exception):
  """A command line was understood."""


def _get_parse(module_name: str) -> Callable[[list[str]], Any]:
  """Returns what lets a program of ours parse a command line, and do nothing else.

  It raises SystemExit for one that the program does not understand.
  """
  import argparse

  from absl import app, flags

  if "app.run(" in pathlib.Path(importlib.util.find_spec(module_name).origin).read_text():
    # Some define their flags only if they are the program.
    with mock.patch.object(app, "run", side_effect=_ParsedError):
      with contextlib.suppress(_ParsedError):
        runpy.run_module(module_name, run_name="__main__")

    def parse_flags(arguments):
      try:
        flags.FLAGS([module_name, *arguments])
      except flags.Error as error:
        raise SystemExit(str(error)) from error

    return parse_flags
  module = importlib.import_module(module_name)
  if hasattr(module, "__path__"):
    module = importlib.import_module(f"{module_name}.__main__")
  if hasattr(module, "parse_arguments"):
    return module.parse_arguments
  if hasattr(module, "make_parser"):
    return module.make_parser().parse_args
  original = argparse.ArgumentParser.parse_args

  def parse_args(self, args=None, namespace=None):
    original(self, args, namespace)
    raise _ParsedError

  def call_main(arguments):
    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
      with contextlib.suppress(_ParsedError):
        module.main(arguments)
        raise SystemExit(f"{module_name} parses no command line")

  return call_main


def _parse_in_child(module: str, *command_lines: list[str]) -> str:
  """Returns what a program complains about, nothing by default, for command lines of one program.

  In a process of its own, as two programs may have a flag of the same name.
  """
  reader, writer = os.pipe()
  child = os.fork()
  if child == 0:
    os.close(reader)
    errors = io.StringIO()
    try:
      with contextlib.redirect_stderr(errors):
        parse = _get_parse(module)
        for arguments in command_lines:
          parse(arguments)
      message = ""
    except BaseException as error:
      message = f"{type(error).__name__}: {error} {errors.getvalue()}"
    os.write(writer, message[-4000:].encode())
    os._exit(0)
  os.close(writer)
  with os.fdopen(reader) as pipe:
    message = pipe.read()
  _, status = os.waitpid(child, 0)
  return message if status == 0 else f"the process ended with status {status}"


def _extras() -> set[str]:
  """Returns the names of the package's extras."""
  text = (_ROOT / "tools/requirements.py").read_text()
  return set(re.findall(r'^  "([\w-]+)": \[', text, re.MULTILINE))


class CommandsTest(unittest.TestCase):
  def test_every_command_is_understood(self):
    self.assertTrue(tf.__version__)
    count = 0
    by_module: dict[str, list[list[str]]] = {}
    for page in _PAGES:
      for block in _blocks(page):
        for words in _commands(block):
          with self.subTest(page.name, command=" ".join(words)):
            self._check(words, by_module)
            count += 1
    self.assertGreater(count, 40)
    self.assertGreater(len(by_module), 8)
    for module, command_lines in by_module.items():
      with self.subTest(module):
        said = _parse_in_child(module, *command_lines)
        if module == "monolith.tpu_runner" and not hasattr(tf, "estimator"):
          self.assertIn("Take that version: pip install 'tensorflow==2.15.*'", said)
        else:
          self.assertEqual(said, "")

  def _check(self, words: list[str], by_module: dict[str, list[list[str]]]) -> None:
    """Checks a command; one of a program of ours is only entered in `by_module`."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "horovodrun":
      self.assertEqual(arguments[0], "--gloo")
      at = arguments.index(".venv/bin/python")
      program, arguments = "python", arguments[at + 1 :]
    if program == "srun":
      at = arguments.index("python")
      program, arguments = "python", arguments[at + 1 :]
    if arguments[:2] == ["-m", "monolith.serving.model_server"]:
      self.assertEqual(server_process.refusal_of(arguments[2:]), "")
    elif program == "python" and arguments[:1] == ["-m"]:
      by_module.setdefault(arguments[1], []).append(arguments[2:])
    elif program == "python":
      for path in arguments[:1]:
        compile((_ROOT / path).read_text(), path, "exec")
    elif program == "monolith_predict":
      by_module.setdefault("monolith.serving.predict", []).append(arguments)
    elif program == "make":
      ran = subprocess.run(["make", "-n", *arguments], cwd=_ROOT, capture_output=True, text=True)
      self.assertEqual(ran.returncode, 0, ran.stderr)
    elif program == "curl":
      self.assertIn("instances", json.loads(arguments[arguments.index("-d") + 1]))
    elif program == "pip":
      self.assertEqual(arguments[0], "install")
      for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)):
        self.assertIn(extra, _extras())
    elif program.endswith("monolith_model_server"):
      self.assertEqual(server_process.refusal_of(arguments), "")
    elif program.endswith(".sh"):
      self.assertTrue(os.access(_ROOT / program, os.X_OK), program)
      subprocess.run(["bash", "-n", _ROOT / program], check=True)
    elif program == "compute-sanitizer":
      test = arguments[-1].partition("/bin/")[2]
      self.assertTrue((_ROOT / f"{test}.cc").exists() or (_ROOT / f"{test}.cu").exists(), test)
    elif program not in ("git", "cd", "apt-get", "export"):
      self.fail(f"nothing here knows how to check {program}")

  def test_a_wrong_command_line_is_noticed(self):
    for module, *arguments in (
      ("monolith.agent_service.agent_client", "--cmd_type=hb", "--of_whom=x"),
      ("monolith.tasks.parity_data", "--of_whom=x"),
    ):
      self.assertIn("of_whom", _parse_in_child(module, arguments))


class _Programs(unittest.TestCase):
  """Runs commands of pages in a folder of the test."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name
    self.environment = {
      **os.environ,
      "PYTHONPATH": str(_ROOT),
      "TF_CPP_MIN_LOG_LEVEL": "2",
      "MONOLITH_ROOT": str(_ROOT),
      # The same first rows in every run: with one of a thousand others, a trained model ranks the
      # two items of a page wrongly.
      "MONOLITH_TABLE_SEED": "1",
    }

  def to_arguments(self, words: list[str], replaced: dict[str, str] | None = None) -> list[str]:
    if words[0].removeprefix(".venv/bin/") == "python":
      words = [sys.executable, *words[1:]]
    if words[0] == "monolith_predict":
      words = [sys.executable, "-m", "monolith.serving.predict", *words[1:]]
    for old, new in (replaced or {}).items():
      words = [word.replace(old, new) for word in words]
    return [str(_ROOT / word) if word.startswith("examples/") else word for word in words]

  def run_command(self, words: list[str], replaced: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
      self.to_arguments(words, replaced),
      cwd=self.folder,
      env=self.environment,
      capture_output=True,
      text=True,
      timeout=None if _SOAK else _TIMEOUT_SECS,
    )
    self.assertEqual(ran.returncode, 0, f"{words}: {ran.stdout[-1000:]} {ran.stderr[-3000:]}")
    return ran.stdout


class ServingTest(_Programs):
  def test_readme_trains_exports_serves_and_asks(self):
    [block] = [block for block in _blocks(_ROOT / "README.md") if "clicks.py" in block]
    *offline, server, request = _commands(block)
    model_dir = os.path.join(self.folder, "clicks")
    for words in offline:
      self.run_command(words, {"/tmp/clicks": model_dir})
    predictions = self._serve_and_ask(server, request, {"/tmp/clicks": model_dir})
    self.assertEqual(len(predictions), 2)
    self.assertGreater(predictions[0], predictions[1])

    # The page about serving shows scores of the same model.
    with open(os.path.join(self.folder, "examples.csv"), "w") as file:
      file.write("user,item\n3,1\n3,2\n")
    commands = [c for block in _blocks(_ROOT / "docs/serving.md") for c in _commands(block)]
    [scorer] = [c for c in commands if c[0] == "monolith_predict" and "--server" not in c[1]]
    scores = self.run_command(scorer, {"/tmp/clicks": model_dir})
    _, *values = scores.split()
    for value, prediction in zip(values, predictions):
      self.assertAlmostEqual(float(value), prediction, places=5)
    self.assertEqual(len(values), len(predictions))

  def test_ratings_become_answers(self):
    page = _ROOT / "docs/guides/ratings.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    program = os.path.join(self.folder, "ratings.py")
    with open(program, "w") as file:
      file.write(for_this_keras("\n".join(blocks)))
    # Both lines print what they say.
    self.assertEqual(self.run_command(["python", program]).split().count("True"), 2)
    events = [name for _, _, names in os.walk(os.path.join(self.folder, "logs")) for name in names]
    self.assertTrue(any("tfevents" in name for name in events))

    [[server, request]] = [_commands(block) for block in _blocks(page)]
    predictions = self._serve_and_ask(server, request, {})
    self.assertEqual(len(predictions), 2)
    self.assertTrue(all(0 < prediction[0] < 1 for prediction in predictions))

  def _serve_and_ask(self, server: list[str], request: list[str], replaced: dict[str, str]) -> list:
    """Returns the predictions of a server, which is gone then."""
    port = free_ports.get_free_port()
    arguments = self.to_arguments(server, {**replaced, "8501": str(port)})
    process = subprocess.Popen(
      [*arguments, f"--port={free_ports.get_free_port()}"],
      cwd=self.folder,
      env=self.environment,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    try:
      body = request[request.index("-d") + 1].encode()
      address = request[-1].replace("localhost:8501", f"127.0.0.1:{port}")
      return self._ask(process, f"http://{address}", body)["predictions"]
    finally:
      process.send_signal(signal.SIGTERM)
      process.communicate(timeout=60)

  def _ask(self, process: subprocess.Popen, url: str, body: bytes) -> dict:
    deadline = time.monotonic() + _TIMEOUT_SECS
    while True:
      try:
        with urllib.request.urlopen(url, body, timeout=60) as response:
          return json.load(response)
      except (urllib.error.URLError, ConnectionError):
        # Not up yet; no fixed time is right for that.
        if process.poll() is not None or time.monotonic() > deadline:
          process.kill()
          raise AssertionError(process.communicate()[1][-3000:]) from None
        time.sleep(0.2)


@unittest.skipUnless(_SOAK, "minutes: make soak")
class LongCommandsTest(_Programs):
  def test_programs_of_the_guides_run(self):
    with open(os.path.join(self.folder, "ratings.csv"), "w") as file:
      file.write("userId,movieId,rating,timestamp\n")
      for i in range(5000):
        file.write(f"{i % 50},{i * 7 % 90},{1 + i % 5},{i}\n")
    run = 0
    for name in ("guides/models.md", "guides/servers.md", "guides/ranks.md", "guides/tpu.md"):
      for block in _blocks(_ROOT / "docs" / name):
        for words in _commands(block):
          is_program = words[1:2] == ["-m"] and "--tpu=name" not in words
          if is_program:
            self.run_command(words)
            run += 1
    self.assertGreaterEqual(run, 6)


if __name__ == "__main__":
  unittest.main()

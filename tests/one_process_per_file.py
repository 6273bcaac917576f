"""A pytest plugin that runs every test file in a process of its own, several at a time.

Graph mode and eager mode, absl flags and TensorFlow's default graph are state of a process: files
that share one disturb each other. Asked for one file, pytest runs as usual; asked for more, this
plugin starts one pytest per file and prints one summary:

  pytest tests                                  all files, one process each
  pytest tests -k restore --file-jobs 1         options go to every process

  pytest tests --preload tests.preloaded        processes are forks of one that has imported it
  pytest tests --quick                          without what is marked as thorough
  pytest tests --results FILE --target test     writes what `make test` ran, and how long it took

`make test` forks, because importing TensorFlow and Monolith would take each process seconds.

A file is thorough if it says `pytestmark = pytest.mark.thorough` at module level: `--quick` does
not even start its process. A single test is if it is decorated with `@pytest.mark.thorough`.
"""

from __future__ import annotations

import atexit
import datetime
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

import pytest

_NO_TESTS_COLLECTED = 5
# A file that hangs must not hang the whole run; the slowest takes a fraction of this.
_FILE_TIMEOUT_SECONDS = 7200 if os.environ.get("MONOLITH_SOAK") == "1" else 1200
_IS_THOROUGH = re.compile(r"^pytestmark = pytest\.mark\.thorough$", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--file-jobs",
    type=int,
    # One more than there are cores: some files wait for their servers most of the time.
    default=(os.cpu_count() or 1) + 1,
    help="how many test files run at a time (default: the number of cores, and one)",
  )
  parser.addoption(
    "--preload", action="append", default=[], help="a module that every process has imported"
  )
  parser.addoption(
    "--quick", action="store_true", help="leave out the files and tests marked as thorough"
  )
  parser.addoption("--results", type=pathlib.Path, help="a JSON file that says what ran")
  parser.addoption("--target", help="the target of make that runs this, for --results")


def pytest_configure(config: pytest.Config) -> None:
  config.addinivalue_line("markers", "thorough: left out by --quick, run by `make test-all`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves thorough tests out of a quick run."""
  if not config.option.quick:
    return
  thorough = [item for item in items if item.get_closest_marker("thorough")]
  items[:] = [item for item in items if item not in thorough]
  config.hook.pytest_deselected(items=thorough)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
  files = _requested_files(config)
  if len(files) < 2 or config.option.collectonly or config.option.help:
    return None
  option = config.option
  start = time.monotonic()
  results = _run_files(files, _shared_options(config), option.file_jobs, option.preload)
  seconds = time.monotonic() - start
  if option.results:
    command = f"make {option.target}" if option.target else "pytest"
    _write_results(option.results, results, seconds, command)
  return _print_summary(results, seconds)


@dataclass
class _Result:
  """Holds the report of one file's process."""

  path: pathlib.Path
  returncode: int
  output: str
  seconds: float
  passed: int = 0
  failed: int = 0
  skipped: list[str] = field(default_factory=list)

  @property
  def ok(self) -> bool:
    return self.failed == 0 and self.returncode in (0, _NO_TESTS_COLLECTED)


def _requested_files(config: pytest.Config) -> list[pathlib.Path]:
  files: list[pathlib.Path] = []
  for argument in config.args:
    path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
    found = sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
    if config.option.quick and path.is_dir():
      found = [file for file in found if not _IS_THOROUGH.search(file.read_text("utf-8"))]
    files += [file for file in found if file not in files]
  # The longest first: one that begins last would run alone in the end.
  return sorted(files, key=lambda file: "reliability" not in file.parts)


def _shared_options(config: pytest.Config) -> list[str]:
  """Returns the command line without what named the files and the options of this plugin."""
  options, skip_next = [], False
  own = ("--file-jobs", "--results", "--target")
  for argument in map(str, config.invocation_params.args):
    if skip_next or argument.split("::")[0] in {a.split("::")[0] for a in config.args}:
      skip_next = False
    elif argument in own:
      skip_next = True
    elif not argument.startswith(tuple(f"{name}=" for name in own)):
      options.append(argument)
  return options


def _run_files(
  files: list[pathlib.Path], options: list[str], jobs: int, preload: list[str]
) -> list[_Result]:
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(preload)
  results: list[_Result] = []
  waiting = files[::-1]
  running: list[_Run] = []
  with tempfile.TemporaryDirectory() as folder:
    while waiting or running:
      while waiting and len(running) < max(1, jobs):
        path = waiting.pop()
        running.append(_Run(context, path, options, pathlib.Path(folder) / str(len(waiting))))
      multiprocessing.connection.wait([run.process.sentinel for run in running], timeout=10)
      for run in [run for run in running if run.has_ended()]:
        running.remove(run)
        results.append(run.result())
        _print_result(results[-1], len(results), len(files))
  return results


class _Run:
  """A process that runs one file."""

  def __init__(
    self,
    context: multiprocessing.context.ForkServerContext,
    path: pathlib.Path,
    options: list[str],
    stem: pathlib.Path,
  ) -> None:
    self._path = path
    self._start = time.monotonic()
    self._log, self._report = stem.with_suffix(".log"), stem.with_suffix(".xml")
    arguments = [str(path), f"--junitxml={self._report}", *options]
    self.process = context.Process(target=_run_pytest, args=(arguments, str(self._log)))
    self.process.start()

  def has_ended(self) -> bool:
    """Tells whether the process is no more, and ends one that hangs."""
    if time.monotonic() - self._start > _FILE_TIMEOUT_SECONDS:
      self.process.kill()
      self.process.join()
    return not self.process.is_alive()

  def result(self) -> _Result:
    seconds = time.monotonic() - self._start
    output = self._log.read_text(errors="replace") if self._log.exists() else ""
    if seconds > _FILE_TIMEOUT_SECONDS:
      output += f"\nstopped after {_FILE_TIMEOUT_SECONDS} s"
    exitcode = self.process.exitcode
    result = _Result(self._path, 1 if exitcode is None else exitcode, output, seconds)
    _read_report(result, self._report)
    return result


def _run_pytest(arguments: list[str], log: str) -> None:
  """Runs in the process of a file; whatever it prints goes to a file."""
  for descriptor, name, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT)):
    opened = os.open(name, flags, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)
  os.dup2(1, 2)
  # Its import of an event loop takes a third of a second, and no test of ours needs it.
  code = pytest.main([*arguments, "-p", "no:anyio"])
  # Processes of this kind end without.
  atexit._run_exitfuncs()
  sys.exit(int(code))


def _read_report(result: _Result, report: pathlib.Path) -> None:
  if not report.exists():  # the process died: count the file itself as one failure
    result.failed = 0 if result.returncode == _NO_TESTS_COLLECTED else 1
    return
  for case in ElementTree.parse(report).getroot().iter("testcase"):
    outcomes = {child.tag: child for child in case}
    if "failure" in outcomes or "error" in outcomes:
      result.failed += 1
    elif "skipped" in outcomes:
      result.skipped.append(f"{case.get('name')}: {outcomes['skipped'].get('message')}")
    else:
      result.passed += 1


def _display(path: pathlib.Path) -> str:
  try:
    return str(path.relative_to(pathlib.Path.cwd()))
  except ValueError:
    return str(path)


def _print_result(result: _Result, done: int, total: int) -> None:
  counts = f"{result.passed} passed"
  counts += f", {result.failed} failed" if result.failed else ""
  counts += f", {len(result.skipped)} skipped" if result.skipped else ""
  mark = "ok    " if result.ok else "FAILED"
  print(
    f"[{done:3d}/{total}] {mark} {_display(result.path)} ({counts}, {result.seconds:.0f} s)",
    flush=True,
  )
  if not result.ok:
    print(result.output, flush=True)


def _write_results(
  path: pathlib.Path, results: list[_Result], seconds: float, command: str
) -> None:
  """Writes what ran where, for `tools/tested_page.py`."""
  counts = {"passed": 0, "failed": 0, "skipped": 0}
  files = {}
  for result in sorted(results, key=lambda r: r.path):
    failed = _failures(result)
    counts["passed"] += result.passed
    counts["failed"] += failed
    counts["skipped"] += len(result.skipped)
    files[_display(result.path)] = {
      "passed": result.passed,
      "failed": failed,
      "skipped": len(result.skipped),
      "seconds": round(result.seconds, 1),
    }
  # Python 3.9 does not know the system's name.
  release = getattr(platform, "freedesktop_os_release", dict)()
  document = {
    "date": datetime.date.today().isoformat(),
    "machine": platform.machine(),
    "cores": os.cpu_count(),
    "system": release.get("PRETTY_NAME", platform.system()),
    "python": platform.python_version(),
    "tensorflow": importlib.metadata.version("tensorflow"),
    "command": command,
    "seconds": round(seconds),
    **counts,
    "files": files,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _failures(result: _Result) -> int:
  """Returns how many tests failed; a process that ended by itself is one failure."""
  return max(result.failed, 0 if result.ok else 1)


def _print_summary(results: list[_Result], seconds: float) -> int:
  bad = [result for result in results if not result.ok]
  skipped = [(result, reason) for result in results for reason in result.skipped]
  print(f"\n{len(results)} files in {seconds:.0f} s; the slowest:")
  for result in sorted(results, key=lambda r: -r.seconds)[:5]:
    print(f"  {result.seconds:4.0f} s  {_display(result.path)}")
  for result, reason in skipped:
    print(f"  skipped  {_display(result.path)}::{reason}")
  for result in bad:
    print(f"  FAILED   {_display(result.path)}")
  passed = sum(result.passed for result in results)
  failed = sum(map(_failures, results))
  print(f"{passed} passed, {failed} failed, {len(skipped)} skipped")
  if not passed and not failed:
    return _NO_TESTS_COLLECTED
  return 1 if bad else 0

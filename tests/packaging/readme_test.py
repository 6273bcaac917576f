"""What the README shows is true: its programs run as they are printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_TIMEOUT_SECS = 600


def _read() -> str:
  with open(os.path.join(_ROOT, "README.md")) as f:
    return f.read()


def _run(program: str, folder: str) -> str:
  """Runs a program in an empty folder, as a file; returns its output."""
  path = os.path.join(folder, "program.py")
  with open(path, "w") as f:
    f.write(program)
  result = subprocess.run(
    [sys.executable, path],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": _ROOT},
    capture_output=True,
    text=True,
    timeout=_TIMEOUT_SECS,
  )
  assert result.returncode == 0, result.stderr[-5000:]
  return result.stdout


class ReadmeTest(absltest.TestCase):
  def test_model_of_ones_own(self):
    section = _read().partition("## Train a model of your own")[2]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)

    self.assertLessEqual(len(program.splitlines()), 40)
    with tempfile.TemporaryDirectory() as folder:
      output = _run(program, folder)
      self.assertIn("model.ckpt-200.index", os.listdir(os.path.join(folder, "clicks_model")))

    right = float(re.search(r"right: ([\d.]+)", output).group(1))
    self.assertBetween(right, 0.87, 0.91)

  def test_programs_in_shell_commands(self):
    programs = re.findall(r"python - <<'PY'\n(.*?)\nPY", _read(), re.DOTALL)

    self.assertNotEmpty(programs)
    for program in programs:
      # What it prints is said at the end of the line that prints.
      said = re.findall(r"print\(.*# (.*)$", program, re.MULTILINE)
      with tempfile.TemporaryDirectory() as folder:
        printed = _run(program, folder)
      self.assertEqual(" ".join(printed.split()), " ".join(" ".join(said).split()))

  def test_linked_files_exist(self):
    links = re.findall(r"\]\(([^)#]+)\)", _read())

    self.assertNotEmpty(links)
    for link in links:
      if "://" not in link:
        self.assertTrue(os.path.exists(os.path.join(_ROOT, link)), link)


if __name__ == "__main__":
  absltest.main()

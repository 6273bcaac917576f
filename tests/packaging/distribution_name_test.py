"""The distribution is `monolith-recsys`, everywhere, and bears no other `monolith` beside it.

Tests `monolith/_install.py` and `row_log/kafka_lib.py`.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from monolith import _install

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SUFFIXES = set(".bazel .bzl .cc .cu .h .ipynb .md .py .sh .toml .yaml .yml".split())
# An extra of PyPI's stranger, its name in an install command, and a wheel of our former name.
_STRANGER = re.compile(
  r"\bmonolith\\?\[[a-z]|\bmonolith-\*?\.whl"
  r"|\bpip3? install (?:-\S+ )*['\"]?monolith(?![\w/.-])"
)
# Runs code, and prints what it raises.
_WITHOUT_EXTRAS = """
import sys

class WithoutExtras:
  def find_spec(self, name, path=None, target=None):
    extras = "confluent_kafka", "tensorflow_serving", "grpc_health", "torch", "jax"
    if name.partition(".")[0] in extras:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutExtras())

def attempt(code):
  try:
    exec(code)
    print("no error")
  except ImportError as error:
    print(error)
"""
_NEEDS_EXTRAS = (
  ("torch", "import monolith.torch"),
  ("jax", "import monolith.jax"),
  *(
    ("realtime", f"import monolith.{name}")
    for name in (
      "realtime.joiner",
      "realtime.trainer",
      "row_log.row_log_hooks",
    )
  ),
  *(
    ("serving", f"import monolith.{name}")
    for name in (
      "native_training.model_export.warmup_data_decoder",
      "native_training.model_export.warmup_data_gen",
      "serving.predict",
    )
  ),
  (
    "serving",
    "from monolith.agent_service import serving_protos as s; s.gen_model_config('a', 'b')",
  ),
  ("kafka", "from monolith.native_training.metric import kafka_utils as k; k.KProducer('a', 'b')"),
  (
    "kafka",
    "from monolith.native_training.data import stream_positions as s; s.GroupClient({'a': 'b'})",
  ),
)
_STRANGERS_INIT = "VERSION = (0, 3, 3)\n__version__ = '0.3.3'\n"


def _sources():
  listing = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )
  names = listing.stdout.splitlines() if listing.returncode == 0 else []
  for path in map(pathlib.Path, names):
    if path.suffix in _SUFFIXES or "Dockerfile" in path.name or path.name == "Makefile":
      if (_ROOT / path).exists() and (_ROOT / path) != pathlib.Path(__file__).resolve():
        yield path


class InstallLineTest(unittest.TestCase):
  def test_line_depends_on_where_the_package_lies(self):
    with tempfile.TemporaryDirectory() as folder:
      package = pathlib.Path(folder, "monolith")
      self.assertEqual(
        _install.install_line("serving", package=package), "pip install 'monolith-recsys[serving]'"
      )
      self.assertEqual(_install.install_line(package=package), "pip install monolith-recsys")

      pathlib.Path(folder, "pyproject.toml").touch()

      self.assertEqual(_install.install_line("kafka", package=package), "pip install '.[kafka]'")
      self.assertEqual(_install.install_line(package=package), "pip install .")

  def test_whatever_needs_a_missing_extra_names_the_command(self):
    program = _WITHOUT_EXTRAS + "".join(f"attempt({code!r})\n" for _, code in _NEEDS_EXTRAS)

    run = subprocess.run(
      [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, check=False
    )

    self.assertEqual(run.returncode, 0, run.stderr)
    lines = run.stdout.splitlines()
    self.assertEqual(len(lines), len(_NEEDS_EXTRAS))
    for (extra, code), said in zip(_NEEDS_EXTRAS, lines):
      with self.subTest(code):
        self.assertRegex(said, "No module named '.*': " + re.escape(_install.install_line(extra)))

  def test_modules_of_this_package_are_no_extra(self):
    for name in ("monolith.nothing", None):
      with self.assertRaises(ModuleNotFoundError) as raised, _install.naming_extra("kafka"):
        raise ModuleNotFoundError("missing", name=name)
      self.assertEqual(str(raised.exception), "missing")

  def test_pattern_finds_the_stranger(self):
    for text in (
      "pip install 'monolith[serving]'",
      "install monolith[debugging]",
      r"pip install 'monolith\[tpu\]'",
      "pip install monolith",
      "pip install --upgrade monolith\n",
      "/wheels/monolith-*.whl",
    ):
      self.assertRegex(text, _STRANGER)
    for text in (
      "pip install 'monolith-recsys[serving]'",
      "pip install monolith-recsys",
      "pip uninstall monolith",
      "cd monolith && make build",
      "monolith_recsys-*.whl",
    ):
      self.assertNotRegex(text, _STRANGER)

  @unittest.skipUnless((_ROOT / ".git").exists(), "needs a checkout")
  def test_no_file_names_the_stranger(self):
    paths = list(_sources())
    self.assertGreater(len(paths), 500)
    found = [
      f"{path}:{number}: {line.strip()}"
      for path in paths
      for number, line in enumerate((_ROOT / path).read_text("utf-8").splitlines(), 1)
      if _STRANGER.search(line)
    ]
    self.assertEqual(found, [])

  def test_project_has_the_name(self):
    if not (_ROOT / "pyproject.toml").exists():
      self.skipTest("needs a checkout")
    text = (_ROOT / "pyproject.toml").read_text("utf-8")
    self.assertRegex(text, rf'(?m)^name = "{_install.DISTRIBUTION}"')


class StrangerTest(unittest.TestCase):
  """Both in one site folder, whose `monolith/__init__.py` is of the one that came last."""

  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._site = pathlib.Path(folder.name)
    (self._site / "monolith").mkdir()
    for path in (_ROOT / "monolith").iterdir():
      if path.name != "__init__.py" and path.name != "__pycache__":
        (self._site / "monolith" / path.name).symlink_to(path)
    self._init = self._site / "monolith/__init__.py"
    # The folder that counts is the one that was imported, not where a link leads.
    (self._site / "monolith/_install.py").unlink()
    for name in ("__init__.py", "_install.py"):
      (self._site / "monolith" / name).write_text((_ROOT / "monolith" / name).read_text("utf-8"))

  def _import(self, module):
    return subprocess.run(
      [sys.executable, "-c", f"import {module}"],
      cwd=self._site,
      env={**os.environ, "PYTHONPATH": str(self._site), "PYTHONDONTWRITEBYTECODE": "1"},
      capture_output=True,
      text=True,
    )

  def test_alone_it_is_imported(self):
    process = self._import("monolith")
    self.assertEqual(process.returncode, 0, process.stderr)

  def test_ours_came_last(self):
    (self._site / "monolith-0.3.3.dist-info").mkdir()
    self._check(self._import("monolith"))

  def test_the_stranger_came_last(self):
    (self._site / "monolith-0.3.3.dist-info").mkdir()
    self._init.write_text(_STRANGERS_INIT)
    for module in ("monolith.native_training", "monolith.keras", "monolith.serving"):
      with self.subTest(module):
        self._check(self._import(module))

  def _check(self, process):
    self.assertEqual(process.returncode, 1)
    message = process.stderr.strip().splitlines()[-1]
    self.assertIn("ImportError: Another distribution, monolith 0.3.3, shares the folder", message)
    self.assertIn("pip uninstall monolith, then pip install --force-reinstall", message)


if __name__ == "__main__":
  unittest.main()

"""The notebooks run from top to bottom, and show what their text says."""

import importlib.util
import os
import pathlib
import re
import tempfile

import jupyter_client
import nbclient
import nbformat
import pytest
from absl.testing import absltest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "examples/notebooks"


def _run(name):
  """Returns what the cells of a notebook print, and their values as text."""
  notebook = nbformat.read(_FOLDER / f"{name}.ipynb", as_version=4)
  nbformat.validate(notebook)
  with tempfile.TemporaryDirectory() as folder:
    resources = {"metadata": {"path": folder}}
    # Sockets in the folder: free ports, which a kernel gets by default, can be another process's
    # by the time that it listens.
    manager = jupyter_client.AsyncKernelManager(
      kernel_name="python3", transport="ipc", connection_file=os.path.join(folder, "kernel.json")
    )
    client = nbclient.NotebookClient(
      notebook, manager, timeout=300, startup_timeout=300, resources=resources
    )
    # The same first rows in every run.
    environment = {"PYTHONPATH": str(_ROOT), "MONOLITH_TABLE_SEED": "1"}
    client.execute(env={**os.environ, **environment})
  outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
  texts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)
  return "\n".join(texts)


class NotebooksTest(absltest.TestCase):
  def test_first_table(self):
    shown = _run("first_table")
    self.assertIn("2 [ True False]", shown)
    self.assertIn("array([[-2., -2., -2., -2.],", shown)
    self.assertLess(float(re.search(r"largest error: ([\d.]+)", shown)[1]), 0.01)
    self.assertIn("10000 rows, the same: True", shown)

  def test_movielens(self):
    shown = _run("movielens")
    reached, possible = map(float, re.search(r"AUC ([\d.]+), possible ([\d.]+)", shown).groups())
    self.assertBetween(reached, possible - 0.05, possible + 0.01)
    self.assertIn("the same: True", shown)

  @absltest.skipUnless(importlib.util.find_spec("torch"), "needs PyTorch")
  def test_pytorch(self):
    shown = _run("pytorch")
    self.assertGreater(float(re.search(r"right: ([\d.]+)", shown)[1]), 0.8)
    self.assertIn("200 users, 200 items", shown)
    self.assertIn("(['user', 'seen'], {'user': 2, 'item': 3})", shown)
    self.assertIn("200 rows\nthe same: True\nTrue False True", shown)

  @absltest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "starts servers: make soak")
  def test_keras_to_servers(self):
    shown = _run("keras_to_servers")
    for where in ("Keras", "two servers"):
      self.assertGreater(float(re.search(rf"{where}: right ([\d.]+)", shown)[1]), 0.8)

  def test_notebooks_are_kept_without_output(self):
    notebooks = sorted(_FOLDER.glob("*.ipynb"))
    self.assertLen(notebooks, 4)
    for path in notebooks:
      for cell in nbformat.read(path, as_version=4).cells:
        self.assertFalse(cell.get("outputs"), path.name)


if __name__ == "__main__":
  absltest.main()

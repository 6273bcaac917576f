import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

from monolith.native_training.settings import rank_environment as mpi_utils


def _env(**values):
  others = (*mpi_utils.LAUNCHER_VARIABLES, mpi_utils.ENGINE_ENV)
  clean = {n: v for n, v in os.environ.items() if n not in others}
  return mock.patch.dict(os.environ, {**clean, **values}, clear=True)


def _launched(prefix, rank, local_rank, size, local_size):
  values = {"RANK": rank, "LOCAL_RANK": local_rank, "SIZE": size, "LOCAL_SIZE": local_size}
  return {f"{prefix}_{name}": str(value) for name, value in values.items()}


class MpiUtilsTest(unittest.TestCase):
  def _all(self):
    return (
      mpi_utils.get_mpi_rank(), mpi_utils.get_mpi_local_rank(),
      mpi_utils.get_mpi_size(), mpi_utils.get_mpi_local_size(),
    )  # fmt: skip

  def test_without_mpi(self):
    with _env():
      self.assertFalse(mpi_utils.is_under_mpi())
      self.assertEqual(self._all(), (0, 0, 1, 1))
      self.assertIsNone(mpi_utils.read_launcher("size"))

  def test_under_each_launcher(self):
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
      with self.subTest(prefix), _env(**_launched(prefix, 5, 1, 8, 4)):
        self.assertTrue(mpi_utils.is_under_mpi())
        self.assertEqual(self._all(), (5, 1, 8, 4))

  def test_hydra_names_local_ranks_differently(self):
    with _env(PMI_RANK="3", PMI_SIZE="4", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2"):
      self.assertEqual(self._all(), (3, 1, 4, 2))

  def test_horovod_comes_before_open_mpi_before_pmi(self):
    horovod = _launched("HOROVOD", 1, 1, 2, 2)
    open_mpi = _launched("OMPI_COMM_WORLD", 5, 1, 8, 4)
    pmi = _launched("PMI", 7, 3, 16, 8)
    with _env(**pmi, **open_mpi):
      self.assertEqual(self._all(), (5, 1, 8, 4))
    with _env(**pmi, **open_mpi, **horovod):
      self.assertEqual(self._all(), (1, 1, 2, 2))

  def test_pytorchs_variables(self):
    torch = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    with _env(**torch):
      self.assertFalse(mpi_utils.is_under_mpi())  # others set these, too
      self.assertIsNone(mpi_utils.read_launcher("rank"))
    master = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    with _env(**torch, **master):
      self.assertTrue(mpi_utils.is_under_mpi())
      self.assertTrue(mpi_utils.meets_without_library())
      self.assertEqual(self._all(), (5, 1, 8, 4))
      self.assertEqual(mpi_utils.read_master(), ("host", 29500))
    with _env(**torch, **master, **_launched("OMPI_COMM_WORLD", 1, 1, 2, 2)):
      self.assertFalse(mpi_utils.meets_without_library())
      self.assertEqual(self._all(), (1, 1, 2, 2))
    with _env(MASTER_ADDR="host", MASTER_PORT="x"):
      with self.assertRaisesRegex(ValueError, "MASTER_PORT is 'x'"):
        mpi_utils.read_master()

  def test_workers_of_tf_config(self):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "a:2"]}

    def env(cluster, job, index):
      config = {"cluster": cluster, "task": {"type": job, "index": index}}
      return _env(TF_CONFIG=json.dumps(config))

    with env(cluster, "worker", 1):
      self.assertTrue(mpi_utils.is_under_mpi())
      self.assertEqual(self._all(), (2, 1, 3, 2))
      self.assertEqual(mpi_utils.read_worker_cluster(), (2, ["a:1", "b:1", "a:2"]))
      self.assertIsNone(mpi_utils.read_master())
    with env(cluster, "chief", 0):
      self.assertEqual(self._all(), (0, 0, 3, 2))
    # Workers of parameter servers, an evaluator beside workers, a process alone.
    for other in (
      env({**cluster, "ps": ["c:1"]}, "worker", 1),
      env(cluster, "evaluator", 0),
      env({"worker": ["a:1"]}, "worker", 0),
      _env(TF_CONFIG=""),
    ):
      with other:
        self.assertFalse(mpi_utils.is_under_mpi())
    with _env(TF_CONFIG="{"):
      with self.assertRaisesRegex(ValueError, "TF_CONFIG is '{', want JSON"):
        mpi_utils.is_under_mpi()

  def test_engine_of_ranks_that_are_started_here(self):
    with _env(MONOLITH_RANKS_ENGINE="tensorflow"):
      self.assertEqual(mpi_utils.find_local_engine(), "tensorflow")
    with _env(), mock.patch.object(mpi_utils.importlib.util, "find_spec", return_value=None):
      self.assertEqual(mpi_utils.find_local_engine(), "tensorflow")
    with _env(), tempfile.TemporaryDirectory() as folder:
      spec = types.SimpleNamespace(submodule_search_locations=[folder])
      with mock.patch.object(mpi_utils.importlib.util, "find_spec", return_value=spec):
        self.assertEqual(mpi_utils.find_local_engine(), "tensorflow")
        library = pathlib.Path(folder, "tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so")
        library.parent.mkdir()
        library.touch()
        self.assertEqual(mpi_utils.find_local_engine(), "horovod")

  def test_tuning_variables_are_no_launcher(self):
    with _env(HOROVOD_CYCLE_TIME="1", HOROVOD_LOG_LEVEL="info"):
      self.assertFalse(mpi_utils.is_under_mpi())

  def test_initialized_backend_knows_best(self):
    module = types.ModuleType("horovod.tensorflow")
    with _env(**_launched("HOROVOD", 1, 1, 2, 2)), \
        mock.patch.dict(sys.modules, {"horovod.tensorflow": module}):  # fmt: skip
      self.assertEqual(self._all(), (1, 1, 2, 2))  # like a module in the middle of its import

      for name, value in (("rank", 3), ("local_rank", 0), ("size", 4), ("local_size", 1)):
        setattr(module, name, lambda value=value: value)
      module.is_initialized = lambda: False
      self.assertEqual(self._all(), (1, 1, 2, 2))

      module.is_initialized = lambda: True
      self.assertEqual(self._all(), (3, 0, 4, 1))

  def test_malformed(self):
    with _env(OMPI_COMM_WORLD_RANK="x"):
      with self.assertRaisesRegex(ValueError, "OMPI_COMM_WORLD_RANK is 'x'"):
        mpi_utils.get_mpi_rank()


if __name__ == "__main__":
  unittest.main()

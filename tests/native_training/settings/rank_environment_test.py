import os
import sys
import types
import unittest
from unittest import mock

from monolith.native_training.settings import rank_environment as mpi_utils


def _env(**values):
  prefixes = ("HOROVOD_", "OMPI_", "PMI_", "MPI_")
  clean = {n: v for n, v in os.environ.items() if not n.startswith(prefixes)}
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

import os
import unittest
from unittest import mock

from monolith.native_training import mpi_utils


def _env(**values):
  clean = {n: v for n, v in os.environ.items() if not n.startswith("OMPI_")}
  return mock.patch.dict(os.environ, {**clean, **values}, clear=True)


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

  def test_under_mpi(self):
    with _env(
      OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_LOCAL_RANK="1",
      OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_SIZE="4",
    ):  # fmt: skip
      self.assertTrue(mpi_utils.is_under_mpi())
      self.assertEqual(self._all(), (5, 1, 8, 4))

  def test_malformed(self):
    with _env(OMPI_COMM_WORLD_RANK="x"):
      with self.assertRaisesRegex(ValueError, "OMPI_COMM_WORLD_RANK is 'x'"):
        mpi_utils.get_mpi_rank()


if __name__ == "__main__":
  unittest.main()

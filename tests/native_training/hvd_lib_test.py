"""The module in front of the engines: which is loaded when, what is forwarded, doing without."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import hvd_lib
from monolith.native_training.settings import rank_environment

tf.compat.v1.disable_eager_execution()


def _clean_env():
  prefixes = ("HOROVOD_", "OMPI_", "PMI_", "MPI_", "MONOLITH_WITH_", "MONOLITH_RANKS_")
  return {
    n: v
    for n, v in os.environ.items()
    if not n.startswith(prefixes) and n not in rank_environment.LAUNCHER_VARIABLES
  }


_MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
_TORCH = {"RANK": "0", "WORLD_SIZE": "2", **_MASTER}
_ENGINE = "monolith.native_training.ranks.tensorflow_engine"


def _env(**values):
  return mock.patch.dict(os.environ, {**_clean_env(), **values}, clear=True)


class LoadingTest(unittest.TestCase):
  def test_importing_this_package_does_not_import_horovod(self):
    code = (
      "import sys\n"
      "from monolith.native_training import (hvd_lib, distribution_utils, feature_utils,\n"
      "  distributed_ps, distributed_ps_sync, device_utils)\n"
      "assert not hvd_lib.is_initialized()\n"
      "assert not [n for n in sys.modules if n.startswith(('horovod', 'byteps'))]\n"
    )
    with _env(MONOLITH_WITH_HOROVOD="True"):
      subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

  def test_backend_is_imported_once_also_by_many_threads(self):
    lib = types.SimpleNamespace(rank=lambda: 3)
    backend = hvd_lib._Backend()
    imports = []

    def slow_import(name):
      imports.append(name)
      all_started.wait()
      return lib

    all_started = threading.Barrier(2)
    with _env(), mock.patch.object(hvd_lib.importlib, "import_module", slow_import):
      ranks = []
      threads = [threading.Thread(target=lambda: ranks.append(backend.rank())) for _ in range(8)]
      for thread in threads:
        thread.start()
      all_started.wait()
      for thread in threads:
        thread.join()
    self.assertEqual(ranks, [3] * 8)
    self.assertEqual(imports, ["horovod.tensorflow"])

  def test_byteps(self):
    for text, name in (
      ("1", "byteps.tensorflow"), ("0", "horovod.tensorflow"), ("", "horovod.tensorflow"),
      ("false", "horovod.tensorflow"), ("True", "byteps.tensorflow"),
    ):  # fmt: skip
      with self.subTest(text), _env(MONOLITH_WITH_BYTEPS=text), \
          mock.patch.object(hvd_lib.importlib, "import_module") as import_module:  # fmt: skip
        backend = hvd_lib._Backend()
        self.assertEqual(backend.enable_bps, name.startswith("byteps"))
        backend.lib  # noqa: B018
        import_module.assert_called_once_with(name)

  def test_engines(self):
    for env, name in (
      ({}, "horovod.tensorflow"),
      ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovod.tensorflow"),
      ({"OMPI_COMM_WORLD_RANK": "0", **_MASTER}, "horovod.tensorflow"),
      # Says nothing to Horovod.
      (_TORCH, _ENGINE),
      ({"OMPI_COMM_WORLD_RANK": "0", "MONOLITH_RANKS_ENGINE": "tensorflow", **_MASTER}, _ENGINE),
      ({"HOROVOD_RANK": "0", "MONOLITH_RANKS_ENGINE": "horovod"}, "horovod.tensorflow"),
    ):
      with self.subTest(env), _env(**env), \
          mock.patch.object(hvd_lib.importlib, "import_module") as import_module:  # fmt: skip
        hvd_lib._Backend().lib  # noqa: B018
        import_module.assert_called_once_with(name)

  def test_bad_choices_of_an_engine(self):
    with _env(MONOLITH_RANKS_ENGINE="mpi"):
      with self.assertRaisesRegex(ValueError, "MONOLITH_RANKS_ENGINE is 'mpi', want 'horovod' or"):
        hvd_lib._Backend().rank()
    with _env(MONOLITH_RANKS_ENGINE="horovod", **_TORCH):
      with self.assertRaisesRegex(ImportError, "says nothing to Horovod: start ranks with"):
        hvd_lib._Backend().rank()
    with _env(MONOLITH_RANKS_ENGINE="tensorflow", HOROVOD_RANK="0", HOROVOD_SIZE="2"):
      with self.assertRaisesRegex(RuntimeError, "meet at MASTER_ADDR and MASTER_PORT, beside RANK"):
        hvd_lib._Backend().init()

  def test_missing_byteps(self):
    with _env(MONOLITH_WITH_BYTEPS="1"), mock.patch.dict(sys.modules, {"byteps": None}):
      with self.assertRaisesRegex(ImportError, "MONOLITH_WITH_BYTEPS is on"):
        hvd_lib._Backend().init()

  def test_broken_horovod_is_not_a_missing_one(self):
    error = ImportError("undefined symbol")
    with _env(), mock.patch.object(hvd_lib.importlib, "import_module", side_effect=error):
      with self.assertRaisesRegex(ImportError, "undefined symbol"):
        hvd_lib._Backend().rank()


class ForwardingTest(tf.test.TestCase):
  def test_unknown_names(self):
    with self.assertRaises(AttributeError):
      hvd_lib.join  # noqa: B018
    with self.assertRaises(AttributeError):
      hvd_lib._nothing  # noqa: B018
    self.assertIn("alltoall", dir(hvd_lib))

  def test_arguments_and_results_pass_through(self):
    lib = mock.Mock()
    with mock.patch.object(hvd_lib._backend, "_lib", lib):
      for name in ("allgather", "broadcast", "allreduce", "grouped_allreduce",
                   "BroadcastGlobalVariablesHook"):  # fmt: skip
        self.assertIs(getattr(hvd_lib, name)(1, x=2), getattr(lib, name).return_value)
        getattr(lib, name).assert_called_once_with(1, x=2)
      for name in ("rank", "size", "local_rank", "local_size", "is_initialized"):
        self.assertIs(getattr(hvd_lib, name)(), getattr(lib, name).return_value)

  def test_alltoall_returns_data_only(self):
    for result, splits in ((("data", "splits"), [1]), (["data", "splits"], [1]), ("data", None)):
      lib = mock.Mock()
      lib.alltoall.return_value = result
      with mock.patch.object(hvd_lib._backend, "_lib", lib):
        self.assertEqual(hvd_lib.alltoall("x", splits, name="n"), "data")
      lib.alltoall.assert_called_once_with("x", splits=splits, name="n")

  def test_is_enabled(self):
    backend = hvd_lib._Backend()
    for env, expected in (
      ({}, False),
      ({"MONOLITH_WITH_HOROVOD": "True"}, True),
      ({"MONOLITH_WITH_HOROVOD": ""}, False),
      ({"HOROVOD_SIZE": "2"}, True),
      ({"HOROVOD_SIZE": "2", "MONOLITH_WITH_HOROVOD": "0"}, False),
      ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
    ):
      with self.subTest(env), _env(**env), \
          mock.patch.object(backend, "is_initialized", return_value=False):  # fmt: skip
        self.assertEqual(backend.is_enabled(), expected)
    with _env(), mock.patch.object(backend, "is_initialized", return_value=True):
      self.assertTrue(backend.is_enabled())

  def test_initialised_by_others(self):
    lib = types.SimpleNamespace(is_initialized=lambda: True)
    with mock.patch.dict(sys.modules, {"horovod.tensorflow": lib}):
      self.assertTrue(hvd_lib._Backend().is_initialized())

  def test_exchange_errors(self):
    for message, expected in (
      ("HorovodAlltoall has been shut down", True),
      ("Exchange 'a': the exchange with the other ranks failed, rank 1 cannot be reached", True),
      ("shapes differ", False),
    ):
      error = tf.errors.UnavailableError(None, None, message)
      self.assertEqual(hvd_lib.is_exchange_error(error), expected)
    self.assertFalse(hvd_lib.is_exchange_error(RuntimeError("Horovod")))

  def test_check_size(self):
    hvd_lib.init()
    hvd_lib.check_size(1, "num_workers")
    with self.assertRaisesRegex(AssertionError, "num_workers is 3, but there are 1 ranks"):
      hvd_lib.check_size(3, "num_workers")


class OneRankTest(tf.test.TestCase):
  """The replacement of a missing Horovod gives what Horovod gives to a single rank."""

  def setUp(self):
    super().setUp()
    self.lib = hvd_lib._OneRank("because")
    self.backend = hvd_lib._Backend()
    self.backend._lib = self.lib

  def run_(self, fetches):
    with self.session() as session:
      return session.run(fetches)

  def test_rank_and_size(self):
    self.assertFalse(self.backend.is_initialized())
    self.backend.init()
    self.backend.init()
    self.assertTrue(self.backend.is_initialized())
    self.assertEqual((self.backend.rank(), self.backend.size()), (0, 1))
    self.assertEqual((self.backend.local_rank(), self.backend.local_size()), (0, 1))

  def test_collectives(self):
    data = np.array([1, 2, 3], np.int64)
    slices = tf.IndexedSlices(
      tf.constant([1.0]), tf.constant([1], tf.int64), tf.constant([2], tf.int64)
    )
    values = self.run_(
      (
        self.backend.allgather(data),
        self.backend.broadcast(data, 0, name="b"),
        self.backend.allreduce(data, op=self.lib.Average, compression=self.lib.Compression.none),
        self.backend.grouped_allreduce([data, data]),
        self.backend.alltoall(data, [3], name="a"),
        self.backend.alltoall(data),
        tf.convert_to_tensor(self.backend.allreduce(slices)),
      )
    )
    for value in (*values[:3], *values[3], *values[4:6]):
      self.assertAllEqual(value, data)
    self.assertAllEqual(values[6], [0, 1])

  def test_empty_alltoall(self):
    empty = np.zeros([0], np.int64)
    self.assertAllEqual(self.run_(self.backend.alltoall(empty, [0])), empty)

  def test_wrong_splits(self):
    splits = tf.compat.v1.placeholder_with_default([2], [1])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "splits do not add up"):
      self.run_(self.backend.alltoall(np.zeros([3], np.float32), splits))

  def test_bad_arguments(self):
    with self.assertRaisesRegex(ValueError, "allgather of a scalar"):
      self.backend.allgather(tf.constant(1))
    with self.assertRaisesRegex(ValueError, "root_rank is 1"):
      self.backend.broadcast(tf.constant(1), 1)
    with self.assertRaisesRegex(ValueError, "root_rank is 1"):
      self.backend.BroadcastGlobalVariablesHook(1)

  def test_broadcast_hook(self):
    variable = tf.Variable(4.0)
    hook = self.backend.BroadcastGlobalVariablesHook(0, device="")
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
      self.assertEqual(session.run(variable), 4.0)

  def test_hook_of_a_library_that_has_none_broadcasts_when_the_session_is_there(self):
    roots = []
    variable = tf.compat.v1.get_variable("broadcast", initializer=1.0, use_resource=True)

    def broadcast(root):
      roots.append(root)
      return variable.assign(float(root)).op

    self.backend._lib = types.SimpleNamespace(broadcast_global_variables=broadcast)
    hook = self.backend.BroadcastGlobalVariablesHook(7, device="/cpu:0")
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
      self.assertEqual(session.run(variable), 7.0)
    self.assertEqual(roots, [7])


class WithoutHorovodTest(unittest.TestCase):
  def setUp(self):
    missing = {"horovod": None, "horovod.tensorflow": None}
    patch = mock.patch.dict(sys.modules, missing)
    patch.start()
    self.addCleanup(patch.stop)

  def test_alone(self):
    with _env():
      backend = hvd_lib._Backend()
      backend.init()
      self.assertEqual((backend.rank(), backend.size()), (0, 1))

  def test_a_launcher_of_one_process(self):
    with _env(HOROVOD_RANK="0", HOROVOD_SIZE="1"):
      self.assertEqual(hvd_lib._Backend().size(), 1)

  def test_several_processes_are_told_what_to_install(self):
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
      for size in ({f"{prefix}_SIZE": "2"}, {}):
        with _env(**{f"{prefix}_RANK": "0", **size}):
          with self.assertRaisesRegex(ImportError, "Horovod is not installed: .*pip install "):
            hvd_lib._Backend().init()

  def test_several_processes_that_know_where_to_meet(self):
    with _env(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2", **_MASTER):
      self.assertEqual(hvd_lib._Backend().lib.__name__, _ENGINE)

  def test_one_process_of_an_engine_of_its_own(self):
    for env in ({"MONOLITH_RANKS_ENGINE": "tensorflow"}, {**_TORCH, "WORLD_SIZE": "1"}):
      with _env(**env):
        self.assertEqual(hvd_lib._Backend().size(), 1)
        with self.assertRaisesRegex(AssertionError, "1 ranks: nothing has started several"):
          backend = hvd_lib._Backend()
          backend.check_size(2, "num_workers")

  def test_more_workers_than_processes(self):
    message = "num_workers is 2, but there are 1 ranks: Horovod is not installed: .*pip install "
    with _env(), self.assertRaisesRegex(AssertionError, message):
      hvd_lib._Backend().check_size(2, "num_workers")


_INIT_AND_PRINT = """
import sys
from monolith.native_training import hvd_lib
from monolith.native_training.settings import rank_environment
try:
  hvd_lib.init()
  print("size", hvd_lib.size())
  hvd_lib.check_size(2, "num_workers")
except (AssertionError, ImportError) as error:
  print(type(error).__name__, error)
"""
_NO_EXTENSION = (
  "raise ImportError('Extension horovod.tensorflow has not been built: mpi_lib.so not found\\n'\n"
  "  'If this is not expected, reinstall Horovod with HOROVOD_WITH_TENSORFLOW=1.')\n"
)


class InstalledHorovodTest(unittest.TestCase):
  """Messages about packages named horovod that cannot be used."""

  def init(self, source, **env):
    """Returns what a process prints that finds `horovod/tensorflow/__init__.py` of this source."""
    parent = tempfile.TemporaryDirectory()
    self.addCleanup(parent.cleanup)
    folder = pathlib.Path(parent.name)
    (folder / "horovod/tensorflow").mkdir(parents=True)
    (folder / "horovod/__init__.py").touch()
    (folder / "horovod/tensorflow/__init__.py").write_text(source)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    process = subprocess.run(
      [sys.executable, "-c", _INIT_AND_PRINT],
      env={**_clean_env(), "PYTHONPATH": path, **env},
      capture_output=True,
      text=True,
      check=True,
    )
    return process.stdout.splitlines()

  def test_built_without_tensorflow_alone(self):
    size, error = self.init(_NO_EXTENSION)
    self.assertEqual(size, "size 1")
    self.assertRegex(
      error,
      "AssertionError num_workers is 2, but there are 1 ranks: "
      "Horovod was built without TensorFlow: .*pip install ",
    )

  def test_built_without_tensorflow_several_processes(self):
    (error,) = self.init(_NO_EXTENSION, HOROVOD_RANK="1", HOROVOD_SIZE="2")
    self.assertRegex(
      error,
      "ImportError Synchronous training with several processes needs Horovod, or MASTER_ADDR and "
      "MASTER_PORT where ranks meet without it. Horovod was built without TensorFlow: .*pip ",
    )

  def test_broken(self):
    source = "raise ImportError('mpi_lib.so: undefined symbol')\n"
    self.assertEqual(self.init(source), ["ImportError mpi_lib.so: undefined symbol"])
    self.assertEqual(
      self.init("import no_such_module\n"), ["ModuleNotFoundError No module named 'no_such_module'"]
    )


class InstallCommandTest(unittest.TestCase):
  def test_names_what_is_there(self):
    root = pathlib.Path(hvd_lib.__file__).resolve().parents[2]
    source = root / "third_party/horovod"
    if source.exists():  # not under Bazel
      self.assertEqual(hvd_lib.INSTALL_HOROVOD, f"pip install {shlex.quote(str(source))}")

    # Away from the checkout, as in an installed wheel.
    module = pathlib.Path(os.environ["TEST_TMPDIR"]) / "monolith/native_training/hvd_lib.py"
    module.parent.mkdir(parents=True)
    shutil.copy(hvd_lib.__file__, module)
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['INSTALL_HOROVOD'])"
    process = subprocess.run(
      [sys.executable, "-c", code, str(module)], capture_output=True, text=True, check=True
    )
    self.assertRegex(process.stdout, r"^HOROVOD_WITH_TENSORFLOW=1 .*pip install .*horovod==")


if __name__ == "__main__":
  tf.test.main()

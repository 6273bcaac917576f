"""Tests what a rank finds out and sets up before it builds its graph."""

import dataclasses
import os
import sys
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import parameterized

from monolith.native_training import device_utils, distribution_utils, hvd_lib
from monolith.native_training.settings import rank_environment as mpi_utils

tf.compat.v1.disable_eager_execution()


def _launched(rank, prefix="HOROVOD", size=4):
  return {
    f"{prefix}_RANK": str(rank), f"{prefix}_LOCAL_RANK": str(rank % 2),
    f"{prefix}_SIZE": str(size), f"{prefix}_LOCAL_SIZE": "2",
  }  # fmt: skip


@dataclasses.dataclass
class _Config:
  model_dir: str = "/models"
  uuid: str = "job"
  merge_sync_training_ckpt: bool = True
  num_ps: int = 3
  num_workers: int = 1
  index: int = 0
  reorder_fids_in_data_pipeline: bool = False
  enable_variable_partition: bool = True


class _Test(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    prefixes = ("HOROVOD_", "OMPI_", "PMI_", "MPI_", "MONOLITH_", "CUDA_")
    clean = {n: v for n, v in os.environ.items() if not n.startswith(prefixes)}
    self.enter_context(mock.patch.dict(os.environ, clean, clear=True))
    # No backend but the one a test names.
    self.enter_context(mock.patch.dict(sys.modules))
    for name in ("horovod.tensorflow", "byteps.tensorflow"):
      sys.modules.pop(name, None)
    self.lib = mock.Mock()
    self.lib.is_initialized.return_value = False
    self.enter_context(mock.patch.object(hvd_lib._backend, "_lib", self.lib))

  def set_flags(self, **values):
    """Replaces the flags of the runner, which this test does not import."""
    flag_values = flags.FlagValues()
    for name, value in values.items():
      define = flags.DEFINE_bool if isinstance(value, bool) else flags.DEFINE_integer
      define(name, value, "", flag_values=flag_values)
    flag_values(["test"])
    self.enter_context(mock.patch.object(flags, "FLAGS", flag_values))

  def launch(self, rank, prefix="HOROVOD", size=4):
    os.environ.update(_launched(rank, prefix, size))


class RankTest(_Test):
  def test_one_implementation(self):
    for name in ("get_mpi_rank", "get_mpi_local_rank", "get_mpi_size", "get_mpi_local_size"):
      self.assertIs(getattr(distribution_utils, name), getattr(mpi_utils, name))

  @parameterized.parameters("HOROVOD", "OMPI_COMM_WORLD", "PMI")
  def test_enable_sync_training(self, prefix):
    self.assertFalse(distribution_utils.enable_sync_training())
    self.set_flags(enable_sync_training=True)
    self.assertFalse(distribution_utils.enable_sync_training())
    self.launch(1, prefix)
    self.assertTrue(distribution_utils.enable_sync_training())
    self.set_flags(enable_sync_training=False)
    self.assertFalse(distribution_utils.enable_sync_training())

  def test_local_rank_alone_is_a_launcher(self):
    self.set_flags(enable_sync_training=True)
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"
    self.assertTrue(distribution_utils.enable_sync_training())

  def test_unparsed_flag(self):
    values = flags.FlagValues()
    flags.DEFINE_bool("enable_sync_training", True, "", flag_values=values)
    self.launch(0)
    with mock.patch.object(flags, "FLAGS", values):
      self.assertFalse(distribution_utils.enable_sync_training())


class InitTest(_Test):
  def setUp(self):
    super().setUp()
    self.lib.rank.return_value = 2
    self.lib.size.return_value = 4

    def init():
      self.lib.is_initialized.return_value = True

    self.lib.init.side_effect = init

  def test_config(self):
    config = _Config()
    distribution_utils.init_sync_train_and_update_conf(config)
    self.assertEqual(
      config,
      _Config(
        num_ps=0, num_workers=4, index=2, reorder_fids_in_data_pipeline=True,
        enable_variable_partition=False,
      ),
    )  # fmt: skip

  def test_own_folder(self):
    # In every config, not only in the one with which the backend was initialised.
    for _ in range(2):
      config = _Config(merge_sync_training_ckpt=False)
      distribution_utils.init_sync_train_and_update_conf(config)
      self.assertEqual(config.model_dir, "/models/job/index-0002")
    distribution_utils.init_sync_train_and_update_conf(config)
    self.assertEqual(config.model_dir, "/models/job/index-0002")
    self.lib.init.assert_called_once_with()

  def test_backend_that_cannot_be_loaded_is_logged(self):
    for error in (ImportError("no"), tf.errors.NotFoundError(None, None, "no")):
      self.lib.init.side_effect = error
      config = _Config()
      with self.assertLogs(level="ERROR"):
        distribution_utils.init_sync_train_and_update_conf(config)
      self.assertEqual(config, _Config())

  def test_try_init_cuda(self):
    self.launch(3)
    self.set_flags(enable_sync_training=True)
    distribution_utils.try_init_cuda()
    distribution_utils.try_init_cuda()
    self.assertEqual(os.environ["CUDA_DEVICE_ORDER"], "PCI_BUS_ID")
    self.assertEqual(os.environ["CUDA_VISIBLE_DEVICES"], "1")
    self.lib.init.assert_called_once_with()

  def test_try_init_cuda_leaves_a_choice_alone(self):
    self.launch(3)
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    distribution_utils.try_init_cuda()
    self.assertEqual(os.environ["CUDA_VISIBLE_DEVICES"], "7")
    self.assertNotIn("CUDA_DEVICE_ORDER", os.environ)
    self.lib.init.assert_not_called()

  def test_try_init_cuda_does_not_raise(self):
    self.set_flags(enable_sync_training=True)
    self.lib.init.side_effect = RuntimeError("no network")
    distribution_utils.try_init_cuda()
    self.assertNotIn("CUDA_VISIBLE_DEVICES", os.environ)


class DeviceTest(_Test):
  def setUp(self):
    super().setUp()
    self.addCleanup(device_utils.disable_gpu_training)

  def test_without_sync_training(self):
    self.assertEqual(distribution_utils.get_device_str(), "/device:CPU:0")
    device_utils.enable_gpu_training()
    self.assertEqual(distribution_utils.get_device_str(), "/device:GPU:0")
    self.assertEqual(distribution_utils.get_device_str(force_on_cpu=True), "/device:CPU:0")
    device_utils.disable_gpu_training()
    self.set_flags(enable_gpu_training=True)
    self.assertEqual(distribution_utils.get_device_str(), "/device:GPU:0")

  @parameterized.parameters(
    (0, "/job:chief/replica:0/task:0"),
    (1, "/job:worker/replica:0/task:0"),
    (3, "/job:worker/replica:0/task:2"),
  )
  def test_with_servers(self, rank, expected):
    self.launch(rank)
    self.set_flags(enable_sync_training=True, num_ps=2, enable_gpu_training=True)
    self.assertEqual(distribution_utils.get_device_str(), expected + "/device:GPU:0")
    self.assertEqual(distribution_utils.get_device_str(True), expected + "/device:CPU:0")

  def test_without_servers(self):
    self.launch(1)
    self.set_flags(enable_sync_training=True, num_ps=0)
    self.assertEqual(distribution_utils.get_device_str(), "")

  def test_session_config_without_sync_training(self):
    config = tf.compat.v1.ConfigProto()
    distribution_utils.update_session_config_for_gpu(config)
    self.assertEqual(
      config,
      tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True)),
    )

  @parameterized.parameters((None, True), ("1", True), ("0", False))
  def test_session_config(self, compatible, expected):
    self.launch(3)
    self.set_flags(enable_sync_training=True)
    if compatible is not None:
      os.environ["MONOLITH_FORCE_GPU_COMPATIBLE"] = compatible
    config = tf.compat.v1.ConfigProto()
    distribution_utils.update_session_config_for_gpu(config)
    self.assertEqual(config.gpu_options.visible_device_list, "1")
    self.assertEqual(config.gpu_options.force_gpu_compatible, expected)
    self.assertTrue(config.gpu_options.allow_growth)


class HooksTest(_Test):
  def test_none_without_a_launcher(self):
    self.lib.is_initialized.return_value = True
    self.lib.size.return_value = 1
    self.assertEqual(distribution_utils.get_sync_run_hooks(), [])
    self.assertEqual(distribution_utils.get_sync_run_hooks(True), [])

  @parameterized.parameters(False, True)
  def test_broadcast(self, is_full_sync):
    self.launch(0)
    self.set_flags(enable_sync_training=True, num_ps=0)
    [hook] = distribution_utils.get_sync_run_hooks(is_full_sync)
    self.assertIs(hook, self.lib.BroadcastGlobalVariablesHook.return_value)
    self.lib.BroadcastGlobalVariablesHook.assert_called_once_with(0, device="")

  @parameterized.parameters((True, "/device:GPU:0"), (False, "/device:CPU:0"))
  def test_variables_on_a_gpu_are_broadcast_where_horovod_has_kernels(self, has_them, expected):
    self.lib.is_initialized.return_value = True
    self.lib.size.return_value = 2
    self.enter_context(
      mock.patch.object(hvd_lib._backend, "has_gpu_kernels", return_value=has_them)
    )
    device_utils.enable_gpu_training()
    self.addCleanup(device_utils.disable_gpu_training)
    self.assertLen(distribution_utils.get_sync_run_hooks(True), 1)
    self.lib.BroadcastGlobalVariablesHook.assert_called_once_with(0, device=expected)

  def test_several_ranks_of_full_sync_training_start_alike_without_the_flag(self):
    self.lib.is_initialized.return_value = True
    self.lib.size.return_value = 2
    self.assertEqual(distribution_utils.get_sync_run_hooks(False), [])
    self.assertLen(distribution_utils.get_sync_run_hooks(True), 1)


class BytePsTest(_Test):
  def test_not_there(self):
    for call in (
      lambda: distribution_utils.bps_init("uuid"),
      lambda: distribution_utils.byteps_benchmark_ar(1, total_niter=1, use_cpu=True, op="pushpull"),
      lambda: distribution_utils.byteps_benchmark_a2a(1, 1, dst_gpu=False, src_gpu=False),
      distribution_utils.bps_comm_benchmark,
    ):
      with self.assertRaisesRegex(NotImplementedError, "BytePS is not supported"):
        call()


if __name__ == "__main__":
  tf.test.main()

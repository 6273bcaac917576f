import os
from unittest import mock

import tensorflow as tf
from absl import flags

from monolith.native_training import device_utils

tf.compat.v1.disable_eager_execution()

FLAGS = flags.FLAGS

_MPI_VARIABLES = (
  "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
)  # fmt: skip


class DeviceUtilsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    device_utils.disable_gpu_training()
    self.addCleanup(device_utils.disable_gpu_training)

  def test_switch(self):
    self.assertFalse(device_utils.is_gpu_training())
    device_utils.enable_gpu_training()
    self.assertTrue(device_utils.is_gpu_training())
    device_utils.disable_gpu_training()
    self.assertFalse(device_utils.is_gpu_training())

  def test_get_visible_gpus(self):
    for args, expected in (((2, 1), "2"), ((1, 2), "0"), ((2, 2), "1"), ((3, 2), "1")):
      self.assertEqual(device_utils.get_visible_gpus(*args), expected)
    self.assertEqual(device_utils.get_visible_gpus(3), "3")
    for bad in (0, -1, 1.0, "1"):
      with self.assertRaisesRegex(AssertionError, "processes_per_gpu"):
        device_utils.get_visible_gpus(1, bad)

  def test_default_device_is_cpu(self):
    for allow_gpu in (False, True):
      (device_utils.enable_gpu_training if allow_gpu else device_utils.disable_gpu_training)()
      with tf.compat.v1.device(device_utils.default_device_fn):
        self.assertEqual(tf.constant(1).device, "/device:CPU:0")

  def test_gpu_that_is_not_allowed(self):
    with tf.compat.v1.device(device_utils.default_device_fn):
      with tf.device("/device:GPU:0"):
        self.assertEqual(tf.constant(1).device, "/device:CPU:0")

  def test_nested_devices_with_gpu_allowed(self):
    device_utils.enable_gpu_training()
    with tf.compat.v1.device(device_utils.default_device_fn):
      with tf.device("/device:CPU:0"):
        self.assertEqual(tf.constant(1).device, "/device:CPU:0")
        with tf.device("/device:GPU:0"):
          self.assertEqual(tf.constant(1).device, "/device:GPU:0")
          with tf.device("/device:GPU:1"):
            self.assertEqual(tf.constant(1).device, "/device:GPU:1")

  def test_job_and_task_are_kept(self):
    with tf.compat.v1.device(device_utils.default_device_fn), tf.device("/job:my_ps/task:0"):
      self.assertEqual(tf.constant(1).device, "/job:my_ps/task:0/device:CPU:0")
      with tf.device("GPU:0"):
        self.assertEqual(tf.constant(1).device, "/job:my_ps/task:0/device:CPU:0")
        self.assertTrue(device_utils.within_placement_context_of("CPU"))

  def test_cluster_with_gpu_allowed(self):
    device_utils.enable_gpu_training()
    with tf.compat.v1.device(device_utils.default_device_fn), tf.device("/job:worker/task:0"):
      self.assertEqual(tf.constant(1).device, "/job:worker/task:0/device:CPU:0")
      with tf.device("/job:ps"):
        self.assertEqual(tf.constant(1).device, "/job:ps/task:0/device:CPU:0")
      with tf.device("GPU:0"):
        self.assertEqual(tf.constant(1).device, "/job:worker/task:0/device:GPU:0")
      with device_utils.maybe_device_if_allowed("GPU:1"):
        self.assertEqual(tf.constant(1).device, "/job:worker/task:0/device:GPU:1")
        self.assertTrue(device_utils.within_placement_context_of("GPU"))

  def test_maybe_device_that_is_not_allowed(self):
    with device_utils.maybe_device_if_allowed("/device:GPU:1"):
      self.assertEqual(tf.constant(1).device, "/device:CPU:0")
    with device_utils.maybe_device_if_allowed("/job:ps/task:2"):
      self.assertEqual(tf.constant(1).device, "/job:ps/task:2/device:CPU:0")
    with device_utils.maybe_device_if_allowed(""):
      self.assertEqual(tf.constant(1).device, "/device:CPU:0")

  def test_summaries_and_string_constants_go_to_the_cpu(self):
    device_utils.enable_gpu_training()
    with tf.compat.v1.device(device_utils.default_device_fn), tf.device("/device:GPU:0"):
      summary = tf.compat.v1.summary.scalar("x", tf.constant(1.0))
      text = tf.constant("text")
      number = tf.constant(1.0)

    self.assertEqual(summary.device, "/device:CPU:0")
    self.assertEqual(text.device, "/device:CPU:0")
    self.assertEqual(number.device, "/device:GPU:0")
    self.assertTrue(device_utils.skip_device(summary.op))
    self.assertTrue(device_utils.skip_device(text.op))
    self.assertFalse(device_utils.skip_device(number.op))
    writer = mock.Mock(type="WriteScalarSummary")
    self.assertTrue(device_utils.skip_device(writer))

  def test_within_placement_context_of(self):
    within = device_utils.within_placement_context_of
    self.assertFalse(within("CPU"))
    self.assertFalse(within("GPU"))
    with tf.device("/job:ps/task:0"):
      self.assertFalse(within("CPU"))
    with tf.device("/device:GPU:0"):
      self.assertTrue(within("GPU"))
      self.assertTrue(within("gpu"))
      self.assertFalse(within("CPU"))
      with tf.device(None):
        self.assertFalse(within("GPU"))
      with tf.device("/device:CPU:0"):
        self.assertTrue(within("CPU"))

  def test_within_placement_context_of_a_device_function(self):
    with tf.compat.v1.device(device_utils.default_device_fn):
      self.assertTrue(device_utils.within_placement_context_of("CPU"))
      with tf.device("/device:GPU:0"):
        self.assertFalse(device_utils.within_placement_context_of("GPU"))
    with tf.compat.v1.device(device_utils.model_device_fn):
      self.assertTrue(device_utils.within_placement_context_of("CPU"))

  def test_asking_for_the_context_adds_no_op(self):
    with tf.Graph().as_default() as graph:
      graph.finalize()
      with graph.device("/device:GPU:0"):
        self.assertTrue(device_utils.within_placement_context_of("GPU"))
      self.assertEmpty(graph.get_operations())

  def test_within_placement_context_in_a_function(self):
    seen = []

    @tf.function
    def fn():
      with tf.device("/device:GPU:0"):
        seen.append(device_utils.within_placement_context_of("GPU"))
      seen.append(device_utils.within_placement_context_of("GPU"))
      return tf.constant(1)

    fn()

    self.assertEqual(seen, [True, False])

  def test_serving_input_device_fn(self):
    with tf.compat.v1.device(device_utils.serving_input_device_fn):
      self.assertEqual(tf.constant(1).device, "/device:CPU:0")
      with tf.device("/device:GPU:1"):
        self.assertEqual(tf.constant(1).device, "/device:GPU:1")


class RunnerDeviceFnTest(tf.test.TestCase):
  """Device functions that depend on the runner's flags and on the launcher."""

  def setUp(self):
    super().setUp()
    device_utils.disable_gpu_training()
    self.addCleanup(device_utils.disable_gpu_training)
    environment = mock.patch.dict(os.environ)
    environment.start()
    self.addCleanup(environment.stop)
    for name in _MPI_VARIABLES:
      os.environ.pop(name, None)
    self._set_flags()

  def _set_flags(self, **values):
    """Replaces the flags of the runner, which this test does not import."""
    patcher = mock.patch.object(
      device_utils, "_flag", side_effect=lambda name, default: values.get(name, default)
    )
    patcher.start()
    self.addCleanup(patcher.stop)

  def _set_rank(self, rank, prefix="OMPI_COMM_WORLD"):
    os.environ[f"{prefix}_RANK"] = str(rank)
    os.environ[f"{prefix}_LOCAL_RANK"] = str(rank)

  def _cluster(self):
    return tf.train.ClusterSpec({"ps": ["h:1", "h:2"], "worker": ["h:3", "h:4"]})

  def test_local_training_has_no_device_fn(self):
    task = {"type": "worker", "index": 1}

    self.assertIsNone(device_utils.get_device_fn())
    self.assertIsNone(device_utils.get_device_fn(cluster=self._cluster()))
    self.assertIsNone(device_utils.get_device_fn(task=task))
    self._set_flags(is_local=True)
    self.assertIsNone(device_utils.get_device_fn(self._cluster(), task))

  def test_async_training_spreads_variables(self):
    self._set_flags(num_ps=2)

    device_fn = device_utils.get_device_fn(self._cluster(), {"type": "worker", "index": 1})
    with tf.compat.v1.device(device_fn):
      devices = [tf.compat.v1.Variable(1.0, use_resource=False).device for _ in range(3)]
      resource = tf.Variable(1.0)
      constant = tf.constant(1)

    self.assertEqual(devices, ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"])
    self.assertEqual(resource.device, "/job:ps/task:1")
    self.assertEqual(constant.device, "/job:worker/task:1")

  def test_async_training_without_a_task_type(self):
    self._set_flags(num_ps=2)

    with tf.compat.v1.device(device_utils.get_device_fn(self._cluster(), {"type": "", "index": 0})):
      self.assertEqual(tf.constant(1).device, "/job:worker")

  def test_sync_training_needs_a_launcher(self):
    self._set_flags(enable_sync_training=True)

    with self.assertRaisesRegex(AssertionError, "sync training must running under mpi mode"):
      device_utils.get_device_fn()

  def test_sync_training_without_ps(self):
    self._set_flags(enable_sync_training=True)
    for prefix in ("OMPI_COMM_WORLD", "HOROVOD"):
      self._set_rank(0, prefix)

      self.assertIs(device_utils.get_device_fn(), device_utils.default_device_fn)

  def test_sync_training_with_ps_pins_to_the_process(self):
    self._set_flags(enable_sync_training=True, num_ps=2)
    for rank, expected in (
      (0, "/job:chief/replica:0/task:0"),
      (1, "/job:worker/replica:0/task:0"),
      (3, "/job:worker/replica:0/task:2"),
    ):
      self._set_rank(rank)
      with tf.compat.v1.device(device_utils.get_device_fn()):
        self.assertEqual(tf.constant(1).device, expected)
        with tf.device("/device:GPU:1"):
          self.assertEqual(tf.constant(1).device, expected + "/device:GPU:1")
        with tf.device("/job:ps/task:1"):
          self.assertEqual(tf.constant(1).device, "/job:ps/replica:0/task:1")

  def test_sync_training_leaves_colocated_ops_alone(self):
    self._set_flags(enable_sync_training=True, num_ps=2)
    self._set_rank(1)
    with tf.Graph().as_default():
      op = tf.constant(1).op
      op._set_attr(
        "_class", tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(s=[b"loc:@x"]))
      )

      self.assertEqual(device_utils.get_device_fn()(op), "")
      self.assertEqual(device_utils.model_device_fn(op), "")

  def test_input_device_fn(self):
    with tf.compat.v1.device(device_utils.input_device_fn), tf.device("/device:GPU:0"):
      self.assertEqual(tf.constant(1).device, "/device:CPU:0")

    self._set_rank(2)
    self._set_flags(enable_sync_training=True, num_ps=1)
    with tf.compat.v1.device(device_utils.input_device_fn):
      self.assertEqual(tf.constant(1).device, "/job:worker/replica:0/task:1/device:CPU:0")

    self._set_flags(enable_sync_training=True, num_ps=0)
    with tf.compat.v1.device(device_utils.input_device_fn):
      self.assertEqual(tf.constant(1).device, "/device:CPU:0")

  def test_counters_stay_on_the_host_in_local_training_on_a_gpu(self):
    with tf.Graph().as_default() as graph, graph.device(device_utils.host_scalars_device_fn):
      step = tf.compat.v1.train.create_global_step()
      ids = tf.compat.v1.placeholder(tf.int64, [None])
      weights = tf.compat.v1.get_variable("weights", [3])
      with tf.device("/device:GPU:0"):
        asked_for = tf.identity(tf.constant(1, tf.int64))
      on_host = [step.handle, step + 1, tf.cast(tf.timestamp(), tf.int64), tf.constant(1, tf.int64)]
      anywhere = [ids + 1, tf.reduce_sum(ids), tf.constant(0.5), weights.handle, weights + 1]

      self.assertEqual({tensor.device for tensor in on_host}, {"/device:CPU:0"})
      self.assertEqual({tensor.device for tensor in anywhere}, {""})
      self.assertEqual(asked_for.device, "/device:GPU:0")

  def test_model_device_fn(self):
    def devices():
      with tf.compat.v1.device(device_utils.model_device_fn):
        with tf.device("/job:ps/task:0"):
          on_ps = tf.constant(1)
        with tf.device("/device:CPU:1"):
          on_cpu = tf.constant(1)
        return [tf.constant(1).device, on_ps.device, on_cpu.device, tf.constant("x").device]

    cpu = "/device:CPU:0"
    self.assertEqual(devices(), [cpu, "/job:ps/task:0" + cpu, "/device:CPU:1", cpu])
    gpu = "/device:GPU:0"
    with_gpu = [gpu, "/job:ps/task:0" + gpu, "/device:CPU:1", cpu]
    device_utils.enable_gpu_training()
    self.assertEqual(devices(), with_gpu)
    device_utils.disable_gpu_training()
    self._set_flags(enable_gpu_training=True)
    self.assertEqual(devices(), with_gpu)


class RunnerFlagsTest(tf.test.TestCase):
  def test_flags_are_read_when_defined(self):
    self.assertEqual(device_utils._flag("device_utils_test_flag", 7), 7)
    flags.DEFINE_integer("device_utils_test_flag", 8, "")
    self.addCleanup(delattr, FLAGS, "device_utils_test_flag")
    if not FLAGS.is_parsed():
      FLAGS.mark_as_parsed()

    self.assertEqual(device_utils._flag("device_utils_test_flag", 7), 8)

  def test_flags_that_are_not_parsed_yet(self):
    values = flags.FlagValues()
    flags.DEFINE_integer("num_ps", 3, "", flag_values=values)

    with mock.patch.object(flags, "FLAGS", values):
      self.assertEqual(device_utils._flag("num_ps", 0), 0)
      values.mark_as_parsed()
      self.assertEqual(device_utils._flag("num_ps", 0), 3)


if __name__ == "__main__":
  tf.test.main()

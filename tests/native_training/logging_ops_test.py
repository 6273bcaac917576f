"""Timestamps, metrics and machine health."""

import threading
import time

import tensorflow as tf
from absl import flags

from monolith.native_training import logging_ops
from monolith.native_training.runtime.ops import logging_ops_pb2

tf.compat.v1.disable_eager_execution()

FLAGS = flags.FLAGS


class LoggingOpsTest(tf.test.TestCase):
  def tearDown(self):
    logging_ops.set_metric_sink(None)
    super().tearDown()

  def test_tensors_timestamp(self):
    begin = time.time()
    tensors, timestamp = logging_ops.tensors_timestamp(
      [tf.constant([1.0, 2.0]), tf.constant("text"), tf.zeros([0, 3], tf.int64)]
    )

    with self.session() as session:
      values, micros = session.run((tensors, timestamp))

    self.assertBetween(micros, int(begin * 1e6), int(time.time() * 1e6) + 1)
    self.assertAllEqual(values[0], [1.0, 2.0])
    self.assertEqual(values[1], b"text")
    self.assertEqual(values[2].shape, (0, 3))
    self.assertEqual([t.shape.as_list() for t in tensors], [[2], [], [0, 3]])
    self.assertEqual(timestamp.shape.as_list(), [])

  def test_timestamps_of_equal_ops_are_not_merged(self):
    x = tf.constant([1.0])
    _, first = logging_ops.tensors_timestamp([x])
    with tf.control_dependencies([first]):
      _, second = logging_ops.tensors_timestamp([x])

    with self.session() as session:
      earlier = session.run([first, second])
      later = session.run([first, second])

    self.assertLess(earlier[0], earlier[1] + 1)
    self.assertLess(earlier[1], later[0] + 1)
    self.assertNotEqual(first.op.name, second.op.name)
    self.assertTrue(first.op.op_def.is_stateful)
    self.assertLess(earlier[0], later[1])

  def test_timestamp_passes_gradients_on(self):
    x = tf.constant([1.0, 2.0])
    (y, _), _ = logging_ops.tensors_timestamp([x * x, tf.constant(3)])

    (grad,) = tf.gradients(y, x)

    with self.session() as session:
      self.assertAllEqual(session.run(grad), [2.0, 4.0])

  def test_emit_timer(self):
    received = []
    logging_ops.set_metric_sink(lambda *args: received.append(args))
    emit = logging_ops.emit_timer("test", 1.5, tags={"b": "x", "a": "y"})
    emit_without_tags = logging_ops.emit_timer("test", tf.constant(2.0))

    with self.session() as session:
      session.run(emit)
      session.run(emit_without_tags)
    logging_ops.set_metric_sink(None)
    with self.session() as session:
      session.run(emit)

    self.assertEqual(received, [("test", 1.5, "b=x|a=y"), ("test", 2.0, "")])

  def test_a_failing_sink_does_not_stop_training(self):
    def fail(*unused_args):
      raise RuntimeError("no connection")

    logging_ops.set_metric_sink(fail)
    with self.session() as session:
      session.run(logging_ops.emit_timer("test", 1.0))

  def test_emit_from_many_threads_while_the_sink_changes(self):
    emit = logging_ops.emit_timer("busy", 1.0)
    received = []
    with self.session() as session:
      threads = [
        threading.Thread(target=lambda: [session.run(emit) for _ in range(50)]) for _ in range(4)
      ]
      for thread in threads:
        thread.start()
      while any(thread.is_alive() for thread in threads):
        logging_ops.set_metric_sink(lambda *args: received.append(args))
        logging_ops.set_metric_sink(None)
      for thread in threads:
        thread.join()

    self.assertLessEqual(len(received), 200)
    self.assertTrue(all(args == ("busy", 1.0, "") for args in received))

  def test_emit_timer_wants_a_scalar(self):
    value = tf.compat.v1.placeholder(tf.float32)
    emit = logging_ops.emit_timer("test", value)

    with self.session() as session:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"value has shape \[2\]"):
        session.run(emit, {value: [1.0, 2.0]})
    with self.assertRaises(ValueError):
      logging_ops.emit_timer("test", [1.0, 2.0])

  def test_deprecated_metric_forwards_tensors(self):
    received = []
    logging_ops.set_metric_sink(lambda *args: received.append(args))
    out = logging_ops.logging_ops.monolith_metric(
      [tf.constant([1, 2]), tf.constant("a")], 3.0, key="old", tags="t=1"
    )

    with self.session() as session:
      values = session.run(out)

    self.assertAllEqual(values[0], [1, 2])
    self.assertEqual(values[1], b"a")
    self.assertEqual(out[0].shape.as_list(), [2])
    self.assertTrue(out[0].op.op_def.is_stateful)
    self.assertEqual(received, [("old", 3.0, "t=1")])

  def test_machine_health(self):
    info = logging_ops.machine_info(mem_limit=1 << 62)
    result = logging_ops.check_machine_health(info)

    with self.session() as session:
      self.assertEqual(session.run(result), b"")
    self.assertEqual(result.shape.as_list(), [])

  def test_machine_health_oom(self):
    info = logging_ops.machine_info(mem_limit=0)
    with self.session() as session:
      serialized = session.run(logging_ops.check_machine_health(info))

    result = logging_ops_pb2.MachineHealthResult.FromString(serialized)
    self.assertEqual(result.status, logging_ops_pb2.MachineHealthResult.OUT_OF_MEMORY)
    self.assertRegex(result.message, r"^Memory limit exceeded\. Current: \d{8,}, Limit: 0$")

  def test_the_flag_is_read_at_call_time(self):
    old = FLAGS.monolith_default_machine_info_mem_limit
    self.assertEqual(old, 1 << 62)
    FLAGS.monolith_default_machine_info_mem_limit = 0
    try:
      sick = logging_ops.check_machine_health(logging_ops.machine_info())
    finally:
      FLAGS.monolith_default_machine_info_mem_limit = old
    healthy = logging_ops.check_machine_health(logging_ops.machine_info())

    with self.session() as session:
      self.assertNotEqual(session.run(sick), b"")
      self.assertEqual(session.run(healthy), b"")

  def test_flags_need_not_be_parsed(self):
    FLAGS.unparse_flags()
    try:
      healthy = logging_ops.check_machine_health(logging_ops.machine_info())
    finally:
      FLAGS.mark_as_parsed()

    with self.session() as session:
      self.assertEqual(session.run(healthy), b"")

  def test_the_first_machine_info_of_a_name_decides(self):
    first = logging_ops.machine_info(mem_limit=1 << 62, shared_name="ps_0")
    second = logging_ops.machine_info(mem_limit=0, shared_name="ps_0")

    with self.session() as session:
      session.run(first)
      self.assertEqual(session.run(logging_ops.check_machine_health(second)), b"")
    self.assertEqual(first.op.name, "ps_0")

  def test_another_kind_of_resource(self):
    set_handle = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)
    with self.session() as session, self.assertRaises(tf.errors.InvalidArgumentError):
      session.run(logging_ops.check_machine_health(set_handle))


if __name__ == "__main__":
  tf.test.main()

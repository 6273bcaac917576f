"""Tests of files that workers take from a common queue."""

import os
import struct
from unittest import mock

import tensorflow as tf

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training import native_task_context
from monolith.native_training.data import datasets, feature_utils
from monolith.native_training.data.training_instance.python import instance_dataset_op
from monolith.native_training.distribute import distributed_dataset
from monolith.native_training.graph import session_hooks

tf.compat.v1.disable_eager_execution()


def _write(name, *lines):
  path = os.path.join(os.environ["TEST_TMPDIR"], name)
  with open(path, "w") as f:
    f.writelines(f"{line}\n" for line in lines)
  return path


def _pattern(name):
  return os.path.join(os.environ["TEST_TMPDIR"], name)


def _session():
  return tf.compat.v1.train.SingularMonitoredSession(hooks=[session_hooks.SetCurrentSessionHook()])


class DynamicShardingDatasetTest(tf.test.TestCase):
  def _next(self, dataset):
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()

  def _drain(self, element):
    elements = []
    with _session() as sess:
      while not sess.should_stop():
        elements.append(sess.run(element))
    return elements

  def test_order(self):
    files = [_write(name) for name in ("b0", "b1", "a0")]
    dataset = distributed_dataset.create_dynamic_sharding_dataset(
      [_pattern("b*"), _pattern("none*"), _pattern("a*")]
    )
    self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.string))
    self.assertEqual(self._drain(self._next(dataset)), [file.encode() for file in files])

  def test_no_files(self):
    dataset = distributed_dataset.create_dynamic_sharding_dataset([_pattern("none*")])
    self.assertEqual(self._drain(self._next(dataset)), [])

  def test_end_runs_no_dependents(self):
    _write("a0")
    dataset = distributed_dataset.create_dynamic_sharding_dataset([_pattern("a*")])
    element = self._next(dataset)
    count = tf.compat.v1.get_variable("count", initializer=0, use_resource=True)
    with tf.control_dependencies([element]):
      add = count.assign_add(1)
    with _session() as sess:
      sess.run(add)
      with self.assertRaises(tf.errors.OutOfRangeError):
        sess.raw_session().run(add)
      self.assertEqual(sess.raw_session().run(count), 1)

  def test_workers_share_the_files(self):
    """Reads two iterators of one graph, like two workers with the same queues."""
    files = [_write(f"a{i}").encode() for i in range(5)]
    dataset = distributed_dataset.create_dynamic_sharding_dataset([_pattern("a*")])
    elements = [self._next(dataset), self._next(dataset)]
    taken = []
    with _session() as monitored:
      sess = monitored.raw_session()
      while elements:
        try:
          taken.append(sess.run(elements[0]))
          elements.append(elements.pop(0))
        except tf.errors.OutOfRangeError:
          elements.pop(0)
    self.assertCountEqual(taken, files)

  def test_queues_are_on_the_first_server(self):
    ctx = native_task_context.get()._replace(num_ps=2)
    # Avoids `with_ctx`, which leaves the last context behind for the other tests.
    with mock.patch.object(native_task_context, "get", return_value=ctx):
      distributed_dataset.create_dynamic_sharding_dataset([_pattern("a*")])
    devices = {var.device for var in tf.compat.v1.global_variables()}
    self.assertEqual(devices, {"/job:ps/task:0/device:CPU:0"})

  def test_restore_resumes_at_the_line(self):
    _write("a0", 1, 2, 3)
    _write("a1", 4)
    dataset = distributed_dataset.create_dynamic_sharding_dataset([_pattern("a*")]).flat_map(
      tf.data.TextLineDataset
    )
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    element = iterator.get_next()
    saveable = tf.data.experimental.make_saveable_from_iterator(
      iterator, external_state_policy="ignore"
    )
    saver = tf.compat.v1.train.Saver([*tf.compat.v1.global_variables(), saveable])
    path = os.path.join(os.environ["TEST_TMPDIR"], "model.ckpt")
    with _session() as monitored:
      sess = monitored.raw_session()
      sess.run(iterator.initializer)
      self.assertEqual([sess.run(element) for _ in range(2)], [b"1", b"2"])
      saver.save(sess, path)
      self.assertEqual([sess.run(element) for _ in range(2)], [b"3", b"4"])

      saver.restore(sess, path)

      self.assertEqual([sess.run(element) for _ in range(2)], [b"3", b"4"])
      with self.assertRaises(tf.errors.OutOfRangeError):
        sess.run(element)

  def test_samples_of_files(self):
    instance = proto_parser_pb2.Instance(fid=[5]).SerializeToString()
    for name, count in (("a0", 2), ("a1", 1)):
      with open(_pattern(name), "wb") as f:
        f.write((struct.pack("<QQ", 0, len(instance)) + instance) * count)
    samples = datasets.PBDataset(patterns=[_pattern("a*")], enable_dynamic_sharding=True)
    serialized = instance_dataset_op.create_instance_dataset(
      [_pattern("a*")], enable_dynamic_sharding=True
    )

    samples = self._next(samples.map(feature_utils.variant_to_zeros))
    serialized = self._next(serialized)
    self.assertEqual(self._drain(samples), [0] * 3)
    self.assertEqual(self._drain(serialized), [instance] * 3)

  def test_needs_a_session(self):
    _write("a0")
    dataset = distributed_dataset.create_dynamic_sharding_dataset([_pattern("a*")])
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    element = iterator.get_next()
    with self.session() as sess:
      sess.run([tf.compat.v1.global_variables_initializer(), iterator.initializer])
      with self.assertRaisesRegex(tf.errors.OpError, "needs the session that trains"):
        sess.run(element)


if __name__ == "__main__":
  tf.test.main()

"""Tests of `monolith.core.tpu_variable`."""

import unittest

import tensorflow as tf
from tensorflow.python.tpu import tpu

from monolith.core.tpu_variable import ReplicatedVariable

tf.compat.v1.disable_v2_behavior()


class ReplicatedVariableTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)
    self.copies = [
      tf.compat.v1.get_variable(
        f"v{i}", initializer=tf.constant([float(i), 1.0]), use_resource=True
      )
      for i in range(3)
    ]
    self.variable = ReplicatedVariable("v", self.copies)

  def _session(self):
    session = tf.compat.v1.Session()
    self.addCleanup(session.close)
    session.run(self.variable.initializer)
    return session

  def test_initializer_covers_all_copies(self):
    session = self._session()
    self.assertAllEqual(session.run(self.copies), [[0, 1], [1, 1], [2, 1]])

  def test_members(self):
    v = self.variable
    self.assertEqual((v.name, v.dtype, v.shape.as_list()), ("v", tf.float32, [2]))
    self.assertEqual(v.get_shape(), v.shape)
    self.assertIs(v.get(), self.copies[0])
    self.assertIs(v.graph, tf.compat.v1.get_default_graph())
    self.assertIs(v.op, self.copies[0].op)
    self.assertIs(v.handle, self.copies[0].handle)
    self.assertIsNone(v.constraint)
    self.assertEqual(v._shared_name, "v")
    self.assertEqual(v.to_proto().variable_name, self.copies[0].name)
    with self.assertRaisesRegex(ValueError, "at least one"):
      ReplicatedVariable("w", [])

  def test_read_and_convert(self):
    session = self._session()
    self.assertAllEqual(session.run(self.variable.read_value()), [0, 1])
    self.assertAllEqual(session.run(tf.convert_to_tensor(self.variable)), [0, 1])
    self.assertAllEqual(session.run(tf.add(self.variable, [1.0, 1.0])), [1, 2])

  def test_assign(self):
    session = self._session()
    self.assertIsNone(session.run(self.variable.assign([5.0, 6.0])))
    self.assertAllEqual(session.run(self.copies), [[5, 6], [1, 1], [2, 1]])
    self.assertAllEqual(session.run(self.variable.assign([7, 8], read_value=True)), [7, 8])
    session.run(tf.compat.v1.assign(self.variable, [1.0, 2.0]))
    self.assertAllEqual(session.run(self.variable.read_value()), [1, 2])

  def test_value_of_assign_add_depends_on_the_write(self):
    session = self._session()
    add, sub = self.variable.assign_add([1.0, 1.0]), self.variable.assign_sub([3.0, 0.0])
    self.assertAllEqual(session.run(add), [1, 2])
    self.assertAllEqual(session.run(sub), [-2, 2])
    self.assertAllEqual(session.run(self.copies[0]), [-2, 2])
    self.assertIsNone(session.run(self.variable.assign_add([1.0, 1.0], read_value=False)))
    self.assertAllEqual(session.run(self.copies[0]), [-1, 3])

  def test_handle_inside_a_tpu_computation(self):
    handles = []

    def computation():
      handles.extend([self.variable.handle, self.variable.handle])
      return self.variable.assign_add([1.0, 1.0])

    tpu.replicate(computation, inputs=[[], [], []])

    self.assertIs(handles[0], handles[1])
    self.assertEqual(handles[0].op.type, "TPUReplicatedInput")
    self.assertEqual(list(handles[0].op.inputs), [copy.handle for copy in self.copies])


if __name__ == "__main__":
  unittest.main()

"""Data in arrays does not end in the files of a model."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from monolith.native_training import save_utils
from monolith.native_training.checkpoints import graph_files

tf.compat.v1.disable_eager_execution()


class GraphFilesTest(tf.test.TestCase):
  def test_files_of_a_model_have_no_arrays(self):
    folder = self.create_tempdir().full_path
    data = tf.data.Dataset.from_tensor_slices(np.random.rand(1 << 19))  # 4 MiB
    iterator = tf.compat.v1.data.make_initializable_iterator(data.repeat())
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    batch = iterator.get_next()
    constant = tf.constant(np.arange(1 << 19))
    third = constant[3]
    step = tf.compat.v1.train.get_or_create_global_step()
    with tf.control_dependencies([batch, third]):
      train = step.assign_add(1)
    graph_files.leave_out_large_constants(tf.compat.v1.get_default_graph())
    saver = save_utils.PartialRecoverySaver()
    hook = save_utils.NoFirstSaveCheckpointSaverHook(folder, save_steps=1, saver=saver)

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      for _ in range(3):
        sess.run(train)
      self.assertEqual(sess.run(third), 3)

    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}
    self.assertIn("graph.pbtxt", sizes)
    self.assertLess(sum(sizes.values()), 1 << 20, sizes)
    with tf.Graph().as_default() as graph:
      tf.compat.v1.train.import_meta_graph(tf.train.latest_checkpoint(folder) + ".meta")
      self.assertEqual(graph.get_operation_by_name(constant.op.name).type, "Placeholder")

  def test_descriptions_are_up_to_date_and_the_callers_own(self):
    graph = tf.compat.v1.get_default_graph()
    describe = graph.as_graph_def
    tf.constant(1, name="first")
    graph_files.leave_out_large_constants(graph)

    for add_shapes in (True, False, True):
      description = graph.as_graph_def(add_shapes=add_shapes)
      self.assertEqual(description, describe(add_shapes=add_shapes))
      description.node[0].name = "changed"
    self.assertEqual(graph.as_graph_def(add_shapes=True), describe(add_shapes=True))
    tf.constant(2, name="second")
    self.assertEqual(graph.as_graph_def(add_shapes=True), describe(add_shapes=True))


if __name__ == "__main__":
  tf.test.main()

import tensorflow as tf

from monolith.native_training import graph_meta

tf.compat.v1.disable_eager_execution()


class GraphMetaTest(tf.test.TestCase):
  def test_same_graph_gives_same_object(self):
    calls = []

    def factory():
      calls.append(1)
      return {}

    first = graph_meta.get_meta("key", factory)
    second = graph_meta.get_meta("key", factory)

    self.assertIs(first, second)
    self.assertLen(calls, 1)

  def test_keys_are_independent(self):
    self.assertIsNot(graph_meta.get_meta("a", list), graph_meta.get_meta("b", list))

  def test_graphs_never_share(self):
    with tf.Graph().as_default():
      first = graph_meta.get_meta("key", list)
    with tf.Graph().as_default():
      second = graph_meta.get_meta("key", list)

    self.assertIsNot(first, second)

  def test_false_objects_are_kept(self):
    graph_meta.get_meta("none", lambda: None)

    self.assertIsNone(graph_meta.get_meta("none", lambda: self.fail("made twice")))

  def test_failed_factory_leaves_nothing_behind(self):
    def fail():
      raise RuntimeError("no")

    with self.assertRaises(RuntimeError):
      graph_meta.get_meta("key", fail)
    self.assertEqual(graph_meta.get_meta("key", lambda: 1), 1)

  def test_meta_graph_export_does_not_see_it(self):
    with tf.Graph().as_default() as graph:
      tf.constant(1)
      graph_meta.get_meta("key", dict)["x"] = object()

      meta_graph = tf.compat.v1.train.export_meta_graph()

      self.assertEqual(graph.get_all_collection_keys(), [])
      self.assertEmpty(meta_graph.collection_def)


if __name__ == "__main__":
  tf.test.main()

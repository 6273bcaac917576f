"""Tests of the export context."""

import tensorflow as tf

from monolith.native_training.graph import export_context
from monolith.native_training.graph.export_context import ExportContext, ExportMode


class ExportContextTest(tf.test.TestCase):
  def test_modes(self):
    self.assertFalse(export_context.is_exporting())
    self.assertIsNone(export_context.get_current_export_ctx())

    with export_context.enter_export_mode(ExportMode.STANDALONE) as ctx:
      self.assertTrue(export_context.is_exporting())
      self.assertTrue(export_context.is_exporting_standalone())
      self.assertFalse(export_context.is_exporting_distributed())
      self.assertIs(export_context.get_current_export_ctx(), ctx)
      self.assertIs(export_context.EXPORT_MODE.STANDALONE, export_context.EXPORT_MODE)

    with export_context.enter_export_mode(ExportMode.DISTRIBUTED, ExportContext(True)) as ctx:
      self.assertTrue(export_context.is_exporting_distributed())
      self.assertTrue(ctx.with_remote_gpu)
    self.assertFalse(export_context.is_exporting())

  def test_mode_ends_with_an_exception(self):
    with self.assertRaises(KeyError):
      with export_context.enter_export_mode(ExportMode.STANDALONE):
        raise KeyError
    self.assertFalse(export_context.is_exporting())

  def test_nesting_is_refused(self):
    with export_context.enter_export_mode(ExportMode.STANDALONE):
      with self.assertRaisesRegex(AssertionError, "export mode can't be nested"):
        with export_context.enter_export_mode(ExportMode.STANDALONE):
          pass
      self.assertTrue(export_context.is_exporting())

  def test_dry_run(self):
    with tf.Graph().as_default() as graph:
      self.assertFalse(export_context.is_dry_run_or_exporting())
      graph.dry_run = True
      self.assertTrue(export_context.is_dry_run_or_exporting())

  def test_sub_graphs_are_made_on_first_use(self):
    ctx = ExportContext()
    self.assertIs(ctx.sub_graph("ps_0"), ctx.sub_graph("ps_0"))
    ctx.dense_sub_graph("dense_0")
    self.assertEqual(ctx.sub_graph_num, 1)
    self.assertEqual(list(ctx.dense_sub_graphs), ["dense_0"])

  def test_signatures(self):
    ctx = ExportContext()
    graph = ctx.sub_graph("ps_0")
    ctx.add_signature(graph, "lookup", {"a": 1}, {"b": 2})
    ctx.merge_signature(graph, "lookup", {"c": 3}, {"d": 4})
    self.assertEqual(
      ctx.signatures(graph),
      [export_context.SavedModelSignature("lookup", {"a": 1, "c": 3}, {"b": 2, "d": 4})],
    )
    ctx.add_signature(graph, "lookup", {}, {"e": 5})
    self.assertEqual(ctx.signatures(graph)[0].outputs, {"e": 5})
    self.assertEqual(graph.get_collection("signature_name"), ["lookup"])
    self.assertEqual(ctx.signatures(tf.Graph()), [])


if __name__ == "__main__":
  tf.test.main()

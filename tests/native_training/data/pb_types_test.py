"""Tests of what records and elements are."""

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from monolith.native_training.data import pb_types
from monolith.native_training.data.pb_types import PbType

if "data_type" not in flags.FLAGS:
  flags.DEFINE_string("data_type", None, "what records are")


class PbTypesTest(tf.test.TestCase):
  def test_names(self):
    for pb_type in PbType:
      self.assertEqual(pb_types.parse_pb_type(pb_type.to_name()), pb_type)
    self.assertEqual(pb_types.parse_pb_type("Example_Batch"), PbType.EXAMPLEBATCH)
    with self.assertRaisesRegex(ValueError, "'json', want one of instance, examplebatch"):
      pb_types.parse_pb_type("json")

  def test_defaults(self):
    default = pb_types.default_pb_types
    with flagsaver.flagsaver(data_type=None):
      self.assertEqual(default(None, None), (PbType.INSTANCE, PbType.INSTANCE))
    with flagsaver.flagsaver(data_type="example_batch"):
      self.assertEqual(default(None, None), (PbType.EXAMPLEBATCH, PbType.EXAMPLE))
      self.assertEqual(default(PbType.INSTANCE, None), (PbType.INSTANCE, PbType.INSTANCE))
      self.assertEqual(default(None, PbType.PLAINTEXT), (PbType.EXAMPLEBATCH, PbType.PLAINTEXT))

  def test_elements_are_variants_or_text(self):
    self.assertEqual(pb_types.element_type(PbType.PLAINTEXT), tf.string)
    self.assertEqual(pb_types.element_type(PbType.EXAMPLE), tf.variant)

  def test_a_graph_knows_each_type_once(self):
    with tf.Graph().as_default() as graph:
      for pb_type in (PbType.EXAMPLE, PbType.INSTANCE, PbType.EXAMPLE):
        pb_types.record_output_type(pb_type)
      recorded = graph.get_collection(pb_types.OUTPUT_PB_TYPE_GRAPH_KEY)
    self.assertEqual(recorded, ["example", "instance"])


if __name__ == "__main__":
  tf.test.main()

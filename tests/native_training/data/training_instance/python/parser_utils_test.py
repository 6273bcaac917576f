"""Tests of queued parse steps and of ragged tensors as dicts."""

import tensorflow as tf

from monolith.native_training.data.training_instance.python import parser_utils


class AdvancedParseTest(tf.test.TestCase):
  def test_passes_features_through(self):
    features = {"r": tf.ragged.constant([[1], []]), "i": tf.constant([1]), "f": tf.constant([0.5])}
    self.assertIs(parser_utils.advanced_parse(features), features)

  def test_steps_run_once_in_order(self):
    parser_utils.add_extra_parse_step(lambda features: {**features, "a": 1})
    parser_utils.add_extra_parse_step(lambda features: {**features, "b": features["a"] + 1})
    self.assertEqual(parser_utils.advanced_parse({}), {"a": 1, "b": 2})
    self.assertEqual(parser_utils.advanced_parse({}), {})

  def test_works_in_a_dataset(self):
    def parse(x):
      parser_utils.add_extra_parse_step(lambda features: {"y": features["x"] + 1})
      return parser_utils.advanced_parse({"x": x})

    self.assertEqual([int(e["y"]) for e in tf.data.Dataset.range(2).map(parse)], [1, 2])


class RaggedEncodingHelperTest(tf.test.TestCase):
  def test_round_trip(self):
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    dense = tf.constant([1.0])
    expanded = parser_utils.RaggedEncodingHelper.expand(
      {"r": ragged, "d": dense}, with_precomputed_value_rowids=True
    )
    self.assertEqual(set(expanded["r"]), {"values", "row_splits", "nrows", "value_rowids"})
    self.assertAllEqual(expanded["r"]["value_rowids"], [0, 0, 2])
    self.assertIs(expanded["d"], dense)

    contracted = parser_utils.RaggedEncodingHelper.contract(expanded)
    self.assertEqual(contracted["r"].to_list(), [[1, 2], [], [3]])
    # These are taken over, not computed again.
    self.assertIs(contracted["r"].value_rowids(), expanded["r"]["value_rowids"])
    self.assertIs(contracted["r"].nrows(), expanded["r"]["nrows"])
    self.assertIs(contracted["d"], dense)

  def test_without_precomputed_encodings(self):
    ragged = tf.ragged.constant([[1, 2], []])
    expanded = parser_utils.RaggedEncodingHelper.expand({"r": ragged}, False)
    self.assertEqual(set(expanded["r"]), {"values", "row_splits", "nrows", "value_rowids"})
    self.assertIsNone(expanded["r"]["nrows"])
    self.assertIsNone(expanded["r"]["value_rowids"])
    contracted = parser_utils.RaggedEncodingHelper.contract(expanded)
    self.assertEqual(int(contracted["r"].nrows()), 2)


if __name__ == "__main__":
  tf.test.main()

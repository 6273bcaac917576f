"""Tests of filters and label rules that are data."""

import tensorflow as tf

from monolith.native_training.data import datasets, feature_utils, parsers
from monolith.native_training.data.transform import transforms
from tests.native_training.data.data_test_utils import make_example


def _label_of(variant):
  out = parsers.parse_examples(variant[None], [], ["label"], [1])
  return out["label"].numpy()[0].tolist()


class TransformTest(tf.test.TestCase):
  def test_compose(self):
    fid = 290956192322012601
    samples = []
    for i in range(40):
      sample = make_example(
        {"x": [fid]} if i >= 10 else {},
        read_count=0 if 20 <= i < 40 else 1,
        video_play_time=0.0 if 20 <= i < 30 else 1.0,
        actions=[2] if 30 <= i < 35 else [1],
      )
      samples.append(sample.SerializeToString())
    dataset = tf.data.Dataset.from_tensor_slices(samples).map(feature_utils.string_to_variant)
    transform = transforms.Compose(
      [
        transforms.FilterByFid(select_fids=[fid]),
        transforms.FilterByValue("read_count", "in", [0]),
        transforms.LogicalOr(
          transforms.FilterByValue("video_play_time", "eq", 0.0), transforms.FilterByAction([2])
        ),
      ]
    )
    out = datasets.TransformDataset(dataset, transform, "example")
    self.assertLen(list(out), 15)

  def test_add_label_and_filter(self):
    dataset = tf.data.Dataset.from_tensor_slices(
      [make_example(actions=[a]).SerializeToString() for a in (1, 2)]
    ).map(feature_utils.string_to_variant)
    transform = transforms.Compose(
      [transforms.AddLabel("1:2:1.0", -1.0, 1.0), transforms.FilterByLabel([0.5])]
    )
    out = list(datasets.TransformDataset(dataset, transform, "example"))
    self.assertEqual([_label_of(x) for x in out], [[1]])

  def test_empty_is_the_identity(self):
    dataset = tf.data.Dataset.from_tensors(b"").map(feature_utils.string_to_variant)
    out = datasets.TransformDataset(dataset, transforms.Compose([]), "example")
    self.assertLen(list(out), 1)

  def test_bad_arguments(self):
    leaf = transforms.FilterByAction()
    with self.assertRaises(AssertionError):
      transforms.LogicalOr(leaf, transforms.Compose([leaf]))
    dataset = tf.data.Dataset.from_tensors(b"").map(feature_utils.string_to_variant)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "op is 'like'"):
      datasets.TransformDataset(dataset, transforms.FilterByValue("uid", "like", 1), "example")


if __name__ == "__main__":
  tf.test.main()

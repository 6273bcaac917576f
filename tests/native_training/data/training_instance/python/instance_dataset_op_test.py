"""Tests of datasets of serialized Instances."""

import os

import tensorflow as tf

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training.data.training_instance.python import instance_dataset_op
from tests.native_training.data.data_test_utils import make_instance, write_records


class InstanceDatasetTest(tf.test.TestCase):
  def path(self, name):
    return os.path.join(os.environ["TEST_TMPDIR"], name)

  def test_serialized_instances(self):
    paths = []
    for i in range(2):
      payload = make_instance(uid=i + 1).SerializeToString()
      paths.append(write_records(self.path(f"part_{i}"), [payload]))
    single = instance_dataset_op.PBInstanceDataset(paths[0])
    self.assertEqual(
      [proto_parser_pb2.Instance.FromString(x.numpy()).line_id.uid for x in single], [1]
    )
    for dataset in (
      instance_dataset_op.create_instance_dataset(paths),
      instance_dataset_op.create_instance_dataset([self.path("part_*")], expand_glob_path=True),
    ):
      self.assertLen(list(dataset), 2)
    with self.assertRaisesRegex(ValueError, "one pattern"):
      instance_dataset_op.create_instance_dataset(paths, enable_sharding=True)


if __name__ == "__main__":
  tf.test.main()

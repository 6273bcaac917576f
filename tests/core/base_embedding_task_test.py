"""Tests of `monolith.core.base_embedding_task`."""

import os
import stat
import tempfile
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from monolith.core import base_embedding_task
from monolith.core.base_embedding_task import BaseEmbeddingTask
from monolith.core.feature import FeatureColumn3D, FeatureColumnV1, FeatureSlot

tf.compat.v1.disable_v2_behavior()

_SIGNAL = "_user_provided_signal_name"
_VOCAB = "slot\tcount\n1\t50\n2\t20\n"


class TwoSlotsTask(BaseEmbeddingTask):
  """Slots 1 and 2, each a bias and dim 4, with columns slot_1 and slot_2."""

  def logits_fn(self):
    outputs = []
    for slot_id in (1, 2):
      slot = FeatureSlot(self._env, slot_id, has_bias=True)
      vector = slot.add_feature_slice(4)
      column = FeatureColumnV1(slot, f"slot_{slot_id}")
      outputs += [column.get_bias(), column.embedding_lookup(vector)]
    return tf.concat(outputs, axis=1)

  def _get_feature_map(self):
    return {
      "slot_1_0": tf.io.VarLenFeature(tf.int64),
      "slot_2_0": tf.io.VarLenFeature(tf.int64),
      "label": tf.io.FixedLenFeature([], tf.float32),
    }


class SequenceTask(BaseEmbeddingTask):
  """A sequence column of length 3 and a plain one, both on slot 1, dim 2, without bias."""

  def logits_fn(self):
    slot = FeatureSlot(self._env, 1)
    vector = slot.add_feature_slice(2)
    sequence = FeatureColumn3D(slot, 3, "seq")
    return sequence.embedding_lookup(vector), FeatureColumnV1(slot, "one").embedding_lookup(vector)


def _sparse(rows):
  indices = [[i, j] for i, row in enumerate(rows) for j in range(len(row))]
  return tf.SparseTensor(
    indices=np.array(indices, np.int64).reshape(-1, 2),
    values=tf.constant([v for row in rows for v in row], tf.int64),
    dense_shape=[len(rows), max([1, *map(len, rows)])],
  )


class _TaskTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name

  def write(self, name, text):
    path = os.path.join(self.folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as out:
      out.write(text)
    return path

  def create(self, cls=TwoSlotsTask, initialize=True, vocab=_VOCAB, **settings):
    params = cls.params().set(vocab_file_path=self.write("vocab", vocab), **settings)
    task = params.instantiate()
    if initialize:
      task.init_slot_to_env()
      task.create_feature_and_table_config_dict()
    return task

  def evaluate_now(self, value):
    with tf.compat.v1.Session() as session:
      session.run(tf.compat.v1.global_variables_initializer())
      return session.run(value)


class ParamsTest(_TaskTest):
  def test_defaults(self):
    p = BaseEmbeddingTask.params()
    want = {
      "vocab_size_per_slot": None,
      "custom_vocab_size_mapping": None,
      "vocab_size_offset": None,
      "qr_multi_hashing": False,
      "qr_hashing_threshold": 100000000,
      "qr_collision_rate": 4,
      "vocab_file_path": None,
      "enable_deepinsight": False,
      "enable_host_call_scalar_metrics": False,
      "enable_host_call_norm_metrics": False,
      "files_interleave_cycle_length": 4,
      "deterministic": False,
      "gradient_multiplier": 1.0,
      "enable_caching_with_tpu_var_mode": False,
      "top_k_sampling_num_per_core": 6,
      "use_random_init_embedding_for_oov": False,
      "merge_vector": False,
      "train.file_folder": None,
      "train.date_and_file_name_format": "*/*/part*",
      "train.start_date": None,
      "train.end_date": None,
      "train.vocab_file_folder_prefix": None,
    }
    self.assertEqual({name: p.get(name) for name in want}, want)

  def test_abstract_methods(self):
    task = self.create(BaseEmbeddingTask, initialize=False)
    for method in (task.logits_fn, task._get_feature_map, task.create_model_fn):
      with self.assertRaises(NotImplementedError):
        method()


class VocabularyTest(_TaskTest):
  def test_sizes(self):
    for settings, want in (
      ({}, {1: 50, 2: 20}),
      ({"vocab_size_per_slot": 7}, {1: 7, 2: 7}),
      ({"vocab_size_offset": 3}, {1: 53, 2: 23}),
      ({"custom_vocab_size_mapping": {2: 9}}, {1: 50, 2: 9}),
      ({"custom_vocab_size_mapping": {2: 9}, "vocab_size_offset": 3}, {1: 53, 2: 12}),
      ({"vocab_size_per_slot": 7, "vocab_size_offset": 3}, {1: 10, 2: 10}),
    ):
      with self.subTest(settings=settings):
        task = self.create(initialize=False, **settings)
        self.assertEqual(task._env.vocab_size_dict, want)

  def test_bad_line(self):
    with self.assertRaisesRegex(AssertionError, r"^each line in .*vocab must have 2 fields"):
      self.create(vocab="1\t2\t3\n")

  def test_no_file(self):
    with self.assertRaises(AssertionError) as caught:
      TwoSlotsTask.params().instantiate()
    self.assertEqual(
      str(caught.exception),
      "Either provide vocab_file_path or vocab_file_folder_prefix and end date.",
    )

  def _with_hadoop(self, script):
    path = self.write("bin/hadoop", f"#!/bin/sh\n{script}\n")
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
    path = f"{os.path.dirname(path)}:{os.environ['PATH']}"
    return mock.patch.dict(os.environ, {"PATH": path})

  def _downloaded(self):
    return self.create(
      initialize=False,
      **{"train.end_date": "20200101", "train.vocab_file_folder_prefix": "hdfs://x/vocab_"},
    )._env.vocab_size_dict

  def test_download(self):
    with self._with_hadoop(
      '[ "$1 $2 $3" = "fs -copyToLocal hdfs://x/vocab_20200101/part*.csv" ] || exit 1\n'
      'printf "1\\t77\\n" > "$4/part-0.csv"'
    ):
      self.assertEqual(self._downloaded(), {1: 77})

  def test_failed_download_falls_back(self):
    for script in ("exit 1", 'touch "$4/part-0.csv" "$4/part-1.csv"', "true"):
      with self.subTest(script=script), self._with_hadoop(script):
        self.assertEqual(self._downloaded(), {1: 50, 2: 20})
    with mock.patch.dict(os.environ, {"PATH": self.folder}):
      self.assertEqual(self._downloaded(), {1: 50, 2: 20})


class TablesTest(_TaskTest):
  def test_worked_example(self):
    task = self.create()
    tables = {
      name: (t.vocabulary_size, t.dimension) for name, t in task._table_to_config_dict.items()
    }
    self.assertEqual(
      tables,
      {"table_1_0": (50, 1), "table_1_1": (50, 4), "table_2_0": (20, 1), "table_2_1": (20, 4)},
    )
    self.assertEqual(
      {name: f.table_id for name, f in task._feature_to_config_dict.items()},
      {
        "slot_1_0": "table_1_0",
        "slot_1_1": "table_1_1",
        "slot_2_0": "table_2_0",
        "slot_2_1": "table_2_1",
      },
    )
    table = task._table_to_config_dict["table_1_1"]
    self.assertEqual(table.combiner, "sum")
    self.assertEqual(table.optimization_parameters.learning_rate, 0.01)

  def test_qr(self):
    task = self.create(vocab="1\t1000\n2\t20\n", qr_multi_hashing=True, qr_hashing_threshold=100)
    tables = {
      name: (t.vocabulary_size, t.dimension) for name, t in task._table_to_config_dict.items()
    }
    self.assertEqual(
      tables,
      {
        "table_1_0_0": (251, 1),
        "table_1_0_1": (5, 1),
        "table_1_1_0": (251, 4),
        "table_1_1_1": (5, 4),
        "table_2_0": (20, 1),
        "table_2_1": (20, 4),
      },
    )
    self.assertEqual(
      set(task._feature_to_config_dict),
      {"slot_1_0_0", "slot_1_0_1", "slot_1_1_0", "slot_1_1_1", "slot_2_0", "slot_2_1"},
    )

  def test_sequence_and_shared_table(self):
    task = self.create(SequenceTask)
    self.assertEqual(set(task._table_to_config_dict), {"table_1_0"})
    self.assertEqual(
      {n: f.max_sequence_length for n, f in task._feature_to_config_dict.items()},
      {"seq_0": 3, "one_0": 0},
    )

  def test_slot_without_vocabulary(self):
    task = self.create(vocab="1\t50\n")
    self.assertEqual(task._table_to_config_dict["table_2_0"].vocabulary_size, 1)

  def test_merged(self):
    task = self.create(merge_vector=True)
    self.assertEqual(
      {n: t.dimension for n, t in task._table_to_config_dict.items()},
      {"table_1_0": 1, "table_1_1": 4, "table_2_0": 1, "table_2_1": 4},
    )


class PostProcessTest(_TaskTest):
  def _processed(self, ids=((-3, 5, 120),), vocab=_VOCAB, **settings):
    task = self.create(vocab=vocab, **settings)
    example = {"slot_1_0": _sparse(ids), "slot_2_0": _sparse([[]] * len(ids))}
    return self.evaluate_now(task._post_process_example(example))

  def test_ids(self):
    for settings, want in (
      ({}, [0, 5, 120]),
      ({"vocab_size_per_slot": 50}, [0, 5, 20]),
      ({"custom_vocab_size_mapping": {1: 7}}, [0, 5, 1]),
    ):
      with self.subTest(settings=settings):
        example = self._processed(**settings)
        self.assertEqual(set(example), {"slot_1_0", "slot_1_1", "slot_2_0", "slot_2_1"})
        for name in ("slot_1_0", "slot_1_1"):
          self.assertAllEqual(example[name].values, want)
        self.assertAllEqual(example["slot_2_1"].values, [])

  def test_int64_extremes(self):
    example = self._processed(ids=[[-(2**63), 2**63 - 1]], vocab_size_per_slot=50)
    self.assertAllEqual(example["slot_1_0"].values, [0, (2**63 - 1) % 50])

  def test_qr(self):
    example = self._processed(
      ids=[[5, 1000, -3]],
      vocab="1\t1000\n2\t20\n",
      qr_multi_hashing=True,
      qr_hashing_threshold=100,
    )
    self.assertNotIn("slot_1_0", example)
    for i in (0, 1):
      self.assertAllEqual(example[f"slot_1_{i}_0"].values, [5, 247, 0])
      self.assertAllEqual(example[f"slot_1_{i}_1"].values, [0, 3, 0])

  def test_uid_bucket(self):
    task = self.create()
    example = task._post_process_example(
      {
        "slot_1_0": _sparse([[1]]),
        "slot_2_0": _sparse([[1]]),
        "uid": tf.constant([1234567], tf.int64),
      }
    )
    self.assertEqual(example["uid_bucket"].dtype, tf.int32)
    self.assertAllEqual(self.evaluate_now(example["uid_bucket"]), [567])

  def test_sequence(self):
    task = self.create(SequenceTask)
    rows = [[1, -2, 3, 4], [], [5]]
    for source in (tf.ragged.constant(rows, dtype=tf.int64), _sparse(rows)):
      example = self.evaluate_now(
        task._post_process_example({"seq_0": source, "one_0": _sparse([[1], [2], [3]])})
      )
      self.assertAllEqual(example["seq_0_row_lengths"], [4, 0, 1])
      self.assertEqual(example["seq_0_row_lengths"].dtype, np.int32)
      self.assertAllEqual(example["seq_0"].dense_shape, [3, 3])
      self.assertAllEqual(example["seq_0"].values, [1, 0, 3, 5])
      self.assertAllEqual(example["seq_0"].indices, [[0, 0], [0, 1], [0, 2], [2, 0]])


class CpuLookupTest(_TaskTest):
  def test_embeddings(self):
    task = self.create(SequenceTask)
    features = {
      "seq_0": tf.SparseTensor([[0, 0], [0, 2]], tf.constant([3, 4], tf.int64), [2, 3]),
      "one_0": _sparse([[3, 4], []]),
      "dense": tf.constant([1, 2]),
    }
    result = task.process_features_for_cpu_test(features)
    (table,) = tf.compat.v1.trainable_variables()
    self.assertEqual((table.op.name, table.shape.as_list()), ("table_1_0", [50, 2]))
    self.assertEqual(result["seq_0"].shape.as_list()[1:], [3, 2])
    result, rows = self.evaluate_now([result, table])
    self.assertLessEqual(np.abs(rows).max(), 0.001)
    self.assertAllClose(result["one_0"], [rows[3] + rows[4], [0, 0]])
    self.assertAllClose(result["seq_0"][0], [rows[3], [0, 0], rows[4]])
    self.assertAllEqual(result["seq_0"][1], np.zeros([3, 2]))
    self.assertAllEqual(result["dense"], [1, 2])
    self.assertEqual(set(task._feature_to_config_dict), {"seq_0", "one_0"})

  def test_ids_beyond_the_vocabulary_wrap(self):
    task = self.create(SequenceTask)
    result = task.process_features_for_cpu_test({"one_0": _sparse([[53]])})
    value, rows = self.evaluate_now([result["one_0"], tf.compat.v1.trainable_variables()[0]])
    self.assertAllClose(value, [rows[3]])

  def test_unconfigured_feature(self):
    with self.assertRaisesRegex(KeyError, "other_0 has no table"):
      self.create().process_features_for_cpu_test({"other_0": _sparse([[1]])})

  def test_cross_shard_optimizer(self):
    task = self.create()
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    for params in ({"cpu_test": True}, {"cpu_test": False, "use_tpu": False}):
      self.assertIs(task.cross_shard_optimizer(optimizer, params), optimizer)
    for params in ({"cpu_test": False}, {"cpu_test": False, "use_tpu": True}):
      self.assertIsInstance(
        task.cross_shard_optimizer(optimizer, params), tf.compat.v1.tpu.CrossShardOptimizer
      )


class InputTest(_TaskTest):
  def _write_examples(self, name, ids):
    path = os.path.join(self.folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tf.io.TFRecordWriter(path) as writer:
      for i in ids:
        example = tf.train.Example()
        example.features.feature["slot_1_0"].int64_list.value.append(i)
        example.features.feature["slot_2_0"].int64_list.value.append(i)
        example.features.feature["label"].float_list.value.append(i)
        writer.write(example.SerializeToString())
    return path

  def _params(self, index=None, count=1, batch_size=2, cpu_test=False, signals=False):
    params = {"cpu_test": cpu_test, "batch_size": batch_size, "enable_stopping_signals": signals}
    if index is not None:
      params["context"] = mock.Mock()
      params["context"].current_input_fn_deployment.return_value = ("", index, count, 8)
    return params

  def _read(self, task, params, limit=None):
    dataset = task.create_input_fn()(params)
    element = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    batches = []
    with tf.compat.v1.Session() as session:
      while limit is None or len(batches) < limit:
        try:
          batches.append(session.run(element))
        except tf.errors.OutOfRangeError:
          break
    return batches

  def _labels(self, *args, **kwargs):
    return [batch["label"].tolist() for batch in self._read(*args, **kwargs)]

  def test_other_modes(self):
    with self.assertRaises(AssertionError):
      self.create().create_input_fn(tf.estimator.ModeKeys.EVAL)

  def test_pattern_is_sharded(self):
    for i in range(4):
      self._write_examples(f"part-{i}", [10 * i, 10 * i + 1])
    task = self.create(
      deterministic=True,
      files_interleave_cycle_length=1,
      **{"train.file_pattern": os.path.join(self.folder, "part-*")},
    )
    self.assertEqual(self._labels(task, self._params(0, 2)), [[0, 1], [20, 21]])
    self.assertEqual(self._labels(task, self._params(1, 2)), [[10, 11], [30, 31]])
    self.assertLen(self._labels(task, self._params()), 4)

  def test_incomplete_batch_is_dropped(self):
    path = self._write_examples("part", [1, 2, 3])
    task = self.create(**{"train.file_pattern": path})
    self.assertEqual(self._labels(task, self._params(0)), [[1, 2]])

  def test_dates(self):
    for day in (1, 2, 3):
      self._write_examples(f"data/2020050{day}/00/part-0", [day, day])
    folder = os.path.join(self.folder, "data/")
    dates = {"train.start_date": "20200502", "train.end_date": "20200503"}
    task = self.create(
      deterministic=True, files_interleave_cycle_length=1, **{"train.file_folder": folder, **dates}
    )
    self.assertEqual(self._labels(task, self._params(0)), [[2, 2], [3, 3]])

  def test_missing_file_settings(self):
    task = self.create(**{"train.file_folder": self.folder + "/"})
    with self.assertRaisesRegex(AssertionError, "train.end_date is None"):
      task.create_input_fn()(self._params(0))
    task = self.create(**{"train.file_folder": self.folder, "train.end_date": "20200101"})
    with self.assertRaisesRegex(AssertionError, "must end with /"):
      task.create_input_fn()(self._params(0))
    for pattern, message in ((self.folder + "/no*", "matches no file"), (None, "is None, want")):
      task = self.create(**{"train.file_pattern": pattern})
      with self.assertRaisesRegex(ValueError, message):
        task.create_input_fn()(self._params(cpu_test=True))

  def test_cpu_repeats_and_expands_patterns(self):
    self._write_examples("part-0", [0, 1])
    self._write_examples("part-1", [2, 3])
    odd = self._write_examples("odd[1]", [4, 5])
    task = self.create(
      deterministic=True,
      files_interleave_cycle_length=1,
      **{"train.file_pattern": [os.path.join(self.folder, "part-*"), odd]},
    )
    labels = self._labels(task, self._params(cpu_test=True), limit=4)
    self.assertEqual(labels, [[4, 5], [0, 1], [2, 3], [4, 5]])

  def test_repeat(self):
    path = self._write_examples("part", [1, 2])
    task = self.create(**{"train.file_pattern": path, "train.repeat": True})
    self.assertEqual(self._labels(task, self._params(0), limit=3), [[1, 2]] * 3)
    with self.assertRaisesRegex(AssertionError, "train.repeat and enable_stopping_signals"):
      task.create_input_fn()(self._params(0, signals=True))

  def test_stopping_signals(self):
    path = self._write_examples("part", [1, 2, 3, 4])
    task = self.create(deterministic=True, **{"train.file_pattern": path})
    batches = self._read(task, self._params(0, signals=True), limit=5)
    self.assertEqual([b[_SIGNAL].tolist() for b in batches], [[False] * 2] * 2 + [[True] * 2] * 3)
    self.assertEqual([b["slot_1_0"].values.tolist() for b in batches[:2]], [[1, 2], [3, 4]])
    for batch in batches[2:]:
      for name in ("slot_1_0", "slot_1_1", "slot_2_0", "slot_2_1"):
        self.assertEqual(batch[name].values.tolist(), [])
        self.assertEqual(batch[name].values.dtype, np.int64)
        self.assertEqual(batch[name].dense_shape.tolist(), [2, 1])

  def test_list_files(self):
    one, two = self.write("a1", ""), self.write("a2", "")
    pattern = os.path.join(self.folder, "a*")
    self.assertEqual(base_embedding_task.list_files([two, pattern]), [one, two])


if __name__ == "__main__":
  unittest.main()

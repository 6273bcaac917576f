"""`BaseEmbeddingTask`: a task whose model looks feature slots up in TPU embedding tables.

A subclass declares slots and columns in `logits_fn`, says how an example is parsed in
`_get_feature_map`, and builds the model in `create_model_fn`. The runner calls `init_slot_to_env`,
then `create_feature_and_table_config_dict`, then trains. On CPU (`cpu_test`) every table is an
ordinary variable, `process_features_for_cpu_test` looks the ids up, and checkpoints contain the
tables.

Differences from ByteDance's Monolith: CPU tables are shared by their columns, have the table's
initializer and are looked up per position in sequences; file patterns are expanded on CPU too;
slots under QR hashing have no plain table; negative ids are clamped before they are hashed.
"""

import glob
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import tensorflow as tf
from absl import logging

from monolith import _tensorflow
from monolith.core import auto_checkpoint_feed_hook, base_task, feature, hyperparams, util

# Configurations of features and tables.
tpu_embedding: Any = _tensorflow.import_tpu_embedding()

_SIGNAL_NAME = auto_checkpoint_feed_hook._USER_PROVIDED_SIGNAL_NAME
_TRAIN = "train"  # As every Estimator calls it.
_UID = "uid"
_UID_BUCKET = "uid_bucket"
_UID_BUCKETS = 1000

_IdsTensor = Union[tf.SparseTensor, tf.RaggedTensor]


class BaseEmbeddingTask(base_task.BaseTask):
  """Base of tasks with TPU embeddings."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("vocab_size_per_slot", None, "If set, the vocabulary size of every slot.")
    p.define("custom_vocab_size_mapping", None, "Vocabulary sizes by slot id.")
    p.define("vocab_size_offset", None, "Added to every vocabulary size.")
    p.define("qr_multi_hashing", False, "Whether big tables are split in two by QR hashing.")
    p.define("qr_hashing_threshold", 100000000, "Vocabulary size above which a table is big.")
    p.define("qr_collision_rate", 4, "How many times smaller the remainder table is.")
    p.define("vocab_file_path", None, "Lines slot<TAB>vocabulary size.")
    p.define("enable_deepinsight", False, "Whether host calls write the AUC inputs as text.")
    p.define("enable_host_call_scalar_metrics", False, "Whether host calls write scalars.")
    p.define("enable_host_call_norm_metrics", False, "Whether the model records norms.")
    p.define("files_interleave_cycle_length", 4, "Files read at a time.")
    p.define("deterministic", False, "Whether examples come in a fixed order.")
    p.define("gradient_multiplier", 1.0, "Factor of the embedding gradients.")
    p.define("enable_caching_with_tpu_var_mode", False, "Whether cores cache AUC samples.")
    p.define("top_k_sampling_num_per_core", 6, "Samples a core caches of each step.")
    p.define(
      "use_random_init_embedding_for_oov", False, "Whether ids without a row get random vectors."
    )
    p.define("merge_vector", False, "Whether the vector slices of a slot share one table.")

    p.train.define("file_folder", None, "Folder of the training files; ends with /.")
    p.train.define(
      "date_and_file_name_format", "*/*/part*", "Pattern below the folder; starts with a date."
    )
    p.train.define("start_date", None, "First date to train on, YYYYMMDD.")
    p.train.define("end_date", None, "Last date to train on, YYYYMMDD.")
    p.train.define(
      "vocab_file_folder_prefix", None, "HDFS folder of the vocabulary, without the date."
    )
    return p

  def __init__(self, params: hyperparams.Params):
    super().__init__(params)
    self.p = params
    self._feature_to_config_dict: dict[str, Any] = {}
    self._table_to_config_dict: dict[str, Any] = {}
    self._vocab_size_dict = self._create_vocab_dict()
    self._env = feature.Env(vocab_size_dict=self._vocab_size_dict, params=params)

  # ------------------------------------------------------------- for the subclass

  def logits_fn(self) -> Any:
    """Declares slots and columns, looks them up and returns the logits. It runs twice."""
    raise NotImplementedError("Abstract method.")

  def _get_feature_map(self) -> dict[str, Any]:
    """Returns the features of an example for `tf.io.parse_example`.

    The ids of a column come as `<fc_name>_0`: a `VarLenFeature`, or a `RaggedFeature` for a
    sequence.
    """
    raise NotImplementedError("Abstract method.")

  # ------------------------------------------------------------------- vocabulary

  def _create_vocab_dict(self) -> dict[int, int]:
    """Returns the vocabulary size of each slot."""
    with tempfile.TemporaryDirectory() as folder:
      path = self._download_vocab_file(folder) or self.p.vocab_file_path
      assert path, "Either provide vocab_file_path or vocab_file_folder_prefix and end date."
      return self._read_vocab_file(path)

  def _download_vocab_file(self, folder: str) -> Optional[str]:
    """Fetches the vocabulary of the end date from HDFS; None if that is not possible."""
    train = self.p.train
    if not (train.end_date and train.vocab_file_folder_prefix):
      return None
    source = f"{train.vocab_file_folder_prefix}{train.end_date}/part*.csv"
    try:
      subprocess.run(
        ["hadoop", "fs", "-copyToLocal", source, folder], check=True, capture_output=True
      )
    except (OSError, subprocess.CalledProcessError) as error:
      logging.warning("Could not download %s (%s): using vocab_file_path", source, error)
      return None
    files = glob.glob(os.path.join(glob.escape(folder), "part*.csv"))
    if len(files) != 1:
      logging.warning("%s has %d files, want 1: using vocab_file_path", source, len(files))
      return None
    return files[0]

  def _read_vocab_file(self, path: str) -> dict[int, int]:
    sizes = {}
    with tf.io.gfile.GFile(path) as lines:
      for line in lines:
        fields = line.strip().split("\t")
        assert len(fields) == 2, f"each line in {path} must have 2 fields, got {line!r}"
        if not fields[0].isdigit():
          continue  # the header
        slot_id = int(fields[0])
        size = self._fixed_vocab_size(slot_id)
        sizes[slot_id] = (int(fields[1]) if size is None else size) + (
          self.p.vocab_size_offset or 0
        )
    return sizes

  def _fixed_vocab_size(self, slot_id: int) -> Optional[int]:
    """Returns the configured size of a slot, None if the vocabulary file decides."""
    if self.p.vocab_size_per_slot is not None:
      return self.p.vocab_size_per_slot
    return (self.p.custom_vocab_size_mapping or {}).get(slot_id)

  # ------------------------------------------------------------------------ input

  def create_input_fn(self, mode: str = _TRAIN) -> Callable[..., Any]:
    """Returns the input function for training.

    Raises:
      AssertionError: any other mode; subclasses that evaluate override this.
    """
    assert mode == _TRAIN, f"The input function is for mode {_TRAIN}, got {mode}"

    def input_fn(params: dict[str, Any]) -> tf.data.Dataset:
      if params["cpu_test"]:
        files = tf.data.Dataset.from_tensor_slices(list_files(self.p.train.file_pattern))
        return self.create_dataset(files, params).repeat()
      return self._create_training_dataset(params)

    return input_fn

  def create_dataset(self, files: tf.data.Dataset, params: dict[str, Any]) -> tf.data.Dataset:
    """Returns parsed batches of `params["batch_size"]`; an incomplete last batch is dropped.

    Files are read by TensorFlow's own op, as hosts of TPUs have no other ones: a file that ends
    inside of the first 11 bytes of a record is read as if that record were not there.

    Args:
      files: names of TFRecord files.
      params: the input function's params.
    """
    examples = files.interleave(
      tf.data.TFRecordDataset,
      cycle_length=self.p.files_interleave_cycle_length,
      num_parallel_calls=tf.data.AUTOTUNE,
      deterministic=self.p.deterministic,
    )
    return examples.batch(params["batch_size"], drop_remainder=True).map(
      self._parse_example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=self.p.deterministic
    )

  def _create_training_dataset(self, params: dict[str, Any]) -> tf.data.Dataset:
    files = self._training_files()
    if params.get("context") is not None:  # not set where a TPU task runs on CPU
      _, call_index, num_calls, _ = params["context"].current_input_fn_deployment()
      files = files.shard(num_calls, call_index)
    dataset = self.create_dataset(files, params)
    enable_stopping_signals = params["enable_stopping_signals"]
    if self.p.train.repeat:
      assert (
        not enable_stopping_signals
      ), "train.repeat and enable_stopping_signals contradict: repeated data never ends"
      dataset = dataset.repeat()
    if enable_stopping_signals:
      dataset = _append_stopping_batches(dataset, params["batch_size"])
    return dataset.prefetch(tf.data.AUTOTUNE)

  def _training_files(self) -> tf.data.Dataset:
    train = self.p.train
    if train.file_pattern is not None:
      return tf.data.Dataset.from_tensor_slices(list_files(train.file_pattern))
    for name in ("file_folder", "date_and_file_name_format", "end_date"):
      assert train[name] is not None, f"train.{name} is None, and so is train.file_pattern"
    assert train.file_folder.endswith("/"), f"train.file_folder {train.file_folder} must end with /"
    files = tf.data.Dataset.list_files(
      os.path.join(train.file_folder, train.date_and_file_name_format), shuffle=False
    )
    return util.range_dateset(files, train.file_folder, train.start_date, train.end_date)

  def _parse_example(self, serialized: tf.Tensor) -> dict[str, Any]:
    return self._post_process_example(tf.io.parse_example(serialized, self._get_feature_map()))

  def _post_process_example(self, example: dict[str, Any]) -> dict[str, Any]:
    """Cleans the ids of each column and gives every table of the column its own copy."""
    for slot_id, slot in self._env.slot_id_to_feature_slot.items():
      for column in slot.feature_columns:
        source = f"{column.fc_name}_0"
        ids = self._clean_ids(example.pop(source), slot_id)
        if isinstance(column, feature.FeatureColumn3D):
          ids = _as_ragged(ids)
          example[f"{source}_row_lengths"] = tf.cast(ids.row_lengths(), tf.int32)
          ids = _cut(ids, column.max_seq_length)
        ids = tf.sparse.reorder(ids)
        for feature_slice in column.feature_slice_to_tf_placeholder:
          key = f"{column.fc_name}_{feature_slice.slice_index}"
          if self._env.uses_qr(slot_id):
            remainder_size, _ = self._env.qr_sizes(slot_id)
            example[f"{key}_0"] = ids.with_values(tf.math.floormod(ids.values, remainder_size))
            example[f"{key}_1"] = ids.with_values(tf.math.floordiv(ids.values, remainder_size))
          else:
            example[key] = ids
    if _UID in example:
      example[_UID_BUCKET] = tf.cast(tf.math.floormod(example[_UID], _UID_BUCKETS), tf.int32)
    return example

  def _clean_ids(self, ids: _IdsTensor, slot_id: int) -> _IdsTensor:
    """Makes negative ids 0 and, where a size is configured, wraps ids into it."""
    values = tf.maximum(ids.values, 0)
    size = self._fixed_vocab_size(slot_id)
    if size is not None:
      values = tf.math.floormod(values, tf.cast(size, values.dtype))
    return ids.with_values(values)

  # ----------------------------------------------------------------------- tables

  def init_slot_to_env(self) -> None:
    """Runs the first pass: collects slots, columns and the slices they use."""
    with tf.Graph().as_default():  # the placeholders serve no other purpose
      self.logits_fn()
      self._env.finalize()

  def create_feature_and_table_config_dict(
    self,
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the features and tables for the TPU embedding; `init_slot_to_env` comes first."""
    self._feature_to_config_dict = {}
    self._table_to_config_dict = {}
    for slot_id, slot in self._env.slot_id_to_feature_slot.items():
      for column in slot.feature_columns:
        max_seq_length = getattr(column, "max_seq_length", 0)
        for feature_slice in column.feature_slice_to_tf_placeholder:
          for suffix, size in self._table_parts(slot_id):
            index = f"{feature_slice.slice_index}{suffix}"
            table = f"table_{slot_id}_{index}"
            if table not in self._table_to_config_dict:
              self._table_to_config_dict[table] = _table_config(feature_slice, size)
            self._feature_to_config_dict[f"{column.fc_name}_{index}"] = tpu_embedding.FeatureConfig(
              table, max_sequence_length=max_seq_length
            )
    return self._feature_to_config_dict, self._table_to_config_dict

  def _table_parts(self, slot_id: int) -> list[tuple[str, int]]:
    """Returns the suffix and the size of each table that a slice of a slot consists of."""
    if self._env.uses_qr(slot_id):
      remainder_size, quotient_size = self._env.qr_sizes(slot_id)
      return [("_0", remainder_size), ("_1", quotient_size)]
    return [("", self._env.vocab_size(slot_id))]

  # -------------------------------------------------------------------- the model

  def cross_shard_optimizer(
    self, optimizer: tf.compat.v1.train.Optimizer, params: dict[str, Any]
  ) -> tf.compat.v1.train.Optimizer:
    """Returns an optimizer that averages over the cores; on CPU the optimizer itself."""
    if params["cpu_test"] or not params.get("use_tpu", True):
      return optimizer
    return tf.compat.v1.tpu.CrossShardOptimizer(optimizer)

  def process_features_for_cpu_test(self, features: dict[str, Any]) -> dict[str, Any]:
    """Does on CPU what the TPU embedding does: ids in, embeddings out.

    Args:
      features: sparse ids by feature; dense features pass through.

    Returns:
      `[batch, dim]` (`[batch, max_seq_length, dim]` for sequences) for each sparse feature.

    Raises:
      KeyError: a sparse feature belongs to no table.
    """
    result = {}
    for name, value in features.items():
      if not isinstance(value, tf.SparseTensor):
        result[name] = value
        continue
      if name not in self._feature_to_config_dict:
        raise KeyError(
          f"Sparse feature {name} has no table; there are {sorted(self._feature_to_config_dict)}"
        )
      config = self._feature_to_config_dict[name]
      table = self._table_to_config_dict[config.table_id]
      variable = _table_variable(config.table_id, table)
      ids = value.with_values(tf.math.floormod(value.values, table.vocabulary_size))
      if config.max_sequence_length > 0:
        result[name] = _lookup_sequence(variable, ids, config.max_sequence_length)
      else:
        result[name] = tf.nn.safe_embedding_lookup_sparse(variable, ids, combiner=table.combiner)
    return result


def list_files(file_pattern: Union[str, Sequence[str], None]) -> list[str]:
  """Returns, sorted, the files that a pattern, or any of several, matches.

  Raises:
    ValueError: a pattern matches nothing.
  """
  if not file_pattern:
    raise ValueError(f"train.file_pattern is {file_pattern!r}, want a pattern or several")
  files = []
  for pattern in [file_pattern] if isinstance(file_pattern, str) else file_pattern:
    # A file whose name contains pattern characters is taken literally.
    found = [pattern] if tf.io.gfile.exists(pattern) else tf.io.gfile.glob(pattern)
    if not found:
      raise ValueError(f"train.file_pattern {pattern} matches no file")
    files.extend(found)
  return sorted(set(files))


def _append_stopping_batches(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
  """Appends endless batches without ids; a signal tells them from the real ones."""

  def add_signal(batch: dict[str, Any], is_end: bool) -> dict[str, Any]:
    return {**batch, _SIGNAL_NAME: tf.fill([batch_size], is_end)}

  def empty(batch: dict[str, Any]) -> dict[str, Any]:
    emptied = {
      name: _empty_ids(batch_size, value.dtype) if isinstance(value, tf.SparseTensor) else value
      for name, value in batch.items()
    }
    return add_signal(emptied, True)

  real = dataset.map(lambda batch: add_signal(batch, False))
  return real.concatenate(dataset.take(1).repeat().map(empty))


def _empty_ids(batch_size: int, dtype: tf.DType) -> tf.SparseTensor:
  return tf.SparseTensor(
    indices=tf.zeros([0, 2], tf.int64),
    values=tf.zeros([0], dtype),
    dense_shape=tf.constant([batch_size, 1], tf.int64),
  )


def _as_ragged(ids: _IdsTensor) -> tf.RaggedTensor:
  return ids if isinstance(ids, tf.RaggedTensor) else tf.RaggedTensor.from_sparse(ids)


def _cut(ids: tf.RaggedTensor, length: int) -> tf.SparseTensor:
  """Returns `[batch, length]` ids."""
  sparse = ids[:, :length].to_sparse()
  shape = tf.stack([sparse.dense_shape[0], tf.constant(length, tf.int64)])
  return tf.SparseTensor(sparse.indices, sparse.values, shape)


def _table_config(feature_slice: feature.FeatureSlice, vocabulary_size: int) -> Any:
  return tpu_embedding.TableConfig(
    vocabulary_size=vocabulary_size,
    dimension=feature_slice.dim,
    initializer=feature_slice.initializer,
    combiner="sum",
    learning_rate_fn=feature_slice.learning_rate_fn,
    optimization_parameters=feature_slice.optimizer,
  )


def _table_variable(name: str, config: Any) -> tf.Variable:
  """Returns the variable of a table, the same one for all its features."""
  with tf.compat.v1.variable_scope(
    tf.compat.v1.get_variable_scope(), reuse=tf.compat.v1.AUTO_REUSE
  ):
    return tf.compat.v1.get_variable(
      name,
      shape=[config.vocabulary_size, config.dimension],
      dtype=tf.float32,
      initializer=config.initializer,
      use_resource=True,
    )


def _lookup_sequence(variable: tf.Variable, ids: tf.SparseTensor, length: int) -> tf.Tensor:
  """Returns `[batch, length, dim]`, zero where a sequence has no element."""
  rows = tf.nn.embedding_lookup(variable, ids.values)
  dimension = variable.shape[1]
  shape = tf.stack([ids.dense_shape[0], length, dimension])
  result = tf.scatter_nd(ids.indices, rows, tf.cast(shape, tf.int64))
  return tf.ensure_shape(result, [None, length, dimension])

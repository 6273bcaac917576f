"""Callbacks for `model.fit` of models with tables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.keras._keras import keras
from monolith.keras.layers import TableLayer
from monolith.keras.table import HashTable
from monolith.native_training.hooks.table_count import TableCount


class TableCurves(keras.callbacks.Callback):
  """Draws for each table of a model its rows, those admitted and expired, and its memory.

  TensorBoard shows them as `rows/<table>`, `admitted/<table>`, `expired/<table>` and
  `memory_mb/<table>`, beside what `keras.callbacks.TensorBoard` writes to the same folder.
  Admitted and expired rows count from the start of `fit`.

  Args:
    log_dir: where the curves go.
    update_freq: how many batches lie between two points; by default one point is after each epoch.

  Raises:
    ValueError: `update_freq` is no positive number.
  """

  def __init__(self, log_dir: str, update_freq: int | None = None):
    super().__init__()
    if update_freq is not None and update_freq < 1:
      raise ValueError(f"update_freq is {update_freq}, want a number of batches, 1 at least")
    self._log_dir = str(log_dir)
    self._update_freq = update_freq
    self._writer: tf.summary.SummaryWriter | None = None
    self._counts: dict[str, TableCount] = {}
    self._num_batches = 0

  def on_train_begin(self, logs: dict | None = None) -> None:
    self._writer = tf.summary.create_file_writer(self._log_dir)
    self._counts = {}
    self._num_batches = 0
    self._start(self._tables())

  def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
    self._num_batches += 1
    if self._update_freq is not None and self._num_batches % self._update_freq == 0:
      self._write(self._num_batches)

  def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
    if self._update_freq is None:
      self._write(epoch)

  def on_train_end(self, logs: dict | None = None) -> None:
    if self._writer is not None:
      self._writer.close()

  def _tables(self) -> dict[str, HashTable]:
    """Returns the model's tables by their names; those of a model that is not built come later."""
    tables: dict[str, HashTable] = {}
    for layer in self.model._flatten_layers():
      if isinstance(layer, TableLayer):
        for name, table in layer.own_tables().items():
          tables[table.name or f"{layer.name}/{name}"] = table
    return tables

  def _start(self, tables: dict[str, HashTable]) -> None:
    for name, table in tables.items():
      if name not in self._counts:
        self._counts[name] = TableCount()
        self._counts[name].start(table.stats().numpy())

  def _write(self, step: int) -> None:
    if self._writer is None:
      return  # not between on_train_begin and on_train_end
    tables = self._tables()
    for name in tables:
      # A model that was built in its first batch: its tables were empty.
      self._counts.setdefault(name, TableCount())
    with self._writer.as_default(step=step):
      for name, table in sorted(tables.items()):
        count = self._counts[name]
        count.update(table.stats().numpy())
        for tag, value in count.values().items():
          # Not `tf.summary.scalar`, which is TensorBoard's, and that does not come along with 2.21.
          tf.summary.write(f"{tag}/{name}", tf.constant(value, tf.float32), metadata=_scalar())
    self._writer.flush()


def _scalar() -> Any:
  """Returns what tells TensorBoard that a value is a point of a curve."""
  summary_pb2: Any = _tensorflow.import_summary_pb2()
  return summary_pb2.SummaryMetadata(
    plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=summary_pb2.DATA_CLASS_SCALAR,
  )

"""A collisionless table for eager code: a notebook, a script, a `tf.function`.

import monolith

table = monolith.HashTable(dim=8)
table.update([7, 9], gradients)          # creates the rows, runs the optimizer
vectors = table.lookup([7, 9, 11])       # [3, 8]; zeros for 11, which has no row
table.save("/tmp/users")

Longer than 600 lines: every way to use a table is a method of one class, with what it promises.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import control_flow_util

from monolith.keras import _keras, devices, following, settings
from monolith.keras import ids as id_types
from monolith.keras import rows as row_variables
from monolith.native_training import entry
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.table import methods, optimizers

LearningRate = Union[float, Callable[[tf.Tensor], Any]]

tf.no_gradient("MonolithHashTableLookupList")
tf.no_gradient("MonolithHashTableLookupConcat")

# Functions may run these side by side; only writes must be ordered.
for _op_type in (
  "MonolithHashTableLookupConcat",
  "MonolithHashTableLookupEntry",
  "MonolithHashTableLookupList",
  "MonolithHashTableSaveAsTensor",
  "MonolithHashTableSize",
):
  auto_control_deps_utils.register_read_only_resource_op(_op_type)

# Shards that the background writers of one save share; -1 lets the size decide.
_SAVE_SHARDS = -1
_PAGE = 1 << 16
_FILTER_SPLITS = 7
# The attribute of a part of a gradient that tells the gradient, and the part's first column there.
_WHOLE = "_monolith_whole"
_redirection = threading.local()
_loaded_lock = threading.Lock()
_before_first: list[Callable[[], None]] = []


def before_first_table(function: Callable[[], None]) -> None:
  """Calls a function when this process is about to make its first table."""
  _before_first.append(function)


def check_no_strategy() -> None:
  """Raises an error where `tf.distribute` would make copies of a table.

  Raises:
    NotImplementedError: a strategy other than `OneDeviceStrategy` is active.
  """
  if not tf.distribute.has_strategy():
    return
  strategy = tf.distribute.get_strategy()
  if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
    raise NotImplementedError(
      f"Monolith tables do not work under tf.distribute.{type(strategy).__name__}, which would "
      "give every replica rows of its own: leave the strategy's scope, or train on servers or "
      "ranks with monolith.keras.train."
    )


def _check_no_xla() -> None:
  if not tf.executing_eagerly():
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
      raise NotImplementedError(
        "Monolith tables do not work under XLA, which has no hash tables: give compile or "
        "tf.function jit_compile=False"
      )


class HashTable(methods.TableMethods, tf.saved_model.experimental.TrackableResource):
  """A map from int64 ids to rows of `dim` floats, each with the state of its own optimizer.

  Rows are created by writes, never by lookups. All methods but those that return NumPy arrays work
  in a `tf.function`, too. A table is saved by `tf.train.Checkpoint` and with every Keras model that
  holds it; its files are those of the tables in graph mode.

  Args:
    dim: length of a row's vector.
    optimizer: an optimizer of `monolith.entry`, or `"adagrad"`, `"adam"`, `"sgd"`, `"ftrl"`, ... By
      default the table follows the optimizer of Keras that its gradients are given to, and before
      that `update` runs Keras's Adam.
    initializer: what a new row begins with before its first update: an initializer of
      `monolith.entry`, `"uniform"` (from -0.05 to 0.05), `"zeros"`, or a number.
    learning_rate: instead of the optimizer's own, followed or not: a number, or a callable such as
      a `LearningRateSchedule` that gets the step and returns one.
    expire_after: rows that were not updated for this long go: `"30d"`, days, or a `timedelta`.
    admit_after: an id gets a row only after it was written this often, from 0 to 15.
    admit_capacity: how many ids that have no row yet are counted at the same time.
    name: what its files are called in a checkpoint; automatic if `None`.
    label: what messages call the table; by default its name.
    device: `"cpu"` for main memory, `"gpu"` for the first GPU; `None` for the GPU of a surrounding
      `tf.device`, and else main memory.

  Raises:
    ValueError, TypeError: an argument is not as described.
    NotImplementedError: under a `tf.distribute` strategy.
    RuntimeError: eager execution is off, or no GPU can hold tables and `device` is one.
  """

  def __init__(
    self,
    dim: int,
    optimizer: settings.OptimizerLike | None = None,
    initializer: settings.InitializerLike = "uniform",
    *,
    learning_rate: LearningRate | None = None,
    expire_after: settings.Duration | None = None,
    admit_after: int = 0,
    admit_capacity: int = 1 << 22,
    name: str | None = None,
    label: str | None = None,
    device: str | None = None,
  ):
    check_no_strategy()
    while _before_first:
      _before_first.pop(0)()
    with tf.init_scope():
      if not tf.executing_eagerly():
        raise RuntimeError(
          "HashTable needs eager execution, which is off here: in graph mode, make tables with "
          "monolith.native_training.hash_table_ops.hash_table_from_config"
        )
    self._is_follower = optimizer is None
    self._follows_rate = optimizer is None and learning_rate is None
    # The optimizer of Keras that the table follows.
    self._leader: Any = None
    self._checked_leader: Any = None
    self._optimizer = row_optimizer = (
      following.default_optimizer() if optimizer is None else settings.optimizer(optimizer)
    )
    self._initializer = settings.initializer(initializer)
    self._describe(dim, expire_after, admit_after, admit_capacity, name)
    self._label = label or name or "HashTable"
    self._device = devices.resolve(device, self._label)
    self._config = self._make_config(row_optimizer, self._device)
    self._filter: tf.Tensor | None = None
    # Rows were loaded, and no update has yet seen how many steps they have behind them.
    self._was_loaded = False
    # A function has an update, of whose calls nothing is heard here.
    self._is_traced = False
    # That of an exported table, which is in main memory.
    super().__init__(device=devices.HOST)
    if learning_rate is None:
      learning_rate = settings.learning_rate(row_optimizer)
    with tf.init_scope(), tf.device(devices.HOST):
      self._schedule = self._learning_rate = None
      if callable(learning_rate):
        self._schedule = learning_rate
      else:
        self._learning_rate = tf.Variable(
          optimizers.rate(learning_rate), trainable=False, dtype=tf.float32, name="learning_rate"
        )
      self._step = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
      self.rows = row_variables.make_rows(self)
      for child_name, child in (
        ("rows", self.rows),
        ("_step", self._step),
        ("_learning_rate", self._learning_rate),
      ):
        if child is not None:
          self._track_trackable(child, child_name)
      # Creates it now, so that a bad configuration fails here.
      self._handle = self.resource_handle

  def __reduce__(self) -> Any:
    # A copy would have the same resource, and take it along when it goes.
    raise TypeError("a HashTable cannot be pickled or copied: save it, and load it into another")

  @property
  def name(self) -> str | None:
    """The name of the table's files in a checkpoint; `None` for an automatic name."""
    return self._name

  @property
  def device(self) -> str:
    """Where the rows are: `"/device:CPU:0"`, which is main memory, or `"/device:GPU:0"`."""
    return self._device

  @property
  def optimizer(self) -> entry.Optimizer:
    """The optimizer of the rows; it changes when the table begins to follow one of Keras."""
    return self._optimizer

  @property
  def steps(self) -> int:
    """How many updates the table has made; those of an optimizer of Keras count there.

    Those that loaded rows have behind them are among them from the next `update` on, if the
    optimizer is an Adam that counts the table's steps, as by default.
    """
    return int(self._step)

  @property
  def learning_rate(self) -> tf.Variable | Callable[[tf.Tensor], Any]:
    """The rate: a variable, whose new values hold from the next update on, or the schedule.

    That of the optimizer which the table follows, where it does.
    """
    if self._leader is not None and self._follows_rate:
      return following.rate_or_schedule(self._leader)
    return self._learning_rate if self._schedule is None else self._schedule

  def lookup(self, ids: Any) -> tf.Tensor:
    """Returns the vectors of ids; zeros for ids without a row. Creates nothing.

    A `tf.GradientTape` knows where the vectors come from: the gradient by `table.rows` is a
    `tf.IndexedSlices` of ids and gradients.

    Args:
      ids: integers or strings of any shape, dense.

    Returns:
      float32, the shape of `ids` and `[dim]` behind it.

    Raises:
      TypeError, ValueError: `ids` are not ids.
    """
    dense = id_types.as_dense_ids(ids)
    flat = tf.reshape(dense, [-1])
    (rows,) = look_up([self], [flat])
    return tf.reshape(rows, tf.concat([tf.shape(dense), [self._dim]], 0), name="vectors")

  def update(self, ids: Any, gradients: Any) -> None:
    """Runs the table's optimizer on rows, creating absent ones.

    Gradients of equal ids are summed first: an id makes one step. A table that follows an optimizer
    of Keras goes by the steps of that one, which this does not count.

    Args:
      ids: integers or strings of any shape, dense.
      gradients: floats, `dim` for each id.

    Raises:
      TypeError, ValueError: `ids` are not ids, or there is not a gradient of `dim` for each.
    """
    flat, values = self._pairs(ids, gradients, "gradients")
    step = self._step
    if self._leader is None:
      self._is_traced |= not tf.executing_eagerly()
      self._go_on_from_loaded_steps()
    else:
      # Rows have seen this one's steps; by steps of the table's own, Adam would begin anew.
      step = _keras.variable_of(self._leader.iterations)
    optimize([self], [flat], [values], step)
    self._step.assign_add(1)

  def assign(self, ids: Any, values: Any) -> None:
    """Overwrites the vectors of ids, creating absent rows; the optimizer's state stays.

    With `admit_after`, an assignment counts as an occurrence, too, and is dropped while an id has
    not been seen often enough.

    Args:
      ids: integers or strings of any shape, dense.
      values: floats, `dim` for each id.

    Raises:
      TypeError, ValueError: `ids` are not ids, or there is not a vector of `dim` for each.
    """
    self._write(gen_monolith_ops.monolith_hash_table_assign, ids, values)

  def assign_add(self, ids: Any, values: Any) -> None:
    """Adds to the vectors of ids; as `assign` otherwise, but that each of equal ids counts."""
    self._write(gen_monolith_ops.monolith_hash_table_assign_add, ids, values)

  def _write(self, op: Callable[..., Any], ids: Any, values: Any) -> None:
    flat, floats = self._pairs(ids, values, "values")
    time = now()
    with devices.scope(self._device):
      op(self.resource_handle, flat, floats, time)

  def erase(self, ids: Any) -> None:
    flat = tf.reshape(id_types.as_dense_ids(ids), [-1])
    with devices.scope(self._device):
      gen_monolith_ops.monolith_hash_table_erase(self.resource_handle, flat)

  def rate_at(self, step: tf.Tensor | tf.Variable, followed: Any = None) -> tf.Tensor:
    """Returns the learning rate at a step, a float32 scalar.

    Args:
      step: the step.
      followed: the rate of the optimizer that the table follows, if it was read already.
    """
    if self._leader is not None and self._follows_rate:
      rate = following.learning_rate(self._leader, step) if followed is None else followed
    else:
      rate = self._learning_rate if self._schedule is None else self._schedule(step)
    return tf.cast(rate, tf.float32)

  def follow(self, optimizer: Any) -> None:
    """Lets the table do from now on what an optimizer of Keras does to other variables.

    The first optimizer that gets the table's gradients calls it. Nothing happens to a table that
    was given an optimizer of its own. Rows keep their values, and the state of an optimizer of the
    same kind. No other function may write to the table meanwhile.

    Args:
      optimizer: an optimizer of Keras, new or legacy.

    Raises:
      ValueError: there is no such optimizer for rows.
    """
    followed = self.check_leader(optimizer)
    if followed is not None:
      self._configure(followed.optimizer)
      self._leader = optimizer

  def check_leader(self, optimizer: Any) -> following.Followed | None:
    """Returns what the table would follow, and warns once of what does not reach its rows.

    Args:
      optimizer: an optimizer of Keras, new or legacy.

    Returns:
      `None` where the table has an optimizer of its own.

    Raises:
      ValueError: there is no such optimizer for rows.
    """
    if not self._is_follower:
      return None
    followed = following.follow(optimizer)
    if self._checked_leader is not optimizer and followed.left_out:
      logging.warning(
        "Table %r follows %s without %s, which do not reach its rows.",
        self._label,
        type(optimizer).__name__,
        " and ".join(followed.left_out),
      )
    self._checked_leader = optimizer
    return followed

  @staticmethod
  def apply(
    pairs: Sequence[tuple[HashTable, tf.IndexedSlices]],
    optimizer: Any,
    step: tf.Tensor,
    rate: tf.Tensor,
  ) -> tf.Operation | None:
    """Makes the step of an optimizer of Keras that was given the gradients of `rows` of tables.

    Args:
      pairs: tables, and gradients of ids and float32 `[n, dim]`.
      optimizer: an optimizer of Keras, which tables without one of their own follow.
      step, rate: its step and its learning rate, read before any table is updated.

    Returns:
      What does it, in a graph; `None` eagerly.

    Raises:
      ValueError: rows cannot follow the optimizer.
      tf.errors.InvalidArgumentError: gradients are not finite; their rows are left as they were.
    """
    for table, _ in pairs:
      table.follow(optimizer)
    ids = [gradient.indices for _, gradient in pairs]
    values = [gradient.values for _, gradient in pairs]
    return optimize([table for table, _ in pairs], ids, values, step, rate)

  def contains(self, ids: Any) -> tf.Tensor:
    dense = id_types.as_dense_ids(ids)
    return tf.reshape(tf.strings.length(self._entries_of(dense)) > 0, tf.shape(dense))

  def size(self) -> tf.Tensor:
    with devices.scope(self._device):
      return gen_monolith_ops.monolith_hash_table_size(self.resource_handle)

  def stats(self) -> tf.Tensor:
    """Returns what the table holds and has done, int64 `[5]`.

    Rows; bytes; rows that have expired; ids that got no row because they were seen too seldom; rows
    of gradients and values that were not finite.
    """
    with devices.scope(self._device):
      return gen_monolith_ops.monolith_hash_table_stats(self.resource_handle)

  def _kind(self) -> str:
    return settings.optimizer_kind(self._config)

  def _state(self) -> str:
    # TensorFlow prints objects in messages about graphs, in which nothing is counted.
    return super()._state() if tf.executing_eagerly() else "of a graph"

  def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pages = [embedding_hash_table_pb2.EntryDump.FromString(entry) for entry in self.entries()]
    ids = np.array([page.id for page in pages], dtype=np.int64)
    times = np.array([page.last_update_ts_sec for page in pages], dtype=np.uint32)
    rows = np.array([page.num for page in pages], dtype=np.float32).reshape(-1, self._dim)
    order = np.argsort(ids)
    return ids[order], times[order], rows[order]

  def entries(self, ids: Any = None) -> list[bytes]:
    """Returns rows with the state of their optimizers, as serialized `EntryDump` messages.

    Args:
      ids: whose, with `b""` for an id without a row; all of the table in no order if `None`.
    """
    if ids is not None:
      return self._entries_of(id_types.as_dense_ids(ids)).numpy().tolist()
    return [entry for page in self._pages() for entry in page]

  def _pages(self) -> Iterator[list[bytes]]:
    """Yields all rows as `entries` has them, a part at a time."""
    offset = 0
    while True:
      with devices.scope(self._device):
        offset, page = gen_monolith_ops.monolith_hash_table_save_as_tensor(
          self.resource_handle, 0, 1, tf.constant(_PAGE, tf.int64), tf.cast(offset, tf.int64)
        )
      yield page.numpy().tolist()
      if len(page) < _PAGE:
        return

  def _entries_of(self, ids: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(ids, [-1])
    with devices.scope(self._device):
      return gen_monolith_ops.monolith_hash_table_lookup_entry(self.resource_handle, flat)

  def save(self, path: Any) -> None:
    """Writes all rows that have not expired, with the state of their optimizers.

    Args:
      path: the files are `<path>-00000-of-00001` and so on; the folder is created.

    Raises:
      tf.errors.OpError: writing failed; files of an earlier save stay as they were.
    """
    with devices.scope(self._device):
      gen_monolith_ops.monolith_hash_table_save(
        self.resource_handle,
        _as_path(path),
        nshards=_SAVE_SHARDS,
        slot_expire_time_config=self.expire_config(),
      )
      if self._admit_after:
        gen_monolith_ops.monolith_hash_filter_save(self._filter, _filter_path(path))

  def load(self, path: Any) -> None:
    """Replaces all rows by what `save` wrote; nothing changes if that cannot be read.

    The state of another optimizer is left out: rows of this one begin with a new state.

    Args:
      path: what `save` was given, or the base name of a table that graph mode saved.

    Raises:
      tf.errors.OpError: there are no such files, they are damaged, or hold rows of another
        dimension.
    """
    if self._is_follower and self._leader is None and tf.executing_eagerly():
      saved = settings.saved_optimizer(path)
      # One of the same kind keeps its numbers, which files do not have.
      kind = settings.optimizer_kind(self._config)
      if saved is not None and saved.as_proto().WhichOneof("type") != kind:
        self._configure(saved)
    with devices.scope(self._device):
      gen_monolith_ops.monolith_hash_table_restore(self.resource_handle, _as_path(path))
      if self._admit_after and tf.executing_eagerly():
        if _has_files(_filter_path(path)):
          gen_monolith_ops.monolith_hash_filter_restore(self._filter, _filter_path(path))
        else:
          # Tables of graph mode have their filters elsewhere: counting begins again.
          self._forget_counts()
    self.note_loaded()

  def _forget_counts(self) -> None:
    """Restores the filter from a new one, as no op empties it."""
    with tempfile.TemporaryDirectory() as folder:
      empty = self._create_filter(f"keras_{uuid.uuid4().hex}")
      gen_monolith_ops.monolith_hash_filter_save(empty, os.path.join(folder, "empty"))
      gen_monolith_ops.monolith_hash_filter_restore(self._filter, os.path.join(folder, "empty"))
      tf.raw_ops.DestroyResourceOp(resource=empty, ignore_lookup_error=True)

  def note_loaded(self) -> None:
    """Lets the next `update` count steps on from those that rows have behind them."""
    if tf.executing_eagerly():
      self._was_loaded = True
      if self._is_traced:
        self._go_on_from_loaded_steps()

  def _go_on_from_loaded_steps(self) -> None:
    """Counts steps on from those of loaded rows, where the optimizer goes by them.

    To an Adam that counts the table's steps, steps that begin anew are another run, and rows would
    lose their moments. It asks all rows, so only an update of the table's own does so: an optimizer
    of Keras counts steps by itself.
    """
    if not self._was_loaded:
      return
    with _loaded_lock, tf.init_scope():
      if not self._was_loaded or not tf.executing_eagerly():
        return
      if self._config.entry_config.segments[0].opt_config.adam.decay_by_step:
        self._step.assign(tf.maximum(self._step, self._find_last_step()))
      self._was_loaded = False

  def _find_last_step(self) -> int:
    """Returns the last step of Adam that a row has seen; 0 where they have seen none."""
    last = 0.0
    for page in self._pages():
      for row in page:
        for dump in embedding_hash_table_pb2.EntryDump.FromString(row).opt.dump:
          # Below 1 it is the power of an Adam that counts the steps of each row.
          last = max(last, dump.adam.beta2_power)
    return int(last)

  def slot_arguments(self) -> dict[str, Any]:
    """Returns what `FeatureSlotConfig` calls the arguments that describe this table."""
    rate: Any = self.learning_rate
    if not callable(rate) or isinstance(rate, tf.Variable):
      rate = float(rate)
    return {
      "default_vec_initializer": self._initializer,
      "default_vec_optimizer": self._optimizer,
      "default_vec_learning_rate_fn": rate,
      "occurrence_threshold": self._admit_after,
      "expire_after": self._expire_days,
    }

  def expire_config(self) -> bytes:
    """Returns when rows expire, as a serialized `SlotExpireTimeConfig`."""
    return self._config.slot_expire_time_config.SerializeToString(deterministic=True)

  def _pairs(self, ids: Any, values: Any, what: str) -> tuple[tf.Tensor, tf.Tensor]:
    flat = tf.reshape(id_types.as_dense_ids(ids), [-1])
    floats = tf.convert_to_tensor(values, tf.float32)
    have, want = floats.shape.num_elements(), flat.shape.num_elements()
    if have is not None and want is not None and have != want * self._dim:
      raise ValueError(
        f"{what} has shape {tuple(floats.shape)}, want {self._dim} floats for each of {want} ids"
      )
    return flat, tf.reshape(floats, [-1, self._dim])

  def _configure(self, row_optimizer: entry.Optimizer) -> None:
    """Gives the table's rows another optimizer, if it is another."""
    config = self._make_config(row_optimizer, self._device)
    # The rate comes with each update.
    if settings.without_rate(config) == settings.without_rate(self._config):
      return
    with tf.init_scope(), devices.scope(self._device):
      kinds = [settings.optimizer_kind(one) for one in (self._config, config)]
      if kinds[0] != kinds[1] and self._leader is not None and len(self):
        changes = f"{self._label!r} changes from {kinds[0]} to {kinds[1]}"
        logging.warning("Table %s: its rows begin with a new state.", changes)
      gen_monolith_ops.monolith_hash_table_configure(
        self.resource_handle, config=config.SerializeToString(deterministic=True)
      )
    self._config, self._optimizer = config, row_optimizer

  def _make_config(
    self, row_optimizer: entry.Optimizer, device: str
  ) -> embedding_hash_table_pb2.EmbeddingHashTableConfig:
    return settings.table_config(
      self._dim, row_optimizer, self._initializer, self._expire_days, on_gpu=device == devices.GPU
    )

  def _create_resource(self) -> tf.Tensor:
    # In the graph of an exported model there is another one, in main memory.
    if not tf.executing_eagerly():
      return self._create_resources(devices.HOST)[1]
    self._filter, table = self._create_resources(self._device)
    return table

  def _create_resources(self, device: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the handles of a new filter and a new table."""
    with tf.device(device):
      return self._create_resources_here(self._make_config(self._optimizer, device))

  def _create_resources_here(
    self, config: embedding_hash_table_pb2.EmbeddingHashTableConfig
  ) -> tuple[tf.Tensor, tf.Tensor]:
    # Named, because TensorFlow's sessions create a resource again and again and find it by name; a
    # new name each time, because tables of two models are two tables.
    name = f"keras_{uuid.uuid4().hex}"
    if self._admit_after:
      hash_filter = self._create_filter(name + "_filter")
    else:
      hash_filter = gen_monolith_ops.monolith_dummy_hash_filter(shared_name="keras_no_filter")
    table = gen_monolith_ops.monolith_hash_table(
      hash_filter,
      gen_monolith_ops.monolith_dummy_sync_client(shared_name="MonolithDummySyncClient"),
      config=config.SerializeToString(deterministic=True),
      label=self._label,
      shared_name=name,
    )
    return hash_filter, table

  def _create_filter(self, name: str) -> tf.Tensor:
    thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(
      default_occurrence_threshold=self._admit_after
    )
    return gen_monolith_ops.monolith_hash_filter(
      capacity=self._admit_capacity,
      split_num=_FILTER_SPLITS,
      config=thresholds.SerializeToString(),
      shared_name=name,
    )

  def _export_to_saved_model_graph(
    self, object_map: Any, tensor_map: Any, **kwargs: Any
  ) -> list[tf.Tensor]:
    """Maps the handles to resources of the exported graph; the object itself serves both."""
    del kwargs
    hash_filter, table = self._create_resources(devices.HOST)
    object_map[self] = self
    tensor_map[self.resource_handle] = table
    tensor_map[self._filter] = hash_filter
    return [self.resource_handle, self._filter]

  def _destroy_resource(self) -> None:
    # A graph's resources go with its session.
    if not tf.executing_eagerly():
      return
    handles = [self._resource_handle] + ([self._filter] if self._admit_after else [])
    for handle in handles:
      if isinstance(handle, tf.__internal__.EagerTensor):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


def table_of(variable: Any) -> HashTable | None:
  """Returns the table whose rows a trainable variable stands for; `None` for other variables."""
  return row_variables.table_of(variable)


@contextlib.contextmanager
def redirect_lookups(
  look_up: Callable[[list[HashTable], list[tf.Tensor]], list[tf.Tensor]],
) -> Iterator[None]:
  """Lets layers that are called meanwhile, in this thread, take their vectors from a function.

  Args:
    look_up: called with tables and ids instead of `look_up` below.
  """
  before = getattr(_redirection, "look_up", None)
  _redirection.look_up = look_up
  try:
    yield
  finally:
    _redirection.look_up = before


def look_up(tables: list[HashTable], ids: list[tf.Tensor]) -> list[tf.Tensor]:
  """Returns the vectors of each table's ids, such that gradients reach `table.rows`.

  Args:
    tables: the tables, each may appear several times.
    ids: an int64 vector for each.

  Returns:
    float32 `[n, dim]` for each.

  Raises:
    NotImplementedError: under a `tf.distribute` strategy, or in a function that XLA compiles.
  """
  check_no_strategy()
  _check_no_xla()
  elsewhere = getattr(_redirection, "look_up", None)
  if elsewhere is not None:
    return elsewhere(tables, ids)
  rows: list[Any] = [None] * len(tables)
  for device, places in devices.by_device(tables):
    here = [tables[i] for i in places]
    with devices.scope(device):
      found = gen_monolith_ops.monolith_hash_table_lookup_list(
        [table.resource_handle for table in here],
        [ids[i] for i in places],
        dims=[table.dim for table in here],
      )
    for i, vectors in zip(places, found):
      rows[i] = vectors
  return [
    _attach(vectors, keys, row_variables.read(table.rows))
    for vectors, keys, table in zip(rows, ids, tables)
  ]


def look_up_concat(tables: list[HashTable], ids: list[tf.Tensor]) -> tf.Tensor:
  """Returns the vectors of each table's ids side by side, such that gradients reach `table.rows`.

  Vectors are written where they are to be, and updates read gradients from where they are.

  Args:
    tables: the tables, each may appear several times.
    ids: an int64 vector for each, all of one length.

  Returns:
    float32 `[n, sum of dims]`.

  Raises:
    NotImplementedError: as `look_up` does.
  """
  is_elsewhere = getattr(_redirection, "look_up", None) is not None
  if is_elsewhere or any(table.device != devices.HOST for table in tables):
    return tf.concat(look_up(tables, ids), axis=1)
  check_no_strategy()
  _check_no_xla()
  dims = [table.dim for table in tables]
  with devices.scope(devices.HOST):
    found = gen_monolith_ops.monolith_hash_table_lookup_concat(
      [table.resource_handle for table in tables], ids, dims=dims
    )
  return _attach_all(found, ids, dims, [row_variables.read(table.rows) for table in tables])


def _attach_all(
  rows: tf.Tensor, ids: list[tf.Tensor], dims: list[int], anchors: list[tf.Tensor]
) -> tf.Tensor:
  """Does what `_attach` does for rows that lie side by side."""

  @tf.custom_gradient
  def attached(*anchors: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
    del anchors

    def gradient(upstream: tf.Tensor) -> list[tf.IndexedSlices]:
      pieces = tf.split(upstream, dims, axis=1)
      column = 0
      for piece, dim in zip(pieces, dims):
        if not tf.executing_eagerly():
          setattr(piece, _WHOLE, (upstream, column))
        column += dim
      return [tf.IndexedSlices(piece, tf.identity(keys)) for piece, keys in zip(pieces, ids)]

    return tf.identity(rows), gradient

  return attached(*anchors)


def _attach(rows: tf.Tensor, ids: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
  """Returns rows whose gradient, with its ids, becomes the gradient of the empty variable."""

  @tf.custom_gradient
  def attached(anchor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
    del anchor

    def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
      # The copy belongs to the graph of the gradient, which captures the ids of the forward graph.
      return tf.IndexedSlices(upstream, tf.identity(ids))

    return tf.identity(rows), gradient

  return attached(anchor)


def optimize(
  tables: list[HashTable],
  ids: list[tf.Tensor],
  gradients: list[tf.Tensor],
  step: tf.Tensor | tf.Variable,
  followed_rate: tf.Tensor | None = None,
) -> tf.Operation | None:
  """Runs the tables' optimizers, one step for each table and distinct id.

  Args:
    tables: the tables, none twice.
    ids: an int64 vector for each.
    gradients: float32 `[n, dim]` for each.
    step: int64, what learning rate schedules and a few optimizers go by.
    followed_rate: the rate of the optimizer that they follow, if it was read already.

  Returns:
    What does it, in a graph; `None` eagerly.

  Raises:
    NotImplementedError: in a function that XLA compiles.
    tf.errors.InvalidArgumentError: gradients are not finite; their rows are left as they were. With
      `MONOLITH_BAD_GRADIENTS=skip` there is a warning instead.
  """
  _check_no_xla()
  with tf.device(devices.HOST):
    rates = [table.rate_at(step, followed_rate) for table in tables]
    time, number = now(), tf.cast(step, tf.int64)
  updates = []
  for device, places in devices.by_device(tables):
    wholes = [getattr(gradients[i], _WHOLE, (gradients[i], 0)) for i in places]
    if device == devices.HOST and any(hasattr(gradients[i], _WHOLE) for i in places):
      distinct = {id(whole): whole for whole, _ in wholes}
      with devices.scope(device):
        updates.append(
          gen_monolith_ops.monolith_hash_table_optimize_concat(
            [tables[i].resource_handle for i in places],
            [ids[i] for i in places],
            list(distinct.values()),
            [rates[i] for i in places],
            time,
            number,
            places=[list(distinct).index(id(whole)) for whole, _ in wholes],
            columns=[column for _, column in wholes],
          )
        )
      continue
    with devices.scope(device):
      update = gen_monolith_ops.monolith_hash_table_optimize_list(
        [tables[i].resource_handle for i in places],
        [ids[i] for i in places],
        [gradients[i] for i in places],
        [rates[i] for i in places],
        time,
        number,
      )
    updates.append(update)
  if tf.executing_eagerly():
    return None
  return updates[0] if len(updates) == 1 else tf.group(*updates)


def now() -> tf.Tensor:
  """Returns the time in seconds, int64, in main memory."""
  with tf.device(devices.HOST):
    return tf.cast(tf.timestamp(), tf.int64)


def _as_path(path: Any) -> Any:
  return path if tf.is_tensor(path) else str(path)


def _filter_path(path: Any) -> Any:
  return _as_path(path) + ".filter"


def _has_files(path: Any) -> bool:
  text = path.numpy().decode() if tf.is_tensor(path) else path
  return bool(tf.io.gfile.glob(f"{text}-?????-of-?????"))

"""Keras layers on collisionless tables.

  model = keras.Sequential([
    keras.Input([None], dtype="int64"),
    monolith.keras.layers.Embedding(16, combiner="mean"),
    keras.layers.Dense(1),
  ])

Nothing but the layer changes in a program: `compile`, `fit`, `evaluate`, `predict`, callbacks,
mixed precision and checkpoints work as they do with Keras's own layers.

Longer than 600 lines: both layers share what a layer of tables has to be, and what Keras saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.keras import _keras, devices, settings
from monolith.keras import ids as id_types
from monolith.keras import rows as row_variables
from monolith.keras import table as tables
from monolith.keras._keras import keras
from monolith.keras.rows import LAYER
from monolith.keras.table import HashTable

_COMBINERS = (None, "sum", "mean", "sqrtn")


class _Rows(int):
  """The size of tables, which prints as rows times dim: 40x16, or [40x16],[2.5kx8] for several."""

  _text: str

  def __new__(cls, held: Iterable[HashTable]) -> _Rows:
    sizes = [(len(table), table.dim) for table in held]
    rows = super().__new__(cls, sum(count * dim for count, dim in sizes))
    parts = [f"{_abbreviate(count)}x{dim}" for count, dim in sizes]
    # Summaries break lines after these brackets.
    rows._text = parts[0] if len(parts) == 1 else ",".join(f"[{part}]" for part in parts)
    return rows

  def __str__(self) -> str:
    return self._text

  def __format__(self, spec: str) -> str:
    # Keras 3 asks for commas between thousands.
    return self._text if spec == "," else super().__format__(spec)


def _abbreviate(count: int) -> str:
  """Returns a number in at most five characters, as columns of summaries are narrow."""
  if count < 10_000:
    return str(count)
  unit = max(1, math.floor(math.log(count / 0.9995, 1000)))
  return f"{count / 1000**unit:.3g}{'kMGTP'[unit - 1]}"


class TableLayer(LAYER):
  """A layer that holds tables; puts their rows into files of Keras's own formats."""

  def own_tables(self) -> dict[str, HashTable]:
    """Returns the tables that are saved with this layer, by a name that a saved file repeats."""
    raise NotImplementedError

  def count_params(self) -> int:
    """Returns how many numbers the rows have; `summary` shows it as rows times dim."""
    return _Rows(self.own_tables().values())

  def save_own_variables(self, store: Any) -> None:
    """Writes the tables' files into a `.keras` or `.weights.h5` file."""
    for name, table in self.own_tables().items():
      with tempfile.TemporaryDirectory() as folder:
        table.save(os.path.join(folder, "table"))
        for file in sorted(os.listdir(folder)):
          with open(os.path.join(folder, file), "rb") as opened:
            store[f"{name}:{file}"] = np.frombuffer(opened.read(), np.uint8)

  def load_own_variables(self, store: Any) -> None:
    """Reads what `save_own_variables` wrote.

    Raises:
      ValueError: the file has no rows of a table.
    """
    for name, table in self.own_tables().items():
      files = [key for key in store.keys() if key.startswith(f"{name}:")]
      if not files:
        raise ValueError(
          f"Layer {self.name}: the file has no rows of table {name!r}, only {sorted(store.keys())}"
        )
      with tempfile.TemporaryDirectory() as folder:
        for key in files:
          with open(os.path.join(folder, os.path.basename(key.partition(":")[2])), "wb") as opened:
            opened.write(np.asarray(store[key], np.uint8).tobytes())
        table.load(os.path.join(folder, "table"))


@keras.utils.register_keras_serializable(package="monolith")
class Embedding(TableLayer):
  """Looks ids up in a table of its own, or in one that it shares.

  Shapes, for ids of int64 or strings:

      ids                          combiner=None              a combiner
      dense   [batch]              [batch, dim]               an error
      dense   [batch, n]           [batch, n, dim]            [batch, dim]
      ragged  [batch, (n)]         [batch, (n), dim] ragged   [batch, dim]
      sparse  [batch, n]           an error                   [batch, dim]

  An id without a row gives zeros; training creates its row. `evaluate` and `predict` create nothing
  and count nothing. The layer's only weight is the empty variable `[0, dim]` that stands for the
  rows in `model.trainable_variables`; its gradient goes to the table's optimizer instead of the
  compiled one.

  Called with `weights`, numbers or truth values of the shape of the ids, it pools them: a sum is of
  vectors times weights, a mean is divided by the sum of the weights, `"sqrtn"` by the root of the
  sum of their squares. An id of weight 0 is not looked up and gets no row, so that weights are the
  mask of dense ids that are padded.

  Args:
    dim: length of a vector.
    optimizer: an optimizer of `monolith.entry`, or `"adagrad"`, `"adam"`, `"sgd"`, `"ftrl"`, ...
      By default rows follow the compiled one: its kind, its learning rate and its other numbers.
    initializer: what a row begins with before its first update: an initializer of `monolith.entry`,
      `"uniform"` (from -0.05 to 0.05), `"zeros"`, or a number.
    combiner: how the vectors of an example are pooled: `"sum"`, `"mean"`, `"sqrtn"`, or `None`.
    learning_rate: instead of the optimizer's: a number, or a schedule of Keras.
    expire_after: rows that were not updated for this long go: `"30d"`, days, or a `timedelta`.
    admit_after: an id gets a row only after it was trained on this often, from 0 to 15.
    device: `"cpu"` for a table in main memory, `"gpu"` for one on the first GPU; `None` for the GPU
      of the `tf.device` in which the layer is made, and else main memory.
    table: a `HashTable` to share instead of the arguments above; its own describe it.
    **kwargs: those of every layer: `name`, `dtype`, `trainable`.

  Raises:
    ValueError, TypeError: an argument is not as described.
    NotImplementedError: under a `tf.distribute` strategy.
    RuntimeError: `device` is a GPU, and none can hold tables here.
  """

  def __init__(
    self,
    dim: int | None = None,
    optimizer: settings.OptimizerLike | None = None,
    initializer: settings.InitializerLike = "uniform",
    combiner: str | None = None,
    *,
    learning_rate: tables.LearningRate | None = None,
    expire_after: settings.Duration | None = None,
    admit_after: int = 0,
    device: str | None = None,
    table: HashTable | None = None,
    **kwargs: Any,
  ):
    _check_no_input_dim(dim, optimizer, kwargs)
    super().__init__(**kwargs)
    _check_combiner(combiner)
    self.combiner = combiner
    self._shares_table = table is not None
    self._arguments: dict[str, Any] = {
      "dim": dim,
      "optimizer": None if optimizer is None else settings.optimizer(optimizer),
      "initializer": settings.initializer(initializer),
      "learning_rate": learning_rate,
      "expire_after": settings.days(expire_after),
      "admit_after": admit_after,
      "device": devices.parse(device),
    }
    if table is None:
      if dim is None:
        raise ValueError("dim is missing: Embedding(16), or Embedding(table=a HashTable)")
      table = HashTable(**self._arguments, name=kwargs.get("name"), label=self.name)
    elif dim is not None and dim != table.dim:
      raise ValueError(f"dim is {dim}, but the table has {table.dim}: leave dim out")
    elif device is not None and not devices.is_on(table, device):
      raise ValueError(
        f"device is {device!r}, but the table is on {table.device}: leave device out"
      )
    self.table = table
    # Keras collects a layer's weights from its own attributes.
    self._rows = table.rows

  def call(self, inputs: Any, weights: Any = None) -> Any:
    """Returns the vectors of ids, pooled or not.

    Args:
      inputs: ids.
      weights: a weight of each id, in the shape of the ids; not without a combiner.

    Raises:
      TypeError, ValueError: ids or weights are not as described.
    """
    flat, pool = _prepare(inputs, weights, self.combiner, self.table.dim, self.name)
    (rows,) = tables.look_up([self.table], [flat])
    return pool(tf.cast(rows, self.compute_dtype))

  def as_tensors(self, inputs: Any) -> Any:
    """Returns ids of Python and NumPy as tensors, and others as they are."""
    return _as_ids(inputs, self.name)

  def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
    """Returns the shape of the vectors for dense ids of a shape."""
    shape = tf.TensorShape(input_shape)
    return (shape if self.combiner is None else shape[:-1]).concatenate([self.table.dim])

  def own_tables(self) -> dict[str, HashTable]:
    """Returns the layer's table."""
    return {"table": self.table}

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments as JSON.

    Raises:
      NotImplementedError: the layer shares a table or has a schedule of the user's own.
    """
    if self._shares_table:
      raise NotImplementedError(
        f"Layer {self.name} shares a table that it did not make, which a configuration cannot say: "
        "save weights instead, or put the features that share it into an EmbeddingGroup"
      )
    own = _arguments_to_json(self._arguments, self.name, self.table)
    return {**super().get_config(), **own, "combiner": self.combiner}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> Embedding:
    """Returns the layer that `get_config` describes."""
    config = _arguments_from_json(config)
    return cls(**{**config, "device": _restored_device(config)})


@dataclasses.dataclass(frozen=True)
class Feature:
  """A feature of an `EmbeddingGroup`; the arguments of `Embedding` describe its table.

  Attributes:
    table: the name of another feature whose table this one shares, or a `HashTable`; the other
      arguments but `combiner` are left out then.
  """

  dim: int | None = None
  optimizer: settings.OptimizerLike | None = None
  initializer: settings.InitializerLike = "uniform"
  combiner: str | None = None
  learning_rate: tables.LearningRate | None = None
  expire_after: settings.Duration | None = None
  admit_after: int = 0
  table: str | HashTable | None = None

  def table_arguments(self) -> dict[str, Any]:
    """Returns what makes the table, checked."""
    return {
      "dim": self.dim,
      "optimizer": None if self.optimizer is None else settings.optimizer(self.optimizer),
      "initializer": settings.initializer(self.initializer),
      "learning_rate": self.learning_rate,
      "expire_after": settings.days(self.expire_after),
      "admit_after": self.admit_after,
    }


@keras.utils.register_keras_serializable(package="monolith")
class EmbeddingGroup(TableLayer):
  """Looks many features up in one op, and updates their tables in one.

      group = EmbeddingGroup({
        "user": 16,                                        # a table of its own, one id per example
        "item": Feature(16, optimizer="adam"),
        "history": Feature(table="item", combiner="mean"),  # shares the rows of "item"
      })
      vectors = group({"user": ids, "item": ids, "history": ragged_ids})   # a dictionary, too

  With `concatenate=True` the result is one tensor instead, `[batch, sum of dims]`, the vectors of
  all features side by side in the order of `features`. That is faster than a layer that
  concatenates them where all features have one id per example and tables are in main memory of this
  process: the lookup writes vectors where they belong, and the update reads their gradients there.

  Args:
    features: name -> `Feature`, or `dim` for a feature with the defaults.
    device: where the tables that the group makes are, as of an `Embedding`.
    concatenate: whether to return one tensor instead of a dictionary.
    **kwargs: those of every layer: `name`, `dtype`, `trainable`.

  Raises:
    ValueError, TypeError: a feature is not as described; the message names it.
    NotImplementedError: under a `tf.distribute` strategy.
    RuntimeError: `device` is a GPU, and none can hold tables here.
  """

  def __init__(
    self,
    features: Mapping[str, Feature | int],
    *,
    device: str | None = None,
    concatenate: bool = False,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.concatenate = concatenate
    self._placement = devices.parse(device)
    if not features:
      raise ValueError("features is empty, want name -> Feature")
    self.features = {name: _as_feature(name, value) for name, value in features.items()}
    own: dict[str, HashTable] = {}
    for name, feature in self.features.items():
      if feature.table is None:
        with _named(name):
          own[name] = HashTable(
            **feature.table_arguments(), label=f"{self.name}/{name}", device=device
          )
    self._table_of = {
      name: _find_table(name, feature, own) for name, feature in self.features.items()
    }
    _check_names(self._table_of)
    self.tables = own
    self._shared_tables = [
      feature.table for feature in self.features.values() if isinstance(feature.table, HashTable)
    ]
    row_variables.track(self, self.own_tables())
    # Keras collects a layer's weights from its own attributes.
    self._rows = list({id(table): table.rows for table in self._table_of.values()}.values())

  def as_tensors(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ids of Python and NumPy as tensors, and others as they are."""
    self._check_inputs(inputs)
    return {name: _as_ids(value, f"{self.name}/{name}") for name, value in inputs.items()}

  def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
    if not isinstance(inputs, Mapping):
      raise TypeError(f"{self.name}: inputs are {type(inputs).__name__}, want a dictionary of ids")
    if set(inputs) != set(self.features):
      raise ValueError(
        f"{self.name}: inputs are {sorted(inputs)}, want the features {sorted(self.features)}: "
        f"missing {sorted(set(self.features) - set(inputs))}, "
        f"unknown {sorted(set(inputs) - set(self.features))}"
      )

  def call(self, inputs: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> Any:
    """Returns the vectors of each feature, pooled where it has a combiner, or all in one tensor.

    Args:
      inputs: ids of every feature.
      weights: weights of the ids of some features, as those of `Embedding`.

    Raises:
      TypeError, ValueError: ids or weights are not as described, or a feature without a combiner
        has several ids per example and others have one, where all are to be one tensor.
    """
    self._check_inputs(inputs)
    weights = weights or {}
    unknown = sorted(set(weights) - set(self.features))
    if unknown:
      raise ValueError(f"{self.name}: weights are of unknown features {unknown}")
    prepared = {
      name: _prepare(
        inputs[name],
        weights.get(name),
        feature.combiner,
        self._table_of[name].dim,
        f"{self.name}/{name}",
      )
      for name, feature in self.features.items()
    }
    flat = [ids for ids, _ in prepared.values()]
    own_tables = [self._table_of[name] for name in prepared]
    if self.concatenate and not weights and all(map(_is_one_each, inputs.values())):
      return tf.cast(tables.look_up_concat(own_tables, flat), self.compute_dtype)
    rows = tables.look_up(own_tables, flat)
    vectors = {
      name: pool(tf.cast(row, self.compute_dtype))
      for (name, (_, pool)), row in zip(prepared.items(), rows)
    }
    return self._side_by_side(vectors) if self.concatenate else vectors

  def _side_by_side(self, vectors: Mapping[str, Any]) -> tf.Tensor:
    ranks = {value.shape.rank for value in vectors.values()} - {None}
    if len(ranks) > 1 or any(isinstance(value, tf.RaggedTensor) for value in vectors.values()):
      shapes = ", ".join(f"{name} {value.shape}" for name, value in vectors.items())
      raise ValueError(
        f"{self.name}: concatenate=True wants one vector per feature and example, but they have "
        f"shapes {shapes}: give features of several ids per example a combiner"
      )
    return tf.concat(list(vectors.values()), axis=-1)

  def own_tables(self) -> dict[str, HashTable]:
    """Returns the tables by the names of the features that made them."""
    return {**self.tables, **{f"shared{i}": table for i, table in enumerate(self._shared_tables)}}

  def get_config(self) -> dict[str, Any]:
    """Returns the features as JSON.

    Raises:
      NotImplementedError: a feature shares a table of another layer, or has a schedule of the
        user's own.
    """
    features = {}
    for name, feature in self.features.items():
      if isinstance(feature.table, HashTable):
        raise NotImplementedError(
          f"Feature {name} of {self.name} shares a table that the group did not make, which a "
          "configuration cannot say: save weights instead, or share a feature's table by its name"
        )
      table = None if feature.table else self.tables[name]
      arguments = _arguments_to_json(feature.table_arguments(), f"{self.name}/{name}", table)
      features[name] = {**arguments, "combiner": feature.combiner, "table": feature.table}
    return {
      **super().get_config(),
      "features": features,
      "device": self._placement,
      "concatenate": self.concatenate,
    }

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> EmbeddingGroup:
    """Returns the layer that `get_config` describes."""
    features = {
      name: Feature(**_arguments_from_json(value)) for name, value in config["features"].items()
    }
    return cls(**{**config, "features": features, "device": _restored_device(config)})


def _is_one_each(ids: Any) -> bool:
  """Tells whether ids are one for each example, so that nothing pools or reshapes their rows."""
  return isinstance(ids, tf.Tensor) and ids.shape.rank == 1


def _check_no_input_dim(dim: Any, second: Any, kwargs: Mapping[str, Any]) -> None:
  """Refuses what `keras.layers.Embedding` takes: a number of rows before the dim.

  Raises:
    TypeError: there is one.
  """
  given = {name: kwargs[name] for name in ("input_dim", "output_dim") if name in kwargs}
  if isinstance(second, int) and not isinstance(second, bool):
    want = second
  elif given:
    want = given.get("output_dim", dim)
  else:
    return
  raise TypeError(
    f"there is no input_dim, as a table has a row for every id that comes: Embedding({want})"
  )


def _as_feature(name: str, value: Any) -> Feature:
  if isinstance(value, int) and not isinstance(value, bool):
    value = Feature(value)
  if not isinstance(value, Feature):
    raise TypeError(f"feature {name!r} is {value!r}, want a Feature or its dim")
  with _named(name):
    _check_combiner(value.combiner)
    if value.table is None and value.dim is None:
      raise ValueError("dim is missing: Feature(16), or Feature(table=another feature)")
    if value.table is not None and value.dim is not None:
      raise ValueError(f"dim is {value.dim}, but the shared table has its own: leave dim out")
  return value


def _find_table(name: str, feature: Feature, own: Mapping[str, HashTable]) -> HashTable:
  if feature.table is None:
    return own[name]
  if isinstance(feature.table, HashTable):
    return feature.table
  if feature.table not in own:
    raise ValueError(
      f"feature {name!r} shares the table of {feature.table!r}, which is no feature with a table "
      f"of its own: those are {sorted(own)}"
    )
  return own[feature.table]


def _check_names(table_of: Mapping[str, HashTable]) -> None:
  by_name: dict[str, tuple[str, HashTable]] = {}
  for feature, table in table_of.items():
    if table.name is None:
      continue
    other, first = by_name.setdefault(table.name, (feature, table))
    if first is not table:
      raise ValueError(
        f"Two tables of one name: features {other!r} and {feature!r} have different tables named "
        f"{table.name!r}. Give one another name, or let both share one table"
      )


@contextlib.contextmanager
def _named(feature: str) -> Iterator[None]:
  """Lets errors say which feature they are about."""
  try:
    yield
  except (TypeError, ValueError) as error:
    raise type(error)(f"feature {feature!r}: {error}") from None


def _arguments_to_json(
  arguments: Mapping[str, Any], name: str, table: HashTable | None
) -> dict[str, Any]:
  rate = _rate_now(arguments, table)
  if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
    rate = keras.optimizers.schedules.serialize(rate)
  elif callable(rate):
    raise NotImplementedError(
      f"Layer {name} has the learning rate {rate!r}, which a configuration cannot hold: "
      "use a tf.keras.optimizers.schedules.LearningRateSchedule"
    )
  return {
    **arguments,
    "optimizer": arguments["optimizer"] and settings.serialize(arguments["optimizer"]),
    "initializer": settings.serialize(arguments["initializer"]),
    "learning_rate": rate,
  }


def _rate_now(arguments: Mapping[str, Any], table: HashTable | None) -> Any:
  """Returns the rate of a table's arguments, or the one that it was assigned since."""
  rate, optimizer = arguments["learning_rate"], arguments["optimizer"]
  if table is None or (rate is None and optimizer is None):
    return rate  # That of the compiled optimizer, which saves it.
  now = table.learning_rate
  if not isinstance(now, tf.Variable):
    return rate  # A schedule.
  first = settings.learning_rate(optimizer) if rate is None else rate
  with tf.init_scope():
    return rate if np.float32(first) == now.numpy() else float(now.numpy())


def _arguments_from_json(config: Mapping[str, Any]) -> dict[str, Any]:
  config = dict(config)
  if isinstance(config.get("learning_rate"), Mapping):
    config["learning_rate"] = keras.optimizers.schedules.deserialize(config["learning_rate"])
  return config


def _restored_device(config: Mapping[str, Any]) -> str | None:
  return devices.restored(config.get("device"), str(config.get("name")))


def _check_combiner(combiner: str | None) -> None:
  if combiner not in _COMBINERS:
    raise ValueError(f"combiner is {combiner!r}, want one of {list(_COMBINERS)}")


def _as_ids(inputs: Any, name: str) -> Any:
  """Returns ids as int64, or the input of a model as it is.

  Args:
    inputs: what a layer was called with.
    name: the layer's, for errors.

  Raises:
    TypeError, ValueError: they are no ids.
  """
  try:
    if _keras.is_symbolic(inputs):
      # `Sequential` of Keras 3 makes an input of floats, which would round ids, if it has none.
      id_types.check_dtype(tf.as_dtype(inputs.dtype))
      return inputs
    return id_types.as_ids(inputs)
  except (TypeError, ValueError) as error:
    raise type(error)(f"{name}: {error}") from None


def _prepare(
  inputs: Any, weights: Any, combiner: str | None, dim: int, name: str
) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
  """Returns the ids to look up as a vector, and what makes the layer's result of their rows."""
  flat, ids = _flatten(inputs, combiner, name)
  if weights is None:
    return flat, lambda rows: _shape(rows, ids, combiner, dim)
  if combiner is None:
    raise ValueError(f"{name}: weights need a combiner: 'sum', 'mean' or 'sqrtn'")
  flat_weights = _flatten_weights(weights, ids, name)
  kept = tf.where(flat_weights != 0)[:, 0]
  segments, count = _segments(ids)
  segments, flat_weights = tf.gather(segments, kept), tf.gather(flat_weights, kept)

  def pool(rows: tf.Tensor) -> Any:
    pooled = _pool_weighted(rows, segments, count, combiner, tf.cast(flat_weights, rows.dtype))
    if isinstance(ids, tf.RaggedTensor):
      return _replace_innermost(ids, pooled)
    if isinstance(ids, tf.SparseTensor):
      return pooled
    shaped = tf.reshape(pooled, tf.concat([tf.shape(ids)[:-1], [dim]], 0))
    shaped.set_shape(ids.shape[:-1].concatenate([dim]))
    return shaped

  return tf.gather(flat, kept), pool


def _flatten_weights(weights: Any, ids: id_types.Ids, name: str) -> tf.Tensor:
  """Returns a float for each of the flattened ids.

  Raises:
    TypeError: weights are not of the kind that ids are: dense, ragged or sparse.
    ValueError: dense weights have another shape.
  """
  kind = next((k for k in (tf.RaggedTensor, tf.SparseTensor) if isinstance(ids, k)), tf.Tensor)
  if kind is tf.Tensor and not isinstance(weights, (tf.RaggedTensor, tf.SparseTensor)):
    weights = tf.convert_to_tensor(weights)
    if not weights.shape.is_compatible_with(ids.shape):
      raise ValueError(f"{name}: weights have shape {weights.shape}, want that of ids, {ids.shape}")
    # Where a dimension is not known before, the step says so.
    same = tf.debugging.assert_equal(
      tf.shape(weights), tf.shape(ids), f"{name}: weights and ids differ in shape"
    )
    with tf.control_dependencies([] if same is None else [same]):
      return tf.cast(tf.reshape(weights, [-1]), tf.float32)
  if not isinstance(weights, kind):
    raise TypeError(
      f"{name}: weights are a {type(weights).__name__}, want a {kind.__name__} as ids"
    )
  return tf.cast(weights.flat_values if kind is tf.RaggedTensor else weights.values, tf.float32)


def _segments(ids: id_types.Ids) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns to which example each of the flattened ids belongs, and how many there are."""
  if isinstance(ids, tf.SparseTensor):
    return ids.indices[:, 0], ids.dense_shape[0]
  if isinstance(ids, tf.RaggedTensor):
    inner = _innermost(ids)
    return inner.value_rowids(), inner.nrows()
  length = tf.shape(ids, tf.int64)[-1]
  return tf.range(tf.size(ids, tf.int64)) // tf.maximum(length, 1), tf.reduce_prod(
    tf.shape(ids, tf.int64)[:-1]
  )


def _innermost(ids: tf.RaggedTensor) -> tf.RaggedTensor:
  while isinstance(ids.values, tf.RaggedTensor):
    ids = ids.values
  return ids


def _flatten(inputs: Any, combiner: str | None, name: str) -> tuple[tf.Tensor, id_types.Ids]:
  """Returns all ids as a vector, and as they came."""
  ids = _as_ids(inputs, name)
  if isinstance(ids, tf.RaggedTensor):
    return ids.flat_values, ids
  if isinstance(ids, tf.SparseTensor):
    if combiner is None:
      raise ValueError(f"{name}: sparse ids need a combiner: 'sum', 'mean' or 'sqrtn'")
    if ids.shape.rank not in (2, None):
      raise ValueError(f"{name}: sparse ids have shape {ids.shape}, want [batch, n]")
    return ids.values, ids
  if combiner is not None and ids.shape.rank is not None and ids.shape.rank < 2:
    raise ValueError(
      f"{name}: ids have shape {ids.shape} and combiner={combiner!r} pools the last axis of "
      "[batch, n]: leave combiner out for one id per example"
    )
  return (ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])), ids


def _shape(rows: tf.Tensor, ids: id_types.Ids, combiner: str | None, dim: int) -> Any:
  """Returns rows in the shape of their ids, pooled if there is a combiner."""
  if isinstance(ids, tf.SparseTensor):
    return _pool(rows, ids.indices[:, 0], ids.dense_shape[0], combiner)
  if isinstance(ids, tf.RaggedTensor):
    if combiner is None:
      return ids.with_flat_values(rows)
    inner = _innermost(ids)
    pooled = _pool(rows, inner.value_rowids(), inner.nrows(), combiner)
    return _replace_innermost(ids, pooled)
  if ids.shape.rank == 1:
    return rows
  shaped = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], 0))
  shaped.set_shape(ids.shape.concatenate([dim]))
  if combiner is None:
    return shaped
  total = tf.reduce_sum(shaped, axis=-2)
  if combiner == "sum":
    return total
  count = tf.cast(tf.shape(ids)[-1], total.dtype)
  count = tf.maximum(count, 1)
  return total / (count if combiner == "mean" else tf.sqrt(count))


def _replace_innermost(ids: tf.RaggedTensor, pooled: tf.Tensor) -> Any:
  if not isinstance(ids.values, tf.RaggedTensor):
    return pooled
  return ids.with_values(_replace_innermost(ids.values, pooled))


def _pool(
  rows: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, combiner: str | None
) -> tf.Tensor:
  """Returns `[count, dim]`: the rows of each segment, pooled; zeros for a segment without rows."""
  total = tf.math.unsorted_segment_sum(rows, segments, count)
  if combiner == "sum":
    return total
  sizes = tf.math.unsorted_segment_sum(tf.ones_like(segments), segments, count)
  sizes = tf.cast(tf.maximum(sizes, 1), total.dtype)[:, tf.newaxis]
  return total / (sizes if combiner == "mean" else tf.sqrt(sizes))


def _pool_weighted(
  rows: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, combiner: str | None, weights: tf.Tensor
) -> tf.Tensor:
  """Returns `[count, dim]`: the rows of each segment, weighted; zeros for one without weights."""
  total = tf.math.unsorted_segment_sum(rows * weights[:, tf.newaxis], segments, count)
  if combiner == "sum":
    return total
  divisors = weights if combiner == "mean" else weights**2
  divisor = tf.math.unsorted_segment_sum(divisors, segments, count)[:, tf.newaxis]
  return tf.math.divide_no_nan(total, divisor if combiner == "mean" else tf.sqrt(divisor))

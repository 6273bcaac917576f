"""What differs between Keras 2 and Keras 3: no other module asks which of them it is.

`keras` is the Keras that TensorFlow has: `tf.keras` of 2.15 is Keras 2, that of 2.16 and newer is
Keras 3, or Keras 2 with `TF_USE_LEGACY_KERAS=1` and the package `tf_keras`.

| | Keras 2 | Keras 3 |
|---|---|---|
| a variable | `tf.Variable` | `keras.Variable`, which has one |
| a table's gradient | `optimizer_hook` leads it past | optimizers hand it to `_keras_3.Rows` |
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf

from monolith.keras import saved_rows

keras: Any = tf.keras
# Layers of Keras 2 are modules of TensorFlow, those of Keras 3 are not.
IS_KERAS_3: bool = not issubclass(keras.layers.Layer, tf.Module)

if IS_KERAS_3 and keras.backend.backend() != "tensorflow":
  raise ImportError(
    f"monolith.keras needs the TensorFlow backend of Keras 3, and KERAS_BACKEND is "
    f"{keras.backend.backend()!r}: set it to 'tensorflow' before keras is imported"
  )

# The optimizers that Keras 2 had before 2.11, as a class; none with Keras 3.
LEGACY_OPTIMIZER: Any = () if IS_KERAS_3 else keras.optimizers.legacy.Optimizer

# What keeps the table of a gradient on its variable.
_TABLE_ATTRIBUTE = "_monolith_table"


def layer_class() -> Any:
  """Returns the base of layers that look ids up."""
  if IS_KERAS_3:
    from monolith.keras import _keras_3

    return _keras_3.Layer
  return keras.layers.Layer


def make_rows(table: Any) -> Any:
  """Returns the empty trainable variable `[0, dim]` that stands for the rows of a table."""
  if IS_KERAS_3:
    from monolith.keras import _keras_3

    return _keras_3.Rows(table)
  rows = tf.Variable(tf.zeros([0, table.dim]), trainable=True, name=f"{table.name or 'table'}_rows")
  setattr(rows, _TABLE_ATTRIBUTE, weakref.ref(table))
  # What `get_weights` and `set_weights` of Keras call.
  rows.numpy = functools.partial(_save_rows, weakref.ref(table))
  rows.assign = functools.partial(_restore_rows, weakref.ref(table))
  return rows


def table_of(variable: Any) -> Any:
  """Returns the table whose rows a trainable variable stands for; `None` for other variables."""
  reference = getattr(variable, _TABLE_ATTRIBUTE, None)
  return None if reference is None else reference()


def is_symbolic(value: Any) -> bool:
  """Tells whether a value stands for an input of a model that is being made."""
  return IS_KERAS_3 and isinstance(value, keras.KerasTensor)


def read(variable: Any) -> tf.Tensor:
  """Returns the value of a variable, such that a `tf.GradientTape` sees where it is from."""
  return (variable.value if IS_KERAS_3 else variable).read_value()


def _save_rows(reference: weakref.ref) -> saved_rows.SavedRows:
  table = reference()
  assert table is not None  # The variable belongs to it.
  return saved_rows.SavedRows.of(table, table.dim)


def _restore_rows(reference: weakref.ref, value: Any, *args: Any, **kwargs: Any) -> None:
  del args, kwargs
  table = reference()
  assert table is not None
  saved_rows.restore(table, table.name, value)

"""Fits tables into TensorFlow's Keras: a variable for their rows, a base for their layers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from monolith.keras import saved_rows
from monolith.keras._keras import IS_KERAS_3, keras

if IS_KERAS_3:
  from monolith.keras import _keras_3

# The base of layers that look ids up.
LAYER: Any = _keras_3.Layer if IS_KERAS_3 else keras.layers.Layer
# The attribute of a variable that holds the table of its gradient.
_TABLE_ATTRIBUTE = "_monolith_table"


def make_rows(table: Any) -> Any:
  """Returns the empty trainable variable `[0, dim]` that stands for the rows of a table."""
  if IS_KERAS_3:
    return _keras_3.Rows(table)
  rows = tf.Variable(tf.zeros([0, table.dim]), trainable=True, name=f"{table.name or 'table'}_rows")
  setattr(rows, _TABLE_ATTRIBUTE, weakref.ref(table))
  # Keras calls these two in `get_weights` and `set_weights`.
  rows.numpy = functools.partial(_save_rows, weakref.ref(table))
  rows.assign = functools.partial(_restore_rows, weakref.ref(table))
  return rows


def track(layer: Any, tables: Mapping[str, Any]) -> None:
  """Lets checkpoints find the tables of a layer that keeps them in a dictionary.

  Args:
    layer: the layer.
    tables: name in a checkpoint -> table.
  """
  if IS_KERAS_3:  # Keras 2 looks into dictionaries by itself.
    _keras_3.track(layer, tables)


def table_of(variable: Any) -> Any:
  """Returns the table whose rows a trainable variable stands for; `None` for other variables."""
  reference = getattr(variable, _TABLE_ATTRIBUTE, None)
  return None if reference is None else reference()


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

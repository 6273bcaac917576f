"""Flattens nested structures of tensors into a list of tensors, and back.

A queue, a `tf.cond` or a wire carries a flat list of dense tensors; models pass dicts and tuples of
dense and ragged tensors with constants between them. `NestedTensors` remembers the structure:

  nested = NestedTensors({"a": dense, "b": (ragged, "text", None)})
  tensors = nested.get_tensors()                    # [dense, ragged.values, ragged.row_splits]
  result = nested.get_nested_result(moved_tensors)  # the same structure around the new tensors

The caller's containers are copied, never written to.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

# The kinds of leaves, first item of the pairs in `NestedTensors._id_mapping`.
_DENSE, _RAGGED, _OTHER = 0, 1, 2


def _iterate(nested: Any, action: Callable[[Any], Any]) -> Any:
  """Returns a copy of `nested` in which every leaf is replaced by `action(leaf)`.

  Lists and tuples (also named tuples) become plain lists and tuples, dicts keep their type, keys
  and order, `None` stays `None`.
  """
  if nested is None:
    return None
  if isinstance(nested, list):
    return [_iterate(item, action) for item in nested]
  if isinstance(nested, tuple):
    return tuple(_iterate(item, action) for item in nested)
  if isinstance(nested, dict):
    result = copy.copy(nested)
    for key, value in nested.items():
      result[key] = _iterate(value, action)
    return result
  return action(nested)


class NestedTensors:
  """A nested structure of tensors that can be flattened and rebuilt.

  Leaves may be `tf.Tensor`, `tf.RaggedTensor` of ragged rank 1, and `bool`, `int`, `str`,
  `tf.Variable` and `None`, which come back as the same object. A leaf that occurs twice is stored
  once, and both places receive the same result.
  """

  def __init__(self, nested: Any):
    """Args:
      nested: dicts, lists and tuples of leaves in any depth, or one leaf alone.

    Raises:
      ValueError: a leaf is of an unsupported type or is a nested ragged tensor.
    """
    self._id_mapping: dict[int, tuple[int, int]] = {}
    self._ragged_tensors: list[tf.RaggedTensor] = []
    self._tensors: list[tf.Tensor] = []
    self._other_objs: list[Any] = []
    # The structure with the id of every leaf object in the place of the leaf. The three lists keep
    # the objects alive, so that an id is never reused.
    self._nested = _iterate(nested, self._add_tensor)

  def get_tensors(self) -> list[tf.Tensor]:
    """Returns the dense tensors, then `values, row_splits` of each ragged tensor, in first-seen
    order."""
    return self._tensors + self._ragged_to_flatten(self._ragged_tensors)

  def get_nested_result(self, tensors: Sequence[tf.Tensor]) -> Any:
    """Rebuilds the structure around other tensors.

    Args:
      tensors: replacements, in the order of `get_tensors()`.

    Returns:
      The structure given to the constructor with every tensor replaced.
    """
    num_dense = len(self._tensors)
    flatten_ragged_tensors = tensors[num_dense:]
    assert (
      len(flatten_ragged_tensors) == len(self._ragged_tensors) * 2
    ), f"got {len(tensors)} tensors, want {num_dense + 2 * len(self._ragged_tensors)}"
    values_of_kind = {
      _DENSE: tensors[:num_dense],
      _RAGGED: self._flatten_to_ragged(flatten_ragged_tensors),
      _OTHER: self._other_objs,
    }

    def replace(obj_id: int) -> Any:
      kind, index = self._id_mapping[obj_id]
      return values_of_kind[kind][index]

    return _iterate(self._nested, replace)

  def _add_tensor(self, tensor: Any) -> int:
    obj_id = id(tensor)
    if obj_id in self._id_mapping:
      return obj_id
    if isinstance(tensor, tf.Tensor):
      kind, objs = _DENSE, self._tensors
    elif isinstance(tensor, tf.RaggedTensor):
      if tensor.ragged_rank != 1:
        raise ValueError("Nested tensor doesn't support nested RaggedTensor.")
      kind, objs = _RAGGED, self._ragged_tensors
    elif isinstance(tensor, (bool, int, str, tf.Variable)):
      kind, objs = _OTHER, self._other_objs
    else:
      raise ValueError(f"Tensor is not supported. {tensor}")
    self._id_mapping[obj_id] = (kind, len(objs))
    objs.append(tensor)
    return obj_id

  def _convert_ragged_to_tensors(self, ragged: tf.RaggedTensor) -> tuple[tf.Tensor, tf.Tensor]:
    return ragged.values, ragged.row_splits

  def _convert_tensors_to_ragged(self, values: tf.Tensor, row_splits: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)

  def _ragged_to_flatten(self, ragged_tensors: Sequence[tf.RaggedTensor]) -> list[tf.Tensor]:
    return list(
      itertools.chain.from_iterable(self._convert_ragged_to_tensors(r) for r in ragged_tensors)
    )

  def _flatten_to_ragged(self, tensors: Sequence[tf.Tensor]) -> list[tf.RaggedTensor]:
    return [
      self._convert_tensors_to_ragged(values, row_splits)
      for values, row_splits in zip(tensors[0::2], tensors[1::2])
    ]

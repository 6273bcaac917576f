"""Packs dicts of tensors into few flat tensors, and back, so that they travel as one message each.

A packed dict is `(values, sizes)`: the elements of all its tensors one after the other, in the
order of the sorted keys, and the number of elements of each. All reshapes of a call are one op.
"""

from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training import static_reshape_op

KeyedTensors = dict[str, tf.Tensor]
KeyedShape = dict[str, "list[int | None]"]


def maybe_squeeze_3d_tensor(x: tf.RaggedTensor) -> tf.RaggedTensor:
  """Makes a ragged matrix out of `x`.

  Args:
    x: `[B, None]`, which is returned as it is, or `[B, 1, None]`.

  Returns:
    `[B, None]`.

  Raises:
    ValueError: `x` is not ragged or of another rank.
  """
  if not isinstance(x, tf.RaggedTensor):
    raise ValueError("input must be RaggedTensor")
  rank = x.shape.rank
  if rank == 2:
    return x
  if rank == 3:
    return tf.squeeze(x, axis=1)
  raise ValueError(f"Unknown shape of RaggedTensor. {x}")


def get_keyed_shape(keyed_tensors: KeyedTensors) -> KeyedShape:
  """Returns key -> static shape as a list, with `None` for unknown dimensions."""
  return {key: tensor.shape.as_list() for key, tensor in keyed_tensors.items()}


def get_typed_keyed_shape(list_keyed_tensors: Sequence[KeyedTensors]) -> list[KeyedShape]:
  """Returns `get_keyed_shape` of each dict."""
  return [get_keyed_shape(keyed_tensors) for keyed_tensors in list_keyed_tensors]


def pack_tensors(keyed_tensors: KeyedTensors) -> tuple[tf.Tensor, tf.Tensor]:
  """Packs tensors of one dtype.

  Args:
    keyed_tensors: at least one tensor.

  Returns:
    All elements as a vector, and the int64 vector of sizes, both in the order of the sorted keys.
  """
  packed, sizes = _flatten_and_concat([keyed_tensors])
  return packed[0], sizes


def unpack_tensors(keyed_shape: KeyedShape, packed: tuple[tf.Tensor, tf.Tensor]) -> KeyedTensors:
  """Undoes `pack_tensors`.

  Args:
    keyed_shape: `get_keyed_shape` of the packed dict, at most one unknown dimension per tensor.
    packed: what `pack_tensors` returned.

  Returns:
    The tensors, sorted by key.
  """
  values, sizes = packed
  return _split_and_reshape([keyed_shape], [values], [sizes])[0]


def pack_typed_keyed_tensors(list_keyed_tensors: Sequence[KeyedTensors]) -> list[tf.Tensor]:
  """Packs several dicts, each of one dtype.

  Args:
    list_keyed_tensors: at least one dict, none of them empty.

  Returns:
    For each dict a vector of its dtype, then one int64 vector: the number of tensors of each dict,
    followed by the sizes of all tensors in list order and, in each dict, in the order of sorted
    keys.
  """
  packed, sizes = _flatten_and_concat(list_keyed_tensors)
  counts = tf.constant([len(keyed_tensors) for keyed_tensors in list_keyed_tensors], tf.int64)
  return packed + [tf.concat([counts, sizes], axis=0)]


def unpack_packed_tensors(
  list_keyed_shape: Sequence[KeyedShape], packed_list: Sequence[tf.Tensor]
) -> list[KeyedTensors]:
  """Undoes `pack_typed_keyed_tensors`.

  Args:
    list_keyed_shape: `get_typed_keyed_shape` of the packed dicts.
    packed_list: what `pack_typed_keyed_tensors` returned.

  Raises:
    ValueError: `packed_list` does not have one element more than there are dicts, or less than two.
  """
  if len(packed_list) < 2 or len(packed_list) != len(list_keyed_shape) + 1:
    raise ValueError("Wrong packed_list length")
  counts = [len(keyed_shape) for keyed_shape in list_keyed_shape]
  # The counts inside the vector repeat what the shapes say: the sizes begin after them.
  sizes = tf.split(packed_list[-1], [len(counts)] + counts)[1:]
  return _split_and_reshape(list_keyed_shape, packed_list[:-1], sizes)


def split_tensors_with_type(keyed_tensors: KeyedTensors) -> list[KeyedTensors]:
  """Groups tensors by dtype.

  Returns:
    One dict per dtype, ordered by `str(dtype)`; keys are sorted in each.
  """
  type_to_tensors: dict[str, KeyedTensors] = {}
  for key in sorted(keyed_tensors):
    tensor = keyed_tensors[key]
    type_to_tensors.setdefault(str(tensor.dtype), {})[key] = tensor
  return [type_to_tensors[dtype] for dtype in sorted(type_to_tensors)]


def merge_dicts(tensor_dict_list: Sequence[KeyedTensors]) -> KeyedTensors:
  """Returns the union of the dicts; of equal keys the last one wins."""
  merged = {}
  for tensor_dict in tensor_dict_list:
    merged.update(tensor_dict)
  return merged


def _flatten_and_concat(
  list_keyed_tensors: Sequence[KeyedTensors],
) -> tuple[list[tf.Tensor], tf.Tensor]:
  """Returns one vector per dict, and the sizes of all tensors."""
  if not list_keyed_tensors or not all(list_keyed_tensors):
    raise ValueError(f"there is nothing to pack in {list_keyed_tensors}, want at least one tensor")
  builder = static_reshape_op.StaticReshapeNBuilder()
  list_indices = [
    [builder.add(keyed_tensors[key], (None,)) for key in sorted(keyed_tensors)]
    for keyed_tensors in list_keyed_tensors
  ]
  flat, sizes = builder.build()
  return [tf.concat([flat[i] for i in indices], axis=0) for indices in list_indices], sizes


def _split_and_reshape(
  list_keyed_shape: Sequence[KeyedShape],
  list_values: Sequence[tf.Tensor],
  list_sizes: Sequence[tf.Tensor],
) -> list[KeyedTensors]:
  """Returns one dict of tensors per dict of shapes."""
  builder = static_reshape_op.StaticReshapeNBuilder()
  list_key_to_index = []
  for keyed_shape, values, sizes in zip(list_keyed_shape, list_values, list_sizes):
    keys = sorted(keyed_shape)
    # `tf.split` into no parts is an error.
    parts = tf.split(values, sizes, num=len(keys)) if keys else []
    list_key_to_index.append(
      {key: builder.add(part, keyed_shape[key]) for key, part in zip(keys, parts)}
    )
  if not builder.inputs:
    return [{} for _ in list_key_to_index]
  tensors, _ = builder.build()
  return [
    {key: tensors[i] for key, i in key_to_index.items()} for key_to_index in list_key_to_index
  ]

"""Pools rows, and puts them side by side as the model does, ahead of the step.

A model that begins with `tf.concat` of its pooled features waits for a copy of all of them, and its
gradient is cut into as many pieces again. Where tables are in this process, or on the only server
and share memory with it, the lookup ahead of the step writes rows where the model's own
concatenation would have them, and the update takes the gradient of the whole:

  in the step         ids -> rows -> pool -> slices -> tf.concat -> layers
                      update <- gradients of rows <- of slices <- split <- gradient of the whole

  ahead of it         ids -> pooled rows, side by side -> [queue] -> layers
  behind it           update <- [queue] <- gradient of the whole

A model is built as it says, on stand-ins for what comes out of the queue, so that all of it can be
differentiated and fetched. Only when it is complete is it known which parts a step needs; then
`PooledStep.finish` makes the queue for these, and lets the model read from it. What else is asked
for, by a hook for instance, is computed in the run that asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import distributed_ps_near, nested_tensors, prefetch_queue
from monolith.native_training.tables import local, pooling, protocols

_POOL = "MonolithFusedReduceSumAndSplit"
_POOL_GRADIENT = "MonolithFusedReduceSumAndSplitGradient"


def can_pool(hash_table: Any, embeddings: Mapping[str, tf.Tensor]) -> bool:
  """Tells whether a group's lookup and update can take pooled rows.

  Args:
    hash_table: the group.
    embeddings: what it has looked up.
  """
  return (
    isinstance(hash_table, (local.LocalMultiHashTable, distributed_ps_near.NearServerHashTable))
    and local.sums_duplicates()
    and bool(embeddings)
    and not any("GPU" in tensor.device for tensor in embeddings.values())
  )


@dataclasses.dataclass(frozen=True)
class PooledGradients:
  """Gradients of pooled rows.

  Attributes:
    gradients: `[examples, columns]` each.
    parts: which columns belong to which feature.
  """

  gradients: list[tf.Tensor]
  parts: list[pooling.PooledPart]

  def features(self) -> list[str]:
    """Returns whose gradients these are, each once."""
    return list(dict.fromkeys(part.feature for part in self.parts))


class PooledStep:
  """The way of one graph's batches from the lookup to the step and back.

  Args:
    hash_table: the tables.
    embeddings: feature name -> rows `[ids, dim]`, looked up ahead of the step.
    ids: feature name -> their ids.
    others: structures of tensors that travel with the batch.
    make_queue: makes the queue of the tensors it is given.
  """

  def __init__(
    self,
    hash_table: local.LocalMultiHashTable | distributed_ps_near.NearServerHashTable,
    embeddings: dict[str, tf.Tensor],
    ids: dict[str, tf.RaggedTensor],
    others: Any,
    make_queue: Callable[[list[tf.Tensor]], prefetch_queue._MultiFIFOQueue],
  ):
    self._hash_table = hash_table
    self._make_queue = make_queue
    self._early_ids = ids
    self._nested = nested_tensors.NestedTensors((ids, others))
    self._early = self._nested.get_tensors()
    with tf.name_scope("of_the_queue"):
      self._late = [tf.identity(tensor) for tensor in self._early]
      # In the graph they are what they were; `finish` decides where they come from.
      self.embeddings = {name: tf.identity(rows) for name, rows in embeddings.items()}
    self.ids: dict[str, tf.RaggedTensor]
    self.ids, self.others = self._nested.get_nested_result(self._late)
    self._row_ids: dict[str, tf.Tensor] = {}
    self._slices: dict[Any, pooling.SliceKey] = {}

  def set_slices(self, slices: Mapping[pooling.SliceKey, tf.Tensor]) -> None:
    """Tells which slices the model gets; those of other combiners are pooled in the step."""
    for key, tensor in slices.items():
      op = tensor.op
      if op.type == _POOL and op.inputs[1] is self.embeddings[key.feature]:
        self._slices[tensor.ref()] = key
        self._row_ids[key.feature] = op.inputs[0]

  def find_gradients(self, gradients: Mapping[str, tf.Tensor]) -> PooledGradients:
    """Finds the gradients of pooled rows that gradients of rows were made from.

    Args:
      gradients: feature name -> gradient of its rows. Those of which none are found are left out of
        the result.
    """
    whole: dict[Any, int] = {}
    parts = []
    for name, gradient in gradients.items():
      op = gradient.op
      if op.type != _POOL_GRADIENT or op.inputs[0] is not self._row_ids.get(name):
        continue
      column = 0
      for piece, width in zip(list(op.inputs)[1:], op.get_attr("split_dims")):
        if piece.op.type != "ZerosLike":
          source, first = _find_whole(piece)
          number = whole.setdefault(source.ref(), len(whole))
          parts.append(pooling.PooledPart(name, column, width, number, first))
        column += width
    return PooledGradients([ref.deref() for ref in whole], parts)

  def apply_gradients(
    self,
    ids: Mapping[str, tf.RaggedTensor],
    gradients: Sequence[tf.Tensor],
    parts: Sequence[pooling.PooledPart],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None,
  ) -> protocols.TableGroup:
    """Updates the tables, as `LocalMultiHashTable.apply_pooled_gradients` does.

    Args:
      ids: feature name -> ids, of the features of the parts.
      gradients: those that `find_gradients` found.
      parts: of these.
      global_step: int64 scalar.
      req_time: int64, seconds; becomes the rows' time of last update.

    Returns:
      The group after the write.
    """
    return self._hash_table.apply_pooled_gradients(
      ids, gradients, parts, global_step, req_time=req_time
    )

  def finish(self, roots: Iterable[tf.Operation]) -> prefetch_queue._MultiFIFOQueue:
    """Makes the queue, and lets the model take from it; returns the queue.

    Args:
      roots: the ops that make a step.
    """
    roots = list(roots)
    runs = [run for op in _in_order(_needed(roots, set())) if (run := self._find_run(op))]
    cut = {run.output.ref() for run in runs}
    needed = _needed(roots, cut)
    alone = [ref for ref in self._slices if not needed.isdisjoint(ref.deref().consumers())]
    needed = _needed(roots, {*cut, *alone})
    plain = [name for name, rows in self.embeddings.items() if rows.op in needed]

    widths: list[int] = []
    parts: list[pooling.PooledPart] = []
    for refs in [*([ref] for ref in alone), *(run.refs for run in runs)]:
      column = 0
      for ref in refs:
        key = self._slices[ref]
        width = key.end - key.start
        parts.append(pooling.PooledPart(key.feature, key.start, width, len(widths), column))
        column += width
      widths.append(column)
    pooled = self._hash_table.lookup_pooled(self._early_ids, widths, parts) if widths else []
    rows = self._hash_table.lookup({n: self._early_ids[n].values for n in plain}) if plain else {}
    queue = self._make_queue([*pooled, *rows.values(), *self._early])
    dequeued = queue.dequeue()
    pooled, dequeued = dequeued[: len(pooled)], dequeued[len(pooled) :]
    rows, dequeued = dict(zip(rows, dequeued)), dequeued[len(rows) :]
    others = [name for name in self.embeddings if name not in rows]
    if others:
      # For runs that ask for rows although steps need none.
      late = dict(zip(map(id, self._early), dequeued))
      rows.update(
        self._hash_table.lookup({name: late[id(self._early_ids[name].values)] for name in others})
      )
    for late_tensor, tensor in zip(self._late, dequeued):
      _replace(late_tensor, tensor)
    for name, late_tensor in self.embeddings.items():
      _replace(late_tensor, rows[name])
    for ref, tensor in zip(alone, pooled):
      _replace(ref.deref(), tensor)
    for run, tensor in zip(runs, pooled[len(alone) :]):
      run.replace(tensor)
    return queue

  def _find_run(self, op: tf.Operation) -> _Run | None:
    """Returns an op as a run, if it is one."""
    if op._get_control_flow_context() is not None:
      return None
    if op.type == "ConcatV2":
      inputs = list(op.inputs)[:-1]
      axis = tf.get_static_value(op.inputs[-1])
      if axis is None or int(axis) not in (1, -1):
        return None
    elif op.type == "Pack":
      inputs = list(op.inputs)
      if op.get_attr("axis") not in (1, -2):
        return None
    else:
      return None
    refs = [tensor.ref() for tensor in inputs]
    if len(refs) < 2 or not all(ref in self._slices for ref in refs):
      return None
    return _Run(op, refs)


@dataclasses.dataclass(frozen=True)
class _Run:
  """An op of the model that puts slices side by side, and does nothing else.

  Attributes:
    op: the op.
    refs: references to the slices, in order.
  """

  op: tf.Operation
  refs: list[Any]

  @property
  def output(self) -> tf.Tensor:
    return self.op.outputs[0]

  def replace(self, whole: tf.Tensor) -> None:
    """Lets the op's consumers take the whole instead."""
    if self.op.type == "Pack":
      with _anywhere(self.op.graph):
        number = len(self.refs)
        whole = tf.reshape(whole, [-1, number, whole.shape[1] // number])
    _replace(self.output, whole)


def _anywhere(graph: tf.Graph) -> Any:
  return graph.control_dependencies(None)


def _replace(before: tf.Tensor, after: tf.Tensor) -> None:
  """Lets all consumers of a tensor take another one, and its own op, too, if it is a stand-in."""
  for op in before.consumers():
    if op is after.op:
      continue
    for index, tensor in enumerate(op.inputs):
      if tensor is before:
        op._update_input(index, after)
  if before.op.type == "Identity":
    before.op._update_input(0, after)  # for those that wait for it or fetch it


def _needed(roots: Iterable[tf.Operation], cut: set[Any]) -> set[tf.Operation]:
  """Returns `roots` and all that they need, but for what only tensors of `cut` need."""
  pending = list(roots)
  needed = set(pending)
  while pending:
    op = pending.pop()
    inputs = [tensor.op for tensor in op.inputs if tensor.ref() not in cut]
    for dependency in [*inputs, *op.control_inputs]:
      if dependency not in needed:
        needed.add(dependency)
        pending.append(dependency)
  return needed


def _in_order(ops: Iterable[tf.Operation]) -> list[tf.Operation]:
  """Returns ops in the order of their creation, so that all runs of a program are alike."""
  return sorted(ops, key=lambda op: op._id)


def _find_whole(piece: tf.Tensor) -> tuple[tf.Tensor, int]:
  """Returns what a gradient `[examples, columns]` was cut from, and its first column there.

  That is the gradient itself, from column 0, where it was not cut, or where nobody can tell how.
  """
  op = piece.op
  if op.type == "SplitV" and _is_static(op.inputs[2], 1):
    first = _columns_before(op, piece.value_index)
    whole = op.inputs[0]
  elif op.type == "Slice":
    first = _first_of_slice(op)
    whole = op.inputs[0]
  elif op.type == "Unpack" and op.get_attr("axis") in (1, -2):
    width = piece.shape[-1]
    if op.inputs[0].shape.rank != 3 or width is None:
      return piece, 0
    number = op.get_attr("num")
    whole = _flat(op.inputs[0], number * width)
    first = piece.value_index * width
  else:
    return piece, 0
  if first is None or whole.shape.rank != 2:
    return piece, 0
  return whole, first


def _flat(tensor: tf.Tensor, width: int) -> tf.Tensor:
  """Returns `[examples, width]` of `[examples, n, width / n]`, each time the same tensor."""
  flat = getattr(tensor, "monolith_flat", None)
  if flat is None:
    flat = tensor.monolith_flat = tf.reshape(tensor, [-1, width])
  return flat


def _is_static(tensor: tf.Tensor, value: int) -> bool:
  """Tells whether a scalar is known to have a value."""
  op = tensor.op
  if op.type == "FloorMod":  # gradients of concatenations count axes from the front
    numbers = [tf.get_static_value(operand) for operand in op.inputs]
    return None not in numbers and int(numbers[0]) % int(numbers[1]) == value
  static = tf.get_static_value(tensor)
  return static is not None and int(static) == value


def _columns_before(split: tf.Operation, index: int) -> int | None:
  """Returns the columns of the outputs before one; `None` if one is not known."""
  total = 0
  for output in split.outputs[:index]:
    width = output.shape[1] if output.shape.rank == 2 else None
    if width is None:
      width = next(
        (
          op.get_attr("split_dims")[place - 1]
          for op in output.consumers()
          if op.type == _POOL_GRADIENT
          for place, tensor in enumerate(op.inputs)
          if tensor is output
        ),
        None,
      )
    if width is None:
      return None
    total += width
  return total


def _first_of_slice(op: tf.Operation) -> int | None:
  """Returns the first column of a `Slice` that has all rows; `None` if that is not known."""
  begin, offsets = op.inputs[1], op.inputs[1].op
  if offsets.type != "ConcatOffset":
    return None
  if not _is_static(offsets.inputs[0], 1):
    return None
  widths = [_static_width(shape) for shape in list(offsets.inputs)[1 : 1 + begin.value_index]]
  return None if None in widths else sum(widths)  # type: ignore[arg-type]


def _static_width(shape: tf.Tensor) -> int | None:
  """Returns the number of columns that a shape tensor tells."""
  value = tf.get_static_value(shape, partial=True)
  if value is not None and len(value) == 2 and value[1] is not None:
    return int(value[1])
  if shape.op.type == "ShapeN":
    of = shape.op.inputs[shape.value_index].shape
  elif shape.op.type == "Shape":
    of = shape.op.inputs[0].shape
  else:
    return None
  return of[1] if of.rank == 2 else None

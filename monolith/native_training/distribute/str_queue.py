"""A queue of strings that is part of the graph's variables, and so of its checkpoints.

    elements   [ a | b | c | d |   |   | ... ]     `capacity` strings
                         ^       ^
                         offset  size               the queue holds c and d

All of it is read and written inside one critical section, so that workers can share a queue that
lives on a parameter server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

# Its content has no place in a meta graph; TensorFlow would warn of it with every checkpoint.
_EXECUTIONS_COLLECTION = "critical_section_executions"
if ops.get_to_proto_function(_EXECUTIONS_COLLECTION) is None:
  ops.register_proto_function(
    _EXECUTIONS_COLLECTION, to_proto=lambda value, export_scope=None: None
  )

# Returns the elements to enqueue (a vector), and whether there are none.
AutoEnqueueFn = Callable[[], tuple[tf.Tensor, tf.Tensor]]


class _Entered(threading.local):
  """The critical sections inside of which this thread builds ops."""

  def __init__(self):
    self.sections: list[tf.CriticalSection] = []


_entered = _Entered()


class StrQueue:
  """A first-in first-out queue of strings.

  Args:
    initial_elements: what a new queue holds; enqueued when variables are initialized.
    critical_section: that of another queue, whose contents change together with this one's. By
      default the queue has its own.
    auto_enqueue_fn: called, inside the critical section, by a dequeue from an empty queue, again
      and again until it returns elements or says that there are no more. What it returns together
      with that is not enqueued.
    capacity: most elements that the queue can hold.
    name: prefix of the variables' names.

  Raises:
    ValueError: there are more initial elements than the queue can hold.
  """

  def __init__(
    self,
    initial_elements: Sequence[str] | None = None,
    critical_section: tf.CriticalSection | None = None,
    auto_enqueue_fn: AutoEnqueueFn | None = None,
    capacity: int = 100000,
    name: str = "StrQueue",
  ):
    initial_elements = list(initial_elements or [])
    if len(initial_elements) > capacity:
      raise ValueError(
        f"initial_elements has {len(initial_elements)} elements, the capacity is {capacity}"
      )
    self._capacity = capacity
    self._auto_enqueue_fn = auto_enqueue_fn
    with tf.name_scope(name):
      # The same for all workers that build the graph, as the variables are.
      self._critical_section = critical_section or tf.CriticalSection(name=f"{name}_mutex")
      self._elements = _create_variable(lambda: self._pad(initial_elements), tf.string, "elements")
      self._offset = _create_variable(lambda: tf.constant(0), tf.int32, "offset")
      self._size = _create_variable(lambda: tf.constant(len(initial_elements)), tf.int32, "size")

  @property
  def critical_section(self) -> tf.CriticalSection:
    """The critical section inside which the queue is read and written."""
    return self._critical_section

  def enqueue_many(self, elements: Sequence[str] | tf.Tensor, name: str | None = None) -> Any:
    """Returns the op that appends a vector of strings.

    It fails with `InvalidArgumentError`, and appends nothing, if they are too many.
    """
    with tf.name_scope(name or "enqueue_many"):
      elements = tf.convert_to_tensor(elements, tf.string)

      def enqueue() -> tf.Tensor:
        with tf.control_dependencies(self._enqueue(elements)):
          return tf.identity(tf.size(elements))

      return self._execute(enqueue).op

  def dequeue(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first element, a string scalar, and whether the queue is empty for good.

    Then the element is `""`.
    """
    with tf.name_scope(name or "dequeue"):
      return self._execute(self._dequeue)

  def _execute(self, fn: Callable[[], Any]) -> Any:
    if any(section is self._critical_section for section in _entered.sections):
      return fn()

    def inside() -> Any:
      with _enter(self._critical_section):
        return fn()

    # Queues may share a section, and a function may touch queues of several sections.
    return self._critical_section.execute(inside, exclusive_resource_access=False)

  def _pad(self, elements: Any) -> tf.Tensor:
    elements = tf.convert_to_tensor(elements, tf.string)
    return tf.concat([elements, tf.fill([self._capacity - tf.size(elements)], "")], axis=0)

  def _enqueue(self, elements: tf.Tensor) -> list[tf.Operation]:
    """Returns the ops that append elements, after moving those that are left to the front."""
    rest = self._elements.read_value()[self._offset.read_value() : self._size.read_value()]
    elements = tf.concat([rest, elements], axis=0)
    num_elements = tf.size(elements)
    fits = tf.debugging.assert_less_equal(
      num_elements, self._capacity, message="the queue cannot hold so many elements"
    )
    with tf.control_dependencies([fits] if fits is not None else []):
      padded = self._pad(elements)
    # All has been read before any of it is written.
    with tf.control_dependencies([padded, num_elements]):
      return [
        self._elements.assign(padded),
        self._offset.assign(0),
        self._size.assign(num_elements),
      ]

  def _is_empty(self) -> tf.Tensor:
    return self._offset.read_value() >= self._size.read_value()

  def _refill(self) -> tf.Tensor:
    """Enqueues until the queue is not empty, or there is nothing more; returns a tensor then."""

    def is_waiting(is_empty: tf.Tensor, is_over: tf.Tensor) -> tf.Tensor:
      return tf.logical_and(is_empty, tf.logical_not(is_over))

    def enqueue(is_empty: tf.Tensor, is_over: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      elements, is_over = self._auto_enqueue_fn()
      elements = tf.reshape(tf.convert_to_tensor(elements, tf.string), [-1])
      is_over = tf.convert_to_tensor(is_over, tf.bool)
      elements = elements[: tf.where(is_over, 0, tf.size(elements))]
      with tf.control_dependencies(self._enqueue(elements)):
        return self._is_empty(), is_over

    is_empty, _ = tf.while_loop(
      is_waiting, enqueue, (self._is_empty(), tf.constant(False)), parallel_iterations=1
    )
    return is_empty

  def _dequeue(self) -> tuple[tf.Tensor, tf.Tensor]:
    is_empty = self._is_empty() if self._auto_enqueue_fn is None else self._refill()

    def pop() -> tf.Tensor:
      element = self._elements.read_value()[self._offset.read_value()]
      with tf.control_dependencies([element]):
        with tf.control_dependencies([self._offset.assign_add(1)]):
          return tf.identity(element)

    with tf.control_dependencies([is_empty]):
      element = tf.cond(is_empty, lambda: tf.constant(""), pop)
    return element, tf.identity(is_empty)


def _create_variable(
  initial_value: Callable[[], tf.Tensor], dtype: tf.DType, name: str
) -> tf.Variable:
  return tf.compat.v1.Variable(
    initial_value, trainable=False, dtype=dtype, name=name, use_resource=True
  )


@contextlib.contextmanager
def _enter(section: tf.CriticalSection) -> Iterator[None]:
  _entered.sections.append(section)
  try:
    yield
  finally:
    _entered.sections.pop()

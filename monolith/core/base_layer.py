"""`BaseLayer`: a configurable object with named children, and the losses layers add to a graph.

The losses are an attribute of the graph they belong to, so they are freed with it. They are not
locked: a graph is built by one thread.
"""

from typing import Any

import tensorflow as tf

from monolith.core import hyperparams, py_utils

_LAYER_LOSSES = "_monolith_layer_losses"


class BaseLayer:
  """Base of layers and tasks. Subclasses keep their params as `self.p` and override `fprop`."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    """Returns the parameters of this class, with `name` set to the class name."""
    p = hyperparams.InstantiableParams(cls)
    p.define("name", get_uname(cls.__name__), "Name of this layer object.")
    return p

  def __init__(self, params: hyperparams.Params):
    assert params.name, f'Layer params for {type(self).__name__} must have a "name"'
    # Past `__setattr__`, which Keras layers override to wrap and track what they are given.
    self.__dict__["_private_children"] = py_utils.NestedMap()

  @property
  def children(self) -> py_utils.NestedMap:
    """The children: layers, or lists of layers, by name."""
    return self._private_children

  def __getattr__(self, name: str) -> Any:
    # Called only when ordinary lookup failed.
    if name == "_private_children":
      raise AttributeError(f"{type(self).__name__} has no children before BaseLayer.__init__")
    if name in self._private_children:
      return self._private_children[name]
    member = getattr(type(self), name, None)
    if isinstance(member, property):
      # The getter raised an AttributeError, which Python has swallowed: raise it again.
      return member.fget(self)
    raise AttributeError(f"{name} is not a sub-layer of {self}.")

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.fprop(*args, **kwargs)

  def fprop(self, *args: Any, **kwargs: Any) -> Any:
    """Computes the layer's outputs."""
    del args, kwargs
    raise NotImplementedError(f"Abstract method of {self}")

  def create_child(self, name: str, params: hyperparams.InstantiableParams) -> None:
    """Instantiates `params`, under this layer's name if they have none, and keeps it as `name`."""
    py_utils.NestedMap.CheckKey(name)
    if not params.name:
      params = params.copy().set(name=self.p.name)
    self._private_children[name] = params.instantiate()

  def create_children(self, name: str, params: list[hyperparams.InstantiableParams]) -> None:
    """Instantiates a list of params and keeps the list as `name`; the nameless get `name_index`."""
    py_utils.NestedMap.CheckKey(name)
    layers = []
    for i, child in enumerate(params):
      if not child.name:
        child = child.copy().set(name=f"{name}_{i}")
      layers.append(child.instantiate())
    self._private_children[name] = layers


def get_uname(name: str) -> str:
  """Returns `name` unchanged: the names of variables in checkpoints depend on it."""
  return name


def add_layer_loss(name: str, loss: Any) -> None:
  """Adds `loss` to the loss called `name` of the default graph."""
  graph = tf.compat.v1.get_default_graph()
  losses = getattr(graph, _LAYER_LOSSES, None)
  if losses is None:
    losses = {}
    setattr(graph, _LAYER_LOSSES, losses)
  losses[name] = losses[name] + loss if name in losses else loss


def get_layer_loss() -> dict[str, Any]:
  """Returns the losses of the default graph by name; empty when there are none."""
  return getattr(tf.compat.v1.get_default_graph(), _LAYER_LOSSES, {})

"""Whether a graph is being built for export, and the extra graphs and signatures it leaves behind.

with enter_export_mode(ExportMode.DISTRIBUTED) as ctx:
  build_the_model()         # tables put themselves into ctx.sub_graph("ps_0"), ...
for name, graph in ctx.sub_graphs.items(): ...
"""

from __future__ import annotations

import collections
import contextlib
import enum
from collections.abc import Iterator, Mapping

import tensorflow as tf

# Collection of a graph that holds the names of its signatures.
_SIGNATURE_COLLECTION = "signature_name"


class ExportMode(enum.Enum):
  """Names a way to export a model."""

  NONE = 0
  # Everything in one SavedModel.
  STANDALONE = 1
  # One SavedModel for the dense part and one per parameter server.
  DISTRIBUTED = 2


SavedModelSignature = collections.namedtuple("SavedModelSignature", ["name", "inputs", "outputs"])


class ExportContext:
  """The sub graphs and signatures collected while a model is built for export.

  Args:
    with_remote_gpu: whether the dense part is served by a separate GPU process.
  """

  def __init__(self, with_remote_gpu: bool = False):
    self._with_remote_gpu = with_remote_gpu
    self._sub_graphs: dict[str, tf.Graph] = {}
    self._dense_sub_graphs: dict[str, tf.Graph] = {}
    self._signatures: dict[tf.Graph, dict[str, SavedModelSignature]] = {}

  @property
  def with_remote_gpu(self) -> bool:
    return self._with_remote_gpu

  @property
  def sub_graphs(self) -> dict[str, tf.Graph]:
    return self._sub_graphs

  @property
  def dense_sub_graphs(self) -> dict[str, tf.Graph]:
    return self._dense_sub_graphs

  @property
  def sub_graph_num(self) -> int:
    return len(self._sub_graphs)

  def sub_graph(self, name: str) -> tf.Graph:
    """Returns the graph of that name, created on first use."""
    return self._sub_graphs.setdefault(name, tf.Graph())

  def dense_sub_graph(self, name: str) -> tf.Graph:
    """Returns the dense graph of that name, created on first use."""
    return self._dense_sub_graphs.setdefault(name, tf.Graph())

  def signatures(self, graph: tf.Graph) -> list[SavedModelSignature]:
    """Returns the signatures added for `graph`."""
    return list(self._signatures.get(graph, {}).values())

  def add_signature(
    self,
    graph: tf.Graph,
    name: str,
    inputs: Mapping[str, tf.Tensor],
    outputs: Mapping[str, tf.Tensor],
  ) -> None:
    """Adds a signature to `graph`, or replaces the one of that name."""
    signatures = self._signatures.setdefault(graph, {})
    if name not in signatures:
      graph.add_to_collection(_SIGNATURE_COLLECTION, name)
    signatures[name] = SavedModelSignature(name, dict(inputs), dict(outputs))

  def merge_signature(
    self,
    graph: tf.Graph,
    name: str,
    inputs: Mapping[str, tf.Tensor],
    outputs: Mapping[str, tf.Tensor],
  ) -> None:
    """Adds inputs and outputs to the signature `name` of `graph`, creating it if needed."""
    existing = self._signatures.get(graph, {}).get(name)
    if existing is not None:
      inputs = {**existing.inputs, **inputs}
      outputs = {**existing.outputs, **outputs}
    self.add_signature(graph, name, inputs, outputs)


EXPORT_MODE = ExportMode.NONE
EXPORT_CTX: ExportContext | None = None


@contextlib.contextmanager
def enter_export_mode(
  mode: ExportMode, export_ctx: ExportContext | None = None
) -> Iterator[ExportContext]:
  """Builds graphs for export inside the `with` block; yields the context.

  Raises:
    AssertionError: an export is already under way.
  """
  global EXPORT_MODE, EXPORT_CTX
  assert EXPORT_MODE is ExportMode.NONE and EXPORT_CTX is None, "export mode can't be nested"
  EXPORT_MODE = mode
  EXPORT_CTX = ExportContext() if export_ctx is None else export_ctx
  try:
    yield EXPORT_CTX
  finally:
    EXPORT_MODE = ExportMode.NONE
    EXPORT_CTX = None


def get_current_export_ctx() -> ExportContext | None:
  """Returns the context of the export under way, if any."""
  return EXPORT_CTX


def is_exporting() -> bool:
  """Whether the graph being built is for export."""
  return EXPORT_MODE is not ExportMode.NONE


def is_exporting_standalone() -> bool:
  """Whether everything goes into one SavedModel."""
  return EXPORT_MODE is ExportMode.STANDALONE


def is_exporting_distributed() -> bool:
  """Whether every parameter server gets a SavedModel of its own."""
  return EXPORT_MODE is ExportMode.DISTRIBUTED


def is_dry_run_or_exporting() -> bool:
  """Whether the default graph is only built to collect features, or for export."""
  return is_exporting() or hasattr(tf.compat.v1.get_default_graph(), "dry_run")

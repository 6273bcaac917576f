"""A Keras model as a task: what `monolith.keras.train` gives to the drivers.

The drivers look vectors up before the model runs, on servers or ranks. So a model is called three
times:

    eager     once, to create the weights of layers that are built when they are first called
    recorded  in a function, where each lookup notes its ids. What computes the ids, and nothing
              else, becomes a step of the input pipeline
    trained   in the graph of the driver. Lookups return what was looked up, and the variables of
              the model stand for variables of the graph, which begin with the same values

A table becomes a slot of the same name, a lookup one of its columns.

Longer than 600 lines: the three calls share what they learn about the model, and nothing else uses
it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import auto_control_deps

from monolith.keras import _keras, devices
from monolith.keras import table as tables
from monolith.native_training import (
  entry,
  feature,
  feature_utils,
  graph_estimator,
  learning_rate_functions,
  native_task,
  native_task_context,
)
from monolith.native_training.graph import export_context
from monolith.native_training.tables import gradient_checks

Data = Union[tf.data.Dataset, Callable[[int, int], tf.data.Dataset]]

# A graph with more than this in it does not travel: protobuf ends at 2 GB.
_MAX_DATASET_BYTES = 1 << 29
_INPUT = "keras_input_{}"
_VECTORS = "monolith_vectors"
# With the slash names are what they are here, whatever else the graph has.
_OPTIMIZER_SCOPE = "keras_optimizer/"
# Drivers do not scale the loss, so nothing is to be divided by its scale.
_LOSS_SCALE = "loss_scale_factor"
_PRIVATE = "_"
# The attributes that say where a variable's value is.
_PLACE = ("_handle", "_in_graph_mode", "_handle_name", "_graph_element", "_cached_value")
_RESOURCE = tf.resource.as_datatype_enum
_REMEDY = (
  "give train a function that makes the dataset instead: "
  "train(model, lambda index, count: make().shard(count, index), ...)"
)
# Held while the operators of tensors are replaced, so that they are put back in order.
_equality_lock = threading.RLock()
_REFUSED = {
  "gradient_accumulation_steps": "train does not add gradients up, use larger batches",
  "use_ema": "train does not give the averages to the model, leave them out",
}
# Limits of an optimizer of Keras, and what the driver calls them.
_CLIPPING = {
  "clipnorm": feature_utils.GradClipType.ClipByNorm,
  "global_clipnorm": feature_utils.GradClipType.ClipByGlobalNorm,
  "clipvalue": feature_utils.GradClipType.ClipByValue,
}
_ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class Lookup(NamedTuple):
  """One lookup of a model.

  Attributes:
    table: where it looks up.
    column: the name of its ids in the input of the driver.
  """

  table: tables.HashTable
  column: str


class KerasTask(native_task.NativeTask):
  """Trains a compiled Keras model with the tables where the driver has them.

  Args:
    model: a compiled model with tables in it.
    data: batches as `fit` takes them: a dataset, or a function that makes the share of a worker
      (its number, the number of workers) in the current graph.
    is_rank: whether dense gradients are averaged over Horovod's ranks.

  Attributes:
    slots: name -> table.
    weights: name in a checkpoint -> variable of the model, without tables.
    table_device: where the tables are, as `HashTable.device`.

  Raises:
    ValueError: the model is not compiled, has no table, computes ids from what it learns, or has
      some tables on a GPU and some not.
    TypeError: `data` is something else.
  """

  def __init__(self, model: tf.keras.Model, data: Data, is_rank: bool = False):
    params = type(self).params()
    params.name = model.name
    # Known at run time; the driver would take it for the static shape of vectors.
    params.train.per_replica_batch_size = None
    super().__init__(params)
    if getattr(model, "optimizer", None) is None:
      raise ValueError(f"model {model.name!r} has no optimizer: call compile before train")
    if isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
      raise ValueError(
        f"model {model.name!r} scales its loss for float16, which train does not: use the policy "
        "'mixed_bfloat16' or 'float32'"
      )
    leader = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    for name, remedy in _REFUSED.items():
      if getattr(leader, name, None):
        raise ValueError(f"the optimizer of model {model.name!r} has {name}: {remedy}")
    self._model = model
    self._data = data
    self._is_rank = is_rank
    self._spec = _get_spec(data)
    self._components: list[tf.TypeSpec] = tf.nest.flatten(self._spec, expand_composites=True)
    _build(model, self._spec)
    self._ids, looked_up = _record(model, self._spec)
    self.slots = _name_tables(model, looked_up)
    self.table_device = devices.common(self.slots.items(), "train them in one place")
    self._lookups = _name_lookups(self.slots, looked_up)
    self.weights = _name_weights(model)
    for table in self.slots.values():
      table.follow(leader)
    # Read here: the values of variables cannot be read while a graph is built.
    self._slot_arguments = {name: table.slot_arguments() for name, table in self.slots.items()}
    self._optimizer_class = type(leader)
    # A wrapping optimizer, such as `GlobalClipOptimizer`, has a limit: the driver clips by it.
    limits = {name: model.optimizer.get_config().get(name) for name in _CLIPPING}
    set_limits = {name: limit for name, limit in limits.items() if limit is not None}
    self._optimizer_config = {**_without_scale(leader.get_config()), **set_limits}

  def __getattr__(self, name: str) -> Any:
    params = self.__dict__.get("p")
    if params is not None and name in params:
      return params[name]
    return super().__getattr__(name)

  def __setattr__(self, name: str, value: Any) -> None:
    # Callers that take params take a task as well, and set them on it.
    params = self.__dict__.get("p")
    if params is not None and name in params:
      params[name] = value
    else:
      super().__setattr__(name, value)

  def instantiate(self) -> KerasTask:
    """Returns the task itself: a model cannot be made again from its params."""
    return self

  def __deepcopy__(self, memo: dict[int, Any]) -> KerasTask:
    """Returns a task with params of its own and the same model."""
    copied = object.__new__(type(self))
    copied.__dict__.update(self.__dict__)
    copied.__dict__.update(p=self.p.copy(), _ctx=native_task.NativeContext())
    return copied

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    """Returns what makes batches of the driver: ragged ids by column, and the model's inputs."""
    if mode != graph_estimator.ModeKeys.TRAIN:
      raise ValueError(f"mode is {mode!r}, but this only trains: use evaluate and predict of Keras")

    def input_fn() -> tf.data.Dataset:
      context = native_task_context.get()
      dataset = _make_dataset(self._data, context.worker_index, context.num_workers)
      return dataset.map(self._to_features, num_parallel_calls=tf.data.AUTOTUNE)

    return input_fn

  def _to_features(self, *batch: Any) -> dict[str, Any]:
    components = tf.nest.flatten(_as_batch(batch), expand_composites=True)
    recorded = iter(self._ids(*components))
    features: dict[str, Any] = {
      lookup.column: tf.RaggedTensor.from_row_splits(next(recorded), next(recorded), validate=False)
      for lookup in self._lookups
    }
    features.update({_INPUT.format(i): value for i, value in enumerate(components)})
    return features

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    """Returns the model function: calls the model on looked-up vectors."""

    def model_fn(features: Mapping[str, Any], mode: str, config: Any) -> Any:
      del config
      columns = self._declare()
      if export_context.is_dry_run_or_exporting():
        return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=tf.no_op())
      loss, updates = self._call_model(features, columns)
      trained = [
        column
        for lookup, column in zip(self._lookups, columns)
        if any(weight is lookup.table.rows for weight in self._model.trainable_weights)
      ]
      optimizer = _GraphOptimizer(self._optimizer_class, self._optimizer_config)
      train_op = feature_utils.apply_gradients_with_var_optimizer(
        self.ctx,
        trained,
        optimizer,
        loss,
        **optimizer.clipping,
        global_step=tf.compat.v1.train.get_or_create_global_step(),
        use_allreduce=self._is_rank,
        gradient_histograms=True,
      )
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(train_op, *updates))

    return model_fn

  def _declare(self) -> list[feature.FeatureColumn]:
    """Returns the column of each lookup."""
    slots = {}
    for name, table in self.slots.items():
      arguments = dict(self._slot_arguments[name])
      rate = arguments["default_vec_learning_rate_fn"]
      if callable(rate):
        arguments["default_vec_learning_rate_fn"] = _Schedule(rate)
      slots[id(table)] = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name=name, default_vec_compressor=entry.Fp32Compressor(), **arguments
        )
      )
      slots[id(table)].add_feature_slice(table.dim)
    return [
      feature.FeatureColumn(slots[id(lookup.table)], lookup.column) for lookup in self._lookups
    ]

  def _call_model(
    self, features: Mapping[str, Any], columns: Sequence[feature.FeatureColumn]
  ) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Returns the loss, and what the model assigns by itself, such as moving averages."""
    components = []
    for i, spec in enumerate(self._components):
      value = features[_INPUT.format(i)]
      value.set_shape(spec.shape)
      components.append(value)
    batch = tf.nest.pack_sequence_as(self._spec, components, expand_composites=True)
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    pending = iter(columns)

    def look_up(wanted: list[tables.HashTable], ids: list[tf.Tensor]) -> list[tf.Tensor]:
      del ids
      return [next(pending).get_all_embeddings_concat() for _ in wanted]

    graph = tf.compat.v1.get_default_graph()
    with (
      _variables_of_graph(self._model, self.weights),
      tables.redirect_lookups(look_up),
      _equality_by_element(),
    ):
      # After the variables were made: what initializes them is no update.
      num_before = len(graph.get_operations())
      y_pred = self._model(x, training=True)
      updates = _find_updates(graph, num_before)
      loss = self._model.compute_loss(x, y, y_pred, sample_weight)
    return loss, updates


class _Schedule(learning_rate_functions.LearningRateFunction):
  """A schedule of Keras, by the global step."""

  def __init__(self, schedule: Callable[[tf.Tensor], Any]):
    self.schedule = schedule

  def __call__(self) -> tf.Tensor:
    step = tf.compat.v1.train.get_or_create_global_step()
    return tf.cast(self.schedule(tf.identity(step)), tf.float32)

  def __str__(self) -> str:
    get_config = getattr(self.schedule, "get_config", None)
    described = self.schedule if get_config is None else get_config()
    return f"{type(self.schedule).__name__}({described})"


class _GraphOptimizer(tf.compat.v1.train.Optimizer):
  """An optimizer of Keras with variables in the graph.

  Attributes:
    clipping: arguments of `apply_gradients_with_var_optimizer`, so that its limit holds for tables.
  """

  def __init__(self, cls: Any, config: Mapping[str, Any]):
    super().__init__(use_locking=False, name=config.get("name") or "optimizer")
    with tf.name_scope(_OPTIMIZER_SCOPE):
      self._optimizer = cls.from_config(dict(config))
    self.clipping: dict[str, Any] = {}
    for name, kind in _CLIPPING.items():
      limit = config.get(name)
      if limit is not None:
        self.clipping = {"clip_type": kind, "clip_norm": limit}

  def apply_gradients(
    self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
  ) -> tf.Operation:
    """Returns the op that updates the variables."""
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    with tf.name_scope(_OPTIMIZER_SCOPE), _in_order(graph):
      self._optimizer.apply_gradients(_without_bad_gradients(list(grads_and_vars)))
    variables = map(_keras.variable_of, _get_variables(self._optimizer))
    initial = {variable.initializer for variable in variables}
    # Optimizers differ in what they return; what they write is in the graph.
    ops = [op for op in _find_updates(graph, num_before) if op not in initial]
    if global_step is not None:
      ops.append(tf.compat.v1.assign_add(global_step, 1).op)
    return tf.group(*ops, name=name)


def _without_bad_gradients(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
  """Returns gradients that are all 0 where one is not finite and `skip` is asked for.

  Variables may be on servers, which no branch of a graph reaches; a step of 0 does.
  """
  pairs = [(grad, variable) for grad, variable in pairs if grad is not None]
  if gradient_checks.policy() != "skip" or not pairs:
    return pairs
  flat = tf.nest.flatten([grad for grad, _ in pairs], expand_composites=True)
  finite = tf.reduce_all(
    [tf.reduce_all(tf.math.is_finite(part)) for part in flat if part.dtype.is_floating]
  )
  return [
    (
      tf.nest.map_structure(
        lambda part: tf.where(finite, part, tf.zeros_like(part))
        if part.dtype.is_floating
        else part,
        grad,
        expand_composites=True,
      ),
      variable,
    )
    for grad, variable in pairs
  ]


def _without_scale(config: Any) -> Any:
  """Returns the configuration of an optimizer, and of one in it, without the scale of the loss."""
  if not isinstance(config, Mapping):
    return config
  return {name: _without_scale(value) for name, value in config.items() if name != _LOSS_SCALE}


@contextlib.contextmanager
def _in_order(graph: tf.Graph) -> Iterator[None]:
  """Lets ops that read and write variables run in the order of the program, as in a function.

  Optimizers of Keras write their moments and read them again; a plain graph keeps no such order.
  """
  names = ("_add_control_dependencies", "experimental_acd_manager")
  before = {name: getattr(graph, name, None) for name in names}
  try:
    with auto_control_deps.AutomaticControlDependencies():
      yield
  finally:
    for name, value in before.items():
      setattr(graph, name, value)


@contextlib.contextmanager
def _equality_by_element() -> Iterator[None]:
  """Lets `==` and `!=` of tensors mean in a graph what they mean in eager code and functions.

  In the graph of a session they would compare objects, and be false without a word. The operators
  are replaced on the class, because there Python looks up what a user's `call` or dataset writes,
  and TensorFlow has a switch for eager code and functions alone. It is for this thread, for as long
  as users' code builds the graph.
  """
  thread = threading.get_ident()

  def is_meant(other: Any) -> bool:
    in_graph = threading.get_ident() == thread and not tf.executing_eagerly()
    return in_graph and other is not None

  with _equality_lock:
    before = tf.Tensor.__eq__, tf.Tensor.__ne__

    def equal(self: Any, other: Any) -> Any:
      return tf.math.equal(self, other) if is_meant(other) else before[0](self, other)

    def not_equal(self: Any, other: Any) -> Any:
      return tf.math.not_equal(self, other) if is_meant(other) else before[1](self, other)

    tf.Tensor.__eq__, tf.Tensor.__ne__ = equal, not_equal
    try:
      yield
    finally:
      tf.Tensor.__eq__, tf.Tensor.__ne__ = before


def _get_variables(optimizer: Any) -> list[tf.Variable]:
  variables = optimizer.variables
  return list(variables() if callable(variables) else variables)


def _find_updates(graph: tf.Graph, start: int) -> list[tf.Operation]:
  """Returns the ops since the `start`-th that write variables."""
  return [
    op
    for op in graph.get_operations()[start:]
    if op.type in _ASSIGNMENTS or op.type.startswith(("ResourceApply", "ResourceScatter"))
  ]


def _get_spec(data: Data) -> Any:
  if isinstance(data, tf.data.Dataset):
    return data.element_spec
  if not callable(data):
    raise TypeError(
      f"dataset is {data!r}, want a tf.data.Dataset of batches, or a function of a worker's number "
      "and the number of workers that returns one"
    )
  with tf.Graph().as_default():
    dataset = data(0, 1)
    if not isinstance(dataset, tf.data.Dataset):
      raise TypeError(f"the dataset function returned {dataset!r}, want a tf.data.Dataset")
    return dataset.element_spec


def _as_batch(batch: tuple[Any, ...]) -> Any:
  """Returns an element as it was before `map` made arguments of a tuple."""
  return batch[0] if len(batch) == 1 else batch


def _make_dataset(data: Data, index: int, count: int) -> tf.data.Dataset:
  """Returns the share of a worker, in the current graph."""
  if not isinstance(data, tf.data.Dataset):
    with _equality_by_element():
      return data(index, count)
  graph_def = tf.compat.v1.GraphDef.FromString(_serialize(data))
  _move_from_eager_code(graph_def)
  (result,) = (node for node in graph_def.node if node.op == "_Retval")
  output = result.input[0]
  graph_def.node.remove(result)
  # Where other ops of the input are: left to themselves, copied variables would go to servers.
  device = tf.no_op().device
  with tf.device(None), tf.device(device):
    (variant,) = tf.graph_util.import_graph_def(
      graph_def, return_elements=[output if ":" in output else f"{output}:0"], name="dataset"
    )
  dataset = tf.data.experimental.from_variant(variant, data.element_spec)
  return dataset.shard(count, index) if count > 1 else dataset


def _serialize(dataset: tf.data.Dataset) -> bytes:
  """Returns the graph of a dataset that was made eagerly, with its tables and variables.

  Raises:
    ValueError: it has no graph, or it is too large.
  """
  try:
    # A session's graph is no place for eager ops.
    serialized = _run_eagerly(
      lambda: tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        # Ops that TensorFlow calls stateful are not refused. The graph is read in this process,
        # while this dataset lives: what its functions find here, be it Python, they find there.
        external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE.value,
      ).numpy()
    )
  except tf.errors.OpError as error:
    raise ValueError(f"dataset cannot be moved into a graph: {error.message}; {_REMEDY}") from None
  if len(serialized) > _MAX_DATASET_BYTES:
    raise ValueError(
      f"dataset holds {len(serialized):,} bytes of data, more than a graph should: {_REMEDY}"
    )
  return serialized


def _move_from_eager_code(graph_def: tf.compat.v1.GraphDef) -> None:
  """Removes from a dataset's graph where eager code ran it: jobs of a cluster have other names.

  Raises:
    ValueError: it uses what stays behind in eager code. TensorFlow copies variables, lookup tables
      and generators; of other resources it copies the name.
  """
  for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)):
    for node in nodes:
      node.device = ""
      if node.op == "Const" and node.attr["dtype"].type == _RESOURCE:
        raise ValueError(
          "dataset uses an object of eager code that a graph has no copy of, such as a HashTable, "
          f"a queue or a DenseHashTable: {_REMEDY}"
        )


def _run_eagerly(function: Callable[[], Any]) -> Any:
  with eager_context.eager_mode():
    return function()


def _build(model: tf.keras.Model, spec: Any) -> None:
  """Creates all weights of a model and of its loss, by tracing what a training step computes."""

  @tf.function
  def trace(*components: Any) -> Any:
    batch = tf.nest.pack_sequence_as(spec, components, expand_composites=True)
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    return model.compute_loss(x, y, model(x, training=True), sample_weight)

  trace.get_concrete_function(*tf.nest.flatten(spec, expand_composites=True))


def _record(
  model: tf.keras.Model, spec: Any
) -> tuple[Callable[..., list[tf.Tensor]], list[tables.HashTable]]:
  """Returns what computes ids and row splits of every lookup from a batch, and their tables.

  Raises:
    ValueError: there is no lookup, or ids depend on what is learnt.
  """
  looked_up: list[tables.HashTable] = []

  def record(*components: Any) -> list[tf.Tensor]:
    batch = tf.nest.pack_sequence_as(spec, components, expand_composites=True)
    x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
    num_examples = _count_examples(x)
    found: list[tf.Tensor] = []

    def look_up(wanted: list[tables.HashTable], ids: list[tf.Tensor]) -> list[tf.Tensor]:
      looked_up.extend(wanted)
      for vector in ids:
        found.extend((tf.identity(vector), _split(tf.size(vector), num_examples)))
      return [
        tf.zeros([tf.size(vector), table.dim], name=_VECTORS) for table, vector in zip(wanted, ids)
      ]

    with tables.redirect_lookups(look_up):
      model(x, training=True)
    return found

  flat = tf.nest.flatten(spec, expand_composites=True)
  # Unlike those of `tf.function`, its results can be had without the rest.
  recorded = tf.compat.v1.wrap_function(record, flat)
  if not looked_up:
    raise ValueError(
      f"model {model.name!r} looks up no table: train is for models with "
      "monolith.keras.layers.Embedding in them, use fit for others"
    )
  return _compute_alone(model, recorded.graph, len(flat)), looked_up


def _compute_alone(
  model: tf.keras.Model, graph: Any, num_inputs: int
) -> Callable[..., list[tf.Tensor]]:
  """Returns a function of the first inputs of a graph that computes its outputs and nothing else.

  Raises:
    ValueError: they depend on more.
  """
  inputs = [tensor.op.name for tensor in graph.inputs[:num_inputs]]
  outputs = [tensor.name for tensor in graph.outputs]
  graph_def = tf.compat.v1.graph_util.extract_sub_graph(
    graph.as_graph_def(), [tensor.op.name for tensor in graph.outputs]
  )
  learnt = [
    node.name
    for node in graph_def.node
    if _VECTORS in node.name or (node.op == "Placeholder" and node.name not in inputs)
  ]
  if learnt:
    raise ValueError(
      f"model {model.name!r} computes ids from what it learns or holds ({learnt}), but servers are "
      "asked before the model runs: compute ids in the dataset"
    )
  used = [i for i, name in enumerate(inputs) if any(n.name == name for n in graph_def.node)]

  def compute(*components: Any) -> list[tf.Tensor]:
    return tf.graph_util.import_graph_def(
      graph_def,
      input_map={inputs[i]: components[i] for i in used},
      return_elements=outputs,
      name="keras_ids",
    )

  return compute


def _count_examples(x: Any) -> tf.Tensor:
  """Returns how many examples a batch has."""
  first = tf.nest.flatten(x, expand_composites=False)[0]
  if isinstance(first, tf.RaggedTensor):
    return first.nrows(tf.int32)
  if isinstance(first, tf.SparseTensor):
    return tf.cast(first.dense_shape[0], tf.int32)
  return tf.shape(first)[0]


def _split(num_ids: tf.Tensor, num_examples: tf.Tensor) -> tf.Tensor:
  """Returns row splits that give ids to examples evenly.

  The driver counts examples by them. What belongs to whom the model itself says, which pools.
  """
  splits = tf.range(num_examples + 1) * num_ids // tf.maximum(num_examples, 1)
  return tf.cast(splits, tf.int64)


def _name_tables(
  model: tf.keras.Model, looked_up: Sequence[tables.HashTable]
) -> dict[str, tables.HashTable]:
  """Returns the tables by their names, or by where they are in the model.

  Raises:
    ValueError: two have one name.
  """
  paths = _paths(model)
  named: dict[str, tables.HashTable] = {}
  for i, table in enumerate(looked_up):
    path = paths.get(id(table), f"tables/{i}")
    name = table.name or path.lstrip(_PRIVATE).replace("/", ".")
    if named.setdefault(name, table) is not table:
      raise ValueError(f"Two tables of one name: {name!r}. Give one another name")
  return named


def _name_lookups(
  slots: Mapping[str, tables.HashTable], looked_up: Sequence[tables.HashTable]
) -> list[Lookup]:
  """Returns the lookups with names for their columns.

  A checkpoint knows the table of a single column by the column, that of several by the slot.
  """
  names = {id(table): name for name, table in slots.items()}
  counts = collections.Counter(id(table) for table in looked_up)
  numbers: collections.Counter[int] = collections.Counter()
  lookups = []
  for table in looked_up:
    name = names[id(table)]
    if counts[id(table)] > 1:
      name = f"{name}.{numbers[id(table)]}"
      numbers[id(table)] += 1
    lookups.append(Lookup(table, name))
  return lookups


def _name_weights(model: tf.keras.Model) -> dict[str, tf.Variable]:
  """Returns the weights of a model by the paths that checkpoints of Keras know them by."""
  paths = _paths(model)
  weights = [weight for weight in model.weights if tables.table_of(weight) is None]
  # TensorFlow does not see what Keras 3 keeps in lists and dictionaries.
  named = [paths.get(id(weight), f"weights/{i}") for i, weight in enumerate(weights)]
  return {_as_scope(name): weight for name, weight in zip(named, weights)}


def _as_scope(path: str) -> str:
  """Returns a path as a name in a graph, of which none begins like Keras 3's `_operations/1`."""
  return f".{path}" if path.startswith(_PRIVATE) else path


def _paths(model: tf.keras.Model) -> dict[int, str]:
  """Returns the path from the model to each object in it, the shortest, by the object's id."""
  view = tf.train.TrackableView(model)
  paths = {id(model): ""}
  pending = collections.deque([model])
  while pending:
    parent = pending.popleft()
    children = sorted(view.children(parent).items(), key=lambda item: _order(item[0]))
    for name, child in children:
      if id(child) not in paths:
        prefix = paths[id(parent)]
        paths[id(child)] = f"{prefix}/{name}" if prefix else name
        pending.append(child)
  return paths


def _order(name: str) -> tuple[bool, str]:
  # Layers without weights come and go without changing the numbers of these.
  return (not name.startswith("layer_with_weights-"), name)


@contextlib.contextmanager
def _variables_of_graph(
  model: tf.keras.Model, weights: Mapping[str, tf.Variable]
) -> Iterator[None]:
  """Lets the variables of a model and its metrics stand for new ones of the current graph."""
  trainable = {id(weight) for weight in model.trainable_weights}
  pairs = [
    (weight, _create(name, weight, id(weight) in trainable)) for name, weight in weights.items()
  ]
  known = {id(weight) for weight, _ in pairs}
  # The loss adds up its mean in metrics; nobody reads it here. Dropout of Keras 3 has a seed.
  held = [
    *model.variables,
    *(variable for metric in model.metrics for variable in metric.variables),
  ]
  for variable in held:
    if id(variable) not in known and tables.table_of(variable) is None:
      known.add(id(variable))
      pairs.append((variable, _create(f"metrics/{len(known)}", variable, None)))
  with contextlib.ExitStack() as stack:
    for variable, graph_variable in pairs:
      stack.enter_context(_standing_for(variable, graph_variable))
    yield


def _create(name: str, variable: tf.Variable, trainable: bool | None) -> tf.Variable:
  """Returns a variable of the graph that begins with another one's value.

  Args:
    name: what a checkpoint calls it.
    variable: the other one.
    trainable: whether it is trained; `None` for one that belongs to no checkpoint.
  """
  inner = _resource_of(variable)
  # Not a constant: the graph would hold, and each of its copies, all weights.
  value = tf.numpy_function(functools.partial(_read, inner._handle, inner.dtype), [], inner.dtype)
  value.set_shape(inner.shape)
  collection = tf.compat.v1.GraphKeys.LOCAL_VARIABLES
  return tf.compat.v1.Variable(
    value,
    trainable=bool(trainable),
    collections=[collection] if trainable is None else None,
    name=name,
    use_resource=True,
  )


def _resource_of(variable: Any) -> Any:
  """Returns the variable that has the handle, inside what Keras puts around it."""
  inner = _keras.variable_of(variable)
  return getattr(inner, "_variable", inner)


def _read(handle: Any, dtype: tf.DType) -> Any:
  return _run_eagerly(lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy())


@contextlib.contextmanager
def _standing_for(variable: tf.Variable, other: tf.Variable) -> Iterator[None]:
  """Lets reads and writes of a variable go to another one."""
  inner = _resource_of(variable)
  before = {name: getattr(inner, name) for name in _PLACE}
  for name in _PLACE:
    setattr(inner, name, getattr(other, name))
  try:
    yield
  finally:
    for name, value in before.items():
      setattr(inner, name, value)

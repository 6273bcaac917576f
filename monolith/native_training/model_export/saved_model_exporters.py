"""Writes a trained model as SavedModels.

    <base>/<version>            standalone: everything in one model
    <base>/entry/<version>      distributed: the dense part; asks the others for embeddings
    <base>/ps_<i>/<version>     the tables of one parameter server
    <base>/dense_0/<version>    the part that a GPU process serves, where there is one

A model is written beside its final place and renamed. Tables are restored when a model is loaded,
from files inside the model: copies of the checkpoint's, or the same files under a second name
(`shared_embedding`), which cost no space and stay when the checkpoint is deleted. Only where the
file system cannot do that, a model with `shared_embedding` names the checkpoint's own files.

Differences from ByteDance's Monolith: tables that live in the entry graph, because there are no
parameter servers, are restored and can be assigned to; dense graphs are exported once; GPU
placement is switched back after an export; models hold the files of their tables.

Longer than 600 lines: the exporters share how a model is written beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.training import py_checkpoint_reader

from monolith.native_training import (
  device_utils,
  graph_estimator,
  hash_table_ops,
  multi_hash_table_ops,
  save_utils,
)
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.checkpoints import restored
from monolith.native_training.graph import export_context
from monolith.native_training.graph_estimator import saved_model
from monolith.native_training.model_export import (
  data_gen_utils,
  export_files,
  frozen_model,
  versioned_assign,
)
from monolith.row_log import sync_state

ModelFn = Callable[..., graph_estimator.EstimatorSpec]
ReceiverFn = Callable[[], graph_estimator.ServingInputReceiver]

_ENTRY = "entry"
_PS = "ps_"
_ASSET_BASE = "ASSET_BASE"
# Attribute of a graph: the files that its model will hold, each once.
_ASSET_FILES = "_monolith_export_asset_files"
# Attribute of a graph: those of them that need no copy.
_LINKED_FILES = "_monolith_export_linked_files"
_ASSIGN_SIGNATURE = "hashtable_assign"
_WARMUP_PATH = os.path.join("assets.extra", "tf_serving_warmup_requests")


class BaseExporter:
  """Holds the parts that both exporters share.

  Args:
    model_fn: an Estimator's `model_fn`; called in PREDICT mode.
    model_dir: where checkpoints are.
    export_dir_base: where models go.
    shared_embedding: the files of tables are the checkpoint's instead of copies.
    warmup_file: attached for TensorFlow Serving if it exists; if not, random requests are, where
      it is known what the model reads.
    export_context_list: context managers, or functions that make them, entered around `model_fn`.
    num_ps: servers of the model; if given, the tables must have been saved on as many.
  """

  def __init__(
    self,
    model_fn: ModelFn,
    model_dir: str,
    export_dir_base: str,
    shared_embedding: bool = False,
    warmup_file: str | None = None,
    export_context_list: Sequence[Any] | None = None,
    num_ps: int | None = None,
  ):
    self._model_fn = model_fn
    self._model_dir = model_dir
    self._export_dir_base = export_dir_base
    self._shared_embedding = shared_embedding
    self._warmup_file = warmup_file
    self._export_context_list = list(export_context_list or [])
    self._num_ps = num_ps

  def export_saved_model(
    self,
    serving_input_receiver_fn: ReceiverFn,
    checkpoint_path: str | None = None,
    global_step: int | None = None,
  ) -> bytes | dict[str, bytes]:
    """Exports a checkpoint.

    Args:
      serving_input_receiver_fn: makes the inputs.
      checkpoint_path: the newest one by default.
      global_step: its step.

    Returns:
      The folder of the model; with several, graph name -> folder.

    Raises:
      ValueError: there is no checkpoint, it lacks variables of the model, or it was saved on
        another number of servers.
    """
    raise NotImplementedError

  def create_asset_base(self) -> tf.Tensor:
    """Returns the prefix of paths to the model's own files, a string scalar of the default graph.

    The first call makes it, under the name `ASSET_BASE`. It is known while a model is loaded, to
    the ops that restore tables; later it is empty.
    """
    graph = tf.compat.v1.get_default_graph()
    asset_base = _get_asset_base(graph)
    if asset_base is None:
      with graph.name_scope(None):  # out of the scope of the caller
        asset_base = tf.constant("", name=_ASSET_BASE)
    return asset_base

  def add_ckpt_to_assets(self, ckpt_to_export: str, pattern: str = "*") -> None:
    """Puts files of a checkpoint's tables among the files of the default graph's model.

    Args:
      ckpt_to_export: prefix of the checkpoint; for one without tables, those of the newest full one
        are taken.
      pattern: glob pattern of the files' names.
    """
    graph = tf.compat.v1.get_default_graph()
    files = dict.fromkeys(_get_asset_files(graph))
    files.update(dict.fromkeys(tf.io.gfile.glob(self._get_table_folder(ckpt_to_export) + pattern)))
    setattr(graph, _ASSET_FILES, list(files))

  def build_signature(
    self, input_tensor_dict: dict[str, tf.Tensor], output_tensor_dict: dict[str, tf.Tensor]
  ) -> meta_graph_pb2.SignatureDef:
    """Returns the signature of a prediction with these inputs and outputs."""

    def to_infos(tensors: dict[str, tf.Tensor]) -> dict[str, meta_graph_pb2.TensorInfo]:
      return {
        key: tf.compat.v1.saved_model.build_tensor_info(tensor) for key, tensor in tensors.items()
      }

    return tf.compat.v1.saved_model.build_signature_def(
      to_infos(input_tensor_dict),
      to_infos(output_tensor_dict),
      tf.compat.v1.saved_model.signature_constants.PREDICT_METHOD_NAME,
    )

  def _get_checkpoint(self, checkpoint_path: str | None) -> str:
    checkpoint_path = checkpoint_path or tf.train.latest_checkpoint(self._model_dir)
    if not checkpoint_path:
      raise ValueError(
        f"Couldn't find trained model at {self._model_dir}: "
        f"{checkpoint_files.describe(self._model_dir)}"
      )
    self._check_servers(checkpoint_path)
    return checkpoint_path

  def _check_servers(self, checkpoint_path: str) -> None:
    # A served model looks for a row on the server of its id, and finds none if it lies elsewhere.
    folder = self._get_table_folder(checkpoint_path)
    if self._num_ps is None or not tf.io.gfile.exists(folder):
      return
    tables_of = folder[: -len(save_utils.SaveHelper.get_ckpt_asset_dir(""))]
    if not checkpoint_reshard.fits(tables_of, self._num_ps):
      raise ValueError(
        f"{tables_of} was saved on {checkpoint_reshard.count_servers(tables_of)} servers, and "
        f"num_ps is {self._num_ps}: export with the same number, or write it again with "
        "checkpoints.reshard.reshard_checkpoint"
      )

  @contextlib.contextmanager
  def _exporting(
    self, mode: export_context.ExportMode, export_ctx: export_context.ExportContext
  ) -> Iterator[None]:
    # A cluster in TF_CONFIG would put variables on its servers.
    tf_config = os.environ.pop("TF_CONFIG", None)
    try:
      with contextlib.ExitStack() as stack:
        stack.enter_context(export_context.enter_export_mode(mode, export_ctx))
        for context in self._export_context_list:
          stack.enter_context(context() if callable(context) else context)
        yield
    finally:
      if tf_config is not None:
        os.environ["TF_CONFIG"] = tf_config

  def _build_model(
    self, serving_input_receiver_fn: ReceiverFn
  ) -> dict[str, meta_graph_pb2.SignatureDef]:
    """Builds the model in the default graph; returns its own signatures."""
    tf.compat.v1.train.get_or_create_global_step()
    receiver = serving_input_receiver_fn()
    try:
      spec = self._model_fn(
        features=receiver.features,
        mode=graph_estimator.ModeKeys.PREDICT,
        config=graph_estimator.RunConfig(model_dir=self._model_dir),
      )
    except KeyError as error:
      name = error.args[0] if error.args else None
      if not isinstance(receiver.features, dict) or name in receiver.features:
        raise
      raise KeyError(
        f"The model reads the feature {name!r}, which its serving_input_receiver_fn does not make; "
        f"it makes {sorted(receiver.features)}. A served model is not told its label: read that "
        f"with features.get({name!r})"
      ) from error
    return saved_model.build_signatures(spec, receiver)

  def _save(
    self,
    graph: tf.Graph,
    export_dir: str,
    checkpoint_path: str,
    signature_defs: dict[str, meta_graph_pb2.SignatureDef],
    assignable: bool = False,
    freeze: bool = False,
    clear_devices: bool = False,
    with_warmup: bool = False,
    shard: int | None = None,
    is_entry: bool = False,
  ) -> bytes:
    """Writes one graph with its variables, and with ops that restore its tables.

    `shard` is the server whose tables it has, and `is_entry` whether it has the dense variables: a
    replica goes on from where the checkpoint was in the logs of both.
    """
    export_ctx = export_context.get_current_export_ctx()
    assert export_ctx is not None
    with graph.as_default():
      # In which graph the global step is missing depends on the model; a checkpoint always has it.
      tf.compat.v1.train.get_or_create_global_step()
      if assignable:
        _add_assign_signatures(export_ctx, graph)
      signature_defs = {
        **signature_defs,
        **{
          signature.name: self.build_signature(signature.inputs, signature.outputs)
          for signature in export_ctx.signatures(graph)
        },
      }
      main_op = self._create_main_op(checkpoint_path, os.path.dirname(export_dir))
      config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
      with tf.compat.v1.Session(graph=graph, config=config) as sess:
        saver = _restore(sess, checkpoint_path)
        temp_dir = os.path.join(os.path.dirname(export_dir), f"temp-{os.path.basename(export_dir)}")
        if tf.io.gfile.exists(temp_dir):
          tf.io.gfile.rmtree(temp_dir)
        if freeze:
          frozen_model.save_frozen(sess, temp_dir, signature_defs)
        else:
          builder = tf.compat.v1.saved_model.Builder(temp_dir)
          builder.add_meta_graph_and_variables(
            sess,
            [tf.compat.v1.saved_model.tag_constants.SERVING],
            signature_def_map=signature_defs,
            clear_devices=clear_devices,
            main_op=main_op,
            strip_default_attrs=True,
            saver=saver,
          )
          asset_base = _get_asset_base(graph)
          if asset_base is not None:
            asset = builder._saved_model.meta_graphs[0].asset_file_def.add(filename="./")
            asset.tensor_info.name = asset_base.name
          builder.save()
    export_files.put_files(
      _get_asset_files(graph),
      getattr(graph, _LINKED_FILES, set()),
      os.path.join(temp_dir, "assets"),
    )
    if restored.is_withdrawn(checkpoint_path):
      tf.io.gfile.rmtree(temp_dir)
      raise restored.CheckpointChangedError(
        None, None, f"{checkpoint_path} was deleted, or written again, while it was exported."
      )
    if with_warmup:
      self._attach_warmup_file(temp_dir, graph, signature_defs)
    table_folder = self._get_table_folder(checkpoint_path)
    if shard is not None and _has_tables(graph):
      sync_state.copy_to_export(table_folder, temp_dir, sync_state.SYNC_STATE, shard)
    if is_entry:
      sync_state.copy_to_export(table_folder, temp_dir, sync_state.DENSE_STATE)
    tf.io.gfile.rename(temp_dir, export_dir)
    logging.info("Exported %s", export_dir)
    return tf.compat.as_bytes(export_dir)

  def _create_main_op(self, checkpoint_path: str, export_base: str) -> tf.Operation | None:
    """Returns what restores the tables of the default graph when the model is loaded."""
    graph = tf.compat.v1.get_default_graph()
    folder = self._get_table_folder(checkpoint_path)
    restore_ops: list[Any] = []
    if not tf.io.gfile.exists(folder):
      # Nothing but a dense-only checkpoint so far, or a model without tables.
      return None

    def get_path(prefix: str, shared: bool | None) -> tf.Tensor | str:
      shared = self._shared_embedding if shared is None else shared
      if shared and not linkable:
        logging.warning(
          "%s cannot share files with the checkpoint %s: exports name it, and can be loaded only "
          "as long as it is there",
          export_base,
          folder,
        )
        return os.path.abspath(folder) + "/" + prefix if "://" not in folder else folder + prefix
      before = set(_get_asset_files(graph))
      for pattern in (f"{prefix}-*-of-*", f"{prefix}.*-of-*", f".{prefix}.manifest"):
        self.add_ckpt_to_assets(checkpoint_path, pattern)
      if shared:
        linked = getattr(graph, _LINKED_FILES, set()) | set(_get_asset_files(graph)) - before
        setattr(graph, _LINKED_FILES, linked)
      return tf.strings.join([self.create_asset_base(), prefix])

    linkable = export_files.can_link(folder, export_base)
    saved_groups = multi_hash_table_ops._saved_names(folder)
    with tf.device("/device:CPU:0"):
      for table in tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY):
        prefix = os.path.basename(hash_table_ops._find_basename(folder, table))
        path = get_path(prefix, table.export_share_embedding)
        restore_ops.append(table.restore(path).as_op())
      for group in tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
        # The group's own handle may be read before the group was made.
        created = group._with_handle(group.initializer.outputs[0])
        name = multi_hash_table_ops._restored_name(group.shared_name, saved_groups)
        restore_ops.append(created.restore(get_path(name, None)).as_op())
    return tf.group(*restore_ops, name="restore_tables") if restore_ops else None

  def _get_table_folder(self, checkpoint_path: str) -> str:
    """Returns the folder of the tables; for a dense-only checkpoint, of the newest full one."""
    folder = save_utils.SaveHelper.get_ckpt_asset_dir(checkpoint_path)
    if tf.io.gfile.exists(folder):
      return folder
    full_checkpoint = tf.train.latest_checkpoint(self._model_dir)
    if full_checkpoint is None or os.path.dirname(full_checkpoint) == os.path.dirname(
      checkpoint_path
    ):
      # A full one itself: its model has no tables, or it is being deleted.
      return folder
    return save_utils.SaveHelper.get_ckpt_asset_dir(full_checkpoint)

  def _attach_warmup_file(
    self,
    model_dir: str,
    graph: tf.Graph,
    signature_defs: dict[str, meta_graph_pb2.SignatureDef],
  ) -> None:
    if not self._warmup_file:
      return
    target = os.path.join(model_dir, _WARMUP_PATH)
    tf.io.gfile.makedirs(os.path.dirname(target))
    if tf.io.gfile.exists(self._warmup_file):
      tf.io.gfile.copy(self._warmup_file, target, overwrite=True)
      return
    try:
      # Straight to its place: other models may be told the same name of a warm-up file.
      _gen_warmup_file(target, graph, signature_defs)
    except Exception as e:  # A model without warm-up is better than none.
      # One that parses no samples is fed what nobody can make up.
      level = logging.INFO if data_gen_utils.has_parser(graph) else logging.DEBUG
      logging.log(level, "There is no warm-up file %s, and none was made: %s", self._warmup_file, e)
      tf.io.gfile.rmtree(os.path.dirname(target))


class StandaloneExporter(BaseExporter):
  """Exports everything as one model. The arguments are those of `BaseExporter`."""

  def export_saved_model(
    self,
    serving_input_receiver_fn: ReceiverFn,
    checkpoint_path: str | None = None,
    global_step: int | None = None,
  ) -> bytes:
    checkpoint_path = self._get_checkpoint(checkpoint_path)
    export_ctx = export_context.ExportContext()
    with self._exporting(export_context.ExportMode.STANDALONE, export_ctx):
      with tf.Graph().as_default() as graph:
        signature_defs = self._build_model(serving_input_receiver_fn)
        return self._save(
          graph,
          os.path.join(self._export_dir_base, _get_version(self._export_dir_base)),
          checkpoint_path,
          signature_defs,
          assignable=True,
          with_warmup=True,
          # The tables of several servers are not one partition of a log.
          shard=None if self._num_ps and self._num_ps > 1 else 0,
          is_entry=True,
        )


class DistributedExporter(BaseExporter):
  """Exports the dense part and every parameter server as models of their own.

  Args beyond those of `BaseExporter`:
    dense_only: leave out the parameter servers.
    allow_gpu: whether ops may be placed on GPUs.
    with_remote_gpu: whether the dense part moves into a model for GPU processes.
    clear_entry_devices: whether the entry model names no devices.
    include_graphs: names of the graphs to export; `None` for all.
    global_step_as_timestamp: whether the version is the step.
    freeze_variable: whether variables of the model for GPU processes become constants.
  """

  def __init__(
    self,
    model_fn: ModelFn,
    model_dir: str,
    export_dir_base: str,
    shared_embedding: bool = False,
    warmup_file: str | None = None,
    export_context_list: Sequence[Any] | None = None,
    dense_only: bool = False,
    allow_gpu: bool = False,
    with_remote_gpu: bool = False,
    clear_entry_devices: bool = False,
    include_graphs: Sequence[str] | None = None,
    global_step_as_timestamp: bool = False,
    freeze_variable: bool = True,
    num_ps: int | None = None,
  ):
    super().__init__(
      model_fn,
      model_dir,
      export_dir_base,
      shared_embedding,
      warmup_file,
      export_context_list,
      None if dense_only else num_ps,
    )
    self._dense_only = dense_only
    self._allow_gpu = allow_gpu
    self._with_remote_gpu = with_remote_gpu
    self._clear_entry_devices = clear_entry_devices
    self._include_graphs = include_graphs
    self._global_step_as_timestamp = global_step_as_timestamp
    self._freeze_variable = freeze_variable

  def export_saved_model(
    self,
    serving_input_receiver_fn: ReceiverFn,
    checkpoint_path: str | None = None,
    global_step: int | None = None,
  ) -> dict[str, bytes]:
    checkpoint_path = self._get_checkpoint(checkpoint_path)
    if self._global_step_as_timestamp and global_step is not None:
      version = str(global_step)
    else:
      version = _get_version(os.path.join(self._export_dir_base, _ENTRY))
    export_ctx = export_context.ExportContext(with_remote_gpu=self._with_remote_gpu)
    exported: dict[str, bytes] = {}

    def save(name: str, graph: tf.Graph, **kwargs: Any) -> None:
      suffix = getattr(graph, "export_suffix", "")
      export_dir = os.path.join(self._export_dir_base, name, version + suffix)
      if self._should_export(name, export_dir):
        exported[name] = self._save(graph, export_dir, checkpoint_path, **kwargs)

    with self._exporting(export_context.ExportMode.DISTRIBUTED, export_ctx), self._placement():
      with tf.Graph().as_default() as entry_graph:
        signature_defs = self._build_model(serving_input_receiver_fn)
      save(
        _ENTRY,
        entry_graph,
        signature_defs=signature_defs,
        # Without servers the tables are here, and rows must be able to come.
        assignable=_has_tables(entry_graph),
        clear_devices=self._clear_entry_devices,
        with_warmup=True,
        shard=0,
        is_entry=True,
      )
      for name, graph in export_ctx.dense_sub_graphs.items():
        save(name, graph, signature_defs={}, freeze=self._freeze_variable)
      for name, graph in export_ctx.sub_graphs.items():
        if not (self._dense_only and name.startswith(_PS)):
          shard = int(name[len(_PS) :]) if name.startswith(_PS) else None
          save(name, graph, signature_defs={}, assignable=True, shard=shard)
    return exported

  def _should_export(self, name: str, export_dir: str) -> bool:
    if tf.io.gfile.exists(export_dir):
      return False
    return self._include_graphs is None or name in self._include_graphs

  @contextlib.contextmanager
  def _placement(self) -> Iterator[None]:
    """Allows GPUs, if asked for, as long as the export lasts."""
    if not self._allow_gpu or device_utils.is_gpu_training():
      yield
      return
    device_utils.enable_gpu_training()
    try:
      yield
    finally:
      device_utils.disable_gpu_training()


def _gen_warmup_file(
  path: str, graph: tf.Graph, signature_defs: dict[str, meta_graph_pb2.SignatureDef]
) -> None:
  """Writes random requests for the signatures that take nothing but serialized samples.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
    ValueError: there is no such signature, or it is not known what samples have.
  """
  with graph.as_default():
    args = data_gen_utils.ParserArgs.from_collections()
  rows = 1 if args.variant_type == "example_batch" else args.batch_size
  takers: dict[str, list[str]] = {}
  for name, signature in signature_defs.items():
    if len(signature.inputs) == 1:
      ((key, info),) = signature.inputs.items()
      if info.dtype == tf.string and tf.TensorShape(info.tensor_shape).is_compatible_with([rows]):
        takers.setdefault(key, []).append(name)
  if len(takers) != 1:
    raise ValueError(f"The inputs that take {rows} strings are {sorted(takers)}, want one")
  ((args.input_name, args.signature_name),) = takers.items()
  args.warmup_file = path
  data_gen_utils.write_warmup_file(args)


def _get_version(folder: str) -> str:
  """Returns the time in seconds, or later if that version exists."""
  version = int(time.time())
  while tf.io.gfile.exists(os.path.join(folder, str(version))):
    version += 1
  return str(version)


def _add_assign_signatures(export_ctx: export_context.ExportContext, graph: tf.Graph) -> None:
  """Adds signatures through which rows of the tables can be set from outside."""
  inputs, outputs = {}, {}
  for table in tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY):
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    values = tf.compat.v1.placeholder(tf.float32, [None, table.dim_size])
    with tf.control_dependencies([table.assign(ids, values).as_op()]):
      result = tf.size(ids)
    inputs[f"{table.name}_id"] = ids
    inputs[f"{table.name}_value"] = values
    outputs[f"{table.name}_result"] = result
  export_ctx.add_signature(graph, _ASSIGN_SIGNATURE, inputs, outputs)
  for group in tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    splits = tf.compat.v1.placeholder(tf.int64, [None])
    values = tf.compat.v1.placeholder(tf.float32, [None])
    ragged_ids = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
    with tf.control_dependencies([group.raw_assign(ragged_ids, values).as_op()]):
      result = tf.constant(0)
    export_ctx.add_signature(
      graph,
      f"{group.shared_name}/raw_assign",
      {"id": ids, "id_split": splits, "flat_value": values},
      {"result": result},
    )
    versioned_assign.add_signature(export_ctx, graph, group)


def _has_tables(graph: tf.Graph) -> bool:
  return any(
    graph.get_collection(key)
    for key in (
      hash_table_ops._HASH_TABLE_GRAPH_KEY,
      multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY,
    )
  )


def _get_asset_base(graph: tf.Graph) -> tf.Tensor | None:
  try:
    return graph.get_tensor_by_name(f"{_ASSET_BASE}:0")
  except KeyError:
    return None


def _get_asset_files(graph: tf.Graph) -> list[str]:
  return getattr(graph, _ASSET_FILES, [])


def _restore(sess: tf.compat.v1.Session, checkpoint_path: str) -> tf.compat.v1.train.Saver:
  """Restores the variables of the default graph.

  Raises:
    ValueError: the checkpoint lacks some.
  """
  saver = tf.compat.v1.train.Saver(sharded=True, allow_empty=True)
  variables = tf.compat.v1.global_variables()
  if not variables:
    return saver
  saved = py_checkpoint_reader.NewCheckpointReader(checkpoint_path).get_variable_to_shape_map()
  missing = sorted({v.op.name for v in variables if v.op.name not in saved})
  if missing:
    raise ValueError(
      f"The checkpoint {checkpoint_path} lacks the variables {missing} of the exported model: the "
      "model function must make the same variables in PREDICT as in TRAIN mode."
    )
  saver.restore(sess, checkpoint_path)
  return saver

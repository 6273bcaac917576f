"""The tables of a fused-layout run: sharded ids go in, the model's layouts come out.

  input pipeline            ids by (table, server), and where each embedding will lie
  lookup                    one call per server
  fused_embedding_to_layout pools and arranges the embeddings of all features in one op

With `enable_gpu_emb` there are no servers: tables are in this process, or spread over ranks
(`rank_layout.py`), and everything behind the input pipeline is on the GPU.

Differences from ByteDance's Monolith: a queued update uses the global step of its own batch;
`slot_mapping` works.

Longer than 600 lines: one class, whose lookup and update share the state of a batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from idl.matrix.proto import example_pb2
from monolith.native_training import (
  device_utils,
  distribution_ops,
  embedding_combiners,
  entry,
  hash_table_utils,
  nested_tensors,
  prefetch_queue,
)
from monolith.native_training.graph import export_context
from monolith.native_training.tables import (
  gradient_checks,
  id_pairs,
  id_sharding,
  layout_config,
  merging,
  ps_group,
  ps_transfer,
  queue_hooks,
  rank_layout,
  step_order,
)

# Server -> table -> (ids, values).
AssignData = dict[int, dict[str, tuple[tf.Tensor, tf.Tensor]]]

# Where the embeddings of a batch lie, and, for several requests in one, how much is each one's.
_OFFSETS = ("fid_offset", "feature_offset", "nfl_offset", "batch_size")
_SIZES = ("nfl_size", "feature_size", "fid_size", "emb_size")

_key = rank_layout.key


class LayoutHashTable(queue_hooks.QueueHooks):
  """Tables of a fused-layout run: the input pipeline shards the ids, layouts come out.

  `gen_feature_configs` says what the pipeline and the tables have to agree on; it travels in the
  parser context. With native tables every feature has a table of its own in one group per server,
  unless it shares one, and all ids of a server travel as one pseudo table.

  Args:
    num_ps: number of servers; 0 for tables in this process.
    table_factory: `(index of the server, table name -> configuration) -> group of tables`.
    use_native_multi_hash_table: as in `gen_feature_configs`, whose result wins.
    max_rpc_deadline_millis: deadline of remote lookups in an export.
    queue_configs: capacities of the queues between ranks; servers have none.
    parser_ctx: holds `sharding_sparse_fids_op_params`; the innermost context by default.
    enable_grad_accumulation: of ranks: add the gradients of an id up over all of them, instead of
      one step per rank.
    remote_predict: calls a server of an exported model.

  Raises:
    AssertionError: the parameters have `enable_gpu_emb`, and there are not `num_ps` ranks.
    ValueError: the parser context has no parameters, or those of another number of servers.
  """

  def __init__(
    self,
    num_ps: int,
    table_factory: ps_group.TableFactory,
    use_native_multi_hash_table: bool,
    max_rpc_deadline_millis: int = 30,
    queue_configs: dict[str, int] | None = None,
    parser_ctx: id_sharding.ParserCtx | None = None,
    *,
    enable_grad_accumulation: bool = False,
    remote_predict: ps_group.RemotePredict,
  ):
    self._parser_ctx = id_sharding.get_default_parser_ctx() if parser_ctx is None else parser_ctx
    params = self._parser_ctx.sharding_sparse_fids_op_params
    if params is None:
      raise ValueError("sharding_sparse_fids_op_params of the parser context is not set")
    if params.num_ps != max(num_ps, 1):
      raise ValueError(f"num_ps is {num_ps}, but ids are sharded for {params.num_ps} servers")
    if params.use_native_multi_hash_table != (
      use_native_multi_hash_table and not params.transfer_float16
    ):
      logging.warning(
        "use_native_multi_hash_table is %s here, but %s where ids are sharded; the latter counts",
        use_native_multi_hash_table,
        params.use_native_multi_hash_table,
      )
    self._num_ps = params.num_ps
    self._use_native = params.use_native_multi_hash_table
    self._use_gpu = params.use_gpu or params.enable_gpu_emb
    self._feature_configs: example_pb2.FeatureConfigs = params.feature_configs
    self._inner_data_type = self._parser_ctx.parser_type or "example_batch"
    self._rows = layout_config.FeatureRows(
      {
        name: sum(config.slice_dims)
        for name, config in params.feature_configs.feature_configs.items()
      },
      params.shared_tables,
    )
    self._ranks: rank_layout.RankLayout | None = None
    if params.enable_gpu_emb:
      self._set_ranks(
        rank_layout.RankLayout(
          num_ps, params, table_factory, queue_configs or {}, enable_grad_accumulation
        )
      )
      return
    transfer = ps_transfer.PsTransfer(
      pinned=num_ps > 0,
      dims={
        name: hash_table_utils.infer_dim_size(config.table_config)
        for name, config in params.sub_table_name_to_config.items()
      },
      float16=params.transfer_float16,
    )
    self._set_group(
      ps_group.PsGroup(
        self._num_ps,
        params.sub_table_name_to_config,
        table_factory,
        transfer,
        remote_predict,
        max_rpc_deadline_millis,
      )
    )

  def _set_group(self, group: ps_group.PsGroup) -> None:
    self._group = group
    # Where `get_queue_hooks` looks.
    self._tables = group.tables

  def _set_ranks(self, ranks: rank_layout.RankLayout) -> None:
    self._ranks = ranks
    self._tables = [ranks.table]

  @classmethod
  def gen_feature_configs(
    cls,
    num_ps: int,
    feature_name_to_config: Mapping[str, entry.HashTableConfigInstance],
    layout_configs: Mapping[str, example_pb2.OutConfig],
    feature_to_unmerged_slice_dims: Mapping[str, Sequence[int]],
    feature_to_combiner: Mapping[str, embedding_combiners.Combiner],
    use_native_multi_hash_table: bool,
    transfer_float16: bool = False,
    unique: Callable[[], bool] | None = None,
    enable_gpu_emb: bool = False,
    use_gpu: bool = False,
    shared_tables: Mapping[str, str] | None = None,
  ) -> layout_config.ShardingSparseFidsOpParams:
    """Returns what the input pipeline and the tables must agree on.

    Args:
      num_ps: number of servers.
      feature_name_to_config: feature -> configuration of its rows.
      layout_configs: layout name -> its slices.
      feature_to_unmerged_slice_dims: feature -> widths of its slices.
      feature_to_combiner: feature -> how its ids are pooled.
      use_native_multi_hash_table: one native group per server; off with `transfer_float16`.
      transfer_float16: send embeddings and gradients with 16 bits.
      unique: whether to send every id once; by default unless exporting.
      enable_gpu_emb: `num_ps` is a number of ranks, which hold the tables, on GPUs if the
        configurations say so. The ids of each table travel under its own name then.
      use_gpu: layouts on GPUs.
      shared_tables: feature -> native table, for features that share one; others share a table if
        their configurations are equal.
    """
    use_native = use_native_multi_hash_table and not transfer_float16
    shared_tables = (shared_tables or {}) if use_native else {}
    if use_native:
      configs, names = cls.no_merge_feature_config(
        feature_name_to_config, use_same_table=not enable_gpu_emb
      )
      if shared_tables:
        configs = layout_config.share_tables(feature_name_to_config, shared_tables)
        if enable_gpu_emb:
          names = {name: shared_tables.get(name, name) for name in names}
      sub_tables = configs, names
    else:
      sub_tables = cls.merge_feature_config(feature_name_to_config)
    return layout_config.make_op_params(
      num_ps=num_ps,
      sub_table_name_to_config=sub_tables[0],
      feature_to_sub_table=sub_tables[1],
      layout_configs=layout_configs,
      feature_to_unmerged_slice_dims=feature_to_unmerged_slice_dims,
      feature_to_combiner=feature_to_combiner,
      use_native_multi_hash_table=use_native,
      transfer_float16=transfer_float16,
      unique=unique,
      enable_gpu_emb=enable_gpu_emb,
      use_gpu=use_gpu,
      shared_tables=shared_tables,
    )

  @classmethod
  def merge_feature_config(
    cls, feature_name_to_config: Mapping[str, entry.HashTableConfigInstance]
  ) -> tuple[dict[str, entry.HashTableConfigInstance], dict[str, str]]:
    """Puts features of equal configuration into one table.

    Returns:
      `(table -> configuration, feature -> table)`, named as in `MergedMultiTypeHashTable`.
    """
    return merging.merge_slots(feature_name_to_config)

  @classmethod
  def no_merge_feature_config(
    cls,
    feature_name_to_config: Mapping[str, entry.HashTableConfigInstance],
    use_same_table: bool = True,
  ) -> tuple[Mapping[str, entry.HashTableConfigInstance], dict[str, str]]:
    """Lets every feature keep its table.

    Returns:
      The dict as it is, and feature -> the name under which its ids travel: one for all if
      `use_same_table`, else its own.
    """
    return layout_config.no_merge_feature_config(feature_name_to_config, use_same_table)

  def get_table_dim_sizes(self) -> list[int]:
    """Returns the tables' dimensions, by sorted name."""
    if self._ranks is not None:
      return self._ranks.table.get_table_dim_sizes()
    return self._group.get_table_dim_sizes()

  @property
  def slot_mapping(self) -> dict[str, str]:
    """Feature -> table under which its ids travel."""
    return {name: config.table for name, config in self._feature_configs.feature_configs.items()}

  def flatten_layout(self, nested: Mapping[str, Any]) -> list[tf.Tensor]:
    """Returns the layouts' tensors by layout name, lists expanded in place."""
    return layout_config.flatten_layout(nested)

  def nest_layout(self, tensors: Sequence[tf.Tensor]) -> dict[str, Any]:
    """Undoes `flatten_layout`."""
    return layout_config.nest_layout(tensors, self._feature_configs.out_configs)

  def _layout_names(self) -> list[str]:
    """Returns the layout of each tensor of `flatten_layout`."""
    names = []
    for name, config in sorted(self._feature_configs.out_configs.items()):
      is_list = config.out_type == example_pb2.NONE
      names += [name] * (len(config.slice_configs) if is_list else 1)
    return names

  def lookup(
    self,
    features: dict[str, Any],
    auxiliary_bundle: dict[str, tf.Tensor] | None = None,
    ret_fused_layout_callable_fn: bool = False,
    ret_lookup_callable_fn: bool = False,
    embedding_prefetch_capacity: int = 0,
  ) -> Any:
    """Looks the ids of a batch up and lays the embeddings out.

    Args:
      features: the batch; the sharded ids, or the protos they come from, are taken out of it.
      auxiliary_bundle: filled with the tensors that `apply_gradients` needs.
      ret_fused_layout_callable_fn: look up, but return a function that makes the layouts.
      ret_lookup_callable_fn: return a function that does everything.
      embedding_prefetch_capacity: number of batches to look up ahead.

    Returns:
      Layout name -> tensor, or list of tensors for `OutType.NONE`; or a function
      `(auxiliary_bundle, features) ->` that, to be called with the arguments given here.
    """
    bundle = {} if auxiliary_bundle is None else auxiliary_bundle
    self._put_shards(self._take_sharded(features), bundle)

    def make_layouts(bundle: dict[str, tf.Tensor], features: dict[str, Any]) -> dict[str, Any]:
      del features
      return self._layouts(bundle)

    def look_up(bundle: dict[str, tf.Tensor], features: dict[str, Any]) -> None:
      if self._ranks is not None:
        # Ids go where they are exchanged, and sizes are read on the host.
        offsets = {_key(name): bundle[_key(name)] for name in _OFFSETS}
        _move_to_gpu(features, offsets)
        bundle.update(offsets)
        with tf.name_scope("pht_lookup"):
          self._ranks.look_up(bundle, features, embedding_prefetch_capacity)
        return
      with tf.name_scope("pht_lookup"):
        self._lookup_shards(bundle)
      if self._use_gpu:
        _move_to_gpu(features, bundle)
      self._prefetch(features, bundle, embedding_prefetch_capacity)

    def look_up_and_make_layouts(
      bundle: dict[str, tf.Tensor], features: dict[str, Any]
    ) -> dict[str, Any]:
      look_up(bundle, features)
      return self._layouts(bundle)

    if ret_lookup_callable_fn:
      return look_up_and_make_layouts
    look_up(bundle, features)
    return make_layouts if ret_fused_layout_callable_fn else self._layouts(bundle)

  def apply_gradients(
    self,
    layout_grads_and_vars: Iterable[tuple[tf.Tensor, tf.Tensor]],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
    auxiliary_bundle: dict[str, tf.Tensor] | None = None,
    async_function_mgr: prefetch_queue.AsyncFunctionMgr | None = None,
    async_push: bool = False,
    grad_scale: tf.Tensor | None = None,
  ) -> tf.Operation:
    """Updates the tables from gradients of all layouts.

    Args:
      layout_grads_and_vars: a gradient for each tensor of `flatten_layout`, in that order.
      global_step: int64 scalar.
      req_time: int64, seconds; the largest one counts, 0 by default.
      auxiliary_bundle: what the matching `lookup` filled.
      async_function_mgr: runs the update, if `async_push`.
      async_push: whether the update runs during the next step.
      grad_scale: multiplies all gradients.

    Returns:
      What to run in every step.

    Raises:
      AssertionError: there is no bundle, or `async_push` is set and ranks hold the tables: their
        queues are those of `queue_configs`.
    """
    assert auxiliary_bundle is not None, "auxiliary_bundle is required: it names the ids"
    with tf.name_scope("pht_apply_gradients"):
      layout_grads = gradient_checks.check_gradients(
        [f"layout {name}" for name in self._layout_names()],
        [grad for grad, _ in layout_grads_and_vars],
      )
      if self._ranks is not None:
        assert not async_push, (
          "async_push (enable_embedding_postpush) is set, but enable_gpu_emb is, too: use "
          "enable_async_optimize"
        )
        return self._update_ranks(
          layout_grads, auxiliary_bundle, grad_scale, global_step, _latest(req_time)
        )
      grads = self._embedding_grads(layout_grads, auxiliary_bundle, grad_scale)
      keys = [(ps, table) for table in self._table_names() for ps in range(self._num_ps)]
      updates = {
        ps: {
          table: self._update_data(auxiliary_bundle, ps, table, grad)
          for (key_ps, table), grad in zip(keys, grads)
          if key_ps == ps
        }
        for ps in range(self._num_ps)
      }
      global_step = tf.identity(tf.cast(global_step, tf.int64))
      args = (updates, global_step, _latest(req_time))
      if self._use_gpu:
        args = _move(args, "/device:CPU:0")
      if async_push and async_function_mgr is not None:
        return async_function_mgr.add_async_function(
          self._update_op, args, is_async=True, queue_name="postpush_queue"
        )
      return self._update_op(*args)

  def assign(self, data: AssignData) -> LayoutHashTable:
    """Overwrites rows; returns the tables after the write.

    Args:
      data: server -> table (with native tables, the feature's or the one it shares) -> (its ids,
        values); already sharded. With `enable_gpu_emb` a rank stands for a server, and all ranks
        write together, each what it has for whom.
    """
    with tf.name_scope("dmtht_a" if self._use_native else "pht_assign"):
      return self._write(data, lambda table, pairs: table.assign(pairs), op="assign")

  def assign_add(self, data: AssignData) -> LayoutHashTable:
    """Adds to rows; returns the tables after the write.

    Args:
      data: server -> table (with native tables, the feature's or the one it shares) -> (its ids,
        values); already sharded. With `enable_gpu_emb` a rank stands for a server, and all ranks
        write together, each what it has for whom.
    """
    with tf.name_scope("dmtht_aa" if self._use_native else "pht_assign_add"):
      return self._write(data, lambda table, pairs: table.assign_add(pairs), op="assign_add")

  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[LayoutHashTable, tf.Tensor]:
    raise NotImplementedError("PartitionedHashTable does not support reinitialize!")

  def as_op(self, name: str | None = None) -> tf.Operation:
    if self._ranks is not None:
      return self._ranks.table.as_op(name or "pht_as_op")
    return self._group.as_op(name or "pht_as_op")

  def _take_sharded(self, features: dict[str, Any]) -> dict[str, Any]:
    """Takes the sharded ids out of `features`, sharding them first if need be."""
    ctx = self._parser_ctx
    sparse_features = features.pop(ctx.sharding_sparse_fids_sparse_features_key, None)
    if sparse_features is not None:
      id_sharding.sharding_sparse_fids_with_context(sparse_features, features, ctx)
    return ctx.sharding_sparse_fids_features_parse_from_features(features)

  def _put_shards(self, sharded: Mapping[str, Any], bundle: dict[str, tf.Tensor]) -> None:
    if self._ranks is not None:
      self._ranks.put_shards(sharded, bundle)
      return
    for name in _OFFSETS:
      bundle[_key(name)] = sharded[name]
    for name in _SIZES:
      if sharded.get(name) is not None:
        bundle[_key(name)] = sharded[name]
    names = ("shards", "shards_row_split", "shards_row_split_size")
    for name in names if self._use_native else names[:1]:
      for table in self._table_names():
        for ps in range(self._num_ps):
          tensor = sharded.get(name, {}).get(f"{table}:{ps}")
          if tensor is not None:
            bundle[_key(f"{name}@{ps}@{table}")] = tensor
          elif name != "shards_row_split_size":
            raise ValueError(f"features have no {_key(name)}/{table}:{ps}")

  def _lookup_shards(self, bundle: dict[str, tf.Tensor]) -> None:
    """Replaces the shards in `bundle` by their ids and embeddings."""
    timers: list[tf.Operation] = []
    for ps in range(self._num_ps):
      fids = {table: bundle.pop(_key(f"shards@{ps}@{table}")) for table in self._table_names()}
      if self._use_native:
        table = layout_config.NATIVE_FAKE_TABLE
        row_split = bundle.pop(_key(f"shards_row_split@{ps}@{table}"))
        row_split_size = bundle.pop(_key(f"shards_row_split_size@{ps}@{table}"), None)
        if row_split_size is not None:
          row_split = distribution_ops.normalize_merged_split(row_split, row_split_size)
        ragged_id = tf.RaggedTensor.from_row_splits(fids[table], row_split, validate=False)
        flat, timer = self._group.raw_lookup(
          ps, self._rows.ids_of_tables(ragged_id), op="pht_lookup"
        )
        timers += timer
        embeddings = {table: self._rows.values_of_features(ragged_id, flat)}
        if not export_context.is_exporting():
          bundle[_key(f"{table}:{ps}:fids_row_split")] = row_split
      else:
        embeddings = self._group.lookup(ps, fids, op="pht_lookup")
      for table, embedding in embeddings.items():
        bundle[_key(f"{table}:{ps}:embs")] = tf.reshape(embedding, [-1])
        if not export_context.is_exporting():
          bundle[_key(f"{table}:{ps}:fids")] = fids[table]
    if timers:
      with tf.control_dependencies(timers):
        bundle[_key("batch_size")] = tf.identity(bundle[_key("batch_size")])

  def _prefetch(
    self, features: dict[str, Any], bundle: dict[str, tf.Tensor], capacity: int
  ) -> None:
    """Sends everything through a queue, which keeps what belongs together together."""
    (queued_features, queued_bundle), queue = prefetch_queue.enqueue_dicts_with_queue_return(
      (features, bundle), capacity=capacity, queue_name="embedding_prefetch_queue"
    )
    if queue is None:
      return
    features.update(queued_features)
    bundle.update(queued_bundle)
    self.add_queue_hook(prefetch_queue.EnqueueHook(queue))

  def _layouts(self, bundle: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    fid_offset, feature_offset, nfl_offset, batch_size = (bundle[_key(n)] for n in _OFFSETS)
    has_sizes = all(_key(name) in bundle for name in _SIZES)
    sizes = {name: bundle[_key(name)] if has_sizes else None for name in _SIZES}
    with self._layout_device():
      tensors = distribution_ops.fused_embedding_to_layout(
        self._embeddings(bundle),
        None,
        fid_offset,
        feature_offset,
        nfl_offset,
        batch_size,
        variant_type=self._inner_data_type,
        feature_cfgs=self._feature_configs,
        ps_num=self._num_ps,
        nfl_size=sizes["nfl_size"],
        feature_size=sizes["feature_size"],
        fid_size=sizes["fid_size"],
        emb_size=sizes["emb_size"],
        fid_list_emb_row_lenth=self._block_sizes(bundle),
        # Version 3 is version 5 for a single request, which needs no sizes.
        version=4 if self._ranks is not None else 5 if has_sizes else 3,
      )
    return self.nest_layout(tensors)

  def _embedding_grads(
    self,
    grads: Sequence[tf.Tensor],
    bundle: Mapping[str, tf.Tensor],
    grad_scale: tf.Tensor | None,
  ) -> list[tf.Tensor]:
    """Gradients of the flat embeddings of every table and server, in the order of the layouts."""
    fid_offset, feature_offset, nfl_offset, batch_size = (bundle[_key(n)] for n in _OFFSETS)
    with self._layout_device():
      return distribution_ops.fused_embedding_to_layout_grad(
        nfl_offset=nfl_offset,
        feature_offset=feature_offset,
        fid_offset=fid_offset,
        batch_size=batch_size,
        embeddings_list=self._embeddings(bundle),
        fid_list_row_split=None,
        layout_tensors_grad=grads,
        layout_tensors_grad_scale=grad_scale,
        variant_type=self._inner_data_type,
        feature_cfgs=self._feature_configs,
        ps_num=self._num_ps,
        fid_list_emb_row_lenth=self._block_sizes(bundle),
        version=3 if self._ranks is None else 4,
      )

  def _update_ranks(
    self,
    layout_grads: Sequence[tf.Tensor],
    bundle: Mapping[str, tf.Tensor],
    grad_scale: tf.Tensor | None,
    global_step: tf.Tensor,
    req_time: tf.Tensor,
  ) -> tf.Operation:
    assert self._ranks is not None
    # The dense all-reduce is issued before the next exchange, in the same order on all ranks.
    with tf.control_dependencies(step_order.control_ops()):
      [grad_flat] = self._embedding_grads(layout_grads, bundle, grad_scale)
    updated = copy.copy(self)
    updated._set_ranks(self._ranks.apply(grad_flat, bundle, global_step, req_time))
    return updated.as_op()

  def _layout_device(self) -> contextlib.AbstractContextManager:
    """Returns the scope of the layout ops: the GPU if layouts are made there and it may be used."""
    if not self._use_gpu:
      return contextlib.nullcontext()
    return device_utils.maybe_device_if_allowed("/device:GPU:0")

  def _update_data(
    self, bundle: Mapping[str, tf.Tensor], ps: int, table: str, grad: tf.Tensor
  ) -> tuple[tf.Tensor, ...]:
    fids = bundle[_key(f"{table}:{ps}:fids")]
    if self._use_native:
      return fids, bundle[_key(f"{table}:{ps}:fids_row_split")], grad
    return fids, tf.reshape(grad, [-1, self._group.transfer.dims[table]])

  def _update_op(
    self,
    updates: dict[int, dict[str, tuple[tf.Tensor, ...]]],
    global_step: tf.Tensor,
    req_time: tf.Tensor,
  ) -> tf.Operation:
    tables = []
    for ps in range(self._num_ps):
      if self._use_native:
        fids, row_split, grad = updates[ps][layout_config.NATIVE_FAKE_TABLE]
        ragged_id = tf.RaggedTensor.from_row_splits(fids, row_split, validate=False)
        tables.append(
          self._group.raw_update(
            ps,
            self._rows.ids_of_tables(ragged_id),
            self._rows.values_of_tables(ragged_id, grad),
            global_step,
            req_time,
            op="pht_apply_gradients",
          )
        )
      else:
        tables.append(
          self._group.update(
            ps,
            updates[ps],
            lambda table, pairs: table.apply_gradients(pairs, global_step, req_time=req_time),
            op="pht_apply_gradients",
            float16=self._group.transfer.float16,
          )
        )
    return self._with_tables(tables).as_op()

  def _lookup_raw(self, data: dict[int, dict[str, tf.Tensor]]) -> dict[int, dict[str, tf.Tensor]]:
    """Looks already sharded ids up: server -> table (feature with native tables) -> ids."""
    return {
      ps: self._group.lookup(ps, name_to_ids, op="pht_lookup") for ps, name_to_ids in data.items()
    }

  def _write(
    self, data: AssignData, update_fn: Callable[[Any, dict[str, Any]], Any], op: str
  ) -> LayoutHashTable:
    if self._ranks is not None:
      updated = copy.copy(self)
      updated._set_ranks(self._ranks.write(data, update_fn, op))
      return updated
    tables = list(self._group.tables)
    for ps, name_to_pair in data.items():
      pairs = {}
      for name, pair in name_to_pair.items():
        ids, values = id_pairs.split_pair(pair)
        values = tf.convert_to_tensor(values, tf.float32)
        pairs[name] = (ids, tf.reshape(values, [-1, self._group.transfer.dims[name]]))
      tables[ps] = self._group.update(ps, pairs, update_fn, op)
    return self._with_tables(tables)

  def _with_tables(self, tables: Sequence[Any]) -> LayoutHashTable:
    updated = copy.copy(self)
    updated._set_group(self._group.with_tables(tables))
    return updated

  def _embeddings(self, bundle: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
    if self._ranks is not None:
      return [bundle[_key("recv_embeddings")]]
    return [
      bundle[_key(f"{table}:{ps}:embs")]
      for table in self._table_names()
      for ps in range(self._num_ps)
    ]

  def _block_sizes(self, bundle: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
    """Returns the floats of each block of the one tensor that comes from ranks."""
    return None if self._ranks is None else bundle[_key("fid_list_emb_row_lenth")]

  def _table_names(self) -> list[str]:
    """The tables under whose names ids travel, sorted."""
    return sorted({config.table for config in self._feature_configs.feature_configs.values()})


def _latest(req_time: tf.Tensor | None) -> tf.Tensor:
  req_time = tf.constant(0, tf.int64) if req_time is None else tf.reduce_max(req_time)
  return tf.cast(req_time, tf.int64)


def _move(tensors: Any, device: str) -> Any:
  """Returns a structure of tensors on another device, moved by one op."""
  nested = nested_tensors.NestedTensors(tensors)
  with device_utils.maybe_device_if_allowed(device):
    return nested.get_nested_result(tf.identity_n(nested.get_tensors()))


def _move_to_gpu(features: dict[str, Any], bundle: dict[str, tf.Tensor]) -> None:
  """Replaces what the layouts and the model read by copies on the GPU.

  Sizes and the time stay where they are: kernels read them on the host. So does text, which a GPU
  cannot hold.
  """
  on_host = {_key("batch_size"), "req_time", *(_key(name) for name in _SIZES)}

  def movable(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
      key: value
      for key, value in tensors.items()
      if key not in on_host
      and isinstance(value, (tf.Tensor, tf.RaggedTensor))
      and value.dtype not in (tf.string, tf.variant, tf.resource)
    }

  moved_features, moved_bundle = _move((movable(features), movable(bundle)), "/device:GPU:0")
  features.update(moved_features)
  bundle.update(moved_bundle)

"""Makes the exporter for a task's serving params, and the context in which it builds graphs.

`cpu_training` publishes `create_exporter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monolith.native_training import device_utils
from monolith.native_training.data import parsers
from monolith.native_training.graph import export_context
from monolith.native_training.model_export import saved_model_exporters
from monolith.native_training.settings.training_config import CpuTrainingConfig


class Exportable(Protocol):
  """Declares the parts of a `CpuTraining` that an exporter uses."""

  _params: Any
  _export_context_list: list[type]

  @property
  def config(self) -> CpuTrainingConfig:
    """Returns the configuration, that of serving while a graph is built for export."""
    ...

  def create_model_fn(self) -> Callable[..., Any]:
    """Returns the model function."""
    ...


def create_exporter(
  task: Exportable,
  model_dir: str,
  warmup_file: str | None,
  export_dir_base: str,
  dense_only: bool,
  include_graphs: list[str] | None = None,
  export_context_list: list[Any] | None = None,
) -> saved_model_exporters.BaseExporter:
  """Returns the exporter for the task's serving params.

  Args:
    task: the task to export.
    model_dir: where its checkpoints are.
    warmup_file: attached to the exports if it exists.
    export_dir_base: where exports go.
    dense_only: whether the tables are left out.
    include_graphs: names of the graphs to export; `None` for all.
    export_context_list: entered while exporting; those of `task` by default.

  Raises:
    ValueError: unknown export mode.
  """
  serving = task._params.serving
  if export_context_list is None:
    export_context_list = task._export_context_list
  config = task.config
  num_ps: int | None = config.num_ps
  if config.enable_full_sync_training:
    # A folder of one rank lacks the rows of the others.
    num_ps = config.num_workers if config.merge_sync_training_ckpt else None
  common = {
    "shared_embedding": serving.shared_embedding,
    "warmup_file": warmup_file,
    "export_context_list": export_context_list,
    "num_ps": num_ps,
  }
  if serving.export_mode == export_context.ExportMode.STANDALONE:
    return saved_model_exporters.StandaloneExporter(
      task.create_model_fn(), model_dir, export_dir_base, **common
    )
  if serving.export_mode == export_context.ExportMode.DISTRIBUTED:
    return saved_model_exporters.DistributedExporter(
      task.create_model_fn(),
      model_dir,
      export_dir_base,
      **common,
      dense_only=dense_only,
      allow_gpu=serving.export_with_gpu_allowed,
      with_remote_gpu=serving.with_remote_gpu,
      clear_entry_devices=serving.export_with_cleared_entry_devices,
      include_graphs=include_graphs,
      global_step_as_timestamp=config.enable_sync_training,
    )
  raise ValueError(f"Invalid export_mode: {serving.export_mode}")


def create_context_class(
  params: Any, enable_fused_layout: bool, init_parser: Callable[[], None]
) -> type:
  """Returns a context manager class that exporters enter around the model function.

  Args:
    params: the task's params; inside the context they keep tables off the GPU.
    enable_fused_layout: whether the exported graph has a fused layout.
    init_parser: called inside the new parser context.
  """

  class ExportParserCtx(parsers.ParserCtx):
    """Switches to the parser, placement and tables of serving."""

    def __init__(self) -> None:
      super().__init__(enable_fused_layout)

    def __enter__(self) -> parsers.ParserCtx:
      self._use_gpu_emb_table = params.train.use_gpu_emb_table
      self._gpu_was_allowed = device_utils.is_gpu_training()
      params.train.use_gpu_emb_table = False
      export_ctx = export_context.get_current_export_ctx()
      _allow_gpu(export_ctx is not None and export_ctx.with_remote_gpu)
      result = super().__enter__()
      init_parser()
      return result

    def __exit__(self, *args: Any) -> Any:
      result = super().__exit__(*args)
      _allow_gpu(self._gpu_was_allowed)
      params.train.use_gpu_emb_table = self._use_gpu_emb_table
      return result

  return ExportParserCtx


def _allow_gpu(allow: bool) -> None:
  if allow:
    device_utils.enable_gpu_training()
  else:
    device_utils.disable_gpu_training()

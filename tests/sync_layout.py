"""A rank that trains with a fused layout, for tests: `python -m tests.sync_layout <folder>`."""

from __future__ import annotations

import sys

import tensorflow as tf

from monolith.native_training import cpu_training, hvd_lib
from tests.layout_task import LayoutTask

STEPS = 3


def main(folder: str) -> None:
  hvd_lib.init()
  for native in (True, False):
    # A table of its own in every graph.
    tf.compat.v1.reset_default_graph()
    config = cpu_training.DistributedCpuTrainingConfig(
      model_dir=f"{folder}/{'native' if native else 'merged'}",
      index=hvd_lib.rank(),
      num_workers=hvd_lib.size(),
      enable_sync_training=True,
      reorder_fids_in_data_pipeline=True,
      enable_fused_layout=True,
      use_native_multi_hash_table=native,
      embedding_prefetch_capacity=0 if native else 1,
      intra_op_parallelism_threads=1,
      inter_op_parallelism_threads=4,
    )
    params = LayoutTask.params()
    params.name = "layout"
    params.train.per_replica_batch_size = 2
    params.train.max_steps = STEPS
    params.metrics.enable_tf2_profiler_hook = False
    cpu_training.distributed_sync_train(config, params)


if __name__ == "__main__":
  main(sys.argv[1])

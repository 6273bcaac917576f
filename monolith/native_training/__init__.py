"""The library, by layer from the top: a layer imports from those below it.

`docs/design.md` draws and explains the layers. A model author needs features, data and models.

runners
  `estimator`, `runner_utils`
                             run a model as flags and configuration say
  `demo`, `demos`            models to start from
  `cpu_training_distributed_test_binary`
                             one process of a small cluster, for tests

driver
  `cpu_training`, `driver`   run a task here, on servers or on ranks
  `hooks`, `sync_hooks`, `sync_training_hooks`, `alert`
                             what asynchronous and synchronous processes do between steps
  `debugging`, `ps_benchmark`
                             look into a training run, measure its servers

export
  `model_export`             SavedModels

models
  `native_model`, `model`, `models`
                             the model to derive from, the smallest complete one
  `layers`, `losses`, `optimizers`, `summary`, `model_dump`
                             the dense part

data
  `data`, `distribute`       record formats, parsers, datasets; files that workers share
  `input`                    generated examples

features
  `feature`, `native_task`   slots and columns; the task to derive from
  `feature_utils`            gradients of rows and of dense variables

tables
  `entry`, `learning_rate_functions`
                             optimizers, initializers, compressors, learning rates of rows
  `hash_table_ops`, `hash_table_utils`, `multi_hash_table_ops`, `multi_type_hash_table`,
  `hash_filter_ops`          one table, groups of tables, occurrence filters
  `distributed_ps_factory`, `distributed_ps`, `distributed_ps_near`, `distributed_ps_sync`, `tables`
                             in this process, on parameter servers, over ranks
  `embedding_combiners`      how the vectors of an example become one
  `test_utils`               tables and servers for tests

checkpoints
  `checkpoints`, `save_utils`, `basic_restore_hook`, `dense_reload_utils`
                             saving and restoring files

ranks
  `hvd_lib`, `distribution_utils`, `ranks`
                             what the processes of synchronous training agree on

cluster
  `net_utils`, `yarn_runtime`, `zk_utils`, `consul`, `mlp_utils`, `service_discovery`,
  `cluster_manager`          where processes are and how they find each other
  `serving`, `distributed_serving_ops`
                             remote lookups, rows pushed to serving replicas

graph
  `utils`, `nested_tensors`, `tensor_utils`, `ragged_utils`, `graph_meta`, `graph_utils`,
  `clip_ops`                 tensors, nests of them, graphs, clipped gradients
  `prefetch_queue`, `variables`, `barrier_ops`, `device_utils`, `session_run_hooks`, `graph`
                             queues, cached variables, barriers, devices, sessions
  `graph_estimator`          trains, evaluates and exports what a model function builds
  `metric`                   metrics

ops
  `runtime`                  the C++ engine; `runtime.ops` holds the TensorFlow kernels
  `distribution_ops`, `file_ops`, `gen_seq_mask`, `logging_ops`, `remote_predict_ops`,
  `static_reshape_op`, `touched_key_set_ops`, `ops`
                             one module per group of kernels
  `gpu_table`, `gpu`         tables in the memory of a GPU, for any library of arrays

base
  `settings`, `env_utils`, `gflags_utils`, `native_task_context`, `signal_utils`,
  `monolith_export`          configuration, environment variables, flags, roles, logs, signals
"""

from monolith import _install

_install.refuse_strangers()
_install.check_build()

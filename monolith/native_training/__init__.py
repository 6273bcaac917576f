"""The library, by layer: a module imports from its own layer and from those above it.

`docs/design.md` draws and explains the layers. A model author needs the layer of that name only.

Kernels and engine
  `runtime`                  the C++ engine; `runtime.ops` holds the TensorFlow kernels

Graph helpers
  `utils`, `nested_tensors`, `tensor_utils`, `ragged_utils`, `graph_meta`, `graph_utils`
                             tensors, nests of them, graphs
  `prefetch_queue`, `variables`, `barrier_ops`, `session_run_hooks`, `sync_hooks`, `hooks`
                             queues, cached variables, barriers, hooks
  `device_utils`, `env_utils`, `gflags_utils`, `signal_utils`, `native_task_context`
                             devices, environment variables, flags, signals, the task in progress
  `distribution_ops`, `clip_ops`, `file_ops`, `gen_seq_mask`, `logging_ops`, `static_reshape_op`,
  `remote_predict_ops`, `touched_key_set_ops`
                             one module per group of kernels
  `metric`, `summary`, `alert`, `distribute`, `model_dump`
                             metrics, summaries, alerts, shared queues of files
  `monolith_export`          marks what is public

Cluster and ranks
  `net_utils`, `yarn_runtime`, `zk_utils`, `consul`, `mlp_utils`, `service_discovery`,
  `cluster_manager`, `distribution_utils`, `hvd_lib`
                             where processes are and how they find each other
  `ranks`                    what the processes of synchronous training agree on

Checkpoints and serving transport
  `checkpoints`, `save_utils`, `basic_restore_hook`, `dense_reload_utils`
                             saving and restoring files
  `serving`, `distributed_serving_ops`
                             remote lookups, rows pushed to serving replicas

Tables
  `entry`                    optimizers, initializers, compressors, learning rates of rows
  `hash_table_ops`, `hash_table_utils`, `multi_hash_table_ops`, `multi_type_hash_table`,
  `hash_filter_ops`          one table, groups of tables, occurrence filters
  `distributed_ps_factory`, `distributed_ps`, `distributed_ps_sync`, `tables`
                             in this process, on parameter servers, over ranks
  `embedding_combiners`      how the vectors of an example become one

Model author
  `feature`, `native_task`, `native_model`, `model`, `models`
                             slots and columns; the classes to derive from
  `layers`, `losses`, `optimizers`, `learning_rate_functions`, `feature_utils`
                             the dense part and its gradients
  `data`                     record formats, parsers, datasets

Drivers
  `cpu_training`, `estimator`, `runner_utils`, `driver`
                             run a task here, on servers or on ranks
  `sync_training_hooks`      hooks of synchronous training
  `model_export`             SavedModels
  `debugging`, `ps_benchmark`
                             look into a training run, measure its servers
  `demo`, `demos`, `input`   models to start from, and their data
  `test_utils`, `cpu_training_distributed_test_binary`
                             what tests of models and drivers use
"""

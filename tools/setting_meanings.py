"""Explains every environment variable in one line; `list_settings.py` wants it complete.

It also tells which way to set something is for whom.
"""

_RANK = "Rank of this process, from the launcher of synchronous training."
_LOCAL_RANK = "Rank of this process on its host, from the launcher."
_SIZE = "Number of ranks, from the launcher."
_LOCAL_SIZE = "Number of ranks on this host, from the launcher."

# Door, who uses it, what wins.
DOORS = (
  (
    "`estimator.RunConfig`",
    "who trains a model from a Python program: the fields that most programs need",
    "a field that differs from its default wins over the flag",
  ),
  (
    "`runner_utils.RunnerConfig`",
    "who writes a runner: every field, with its meaning [below](#runner_utilspy)",
    "a field left at its default takes its flag; one that is set and has no effect in this kind of "
    "training is named in a warning when training starts",
  ),
  (
    "flags",
    "who starts a program from a command line or a job description: the same fields",
    "they fill in what the program leaves at its default",
  ),
  (
    "`params` of a model, `task.p`",
    "who writes the model: what belongs to it, such as `train.max_steps`",
    "`--params_override`, a JSON object of dotted names, is set after the program's own",
  ),
  (
    "environment variables",
    "who operates machines: launchers, addresses, limits, libraries, builds",
    "each has its line in the tables below",
  ),
)
RETRIES = (
  "Three fields have other defaults in `RunConfig` than in `RunnerConfig`. A `RunConfig` hands on",
  "only values that differ from its own defaults, and logs a warning if it was given a default",
  "that has no effect; set that on what `to_runner_config()` returns.",
  "",
  "| field | `RunConfig` | `RunnerConfig`, which counts | meaning of the latter |",
  "|---|---|---|---|",
  "| `max_retry_times` | 6 | 0 | a worker retries 6 times after the cluster has changed with "
  "`partial_recovery` on parameter servers, else never |",
  "| `retry_wait_in_secs` | 5 | 30 | seconds before each retry |",
  "| `partial_recovery` | `False` | `None` | on in real-time training, else off |",
)

MEANINGS: dict[str, str] = {
  "CI": "`true`: tests without the programs that `make test-all` installs fail instead of being "
  "skipped.",
  "CLOUDNATIVE_INET_ADDR": "Address of this host, the first of a comma-joined list; wins over "
  "`YARN_INET_ADDR` and the host's name.",
  "CONSUL_HTTP_HOST": "Host of the Consul agent; without it `TCE_HOST_IP`, a socket file or "
  "127.0.0.1.",
  "CONSUL_HTTP_PORT": "Port of the Consul agent; 2280.",
  "CUDA_DEVICE_ORDER": "Set to `PCI_BUS_ID` for ranks that choose their GPU.",
  "CUDA_HOME": "Where CUDA is installed, for builds; otherwise nvcc of `PATH`, PyPI or "
  "`/usr/local/cuda`.",
  "CUDA_VISIBLE_DEVICES": "GPUs of this process; set to the local rank under a launcher unless it "
  "is there.",
  "CXX": "The C++ compiler; otherwise the first of `g++`, `c++`, `clang++`.",
  "GRPC_FAIL_FAST": "Set to `true` unless it is there: calls to a server that is gone fail and are "
  "retried instead of waiting forever.",
  "HADOOP_HDFS_HOME": "Where TensorFlow finds HDFS; nothing is set here.",
  "HOROVOD_LOCAL_RANK": _LOCAL_RANK,
  "HOROVOD_LOCAL_SIZE": _LOCAL_SIZE,
  "HOROVOD_RANK": _RANK,
  "HOROVOD_SIZE": _SIZE,
  "KAFKA_BROKER_LIST": "Brokers to which metrics of a model go; without it none are sent.",
  "KAFKA_TOPIC_NAME": "Topic to which metrics of a model go; without it none are sent.",
  "KAFKA_HOME": "Folder of an unpacked Kafka, from which the realtime demo starts its broker.",
  "LOCAL_RANK": _LOCAL_RANK,
  "LOCAL_WORLD_SIZE": _LOCAL_SIZE,
  "MALLOC_ARENA_MAX": "Set to 2 in the op fuzzer unless it is there: arenas reserve address space.",
  "MLP_<role>_0_PORT": "Port of the first rank of a role; the others count up from it.",
  "MASTER_ADDR": "Machine where ranks without Horovod meet: that of rank 0.",
  "MASTER_PORT": "Port where they meet there.",
  "MLP_<role>_<index>_PORT": "Port of a task.",
  "MLP_<role>_<index>_[PRIMARY_]HOST": "Host of a task.",
  "MLP_<role>_ALL_[PRIMARY_]ADDRS": "Comma-joined `host:port` of all tasks of a role.",
  "MLP_<role>_ALL_[PRIMARY_]HOSTS": "Comma-joined hosts of all tasks of a role.",
  "MLP_<role>_NUM": "Number of tasks of a role.",
  "MLP_CPU": "Number of cores of this container.",
  "MLP_DEBUG_PORT": "Port kept for debugging, for information.",
  "MLP_ENTRYPOINT_DIR": "Folder of the job's program, for information.",
  "MLP_FRAMEWORK": "Framework of the job, for information.",
  "MLP_GPU": "Number of GPUs of this container.",
  "MLP_GPU_TYPE": "Type of those GPUs.",
  "MLP_LOG_PATH": "Folder of logs, for information.",
  "MLP_MEM": "Memory of this container.",
  "MLP_PORT": "Port of this task; ranks add their rank to it.",
  "MLP_ROLE": "Role of this task.",
  "MLP_ROLE_INDEX": "Index of this task inside its role.",
  "MLP_SSH_PORT": "Port of the SSH daemon, for information.",
  "MLP_TASK_CMD": "Command of the task, for information.",
  "MONOLITH_BAD_GRADIENTS": "Gradients, and values that are assigned, with NaN or infinity: `stop` "
  "(default) fails the step and names the feature, or table and ids; `skip` leaves those rows "
  "alone, with a warning; `ignore` writes them. The same in drivers, `fit`, loops, `HashTable` and "
  "on GPUs, where a later step fails.",
  "MONOLITH_BENCHMARK_CPU_TIME": "`1`: the table's benchmark measures CPU time; set by its option.",
  "MONOLITH_CUDA": "`1`: builds compile GPU kernels without a GPU, too; `0`: they leave them out "
  "beside one.",
  "MONOLITH_CUDA_LIBRARY": "Path of another build of `libmonolith_cuda.so` to load.",
  "MONOLITH_DISABLE_HUGE_PAGES": "Switch: tables use small pages only.",
  "MONOLITH_ENGINE_LIBRARY": "Path of another build of `libmonolith_engine.so` to load.",
  "MONOLITH_FLOW_PATIENCE_SECONDS": "How long flows of a split dataset wait for a reader; 10.",
  "MONOLITH_FORCE_GPU_COMPATIBLE": "Switch, on by default: host memory of ranks is pinned.",
  "MONOLITH_FUZZ_GIB": "Address space of the op fuzzer in GiB beyond its start; 4, 0: no limit.",
  "MONOLITH_FUZZ_SEED": "First seed of the op fuzzer; 0.",
  "MONOLITH_GPU_FEATURE_FACTORY_FUSION_LEVEL": "`1` (default): one op pools all features on a GPU; "
  "otherwise one per feature.",
  "MONOLITH_GPU_TABLE_BYTES": "Bytes of the GPU that the tables of a process may have; 70 % of it.",
  "MONOLITH_GRPC_WORKER_SERVICE_HANDLER_MULTIPLIER": "Set from the flag of that name, for "
  "TensorFlow builds that read it.",
  "MONOLITH_HOST_SHARD_N": "Number of serving processes that share the parameter servers of a "
  "model; 1.",
  "MONOLITH_KAFKA": "Comma-joined `host:port` of brokers, which the realtime demo uses instead "
  "of its own.",
  "MONOLITH_KAFKA_VERSIONS": "Comma-joined `host:port=version` of Kafka brokers; those before "
  "0.11 have to be named, as librdkafka cannot find out.",
  "MONOLITH_KAFKA_ZOOKEEPER": "`host:port` of their ZooKeeper, which brokers before 0.10.1 need to "
  "create topics.",
  "MONOLITH_LIBRDKAFKA": "Path of librdkafka; otherwise that of `confluent-kafka` or the system.",
  "MONOLITH_LIBZSTD": "Path of libzstd; otherwise the system's.",
  "MONOLITH_METRIC_PREFIX": "Prefix of all metric names.",
  "MONOLITH_METRIC_SINK": "`logging`: metrics are logged.",
  "MONOLITH_OP_LIBRARY": "Path of another build of the op library to load.",
  "MONOLITH_PARQUET_LIBRARY": "Path of another build of `libmonolith_parquet.so` to load.",
  "MONOLITH_PORTABLE_WHEEL": "`1`: the `horovod` extra of the wheel names PyPI's Horovod instead "
  "of this checkout's.",
  "MONOLITH_RANKS_ENGINE": "What carries out the exchanges of synchronous ranks: `horovod` or "
  "`tensorflow`; by default Horovod where it is installed and what starts the ranks speaks to it.",
  "MONOLITH_ROOT_LOG_INTERVAL": "Steps between logs of rank 0; the configuration's by default.",
  "MONOLITH_SAVE_SUMMARY_INTERVAL": "Steps between summaries of rank 0; the configuration's by "
  "default.",
  "MONOLITH_SERVING_COMMAND": "Command line of the server that agents start; otherwise "
  "`python -m monolith.serving.model_server`.",
  "MONOLITH_SKIP_ALLREDUCE": "Switch: dense gradients are not averaged over ranks.",
  "MONOLITH_SOAK": "`1`: the tests of reliability run at full length.",
  "MONOLITH_SOAK_KILLS": "Kills of processes of the realtime demo in `make soak`; 200 by default.",
  "MONOLITH_SYNC_CONTROL_STEPS": "Steps between two looks of rank 0 for the files by which an "
  "operator saves or stops all ranks; 0: never.",
  "MONOLITH_VERBOSE": "`1`: show what TensorFlow says about deprecation and its progress as well.",
  "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD": "`1`: rank 0 of more than four owns no ids. On by default "
  "in `distribution_ops`, off in the driver.",
  "MONOLITH_SYNC_EOF": "Switch: ranks agree on the end of data; on by default with several ranks, "
  "off for streams.",
  "MONOLITH_SYNC_SUM_GRADIENTS": "Switch: gradients of an id are summed over ranks before the "
  "optimizer's step.",
  "MONOLITH_TENSORFLOW": "The minor version of TensorFlow to build for, or `none`; otherwise that "
  "of the environment, or the default of the Python.",
  "MONOLITH_TABLE_SEED": "Seed of hashes and random initializers; random per process without it.",
  "MONOLITH_SHARED_MEMORY": "`0`: what a worker and a server of one machine send each other goes "
  "by the network, not through memory that they share.",
  "MONOLITH_UPDATE_PER_OCCURRENCE": "`1`: without servers, one optimizer step per occurrence of an "
  "id instead of one per batch.",
  "MONOLITH_WITH_ALLREDUCE_FP16": "Switch: dense gradients are exchanged in half precision.",
  "MONOLITH_WITH_ALLREDUCE_FUSION": "How dense gradients are exchanged: `one` buffer, `grouped`, "
  "or one by one (default).",
  "MONOLITH_WITH_BYTEPS": "Switch: BytePS instead of Horovod.",
  "MONOLITH_WITH_BYTEPS_BCAST": "`-1`: with BytePS, variables are not broadcast at the start.",
  "MONOLITH_WITH_HOROVOD": "Switch: there are ranks to talk to; otherwise an initialised Horovod "
  "or the launcher tells.",
  "MONOLITH_WITH_HOROVOD_<stage>_G2G": "Switch, on by default: the all-to-all of stage `FID`, "
  "`FWD` or `BWD` may run on the GPU.",
  "MPI_LOCALNRANKS": _LOCAL_SIZE,
  "MPI_LOCALRANKID": _LOCAL_RANK,
  "MY_HOST_IP": "IPv4 address of the host; with `MY_HOST_IPV6` alone it counts as IPv6 only.",
  "MY_HOST_IPV6": "IPv6 address of the host.",
  "MY_POD_IP": "IPv4 address of the pod, where `MY_HOST_IP` is not there.",
  "MY_POD_NAME": "Name of this container: its id in ZooKeeper, and its replica id as a hash.",
  "NPM_CONFIG_REGISTRY": "The same as `npm_config_registry`.",
  "OMPI_COMM_WORLD_LOCAL_RANK": _LOCAL_RANK,
  "OMPI_COMM_WORLD_LOCAL_SIZE": _LOCAL_SIZE,
  "OMPI_COMM_WORLD_RANK": _RANK,
  "OMPI_COMM_WORLD_SIZE": _SIZE,
  "PARITY_DATA": "Folder of the data of the TPU runner's example; `parity_data`.",
  "PATH": "Where the build looks for protoc after the folder of Python.",
  "PMI_LOCAL_RANK": _LOCAL_RANK,
  "PMI_LOCAL_SIZE": _LOCAL_SIZE,
  "PMI_RANK": _RANK,
  "PMI_SIZE": _SIZE,
  "PORT2": "Port of the agent, for the agent and for the server beside it. `PORT`, `PORT3` and "
  "`PORT4` are the server's ports for a load balancer, gRPC and HTTP, `PORT5` to `PORT10` those of "
  "the other roles of a pod; free ones by default.",
  "PRIMUS_AM_RPC_HOST": "Host of the Primus application master.",
  "PRIMUS_AM_RPC_PORT": "Port of the Primus application master.",
  "REPLICA_ID": "Index of this serving process among those that host the same, for agents v3.",
  "SHARD_ID": "Index of this serving process among those that share the parameter servers.",
  "TCE_CLUSTER": "Cluster of this serving process, unless `TCE_LOGICAL_CLUSTER` is set.",
  "TCE_HOST_IP": "Host of the Consul agent where `CONSUL_HTTP_HOST` is not there.",
  "TCE_INTERNAL_IDC": "Data centre of this serving process.",
  "TCE_LOGICAL_CLUSTER": "Cluster of this serving process.",
  "TCE_PHYSICAL_CLUSTER": "Cluster of this serving process, unless one of the other two is set.",
  "TCE_PSM": "Name of the service this serving process belongs to.",
  "TENSORBOARD_LOG_PATH": "Folder of profiles; `/tensorboard_logs/`.",
  "TEST_TMPDIR": "Folder for files of tests; a fresh one for every test.",
  "TF_CONFIG": "TensorFlow's description of the cluster; set and removed around estimators.",
  "TF_CPP_MIN_LOG_LEVEL": "Set unless it is there: how much TensorFlow logs.",
  "TF_CUDA_COMPUTE_CAPABILITIES": "GPUs that builds compile for; `8.0,9.0`.",
  "TF_FORCE_GPU_ALLOW_GROWTH": "Set to `true` with the op library, unless it is set: TensorFlow "
  "takes memory of a GPU as it needs it and leaves the rest to tables.",
  "TF_GRPC_WORKER_CACHE_THREADS": "Set from the flag of that name, for TensorFlow.",
  "TF_USE_LEGACY_KERAS": "`1`: `tf.keras` is Keras 2, the package `tf_keras`; a benchmark sets it "
  "for the model in Keras.",
  "TF_XLA_FLAGS": "Not empty: sessions of ranks compile with XLA.",
  "TORCHELASTIC_RESTART_COUNT": "Set by `torchrun`: part of the keys in its store.",
  "TORCHELASTIC_RUN_ID": "The same.",
  "TORCHELASTIC_USE_AGENT_STORE": "`True`, set by `torchrun`: its store listens at `MASTER_PORT`.",
  "WORLD_SIZE": _SIZE,
  "XDG_CACHE_HOME": "Where built Horovod wheels are kept; `~/.cache`.",
  "YARN_INET_ADDR": "Address of this host, where `CLOUDNATIVE_INET_ADDR` is not there.",
  "ZK_AUTH": "ZooKeeper credentials, `user:password`; never logged.",
  "zk_servers": "ZooKeeper addresses, where the flag `zk_server` is empty.",
  "npm_config_registry": "Registry of npm packages from which the realtime demo downloads a Kafka; "
  "otherwise that of `~/.npmrc`, or npm's own.",
}

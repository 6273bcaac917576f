"""Wire format: every message, field, number, type, label and default of the compiled protos.

Files, RPCs and op attributes of other programs depend on these tables, so they are written out here
by hand instead of being derived from the sources. A row is

    field  number  type  label  [default]

where label is `opt`, `req` or `rep` (proto2), `one` (proto3, no presence), `packed` (repeated and
packed on the wire), `map`, or `in:<name>` for a member of the oneof <name>. Types of the same
package are written without it. `enum NAME A=0 B=1` lists the values in order of declaration.
"""

import importlib
import os
import pathlib
import struct
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

PROTO_ROOT = pathlib.Path(__file__).absolute().parents[2] / "proto"
NATIVE = "monolith/native_training"
TABLE = f"{NATIVE}/runtime/hash_table"

# Path in the descriptor -> (syntax, package, imports); a public import starts with "+".
FILES = {
  "idl/matrix/proto/line_id.proto": ("proto2", "idl.matrix.proto", []),
  "idl/matrix/proto/feature.proto": ("proto2", "idl.matrix.proto", []),
  "idl/matrix/proto/proto_parser.proto": (
    "proto2",
    "parser.proto",
    ["idl/matrix/proto/feature.proto", "idl/matrix/proto/line_id.proto"],
  ),
  "idl/matrix/proto/example.proto": (
    "proto3",
    "monolith.io.proto",
    ["idl/matrix/proto/line_id.proto"],
  ),
  f"{NATIVE}/data/data_op_config.proto": ("proto2", "monolith.native_training.data.config", []),
  f"{NATIVE}/data/transform/transform_config.proto": (
    "proto2",
    "monolith.native_training.data",
    [],
  ),
  f"{NATIVE}/proto/ckpt_info.proto": ("proto3", "monolith", []),
  f"{NATIVE}/proto/debugging_info.proto": ("proto3", "", []),
  f"{NATIVE}/proto/primus_am_service.proto": (
    "proto3",
    "primus",
    ["google/protobuf/wrappers.proto"],
  ),
  f"{NATIVE}/monolith_checkpoint_state.proto": ("proto2", "monolith.native_training", []),
  f"{NATIVE}/hooks/ckpt_hooks.proto": ("proto2", "monolith.hooks", []),
  f"{NATIVE}/hooks/controller_hooks.proto": ("proto2", "monolith", []),
  f"{NATIVE}/hooks/server/service.proto": ("proto3", "", []),
  f"{NATIVE}/model_export/export.proto": ("proto2", "monolith.model_export", []),
  f"{NATIVE}/model_dump/monolith_model.proto": (
    "proto3",
    "monolith.native_training.model_dump",
    [
      f"+{TABLE}/compressor/float_compressor.proto",
      f"+{TABLE}/initializer/initializer_config.proto",
      f"+{TABLE}/optimizer/optimizer.proto",
    ],
  ),
  f"{NATIVE}/alert/alert.proto": ("proto2", "monolith", []),
  f"{NATIVE}/runtime/ops/logging_ops.proto": ("proto2", "tensorflow.monolith_tf", []),
  f"{NATIVE}/runtime/parameter_sync/parameter_sync.proto": (
    "proto2",
    "monolith.parameter_sync",
    [],
  ),
  "monolith/agent_service/agent_service.proto": ("proto3", "monolith.serving.agent_service", []),
  f"{TABLE}/embedding_hash_table.proto": (
    "proto2",
    "monolith.hash_table",
    [
      f"+{TABLE}/compressor/float_compressor.proto",
      f"+{TABLE}/initializer/initializer_config.proto",
      f"+{TABLE}/optimizer/optimizer.proto",
    ],
  ),
  f"{TABLE}/initializer/initializer_config.proto": ("proto2", "monolith.hash_table", []),
  f"{TABLE}/compressor/float_compressor.proto": ("proto2", "monolith.hash_table", []),
  f"{TABLE}/optimizer/optimizer.proto": ("proto2", "monolith.hash_table", []),
  f"{NATIVE}/hash_table_ops.proto": ("proto2", "monolith", []),
  f"{NATIVE}/multi_hash_table_ops.proto": ("proto2", "monolith", []),
}

ARENA_FILES = {
  "idl/matrix/proto/example.proto",
  f"{NATIVE}/model_dump/monolith_model.proto",
  "monolith/agent_service/agent_service.proto",
}

TABLES = {
  "idl/matrix/proto/line_id.proto": """
    message LineId
      uid                   2     fixed64  opt
      req_time              3     int64    opt
      item_id               4     fixed64  opt
      actions               6     int32    packed
      chnid                 19    int64    opt
      pre_actions           23    int32    packed
      sample_rate           27    float    opt     1.0
      special_strategies    39    int32    rep
      device_type           41    string   opt
      cid                   48    string   opt
      user_id               49    string   opt
      is_draw               87    bool     opt
      rank                  145   int32    opt
      data_source_name      235   string   opt
      did                   5001  string   opt
      req_id                5002  string   opt
      vid                   5003  string   opt
      video_play_time       5004  float    opt
      video_finish_percent  5005  float    opt
      read_count            5006  int64    opt
      stay_time             5007  float    opt
      q_pred                5008  float    opt
    message MapStringFloatEntry
      key                   1     string   opt
      value                 2     float    opt
  """,
  "idl/matrix/proto/feature.proto": """
    message Feature
      name         1  string       opt
      fid          2  fixed64      packed
      float_value  3  float        packed
      int64_value  4  int64        packed
      bytes_value  5  bytes        rep
      fid_list     6  Fixed64List  rep
      float_list   7  FloatList    rep
      int64_list   8  Int64List    rep
      bytes_list   9  BytesList    rep
    message Fixed64List
      value        1  fixed64      packed
    message FloatList
      value        1  float        packed
    message Int64List
      value        1  int64        packed
    message BytesList
      value        1  bytes        rep
  """,
  "idl/matrix/proto/proto_parser.proto": """
    message Instance
      fid              1    fixed64                   packed
      value            2    float                     packed
      label            3    float                     packed
      instance_weight  4    float                     opt
      line_id          5    idl.matrix.proto.LineId   opt
      dense            6    float                     packed
      label_tag        7    LabelTag                  rep
      next_fid         8    fixed64                   packed
      feature          9    idl.matrix.proto.Feature  rep
      data_source_key  100  uint32                    opt
    message InstanceWrapper
      instance         1    bytes                     opt
      data_source      2    string                    opt
    message LabelTag
      key              1    int32                     opt
      val              2    float                     opt
    message Request
      req_id           1    string                    opt
      ut               2    int32                     opt
      uid              3    fixed64                   opt
      req_time         4    int64                     opt
      instances        5    Instance                  rep
      user             6    string                    opt
  """,
  "idl/matrix/proto/example.proto": """
    message FidList
      value                   1    fixed64                    packed
    message FloatList
      value                   1    float                      packed
    message DoubleList
      value                   1    double                     packed
    message Int64List
      value                   1    int64                      packed
    message BytesList
      value                   1    bytes                      rep
    message FidLists
      list                    1    FidList                    rep
    message FloatLists
      list                    1    FloatList                  rep
    message DoubleLists
      list                    1    DoubleList                 rep
    message Int64Lists
      list                    1    Int64List                  rep
    message BytesLists
      list                    1    BytesList                  rep
    message Feature
      fid_v1_list             1    FidList                    in:type
      fid_v2_list             2    FidList                    in:type
      float_list              3    FloatList                  in:type
      double_list             4    DoubleList                 in:type
      int64_list              5    Int64List                  in:type
      bytes_list              6    BytesList                  in:type
      fid_v2_lists            7    FidLists                   in:type
      float_lists             8    FloatLists                 in:type
      double_lists            9    DoubleLists                in:type
      int64_lists             10   Int64Lists                 in:type
      bytes_lists             11   BytesLists                 in:type
      int64_value             12   int64                      in:type
      float_value             13   float                      in:type
      double_value            14   double                     in:type
      bytes_value             15   bytes                      in:type
      fid_v1_lists            16   FidLists                   in:type
    message FeatureMap
      feature_map             1    map<string,Feature>        map
    message RawFeature
      feature                 1    Feature                    rep
    message NamedFeature
      name                    1    string                     one
      feature                 2    Feature                    one
      id                      3    int32                      one
      sorted_id               6    int32                      one
    message NamedRawFeature
      name                    1    string                     one
      raw_feature             2    RawFeature                 one
      id                      3    int32                      one
    message Example
      named_feature           1    NamedFeature               rep
      named_raw_feature       2    NamedRawFeature            rep
      line_id                 100  idl.matrix.proto.LineId    one
      label                   101  float                      packed
      instance_weight         102  float                      one
      data_source_key         103  uint32                     one
    message NamedFeatureList
      name                    1    string                     one
      feature                 2    Feature                    rep
      type                    3    FeatureListType            one
      id                      4    int32                      one
    message NamedRawFeatureList
      name                    1    string                     one
      raw_feature             2    RawFeature                 rep
      type                    3    FeatureListType            one
      id                      4    int32                      one
    message ExampleBatch
      named_feature_list      1    NamedFeatureList           rep
      named_raw_feature_list  2    NamedRawFeatureList        rep
      batch_size              3    int32                      one
      data_source_key         100  uint32                     one
    message ExampleBatchRowMajor
      shared_feature          1    NamedFeature               rep
      shared_raw_feature      2    NamedRawFeature            rep
      example                 3    Example                    rep
    message FeatureData
      gid                     1    int64                      one
      fids                    2    int64                      packed
      feature_columns         3    NamedFeature               rep
      origin_cnt              4    int64                      one
      sample_cnt              5    int64                      one
    message ChannelCache
      channel_id              1    int64                      one
      feature_datas           2    FeatureData                rep
    message FilterValues
      float_list              1    FloatList                  in:type
      int64_list              2    Int64List                  in:type
      bytes_list              3    BytesList                  in:type
    message SliceConfig
      feature_name            1    string                     one
      start                   2    int32                      one
      end                     3    int32                      one
      feature_idx             4    int32                      one
      slice_idx               5    int32                      one
      pooling_type            10   PoolingType                one
      max_sequence_length     11   int32                      one
    message TensorShape
      dims                    1    int32                      packed
    message OutConfig
      slice_configs           1    SliceConfig                rep
      out_type                2    OutType                    one
      shape                   3    TensorShape                rep
    message FeatureConfig
      table                   1    string                     one
      pooling_type            2    PoolingType                one
      slice_dims              3    int32                      packed
      max_sequence_length     4    int32                      one
    message FeatureConfigs
      feature_configs         1    map<string,FeatureConfig>  map
      out_configs             2    map<string,OutConfig>      map
    enum FeatureListType INDIVIDUAL=0 SHARED=1
    enum PoolingType SUM=0 MEAN=1 FIRSTN=3
    enum OutType CONCAT=0 STACK=1 ADDN=2 NONE=3
  """,
  f"{NATIVE}/data/data_op_config.proto": """
    message TaskLabelConf
      pos_actions      1  int32              rep
      neg_actions      2  int32              rep
      sample_rate      3  float              opt  1.0
    message LabelConf
      conf             1  TaskLabelConf      rep
    message TFRecordFeatureDescription
      sparse_features  1  map<string,int32>  map
      dense_features   2  string             rep
      label            3  string             opt
      instance_weight  4  string             opt
  """,
  f"{NATIVE}/data/transform/transform_config.proto": """
    message FilterByFidConfig
      has_fids            1  uint64                              rep
      filter_fids         2  uint64                              rep
      select_fids         3  uint64                              rep
    message FilterByActionConfig
      has_actions         1  int32                               rep
    message AddLabelConfig
      task_label_configs  1  AddLabelConfig.TaskLabelConfig      rep
      negative_value      2  float                               opt  0.0
      new_sample_rate     3  float                               opt  1.0
    message AddLabelConfig.TaskLabelConfig
      pos_actions         1  int32                               rep
      neg_actions         2  int32                               rep
      sample_rate         3  float                               opt  1.0
    message FilterByLabelConfig
      thresholds          1  float                               rep
    message FilterByValueConfig
      field_name          1  string                              req
      op                  2  string                              req
      float_operand       3  float                               rep
      int_operand         4  int64                               rep
      string_operand      5  string                              rep
      keep_empty          6  bool                                opt  false
      operand_filepath    7  string                              opt
    message BasicTransformConfig
      filter_by_fid       1  FilterByFidConfig                   in:type
      filter_by_action    2  FilterByActionConfig                in:type
      filter_by_label     3  FilterByLabelConfig                 in:type
      add_label           4  AddLabelConfig                      in:type
      filter_by_value     5  FilterByValueConfig                 in:type
    message LogicalOrTransformConfig
      x                   1  BasicTransformConfig                req
      y                   2  BasicTransformConfig                req
    message TransformConfig
      configs             1  TransformConfig.OneTransformConfig  rep
    message TransformConfig.OneTransformConfig
      basic_config        1  BasicTransformConfig                in:type
      logical_or_config   2  LogicalOrTransformConfig            in:type
  """,
  f"{NATIVE}/proto/ckpt_info.proto": """
    message CkptInfo
      slot_counts     1  map<int32,int64>   map
      feature_counts  2  map<string,int64>  map
  """,
  f"{NATIVE}/proto/debugging_info.proto": """
    message DebuggingInfo
      cluster               1  Cluster            one
      num_workers           2  uint32             one
      feature_name_configs  3  FeatureNameConfig  rep
    message Cluster
      chief_addr            1  string             one
      ps_addrs              2  string             rep
    message FeatureNameConfig
      feature_name          1  string             one
      config_str            2  string             one
  """,
  f"{NATIVE}/proto/primus_am_service.proto": """
    message PonyHeartbeatRequest
    message PonyHeartbeatResponse
      state                         1  PonyState                                           one
    message PonyGetPSInfoRequest
    message PonyGetPSInfoResponse
      ps_info                       1  PSInfo                                              rep
    message PSInfo
      ip                            1  string                                              one
      ports                         2  int32                                               packed
      shard_id                      3  int32                                               one
      name                          4  string                                              one
    message PonyStartWorkerRequest
    message PonyStartWorkerResponse
    message SucceedRequest
      exit_code                     1  int32                                               one
      diagnose                      2  string                                              one
      graceful_shutdown_timeout_ms  3  google.protobuf.Int64Value                          one
    message SucceedResponse
    message KillRequest
      exit_code                     1  int32                                               one
      diagnose                      2  string                                              one
      graceful_shutdown_timeout_ms  3  google.protobuf.Int64Value                          one
    message KillResponse
    message SuspendRequest
      snapshot_id                   1  int32                                               one
    message SuspendResponse
    message SuspendStatusRequest
    message SuspendStatusResponse
      succeed                       1  bool                                                one
      message                       2  string                                              one
    message ResumeRequest
    message ResumeResponse
    message GetSnapshotRequest
      snapshot_id                   1  int32                                               one
    message GetSnapshotResponse
      available                     1  bool                                                one
      dir                           2  string                                              one
    message ProgressRequest
    message ProgressResponse
      progress                      1  float                                               one
    message StarvingRequest
    message StarvingResponse
      starving                      1  bool                                                one
    message StatusRequest
    message StatusResponse
      app_id                        1  string                                              one
      final_status                  2  string                                              one
      track_url                     3  string                                              one
    message TaskTimePointRequest
    message TaskTimePointResponse
      time_point                    1  string                                              one
    message CreateSavepointRequest
      savepoint_dir                 1  string                                              one
    message CreateSavepointResponse
      code                          1  int32                                               one
      message                       2  string                                              one
      savepoint_id                  3  string                                              one
    message CreateSavepointStatusRequest
      savepoint_restore_id          1  string                                              one
    message CreateSavepointStatusResponse
      code                          1  int32                                               one
      message                       2  string                                              one
      create_savepoint_state        3  CreateSavepointStatusResponse.CreateSavepointState  one
    enum PonyState PS_REGISTERING=0 PS_REGISTERED=1 RUNNING=2 FINISH=3
    enum CreateSavepointStatusResponse.CreateSavepointState PENDING=0 RUNNING=1 SUCCEEDED=2 FAILED=3
  """,
  f"{NATIVE}/monolith_checkpoint_state.proto": """
    message MonolithCheckpointState
      exempt_model_checkpoint_paths   1  string                                 rep
      last_checkpoint_save_timestamp  2  int64                                  opt
      builtin_hash_table_type         3  MonolithCheckpointState.HashTableType  opt
    enum MonolithCheckpointState.HashTableType UNKNOWN=0 CUCKOO_HASH_MAP=1 MULTI_CUCKOO_HASH_MAP=2
  """,
  f"{NATIVE}/hooks/ckpt_hooks.proto": """
    message WorkerCkptInfo
      global_step  1  int64  opt
  """,
  f"{NATIVE}/hooks/controller_hooks.proto": """
    message ControllerHooksProto
      action  1  ControllerHooksProto.Action  opt
    enum ControllerHooksProto.Action UNKNOWN=0 TRIGGER_SAVE=1 STOP=2
  """,
  f"{NATIVE}/hooks/server/service.proto": """
    message StopTrainingRequest
    message StopTrainingResponse
    message ResumeTrainingRequest
    message ResumeTrainingResponse
    message GetBlockStatusRequest
    message GetBlockStatusResponse
      blocked_indices    1  int32  packed
      unblocked_indices  2  int32  packed
    message SaveCheckpointRequest
    message SaveCheckpointResponse
    message GetTrainingStatusRequest
    message GetTrainingStatusResponse
      global_step        1  int64  one
  """,
  f"{NATIVE}/model_export/export.proto": """
    message ServingEntry
      export_dir   1  string        opt
      global_step  2  int64         opt
    message ServingModelState
      entries      1  ServingEntry  rep
  """,
  f"{NATIVE}/model_dump/monolith_model.proto": """
    message FeatureColumn
      feature_name               1   string                                    one
      occurrence_threshold       2   int64                                     one
      expire_time                3   int64                                     one
      max_seq_length             4   int32                                     one
      shared_name                5   string                                    one
      combiner                   6   string                                    one
    message LookupEmbeddingSlice
      features                   1   string                                    one
      slice_name                 2   string                                    one
      slice_dim                  3   int32                                     one
      initializer                4   monolith.hash_table.InitializerConfig     one
      optimizer                  5   monolith.hash_table.OptimizerConfig       one
      compressor                 6   monolith.hash_table.FloatCompressorConfig  one
      output_tensor_names        7   string                                    rep
      group_out_type             8   string                                    one
      out_type                   9   string                                    one
    message InputFn
      output_features            1   map<string,string>                        map
      label                      2   string                                    one
      parser_type                3   string                                    one
      item_pool                  4   string                                    one
    message ModelFn
      label                      1   string                                    rep
      loss                       2   string                                    one
      predict                    3   string                                    rep
      head_name                  4   string                                    rep
      classification             5   bool                                      packed
      summary                    6   string                                    rep
      non_ragged_features        7   map<string,string>                        map
      extra_losses               8   string                                    rep
    message ServingInputReceiverFn
      parser_type                1   string                                    one
      features                   2   map<string,string>                        map
      receiver_name              3   map<string,string>                        map
    message ExtraOutput
      signature_name             1   string                                    one
      fetch_dict                 2   map<string,string>                        map
    message Signature
      name                       1   string                                    one
      inputs                     2   map<string,string>                        map
      outputs                    3   map<string,string>                        map
    message ProtoModel
      features                   1   FeatureColumn                             rep
      emb_slices                 2   LookupEmbeddingSlice                      rep
      input_fn                   3   InputFn                                   one
      model_fn                   4   ModelFn                                   one
      serving_input_receiver_fn  5   ServingInputReceiverFn                    one
      extra_output               6   ExtraOutput                               rep
      signature                  7   Signature                                 rep
      params                     8   bytes                                     one
      optimizer                  9   bytes                                     one
      graph_def                  10  bytes                                     one
      save_slice_info            11  map<string,bytes>                         map
    message HashTableConfig
      name                       1   string                                    one
      table_config               2   bytes                                     one
      learning_rates             3   float                                     packed
      extra_restore_names        4   string                                    rep
    message FeatureSliceDim
      name                       1   string                                    one
      dims                       2   int32                                     packed
    message FeatureCombiner
      name                       1   string                                    one
      combiner                   2   Combiner                                  one
      max_seq_length             3   int32                                     one
    message ModelDump
      run_config                 1   string                                    one
      user_params                2   string                                    rep
      model_dump                 3   map<string,ProtoModel>                    map
      ps_sub_model_dump          4   map<string,ProtoModel>                    map
      dense_sub_model_dump       5   map<string,ProtoModel>                    map
      table_configs              6   HashTableConfig                           rep
      feature_slice_dims         7   FeatureSliceDim                           rep
      feature_combiners          8   FeatureCombiner                           rep
    enum Combiner ReduceSum=0 ReduceMean=1 FirstN=2
  """,
  f"{NATIVE}/alert/alert.proto": """
    message KafkaAlertProto
      topic               1      string              opt
      group               2      string              opt
    message TrainingAlertProto
      prefix              1      string              opt
    message AlertMessageProto
      user                1      string              opt
    message AlertProto
      alert_message       1      AlertMessageProto   opt
      kafka_alert         2      KafkaAlertProto     opt
      training_alert      3      TrainingAlertProto  opt
      start_delay_sec     1000   int64               opt
      check_interval_sec  10001  int64               opt  1800
  """,
  f"{NATIVE}/runtime/ops/logging_ops.proto": """
    message MachineHealthResult
      status   1  MachineHealthResult.MachineHealthStatus  opt
      message  2  string                                   opt
    enum MachineHealthResult.MachineHealthStatus OK=0 OUT_OF_MEMORY=1
  """,
  f"{NATIVE}/runtime/parameter_sync/parameter_sync.proto": """
    message PushRequest.DeltaEmbeddingHashTable
      unique_id                1  string                               opt
      dim_size                 2  int32                                opt
      fids                     3  int64                                rep
      embeddings               4  float                                rep
    message PushRequest
      model_name               1  string                               opt
      signature_name           2  string                               opt
      delta_hash_tables        3  PushRequest.DeltaEmbeddingHashTable  rep
      timeout_in_ms            4  int64                                opt  1000
      delta_multi_hash_tables  5  PushRequest.DeltaEmbeddingHashTable  rep
    message PushResponse
      status_code              1  int32                                opt
      error_message            2  string                               opt
      target                   3  string                               opt
      update_num               4  int32                                opt
    message PushResult
      responses                1  PushResponse                         rep
    message ClientConfig
      model_name               1  string                               opt
      signature_name           2  string                               opt
      targets                  3  string                               rep
      timeout_in_ms            4  int64                                opt  1000
      targets_extra_info       5  ClientConfig.TargetExtraInfo         rep
    message ClientConfig.TargetExtraInfo
      idc                      1  string                               opt
      cluster                  2  string                               opt
      replica_id               3  int64                                opt  -1
  """,
  "monolith/agent_service/agent_service.proto": """
    message AddressList
      address       1  string                   rep
    message GetReplicasRequest
      server_type   1  ServerType               one
      task          2  int32                    one
      model_name    3  string                   one
    message GetReplicasResponse
      address_list  1  AddressList              one
    message GetResourceRequest
    message GetResourceResponse
      address       1  string                   one
      shard_id      2  int32                    one
      replica_id    3  int32                    one
      memory        4  int64                    one
      cpu           5  float                    one
      network       6  float                    one
      work_load     7  float                    one
    message HeartBeatRequest
      server_type   1  ServerType               one
    message HeartBeatResponse
      addresses     1  map<string,AddressList>  map
    enum ServerType PS=0 ENTRY=1 DENSE=2
  """,
  f"{TABLE}/embedding_hash_table.proto": """
    message EntryConfig.Segment
      init_config                   1    InitializerConfig                    opt
      opt_config                    2    OptimizerConfig                      opt
      comp_config                   3    FloatCompressorConfig                opt
      dim_size                      7    int32                                opt
    message EntryConfig
      segments                      1    EntryConfig.Segment                  rep
      entry_type                    2    EntryConfig.EntryType                opt  TRAINING
    enum EntryConfig.EntryType UNKNOWN=0 TRAINING=1 SERVING=2
    message EntryDump
      id                            1    sfixed64                             opt
      num                           2    float                                rep
      opt                           3    OptimizerDump                        opt
      last_update_ts_sec            4    int64                                opt
    message SlotExpireTimeConfig.SlotExpireTime
      slot                          1    uint32                               opt
      expire_time                   2    uint32                               opt
    message SlotExpireTimeConfig
      slot_expire_times             1    SlotExpireTimeConfig.SlotExpireTime  rep
      default_expire_time           2    uint32                               opt  36500
    message CuckooEmbeddingHashTableConfig
    message GpucucoEmbeddingHashTableConfig
    message EmbeddingHashTableConfig
      entry_config                  1    EntryConfig                          opt
      initial_capacity              2    uint64                               opt  1
      slot_expire_time_config       3    SlotExpireTimeConfig                 opt
      cuckoo                        5    CuckooEmbeddingHashTableConfig       in:type
      entry_type                    6    EmbeddingHashTableConfig.EntryType   opt  PACKED
      enable_feature_eviction       7    bool                                 opt
      feature_evict_every_n_hours   8    int32                                opt  240
      gpucuco                       9    GpucucoEmbeddingHashTableConfig      in:type
      skip_zero_embedding           10   bool                                 opt  false
      occurrence_threshold          11   uint32                               opt
    enum EmbeddingHashTableConfig.EntryType PACKED=1 RAW=2
    message MultiEmbeddingHashTableConfig
      names                         1    string                               rep
      configs                       2    EmbeddingHashTableConfig             rep
    message SlotOccurrenceThresholdConfig.SlotOccurrenceThreshold
      slot                          1    uint32                               opt
      occurrence_threshold          2    uint32                               opt
    message SlotOccurrenceThresholdConfig
      slot_occurrence_thresholds    1    SlotOccurrenceThresholdConfig.SlotOccurrenceThreshold  rep
      default_occurrence_threshold  2    uint32                               opt  0
    message SlidingHashFilterMetaDump
      split_num                     1    uint32                               opt  0
      max_forward_step              2    uint32                               opt  0
      max_backward_step             3    uint32                               opt  0
      max_step                      4    uint32                               opt  0
      head                          5    uint32                               opt  0
      head_increment                6    uint32                               opt  0
      failure_count                 7    uint64                               opt  0
    message HashFilterSplitMetaDump
      failure_count                 1    uint64                               opt  0
      total_size                    2    uint64                               opt  0
      num_elements                  3    uint64                               opt  0
      fill_rate                     4    double                               opt  0
      sliding_hash_filter_meta      5    SlidingHashFilterMetaDump            opt
      hash_version                  100  uint32                               opt
    message HashFilterSplitDataDump
      offset                        1    uint32                               opt
      data                          2    uint32                               rep
    message MultiHashTableMetadata
      table_name                    1    string                               opt
      num_entries                   2    uint64                               opt
  """,
  f"{TABLE}/initializer/initializer_config.proto": """
    message ZerosInitializerConfig
      dim_size        1   int32                           opt
    message OnesInitializerConfig
      dim_size        1   int32                           opt
    message ConstantsInitializerConfig
      dim_size        1   int32                           opt
      constant        2   float                           opt
    message RandomUniformInitializerConfig
      dim_size        1   int32                           opt
      minval          2   float                           opt  -0.05
      maxval          3   float                           opt  0.05
    message InitializerConfig
      zeros           1   ZerosInitializerConfig          in:type
      random_uniform  2   RandomUniformInitializerConfig  in:type
      ones            3   OnesInitializerConfig           in:type
      constants       15  ConstantsInitializerConfig      in:type
  """,
  f"{TABLE}/compressor/float_compressor.proto": """
    message FloatCompressorConfig.Fp32
      dim_size    1  int32                          opt
    message FloatCompressorConfig.Fp16
      dim_size    1  int32                          opt
    message FloatCompressorConfig.FixedR8
      dim_size    1  int32                          opt
      r           2  float                          opt  1.0
    message FloatCompressorConfig.OneBit
      dim_size    1  int32                          opt
      step_size   2  int64                          opt  200
      init_scale  3  float                          opt  1.0
      max_scale   4  float                          opt  10000.0
      amplitude   5  float                          opt  0.1
    message FloatCompressorConfig
      fp32        1  FloatCompressorConfig.Fp32     in:type
      fp16        2  FloatCompressorConfig.Fp16     in:type
      fixed_r8    3  FloatCompressorConfig.FixedR8  in:type
      one_bit     4  FloatCompressorConfig.OneBit   in:type
  """,
  f"{TABLE}/optimizer/optimizer.proto": """
    message AdagradOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.001
      initial_accumulator_value    3   float                            opt  0.1
      hessian_compression_times    4   int32                            opt  1
      weight_decay_factor          5   float                            opt  0
      warmup_steps                 6   int64                            opt  0
    message DynamicWdAdagradOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.001
      initial_accumulator_value    3   float                            opt  0.1
      hessian_compression_times    4   int32                            opt  1
      weight_decay_factor          5   float                            opt  0
      warmup_steps                 6   int64                            opt  0
      decouple_weight_decay        7   bool                             opt  false
      enable_dynamic_wd            8   bool                             opt  false
      dynamic_wd_temperature       9   float                            opt  1.0
      flip_direction               10  bool                             opt  false
    message SgdOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      warmup_steps                 6   int64                            opt  0
    message FtrlOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      beta                         3   float                            opt  0.0
      initial_accumulator_value    4   float                            opt  0.1
      l1_regularization_strength   5   float                            opt  0
      l2_regularization_strength   6   float                            opt  0
      warmup_steps                 7   int64                            opt  0
    message GroupFtrlOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      beta                         3   float                            opt  1.0
      initial_accumulator_value    4   float                            opt  0.0
      l1_regularization_strength   5   float                            opt  0
      l2_regularization_strength   6   float                            opt  0
      warmup_steps                 7   int64                            opt  0
    message GroupAdaGradOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      beta                         3   float                            opt  0.0
      initial_accumulator_value    4   float                            opt  0.1
      l2_regularization_strength   5   float                            opt  0
      weight_decay_factor          6   float                            opt  0
      warmup_steps                 7   int64                            opt  0
    message AdadeltaOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      weight_decay_factor          3   float                            opt  0
      averaging_ratio              4   float                            opt  0.9
      epsilon                      5   float                            opt  0.01
      warmup_steps                 7   int64                            opt  0
    message AdamOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      beta1                        3   float                            opt  0.9
      beta2                        4   float                            opt  0.99
      use_beta1_warmup             5   bool                             opt  false
      weight_decay_factor          6   float                            opt  0
      use_nesterov                 7   bool                             opt  false
      epsilon                      8   float                            opt  0.01
      warmup_steps                 9   int64                            opt  0
      decay_by_step                10  bool                             opt  false
    message AmsgradOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      beta1                        3   float                            opt  0.9
      beta2                        4   float                            opt  0.99
      weight_decay_factor          6   float                            opt  0
      use_nesterov                 7   bool                             opt  false
      epsilon                      8   float                            opt  0.01
      warmup_steps                 9   int64                            opt  0
    message MomentumOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      weight_decay_factor          3   float                            opt  0
      use_nesterov                 4   bool                             opt  false
      momentum                     5   float                            opt  0.9
      warmup_steps                 6   int64                            opt  0
    message MovingAverageOptimizerConfig
      dim_size                     1   int32                            opt
      momentum                     2   float                            opt  0.9
    message BatchSoftmaxOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.1
    message RmspropOptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      weight_decay_factor          3   float                            opt  0
      momentum                     4   float                            opt  0.9
    message RmspropV2OptimizerConfig
      dim_size                     1   int32                            opt
      learning_rate                2   float                            opt  0.01
      weight_decay_factor          3   float                            opt  0
      momentum                     4   float                            opt  0.9
    message DcOptimizerConfig
      dim_size                     1   int32                            opt
      lambda_                      2   float                            opt  0
    message OptimizerConfig
      adagrad                      1   AdagradOptimizerConfig           in:type
      sgd                          2   SgdOptimizerConfig               in:type
      ftrl                         3   FtrlOptimizerConfig              in:type
      stochastic_rounding_float16  4   bool                             opt
      dynamic_wd_adagrad           5   DynamicWdAdagradOptimizerConfig  in:type
      adadelta                     6   AdadeltaOptimizerConfig          in:type
      adam                         7   AdamOptimizerConfig              in:type
      amsgrad                      8   AmsgradOptimizerConfig           in:type
      momentum                     9   MomentumOptimizerConfig          in:type
      moving_average               10  MovingAverageOptimizerConfig     in:type
      rmsprop                      11  RmspropOptimizerConfig           in:type
      rmspropv2                    12  RmspropV2OptimizerConfig         in:type
      dc                           13  DcOptimizerConfig                in:type
      group_ftrl                   14  GroupFtrlOptimizerConfig         in:type
      batch_softmax                15  BatchSoftmaxOptimizerConfig      in:type
      group_adagrad                16  GroupAdaGradOptimizerConfig      in:type
    message AdagradOptimizerDump
      norm                         1   float                            rep
    message DynamicWdAdagradOptimizerDump
      norm                         1   float                            rep
      last_update_step             2   int64                            opt
    message SgdOptimizerDump
    message FtrlOptimizerDump
      zero                         1   float                            rep
      norm                         2   float                            rep
    message GroupFtrlOptimizerDump
      zero                         1   float                            rep
      norm                         2   float                            rep
    message GroupAdaGradOptimizerDump
      grad_square_sum              1   float                            opt
    message AdadeltaOptimizerDump
      accum                        1   float                            rep
      accum_update                 2   float                            rep
    message AdamOptimizerDump
      m                            1   float                            rep
      v                            2   float                            rep
      beta1_power                  3   float                            opt
      beta2_power                  4   float                            opt
    message AmsgradOptimizerDump
      m                            1   float                            rep
      v                            2   float                            rep
      vhat                         3   float                            rep
      beta1_power                  4   float                            opt
      beta2_power                  5   float                            opt
    message MomentumOptimizerDump
      n                            1   float                            rep
    message RmspropOptimizerDump
      n                            1   float                            rep
    message RmspropV2OptimizerDump
      n                            1   float                            rep
    message BatchSoftmaxOptimizerDump
      global_step                  1   int64                            opt
    message SingleOptimizerDump
      adagrad                      1   AdagradOptimizerDump             in:type
      sgd                          2   SgdOptimizerDump                 in:type
      ftrl                         3   FtrlOptimizerDump                in:type
      dynamic_wd_adagrad           4   DynamicWdAdagradOptimizerDump    in:type
      adadelta                     6   AdadeltaOptimizerDump            in:type
      adam                         7   AdamOptimizerDump                in:type
      amsgrad                      8   AmsgradOptimizerDump             in:type
      momentum                     9   MomentumOptimizerDump            in:type
      rmsprop                      11  RmspropOptimizerDump             in:type
      rmspropv2                    12  RmspropV2OptimizerDump           in:type
      group_ftrl                   13  GroupFtrlOptimizerDump           in:type
      batch_softmax                14  BatchSoftmaxOptimizerDump        in:type
      group_adagrad                15  GroupAdaGradOptimizerDump        in:type
    message OptimizerDump
      dump                         1   SingleOptimizerDump              rep
  """,
  f"{NATIVE}/hash_table_ops.proto": """
    message HashTableProto
      table_tensor             1  string                       opt
      dim_size                 2  int32                        opt
      shared_name              3  string                       opt
      slot_expire_time_config  4  bytes                        opt
      learning_rate_tensor     5  string                       opt
      saver_parallel           6  int32                        opt
      extra_restore_names      7  string                       rep
      export_share_embedding   8  HashTableProto.OptionalBool  opt
    enum HashTableProto.OptionalBool kBoolNone=-1 kFalse=0 kTrue=1
  """,
  f"{NATIVE}/multi_hash_table_ops.proto": """
    message MultiHashTableProto
      dims                     1  int32   rep
      slot_expire_time_config  2  bytes   opt
      table_names              3  string  rep
      learning_rate_tensor     4  string  opt
      shared_name              5  string  opt
      saver_parallel           6  int32   opt
      initializer_op           7  string  opt
      handle_tensor            8  string  opt
  """,
}

# Path -> (name of the service, rpc -> (request, response)).
SERVICES = {
  f"{NATIVE}/hooks/server/service.proto": (
    "Controller",
    {
      name: (f"{name}Request", f"{name}Response")
      for name in (
        "StopTraining",
        "ResumeTraining",
        "GetBlockStatus",
        "SaveCheckpoint",
        "GetTrainingStatus",
      )
    },
  ),
  "monolith/agent_service/agent_service.proto": (
    "AgentService",
    {
      name: (f"{name}Request", f"{name}Response")
      for name in ("GetReplicas", "GetResource", "HeartBeat")
    },
  ),
  f"{NATIVE}/proto/primus_am_service.proto": (
    "AppMasterService",
    {
      "ponyHeartbeat": ("PonyHeartbeatRequest", "PonyHeartbeatResponse"),
      "ponyGetPSInfo": ("PonyGetPSInfoRequest", "PonyGetPSInfoResponse"),
      "ponyStartWorker": ("PonyStartWorkerRequest", "PonyStartWorkerResponse"),
      "succeed": ("SucceedRequest", "SucceedResponse"),
      "kill": ("KillRequest", "KillResponse"),
      "suspend": ("SuspendRequest", "SuspendResponse"),
      "suspendStatus": ("SuspendStatusRequest", "SuspendStatusResponse"),
      "resume": ("ResumeRequest", "ResumeResponse"),
      "getSnapshot": ("GetSnapshotRequest", "GetSnapshotResponse"),
      "progress": ("ProgressRequest", "ProgressResponse"),
      "isStarving": ("StarvingRequest", "StarvingResponse"),
      "status": ("StatusRequest", "StatusResponse"),
      "getTaskTimePoint": ("TaskTimePointRequest", "TaskTimePointResponse"),
      "createSavepoint": ("CreateSavepointRequest", "CreateSavepointResponse"),
      "createSavepointStatus": ("CreateSavepointStatusRequest", "CreateSavepointStatusResponse"),
    },
  ),
}

FieldProto = descriptor_pb2.FieldDescriptorProto
SCALARS = {
  value.number: name[len("TYPE_") :].lower()
  for name, value in FieldProto.Type.DESCRIPTOR.values_by_name.items()
  if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
LENGTH_DELIMITED = 2

every_file = pytest.mark.parametrize("path", FILES)


def module_name(path):
  return path[: -len(".proto")].replace("/", ".") + "_pb2"


def load(path):
  return importlib.import_module(module_name(path))


def file_proto(path):
  proto = descriptor_pb2.FileDescriptorProto()
  load(path).DESCRIPTOR.CopyToProto(proto)
  return proto


def message_class(path, name):
  scope = load(path)
  for part in name.split("."):
    scope = getattr(scope, part)
  return scope


def expected(path):
  """The table of a file: {message: {field: (number, type, label)}}, defaults, enums."""
  messages, defaults, enums = {}, {}, {}
  fields = None
  for line in filter(None, map(str.strip, TABLES[path].splitlines())):
    words = line.split()
    if words[0] == "message" and len(words) == 2:
      fields = messages[words[1]] = {}
      message = words[1]
    elif words[0] == "enum":
      pairs = (word.split("=") for word in words[2:])
      enums[words[1]] = [(name, int(number)) for name, number in pairs]
    else:
      fields[words[0]] = (int(words[1]), words[2], words[3])
      if len(words) > 4:
        defaults[message, words[0]] = words[4]
  return messages, defaults, enums


def compiled(path):
  """Returns what `expected` does, without the defaults, read from the compiled descriptor."""
  file = file_proto(path)
  prefix = f".{file.package}." if file.package else "."
  messages, enums, entries = {}, {}, {}

  def type_name(field):
    if field.type in SCALARS:
      return SCALARS[field.type]
    name = field.type_name
    return name[len(prefix) :] if name.startswith(prefix) else name[1:]

  def describe(field, message):
    name = type_name(field)
    if name in entries:
      key, value = entries[name].field
      return field.number, f"map<{type_name(key)},{type_name(value)}>", "map"
    if field.label == FieldProto.LABEL_REPEATED:
      numeric = name not in ("string", "bytes") and field.type != FieldProto.TYPE_MESSAGE
      default = file.syntax == "proto3"
      packed = field.options.packed if field.options.HasField("packed") else default
      return field.number, name, "packed" if numeric and packed else "rep"
    if field.HasField("oneof_index"):
      assert not field.proto3_optional
      return field.number, name, f"in:{message.oneof_decl[field.oneof_index].name}"
    if field.label == FieldProto.LABEL_REQUIRED:
      return field.number, name, "req"
    return field.number, name, "one" if file.syntax == "proto3" else "opt"

  def add_enum(enum, scope):
    enums[scope + enum.name] = [(value.name, value.number) for value in enum.value]

  def add(message, scope):
    name = scope + message.name
    inner = name + "."
    for nested in message.nested_type:
      if nested.options.map_entry:
        entries[inner + nested.name] = nested
      else:
        add(nested, inner)
    for enum in message.enum_type:
      add_enum(enum, inner)
    messages[name] = {field.name: describe(field, message) for field in message.field}
    assert not message.extension and not message.extension_range

  for message in file.message_type:
    add(message, "")
  for enum in file.enum_type:
    add_enum(enum, "")
  return messages, enums


def float32(value):
  return struct.pack("<f", value)


# Not ours: messages of TensorFlow Serving. Tests of serving exchange them with its own.
FOREIGN_FILES = {
  "monolith/native_training/runtime/parameter_sync/prediction_service.proto",
  "monolith/serving/native/reflection.proto",
  "monolith/serving/native/serving_api.proto",
  # Ours alone; the engine's tests read and write their wire format.
  "monolith/realtime/events.proto",
  "monolith/realtime/row_log.proto",
}


def test_the_tables_cover_every_source():
  sources = {source.relative_to(PROTO_ROOT).as_posix() for source in PROTO_ROOT.rglob("*.proto")}

  assert sources - FOREIGN_FILES == set(FILES) == set(TABLES)


@every_file
def test_module_imports_at_its_path(path):
  syntax, package, imports = FILES[path]
  module = load(path)
  file = file_proto(path)

  assert module.DESCRIPTOR.name == path
  assert file.package == package
  assert (file.syntax or "proto2") == syntax
  public = [file.dependency[i] for i in file.public_dependency]
  assert sorted(file.dependency) == sorted(name.lstrip("+") for name in imports)
  assert sorted(public) == sorted(name[1:] for name in imports if name.startswith("+"))
  assert (file.options.HasField("cc_enable_arenas") and file.options.cc_enable_arenas) == (
    path in ARENA_FILES
  )


@every_file
def test_messages_and_enums_match_the_table(path):
  want_messages, _, want_enums = expected(path)
  messages, enums = compiled(path)

  assert set(messages) == set(want_messages)
  for name, fields in want_messages.items():
    assert messages[name] == fields, name
  assert enums == want_enums


@every_file
def test_defaults_match_the_table(path):
  messages, defaults, enums = expected(path)
  for name, fields in messages.items():
    empty = message_class(path, name)()
    for field, (_, kind, label) in fields.items():
      if label in ("rep", "packed", "map"):
        assert len(getattr(empty, field)) == 0, (name, field)
        continue
      descriptor = empty.DESCRIPTOR.fields_by_name[field]
      if descriptor.message_type:
        assert not empty.HasField(field), (name, field)
        continue
      got, want = getattr(empty, field), defaults.get((name, field))
      if kind in ("float", "double"):
        assert float32(got) == float32(float(want or 0)), (name, field)
      elif descriptor.enum_type:
        values = enums[kind]
        assert got == (dict(values)[want] if want else values[0][1]), (name, field)
      elif kind == "bool":
        assert got is (want == "true"), (name, field)
      elif kind in ("string", "bytes"):
        assert want is None and got == ("" if kind == "string" else b""), (name, field)
      else:
        assert got == int(want or 0), (name, field)


@every_file
def test_repeated_numbers_are_packed_as_in_the_table(path):
  messages, _, _ = expected(path)
  for name, fields in messages.items():
    for field, (number, kind, label) in fields.items():
      if label not in ("rep", "packed") or kind not in SCALARS.values():
        continue
      if kind in ("string", "bytes"):
        continue
      message = message_class(path, name)()
      getattr(message, field).extend([1, 1])

      tag, shift = 0, 0
      for byte in message.SerializePartialToString():
        tag |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
          break
      assert tag >> 3 == number, (name, field)
      assert (tag & 7 == LENGTH_DELIMITED) == (label == "packed"), (name, field)


def test_only_the_explicitly_packed_line_id_fields_have_options():
  fields = load("idl/matrix/proto/line_id.proto").LineId.DESCRIPTOR.fields

  assert [field.name for field in fields if field.has_options] == ["actions", "pre_actions"]


def test_instance_dense_is_deprecated():
  field = load("idl/matrix/proto/proto_parser.proto").Instance.DESCRIPTOR.fields_by_name["dense"]

  assert field.GetOptions().deprecated


@pytest.mark.parametrize(
  "path", [f"{TABLE}/embedding_hash_table.proto", f"{NATIVE}/model_dump/monolith_model.proto"]
)
def test_publicly_imported_messages_resolve_through_the_importer(path):
  module = load(path)

  for source, name in [
    (f"{TABLE}/optimizer/optimizer.proto", "OptimizerConfig"),
    (f"{TABLE}/optimizer/optimizer.proto", "OptimizerDump"),
    (f"{TABLE}/initializer/initializer_config.proto", "InitializerConfig"),
    (f"{TABLE}/compressor/float_compressor.proto", "FloatCompressorConfig"),
  ]:
    assert getattr(module, name) is getattr(load(source), name)


class RecordingChannel:
  """Takes the place of a gRPC channel and remembers the paths of the methods."""

  def __init__(self):
    self.paths = []

  def unary_unary(self, path, request_serializer, response_deserializer, **_):
    self.paths.append(path)
    return request_serializer, response_deserializer


@every_file
def test_services_match_the_table(path):
  module = load(path)
  if path not in SERVICES:
    assert not module.DESCRIPTOR.services_by_name
    return
  name, rpcs = SERVICES[path]
  package = FILES[path][1]

  assert list(module.DESCRIPTOR.services_by_name) == [name]
  service = file_proto(path).service[0]
  prefix = f".{package}." if package else "."
  assert {m.name: (m.input_type, m.output_type) for m in service.method} == {
    rpc: (prefix + request, prefix + response) for rpc, (request, response) in rpcs.items()
  }
  assert not any(m.client_streaming or m.server_streaming for m in service.method)


@pytest.mark.parametrize("path", SERVICES)
def test_grpc_stub_and_servicer_have_every_method(path):
  name, rpcs = SERVICES[path]
  service = f"{FILES[path][1]}.{name}".lstrip(".")
  module = load(path)
  grpc_module = importlib.import_module(module_name(path) + "_grpc")
  channel = RecordingChannel()

  stub = getattr(grpc_module, f"{name}Stub")(channel)
  servicer = getattr(grpc_module, f"{name}Servicer")()

  assert channel.paths == [f"/{service}/{rpc}" for rpc in rpcs]
  assert callable(getattr(grpc_module, f"add_{name}Servicer_to_server"))
  for rpc, (request, response) in rpcs.items():
    assert callable(getattr(servicer, rpc))
    serialize, parse = getattr(stub, rpc)
    assert serialize(getattr(module, request)()) == b""
    assert parse(b"") == getattr(module, response)()


def test_savepoint_states_are_reached_through_the_nested_enum():
  response = load(f"{NATIVE}/proto/primus_am_service.proto").CreateSavepointStatusResponse

  assert response.CreateSavepointState.SUCCEEDED == 2


def test_importing_every_module_loads_neither_tensorflow_nor_the_op_library():
  names = [module_name(path) for path in FILES]
  names += [module_name(path) + "_grpc" for path in SERVICES]
  code = (
    "import importlib, sys\n"
    f"for name in {names}: importlib.import_module(name)\n"
    "heavy = [n for n in sys.modules if n == 'tensorflow' or n.endswith('gen_monolith_ops')]\n"
    "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
  )
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))

  result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)

  assert result.returncode == 0, result.stderr


def round_trip(message, wire):
  """Asserts that message and wire, hex with blanks, are each other's encoding."""
  data = bytes.fromhex(wire)
  assert message.SerializeToString(deterministic=True).hex() == data.hex()
  assert type(message).FromString(data) == message


def test_line_id_bytes():
  line_id = load("idl/matrix/proto/line_id.proto").LineId

  round_trip(
    line_id(uid=100, req_time=64, sample_rate=0.5, actions=[0, 100]),
    "11 6400000000000000 18 40 32 02 0064 dd01 0000003f",
  )


def test_special_strategies_are_written_unpacked_and_read_either_way():
  line_id = load("idl/matrix/proto/line_id.proto").LineId

  round_trip(line_id(special_strategies=[1, 2]), "b802 01 b802 02")
  packed = line_id.FromString(bytes.fromhex("ba02 02 0102"))
  assert list(packed.special_strategies) == [1, 2]


def test_unset_sample_rate_reads_one():
  assert load("idl/matrix/proto/line_id.proto").LineId().sample_rate == 1.0


def test_fid_list_bytes():
  fid_list = load("idl/matrix/proto/example.proto").FidList

  round_trip(fid_list(value=[1 << 48]), "0a 08 0000000000000100")
  assert list(fid_list(value=[2**64 - 1]).value) == [2**64 - 1]


def test_example_label_bytes():
  round_trip(load("idl/matrix/proto/example.proto").Example(label=[1.0]), "aa06 04 0000803f")


def test_healthy_machine_serializes_to_nothing():
  result = load(f"{NATIVE}/runtime/ops/logging_ops.proto").MachineHealthResult

  round_trip(result(), "")
  assert result(status=result.OUT_OF_MEMORY).SerializeToString() == b"\x08\x01"


def test_succeed_request_bytes():
  request = load(f"{NATIVE}/proto/primus_am_service.proto").SucceedRequest()
  request.graceful_shutdown_timeout_ms.value = 20000

  round_trip(request, "1a 04 08 a09c01")


def test_unset_check_interval_reads_half_an_hour():
  alert = load(f"{NATIVE}/alert/alert.proto").AlertProto()

  assert not alert.HasField("check_interval_sec")
  assert alert.check_interval_sec == 1800


def test_table_config_bytes():
  table = load(f"{TABLE}/embedding_hash_table.proto")
  config = table.EmbeddingHashTableConfig()
  segment = config.entry_config.segments.add(dim_size=1)
  segment.opt_config.sgd.SetInParent()
  segment.init_config.zeros.SetInParent()
  segment.comp_config.fp32.SetInParent()
  config.cuckoo.SetInParent()

  round_trip(config, "0a100a0e0a020a00120212001a020a0038012a00")
  assert config.WhichOneof("type") == "cuckoo"


def test_sgd_entry_bytes():
  table = load(f"{TABLE}/embedding_hash_table.proto")
  entry = table.EntryDump(id=1, num=[1.0], last_update_ts_sec=0)
  entry.opt.dump.add().sgd.SetInParent()

  round_trip(entry, "09 0100000000000000 15 0000803f 1a04 0a02 1200 20 00")


def test_adagrad_entry_bytes():
  table = load(f"{TABLE}/embedding_hash_table.proto")
  entry = table.EntryDump(id=-1, num=[0.5, -2.0], last_update_ts_sec=1700000000)
  entry.opt.dump.add().adagrad.norm.extend([0.1, 0.25])

  round_trip(
    entry,
    "09 ffffffffffffffff 15 0000003f 15 000000c0"
    "1a0e 0a0c 0a0a 0d cdcccc3d 0d 0000803e 20 80e2cfaa06",
  )


def test_entry_without_id_serializes():
  entry = load(f"{TABLE}/embedding_hash_table.proto").EntryDump(num=[1.0])

  assert entry.SerializeToString() == bytes.fromhex("15 0000803f")


def test_required_fields_of_a_value_filter_are_enforced():
  config = load(f"{NATIVE}/data/transform/transform_config.proto").FilterByValueConfig

  assert not config(field_name="did").IsInitialized()
  assert config(field_name="did", op="in").IsInitialized()

"""Tests GPU kernels as far as a machine without a GPU can: they are registered, and compiled."""

import ctypes
import pathlib
import re

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from monolith.native_training.runtime.ops import gen_monolith_ops

_OPS = pathlib.Path(gen_monolith_ops.__file__).parent
_LIBRARY = _OPS / "libmonolith_cuda.so"
_C_API = _OPS.parent / "gpu/c_api.h"

# Op -> arguments in host memory.
_KERNELS = {
  "ResourceApplyRmsprop": [],
  "ResourceApplyAdamom": [],
  "FFM": [],
  "FFMGrad": [],
  "MonolithClipByGlobalNorm": ["global_norm", "clip_norm"],
  "MonolithClipByGlobalNormFused": ["clip_norm", "global_norm"],
  "GlobalL2Reduce": [],
  "MonolithAlignedFlatConcat": [],
  "MonolithAlignedFlatSplit": [],
  "MonolithFusedGatherEmbeddingsByInput": [],
  "MonolithFusedGatherEmbeddingsByInputGradient": ["fused_embeddings_size"],
  "MonolithFusedSegmentSum": ["shape"],
  "MonolithFusedReduceAndSplitGPU": [],
  "MonolithFusedReduceAndSplitGPUGrad": [],
  "MonolithPoolPackedIds": ["has_one_each"],
  "MonolithPoolPackedIdsGrad": ["has_one_each"],
  "MonolithEmbeddingToLayoutV3": ["batch_size"],
  "MonolithEmbeddingToLayoutGradV3": ["batch_size"],
  "MonolithEmbeddingToLayoutV4": ["batch_size", "fid_list_emb_row_lenth"],
  "MonolithEmbeddingToLayoutGradV4": ["batch_size", "fid_list_emb_row_lenth"],
  "MonolithEmbeddingToLayoutV5": [
    "batch_size",
    "nfl_size",
    "feature_size",
    "fid_size",
    "emb_size",
  ],
  "MonolithEmbeddingToLayoutGradV5": ["batch_size"],
}

_FUSED_LOOKUP = [
  "fused_slot_size",
  "req_time",
  "embedding_splits",
  "id_offsets",
  "embedding_offsets",
]
_FUSED_OPTIMIZE = [
  "fused_slot_size",
  "id_offsets",
  "grad_offsets",
  "learning_rate_tensors",
  "req_time",
  "global_step",
]

# The same for tables: only ids, gradients, values and vectors are on the device.
_TABLE_KERNELS = {
  "MonolithHashFilter": ["handle"],
  "MonolithProbabilisticFilter": ["handle"],
  "MonolithDummyHashFilter": ["handle"],
  "MonolithHashFilterSave": ["handle", "basename", "output_handle"],
  "MonolithHashFilterRestore": ["handle", "basename", "output_handle"],
  "MonolithHashFilterInterceptGradient": ["filter_handle", "ids"],
  "MonolithHashFilterInterceptGradientGradient": ["filter_handle", "ids", "grad", "filted_grad"],
  "MonolithDummySyncClient": ["handle"],
  "MonolithHashTable": ["filter_handle", "sync_client_handle", "handle"],
  "MonolithHashTableLookup": ["table_handle"],
  "MonolithHashTableLookupEntry": ["table_handle", "entry_str"],
  "MonolithHashTableAssign": ["table_handle", "req_time", "table_handle_output"],
  "MonolithHashTableAssignAdd": ["table_handle", "req_time", "table_handle_output"],
  "MonolithHashTableOptimize": [
    "table_handle",
    "learning_rate_tensor",
    "req_time",
    "global_step",
    "table_handle_output",
  ],
  "MonolithHashTableFusedLookup": ["table_handles", *_FUSED_LOOKUP],
  "MonolithHashTableFusedOptimize": ["table_handles", *_FUSED_OPTIMIZE, "table_handles_output"],
  "MonolithHashTableConfigure": ["table_handle"],
  "MonolithHashTableErase": ["table_handle", "table_handle_output"],
  "MonolithHashTableLookupList": ["table_handles"],
  "MonolithHashTableOptimizeList": [
    "table_handles",
    "learning_rates",
    "req_time",
    "global_step",
  ],
  "MonolithHashTableRestoreGroup": ["handle", "basename", "others", "output_handle"],
  "MonolithHashTableSaveGroup": ["handle", "basename", "others", "output_handle"],
  "MonolithHashTableSize": ["table_handle", "size"],
  "MonolithHashTableStats": ["table_handle", "stats"],
  "MonolithHashTableSaveAsTensor": [
    "table_handle",
    "shard_idx",
    "num_shards",
    "limit",
    "offset",
    "new_offset",
    "entry",
  ],
  "MonolithHashTableSave": ["handle", "basename", "output_handle"],
  "MonolithHashTableRestore": ["handle", "basename", "output_handle"],
  "CreateMonolithMultiHashTable": [
    "config",
    "filter_handle",
    "sync_client_handle",
    "multi_hash_table_handle",
  ],
  "ReadMonolithMultiHashTable": ["multi_hash_table_handle"],
  "IsHashTableInitialized": ["handle", "is_initialized"],
  "MonolithMultiHashTableLookup": ["mtable", "id_split"],
  "MonolithMultiHashTableLookupEntry": ["mtable", "id_split", "serialized_entries"],
  "MonolithMultiHashTableLookupList": ["mtable"],
  "MonolithMultiHashTableFusedLookup": ["mtable", *_FUSED_LOOKUP],
  "MonolithMultiHashTableFusedOptimize": ["mtable", *_FUSED_OPTIMIZE, "mtable_out"],
  "MonolithMultiHashTableAssign": ["mtable", "id_split", "update_time", "updated_table"],
  "MonolithMultiHashTableAssignAdd": ["mtable", "id_split", "update_time", "updated_table"],
  "MonolithMultiHashTableReinitialize": ["mtable", "table_name", "updated_table", "id_status"],
  "MonolithMultiHashTableOptimize": [
    "mtable",
    "id_split",
    "learning_rate",
    "update_time",
    "global_step",
    "updated_table",
  ],
  "MonolithMultiHashTableOptimizeList": [
    "mtable",
    "learning_rate",
    "update_time",
    "global_step",
    "updated_table",
  ],
  "MonolithMultiHashTableSize": ["mtable", "sizes"],
  "MonolithMultiHashTableStats": ["mtable", "stats"],
  "MonolithMultiHashTableSave": ["mtable", "basename", "output_mtable"],
  "MonolithMultiHashTableRestore": ["mtable", "basename", "output_mtable"],
  "MonolithMultiHashTableFeatureStat": ["basename", "features", "counts"],
  "MonolithUnpackIds": ["places"],
}


class KernelRegistryTest(tf.test.TestCase):
  def test_every_op_has_a_gpu_kernel_with_its_host_memory(self):
    for op, host_memory in {**_KERNELS, **_TABLE_KERNELS}.items():
      with self.subTest(op=op):
        registered = kernels.get_registered_kernels_for_op(op).kernel
        on_gpu = [kernel for kernel in registered if kernel.device_type == "GPU"]

        self.assertLen(on_gpu, 2 if op == "MonolithFusedSegmentSum" else 1)
        for kernel in on_gpu:
          self.assertCountEqual(kernel.host_memory_arg, host_memory)

  def test_segment_sum_takes_both_index_types(self):
    types = [
      constraint.allowed_values.list.type[0]
      for kernel in kernels.get_registered_kernels_for_op("MonolithFusedSegmentSum").kernel
      if kernel.device_type == "GPU"
      for constraint in kernel.constraint
      if constraint.name == "Tindices"
    ]

    self.assertCountEqual(types, [tf.int32.as_datatype_enum, tf.int64.as_datatype_enum])

  def test_every_one_has_a_cpu_kernel_too(self):
    for op in {**_KERNELS, **_TABLE_KERNELS}:
      devices = [k.device_type for k in kernels.get_registered_kernels_for_op(op).kernel]
      self.assertIn("CPU", devices, op)


@pytest.mark.skipif(not _LIBRARY.exists(), reason="libmonolith_cuda.so was left out: no GPU")
class CudaLibraryTest(tf.test.TestCase):
  def test_loads_without_a_gpu_and_has_every_function(self):
    library = ctypes.CDLL(str(_LIBRARY))
    declared = re.findall(r"\b(mono_gpu_\w+)\(", _C_API.read_text("utf-8"))

    self.assertGreater(len(declared), 20)
    for name in declared:
      self.assertTrue(hasattr(library, name), name)
    version = re.search(r"#define MONO_GPU_VERSION (\d+)", _C_API.read_text("utf-8"))
    self.assertEqual(library.mono_gpu_version(), int(version.group(1)))

  def test_says_what_is_wrong_where_there_is_no_gpu(self):
    library = ctypes.CDLL(str(_LIBRARY))
    library.mono_gpu_last_error.restype = ctypes.c_char_p
    count = ctypes.c_int32(-1)

    code = library.mono_gpu_device_count(ctypes.byref(count))

    if code != 0:
      self.assertEqual(count.value, 0)
      self.assertIn(b"counting CUDA devices", library.mono_gpu_last_error())
    else:
      self.assertGreater(count.value, 0)


if __name__ == "__main__":
  tf.test.main()

// A table in the memory of a GPU, behind the C interface of libmonolith_cuda.so.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/hash_table/eviction_thread.h"
#include "monolith/native_training/runtime/hash_table/records/entry_codec.h"
#include "monolith/native_training/runtime/hash_table/records/table_files.h"
#include "monolith/native_training/runtime/ops/gpu/gpu_kernel.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// The table, with what the host knows of it. Errors name it. Files see it as a RecordTable: they
// hold the same records as those of tables in main memory.
class DeviceTable : public engine::RecordTable {
 public:
  static constexpr int64_t kNumStats = 5;

  // FailedPrecondition: there is no CUDA device, or no library.
  static Status Create(const ::monolith::hash_table::EmbeddingHashTableConfig& proto,
                       const std::string& name, std::unique_ptr<DeviceTable>* table);
  ~DeviceTable() override;

  const GpuLibrary& library() const { return *library_; }
  MonoGpuTable* get() const { return table_; }
  const std::string& name() const { return name_; }
  int64_t dim() const { return layout_.dim; }
  int64_t num_segments() const { return layout_.num_segments(); }

  // The status of a call on this table.
  Status Check(int code) const;
  Status GetStats(MonoGpuTableStats* stats) const;
  // Writes the kNumStats numbers that MonolithHashTableStats returns.
  Status WriteStats(int64_t* out) const;

  // entries[i] = serialized EntryDump of ids[i], which lie on the device, without `id`; empty where
  // absent. Waits for the stream.
  Status LookupEntries(void* stream, const int64_t* ids, int64_t n,
                       std::vector<std::string>* entries) const;
  // As EmbeddingTable::SavePage; the offsets of one are not those of the other.
  Status SavePage(int64_t part, int64_t num_parts, int64_t limit, int64_t offset,
                  int64_t* new_offset, std::vector<std::string>* entries) const;
  std::string DebugString() const;

  // -- As files see it.
  engine::Status GetSize(int64_t* size) const override;
  int64_t MaxUpdateTs() const override;
  const engine::ExpiryPolicy& expiry() const override { return expiry_; }
  engine::Status WriteShard(int shard, const engine::ExpiryPolicy* expiry,
                            const engine::AppendBytes& append,
                            engine::SaveStats* stats) const override;
  // The content stays until all files were read once and found good.
  std::unique_ptr<engine::RecordLoad> NewLoad() override;

 private:
  class Load;

  DeviceTable(const std::string& name, engine::TableConfig config, engine::RowLayout layout)
      : name_(name), config_(std::move(config)), layout_(std::move(layout)), codec_(layout_) {}
  int CreateTable();
  // The framed records of a shard.
  Status ReadShard(int shard, std::string* records) const;
  engine::Status ToEngine(int code) const;

  const std::string name_;
  const engine::TableConfig config_;
  const engine::RowLayout layout_;
  const engine::EntryCodec codec_;
  engine::ExpiryPolicy expiry_;
  const GpuLibrary* library_ = nullptr;
  MonoGpuTable* table_ = nullptr;
  std::unique_ptr<engine::EvictionThread> eviction_;
};

// Part of an update: n ids and n rows of gradients or values, all on the device.
struct DeviceSpan {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* values = nullptr;
};

struct DeviceLookup {
  const DeviceTable* table = nullptr;
  const int64_t* ids = nullptr;
  int64_t n = 0;
  float* out = nullptr;
};

// Holds the arguments of a write.
struct DeviceWriteOptions {
  int64_t req_time = 0;
  int64_t global_step = 0;
  const float* learning_rates = nullptr;  // on the host, one per segment
  bool sum_duplicates = false;            // over all spans; else a step for each, in order
  bool count_once = false;  // for the filter an id has come once, however often it comes
  engine::OccurrenceFilter* filter = nullptr;
};

// All spans make one batch.
struct DeviceUpdate {
  const DeviceTable* table = nullptr;
  std::vector<DeviceSpan> spans;
  DeviceWriteOptions options;
};

enum class DeviceWrite { kAssign, kAssignAdd };

Status LookUpDeviceTables(GpuCall* call, const std::vector<DeviceLookup>& lookups);
Status WriteDeviceTable(GpuCall* call, const DeviceTable& table, DeviceWrite write,
                        const DeviceSpan& span, const DeviceWriteOptions& options);
Status OptimizeDeviceTables(GpuCall* call, const std::vector<DeviceUpdate>& updates);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_H_

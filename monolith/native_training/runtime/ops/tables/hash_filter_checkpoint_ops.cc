// MonolithHashFilterSave and MonolithHashFilterRestore keep a sliding filter in one TFRecord file
// per split.
//
//   record 0    HashFilterSplitMetaDump
//   record 1..  HashFilterSplitDataDump of 10000 cells each; all-zero ones are left out
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/file_workers.h"
#include "monolith/native_training/runtime/files/record_reader.h"
#include "monolith/native_training/runtime/hash_filter/counting_filter.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/files/env_file_system.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/file_kernel.h"
#include "monolith/native_training/runtime/ops/tables/hash_filter_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace pb = ::monolith::hash_table;

constexpr int64_t kCellsPerRecord = 10000;

REGISTER_OP("MonolithHashFilterSave")
    .Input("handle: resource")
    .Input("basename: string")
    .Output("output_handle: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Writes a filter to `<basename>-ddddd-of-ddddd`; filters without memory write nothing.

basename: Scalar.
output_handle: The handle, after the save.
)doc");

REGISTER_OP("MonolithHashFilterRestore")
    .Input("handle: resource")
    .Input("basename: string")
    .Output("output_handle: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the counts of a filter by what was saved; they stay when a file cannot be read.

basename: Scalar.
output_handle: The handle, after the restore.
)doc");

pb::HashFilterSplitMetaDump MetaDump(const engine::SlidingHashFilter& filter,
                                     const engine::SlidingFilterMeta& meta, int64_t split) {
  const engine::FilterSplitMeta split_meta = filter.SplitMeta(split);
  pb::HashFilterSplitMetaDump dump;
  dump.set_failure_count(split_meta.failure_count);
  dump.set_total_size(split_meta.total_size);
  dump.set_num_elements(split_meta.num_elements);
  dump.set_fill_rate(split_meta.fill_rate);
  dump.set_hash_version(engine::CountingFilter::kMixerVersion);
  auto* sliding = dump.mutable_sliding_hash_filter_meta();
  sliding->set_split_num(meta.split_num);
  sliding->set_max_forward_step(meta.max_forward_step);
  sliding->set_max_backward_step(meta.max_backward_step);
  sliding->set_max_step(meta.max_step);
  sliding->set_head(meta.head);
  sliding->set_head_increment(meta.head_increment);
  sliding->set_failure_count(meta.failure_count);
  return dump;
}

engine::Status WriteSplit(const engine::SlidingHashFilter& filter,
                          const engine::SlidingFilterMeta& meta, int64_t split,
                          engine::SetOutputFile* file) {
  std::string buffer;
  const auto write = [&buffer, file](const std::string& record) {
    buffer.clear();
    engine::AppendRecord(record.data(), static_cast<int64_t>(record.size()), &buffer);
    file->AddRecords(1);
    return file->Append(buffer.data(), static_cast<int64_t>(buffer.size()));
  };
  engine::Status status = write(MetaDump(filter, meta, split).SerializeAsString());
  if (!status.ok()) return status;
  std::vector<uint16_t> cells(kCellsPerRecord);
  pb::HashFilterSplitDataDump dump;
  for (int64_t begin = 0; begin < filter.cells_per_split(); begin += kCellsPerRecord) {
    const int64_t n = std::min(kCellsPerRecord, filter.cells_per_split() - begin);
    filter.CopyCells(split, begin, n, cells.data());
    if (std::all_of(cells.begin(), cells.begin() + n, [](uint16_t cell) { return cell == 0; })) {
      continue;
    }
    dump.Clear();
    dump.set_offset(static_cast<uint32_t>(begin));
    for (int64_t i = 0; i < n; ++i) dump.add_data(cells[i]);
    status = write(dump.SerializeAsString());
    if (!status.ok()) return status;
  }
  return file->Close();
}

engine::Status SaveFilter(engine::FileSystem* files, const engine::SlidingHashFilter& filter,
                          const std::string& basename) {
  // Takes one snapshot for all files: the head may move while they are written.
  const engine::SlidingFilterMeta meta = filter.Meta();
  const int64_t nshards = filter.split_num();
  engine::FileSetWriter set(files, engine::ShardedSetName(basename, {""}));
  engine::Status status = engine::ForEachFile(nshards, [&](int64_t split) {
    std::unique_ptr<engine::SetOutputFile> file;
    engine::Status written = set.Create(engine::ShardSuffix("", split, nshards), &file);
    if (!written.ok()) return written;
    return WriteSplit(filter, meta, split, file.get());
  });
  return status.ok() ? set.Publish() : status;
}

engine::Status Corrupt(const std::string& filename, const std::string& why) {
  const bool named = why.find(filename) != std::string::npos;
  return engine::Status::FailedPrecondition(
      "Unable to parse data. Data might be corrupted: " + (named ? "" : filename + ": ") + why);
}

engine::Status LoadMeta(const pb::HashFilterSplitMetaDump& dump, const std::string& filename,
                        int64_t split, engine::SlidingHashFilter* filter) {
  const auto& sliding = dump.sliding_hash_filter_meta();
  if (dump.hash_version() != engine::CountingFilter::kMixerVersion) {
    LOG(WARNING) << filename << " was written with another hash function (version "
                 << dump.hash_version() << ", ours is " << engine::CountingFilter::kMixerVersion
                 << "): its counts are kept but will not be found again.";
  }
  // Takes the head from the first file alone: all were written from one snapshot.
  if (split == 0) {
    engine::Status status = filter->LoadMeta(
        {sliding.split_num(), sliding.max_forward_step(), sliding.max_backward_step(),
         sliding.max_step(), sliding.head(), sliding.head_increment(), sliding.failure_count()});
    if (!status.ok()) return status;
  }
  return filter->LoadSplitMeta(
      split, {dump.failure_count(), dump.total_size(), dump.num_elements(), dump.fill_rate()});
}

engine::Status LoadSplit(const engine::FileSetReader& set, const engine::FileSetReader::File& file,
                         int64_t split, engine::SlidingHashFilter* filter) {
  std::unique_ptr<engine::InputFile> input;
  engine::Status status = set.Open(file, &input);
  if (!status.ok()) return status;
  // Avoids TensorFlow's reader, which takes a file that ends inside a record's header for complete.
  engine::RecordBatchReader reader(std::move(input));
  std::vector<engine::RecordView> records;
  status = reader.Next(/*max_records=*/1, &records);
  if (!status.ok()) return Corrupt(file.path, status.message);
  pb::HashFilterSplitMetaDump meta;
  if (records.empty() || !meta.ParseFromArray(records[0].data, static_cast<int>(records[0].size))) {
    return Corrupt(file.path, "the first record is not a HashFilterSplitMetaDump");
  }
  status = LoadMeta(meta, file.path, split, filter);
  if (!status.ok()) return status;
  std::vector<uint16_t> cells;
  pb::HashFilterSplitDataDump dump;
  while (true) {
    status = reader.Next(/*max_records=*/1, &records);
    if (!status.ok()) return Corrupt(file.path, status.message);
    if (records.empty()) return engine::Status::Ok();
    if (!dump.ParseFromArray(records[0].data, static_cast<int>(records[0].size))) {
      return Corrupt(file.path, "a record is not a HashFilterSplitDataDump");
    }
    for (const uint32_t cell : dump.data()) {
      if (cell > std::numeric_limits<uint16_t>::max()) {
        return Corrupt(file.path, "a cell has more than 16 bits");
      }
    }
    cells.assign(dump.data().begin(), dump.data().end());
    status =
        filter->LoadCells(split, dump.offset(), static_cast<int64_t>(cells.size()), cells.data());
    if (!status.ok()) return status;
  }
}

engine::Status RestoreFilter(engine::FileSystem* files, engine::SlidingHashFilter* filter,
                             const std::string& basename) {
  engine::Status status = engine::ReadShardedSet(
      files, basename, {""}, [&](const engine::FileSetReader& set, int64_t nshards) {
        if (nshards != filter->split_num()) {
          return engine::Status::ResourceExhausted("split_num of " + basename + " is " +
                                                   std::to_string(nshards) + ", want " +
                                                   std::to_string(filter->split_num()));
        }
        std::unique_ptr<engine::SlidingHashFilter> twin;
        engine::Status loaded = filter->NewEmptyTwin(&twin);
        if (!loaded.ok()) return loaded;
        loaded = engine::ForEachFile(nshards, [&](int64_t split) {
          return LoadSplit(set, *set.Find(engine::ShardSuffix("", split, nshards)), split,
                           twin.get());
        });
        if (loaded.ok()) filter->SwapContent(twin.get());
        return loaded;
      });
  return status.code == engine::StatusCode::kDataLoss ? Corrupt(basename, status.message) : status;
}

class HashFilterSaveOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashFilterResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    if (resource->sliding() == nullptr) return OkStatus();
    EnvFileSystem files(ctx->env());
    return FromEngine(SaveFilter(&files, *resource->sliding(), basename));
  }
};

class HashFilterRestoreOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashFilterResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    if (resource->sliding() == nullptr) {
      return errors::InvalidArgument("There is no valid sharded files for ", basename,
                                     ": this filter has nothing to restore");
    }
    EnvFileSystem files(ctx->env());
    return FromEngine(RestoreFilter(&files, resource->sliding(), basename));
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterSave").Device(DEVICE_CPU), HashFilterSaveOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterRestore").Device(DEVICE_CPU), HashFilterRestoreOp);
// The same for tables on a GPU.
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterSave")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("output_handle"),
                        HashFilterSaveOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterRestore")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("output_handle"),
                        HashFilterRestoreOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow

// Makes a table, trains two rows, saves them, and reads them back into another table.
#include <cstdio>
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/files/posix_file_system.h"
#include "monolith/native_training/runtime/hash_table/table_files.h"

using namespace monolith::engine;

int main(int argc, char** argv) {
  SegmentConfig segment;
  segment.dim_size = 2;
  segment.optimizer.kind = OptimizerKind::kAdagrad;
  segment.initializer.kind = InitializerKind::kOnes;
  TableConfig config;
  config.entry.segments = {segment};
  std::unique_ptr<EmbeddingTable> table;
  Status status = EmbeddingTable::Create(config, &table);

  const std::vector<int64_t> ids = {7, -8};
  const std::vector<float> gradients = {1, 2, 3, 4};
  const float rate = 0.1f;
  OptimizeOptions options;
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  if (status.ok()) status = table->Optimize({ids.data(), 2, gradients.data()}, options);

  PosixFileSystem files;
  const std::string basename = argc > 1 ? argv[1] : "/tmp/engine_example/table";
  if (status.ok()) status = SaveTable(&files, *table, basename, /*num_files=*/1, &table->expiry());
  const std::unique_ptr<EmbeddingTable> other = status.ok() ? table->NewEmptyTwin() : nullptr;
  if (status.ok()) status = LoadTable(&files, basename, other.get());
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message.c_str()), 1;
  other->VisitRows([](const RowView& row) {
    std::printf("%lld: %.3f %.3f\n", static_cast<long long>(row.id), row.values[0], row.values[1]);
    return true;
  });
}

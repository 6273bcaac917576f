// Creates a table, saves two rows and reads them back into another table.
#include <cstdio>
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/files/posix_file_system.h"
#include "monolith/native_training/runtime/hash_table/records/table_files.h"

using namespace monolith::engine;

int main(int argc, char** argv) {
  SegmentConfig segment;
  segment.dim_size = 2;
  segment.optimizer.kind = OptimizerKind::kAdagrad;
  segment.initializer.kind = InitializerKind::kZeros;
  TableConfig config;
  config.entry.segments = {segment};
  std::unique_ptr<EmbeddingTable> table, other;
  Status status = EmbeddingTable::Create(config, &table);
  if (status.ok()) status = EmbeddingTable::Create(config, &other);

  const std::vector<int64_t> ids = {7, -8};
  const std::vector<float> values = {1, 2, 3, 4};
  if (status.ok()) status = table->Assign({ids.data(), 2, values.data()}, WriteOptions());

  PosixFileSystem files;
  const std::string basename = argc > 1 ? argv[1] : "/tmp/engine_example/table";
  if (status.ok()) status = SaveTable(&files, *table, basename, /*num_files=*/1, &table->expiry());
  if (status.ok()) status = LoadTable(&files, basename, other.get());
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message.c_str()), 1;
  other->VisitRows([](const RowView& row) {
    std::printf("%lld: %g %g\n", static_cast<long long>(row.id), row.values[0], row.values[1]);
    return true;
  });
}

#include "monolith/native_training/runtime/ops/tables/fused_table_calls.h"

#include <string_view>

#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

std::vector<int64_t> Dims(const std::vector<FilteredTable>& tables) {
  std::vector<int64_t> dims;
  for (const FilteredTable& table : tables) dims.push_back(table.table->dim());
  return dims;
}

Status OutputOffsets(OpKernelContext* ctx, int output, const std::vector<int64_t>& offsets) {
  Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, output, {static_cast<int64_t>(offsets.size())}, &tensor));
  auto values = tensor->vec<int32_t>();
  for (size_t i = 0; i < offsets.size(); ++i) values(i) = static_cast<int32_t>(offsets[i]);
  return OkStatus();
}

Status CheckOffsets(std::string_view name, const Tensor& tensor,
                    const std::vector<int64_t>& offsets) {
  TF_RETURN_IF_ERROR(CheckVector(name, tensor));
  TF_RETURN_IF_ERROR(CheckEqual(strings::StrCat("size of ", name), tensor.NumElements(),
                                "number of segments + 1", static_cast<int64_t>(offsets.size())));
  const auto values = tensor.vec<int32_t>();
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (values(i) != offsets[i]) {
      return errors::InvalidArgument(name, "[", i, "] is ", values(i), ", want ", offsets[i],
                                     " by fused_slot_size");
    }
  }
  return OkStatus();
}

}  // namespace

Status OutputFusedOffsets(OpKernelContext* ctx, const FusedOffsets& offsets,
                          int64_t num_of_shards) {
  const int64_t num_tables = static_cast<int64_t>(offsets.ids.size() - 1) / num_of_shards;
  Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {num_of_shards}, &splits));
  for (int64_t shard = 0; shard < num_of_shards; ++shard) {
    splits->vec<int32_t>()(shard) = static_cast<int32_t>(offsets.floats[(shard + 1) * num_tables] -
                                                         offsets.floats[shard * num_tables]);
  }
  TF_RETURN_IF_ERROR(OutputOffsets(ctx, 2, offsets.ids));
  return OutputOffsets(ctx, 3, offsets.floats);
}

Status CheckFusedUpdate(OpKernelContext* ctx, int first_input, const std::vector<int64_t>& dims,
                        int64_t num_segments, int64_t num_of_shards, FusedOffsets* offsets) {
  const Tensor& ids = ctx->input(first_input);
  TF_RETURN_IF_ERROR(CheckVector("ids", ids));
  TF_RETURN_IF_ERROR(FusedOffsets::Create(ctx->input(first_input + 2), dims, num_of_shards,
                                          ids.NumElements(), offsets));
  TF_RETURN_IF_ERROR(CheckOffsets("id_offsets", ctx->input(first_input + 4), offsets->ids));
  TF_RETURN_IF_ERROR(CheckOffsets("grad_offsets", ctx->input(first_input + 5), offsets->floats));
  TF_RETURN_IF_ERROR(CheckEqual("size of id_grads", ctx->input(first_input + 3).NumElements(),
                                "floats of all ids", offsets->floats.back()));
  return CheckEqual("size of learning_rate_tensors", ctx->input(first_input + 6).NumElements(),
                    "segments of all tables", num_segments);
}

Status FusedLookup(OpKernelContext* ctx, int first_input, const std::vector<FilteredTable>& tables,
                   int64_t num_of_shards) {
  const Tensor& ids = ctx->input(first_input);
  TF_RETURN_IF_ERROR(CheckVector("ids", ids));
  FusedOffsets offsets;
  TF_RETURN_IF_ERROR(FusedOffsets::Create(ctx->input(first_input + 1), Dims(tables), num_of_shards,
                                          ids.NumElements(), &offsets));
  Tensor* embeddings = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {offsets.floats.back()}, &embeddings));
  const int64_t num_tables = static_cast<int64_t>(tables.size());
  std::vector<engine::LookupRequest> requests;
  for (int64_t i = 0; i < num_tables * num_of_shards; ++i) {
    requests.push_back({tables[i % num_tables].table, ids.vec<int64_t>().data() + offsets.ids[i],
                        offsets.ids[i + 1] - offsets.ids[i],
                        embeddings->vec<float>().data() + offsets.floats[i]});
  }
  DeviceRunner runner(ctx);
  engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                     &runner);
  TF_RETURN_IF_ERROR(OutputFusedOffsets(ctx, offsets, num_of_shards));
  ctx->set_output(4, ids);
  return OkStatus();
}

Status FusedOptimize(OpKernelContext* ctx, int first_input,
                     const std::vector<FilteredTable>& tables, int64_t num_of_shards,
                     bool enable_grad_accumulation) {
  const Tensor& ids = ctx->input(first_input);
  const Tensor& grads = ctx->input(first_input + 3);
  const Tensor& rates = ctx->input(first_input + 6);
  int64_t num_segments = 0;
  for (const FilteredTable& table : tables) num_segments += table.table->num_segments();
  FusedOffsets offsets;
  TF_RETURN_IF_ERROR(
      CheckFusedUpdate(ctx, first_input, Dims(tables), num_segments, num_of_shards, &offsets));
  engine::OptimizeOptions options;
  TF_RETURN_IF_ERROR(GetNumber(ctx, first_input + 7, "req_time", &options.write.req_time));
  TF_RETURN_IF_ERROR(GetNumber(ctx, first_input + 8, "global_step", &options.global_step));
  TF_RETURN_IF_ERROR(GetNonFinite(&options.write.non_finite));
  options.dedup = enable_grad_accumulation;

  const int64_t num_tables = static_cast<int64_t>(tables.size());
  std::vector<engine::WriteSpan> spans;
  for (int64_t table = 0; table < num_tables; ++table) {
    for (int64_t shard = 0; shard < num_of_shards; ++shard) {
      const int64_t i = shard * num_tables + table;
      spans.push_back({ids.vec<int64_t>().data() + offsets.ids[i],
                       offsets.ids[i + 1] - offsets.ids[i],
                       grads.flat<float>().data() + offsets.floats[i]});
    }
  }
  std::vector<engine::OptimizeRequest> requests;
  const float* rate = rates.flat<float>().data();
  for (int64_t table = 0; table < num_tables; ++table) {
    options.learning_rates = rate;
    options.num_learning_rates = tables[table].table->num_segments();
    options.write.filter = tables[table].filter;
    rate += options.num_learning_rates;
    requests.push_back(
        {tables[table].table, spans.data() + table * num_of_shards, num_of_shards, options});
  }
  DeviceRunner runner(ctx);
  return FromEngine(engine::EmbeddingTable::OptimizeMany(requests.data(), num_tables, &runner));
}

}  // namespace monolith_tf
}  // namespace tensorflow

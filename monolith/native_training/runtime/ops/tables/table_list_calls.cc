#include "monolith/native_training/runtime/ops/tables/table_list_calls.h"

#include "monolith/native_training/runtime/distribution/sum_duplicates.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int64_t kCyclesPerId = 60;

}  // namespace

Status LookUpLists(OpKernelContext* ctx, const std::vector<engine::EmbeddingTable*>& tables,
                   const std::vector<int64_t>& dims, const OpInputList& ids) {
  if (static_cast<int>(dims.size()) != ids.size()) {
    return errors::InvalidArgument("dims has ", dims.size(), " elements, want ", ids.size(),
                                   ", one per input");
  }
  std::vector<engine::LookupRequest> requests;
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    if (dims[i] != tables[i]->dim()) {
      return errors::InvalidArgument("dims[", i, "] is ", dims[i],
                                     ", but the table of that input has dimension ",
                                     tables[i]->dim());
    }
    const int64_t n = ids[i].NumElements();
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, i, {n, dims[i]}, &out));
    if (n == 0) continue;
    requests.push_back({tables[i], ids[i].vec<int64_t>().data(), n, out->flat<float>().data()});
  }
  DeviceRunner runner(ctx);
  engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                     &runner);
  return OkStatus();
}

Status OptimizeLists(OpKernelContext* ctx, const std::vector<ListedTable>& tables,
                     const OpInputList& ids, const OpInputList& grads,
                     const engine::OptimizeOptions& options) {
  // Where the distinct ids and the sums of each input go.
  std::vector<int64_t> first_id(1, 0), first_float(1, 0);
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    const int64_t n = ids[i].NumElements(), dim = tables[i].table->dim();
    int64_t want = 0;
    TF_RETURN_IF_ERROR(MultiplySizes("size of ids * dimension", n, dim, &want));
    if (grads[i].NumElements() != want) {
      return errors::InvalidArgument("grads[", i, "] has ", grads[i].NumElements(),
                                     " elements, want ", n, " ids times dimension ", dim);
    }
    first_id.push_back(first_id.back() + n);
    first_float.push_back(first_float.back() + want);
  }
  Tensor unique_ids, sums;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT64, {first_id.back()}, &unique_ids));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_FLOAT, {first_float.back()}, &sums));
  std::vector<engine::WriteSpan> spans(ids.size());
  const auto sum_input = [&](int64_t i) {
    int64_t* const unique = unique_ids.vec<int64_t>().data() + first_id[i];
    float* const sum = sums.vec<float>().data() + first_float[i];
    const int64_t count = ::monolith::distribution::SumDuplicates(
        ids[i].vec<int64_t>().data(), grads[i].flat<float>().data(), ids[i].NumElements(),
        tables[i].table->dim(), unique, sum);
    spans[i] = {unique, count, sum};
  };
  DeviceRunner runner(ctx);
  if (runner.TasksFor(first_id.back() * kCyclesPerId) == 1) {
    for (int i = 0; i < ids.size(); ++i) sum_input(i);
  } else {
    runner.RunTasks(ids.size(), sum_input);
  }

  std::vector<engine::OptimizeRequest> requests;
  for (int i = 0; i < ids.size(); ++i) {
    if (spans[i].n == 0) continue;
    engine::OptimizeOptions own = options;
    own.write.filter = tables[i].filter;
    own.learning_rates = tables[i].learning_rates;
    own.num_learning_rates = tables[i].table->num_segments();
    requests.push_back({tables[i].table, &spans[i], 1, own});
  }
  return FromEngine(engine::EmbeddingTable::OptimizeMany(
      requests.data(), static_cast<int64_t>(requests.size()), &runner));
}

}  // namespace monolith_tf
}  // namespace tensorflow

#include "monolith/native_training/runtime/ops/tables/table_list_calls.h"

#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {

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
  std::vector<engine::WriteSpan> spans;
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    const int64_t n = ids[i].NumElements(), dim = tables[i].table->dim();
    int64_t want = 0;
    TF_RETURN_IF_ERROR(MultiplySizes("size of ids * dimension", n, dim, &want));
    if (grads[i].NumElements() != want) {
      return errors::InvalidArgument("grads[", i, "] has ", grads[i].NumElements(),
                                     " elements, want ", n, " ids times dimension ", dim);
    }
    spans.push_back({ids[i].vec<int64_t>().data(), n, grads[i].flat<float>().data()});
  }
  std::vector<engine::OptimizeRequest> requests;
  for (int i = 0; i < ids.size(); ++i) {
    if (spans[i].n == 0) continue;
    engine::OptimizeOptions own = options;
    own.dedup = true;
    own.count_once = true;
    own.write.filter = tables[i].filter;
    own.learning_rates = tables[i].learning_rates;
    own.num_learning_rates = tables[i].table->num_segments();
    requests.push_back({tables[i].table, &spans[i], 1, own});
  }
  DeviceRunner runner(ctx);
  return FromEngine(engine::EmbeddingTable::OptimizeMany(
      requests.data(), static_cast<int64_t>(requests.size()), &runner));
}

}  // namespace monolith_tf
}  // namespace tensorflow

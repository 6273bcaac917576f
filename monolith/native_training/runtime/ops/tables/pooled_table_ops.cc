// Lookup and update of the tables of a group by pooled rows: what a model computes with is one
// tensor [examples, columns of all features], and so is its gradient.
//
//   ids a: [[7], [8]]  b: [[4], [5]]           pooled  | row 7 of a | row 4 of b |
//                                                      | row 8 of a | row 5 of b |
//
// Rows of features with one id per example go there and back without a copy of their own.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/ops/support/background_runner.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/pooled_parts.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "monolith/native_training/runtime/ops/tables/table_places.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

// The number of examples, from the row splits of the first feature of each pooled tensor.
Status ShapeOfPooled(InferenceContext* c) {
  std::vector<int64_t> widths, numbers;
  int num_inputs;
  TF_RETURN_IF_ERROR(c->GetAttr("widths", &widths));
  TF_RETURN_IF_ERROR(c->GetAttr("parts", &numbers));
  TF_RETURN_IF_ERROR(c->GetAttr("num_inputs", &num_inputs));
  if (static_cast<int>(widths.size()) != c->num_outputs()) {
    return errors::InvalidArgument("widths has ", widths.size(), " elements, want ",
                                   c->num_outputs(), ", one per output");
  }
  std::vector<std::vector<PooledPart>> parts;
  TF_RETURN_IF_ERROR(ReadPooledParts(numbers, num_inputs, c->num_outputs(), &widths, &parts));
  std::vector<int> first(c->num_outputs(), -1);
  for (int i = num_inputs - 1; i >= 0; --i) {
    for (const PooledPart& part : parts[i]) first[part.pooled] = i;
  }
  for (int k = 0; k < c->num_outputs(); ++k) {
    if (first[k] < 0) return errors::InvalidArgument("pooled tensor ", k, " has no part");
    shape_inference::ShapeHandle splits;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(1 + num_inputs + first[k]), 1, &splits));
    shape_inference::DimensionHandle rows = c->UnknownDim();
    if (c->ValueKnown(c->Dim(splits, 0))) {
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
    }
    SetOutputShape(c, k, c->Matrix(rows, widths[k]));
  }
  return OkStatus();
}

REGISTER_OP("MonolithMultiHashTableLookupPooled")
    .Input("mtable: resource")
    .Input("ids: num_inputs * int64")
    .Input("row_splits: num_inputs * int64")
    .Output("pooled: num_outputs * float")
    .Attr("num_inputs: int >= 1")
    .Attr("num_outputs: int >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("widths: list(int) >= 1")
    .Attr("parts: list(int) >= 5")
    .SetIsStateful()
    .SetShapeFn(ShapeOfPooled)
    .Doc(R"doc(
The sums of the vectors of each example's ids, side by side. Creates nothing.

ids: Vectors.
row_splits: For each of them where the ids of each example begin, and the end.
tables: For each of them the place of its table in the order of the names.
widths: The number of columns of each output.
parts: Five numbers for each piece: which ids, the first column of their vectors and how many, which
  output, and the first column there. Pieces cover the columns of an output once.
pooled: [examples, width]; zeros where an example has no id.
)doc");

REGISTER_OP("MonolithMultiHashTableOptimizePooled")
    .Input("mtable: resource")
    .Input("ids: num_inputs * int64")
    .Input("row_splits: num_inputs * int64")
    .Input("grads: num_grads * float")
    .Input("learning_rate: float")
    .Input("update_time: int64")
    .Input("global_step: int64")
    .Output("updated_table: resource")
    .Attr("num_inputs: int >= 1")
    .Attr("num_grads: int >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("parts: list(int) >= 5")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
One optimizer step per table and distinct id, on the sum of the gradients of its examples.

ids: Vectors.
row_splits: For each of them where the ids of each example begin, and the end.
grads: [examples, columns], of sums of vectors.
tables: For each of the ids the place of their table in the order of the names; no table twice.
parts: Five numbers for each piece: which ids, the first column of their vectors and how many, which
  of `grads`, and the first column there. Columns of vectors without a piece have the gradient 0; no
  column has two.
learning_rate: One per segment of all tables, in order of the names.
update_time: Seconds; becomes the rows' time of last update.
)doc");

// Ids of one feature, and where those of each example are.
struct FeatureIds {
  const int64_t* ids;
  int64_t n;
  const int64_t* splits;
  int64_t rows;
  bool has_one_each;  // as most features have
};

// Reads vectors of ids and their row splits. Fails with InvalidArgument if these are none.
Status ReadFeatureIds(OpKernelContext* ctx, const engine::ParallelRunner& runner,
                      std::vector<FeatureIds>* features) {
  OpInputList ids, splits;
  TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(ctx->input_list("row_splits", &splits));
  const int count = ids.size();
  features->resize(count);
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("row_splits[", i, "]"), splits[i]));
    (*features)[i] = {ids[i].vec<int64_t>().data(), ids[i].NumElements(),
                      splits[i].vec<int64_t>().data(), splits[i].NumElements() - 1, false};
    total += splits[i].NumElements();
  }
  // Features of one id for each example often share their splits.
  const auto same_as = [&](int64_t i) {
    return i > 0 && (*features)[i].splits == (*features)[i - 1].splits &&
           (*features)[i].rows == (*features)[i - 1].rows &&
           (*features)[i].n == (*features)[i - 1].n;
  };
  std::vector<Status> statuses(count);
  const auto check = [&](int64_t i) {
    FeatureIds& feature = (*features)[i];
    bool one_each = feature.n == feature.rows;
    for (int64_t r = 0; one_each && r <= feature.rows; ++r) one_each = feature.splits[r] == r;
    feature.has_one_each = one_each;
    if (one_each) return;
    statuses[i] = CheckRowSplits(strings::StrCat("row_splits[", i, "]"), feature.splits,
                                 feature.rows + 1, feature.n);
  };
  std::vector<int64_t> different;
  for (int64_t i = 0; i < count; ++i) {
    if (!same_as(i)) different.push_back(i);
  }
  const auto num_different = static_cast<int64_t>(different.size());
  if (runner.TasksFor(total) == 1 || num_different == 1) {
    for (const int64_t i : different) check(i);
  } else {
    runner.RunTasks(num_different, [&](int64_t k) { check(different[k]); });
  }
  for (int64_t i = 0; i < count; ++i) {
    if (same_as(i)) (*features)[i].has_one_each = (*features)[i - 1].has_one_each;
    TF_RETURN_IF_ERROR(statuses[i]);
  }
  return OkStatus();
}

// Whether rows and pooled rows are the same but for where they lie.
bool IsDirect(const FeatureIds& feature, const std::vector<PooledPart>& parts, int64_t dim) {
  return feature.has_one_each && parts.size() == 1 && parts[0].column == 0 && parts[0].width == dim;
}

// Fails with InvalidArgument if a piece has columns that the vectors of its input do not have.
Status CheckColumns(const std::vector<PooledPart>& parts, int input, int64_t dim) {
  for (const PooledPart& part : parts) {
    if (part.column + part.width > dim) {
      return errors::InvalidArgument("parts has columns up to ", part.column + part.width,
                                     " of input ", input, ", whose table has dimension ", dim);
    }
  }
  return OkStatus();
}

// Fails with InvalidArgument if two pieces have a column of an input's vectors in common.
Status CheckApart(std::vector<PooledPart> parts, int input) {
  std::sort(parts.begin(), parts.end(),
            [](const PooledPart& a, const PooledPart& b) { return a.column < b.column; });
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].column < parts[i - 1].column + parts[i - 1].width) {
      return errors::InvalidArgument("parts has column ", parts[i].column, " of input ", input,
                                     " twice, want a gradient for it once");
    }
  }
  return OkStatus();
}

// Memory for rows that need a copy: a vector per id of those inputs.
class CopiedRows {
 public:
  void Add(int input, int64_t n, int64_t dim) {
    begins_.emplace_back(input, total_);
    total_ += n * dim;
  }
  Status Allocate(OpKernelContext* ctx) {
    if (begins_.empty()) return OkStatus();
    return ctx->allocate_temp(DT_FLOAT, TensorShape({total_}), &memory_);
  }
  int64_t size() const { return static_cast<int64_t>(begins_.size()); }
  int input(int64_t k) const { return begins_[k].first; }
  float* rows(int64_t k) { return memory_.flat<float>().data() + begins_[k].second; }

 private:
  std::vector<std::pair<int, int64_t>> begins_;
  int64_t total_ = 0;
  Tensor memory_;
};

// Adds up the rows of each of the examples [begin, end).
void PoolRows(const FeatureIds& feature, const float* rows, int64_t dim,
              const std::vector<PooledPart>& parts, const std::vector<float*>& pooled,
              const std::vector<int64_t>& widths, int64_t begin, int64_t end) {
  for (const PooledPart& part : parts) {
    const int64_t width = part.width, stride = widths[part.pooled];
    for (int64_t r = begin; r < end; ++r) {
      float* __restrict out = pooled[part.pooled] + r * stride + part.pooled_column;
      const float* row = rows + feature.splits[r] * dim + part.column;
      if (feature.splits[r] == feature.splits[r + 1]) {
        std::memset(out, 0, width * sizeof(float));
        continue;
      }
      std::memcpy(out, row, width * sizeof(float));
      for (int64_t i = feature.splits[r] + 1; i < feature.splits[r + 1]; ++i) {
        row += dim;
        for (int64_t c = 0; c < width; ++c) out[c] += row[c];
      }
    }
  }
}

// Gives each id of the examples [begin, end) the gradient of its example.
void SpreadGradients(const FeatureIds& feature, float* rows, int64_t dim,
                     const std::vector<PooledPart>& parts, const std::vector<const float*>& grads,
                     const std::vector<int64_t>& widths, int64_t begin, int64_t end) {
  int64_t covered = 0;
  for (const PooledPart& part : parts) covered += part.width;
  if (covered < dim) {
    std::memset(rows + feature.splits[begin] * dim, 0,
                (feature.splits[end] - feature.splits[begin]) * dim * sizeof(float));
  }
  for (const PooledPart& part : parts) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const grad = grads[part.pooled] + r * widths[part.pooled] + part.pooled_column;
      for (int64_t i = feature.splits[r]; i < feature.splits[r + 1]; ++i) {
        std::memcpy(rows + i * dim + part.column, grad, part.width * sizeof(float));
      }
    }
  }
}

// Calls fn(k, begin, end) for ranges of the examples of the k-th input that needs a copy.
template <typename Fn>
void ForCopied(const engine::ParallelRunner& runner, CopiedRows* copied,
               const std::vector<FeatureIds>& features, const Fn& fn) {
  constexpr int64_t kGrain = 1024;
  struct Range {
    int64_t k, begin, end;
  };
  std::vector<Range> ranges;
  for (int64_t k = 0; k < copied->size(); ++k) {
    const int64_t rows = features[copied->input(k)].rows;
    for (int64_t begin = 0; begin < rows; begin += kGrain) {
      ranges.push_back({k, begin, std::min(rows, begin + kGrain)});
    }
  }
  runner.RunTasks(static_cast<int64_t>(ranges.size()),
                  [&](int64_t t) { fn(ranges[t].k, ranges[t].begin, ranges[t].end); });
}

// The tables of the inputs.
Status GetPooledTables(const MultiHashTableResource& group, const std::vector<int64_t>& indices,
                       const std::vector<std::vector<PooledPart>>& parts,
                       std::vector<engine::EmbeddingTable*>* tables) {
  TF_RETURN_IF_ERROR(CheckTablePlaces(indices, static_cast<int>(parts.size()), group.size()));
  for (size_t i = 0; i < indices.size(); ++i) {
    tables->push_back(group.table(indices[i]));
    TF_RETURN_IF_ERROR(CheckColumns(parts[i], static_cast<int>(i), tables->back()->dim()));
  }
  return OkStatus();
}

class LookupPooledOp : public OpKernel {
 public:
  explicit LookupPooledOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> numbers;
    int num_inputs;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("widths", &widths_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &numbers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_inputs", &num_inputs));
    OP_REQUIRES(ctx, static_cast<int>(widths_.size()) == ctx->num_outputs(),
                errors::InvalidArgument("widths has ", widths_.size(), " elements, want ",
                                        ctx->num_outputs(), ", one per output"));
    OP_REQUIRES_OK(ctx,
                   ReadPooledParts(numbers, num_inputs, ctx->num_outputs(), &widths_, &parts_));
    OP_REQUIRES_OK(ctx, CheckCovered());
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    std::vector<engine::EmbeddingTable*> tables;
    OP_REQUIRES_OK(ctx, GetPooledTables(*group, tables_, parts_, &tables));
    BackgroundRunner runner(ctx);
    std::vector<FeatureIds> features;
    OP_REQUIRES_OK(ctx, ReadFeatureIds(ctx, runner, &features));
    std::vector<float*> pooled;
    OP_REQUIRES_OK(ctx, Allocate(ctx, features, &pooled));
    CopiedRows copied;
    for (size_t i = 0; i < features.size(); ++i) {
      if (!IsDirect(features[i], parts_[i], tables[i]->dim())) {
        copied.Add(static_cast<int>(i), features[i].n, tables[i]->dim());
      }
    }
    OP_REQUIRES_OK(ctx, copied.Allocate(ctx));
    std::vector<engine::LookupRequest> requests;
    int64_t next_copied = 0;
    for (size_t i = 0; i < features.size(); ++i) {
      engine::LookupRequest request{tables[i], features[i].ids, features[i].n};
      if (next_copied < copied.size() && copied.input(next_copied) == static_cast<int>(i)) {
        request.out = copied.rows(next_copied++);
      } else {
        const PooledPart& part = parts_[i][0];
        request.out = pooled[part.pooled] + part.pooled_column;
        request.stride = widths_[part.pooled];
      }
      if (request.n > 0) requests.push_back(request);
    }
    engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                       &runner);
    ForCopied(runner, &copied, features, [&](int64_t k, int64_t begin, int64_t end) {
      const int input = copied.input(k);
      PoolRows(features[input], copied.rows(k), tables[input]->dim(), parts_[input], pooled,
               widths_, begin, end);
    });
  }

 private:
  // Fails unless pieces cover the columns of each output once.
  Status CheckCovered() const {
    std::vector<std::vector<std::pair<int64_t, int64_t>>> pieces(widths_.size());
    for (const auto& parts : parts_) {
      for (const PooledPart& part : parts) {
        pieces[part.pooled].emplace_back(part.pooled_column, part.width);
      }
    }
    for (size_t k = 0; k < widths_.size(); ++k) {
      std::sort(pieces[k].begin(), pieces[k].end());
      int64_t at = 0;
      for (const auto& [column, width] : pieces[k]) {
        if (column != at) break;
        at += width;
      }
      if (at != widths_[k]) {
        return errors::InvalidArgument("parts of pooled tensor ", k, " cover columns up to ", at,
                                       " once, want ", widths_[k]);
      }
    }
    return OkStatus();
  }

  Status Allocate(OpKernelContext* ctx, const std::vector<FeatureIds>& features,
                  std::vector<float*>* pooled) const {
    std::vector<int64_t> rows(widths_.size(), -1);
    for (size_t i = 0; i < features.size(); ++i) {
      for (const PooledPart& part : parts_[i]) {
        int64_t& wanted = rows[part.pooled];
        if (wanted < 0) wanted = features[i].rows;
        if (features[i].rows != wanted) {
          return errors::InvalidArgument("row_splits[", i, "] has ", features[i].rows,
                                         " rows, want ", wanted,
                                         ", as another feature of the pooled tensor has");
        }
      }
    }
    for (size_t k = 0; k < widths_.size(); ++k) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, static_cast<int64_t>(k), {rows[k], widths_[k]}, &out));
      pooled->push_back(out->flat<float>().data());
    }
    return OkStatus();
  }

  std::vector<int64_t> tables_;
  std::vector<int64_t> widths_;
  std::vector<std::vector<PooledPart>> parts_;  // of each input
};

class OptimizePooledOp : public OpKernel {
 public:
  explicit OptimizePooledOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> numbers;
    int num_inputs, num_grads;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(ctx, CheckEachOnce("tables", "table", tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &numbers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_inputs", &num_inputs));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_grads", &num_grads));
    OP_REQUIRES_OK(ctx, ReadPooledParts(numbers, num_inputs, num_grads, nullptr, &parts_));
    for (size_t i = 0; i < parts_.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckApart(parts_[i], static_cast<int>(i)));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    std::vector<engine::EmbeddingTable*> tables;
    OP_REQUIRES_OK(ctx, GetPooledTables(*group, tables_, parts_, &tables));
    BackgroundRunner runner(ctx);
    std::vector<FeatureIds> features;
    OP_REQUIRES_OK(ctx, ReadFeatureIds(ctx, runner, &features));
    std::vector<const float*> grads;
    std::vector<int64_t> widths;
    OP_REQUIRES_OK(ctx, ReadGradients(ctx, features, &grads, &widths));
    const int rates = ctx->num_inputs() - 3;
    engine::OptimizeOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, rates + 1, "update_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, rates + 2, "global_step", &options.global_step));
    options.dedup = true;
    options.count_once = true;
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.write.non_finite));
    std::vector<int64_t> first_rate(1, 0);
    for (int64_t t = 0; t < group->size(); ++t) {
      first_rate.push_back(first_rate.back() + group->table(t)->num_segments());
    }
    OP_REQUIRES(ctx, ctx->input(rates).NumElements() == first_rate.back(),
                errors::InvalidArgument("learning_rate has ", ctx->input(rates).NumElements(),
                                        " elements, want ", first_rate.back(),
                                        ", one per segment of all tables"));

    CopiedRows copied;
    std::vector<engine::WriteSpan> spans(features.size());
    for (size_t i = 0; i < features.size(); ++i) {
      spans[i].ids = features[i].ids;
      spans[i].n = features[i].n;
      if (IsDirect(features[i], parts_[i], tables[i]->dim())) {
        const PooledPart& part = parts_[i][0];
        spans[i].values = grads[part.pooled] + part.pooled_column;
        spans[i].stride = widths[part.pooled];
      } else {
        copied.Add(static_cast<int>(i), features[i].n, tables[i]->dim());
      }
    }
    OP_REQUIRES_OK(ctx, copied.Allocate(ctx));
    for (int64_t k = 0; k < copied.size(); ++k) spans[copied.input(k)].values = copied.rows(k);
    ForCopied(runner, &copied, features, [&](int64_t k, int64_t begin, int64_t end) {
      const int input = copied.input(k);
      SpreadGradients(features[input], copied.rows(k), tables[input]->dim(), parts_[input], grads,
                      widths, begin, end);
    });
    std::vector<engine::OptimizeRequest> requests;
    for (size_t i = 0; i < features.size(); ++i) {
      if (spans[i].n == 0) continue;
      engine::OptimizeOptions own = options;
      own.write.filter = group->filter(tables_[i]);
      own.learning_rates = ctx->input(rates).flat<float>().data() + first_rate[tables_[i]];
      own.num_learning_rates = tables[i]->num_segments();
      requests.push_back({tables[i], &spans[i], 1, own});
    }
    OP_REQUIRES_OK(ctx, FromEngine(engine::EmbeddingTable::OptimizeMany(
                            requests.data(), static_cast<int64_t>(requests.size()), &runner)));
    ctx->set_output(0, ctx->input(0));
  }

 private:
  Status ReadGradients(OpKernelContext* ctx, const std::vector<FeatureIds>& features,
                       std::vector<const float*>* grads, std::vector<int64_t>* widths) const {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("grads", &inputs));
    for (int k = 0; k < inputs.size(); ++k) {
      TF_RETURN_IF_ERROR(CheckMatrix(strings::StrCat("grads[", k, "]"), inputs[k]));
      grads->push_back(inputs[k].flat<float>().data());
      widths->push_back(inputs[k].dim_size(1));
    }
    for (size_t i = 0; i < features.size(); ++i) {
      for (const PooledPart& part : parts_[i]) {
        const Tensor& grad = inputs[static_cast<int>(part.pooled)];
        if (grad.dim_size(0) != features[i].rows ||
            part.pooled_column + part.width > grad.dim_size(1)) {
          return errors::InvalidArgument("grads[", part.pooled, "] has shape ",
                                         grad.shape().DebugString(), ", want ", features[i].rows,
                                         " rows, as row_splits[", i, "] has, and columns up to ",
                                         part.pooled_column + part.width);
        }
      }
    }
    return OkStatus();
  }

  std::vector<int64_t> tables_;
  std::vector<std::vector<PooledPart>> parts_;  // of each input
};

REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupPooled").Device(DEVICE_CPU),
                        LookupPooledOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimizePooled").Device(DEVICE_CPU),
                        OptimizePooledOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow

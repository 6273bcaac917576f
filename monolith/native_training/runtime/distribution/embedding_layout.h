// Fused layout: pools the embeddings of a batch's ids straight into the model's input tensors, and
// the way back. One kernel serves all op versions: each is brought into this form first.
//
//   starts  (nfl_offset)       feature f -> its first row; bit 31: one row shared by the whole
//   batch rows    (feature_offset)   row       -> its first id; both may lack the trailing end
//   entry ids     (fid_offset)       id        -> block (high 32 bits), position in the block (low
//   32 bits) blocks                     the embedding of an id starts at data[block] + position *
//   stride
//
// Cost: every embedding is read once per slice that uses it; outputs are written once.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_EMBEDDING_LAYOUT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_EMBEDDING_LAYOUT_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/distribution/layout_plan.h"

namespace monolith {
namespace distribution {

struct LayoutBlock {
  int64_t stride;                                           // floats per position, below 2^31
  int64_t size;                                             // floats
  int64_t max_width = std::numeric_limits<int64_t>::max();  // widest embedding it holds
  int64_t feature = -1;                                     // the only feature it holds, or -1
};

// Ids of one request. Pointers are borrowed.
struct LayoutRequest {
  const uint64_t* ids = nullptr;
  int64_t num_ids = 0;
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;
  const uint32_t* starts = nullptr;
  int64_t num_starts = 0;
  int64_t batch_size = 0;
  std::vector<LayoutBlock> blocks;
};

// A request whose every offset was checked.
class LayoutBatch {
 public:
  // Returns an empty string, or which offset is wrong. The plan and the request must outlive this.
  std::string Build(const engine::ParallelRunner& parallel, const LayoutPlan& plan,
                    const LayoutRequest& request);

  int64_t batch_size() const { return request_->batch_size; }

  // Writes rows [first_row, first_row + batch_size) of every output completely. data[b] is the
  // start of block b.
  void Forward(const engine::ParallelRunner& parallel, const std::vector<const float*>& data,
               int64_t first_row, const std::vector<float*>& outputs) const;

  // Adds the gradient of those rows to the embeddings. An id's columns are all summed in the order
  // batch row, then position. Runs features in parallel when no two of them share an embedding.
  void Backward(const engine::ParallelRunner& parallel,
                const std::vector<const float*>& output_grads, int64_t first_row,
                const std::vector<float*>& data) const;

 private:
  struct Rows {
    int64_t first;    // index of the feature's first row
    int64_t count;    // rows it has, at most the batch: 0 or 1 for a shared feature
    int64_t ids_end;  // end of their ids
    bool shared;
  };

  std::string ResolveRows();
  bool RowsInOrder() const;
  std::string CheckIds(int64_t feature, std::vector<int64_t>* low,
                       std::vector<int64_t>* high) const;
  std::string DescribeBadId(int64_t feature, int64_t i) const;
  bool FeaturesDisjoint(const std::vector<std::vector<int64_t>>& low,
                        const std::vector<std::vector<int64_t>>& high) const;

  // Ids of a row: [RowBegin(r), RowBegin(r + 1)).
  int64_t RowBegin(int64_t row) const {
    return row < request_->num_rows ? request_->rows[row] : request_->num_ids;
  }
  template <bool kUnitStride>
  void ForwardRows(const std::vector<const float*>& data, int64_t begin, int64_t end,
                   int64_t first_row, const std::vector<float*>& outputs) const;
  template <bool kUnitStride>
  void BackwardFeature(int64_t feature, const std::vector<const float*>& output_grads,
                       int64_t first_row, const std::vector<float*>& data) const;

  const LayoutPlan* plan_ = nullptr;
  const LayoutRequest* request_ = nullptr;
  std::vector<Rows> rows_;        // per feature
  std::vector<int64_t> strides_;  // per block
  bool unit_stride_ = false;      // all strides are 1
  bool disjoint_ = false;         // no two features share an embedding
  int64_t max_scratch_ = 0;       // floats of the largest slice over all positions
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_EMBEDDING_LAYOUT_H_

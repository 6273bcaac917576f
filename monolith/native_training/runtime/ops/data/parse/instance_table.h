// The values of a batch of Instances by column.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_INSTANCE_TABLE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_INSTANCE_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/data/fid_sharding.h"
#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"

namespace tensorflow {
namespace monolith_tf {

// Describes the columns that a kernel wants from each Instance.
struct InstanceColumns {
  std::vector<int64_t> fidv1_slots;
  std::vector<std::string> names;  // v2 sparse features, then dense ones
};

class InstanceTable {
 public:
  InstanceTable(const SampleBatch<Instance>& batch, const InstanceColumns& columns,
                const DeviceRunner& parallel);

  // Ids of slot number i of fidv1_slots, one row per Instance.
  ::monolith::data::FeatureRows FidV1Rows(int64_t i) const;
  // Ids of feature number i of names: fid, then fid_list flattened.
  ::monolith::data::FeatureRows FidV2Rows(int64_t i) const;

  // Last feature of that name, or null.
  const InstanceFeature* cell(int64_t i, int64_t row) const { return cells_[row * num_names_ + i]; }

 private:
  const SampleBatch<Instance>& batch_;
  int64_t num_names_;
  int64_t num_slots_;
  std::vector<const InstanceFeature*> cells_;
  std::vector<std::vector<uint64_t>> fids_;  // [row * slots + slot]
};

// InvalidArgument: a slot is not a v1 slot.
Status CheckSlots(const std::vector<int64_t>& slots);

// Reads a column of an Instance: exactly column.width values, or zeros (empty strings).
DenseRow InstanceDenseRow(const InstanceTable& table, int64_t i, int64_t width);
// `label`, cut or padded with 0, and `instance_weight`, 1 when it is not set.
DenseRow InstanceLabelRow(const SampleBatch<Instance>& batch, int64_t width);
DenseRow InstanceWeightRow(const SampleBatch<Instance>& batch, int64_t width);

// Fills `kind` and `field` of a column that is not a feature: label, instance_weight or LineId.
Status ResolveMiscColumn(ParseSpec::Column* column);

// Writes such a column.
Status WriteMiscColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t output,
                       const SampleBatch<Instance>& batch, const DeviceRunner& parallel);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_INSTANCE_TABLE_H_

// The samples in messages of a stream.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_MESSAGE_DECODER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_MESSAGE_DECODER_H_

#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/ops/data/samples/sample_reader.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Thread-safe once initialized.
class MessageDecoder {
 public:
  // Reads the attributes input_pb_type, output_pb_type and the four headers of records.
  Status Init(OpKernelConstruction* ctx);

  // Reads feature_pruning_type, filter_empty, has_header and the attributes of data sources, too.
  Status InitWithOptions(OpKernelConstruction* ctx);

  // string for plaintext samples, else variant.
  DataType out_type() const {
    return options_.output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
  }

  // InvalidArgument: the attribute out_type is not that of the samples.
  Status CheckOutType(DataType out_type) const;

  // Appends the samples of one message, scalars. Records without payload give none. Errors name
  // `origin`, where the message comes from.
  Status Decode(std::string_view message, std::string_view origin,
                std::vector<Tensor>* samples) const;

  // Joins samples into output `index`, a vector.
  Status Output(OpKernelContext* ctx, int index, std::vector<Tensor> samples) const;

 private:
  SampleReadOptions options_;
  bool filter_empty_ = false;
  bool has_header_ = true;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_MESSAGE_DECODER_H_

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

// Declares the attributes that InitWithOptions reads, for REGISTER_OP.
#define MONOLITH_MESSAGE_DECODER_ATTRS         \
  .Attr("out_type: {variant, string}")         \
      .Attr("input_pb_type: string")           \
      .Attr("output_pb_type: string")          \
      .Attr("feature_pruning_type: int = 2")   \
      .Attr("filter_empty: bool = false")      \
      .Attr("has_header: bool = true")         \
      .Attr("has_sort_id: bool = false")       \
      .Attr("lagrangex_header: bool = false")  \
      .Attr("kafka_dump_prefix: bool = false") \
      .Attr("kafka_dump: bool = false")        \
      .Attr("chnids: list(int) = []")          \
      .Attr("datasources: list(string) = []")  \
      .Attr("default_datasource: string = ''")

namespace tensorflow {
namespace monolith_tf {

// Thread-safe once initialized.
class MessageDecoder {
 public:
  // Reads the attributes input_pb_type, output_pb_type and the four headers of records.
  Status Init(OpKernelConstruction* ctx);

  // Reads all attributes of MONOLITH_MESSAGE_DECODER_ATTRS. InvalidArgument: out_type is not that
  // of the samples, or a value is none.
  Status InitWithOptions(OpKernelConstruction* ctx);

  // string for plaintext samples, else variant.
  DataType out_type() const {
    return options_.output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
  }

  // Appends the samples of one message, scalars. Records without payload give none. Errors name
  // `origin`, where the message comes from.
  Status Decode(std::string message, std::string_view origin, std::vector<Tensor>* samples) const;

  // Joins samples into a vector.
  Tensor Batch(std::vector<Tensor> samples) const;

 private:
  SampleReadOptions options_;
  bool filter_empty_ = false;
  bool has_header_ = true;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_MESSAGE_DECODER_H_

// From framed records to the samples they hold, whatever the records come from.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_READER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data/parse/conversions.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Names the kinds of records and elements.
enum class PbType { kInstance, kExample, kExampleBatch, kPlaintext };

// "instance", "example", "examplebatch" or "plaintext". `name` is the argument in the error.
Status ParsePbType(const char* name, const std::string& text, PbType* type);

// The data source of samples whose header does not say it, by their channel.
class DataSourceKeys {
 public:
  // Reads the attributes chnids, datasources and default_datasource.
  Status Init(OpKernelConstruction* ctx);

  uint32_t Of(const ExampleBatch&) const { return default_key_; }
  template <typename Proto>
  uint32_t Of(const Proto& proto) const {
    const auto it = key_of_chnid_.find(proto.line_id().chnid());
    return it == key_of_chnid_.end() ? default_key_ : it->second;
  }

 private:
  absl::flat_hash_map<int64_t, uint32_t> key_of_chnid_;
  uint32_t default_key_ = 0;
};

struct SampleReadOptions {
  ::monolith::data::HeaderFlags flags;
  PbType input_type = PbType::kInstance;
  PbType output_type = PbType::kPlaintext;
  Pruning pruning = Pruning::kRawFeature;
  std::vector<std::string> columns;  // of an ExampleBatch to keep; empty: all
  DataSourceKeys keys;               // not asked when records have a lagrangex header
};

// InvalidArgument: records of this type cannot become elements of that one.
Status CheckTypes(const SampleReadOptions& options);

// Turns records into elements. One ExampleBatch may give many. Not thread-safe.
class SampleReader {
 public:
  // `options` must outlive the reader; `name` is where the records come from, for errors.
  SampleReader(const SampleReadOptions& options, std::string name)
      : options_(options),
        name_(std::move(name)),
        columns_(options.columns.begin(), options.columns.end()) {}

  // Reads from `source`, which begins at `offset`; `row`: rows of its first record to leave out.
  Status Open(std::unique_ptr<::monolith::data::ByteSource> source, int64_t offset, int64_t row);

  // Reads one record without a header, whose payload this is.
  void OpenRecord(std::string payload);

  // Where Open has to continue.
  int64_t offset() const {
    return next_row_ < batch_rows_ ? reader_->record_offset() : reader_->offset();
  }
  int64_t row() const { return next_row_ < batch_rows_ ? next_row_ : 0; }

  // The next scalar, a variant or for plaintext a string. Errors name where the records come from.
  Status Next(Tensor* element, bool* end);

  // Records without payload give no element, instead of a default one.
  void set_skip_empty(bool skip_empty) { skip_empty_ = skip_empty; }

 private:
  Status NextElement(Tensor* element, bool* end);
  Status ReadRecord(std::string* payload, uint32_t* key, bool* end);
  template <typename Proto>
  Status Parse(const std::string& payload, uint32_t key, Proto* proto) const;
  Status FromInstance(const std::string& payload, uint32_t key, Tensor* element) const;
  Status FromExample(const std::string& payload, uint32_t key, Tensor* element) const;
  Status ParseBatch(const std::string& payload, uint32_t key, ExampleBatch* batch) const;
  Status FromBatch(const std::string& payload, uint32_t key, Tensor* element) const;
  Status ReadBatch(bool* end);
  Status NextRow(Tensor* element, bool* end);

  const SampleReadOptions& options_;
  const std::string name_;
  const absl::flat_hash_set<std::string> columns_;
  std::optional<std::string> payload_;  // of OpenRecord, until it is read
  bool skip_empty_ = false;
  std::unique_ptr<::monolith::data::ByteSource> source_;
  std::unique_ptr<::monolith::data::RecordReader> reader_;  // none after OpenRecord
  ExampleBatch batch_;
  int64_t batch_rows_ = 0;
  int64_t next_row_ = 0;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_READER_H_

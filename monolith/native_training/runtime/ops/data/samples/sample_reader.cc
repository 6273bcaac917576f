#include "monolith/native_training/runtime/ops/data/samples/sample_reader.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "monolith/native_training/runtime/ops/data/samples/record_source.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::ByteSource;
using ::monolith::data::ReadResult;
using ::monolith::data::RecordReader;

Status ParsePbType(const char* name, const std::string& text, PbType* type) {
  if (text == "plaintext") {
    *type = PbType::kPlaintext;
    return OkStatus();
  }
  SampleType sample_type;
  const Status status = ParseSampleType(name, text, &sample_type);
  if (!status.ok()) {
    return errors::InvalidArgument(name, " is '", text,
                                   "', want instance, example, examplebatch or plaintext");
  }
  *type = sample_type == SampleType::kInstance  ? PbType::kInstance
          : sample_type == SampleType::kExample ? PbType::kExample
                                                : PbType::kExampleBatch;
  return OkStatus();
}

Status DataSourceKeys::Init(OpKernelConstruction* ctx) {
  std::vector<int64_t> chnids;
  std::vector<std::string> datasources;
  std::string default_datasource;
  TF_RETURN_IF_ERROR(ctx->GetAttr("chnids", &chnids));
  TF_RETURN_IF_ERROR(ctx->GetAttr("datasources", &datasources));
  TF_RETURN_IF_ERROR(ctx->GetAttr("default_datasource", &default_datasource));
  TF_RETURN_IF_ERROR(CheckEqual("length of datasources", static_cast<int64_t>(datasources.size()),
                                "length of chnids", static_cast<int64_t>(chnids.size())));
  for (size_t i = 0; i < chnids.size(); ++i) {
    key_of_chnid_[chnids[i]] = ::monolith::data::DataSourceKey(datasources[i]);
  }
  default_key_ = ::monolith::data::DataSourceKey(default_datasource);
  return OkStatus();
}

Status CheckTypes(const SampleReadOptions& options) {
  if (options.output_type == PbType::kPlaintext || options.output_type == options.input_type) {
    return OkStatus();
  }
  if (options.input_type == PbType::kPlaintext || options.output_type == PbType::kExampleBatch) {
    return errors::InvalidArgument(
        "output_pb_type: plaintext cannot become a sample, and only an ExampleBatch can be "
        "returned as one");
  }
  return OkStatus();
}

Status SampleReader::Open(std::unique_ptr<ByteSource> source, int64_t offset, int64_t row) {
  source_ = std::move(source);
  reader_ = std::make_unique<RecordReader>(source_.get(), options_.flags);
  reader_->set_offset(offset);
  batch_rows_ = 0;
  if (row == 0) return OkStatus();
  bool end;
  TF_RETURN_IF_ERROR(ReadBatch(&end));
  if (end || row > batch_rows_) {
    return errors::DataLoss(name_, ": cannot resume at row ", row, " of the record at offset ",
                            offset, ", which has ", batch_rows_);
  }
  next_row_ = row;
  return OkStatus();
}

void SampleReader::OpenRecord(std::string payload) {
  reader_ = nullptr;
  source_ = nullptr;
  payload_ = std::move(payload);
  batch_rows_ = next_row_ = 0;
}

Status SampleReader::ReadRecord(std::string* payload, uint32_t* key, bool* end) {
  if (reader_ == nullptr) {
    *end = !payload_.has_value() || (skip_empty_ && payload_->empty());
    if (*end) return OkStatus();
    *payload = std::move(*payload_);
    payload_.reset();
    *key = 0;
    return OkStatus();
  }
  do {
    const ReadResult result = reader_->Next(payload, key);
    *end = result == ReadResult::kEnd;
    TF_RETURN_IF_ERROR(RecordError(name_, *reader_, result));
  } while (skip_empty_ && !*end && payload->empty());
  return OkStatus();
}

template <typename Proto>
Status SampleReader::Parse(const std::string& payload, uint32_t key, Proto* proto) const {
  if (!proto->ParseFromString(payload)) {
    return errors::FailedPrecondition("Failed to parse the ", SampleTraits<Proto>::kName, ". ",
                                      name_, ", record at offset ",
                                      reader_ == nullptr ? 0 : reader_->record_offset());
  }
  proto->set_data_source_key(options_.flags.lagrangex_header ? key : options_.keys.Of(*proto));
  return OkStatus();
}

Status SampleReader::FromInstance(const std::string& payload, uint32_t key, Tensor* element) const {
  Instance instance;
  TF_RETURN_IF_ERROR(Parse(payload, key, &instance));
  if (options_.output_type == PbType::kExample) {
    *element = MakeSampleTensor(InstanceToExample(instance));
  } else {
    *element = MakeSampleTensor(std::move(instance));
  }
  return OkStatus();
}

Status SampleReader::FromExample(const std::string& payload, uint32_t key, Tensor* element) const {
  Example example;
  TF_RETURN_IF_ERROR(Parse(payload, key, &example));
  if (options_.output_type == PbType::kInstance) {
    Instance instance;
    TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
    *element = MakeSampleTensor(std::move(instance));
    return OkStatus();
  }
  TF_RETURN_IF_ERROR(ExtendExample(&example));
  Prune(options_.pruning, &example);
  *element = MakeSampleTensor(std::move(example));
  return OkStatus();
}

Status SampleReader::ParseBatch(const std::string& payload, uint32_t key,
                                ExampleBatch* batch) const {
  TF_RETURN_IF_ERROR(Parse(payload, key, batch));
  const Status size_status = CheckBatchSize(*batch);
  if (!size_status.ok()) {
    return errors::FailedPrecondition("Failed to parse the ExampleBatch. ", name_, ": ",
                                      size_status.message());
  }
  Prune(options_.pruning, batch);
  if (columns_.empty()) return OkStatus();
  auto* columns = batch->mutable_named_feature_list();
  int kept = 0;
  for (int i = 0; i < columns->size(); ++i) {
    const std::string& name = columns->Get(i).name();
    const bool reserved = name == kLineIdName || name == kLabelName || name == kWeightName;
    if (reserved || columns_.contains(name)) columns->SwapElements(kept++, i);
  }
  columns->DeleteSubrange(kept, columns->size() - kept);
  return OkStatus();
}

Status SampleReader::FromBatch(const std::string& payload, uint32_t key, Tensor* element) const {
  ExampleBatch batch;
  TF_RETURN_IF_ERROR(ParseBatch(payload, key, &batch));
  *element = MakeSampleTensor(std::move(batch));
  return OkStatus();
}

Status SampleReader::ReadBatch(bool* end) {
  std::string payload;
  uint32_t key;
  TF_RETURN_IF_ERROR(ReadRecord(&payload, &key, end));
  if (*end) return OkStatus();
  batch_.Clear();
  TF_RETURN_IF_ERROR(ParseBatch(payload, key, &batch_));
  // No row would be looked at in a batch that says it has none.
  for (const auto& column : batch_.named_feature_list()) {
    TF_RETURN_IF_ERROR(CheckColumn(batch_, column));
  }
  batch_rows_ = batch_.batch_size();
  next_row_ = 0;
  return OkStatus();
}

Status SampleReader::NextRow(Tensor* element, bool* end) {
  *end = false;
  while (next_row_ >= batch_rows_) {
    TF_RETURN_IF_ERROR(ReadBatch(end));
    if (*end) return OkStatus();
  }
  Example example;
  TF_RETURN_IF_ERROR(ExampleBatchRow(batch_, next_row_, &example));
  ++next_row_;
  if (options_.output_type == PbType::kInstance) {
    Instance instance;
    TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
    *element = MakeSampleTensor(std::move(instance));
  } else {
    *element = MakeSampleTensor(std::move(example));
  }
  return OkStatus();
}

Status SampleReader::Next(Tensor* element, bool* end) {
  const Status status = NextElement(element, end);
  if (status.ok() || absl::StrContains(status.message(), name_)) return status;
  // A dataset must not fail with OutOfRange, which is how it ends.
  const absl::StatusCode code =
      errors::IsOutOfRange(status) ? absl::StatusCode::kInvalidArgument : status.code();
  return Status(code, absl::StrCat(name_, ", record at offset ",
                                   reader_ == nullptr ? 0 : reader_->record_offset(), ": ",
                                   status.message()));
}

Status SampleReader::NextElement(Tensor* element, bool* end) {
  const bool splits =
      options_.input_type == PbType::kExampleBatch &&
      (options_.output_type == PbType::kExample || options_.output_type == PbType::kInstance);
  if (splits) return NextRow(element, end);
  std::string payload;
  uint32_t key;
  TF_RETURN_IF_ERROR(ReadRecord(&payload, &key, end));
  if (*end) return OkStatus();
  if (options_.output_type == PbType::kPlaintext) {
    *element = Tensor(tstring(payload));
    return OkStatus();
  }
  switch (options_.input_type) {
    case PbType::kInstance:
      return FromInstance(payload, key, element);
    case PbType::kExample:
      return FromExample(payload, key, element);
    default:
      return FromBatch(payload, key, element);
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow

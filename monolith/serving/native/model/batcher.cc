#include "monolith/serving/native/model/batcher.h"

#include <algorithm>
#include <set>
#include <utility>

#include "monolith/serving/native/model/tensorflow_status.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// Returns how many rows a request has; 0 if it cannot be joined with others.
int64_t CountRows(const tensorflow::SignatureDef& signature, const Servable::Tensors& inputs,
                  const std::vector<std::string>& output_filter) {
  const std::set<std::string> wanted(output_filter.begin(), output_filter.end());
  for (const auto& [alias, info] : signature.outputs()) {
    if (!wanted.empty() && wanted.count(alias) == 0) continue;
    const auto& shape = info.tensor_shape();
    if (!shape.unknown_rank() && (shape.dim_size() == 0 || shape.dim(0).size() != -1)) return 0;
  }
  int64_t rows = -1;
  for (const auto& [alias, tensor] : inputs) {
    if (tensor.dims() == 0 || (rows >= 0 && tensor.dim_size(0) != rows)) return 0;
    rows = tensor.dim_size(0);
  }
  return std::max<int64_t>(0, rows);
}

// Requests with the same key can be joined.
std::string MakeKey(const Servable* servable, const Signature& signature,
                    const Servable::Tensors& inputs,
                    const std::vector<std::string>& output_filter) {
  std::string key =
      std::to_string(reinterpret_cast<uintptr_t>(servable)) + '\0' + signature.name() + '\0';
  const std::set<std::string> wanted(output_filter.begin(), output_filter.end());
  for (const std::string& alias : wanted) key += alias + '\0';
  for (const auto& [alias, tensor] : inputs) {
    key += alias;
    for (int i = 1; i < tensor.dims(); ++i) key += "," + std::to_string(tensor.dim_size(i));
    key += '\0';
  }
  return key;
}

}  // namespace

Status MakeBatchingSettings(const api::BatchingParameters& parameters, BatchingSettings* settings) {
  const auto refuse = [](const std::string& name, int64_t value) {
    return Status(Code::kInvalidArgument, name + " is " + std::to_string(value));
  };
  struct Field {
    const char* name;
    bool given;
    int64_t value;
    int64_t* target;
  };
  for (const Field& field :
       {Field{"max_batch_size", parameters.has_max_batch_size(),
              parameters.max_batch_size().value(), &settings->max_batch_size},
        Field{"max_enqueued_batches", parameters.has_max_enqueued_batches(),
              parameters.max_enqueued_batches().value(), &settings->max_enqueued_batches},
        Field{"num_batch_threads", parameters.has_num_batch_threads(),
              parameters.num_batch_threads().value(), &settings->num_threads}}) {
    if (!field.given) continue;
    if (field.value < 1) return refuse(field.name, field.value);
    *field.target = field.value;
  }
  const int64_t micros = parameters.batch_timeout_micros().value();
  if (micros < 0 || micros > 60'000'000) return refuse("batch_timeout_micros", micros);
  settings->timeout = std::chrono::microseconds(micros);
  int64_t last = 0;
  for (const int64_t size : parameters.allowed_batch_sizes()) {
    if (size <= last) return refuse("allowed_batch_sizes must grow, but one", size);
    settings->allowed_sizes.push_back(last = size);
  }
  if (last != 0 && last != settings->max_batch_size) {
    return refuse("allowed_batch_sizes must end with max_batch_size, but the last", last);
  }
  return Status();
}

Status Batcher::Run(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                    const std::vector<std::string>& output_filter, Servable::Tensors* outputs) {
  // A request that is refused must not fail those it would have been joined with.
  Status status = signature.Check(inputs, output_filter);
  if (!status.ok()) return status;
  const int64_t rows = CountRows(signature.definition(), inputs, output_filter);
  if (rows == 0 || rows > settings_.max_batch_size) {
    return servable->Run(signature, inputs, output_filter, outputs);
  }
  const std::string key = MakeKey(servable, signature, inputs, output_filter);
  std::unique_lock<std::mutex> lock(mutex_);
  std::shared_ptr<Batch> batch = open_[key];
  if (batch != nullptr && !batch->closed && batch->rows + rows > settings_.max_batch_size) {
    batch->closed = true;
    changed_.notify_all();
  }
  const bool leads = batch == nullptr || batch->closed;
  if (leads) {
    if (waiting_ >= settings_.max_enqueued_batches) {
      if (batch == nullptr) open_.erase(key);
      return Status(Code::kUnavailable,
                    std::to_string(waiting_) + " batches wait already to be run");
    }
    ++waiting_;
    batch = open_[key] = std::make_shared<Batch>();
  }
  const size_t place = batch->requests.size();
  batch->requests.push_back(&inputs);
  batch->sizes.push_back(rows);
  batch->rows += rows;
  if (batch->rows == settings_.max_batch_size) {
    batch->closed = true;
    changed_.notify_all();
  }
  lock.unlock();
  if (leads) {
    status = Lead(key, batch, servable, signature, output_filter);
    if (!status.ok() && batch->requests.size() == 1) return status;
  } else {
    lock.lock();
    changed_.wait(lock, [&] { return batch->done; });
    lock.unlock();
  }
  if (batch->answers.empty()) {
    // One request may have failed the whole batch: each gets a second chance of its own.
    return servable->Run(signature, inputs, output_filter, outputs);
  }
  *outputs = std::move(batch->answers[place]);
  return Status();
}

Status Batcher::Lead(const std::string& key, const std::shared_ptr<Batch>& batch,
                     Servable* servable, const Signature& signature,
                     const std::vector<std::string>& output_filter) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, settings_.timeout, [&] { return batch->closed; });
  changed_.wait(lock, [&] { return running_ < settings_.num_threads; });
  batch->closed = true;
  --waiting_;
  ++running_;
  const auto found = open_.find(key);
  if (found != open_.end() && found->second == batch) open_.erase(found);
  lock.unlock();
  Status status;
  try {
    status = RunBatch(servable, signature, output_filter, batch.get());
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, error.what());
  }
  if (!status.ok()) batch->answers.clear();
  lock.lock();
  --running_;
  batch->done = true;
  changed_.notify_all();
  return status;
}

Status Batcher::RunBatch(Servable* servable, const Signature& signature,
                         const std::vector<std::string>& output_filter, Batch* batch) const {
  int64_t rows = batch->rows;
  for (const int64_t size : settings_.allowed_sizes) {
    if (size < rows) continue;
    rows = size;
    break;
  }
  Servable::Tensors joined;
  for (const auto& [alias, first] : *batch->requests[0]) {
    std::vector<tensorflow::Tensor> parts;
    for (const Servable::Tensors* request : batch->requests) parts.push_back(request->at(alias));
    // Padded with copies of a row that the model accepts.
    for (int64_t i = batch->rows; i < rows; ++i) parts.push_back(first.Slice(0, 1));
    if (parts.size() == 1) {
      joined[alias] = parts[0];
      continue;
    }
    const Status status = FromTensorFlow(tensorflow::tensor::Concat(parts, &joined[alias]));
    if (!status.ok()) return status;
  }
  Servable::Tensors answer;
  const Status status = servable->Run(signature, joined, output_filter, &answer);
  if (!status.ok()) return status;
  std::vector<int64_t> sizes = batch->sizes;
  if (rows > batch->rows) sizes.push_back(rows - batch->rows);
  std::vector<Servable::Tensors> answers(batch->requests.size());
  for (const auto& [alias, tensor] : answer) {
    // Outputs without a row for each input row cannot be divided.
    if (tensor.dims() == 0 || tensor.dim_size(0) != rows) return Status();
    std::vector<tensorflow::Tensor> parts;
    const Status split = FromTensorFlow(tensorflow::tensor::Split(tensor, sizes, &parts));
    if (!split.ok()) return split;
    for (size_t i = 0; i < answers.size(); ++i) answers[i][alias] = parts[i];
  }
  batch->answers = std::move(answers);
  return Status();
}

}  // namespace serving
}  // namespace monolith

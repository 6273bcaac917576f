#include "monolith/native_training/runtime/ops/support/host_call.h"

#include <cstdint>
#include <shared_mutex>

#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// Returns the code of a Status; the text of an answer or of an error goes to MonolithHostReply.
using HostFunction = int32_t (*)(const char* method, int64_t method_size, const char* first,
                                 int64_t first_size, const char* second, int64_t second_size,
                                 void* reply);

// Held shared during calls, so that a host is replaced only when no call is inside of it.
std::shared_mutex host_mutex;
HostFunction host_function = nullptr;

}  // namespace

Status CallHost(std::string_view method, std::string_view first, std::string_view second,
                std::string* reply) {
  std::shared_lock<std::shared_mutex> lock(host_mutex);
  if (host_function == nullptr) {
    return errors::Unimplemented(method,
                                 " has no transport in this process: import "
                                 "monolith.native_training.distributed_serving_ops there");
  }
  reply->clear();
  const int32_t code = host_function(method.data(), static_cast<int64_t>(method.size()),
                                     first.data(), static_cast<int64_t>(first.size()),
                                     second.data(), static_cast<int64_t>(second.size()), reply);
  if (code == 0) return OkStatus();
  return Status(static_cast<absl::StatusCode>(code), *reply);
}

}  // namespace monolith_tf
}  // namespace tensorflow

extern "C" {

// Sets the function behind CallHost, null for none. Returns when no thread is inside the old one.
__attribute__((visibility("default"))) void MonolithSetHostFunction(
    tensorflow::monolith_tf::HostFunction function) {
  std::unique_lock<std::shared_mutex> lock(tensorflow::monolith_tf::host_mutex);
  tensorflow::monolith_tf::host_function = function;
}

// For host functions: `reply` is their last argument.
__attribute__((visibility("default"))) void MonolithHostReply(void* reply, const char* data,
                                                              int64_t size) {
  static_cast<std::string*>(reply)->assign(data, static_cast<size_t>(size));
}

}  // extern "C"

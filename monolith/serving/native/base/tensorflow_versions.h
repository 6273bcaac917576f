// Where TensorFlow's versions, 2.15 to 2.21, and their versions of protobuf differ for the server:
// its only header that asks which one it is. The ops have their own, runtime/ops/support.
#ifndef MONOLITH_SERVING_NATIVE_BASE_TENSORFLOW_VERSIONS_H_
#define MONOLITH_SERVING_NATIVE_BASE_TENSORFLOW_VERSIONS_H_

#include <string>
#include <string_view>

#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/stubs/common.h"

// The enum of tensorflow.error.Code has moved.
#if __has_include("tsl/protobuf/error_codes.pb.h")
#include "tsl/protobuf/error_codes.pb.h"
#else
#include "xla/tsl/protobuf/error_codes.pb.h"
#endif

namespace monolith {
namespace serving {

// Receives the errors in a text that protobuf parses; lines and columns begin at 0.
class TextErrorListener : public google::protobuf::io::ErrorCollector {
 private:
  virtual void OnError(int line, int column, std::string_view text) = 0;

#if GOOGLE_PROTOBUF_VERSION >= 4022000
  void RecordError(int line, int column, absl::string_view text) override {
    OnError(line, column, std::string_view(text.data(), text.size()));
  }
#else
  void AddError(int line, int column, const std::string& text) override {
    OnError(line, column, text);
  }
#endif
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_TENSORFLOW_VERSIONS_H_

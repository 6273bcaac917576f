// Reads from MONOLITH_BAD_GRADIENTS what becomes of rows that are not finite.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_BAD_GRADIENTS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_BAD_GRADIENTS_H_

#include <cstdlib>
#include <string_view>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Reads the setting anew in every call: a notebook may change it between two runs of one function.
inline Status GetNonFinite(::monolith::engine::NonFinite* policy) {
  using ::monolith::engine::NonFinite;
  constexpr char kVariable[] = "MONOLITH_BAD_GRADIENTS";
  const char* const given = std::getenv(kVariable);
  const std::string_view value = given == nullptr ? "stop" : given;
  if (value == "stop") {
    *policy = NonFinite::kStop;
  } else if (value == "skip") {
    *policy = NonFinite::kSkip;
  } else if (value == "ignore") {
    *policy = NonFinite::kWrite;
  } else {
    return errors::InvalidArgument(kVariable, " is '", value, "', want stop, skip or ignore");
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_BAD_GRADIENTS_H_

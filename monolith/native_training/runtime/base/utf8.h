// Tells which bytes are text.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_UTF8_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_UTF8_H_

#include <cstddef>
#include <string_view>

namespace monolith {
namespace engine {

// Length of the valid UTF-8 sequence at the start of `text`, which is not empty; 0 if there is
// none.
size_t Utf8Length(std::string_view text);

bool IsUtf8(std::string_view text);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_UTF8_H_

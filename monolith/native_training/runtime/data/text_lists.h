// Lists that op attributes carry as text.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_TEXT_LISTS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_TEXT_LISTS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace data {

// A whole number, or a float, with nothing but white space around it. False: it is none, or does
// not fit.
bool ParseNumber(std::string_view text, int64_t* number);
bool ParseNumber(std::string_view text, float* number);

// "2,3,4" -> numbers. Skips parts without text. InvalidArgument names `what`.
engine::Status ParseInts(std::string_view what, std::string_view text,
                         std::vector<int64_t>* numbers);

// "a:b,c:d" -> {{a, b}, {c, d}}, with at least `min` and at most `max` parts each. Skips tuples
// without text. InvalidArgument names `what`.
engine::Status ParseTuples(std::string_view what, std::string_view text, size_t min, size_t max,
                           std::vector<std::vector<std::string>>* tuples);

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_TEXT_LISTS_H_

#include "monolith/native_training/runtime/data/text_lists.h"

#include <charconv>
#include <system_error>
#include <utility>

namespace monolith {
namespace data {
namespace {

constexpr std::string_view kWhiteSpace = " \t\n\v\f\r";

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kWhiteSpace) - begin + 1);
}

template <typename T>
bool Parse(std::string_view text, T* number) {
  text = Trim(text);
  // from_chars takes no plus, and must not be handed "+-1" without it.
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, *number);
  return result.ec == std::errc() && result.ptr == end;
}

// Calls visit(part) for the parts between separators.
template <typename Visit>
void Split(std::string_view text, char separator, const Visit& visit) {
  while (true) {
    const size_t end = text.find(separator);
    visit(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

}  // namespace

bool ParseNumber(std::string_view text, int64_t* number) { return Parse(text, number); }
bool ParseNumber(std::string_view text, float* number) { return Parse(text, number); }

engine::Status ParseInts(std::string_view what, std::string_view text,
                         std::vector<int64_t>* numbers) {
  engine::Status status;
  Split(text, ',', [&](std::string_view part) {
    int64_t number = 0;
    if (Trim(part).empty() || !status.ok()) return;
    if (ParseNumber(part, &number)) return numbers->push_back(number);
    status = engine::Status::InvalidArgument(std::string(what) + " is " + Quoted(text) +
                                             ", in which " + Quoted(part) + " is not an integer");
  });
  return status;
}

engine::Status ParseTuples(std::string_view what, std::string_view text, size_t min, size_t max,
                           std::vector<std::vector<std::string>>* tuples) {
  engine::Status status;
  Split(text, ',', [&](std::string_view part) {
    if (Trim(part).empty() || !status.ok()) return;
    std::vector<std::string> tuple;
    Split(part, ':', [&tuple](std::string_view element) { tuple.emplace_back(element); });
    if (tuple.size() < min || tuple.size() > max) {
      status = engine::Status::InvalidArgument(std::string(what) + " is " + Quoted(text) +
                                               ", in which " + Quoted(part) + " has " +
                                               std::to_string(tuple.size()) + " parts, want " +
                                               std::to_string(min) + " to " + std::to_string(max));
      return;
    }
    tuples->push_back(std::move(tuple));
  });
  return status;
}

}  // namespace data
}  // namespace monolith

// Comparisons of a value, or of a list of values, with configured operands.
//
//   gt ge eq lt le neq   with the first operand
//   between              lo <= x < hi
//   in, not-in           whether it is one of the operands
//   startswith, endswith any operand; strings only
//   any, all, diff       a list has one of, every one of, none of the operands
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_VALUE_FILTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_VALUE_FILTER_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace monolith {
namespace data {

enum class Comparison {
  kGt,
  kGe,
  kEq,
  kLt,
  kLe,
  kNeq,
  kBetween,
  kIn,
  kNotIn,
  kStartsWith,
  kEndsWith,
  kAny,
  kAll,
  kDiff,
};

inline bool IsListComparison(Comparison op) {
  return op == Comparison::kAny || op == Comparison::kAll || op == Comparison::kDiff;
}

// False: there is no comparison of that name.
inline bool ParseComparison(std::string_view name, Comparison* op) {
  static constexpr std::pair<std::string_view, Comparison> kNames[] = {
      {"gt", Comparison::kGt},
      {"ge", Comparison::kGe},
      {"eq", Comparison::kEq},
      {"lt", Comparison::kLt},
      {"le", Comparison::kLe},
      {"neq", Comparison::kNeq},
      {"between", Comparison::kBetween},
      {"in", Comparison::kIn},
      {"not-in", Comparison::kNotIn},
      {"startswith", Comparison::kStartsWith},
      {"endswith", Comparison::kEndsWith},
      {"any", Comparison::kAny},
      {"all", Comparison::kAll},
      {"diff", Comparison::kDiff},
  };
  for (const auto& [known, value] : kNames) {
    if (known == name) {
      *op = value;
      return true;
    }
  }
  return false;
}

// T is int64_t, double or std::string.
template <typename T>
class ValueFilter {
 public:
  // Returns an empty string, or what is wrong.
  std::string Build(Comparison op, std::vector<T> operands) {
    const size_t size = operands.size();
    const bool affix = op == Comparison::kStartsWith || op == Comparison::kEndsWith;
    if (affix && !std::is_same_v<T, std::string>) return "startswith and endswith need a string";
    if (op == Comparison::kBetween && size != 2) {
      return "between has " + std::to_string(size) + " operands, want 2";
    }
    if (op <= Comparison::kNeq && size < 1) return "the comparison has no operand";
    op_ = op;
    operands_ = std::move(operands);
    set_.insert(operands_.begin(), operands_.end());
    return "";
  }

  Comparison op() const { return op_; }

  bool Matches(const T& value) const {
    switch (op_) {
      case Comparison::kGt:
        return value > operands_[0];
      case Comparison::kGe:
        return value >= operands_[0];
      case Comparison::kEq:
        return value == operands_[0];
      case Comparison::kLt:
        return value < operands_[0];
      case Comparison::kLe:
        return value <= operands_[0];
      case Comparison::kNeq:
        return value != operands_[0];
      case Comparison::kBetween:
        return operands_[0] <= value && value < operands_[1];
      case Comparison::kIn:
      case Comparison::kAny:
      case Comparison::kAll:
        return set_.count(value) > 0;
      case Comparison::kNotIn:
      case Comparison::kDiff:
        return set_.count(value) == 0;
      case Comparison::kStartsWith:
      case Comparison::kEndsWith:
        if constexpr (std::is_same_v<T, std::string>) return MatchesAffix(value);
        return false;
    }
    return false;
  }

  // Set comparisons; others ask the first value. The list must not be empty.
  template <typename List>
  bool MatchesList(const List& values) const {
    if (op_ == Comparison::kAll) {
      const std::unordered_set<T> present(values.begin(), values.end());
      return std::all_of(operands_.begin(), operands_.end(),
                         [&present](const T& operand) { return present.count(operand) > 0; });
    }
    const bool any = std::any_of(values.begin(), values.end(), [this](const auto& value) {
      return set_.count(static_cast<T>(value)) > 0;
    });
    if (op_ == Comparison::kAny) return any;
    if (op_ == Comparison::kDiff) return !any;
    return Matches(static_cast<T>(*values.begin()));
  }

 private:
  bool MatchesAffix(const T& value) const {
    const bool prefix = op_ == Comparison::kStartsWith;
    return std::any_of(operands_.begin(), operands_.end(), [&](const T& operand) {
      if (value.size() < operand.size()) return false;
      const size_t at = prefix ? 0 : value.size() - operand.size();
      return value.compare(at, operand.size(), operand) == 0;
    });
  }

  Comparison op_ = Comparison::kEq;
  std::vector<T> operands_;
  std::unordered_set<T> set_;
};

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_VALUE_FILTER_H_

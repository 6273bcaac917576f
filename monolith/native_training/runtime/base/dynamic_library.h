// Libraries of other projects that are looked for when they are first needed, and not linked.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_DYNAMIC_LIBRARY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_DYNAMIC_LIBRARY_H_

#include <string>
#include <vector>

namespace monolith {
namespace engine {

// A library that stays loaded until the process ends.
class DynamicLibrary {
 public:
  enum class Prefers {
    kProcess,  // functions that the process has already, as the system does it
    kItself,   // its own, where the process has others of the same name
  };

  // Opens the first candidate that can be opened: a path, or a name for the system's search.
  // False: none can, and `error` says why for each.
  bool Open(const std::vector<std::string>& candidates, std::string* error,
            Prefers prefers = Prefers::kProcess);

  // The function of that name. False: the library has none.
  template <typename Function>
  bool Find(const char* name, Function** function, std::string* error) const {
    void* const found = FindSymbol(name, error);
    *function = reinterpret_cast<Function*>(found);
    return found != nullptr;
  }

  // Returns the path that was opened.
  const std::string& path() const { return path_; }

 private:
  void* FindSymbol(const char* name, std::string* error) const;

  void* handle_ = nullptr;
  std::string path_;
};

// The folder of the library or program that holds `address`, without links; empty if unknown.
std::string FolderOfCode(const void* address);

// The existing paths that match a shell pattern, sorted.
std::vector<std::string> MatchingPaths(const std::string& pattern);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_DYNAMIC_LIBRARY_H_

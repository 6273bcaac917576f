// The position of an exported model in a log, which `assets.extra` records.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_SYNC_STATE_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_SYNC_STATE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Names of the files in `assets.extra`.
constexpr char kRowState[] = "sync_state.json";
constexpr char kDenseState[] = "dense_state.json";

// A position in one partition of a log.
struct SyncState {
  // Writer and number of the newest complete batch before the position; 0 for none.
  int64_t epoch = 0;
  int64_t seq = 0;
  std::string topic;
  int64_t partition = 0;
  int64_t next_offset = 0;

  std::string Describe() const { return topic + "[" + std::to_string(partition) + "]"; }
};

// Reads a state of the exported version in `folder`; none if the file is not there. The error names
// the file.
Status ReadSyncState(const std::string& folder, const char* name, std::optional<SyncState>* state);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_SYNC_STATE_H_

// Who serves the other parts of a model.
//
// From a flag, `ps_0=10.0.0.1:8500|10.0.0.2:8500,ps_1=10.0.0.3:8500`, where a key is the name under
// which the other server serves the model; or from the agent at localhost:$PORT2, asked every 15 s,
// and before that when replicas fail: one that died is back under another address.
#ifndef MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_
#define MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/net/event_loop.h"
#include "monolith/serving/native/remote/channels.h"

namespace monolith {
namespace serving {

using Addresses = std::map<std::string, std::vector<std::string>>;

// Parses the flag.
Status ParseAddresses(const std::string& text, Addresses* addresses);

struct ServedModel {
  // The name by which a request calls it.
  std::string name;
  std::vector<std::string> addresses;
  // Replicas that were there a moment ago, to be tried when the others fail: they may only have
  // lost their session.
  std::vector<std::string> former_addresses;
};

class AddressBook {
 public:
  // `fixed` as the flag has them.
  explicit AddressBook(Addresses fixed);
  // Asks the agent at `agent`, now and every 15 s. One that does not answer changes nothing.
  AddressBook(Channels* channels, std::string agent);
  ~AddressBook();

  // Thread-safe. An error says where the addresses should have come from.
  Status Find(const std::string& name, const std::string& old_name, ServedModel* model);

  // Whether addresses come from an agent, which may know others now.
  bool CanAskAgain() const { return channels_ != nullptr; }
  // Asks the agent before its time, because what was found at `since` failed, and calls `done`
  // after its answer, or without one if it gave none. Calls that fail together share one question,
  // and there are at most ten in a second. `done` must not wait. Thread-safe.
  void AskAgain(Clock::time_point since, std::function<void()> done);

 private:
  void FollowAgent();
  bool AskAgent();
  // Both need the lock.
  void Remember();
  ServedModel FindServedModel(const std::string& name, const std::string& old_name) const;

  const Addresses fixed_;
  Channels* const channels_ = nullptr;
  const std::string agent_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Addresses answer_;
  // By key: when an answer last had an address.
  std::map<std::string, std::map<std::string, Clock::time_point>> seen_;
  bool answered_ = false;
  Clock::time_point asked_;
  std::vector<std::function<void()>> waiting_;
  bool ask_now_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_

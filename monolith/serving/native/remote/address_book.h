// Who serves the other parts of a model.
//
// From a flag, `ps_0=10.0.0.1:8500|10.0.0.2:8500,ps_1=10.0.0.3:8500`, where a key is the name under
// which the other server serves the model; or from the agent at localhost:$PORT2, asked every 15 s.
#ifndef MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_
#define MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_

#include <condition_variable>
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
  // What a request has to call it.
  std::string name;
  std::vector<std::string> addresses;
};

// Picks replicas and name by the kind of keys that an agent answers: `<model>:ps_<i>`, which is
// also the name, or `ps:<i>` for a model that is called `ps_<i>`, the old name.
ServedModel FindServedModel(const Addresses& answer, const std::string& name,
                            const std::string& old_name);

class AddressBook {
 public:
  // `fixed` as the flag has them.
  explicit AddressBook(Addresses fixed);
  // Asks the agent at `agent`, now and every 15 s. One that does not answer changes nothing.
  AddressBook(Channels* channels, std::string agent);
  ~AddressBook();

  // Thread-safe. An error says where the addresses should have come from.
  Status Find(const std::string& name, const std::string& old_name, ServedModel* model);

 private:
  void FollowAgent();
  bool AskAgent();

  const Addresses fixed_;
  Channels* const channels_ = nullptr;
  const std::string agent_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Addresses answer_;
  bool answered_ = false;
  bool ask_now_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REMOTE_ADDRESS_BOOK_H_

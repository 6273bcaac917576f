// One loaded version of a model: a SavedModel and its session.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_SERVABLE_H_
#define MONOLITH_SERVING_NATIVE_MODEL_SERVABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/follower.h"
#include "monolith/serving/native/model/output_sizes.h"
#include "monolith/serving/native/model/signature.h"

namespace tensorflow {
class Session;
class Tensor;
}  // namespace tensorflow

namespace monolith {
namespace serving {

class RunGate;
struct DenseNodes;
struct RowLogNodes;

struct SessionSettings {
  // 0 lets TensorFlow choose.
  int64_t intra_op_threads = 0;
  // 0 runs a request in the thread that took it, which costs no hand-over between threads; more
  // lets the session run independent parts of one request at once.
  int64_t inter_op_threads = 0;
  // Choose the graphs of the SavedModel.
  std::vector<std::string> tags = {"serve"};
  // 0 lets TensorFlow choose.
  double gpu_memory_fraction = 0;
  bool gpu_allow_growth = true;
  // Whether models are to be kept new by the logs that their exports name.
  bool follows_logs = false;
};

// A part of a session's graph that is run again and again, outside of requests.
class SessionCall {
 public:
  // Owns `handle`, a callable of `session`, which must outlive this.
  SessionCall(tensorflow::Session* session, int64_t handle) : session_(session), handle_(handle) {}
  ~SessionCall();

  SessionCall(const SessionCall&) = delete;
  SessionCall& operator=(const SessionCall&) = delete;

  Status Run(const std::vector<tensorflow::Tensor>& feeds,
             std::vector<tensorflow::Tensor>* fetches);

 private:
  tensorflow::Session* const session_;
  const int64_t handle_;
};

class Servable {
 public:
  // Loads the SavedModel in `path`. The error names the path.
  static Status Load(const std::string& path, const SessionSettings& settings,
                     std::unique_ptr<Servable>* servable);
  ~Servable();

  Servable(const Servable&) = delete;
  Servable& operator=(const Servable&) = delete;

  using Tensors = Signature::Tensors;

  // Finds a signature, "" for serving_default. The error of an unknown name lists the known ones.
  Status FindSignature(const std::string& name, const Signature** signature) const;
  // Returns the model's signatures by name.
  const std::map<std::string, Signature>& signatures() const;

  // Runs a signature of this model, and gives the outputs named by `output_filter`, all for an
  // empty one. Refuses inputs and names that `Signature::Check` refuses. Thread-safe.
  Status Run(const Signature& signature, const Tensors& inputs,
             const std::vector<std::string>& output_filter, Tensors* outputs);

  // Whether a run may be made where others wait: those before it took a millisecond or two at most,
  // nothing in the graph loops, or waits for another request or server, and the model is not about
  // to be changed. Thread-safe.
  bool RunsAreShort(const Signature& signature,
                    const std::vector<std::string>& output_filter) const;

  // Learns the sizes of what runs give.
  OutputSizes* output_sizes() { return &output_sizes_; }

  // Return the nodes that were added to the graph of a model that follows logs; null for another
  // one.
  const RowLogNodes* row_log_nodes() const;
  const DenseNodes* dense_nodes() const;

  // Makes a call of tensors by name, which must not outlive this.
  Status MakeCall(const std::vector<std::string>& feeds, const std::vector<std::string>& fetches,
                  const std::vector<std::string>& targets, std::unique_ptr<SessionCall>* call);

  // Returns what every Run passes through from now on; to be called before requests come.
  RunGate* MakeGate();

  // Sets what keeps the model new; it ends before the model does. Call it before requests come.
  void SetFollower(std::unique_ptr<Follower> follower) { follower_ = std::move(follower); }
  // Null for a model that stays as it was exported.
  Follower* follower() const { return follower_.get(); }

 private:
  class Impl;
  explicit Servable(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  OutputSizes output_sizes_;
  std::unique_ptr<Follower> follower_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_SERVABLE_H_

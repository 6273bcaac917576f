// Parameter sync pushes touched embeddings to serving replicas; a dummy server allows trying it.
//
// Kernels collect what changed and leave the sending to this process's Python (host_call.h).
// Shapes of results stay unknown although they are one-element vectors.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/host_call.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/parameter_sync/parameter_sync.pb.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/numbers.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::parameter_sync::ClientConfig;
using ::monolith::parameter_sync::PushRequest;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// A PushResult without responses, as JSON.
constexpr char kEmptyResult[] = "{}";

Status ScalarHandle(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  return shape_inference::UnknownShape(c);
}

PushRequest MakeRequest(const ClientConfig& config, const SyncClient& client,
                        const std::vector<SyncClient::Delta>& deltas) {
  const std::string group = client.group();
  PushRequest request;
  request.set_model_name(config.model_name());
  request.set_signature_name(group.empty() ? config.signature_name() : group + "/raw_assign");
  request.set_timeout_in_ms(config.timeout_in_ms());
  for (const SyncClient::Delta& delta : deltas) {
    auto* table =
        group.empty() ? request.add_delta_hash_tables() : request.add_delta_multi_hash_tables();
    table->set_unique_id(delta.unique_id);
    table->set_dim_size(static_cast<int32_t>(delta.dim));
    table->mutable_fids()->Add(delta.ids.begin(), delta.ids.end());
    table->mutable_embeddings()->Add(delta.rows.begin(), delta.rows.end());
  }
  return request;
}

// Sends `request`. The host answers with the number of targets that did not take all rows, a space
// and a PushResult as JSON.
Status Send(const PushRequest& request, const std::string& config_str, int64_t* num_failed,
            std::string* result) {
  if (request.ByteSizeLong() > static_cast<size_t>(INT32_MAX)) {
    return errors::ResourceExhausted("the touched rows take ", request.ByteSizeLong(),
                                     " bytes, more than a message may: push more often");
  }
  std::string reply;
  TF_RETURN_IF_ERROR(CallHost("push", request.SerializeAsString(), config_str, &reply));
  const size_t space = reply.find(' ');
  if (space == std::string::npos || !strings::safe_strto64(reply.substr(0, space), num_failed)) {
    return errors::Internal("the host answered '", reply, "', want '<failed targets> <result>'");
  }
  *result = reply.substr(space + 1);
  return OkStatus();
}

// Takes the touched rows and pushes them; `result` becomes a PushResult as JSON. Rows that did not
// reach every target stay touched.
Status Push(SyncClient* client, const std::string& config_str, std::string* result) {
  ClientConfig config;
  if (!config.ParseFromString(config_str)) {
    return errors::InvalidArgument("config_str of ", config_str.size(),
                                   " bytes is no serialized ClientConfig");
  }
  *result = kEmptyResult;
  // Without targets the rows stay touched until a push has some.
  if (client->is_dummy() || config.targets_size() == 0) return OkStatus();
  const std::vector<SyncClient::Delta> deltas = client->Collect();
  if (deltas.empty()) return OkStatus();
  int64_t num_failed = 0;
  const Status status = Send(MakeRequest(config, *client, deltas), config_str, &num_failed, result);
  if ((!status.ok() || num_failed > 0) && !client->TakeBack(deltas)) {
    LOG(WARNING) << "Too many rows for another attempt: they are not pushed until they are updated "
                    "again";
  }
  return status;
}

// Asynchronous: a push waits for other machines and must not occupy one of the step's threads.
class ParameterSyncOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    core::RefCountPtr<SyncClient> client;
    OP_REQUIRES_OK_ASYNC(ctx, LookupHandleInput(ctx, 0, "handle", &client), done);
    const Tensor& config_str = ctx->input(1);
    OP_REQUIRES_ASYNC(
        ctx, config_str.NumElements() == 1,
        errors::InvalidArgument("config_str has shape ", config_str.shape().DebugString(),
                                ", want one element"),
        done);
    const std::string config = config_str.flat<tstring>()(0);
    // std::function must be able to copy what it holds.
    auto shared = std::make_shared<core::RefCountPtr<SyncClient>>(std::move(client));
    OP_REQUIRES_OK_ASYNC(
        ctx, CatchExceptions([&] {
          Env::Default()->SchedClosure([ctx, shared, config, done] {
            OP_REQUIRES_OK_ASYNC(
                ctx, CatchExceptions([&] { return Run(ctx, shared->get(), config); }), done);
            done();
          });
          return OkStatus();
        }),
        done);
  }

 private:
  static Status Run(OpKernelContext* ctx, SyncClient* client, const std::string& config) {
    std::string json;
    TF_RETURN_IF_ERROR(Push(client, config, &json));
    Tensor* result = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {1}, &result));
    result->flat<tstring>()(0) = json;
    return OkStatus();
  }
};

// A server in this process's Python, which knows it by a number.
class DummySyncServer : public ResourceBase {
 public:
  static Status Create(const std::string& address, DummySyncServer** server) {
    std::string reply;
    TF_RETURN_IF_ERROR(CallHost("start_dummy_server", address, "", &reply));
    const size_t space = reply.find(' ');
    int32_t port = 0;
    if (space == std::string::npos || !strings::safe_strto32(reply.substr(space + 1), &port)) {
      return errors::Internal("the dummy server answered '", reply, "', want '<id> <port>'");
    }
    *server = new DummySyncServer(reply.substr(0, space), port);
    return OkStatus();
  }

  ~DummySyncServer() override { Shutdown().IgnoreError(); }

  int32_t port() const { return port_; }

  Status Shutdown() {
    mutex_lock lock(mu_);
    if (stopped_) return OkStatus();
    std::string reply;
    TF_RETURN_IF_ERROR(CallHost("stop_dummy_server", id_, "", &reply));
    stopped_ = true;
    return OkStatus();
  }

  std::string DebugString() const override { return strings::StrCat("server on port ", port_); }

 private:
  DummySyncServer(std::string id, int32_t port) : id_(std::move(id)), port_(port) {}

  const std::string id_;
  const int32_t port_;
  mutex mu_;
  bool stopped_ TF_GUARDED_BY(mu_) = false;
};

class DummySyncServerOp : public NamedResourceOp<DummySyncServer> {
 public:
  explicit DummySyncServerOp(OpKernelConstruction* ctx) : NamedResourceOp<DummySyncServer>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("address", &address_));
  }

 private:
  Status Create(OpKernelContext*, const std::string&, DummySyncServer** server) override {
    return DummySyncServer::Create(address_, server);
  }

  std::string address_;
};

class DummySyncServerGetPortOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DummySyncServer> server;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &server));
    Tensor* port = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {1}, &port));
    port->flat<int32>()(0) = server->port();
  }
};

class DummySyncServerShutdownOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DummySyncServer> server;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &server));
    OP_REQUIRES_OK(ctx, server->Shutdown());
    Tensor* zero = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &zero));
    zero->scalar<int64_t>()() = 0;
  }
};

REGISTER_OP("MonolithParameterSync")
    .Input("handle: resource")
    .Input("config_str: string")
    .Output("result: string")
    .SetIsStateful()
    .SetShapeFn(ScalarHandle)
    .Doc(R"doc(
Pushes the touched embeddings to the targets that a config names.

handle: From MonolithParameterSyncClient.
config_str: A serialized ClientConfig; its targets replace the old ones.
result: One element, a PushResult as JSON.
)doc");

REGISTER_OP("MonolithDummySyncServer")
    .Output("handle: resource")
    .Attr("address: string")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Starts a server that accepts pushes and answers them.

handle: For MonolithDummySyncServerGetPort and MonolithDummySyncServerShutdown.
address: host:port; port 0 picks a free one.
)doc");

REGISTER_OP("MonolithDummySyncServerGetPort")
    .Input("handle: resource")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarHandle)
    .Doc(R"doc(
Returns the port a server listens on.

handle: From MonolithDummySyncServer.
size: One element, the port.
)doc");

REGISTER_OP("MonolithDummySyncServerShutdown")
    .Input("handle: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarHandle)
    .Doc(R"doc(
Stops a server.

handle: From MonolithDummySyncServer.
size: Has no meaning; gives callers something to wait for.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithParameterSync").Device(DEVICE_CPU), ParameterSyncOp);
REGISTER_GUARDED_KERNEL(Name("MonolithDummySyncServer").Device(DEVICE_CPU), DummySyncServerOp);
REGISTER_GUARDED_KERNEL(Name("MonolithDummySyncServerGetPort").Device(DEVICE_CPU),
                        DummySyncServerGetPortOp);
REGISTER_GUARDED_KERNEL(Name("MonolithDummySyncServerShutdown").Device(DEVICE_CPU),
                        DummySyncServerShutdownOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow

// monolith_model_server: serves SavedModels with the APIs of TensorFlow Serving.
//
//   main thread      signals, and the file of the configuration
//   event loop       all sockets, gRPC and HTTP; runs models whose runs are short
//   workers          run the other models, one request each
//   manager          looks at folders, loads and unloads
//   followers        a thread for each log that a model follows, with --row_log_servers
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "monolith/serving/native/api/reflection.h"
#include "monolith/serving/native/api/rpc_service.h"
#include "monolith/serving/native/api/serving_api.h"
#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/quiet_start.h"
#include "monolith/serving/native/base/worker_pool.h"
#include "monolith/serving/native/flags.h"
#include "monolith/serving/native/http2/server_connection.h"
#include "monolith/serving/native/metrics.h"
#include "monolith/serving/native/model/batcher.h"
#include "monolith/serving/native/model/model_manager.h"
#include "monolith/serving/native/model_config.h"
#include "monolith/serving/native/net/acceptor.h"
#include "monolith/serving/native/net/event_loop.h"
#include "monolith/serving/native/net/stream_cipher.h"
#include "monolith/serving/native/net/tls.h"
#include "monolith/serving/native/op_library.h"
#include "monolith/serving/native/remote/address_book.h"
#include "monolith/serving/native/remote/channels.h"
#include "monolith/serving/native/remote/remote_predictor.h"
#include "monolith/serving/native/rest/http_connection.h"
#include "monolith/serving/native/rest/rest_api.h"
#include "monolith/serving/native/row_log/partition_reader.h"
#include "monolith/serving/native/row_log/replica.h"
#include "tensorflow/c/c_api.h"
#include "tensorflow/core/framework/tensor.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kMaxConnections = 10'000;
constexpr int64_t kMaxQueued = 10'000;
// The limit of all unanswered requests together, with their tensors and answers. The last eighth is
// for small requests.
constexpr int64_t kMaxRequestBytes = 512 << 20;
constexpr int64_t kSmallRequestBytes = 64 << 10;
constexpr int64_t kMaxTensorsBytes = 1 << 30;
constexpr int64_t kSmallTensorsBytes = 1 << 20;
constexpr std::chrono::seconds kGrace(10);
// After that: for models that run or load, which nothing can stop.
constexpr std::chrono::seconds kModelGrace(5);

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t end = std::min(text.find(separator, start), text.size());
    if (end > start) parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// Returns how many cores this process may use.
int64_t NumCores() { return std::max<int64_t>(1, std::thread::hardware_concurrency()); }

int64_t NumThreads(int64_t wanted) {
  return wanted > 0 ? wanted : std::max<int64_t>(16, 4 * NumCores());
}

ManagerSettings MakeManagerSettings(const Flags& flags) {
  ManagerSettings settings;
  settings.session.intra_op_threads = flags.tensorflow_intra_op_parallelism;
  settings.session.inter_op_threads = flags.tensorflow_inter_op_parallelism;
  settings.session.tags = Split(flags.saved_model_tags, ',');
  settings.session.gpu_memory_fraction = flags.per_process_gpu_memory_fraction;
  settings.session.gpu_allow_growth = flags.allow_growth;
  settings.poll_seconds = flags.file_system_poll_wait_seconds;
  settings.warm_up = flags.enable_model_warmup;
  settings.load_retries = flags.max_num_load_retries;
  settings.retry_interval = std::chrono::microseconds(flags.load_retry_interval_micros);
  settings.load_threads = flags.num_load_threads;
  settings.unload_threads = flags.num_unload_threads;
  settings.labels_for_unavailable = flags.allow_version_labels_for_unavailable_models;
  if (!flags.row_log_servers.empty()) {
    settings.session.follows_logs = true;
    settings.set_follower = [servers = flags.row_log_servers,
                             interval = std::chrono::duration<double>(flags.row_log_interval_secs)](
                                const std::string& path, Servable* servable) {
      return SetReplica(path, servers, interval, servable);
    };
  }
  return settings;
}

// Addresses come from --ps_address, else from the agent. Without either, an entry model reports
// what is missing.
Status StartRemotePrediction(const Flags& flags, void* op_library, Channels* channels,
                             std::unique_ptr<AddressBook>* addresses,
                             std::unique_ptr<RemotePredictor>* predictor) {
  const char* agent_port = getenv("PORT2");
  if (!flags.ps_address.empty() || agent_port == nullptr || *agent_port == '\0') {
    Addresses fixed;
    const Status status =
        flags.ps_address.empty() ? Status() : ParseAddresses(flags.ps_address, &fixed);
    if (!status.ok()) return status;
    *addresses = std::make_unique<AddressBook>(std::move(fixed));
  } else {
    *addresses = std::make_unique<AddressBook>(channels, std::string("localhost:") + agent_port);
  }
  *predictor = std::make_unique<RemotePredictor>(
      channels, addresses->get(), std::chrono::milliseconds(flags.fetch_ps_timeout_ms));
  return (*predictor)->Install(op_library);
}

// Ends the loop when all connections have finished, or when time is up.
void StopWhenIdle(EventLoop* loop, const std::vector<Acceptor*>& acceptors,
                  Clock::time_point deadline) {
  int64_t open = 0;
  for (const Acceptor* acceptor : acceptors) open += acceptor->num_connections();
  if (open == 0 || Clock::now() >= deadline) return loop->Stop();
  loop->RunAt(Clock::now() + std::chrono::milliseconds(20),
              [=] { StopWhenIdle(loop, acceptors, deadline); });
}

// Ends the process at a time if it has not ended by itself: threads that run or load a model are
// waited for, and may take as long as they like.
void EndAt(Clock::time_point deadline) {
  std::thread([deadline] {
    std::this_thread::sleep_until(deadline);
    LogWarning("Ending while a model still runs or loads");
    _exit(0);
  }).detach();
}

// Waits for a signal to end, and follows the configuration file meanwhile.
void FollowConfigUntilSignal(const Flags& flags, api::ModelServerConfig config,
                             const sigset_t& signals, ModelManager* models) {
  const bool polls =
      !flags.model_config_file.empty() && flags.model_config_file_poll_wait_seconds > 0;
  std::string last_error;
  while (true) {
    timespec wait{polls ? flags.model_config_file_poll_wait_seconds : 3600, 0};
    const int signal_number = sigtimedwait(&signals, nullptr, &wait);
    if (signal_number > 0) return;
    if (errno != EAGAIN || !polls) continue;
    api::ModelServerConfig next;
    Status status = ReadModelConfig(flags, &next);
    // An unchanged file does not undo a reload by request.
    if (status.ok() && next.SerializeAsString() == config.SerializeAsString()) continue;
    if (status.ok()) {
      LogInfo(flags.model_config_file + " changed");
      config = next;
      // Does not wait: the next change may come while a model still loads.
      status = models->SetConfig(next, Clock::now());
      if (status.code == Code::kDeadlineExceeded) status = Status();
    }
    if (!status.ok() && status.message != last_error) LogError(status.message);
    last_error = status.message;
  }
}

// Gives null if --ssl_config_file is not set.
Status MakeTls(const Flags& flags, std::unique_ptr<TlsContext>* tls) {
  if (flags.ssl_config_file.empty()) return Status();
  api::SSLConfig config;
  Status status = ReadSslConfig(flags, &config);
  if (!status.ok()) return status;
  TlsSettings settings;
  settings.server_key = config.server_key();
  settings.server_cert = config.server_cert();
  settings.custom_ca = config.custom_ca();
  settings.client_verify = config.client_verify();
  status = MakeTlsContext(settings, tls);
  if (!status.ok()) status.message = flags.ssl_config_file + ": " + status.message;
  return status;
}

// Gives null if requests are not batched.
Status MakeBatcher(const Flags& flags, std::unique_ptr<Batcher>* batcher) {
  if (!flags.enable_batching) return Status();
  api::BatchingParameters parameters;
  Status status = ReadBatchingParameters(flags, &parameters);
  if (!status.ok()) return status;
  BatchingSettings settings;
  status = MakeBatchingSettings(parameters, &settings);
  if (!status.ok()) {
    status.message = flags.batching_parameters_file + ": " + status.message;
    return status;
  }
  *batcher = std::make_unique<Batcher>(settings);
  return Status();
}

Runner MakeRunner(Batcher* batcher) {
  if (batcher == nullptr) return RunDirectly;
  return [batcher](Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                   const std::vector<std::string>& output_filter, Servable::Tensors* outputs) {
    return batcher->Run(servable, signature, inputs, output_filter, outputs);
  };
}

int Fail(const Status& status) {
  fprintf(stderr, "error: %s\n", status.message.c_str());
  return 1;
}

int Run(const Flags& flags) {
  api::ModelServerConfig config;
  Status status = ReadModelConfig(flags, &config);
  if (!status.ok()) return Fail(status);
  std::unique_ptr<TlsContext> tls;
  status = MakeTls(flags, &tls);
  if (!status.ok()) return Fail(status);
  void* op_library = nullptr;
  status = LoadOpLibrary(flags.op_library, &op_library);
  if (!status.ok()) return Fail(status);

  if (!flags.row_log_servers.empty()) {
    const kafka::RdKafkaApi* client = nullptr;
    status = FindKafkaClient(&client);
    if (!status.ok()) return Fail(status);
  }

  // Before any thread is made: all of them leave these signals to sigtimedwait.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  // First, so that they outlive the models that call them.
  Channels channels;
  status = channels.Open();
  if (!status.ok()) return Fail(status);
  std::unique_ptr<AddressBook> addresses;
  std::unique_ptr<RemotePredictor> predictor;
  status = StartRemotePrediction(flags, op_library, &channels, &addresses, &predictor);
  if (!status.ok()) return Fail(status);

  EventLoop loop;
  status = loop.Open();
  if (!status.ok()) return Fail(status);
  // Set when there are connections.
  std::function<void()> note_change = [] {};
  ManagerSettings manager_settings = MakeManagerSettings(flags);
  manager_settings.on_change = [&loop, &note_change] { loop.Post([&] { note_change(); }); };
  ModelManager models(manager_settings);
  Metrics metrics;
  PredictLimits predict_limits;
  predict_limits.max_tensor_bytes =
      std::max(predict_limits.max_tensor_bytes, flags.max_receive_message_bytes);
  predict_limits.budget = std::make_shared<MemoryBudget>(
      std::max(kMaxTensorsBytes, 4 * predict_limits.max_tensor_bytes), kSmallTensorsBytes);
  std::unique_ptr<Batcher> batcher;
  status = MakeBatcher(flags, &batcher);
  if (!status.ok()) return Fail(status);
  ServingApi serving(&models, &metrics, predict_limits, MakeRunner(batcher.get()));
  WorkerPool grpc_workers(NumThreads(flags.grpc_max_threads), kMaxQueued);

  RpcLimits limits;
  limits.max_message_bytes = flags.max_receive_message_bytes;
  limits.max_streams = flags.max_concurrent_streams;
  limits.max_header_bytes = flags.max_metadata_bytes;
  // Shared by all clients, by gRPC and HTTP.
  const auto request_budget = std::make_shared<MemoryBudget>(
      std::max(kMaxRequestBytes, 4 * flags.max_receive_message_bytes), kSmallRequestBytes);
  RpcPlaces places;
  // A request that waits for others in its batch must not keep them from being read.
  places.loop = batcher == nullptr ? &loop : nullptr;
  places.num_cores = NumCores();
  const RpcService service = MakeRpcService(&serving, &grpc_workers, places);
  RpcStreamMethods stream_methods = MakeReflectionMethods();
  stream_methods.merge(serving.MakeHealthMethods());
  Acceptor grpc(&loop, kMaxConnections, [&](FileDescriptor socket) {
    auto connection = std::make_shared<Http2ServerConnection>(
        &loop, std::move(socket), limits, service, &stream_methods, request_budget);
    if (tls != nullptr) {
      std::unique_ptr<StreamCipher> cipher = tls->NewServerCipher();
      // Nothing may pass in the clear.
      if (cipher == nullptr) connection.reset();
      if (connection != nullptr) connection->SetCipher(std::move(cipher));
    }
    return connection;
  });
  if (flags.port != 0) {
    status = grpc.Open(flags.bind_address, static_cast<int>(flags.port));
    if (!status.ok()) return Fail(status);
    LogInfo("gRPC on " + flags.bind_address + ":" + std::to_string(grpc.port()));
  }
  WorkerPool rest_workers(flags.rest_api_port != 0 ? NumThreads(flags.rest_api_num_threads) : 0,
                          kMaxQueued);
  HttpLimits http_limits;
  http_limits.max_body_bytes = flags.max_receive_message_bytes;
  http_limits.answer_timeout = std::chrono::milliseconds(flags.rest_api_timeout_in_ms);
  const HttpService http_service = MakeHttpService(&serving, &rest_workers);
  Acceptor rest(&loop, kMaxConnections, [&](FileDescriptor socket) {
    return std::make_shared<HttpConnection>(&loop, std::move(socket), http_limits, http_service,
                                            request_budget);
  });
  if (flags.rest_api_port != 0) {
    status = rest.Open(flags.bind_address, static_cast<int>(flags.rest_api_port));
    if (!status.ok()) return Fail(status);
    LogInfo("HTTP on " + flags.bind_address + ":" + std::to_string(rest.port()));
  }
  note_change = [&grpc] { grpc.NoteChange(); };
  std::thread sockets([&] { loop.Run(); });
  models.SetConfig(config, Clock::now());
  FollowConfigUntilSignal(flags, config, signals, &models);

  LogInfo("Ending after the requests that are under way");
  const Clock::time_point deadline = Clock::now() + kGrace;
  EndAt(deadline + kModelGrace);
  loop.Post([&, deadline] {
    grpc.Shutdown();
    rest.Shutdown();
    StopWhenIdle(&loop, {&grpc, &rest}, deadline);
  });
  sockets.join();
  return 0;
}

}  // namespace
}  // namespace serving
}  // namespace monolith

int main(int argc, char** argv) {
  monolith::serving::EndQuietStart();
  monolith::serving::Flags flags;
  const monolith::serving::Status status =
      monolith::serving::ParseFlags({argv + 1, argv + argc}, &flags);
  if (!status.ok()) {
    fprintf(stderr, "error: %s\n", status.message.c_str());
    return 2;
  }
  if (flags.help) {
    fputs(monolith::serving::FlagsHelp().c_str(), stdout);
    return 0;
  }
  if (flags.version) {
    printf("monolith_model_server, TensorFlow %s\n", TF_Version());
    return 0;
  }
  return monolith::serving::Run(flags);
}

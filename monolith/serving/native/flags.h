// The flags of the server, by the names that TensorFlow Serving gives to them.
#ifndef MONOLITH_SERVING_NATIVE_FLAGS_H_
#define MONOLITH_SERVING_NATIVE_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

struct Flags {
  int64_t port = 8500;
  int64_t rest_api_port = 0;
  std::string bind_address = "127.0.0.1";
  int64_t rest_api_num_threads = 0;
  int64_t rest_api_timeout_in_ms = 30'000;
  int64_t grpc_max_threads = 0;
  std::string grpc_channel_arguments;
  std::string ssl_config_file;

  std::string model_name = "default";
  std::string model_base_path;
  std::string model_config_file;
  int64_t model_config_file_poll_wait_seconds = 0;
  int64_t file_system_poll_wait_seconds = 1;
  bool allow_version_labels_for_unavailable_models = false;
  std::string saved_model_tags = "serve";
  bool enable_model_warmup = true;
  int64_t max_num_load_retries = 5;
  int64_t load_retry_interval_micros = 60'000'000;
  int64_t num_load_threads = 0;
  int64_t num_unload_threads = 0;

  bool enable_batching = false;
  std::string batching_parameters_file;
  int64_t tensorflow_session_parallelism = 0;
  int64_t tensorflow_intra_op_parallelism = 0;
  int64_t tensorflow_inter_op_parallelism = 0;
  double per_process_gpu_memory_fraction = 0;
  bool allow_growth = true;

  std::string ps_address;
  int64_t fetch_ps_timeout_ms = 0;
  std::string row_log_servers;
  double row_log_interval_secs = 0;
  std::string op_library;
  bool version = false;
  bool help = false;

  // From grpc_channel_arguments.
  int64_t max_receive_message_bytes = 64 << 20;
  int64_t max_concurrent_streams = 1000;
  int64_t max_metadata_bytes = 16 << 10;
};

// Parses `--name=value`, `--name value` and, for switches, `--name`. The error for an unknown flag
// or an invalid value names it.
Status ParseFlags(const std::vector<std::string>& arguments, Flags* flags);

// Returns what `--help` prints.
std::string FlagsHelp();

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_FLAGS_H_

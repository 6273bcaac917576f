#include "monolith/serving/native/flags.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <variant>

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kAny = std::numeric_limits<int32_t>::max();

struct IntFlag {
  int64_t* value;
  int64_t least;
  int64_t most;
};
struct FractionFlag {
  double* value;
};
struct SecondsFlag {
  double* value;
};
// Comma-separated host:port.
struct ServersFlag {
  std::string* value;
};
struct Flag {
  std::variant<IntFlag, FractionFlag, SecondsFlag, bool*, std::string*, ServersFlag> target;
  const char* help;
};

std::map<std::string, Flag> MakeTable(Flags* f) {
  return {
      {"port", {IntFlag{&f->port, 0, 65535}, "port for gRPC; 0 for none"}},
      {"rest_api_port", {IntFlag{&f->rest_api_port, 0, 65535}, "port for HTTP; 0 for none"}},
      {"bind_address", {&f->bind_address, "address of both ports; 0.0.0.0 for every interface"}},
      {"rest_api_num_threads",
       {IntFlag{&f->rest_api_num_threads, 0, 4096}, "HTTP requests at a time; 0: by cores"}},
      {"rest_api_timeout_in_ms",
       {IntFlag{&f->rest_api_timeout_in_ms, 1, kAny}, "limit of an HTTP request"}},
      {"grpc_max_threads",
       {IntFlag{&f->grpc_max_threads, 0, 4096}, "gRPC calls at a time; 0: by cores"}},
      {"grpc_channel_arguments",
       {&f->grpc_channel_arguments,
        "key=value,... of grpc.max_receive_message_length, grpc.max_concurrent_streams and "
        "grpc.max_metadata_size"}},
      {"ssl_config_file", {&f->ssl_config_file, "SSLConfig in text format, for gRPC"}},
      {"model_name", {&f->model_name, "name of the one model"}},
      {"model_base_path", {&f->model_base_path, "its folder, which holds a folder per version"}},
      {"model_config_file", {&f->model_config_file, "ModelServerConfig in text format, instead"}},
      {"model_config_file_poll_wait_seconds",
       {IntFlag{&f->model_config_file_poll_wait_seconds, 0, kAny}, "0: read once"}},
      {"file_system_poll_wait_seconds",
       {IntFlag{&f->file_system_poll_wait_seconds, 0, kAny}, "0: look once"}},
      {"allow_version_labels_for_unavailable_models",
       {&f->allow_version_labels_for_unavailable_models, "labels may wait"}},
      {"saved_model_tags", {&f->saved_model_tags, "which graphs, separated by commas"}},
      {"enable_model_warmup",
       {&f->enable_model_warmup, "answer the requests in assets.extra first"}},
      {"max_num_load_retries",
       {IntFlag{&f->max_num_load_retries, 0, kAny},
        "how often a version that failed is tried again"}},
      {"load_retry_interval_micros",
       {IntFlag{&f->load_retry_interval_micros, -(int64_t{1} << 50), int64_t{1} << 50},
        "how long after a failure; negative: at once"}},
      {"num_load_threads",
       {IntFlag{&f->num_load_threads, 0, 4096}, "models that load at a time; 0: one"}},
      {"num_unload_threads",
       {IntFlag{&f->num_unload_threads, 0, 4096}, "versions unloaded at a time; 0: one"}},
      {"enable_batching", {&f->enable_batching, "join requests into one run"}},
      {"batching_parameters_file",
       {&f->batching_parameters_file, "BatchingParameters in text format"}},
      {"tensorflow_session_parallelism",
       {IntFlag{&f->tensorflow_session_parallelism, 0, 4096}, "sets the two below"}},
      {"tensorflow_intra_op_parallelism",
       {IntFlag{&f->tensorflow_intra_op_parallelism, 0, 4096}, "threads of one op"}},
      {"tensorflow_inter_op_parallelism",
       {IntFlag{&f->tensorflow_inter_op_parallelism, 0, 4096},
        "ops at a time; 0: each request in one thread"}},
      {"per_process_gpu_memory_fraction",
       {FractionFlag{&f->per_process_gpu_memory_fraction}, "0: TensorFlow decides"}},
      {"allow_growth", {&f->allow_growth, "take GPU memory when it is needed"}},
      {"ps_address",
       {&f->ps_address, "name=host:port|host:port,... of an entry's servers; else the agent's"}},
      {"fetch_ps_timeout_ms",
       {IntFlag{&f->fetch_ps_timeout_ms, 0, kAny},
        "limit of an entry's call of a server; 0: what the export says"}},
      {"row_log_servers",
       {ServersFlag{&f->row_log_servers},
        "host:port,... of the Kafka brokers whose row logs keep models new; none by default"}},
      {"row_log_interval_secs",
       {SecondsFlag{&f->row_log_interval_secs},
        "how long changes may wait in a row log; 0: none does"}},
      {"op_library",
       {&f->op_library, "libtfkernel_monolith_ops_for_load.so, if it lies elsewhere"}},
      {"version", {&f->version, "print the version and exit"}},
      {"help", {&f->help, "print this and exit"}},
  };
}

Status Refuse(const std::string& text) { return Status(Code::kInvalidArgument, text); }

template <typename Number>
bool ParseInt(const std::string& text, Number* value) {
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *value);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

bool ParseBool(const std::string& text, bool* value) {
  if (text != "true" && text != "1" && text != "false" && text != "0") return false;
  *value = text == "true" || text == "1";
  return true;
}

bool ParseDouble(const std::string& text, double* value) {
  char* end = nullptr;
  *value = strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0';
}

Status CheckServers(const std::string& what, const std::string& text) {
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string server = text.substr(start, end - start);
    start = end + 1;
    if (server.empty()) continue;
    const size_t colon = server.rfind(':');
    int port = 0;
    if (colon == std::string::npos || colon == 0 || !ParseInt(server.substr(colon + 1), &port) ||
        port < 1 || port > 65535) {
      return Refuse(what + "host:port,...: '" + server + "' is not host:port");
    }
  }
  return Status();
}

Status SetFlag(const std::string& name, const std::string& text, const Flag& flag) {
  const std::string what = "--" + name + " is '" + text + "', want ";
  if (const auto* number = std::get_if<IntFlag>(&flag.target)) {
    int64_t value = 0;
    if (!ParseInt(text, &value) || value < number->least || value > number->most) {
      return Refuse(what + "a number from " + std::to_string(number->least) + " to " +
                    std::to_string(number->most));
    }
    *number->value = value;
  } else if (const auto* fraction = std::get_if<FractionFlag>(&flag.target)) {
    double value = 0;
    if (!ParseDouble(text, &value) || !(value >= 0 && value <= 1)) {
      return Refuse(what + "a number from 0 to 1");
    }
    *fraction->value = value;
  } else if (const auto* seconds = std::get_if<SecondsFlag>(&flag.target)) {
    double value = 0;
    if (!ParseDouble(text, &value) || !(value >= 0 && std::isfinite(value))) {
      return Refuse(what + "a number of seconds");
    }
    *seconds->value = value;
  } else if (const auto* servers = std::get_if<ServersFlag>(&flag.target)) {
    const Status status = CheckServers(what, text);
    if (!status.ok()) return status;
    *servers->value = text;
  } else if (const auto* choice = std::get_if<bool*>(&flag.target)) {
    if (!ParseBool(text, *choice)) return Refuse(what + "true or false");
  } else {
    *std::get<std::string*>(flag.target) = text;
  }
  return Status();
}

Status ParseChannelArguments(Flags* flags) {
  const std::string& text = flags->grpc_channel_arguments;
  size_t start = 0;
  while (start < text.size()) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string item = text.substr(start, end - start);
    start = end + 1;
    if (item.empty()) continue;
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    int64_t value = 0;
    if (equals == std::string::npos || !ParseInt(item.substr(equals + 1), &value)) {
      return Refuse("--grpc_channel_arguments has '" + item + "', want key=number");
    }
    int64_t* target = key == "grpc.max_receive_message_length" ? &flags->max_receive_message_bytes
                      : key == "grpc.max_concurrent_streams"   ? &flags->max_concurrent_streams
                      : key == "grpc.max_metadata_size"        ? &flags->max_metadata_bytes
                                                               : nullptr;
    if (target == nullptr) {
      return Refuse("--grpc_channel_arguments has '" + key +
                    "', want some of grpc.max_receive_message_length, "
                    "grpc.max_concurrent_streams and grpc.max_metadata_size");
    }
    // gRPC says -1 for no limit.
    if (value == -1) value = kAny;
    if (value < 1 || value > kAny) {
      return Refuse("--grpc_channel_arguments has '" + item + "', want a positive number or -1");
    }
    *target = value;
  }
  return Status();
}

}  // namespace

Status ParseFlags(const std::vector<std::string>& arguments, Flags* flags) {
  const std::map<std::string, Flag> table = MakeTable(flags);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.rfind("--", 0) != 0) return Refuse("'" + argument + "' is not a flag");
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const auto found = table.find(name);
    if (found == table.end()) return Refuse("unknown flag --" + name);
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (std::holds_alternative<bool*>(found->second.target)) {
      const bool next_is_value =
          i + 1 < arguments.size() && (arguments[i + 1] == "true" || arguments[i + 1] == "false");
      value = next_is_value ? arguments[++i] : "true";
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      return Refuse("--" + name + " has no value");
    }
    const Status status = SetFlag(name, value, found->second);
    if (!status.ok()) return status;
  }
  if (flags->version || flags->help) return Status();
  if (flags->model_base_path.empty() == flags->model_config_file.empty()) {
    return Refuse("want either --model_base_path or --model_config_file");
  }
  if (flags->port == 0 && flags->rest_api_port == 0) {
    return Refuse("--port and --rest_api_port are both 0: nothing could be asked");
  }
  if (flags->port == 0 && !flags->ssl_config_file.empty()) {
    return Refuse("--ssl_config_file is for gRPC, which --port=0 leaves out");
  }
  if (!flags->batching_parameters_file.empty() && !flags->enable_batching) {
    return Refuse("--batching_parameters_file needs --enable_batching");
  }
  if (flags->row_log_interval_secs > 0 && flags->row_log_servers.empty()) {
    return Refuse("--row_log_interval_secs needs --row_log_servers");
  }
  if (flags->tensorflow_session_parallelism > 0) {
    if (flags->tensorflow_intra_op_parallelism > 0 || flags->tensorflow_inter_op_parallelism > 0) {
      return Refuse("--tensorflow_session_parallelism is instead of intra and inter");
    }
    flags->tensorflow_intra_op_parallelism = flags->tensorflow_session_parallelism;
    flags->tensorflow_inter_op_parallelism = flags->tensorflow_session_parallelism;
  }
  return ParseChannelArguments(flags);
}

std::string FlagsHelp() {
  Flags flags;
  std::string text =
      "Serves SavedModels over gRPC and HTTP, with the APIs of TensorFlow Serving.\n\n";
  for (const auto& [name, flag] : MakeTable(&flags)) {
    text += "  --" + name + "\n        " + flag.help + "\n";
  }
  return text;
}

}  // namespace serving
}  // namespace monolith

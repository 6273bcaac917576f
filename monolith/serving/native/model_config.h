// Reads the list of models, `ModelServerConfig`, from flags or a text file.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_CONFIG_H_
#define MONOLITH_SERVING_NATIVE_MODEL_CONFIG_H_

#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/flags.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

// Reads and checks the configuration that the flags name. The error names the file.
Status ReadModelConfig(const Flags& flags, api::ModelServerConfig* config);

// Reads --batching_parameters_file, in text format. The error names the file.
Status ReadBatchingParameters(const Flags& flags, api::BatchingParameters* parameters);

// Reads --ssl_config_file, in text format. The error names the file.
Status ReadSslConfig(const Flags& flags, api::SSLConfig* config);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_CONFIG_H_

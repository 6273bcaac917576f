// CityHash64 (version 1.1): a published hash of bytes, so that ids made elsewhere are the same
// here.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_CITY_HASH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_CITY_HASH_H_

#include <cstdint>
#include <string_view>

namespace monolith {
namespace data {

// The same on all machines, whatever their byte order.
uint64_t CityHash64(std::string_view bytes);

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_CITY_HASH_H_

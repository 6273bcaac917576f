// Tells nghttp2 what both ends of a connection need: header fields, and how much may be on its way.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_HEADER_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_HEADER_H_

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <string_view>

namespace monolith {
namespace serving {

inline constexpr int32_t kStreamWindow = 4 << 20;
inline constexpr int32_t kConnectionWindow = 16 << 20;

// Both texts must live until the header was submitted, which copies them.
inline nghttp2_nv MakeHeader(std::string_view name, std::string_view value) {
  nghttp2_nv header{};
  header.name = reinterpret_cast<uint8_t*>(const_cast<char*>(name.data()));
  header.namelen = name.size();
  header.value = reinterpret_cast<uint8_t*>(const_cast<char*>(value.data()));
  header.valuelen = value.size();
  header.flags = NGHTTP2_NV_FLAG_NONE;
  return header;
}

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_HEADER_H_

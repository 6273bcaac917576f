#include "monolith/native_training/runtime/files/manifest.h"

#include <charconv>
#include <cstdio>
#include <set>

#include "monolith/native_training/runtime/base/crc32c.h"

namespace monolith {
namespace engine {
namespace {

constexpr std::string_view kTitle = "monolith file set ";
constexpr std::string_view kVersion = "1";

std::string Hex(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

// Splits off the text before `separator`; returns false if there is none.
bool Take(std::string_view* text, char separator, std::string_view* taken) {
  const size_t at = text->find(separator);
  if (at == std::string_view::npos) return false;
  *taken = text->substr(0, at);
  text->remove_prefix(at + 1);
  return true;
}

template <typename Number>
bool ParseNumber(std::string_view text, int base, Number* number) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), *number, base);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

// Rejects suffixes that lead to another folder.
bool IsSuffix(std::string_view text) {
  return !text.empty() && text.find('/') == std::string_view::npos;
}

bool ParseFile(std::string_view line, ManifestFile* file) {
  std::string_view suffix, bytes, records;
  if (!Take(&line, ' ', &suffix) || !Take(&line, ' ', &bytes) || !Take(&line, ' ', &records)) {
    return false;
  }
  file->suffix = std::string(suffix);
  return IsSuffix(suffix) && ParseNumber(bytes, 10, &file->bytes) && file->bytes >= 0 &&
         ParseNumber(records, 10, &file->records) && file->records >= 0 &&
         ParseNumber(line, 16, &file->crc);
}

}  // namespace

std::string EncodeManifest(const Manifest& manifest) {
  std::string text(kTitle);
  text.append(kVersion).append("\ntoken ").append(std::to_string(manifest.token)).append("\n");
  for (const ManifestFile& file : manifest.files) {
    text.append("file ").append(file.suffix).append(" ").append(std::to_string(file.bytes));
    text.append(" ").append(std::to_string(file.records)).append(" ").append(Hex(file.crc));
    text.append("\n");
  }
  for (const std::string& suffix : manifest.replaced) {
    text.append("replaced ").append(suffix).append("\n");
  }
  const uint32_t crc = Crc32c(text.data(), static_cast<int64_t>(text.size()));
  return text.append("end ").append(Hex(crc)).append("\n");
}

Status DecodeManifest(std::string_view text, Manifest* manifest) {
  *manifest = Manifest();
  const std::string_view whole = text;
  std::string_view line;
  if (!Take(&text, '\n', &line) || line.substr(0, kTitle.size()) != kTitle) {
    return Status::DataLoss("it is not a manifest");
  }
  if (line.substr(kTitle.size()) != kVersion) {
    return Status::DataLoss("it has the format " + std::string(line.substr(kTitle.size(), 20)) +
                            ", want " + std::string(kVersion));
  }
  std::set<std::string_view> seen;
  while (true) {
    const size_t begin = whole.size() - text.size();
    std::string_view word;
    if (!Take(&text, '\n', &line) || !Take(&line, ' ', &word)) {
      return Status::DataLoss("it ends before its last line");
    }
    bool good = true;
    if (word == "file") {
      ManifestFile file;
      good = ParseFile(line, &file) && seen.insert(line.substr(0, file.suffix.size())).second;
      manifest->files.push_back(std::move(file));
    } else if (word == "replaced") {
      good = IsSuffix(line);
      manifest->replaced.emplace_back(line);
    } else if (word == "token") {
      good = ParseNumber(line, 10, &manifest->token);
    } else {
      uint32_t crc = 0;
      good = word == "end" && text.empty() && ParseNumber(line, 16, &crc) &&
             crc == Crc32c(whole.data(), static_cast<int64_t>(begin));
      if (good) return Status::Ok();
    }
    if (!good) return Status::DataLoss("its content is damaged");
  }
}

}  // namespace engine
}  // namespace monolith

#include "ckpt-inspect/part_document.h"

#include <cstdint>
#include <span>
#include <string_view>

#include "base/digest.h"
#include "base/json.h"
#include "ckpt-inspect/standard_input.h"
#include "cli/command_line.h"
#include "tessera/base/error.h"
#include "tessera/reshard/executor.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kMaxPartNbytes = std::uint64_t{1} << 30;
constexpr std::string_view kFiles = "files";

const std::string& text_of(const Value& file, const char* key, const std::string& path) {
  const Value* const value = file.find(key);
  const auto* const text = value == nullptr ? nullptr : value->get_if<std::string>();
  if (text != nullptr) return *text;
  throw Error::expected(ErrorKind::corruption, {.path = path}, kFiles, key, "none");
}

}  // namespace

Value read_part_document(const std::string& path, const std::string& subject,
                         const std::string& verb) {
  const auto check_begin = [&](std::string_view begin) {
    if (begin.starts_with('{')) return;
    throw Error::expected(ErrorKind::corruption, {.path = path}, subject, "JSON that begins with {",
                          "other bytes", "is it what " + verb + " --part printed?");
  };
  return value_from_json(parse_json(read_text(path, kMaxPartNbytes, check_begin), path), path);
}

PartFiles files_of_part(const formats::CheckpointReader& reader) {
  PartFiles files;
  const std::string folder = reader.path() + "/";
  for (auto& [path, state] : reshard::source_file_states(reader)) {
    const bool is_below = path.starts_with(folder);
    std::string& said =
        files[is_below ? path.substr(folder.size()) : path.substr(path.rfind('/') + 1)];
    // Files of two sources may have the same name.
    said += (said.empty() ? "" : "; ") + state.words;
  }
  return files;
}

void write_files_of_part(JsonOutput& json, const PartFiles& files) {
  json.key(kFiles).begin_array();
  for (const auto& [name, state] : files) {
    json.begin_object().member("name", name).member("state", state).end_object();
  }
  json.end_array();
}

std::string digest_of_files(const PartFiles& files) {
  Xxh3Wide hash;
  for (const auto& [name, state] : files) {
    const std::string line = name + '\0' + state + '\n';
    hash.update(std::as_bytes(std::span(line)));
  }
  return hash.hex_digest();
}

void require_files(const Value& document, const std::string& path, const PartFiles& expected) {
  const Value* const value = document.find(kFiles);
  const auto* const list = value == nullptr ? nullptr : value->get_if<Value::List>();
  if (list == nullptr) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, kFiles,
                          "the files that the part was made of", "none",
                          "is it from an older version of ckpt-inspect?");
  }
  PartFiles found;
  for (const Value& file : *list) found[text_of(file, "name", path)] = text_of(file, "state", path);
  const auto require = [&](const std::string& name, const std::string& now,
                           const std::string& then) {
    if (now == then) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path}, kFiles,
                          printable(name) + " (" + now + ")", printable(then),
                          "changed since the part was made, or a part of another checkpoint?");
  };
  for (const auto& [name, state] : expected) {
    const auto file = found.find(name);
    require(name, state, file == found.end() ? "no such file" : file->second);
  }
  for (const auto& [name, state] : found) {
    if (!expected.contains(name)) require(name, "no such file", state);
  }
}

void require_json_of_part(bool json, const std::string& help_command) {
  if (json) return;
  throw UsageError("--part: expected --json with it, found none", help_command);
}

}  // namespace tessera::cli

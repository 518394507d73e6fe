#include "ckpt-inspect/part_document.h"

#include <cstdint>
#include <string_view>

#include "base/json.h"
#include "ckpt-inspect/standard_input.h"
#include "cli/command_line.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kMaxPartNbytes = std::uint64_t{1} << 30;

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

void require_json_of_part(bool json, const std::string& help_command) {
  if (json) return;
  throw UsageError("--part: expected --json with it, found none", help_command);
}

}  // namespace tessera::cli

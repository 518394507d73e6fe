#include "arithmetic/model_config.h"

#include <span>

#include "base/digest.h"
#include "base/python_json.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

constexpr std::uint64_t kMaxNbytes = std::uint64_t{16} << 20;
constexpr const char* kModelConfig = "config.json";

/// Returns the path of a file beside a checkpoint; an empty text if there is no such file.
std::string path_beside(const FileSystem& fs, const std::string& checkpoint_path,
                        const std::string& name) {
  const bool is_directory = fs.kind_of(checkpoint_path) == FileKind::directory;
  const std::string folder = is_directory ? checkpoint_path : directory_of(checkpoint_path);
  std::string path = join_path(folder, name);
  if (fs.kind_of(path) != FileKind::regular) path.clear();
  return path;
}

}  // namespace

Value read_model_config(const FileSystem& fs, const std::string& checkpoint_path) {
  const auto read = [&](const char* name) {
    const std::string path = path_beside(fs, checkpoint_path, name);
    if (path.empty()) return Value();
    return parse_python_json(read_file(fs, path, kMaxNbytes), path);
  };
  Value config = read(kModelConfig);
  Value of_modelopt = read(kModelOptConfigMember);
  if (of_modelopt.is<Value::None>()) return config;
  if (config.is<Value::None>()) config = Value::Dict();
  if (auto* const members = config.get_if<Value::Dict>()) {
    members->push_back({kModelOptConfigMember, std::move(of_modelopt)});
  }
  return config;
}

std::string model_config_digest(const FileSystem& fs, const std::string& checkpoint_path) {
  Xxh3Wide hash;
  bool has_file = false;
  for (const char* const name : {kModelConfig, kModelOptConfigMember}) {
    const std::string path = path_beside(fs, checkpoint_path, name);
    if (path.empty()) continue;
    const std::string config = read_file(fs, path, kMaxNbytes);
    hash.update(std::as_bytes(std::span(config)));
    has_file = true;
  }
  return has_file ? hash.hex_digest() : std::string();
}

}  // namespace tessera::arithmetic

#include "formats/quantization_method.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/json.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

constexpr std::uint64_t kMaxConfigNbytes = std::uint64_t{16} << 20;
constexpr std::string_view kMethodKey = "quant_method";
constexpr std::string_view kNunchakuKey = "method";
constexpr std::string_view kAlgorithmKey = "quant_algo";  // of ModelOpt, which may name no method

/// Returns the quantization method that a configuration names for the model, or for a part of the
/// model (`text_config`, `llm_config`) at any depth; empty if none.
std::string method_of_config(const Value& config) {
  // Older versions of compressed-tensors wrote `compression_config`.
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    const Value* const quantization = config.find(key);
    for (const std::string_view method_key : {kMethodKey, kAlgorithmKey}) {
      const Value* const method = quantization ? quantization->find(method_key) : nullptr;
      if (method != nullptr && method->is<std::string>()) return method->get<std::string>();
    }
  }
  // These name no method.
  const Value* const of_mlx = config.find("quantization");
  if (of_mlx != nullptr && of_mlx->find("group_size") != nullptr) return "mlx";
  if (config.find("quip_params") != nullptr) return "quip";  // QuIP#, QTIP
  if (config.find("anyprec") != nullptr) return "anyprec";   // Any-Precision
  const auto* const members = config.get_if<Value::Dict>();
  if (members == nullptr) return {};
  for (const auto& [key, part] : *members) {
    if (!key.get<std::string>().ends_with("_config")) continue;
    if (std::string method = method_of_config(part); !method.empty()) return method;
  }
  return {};
}

/// Returns the first `quant_method` in a text that is not strict JSON (Python writes `Infinity`,
/// and the file may be damaged). A wrong result only refuses a cast without need. If damaged text
/// were ignored, a cast could destroy codes.
std::string method_in_text(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n:";
  constexpr std::size_t kMaxMethodNbytes = 64;
  const std::string key = '"' + std::string(kMethodKey) + '"';
  const std::size_t at = text.find(key);
  if (at == std::string_view::npos) return {};
  text.remove_prefix(at + key.size());
  text.remove_prefix(std::min(text.find_first_not_of(kBlank), text.size()));
  if (!text.starts_with('"')) return {};
  text.remove_prefix(1);
  return std::string(text.substr(0, std::min(text.find('"'), kMaxMethodNbytes)));
}

std::string method_of_text(const std::string& text) {
  try {
    return method_of_config(parse_json(text, "config.json"));
  } catch (const Error&) {
    return method_in_text(text);
  }
}

std::string method_of_quantization_config(const std::string& text) {
  try {
    const Value config = parse_json(text, "quantization_config");
    const auto* const members = config.get_if<Value::Dict>();
    if (members == nullptr || members->empty()) return {};
    for (const std::string_view key : {kMethodKey, kNunchakuKey, kAlgorithmKey}) {
      const Value* const method = config.find(key);
      if (method != nullptr && method->is<std::string>()) return method->get<std::string>();
    }
  } catch (const Error&) {
    if (std::string method = method_in_text(text); !method.empty()) return method;
  }
  return "unknown";
}

}  // namespace

std::string quantization_method_in(const std::map<std::string, std::string>& annotations) {
  if (const auto own = annotations.find("quantization_config"); own != annotations.end()) {
    std::string method = method_of_quantization_config(own->second);
    if (!method.empty()) return method;
  }
  const auto config = annotations.find("config");
  return config == annotations.end() ? std::string() : method_of_text(config->second);
}

// Passes on all errors: without the method, a cast could take codes for numbers.
std::string read_quantization_method(const FileSystem& fs, const std::string& checkpoint_path) {
  const bool is_directory = fs.kind_of(checkpoint_path) == FileKind::directory;
  const std::string folder = is_directory ? checkpoint_path : directory_of(checkpoint_path);
  const auto text = read_begin(fs, join_path(folder, "config.json"), kMaxConfigNbytes);
  return text ? method_of_text(*text) : std::string();
}

}  // namespace tessera::formats

#include "arithmetic/comfyui_formats.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "formats/merged_sources.h"
#include "tessera/base/error.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointReader;
using formats::Finding;

constexpr std::string_view kDescriptionSuffix = ".comfy_quant";
constexpr std::int64_t kMaxDescriptionNumel = std::int64_t{1} << 16;

/// Returns what a description says other than that the weight is codes times scales; nothing if it
/// says just that.
std::optional<std::string> other_format(const Value& description) {
  constexpr std::array<std::string_view, 3> kProducts = {"float8_e4m3fn", "float8_e5m2",
                                                         "int8_tensorwise"};
  const Value* const format = description.find("format");
  const auto* const name = format ? format->get_if<std::string>() : nullptr;
  if (name == nullptr) return "no format";
  if (std::ranges::find(kProducts, *name) == kProducts.end()) return printable(*name);
  for (const auto& [key, value] : description.get<Value::Dict>()) {
    const auto* const member = key.get_if<std::string>();
    const auto* const flag = value.get_if<bool>();
    const bool is_harmless =
        member != nullptr && (*member == "format" || *member == "full_precision_matrix_mult" ||
                              (flag != nullptr && !*flag));
    if (!is_harmless) return *name + " with " + (member ? printable(*member) : "another member");
  }
  return std::nullopt;
}

std::optional<Value> parsed(std::string_view text) {
  try {
    return parse_json(text, std::string(kComfyUiMetadataKey));
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Reports `description` of `layer`, unless the layer's weight is codes times scales.
void check_description(const CheckpointReader& reader, const std::string& layer,
                       const std::optional<Value>& description, std::string_view place,
                       std::vector<Finding>& problems) {
  const auto other = description ? other_format(*description) : "text that is not JSON";
  if (!other) return;
  problems.push_back({.severity = Finding::Severity::error,
                      .rule = "dequantize",
                      .where = {.path = reader.path(), .fqn = layer + ".weight"},
                      .expected = "codes times scales (float8_e4m3fn, float8_e5m2 or "
                                  "int8_tensorwise of ComfyUI)",
                      .found = *other + " in " + std::string(place)});
}

void check_tensors(const CheckpointReader& reader, const NameSelection& only,
                   std::vector<Finding>& problems) {
  const auto& tensors = reader.contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta& meta = tensors[i].meta;
    if (!meta.fqn.ends_with(kDescriptionSuffix)) continue;
    const std::string layer = meta.fqn.substr(0, meta.fqn.size() - kDescriptionSuffix.size());
    if (!only.selects(layer + ".weight")) continue;
    std::optional<Value> description;
    if (meta.dtype == DType::uint8 && meta.numel() <= kMaxDescriptionNumel) {
      std::string text(static_cast<std::size_t>(meta.numel()), '\0');
      inspect::TensorReader(reader, i).read({0, meta.numel()},
                                            std::as_writable_bytes(std::span(text)));
      description = parsed(text);
    }
    check_description(reader, layer, description, printable(meta.fqn), problems);
  }
}

/// `prefix`: what a merge puts before the names of layers, with its dot.
void check_annotation(const CheckpointReader& reader, const std::string& prefix,
                      const NameSelection& only, std::vector<Finding>& problems) {
  const auto& annotations = reader.contents().annotations;
  const auto annotation = annotations.find(std::string(kComfyUiMetadataKey));
  if (annotation == annotations.end()) return;
  const std::optional<Value> metadata = parsed(annotation->second);
  const Value* const layers = metadata ? metadata->find("layers") : nullptr;
  const auto* const members = layers ? layers->get_if<Value::Dict>() : nullptr;
  if (members == nullptr) {
    problems.push_back({.severity = Finding::Severity::error,
                        .rule = "dequantize",
                        .where = {.path = reader.path()},
                        .expected = "JSON with a format for each of the layers",
                        .found = "other text in " + std::string(kComfyUiMetadataKey)});
    return;
  }
  for (const auto& [layer, description] : *members) {
    const auto* const name = layer.get_if<std::string>();
    if (name == nullptr || !only.selects(prefix + *name + ".weight")) continue;
    check_description(reader, prefix + *name, description, kComfyUiMetadataKey, problems);
  }
}

}  // namespace

std::vector<Finding> find_formats_of_comfyui(const CheckpointReader& reader,
                                             const NameSelection& only) {
  std::vector<Finding> problems;
  check_tensors(reader, only, problems);
  const auto sources = formats::sources_of_merge(reader);
  if (sources.empty()) check_annotation(reader, "", only, problems);
  for (const formats::MergeSource& source : sources) {
    const std::string prefix = source.prefix.empty() ? "" : source.prefix + ".";
    check_annotation(*source.reader, prefix, only, problems);
  }
  return problems;
}

}  // namespace tessera::arithmetic

#include "tessera/formats/checkpoint.h"

#include <algorithm>

namespace tessera::formats {

std::string_view format_name(Format format) {
  switch (format) {
    case Format::native:
      return "native";
    case Format::safetensors:
      return "safetensors";
    case Format::dcp:
      return "dcp";
    case Format::torch_zip:
      return "torch";
  }
  TESSERA_CHECK(false && "unnamed Format");
  return {};
}

std::optional<Format> parse_format(std::string_view name) {
  for (Format format : {Format::native, Format::safetensors, Format::dcp, Format::torch_zip}) {
    if (format_name(format) == name) return format;
  }
  return std::nullopt;
}

bool holds_whole_tensors(Format format) {
  return format == Format::safetensors || format == Format::torch_zip;
}

std::string_view state_kind_name(StateKind kind) {
  switch (kind) {
    case StateKind::plain:
      return "plain";
    case StateKind::pointwise:
      return "pointwise";
    case StateKind::row_wise:
      return "row_wise";
    case StateKind::scalar_parameter:
      return "scalar_parameter";
    case StateKind::scalar_table:
      return "scalar_table";
    case StateKind::opaque:
      return "opaque";
    case StateKind::row_wise_per_shard:
      return "row_wise_per_shard";
  }
  TESSERA_CHECK(false && "unnamed StateKind");
  return {};
}

std::string finding_to_string(const Finding& finding) {
  return Error::expected(ErrorKind::mismatch, finding.where, finding.rule, finding.expected,
                         finding.found)
      .what();
}

std::string spell(const KeyPath& path) {
  std::string spelled;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i != 0) spelled += '.';
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      spelled += *key;
    } else {
      spelled += std::to_string(std::get<std::int64_t>(path[i]));
    }
  }
  return spelled;
}

const TensorEntry* CheckpointContents::find_tensor(std::string_view fqn) const {
  const auto it = std::lower_bound(
      tensors.begin(), tensors.end(), fqn,
      [](const TensorEntry& tensor, std::string_view name) { return tensor.meta.fqn < name; });
  return it != tensors.end() && it->meta.fqn == fqn ? &*it : nullptr;
}

}  // namespace tessera::formats

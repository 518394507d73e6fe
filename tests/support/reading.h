#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/memory_checkpoint.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/detect.h"

namespace tessera::test {

/// Opens a checkpoint of any format.
inline std::unique_ptr<formats::CheckpointReader> open(const std::string& path) {
  return formats::open_checkpoint(FileSystem::posix(), path);
}

inline std::vector<std::string> names_of(const formats::CheckpointContents& contents) {
  std::vector<std::string> names;
  for (const formats::TensorEntry& tensor : contents.tensors) names.push_back(tensor.meta.fqn);
  return names;
}

inline std::vector<Value> values_of(const formats::CheckpointReader& reader) {
  std::vector<Value> values;
  for (std::size_t v = 0; v < reader.contents().values.size(); ++v) {
    values.push_back(reader.read_value(v));
  }
  return values;
}

/// Returns the elements of a tensor of float32.
inline std::vector<float> floats(const formats::CheckpointReader& reader, const std::string& fqn) {
  const formats::TensorEntry* const tensor = reader.contents().find_tensor(fqn);
  if (tensor == nullptr) throw std::runtime_error("no " + fqn);
  const Bytes bytes =
      whole_tensor(reader, static_cast<std::size_t>(tensor - reader.contents().tensors.data()));
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Reads all tensors and values, for readers that find damage only then.
inline void read_everything(const formats::CheckpointReader& reader) {
  for (std::size_t t = 0; t < reader.contents().tensors.size(); ++t) whole_tensor(reader, t);
  values_of(reader);
}

/// Returns what `verify` finds.
inline std::vector<formats::Finding> findings_of(const formats::CheckpointReader& reader) {
  std::vector<formats::Finding> findings;
  reader.verify([&](const formats::Finding& finding) { findings.push_back(finding); },
                [](std::uint64_t) {}, 1);
  return findings;
}

}  // namespace tessera::test

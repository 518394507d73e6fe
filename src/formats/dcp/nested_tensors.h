#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "formats/dcp/item.h"
#include "formats/dcp/metadata.h"
#include "tessera/base/error.h"
#include "tessera/base/value.h"

namespace tessera::formats::dcp {

/// A value that was split into tensors and values, because it holds a tensor, or something that
/// Tessera refuses to read; or an object of Megatron that is kept as a file.
struct NestedValue {
  std::string name;
  StorageInfo info;
  std::shared_ptr<const Item> item;
  std::vector<OpenedClass> opened_classes;
};

/// The tensors and values into which take_values_apart has split values (NestedValue). The keys are
/// indices into the contents after that call.
struct NestedTensors {
  std::vector<NestedValue> taken_apart;
  std::map<std::size_t, std::shared_ptr<const Chunk>> tensors;
  std::map<std::size_t, std::variant<Value, Error>> values;
};

/// Opens the item at a place in the files, or throws.
using OpenItem = std::function<std::shared_ptr<const Item>(const StorageInfo&)>;

/// Splits each value that holds a tensor, or something that Tessera refuses to read, into its
/// tensors and values, each named by its key path. A value whose item cannot be opened stays
/// unchanged, and reading it later throws the reason.
///
/// Exception: an object of Megatron with a tensor (`rng_state/shard_0.0_1.1`) becomes the value
/// torch_zip::saved_file_value, because Megatron looks for it under its name. If the checkpoint was
/// saved with flattening, other values have no tensors, and only these objects are opened.
/// Throws: Error(unsupported) if two entries get the same name; Error(io).
NestedTensors take_values_apart(Metadata& metadata, const std::string& path, const OpenItem& open);

}  // namespace tessera::formats::dcp

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

/// A value of a checkpoint that was saved without flattening, taken apart as a torch.save file is.
struct NestedValue {
  std::string name;
  StorageInfo info;
  std::shared_ptr<const Item> item;
  std::vector<OpenedClass> opened_classes;
};

/// What values that hold tensors consist of. The keys are indices into the new contents.
struct NestedTensors {
  std::vector<NestedValue> taken_apart;
  std::map<std::size_t, std::shared_ptr<const Chunk>> tensors;
  std::map<std::size_t, std::variant<Value, Error>> values;
};

/// Returns an item, or throws.
using OpenItem = std::function<std::shared_ptr<const Item>(const StorageInfo&)>;

/// Replaces each value that holds a tensor by what it consists of, under names by path. A value
/// whose item cannot be opened stays as it is: reading it later throws the reason.
/// Throws: Error(unsupported) for two entries of one name; Error(io).
NestedTensors take_values_apart(Metadata& metadata, const std::string& path, const OpenItem& open);

}  // namespace tessera::formats::dcp

#include "formats/distinct_names.h"

#include <set>

#include "tessera/base/error.h"

namespace tessera::formats {

void require_distinct_names(const CheckpointContents& contents, const std::string& path,
                            std::string_view advice) {
  std::set<std::string_view> names;
  const auto require_new = [&](const std::string& name) {
    if (names.insert(name).second) return;
    throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = name}, "names",
                          "one entry of this name", "two", advice);
  };
  for (const TensorEntry& tensor : contents.tensors) require_new(tensor.meta.fqn);
  for (const ValueEntry& value : contents.values) require_new(value.name);
  for (const Alias& alias : contents.aliases) require_new(alias.fqn);
}

}  // namespace tessera::formats

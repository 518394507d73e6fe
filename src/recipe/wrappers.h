#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// Components of names that wrapper modules add and a recipe removes: `_orig_mod`,
/// `_checkpoint_wrapped_module`.
class Wrappers {
 public:
  Wrappers() = default;
  /// Requires: each item is one component of names, without dots.
  explicit Wrappers(std::vector<std::string> components) : components_(std::move(components)) {}

  bool empty() const { return components_.empty(); }
  /// Returns the name without wrapper components: `_orig_mod.a.b` becomes `a.b`. A name that has
  /// only wrapper components stays unchanged; if it ends with a dot, as a prefix does, it becomes
  /// empty.
  std::string removed_from(std::string_view name) const;
  /// Returns `path` without wrappers; an empty path if its keys, joined by dots, are not `name`.
  formats::KeyPath removed_from(const formats::KeyPath& path, const std::string& name) const;

 private:
  std::string stripped(std::string_view name) const;

  std::vector<std::string> components_;
};

}  // namespace tessera::recipe

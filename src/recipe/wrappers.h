#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// The modules that a recipe leaves out of names: `_orig_mod`, `_checkpoint_wrapped_module`.
class Wrappers {
 public:
  Wrappers() = default;
  /// Requires: each is one component of names.
  explicit Wrappers(std::vector<std::string> components) : components_(std::move(components)) {}

  bool empty() const { return components_.empty(); }
  /// Returns the name without the components that are wrappers: `_orig_mod.a.b` becomes `a.b`. A
  /// name that consists only of wrappers stays unchanged, but one that ends with a dot becomes
  /// empty.
  std::string removed_from(std::string_view name) const;
  /// Does the same with the keys of a path. Returns an empty path if its spelling is not `name`.
  formats::KeyPath removed_from(const formats::KeyPath& path, const std::string& name) const;

 private:
  std::string stripped(std::string_view name) const;

  std::vector<std::string> components_;
};

}  // namespace tessera::recipe

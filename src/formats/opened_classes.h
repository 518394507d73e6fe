#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Adds up how many objects of each class were opened (OpenedClass) in several files or
/// checkpoints.
class OpenedClassSum {
 public:
  void add(const std::vector<OpenedClass>& classes) {
    for (const OpenedClass& opened : classes) {
      num_objects_[{opened.name, opened.as}] += opened.num_objects;
    }
  }

  /// Returns the classes, sorted by name. A class whose objects were read in two ways is listed
  /// twice.
  std::vector<OpenedClass> classes() const {
    std::vector<OpenedClass> classes;
    for (const auto& [opened, num_objects] : num_objects_) {
      classes.push_back({opened.first, opened.second, num_objects});
    }
    return classes;
  }

 private:
  std::map<std::pair<std::string, OpenedClass::As>, std::size_t> num_objects_;
};

}  // namespace tessera::formats

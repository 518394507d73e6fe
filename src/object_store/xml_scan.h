#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace tessera::object_store {

/// Reads XML as object stores write it: elements and text. Attributes and comments are skipped.
/// Calls `take` at the end of each element, with the names of the elements around it (itself last)
/// and its own text. Accepts at most 16 levels and no DOCTYPE, so the only entities are XML's own
/// five and numbered characters (`&#10;`). Throws: Error(corruption) naming `where` otherwise.
void scan_xml(std::string_view text, const std::string& where,
              const std::function<void(std::span<const std::string> path, std::string text)>& take);

}  // namespace tessera::object_store

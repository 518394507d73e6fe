#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// A global that a pickle may mention. `meaning` is the number by which its reader knows it; tables
/// that are used together number from different hundreds (values 0x100, torch tensors 0x200, DCP
/// metadata 0x300). A name `*` stands for every name of the module and of its submodules.
struct AllowedGlobal {
  std::string_view module;
  std::string_view name;
  std::uint32_t meaning;
};

/// The closed list of names that one kind of pickle may mention. Nothing is ever looked up by these
/// names, in this process or elsewhere: a name only selects a number. Immutable; build it once.
class AllowList {
 public:
  /// Holds views of the tables, which are to be constants.
  AllowList(std::initializer_list<std::span<const AllowedGlobal>> tables);
  /// Returns the meaning of `module.name`, or nothing where it is not listed.
  std::optional<std::uint32_t> find(std::string_view module, std::string_view name) const;

 private:
  std::unordered_map<std::string, std::uint32_t> exact_;
  std::vector<AllowedGlobal> prefixes_;
};

/// Where the pickle lies, for messages.
struct PickleSource {
  std::string path;
  std::uint64_t file_offset = 0;  // of the pickle's first byte
};

/// Bounds what a pickle may cost. Time and memory are linear in its size within these.
struct PickleLimits {
  std::size_t max_nbytes = std::size_t{1} << 30;
  std::size_t max_objects = std::size_t{1} << 26;
  std::size_t max_big_integer_nbytes = 256;
};

/// Reads a pickle of protocol 0 to 5 and returns what it describes. Runs nothing.
/// Throws: Error(unsupported) for a global that `allowed` does not list and for opcodes that no
/// checkpoint needs (extension registry, out-of-band buffers, INST, OBJ, NEWOBJ_EX);
/// Error(corruption) for every broken rule: stack underflow, a MARK missing or left over, an unset
/// memo slot, an argument cut short, bytes after STOP. Both name the path and the byte.
ObjectGraph unpickle(std::vector<char> bytes, PickleSource source, const AllowList& allowed,
                     PickleLimits limits = {});

}  // namespace tessera::formats::pickle

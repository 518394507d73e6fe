#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/pickle/pickle_bytes.h"
#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// A global that a pickle may mention. `meaning` is its number in the reader's code. Tables that
/// are used together need different ranges of numbers (values 0x100, torch tensors 0x200, DCP
/// metadata 0x300). The name `*` stands for every name of the module and its submodules.
struct AllowedGlobal {
  std::string_view module;
  std::string_view name;
  std::uint32_t meaning;
};

/// The closed list of names that one kind of pickle may mention. These names are never looked up
/// anywhere: a name only selects a number. Immutable; build it once.
class AllowList {
 public:
  /// Keeps views of the tables, which must be constants.
  AllowList(std::initializer_list<std::span<const AllowedGlobal>> tables);
  /// Returns the meaning of `module.name`, or nothing if it is not listed.
  std::optional<std::uint32_t> find(std::string_view module, std::string_view name) const;

 private:
  std::unordered_map<std::string, std::uint32_t> exact_;
  std::vector<AllowedGlobal> prefixes_;
};

/// [Note: Foreign globals] A foreign global is one that the allow-list lacks: a name of another
/// class or function. This says what to do with it. Nothing is ever looked up or called.
struct ForeignGlobals {
  enum class Policy {
    refuse,  // throw Error(unsupported), even if nothing uses the global
    record,  // the global, and every call of it, is an object that `is_foreign`
  };
  Policy policy = Policy::refuse;
  /// Globals with these names, such as `argparse.Namespace`, get kAsDictMeaning. Names are compared
  /// as text.
  std::span<const std::string> as_dict{};
  /// Whether a persistent id ('module', CLASS, …) stands for CLASS, as in torch.save's streams.
  bool has_module_ids = false;
};

/// The meanings of a global that the allow-list lacks.
inline constexpr std::uint32_t kForeignMeaning = 0;
inline constexpr std::uint32_t kAsDictMeaning = 1;  // ForeignGlobals::as_dict names it

/// The place of the pickle, for messages.
struct PickleSource {
  std::string path;
  std::uint64_t file_offset = 0;  // of the pickle's first byte
};

/// Limits for a pickle. Within them, time and memory are linear in its size. If it exceeds one,
/// unpickle throws Error(corruption), or Error(unsupported) for an integer. `max_objects`: how many
/// objects opcodes may push, not counting those dropped with entries that an EntryTaker took.
struct PickleLimits {
  std::size_t max_nbytes = std::size_t{1} << 30;
  std::size_t max_objects = std::size_t{1} << 26;
  std::size_t max_big_integer_nbytes = 256;
};

/// Takes the entries of large dicts while the pickle is read, so that the graph does not hold them.
///
/// [Note: Entries taken early] The outermost object of a pickle is a call with a dict of
/// attributes. An attribute that is itself a dict can have a million entries, each of many objects.
/// A batch is the entries that one SETITEMS sets. An entry is taken as soon as its value is
/// complete: after the BUILD of the value, or at the end of the batch. Then its objects are
/// dropped, except those that a later opcode fetches from the memo. The memory of its bytes is
/// freed too, if they come from a file; so the graph copies the text of objects that it keeps.
/// - The reader refuses a pickle that changes an object of an entry after the entry was taken.
/// - After the first foreign global nothing more is taken. The graph then holds all further
///   entries, as it does without a taker.
/// - Repeated keys are not merged: if a key has several entries, the taker gets each of them, in
///   the order of the pickle.
class EntryTaker {
 public:
  virtual ~EntryTaker() = default;
  /// Says whether to take the entries of `dict`, which is about to become the attribute `name` of
  /// `root`. Called before each batch of entries.
  virtual bool wants(Object root, std::string_view name, Object dict) = 0;
  /// Takes one entry of the last dict that was wanted. The objects and their text live until the
  /// call returns.
  virtual void take(Object key, Object value) = 0;
};

/// Reads a pickle of protocol 0 to 5 and returns the objects it describes. Executes nothing.
/// Throws: Error(unsupported) for opcodes that no checkpoint needs (extension registry, out-of-band
/// buffers), and, if the policy of `foreign` is `refuse`, for INST, OBJ, NEWOBJ_EX, and a global
/// that `allowed` does not list; Error(corruption) for every broken rule: stack underflow, a
/// missing or extra MARK, an unset memo slot, a truncated argument, bytes after STOP. Both errors
/// name the path and the byte. `taker` may be null.
ObjectGraph unpickle(PickleBytes bytes, PickleSource source, const AllowList& allowed,
                     ForeignGlobals foreign = {}, PickleLimits limits = {},
                     EntryTaker* taker = nullptr);

}  // namespace tessera::formats::pickle

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// A name that a loader of the pickle would import.
struct WalkedGlobal {
  enum class Kind : std::uint8_t {
    named,      // `module` and `name` are constants of the pickle
    computed,   // the name is the result of a call, or too long: the walk cannot know it
    extension,  // an extension code, which the loading program has registered; `name` is the number
  };
  Kind kind = Kind::named;
  std::string module{};
  std::string name{};           // `a.b` is the attribute `b` of `a`
  std::uint64_t offset = 0;     // position in the file of the first opcode that imports it
  std::uint64_t num_times = 0;  // how often it is imported
  bool is_called = false;       // the pickle calls it, or makes an object of it
  bool is_changed = false;      // an opcode sets attributes or items of the class or module itself
  bool is_result_called = false;  // the pickle calls it, and then calls the result
  // The pickle calls it, and this function calls an argument that the walk does not know.
  bool calls_unknown = false;
  // False: a `getattr` that only makes constants, such as enum members; these are judged instead.
  bool escapes = true;
};

/// A place in the pickle and what is wrong there, in words: a loader would stop with an error
/// (`first_break`), or the walk itself gave up (`limit`).
struct PickleBreak {
  std::uint64_t offset = 0;  // position in the file
  std::string expected{};
  std::string found{};
};

struct WalkLimits {
  std::size_t max_objects = std::size_t{1} << 23;  // on the stack
  std::size_t max_memo_keys = std::size_t{1} << 26;
  std::size_t max_memo_slots = std::size_t{1} << 23;  // strings, tuples and the like in the memo
  std::size_t max_globals = 10'000;                   // different names
  std::size_t max_name_nbytes = 4096;
};

/// The result of a walk: the names that one pickle would import and call.
struct PickleWalk {
  std::vector<WalkedGlobal> globals{};       // in the order in which they are imported
  std::optional<PickleBreak> first_break{};  // the first place at which a loader would stop
  std::optional<PickleBreak> limit{};        // the walk ended here; later bytes were not looked at
  std::uint64_t end = 0;                     // position after STOP, or where the walk ended
  std::uint64_t num_opcodes = 0;
  bool has_protocol = false;  // the pickle begins with PROTO
  bool has_stop = false;
};

/// Whether the walk continues after an error at which loaders stop.
enum class AfterBreak { go_on, stop };

/// Reads the opcodes of the pickle at `begin` and returns the names that they import and call. Runs
/// nothing. [Note: Lenient walk]
///
/// Loaders do not agree about which errors make them stop. So the walk continues after each error,
/// as long as it can tell where the next opcode begins. It may report more than a loader would run,
/// but not less. Only an unknown opcode, the end of the file or a limit ends the walk early.
///
/// The walk remembers of values only what it needs to know the names: where strings are in the
/// file, and which global an object comes from. Raw arrays after joblib's `NumpyArrayWrapper` are
/// skipped. Cost: time linear in the file, memory bounded by `limits`. Throws: Error(io).
PickleWalk walk_pickle(const ReadableFile& file, std::uint64_t begin,
                       AfterBreak after_break = AfterBreak::go_on, const WalkLimits& limits = {});

}  // namespace tessera::inspect

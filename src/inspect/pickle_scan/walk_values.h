#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "inspect/pickle_scan/pickle_walk.h"

namespace tessera::inspect {

/// A value on the stack of the pickle that is walked, as far as the walk knows it.
struct Slot {
  enum class Kind : std::uint8_t {
    mark,          // the opcode MARK put it on the stack
    none,          // None
    other,         // nothing is known about it
    text,          // the UTF-8 text of `nbytes` at `number` in the file
    quoted_text,   // as `text`, but in quotes and with Python's escapes
    escaped_text,  // as `text`, but with `\u` escapes
    integer,       // `number`
    integers,      // a tuple of integers, whose product is `number`
    pair,          // a tuple of `nbytes` (2 to 4) values; `number`: index in the walk's pairs
    tuple,         // another tuple; `number` is what `unknown_items` says about it
    global,        // `number` is its index in PickleWalk::globals
    result,        // the result of a call of the global `number`
    dict,          // `number` is the index of its RawArray in the walk's list of arrays
    dtype,         // a NumPy dtype; `number` is its index in the walk's list of dtypes
    // The tuple that BUILD applies to a dtype; `number` is the new itemsize, or kSameItemsize.
    dtype_state,
  };
  Kind kind = Kind::other;
  std::uint32_t nbytes = 0;
  std::uint64_t number = 0;

  bool is_text() const {
    return kind == Kind::text || kind == Kind::quoted_text || kind == Kind::escaped_text;
  }
};

/// The first two values of a tuple.
struct SlotPair {
  Slot first;   // text or a global
  Slot second;  // a name or a constant, or a value of unknown kind
};

/// Says which of the first two items of a tuple are values that the walk does not know and that may
/// be functions: the first if bit 0 is set, the second if bit 1 is set.
std::uint64_t unknown_items(std::span<const Slot> items);

inline constexpr std::uint64_t kSameItemsize = 0xffffffff;  // -1 as four bytes: keep the itemsize

/// The memo of a pickle: values that opcodes store under a number and fetch again. Most of these
/// values are objects that the walk knows nothing about, or of which it only knows the class; such
/// a value takes 4 bytes.
class Memo {
 public:
  explicit Memo(const WalkLimits& limits) : limits_(limits) {}
  /// Stores a value under a number. Returns false if the memo is full.
  bool put(std::uint64_t key, const Slot& slot);
  std::optional<Slot> get(std::uint64_t key) const;
  /// Returns how many keys are set. The opcode MEMOIZE uses this number as its key.
  std::uint64_t num_set() const { return num_set_; }

 private:
  static constexpr std::size_t kMaxGap = 1024;
  static constexpr std::size_t kMaxSparse = std::size_t{1} << 20;

  /// A value in 4 bytes: kUnset, kOther, kFirstTuple + number, kFirstGlobal + 2 * number (+ 1 for
  /// its result), or kFirstSlot + the index in `slots_`.
  using Code = std::uint32_t;
  static constexpr Code kUnset = 0;
  static constexpr Code kOther = 1;
  static constexpr Code kFirstTuple = 2;
  static constexpr Code kFirstGlobal = 6;
  static constexpr Code kFirstSlot = Code{1} << 16;

  Code code_at(std::uint64_t key) const;
  /// Returns the code of a value without details; nothing if it needs a slot.
  static std::optional<Code> short_code(const Slot& slot);
  /// Stores a value in slot `old`, or in another if that is no slot. Nothing if all slots are used.
  std::optional<Code> take_slot(const Slot& slot, Code old);

  const WalkLimits& limits_;
  std::uint64_t num_set_ = 0;
  std::vector<Code> dense_;
  std::unordered_map<std::uint64_t, Code> sparse_;
  std::vector<Slot> slots_;
  std::vector<Code> free_slots_;
};

/// Returns the text that a slot stands for; nothing if the slot is not text, or if the text is
/// longer than `max_nbytes` or has an escape that Python does not know.
std::optional<std::string> text_of(const ReadableFile& file, const Slot& slot,
                                   std::size_t max_nbytes);

/// Returns a slot for a tuple of `items`. The tuple may name a global if its first item is text or
/// a global, and it has 2 or 3 items (4 if that is a global). Then adds the first two to `pairs`.
Slot tuple_slot(std::span<const Slot> items, std::vector<SlotPair>& pairs);

/// A NumPy dtype, as far as the walk knows it.
struct ArrayDType {
  std::optional<std::uint64_t> itemsize{};
  bool is_flexible = false;  // the itemsize is in the dtype's state
  bool has_objects = false;

  /// Applies `state`, which the opcode BUILD gives to the dtype.
  void build(const Slot& state);
};

/// Returns the dtype that NumPy makes of a code such as `f4`, `<U10` or `O8`.
ArrayDType dtype_of(std::string_view code);

/// The raw array that follows an object of joblib's `NumpyArrayWrapper`, as the object's attributes
/// describe the array.
struct RawArray {
  std::optional<std::uint64_t> numel{};
  std::optional<std::uint64_t> dtype{};  // index in the walk's list of dtypes
  /// The array begins with a byte that says how many bytes of padding follow.
  bool is_aligned = false;

  void note(std::string_view key, const Slot& value);
};

}  // namespace tessera::inspect

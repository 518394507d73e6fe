#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "formats/pickle/opcode.h"
#include "tessera/base/value.h"

namespace tessera::formats::pickle {

/// Writes a Python pickle, one call per opcode or atom. The caller must keep the stack correct.
/// Protocol 2 is what `torch.save` writes, protocol 4 what DCP writes for `.metadata`. Equal calls
/// give equal bytes. Not thread-safe.
/// Source: Lib/pickletools.py of CPython, which documents every opcode.
class Pickler {
 public:
  /// Requires: protocol 2, 3 or 4.
  explicit Pickler(int protocol);
  int protocol() const { return protocol_; }

  // Atoms: each pushes one object.
  void none() { op(Opcode::NONE); }
  void boolean(bool value) { op(value ? Opcode::NEWTRUE : Opcode::NEWFALSE); }
  void integer(std::int64_t value);
  void big_integer(std::string_view decimal);  // Requires: an optional `-`, then digits
  void real(double value);
  void text(std::string_view utf8);
  void bytes(std::string_view data);
  void global(std::string_view module,
              std::string_view name);    // written once, later fetched from the memo
  void interned(std::string_view utf8);  // a str, written once, like a global
  /// Pushes the str and returns true if `interned` has written it before. Otherwise returns false.
  bool get_interned(std::string_view utf8);

  // Containers and calls.
  void mark() { op(Opcode::MARK); }
  void empty_tuple() { op(Opcode::EMPTY_TUPLE); }
  void empty_list() { op(Opcode::EMPTY_LIST); }
  void empty_dict() { op(Opcode::EMPTY_DICT); }
  void tuple1() { op(Opcode::TUPLE1); }
  void tuple2() { op(Opcode::TUPLE2); }
  void tuple_from_mark() { op(Opcode::TUPLE); }
  void append() { op(Opcode::APPEND); }
  void append_from_mark() { op(Opcode::APPENDS); }
  void set_items_from_mark() { op(Opcode::SETITEMS); }
  void reduce() { op(Opcode::REDUCE); }      // callable, argument tuple -> its result
  void new_object() { op(Opcode::NEWOBJ); }  // class, argument tuple -> instance
  void build() { op(Opcode::BUILD); }        // instance, state -> instance
  void persistent_id() { op(Opcode::BINPERSID); }

  /// Puts the top of the stack into the memo. `get` with the returned index pushes it again.
  std::size_t memoize();
  void get(std::size_t memo_index);

  /// Returns the bytes that were written since the last call of this function. So a long pickle
  /// need not be in memory as a whole.
  std::string take_bytes() { return std::exchange(out_, {}); }
  std::size_t num_held_bytes() const { return out_.size(); }  // that take_bytes will return

  /// Ends the pickle and returns its bytes, without those that take_bytes has returned.
  std::string finish() &&;

 private:
  void op(Opcode opcode) { out_.push_back(static_cast<char>(opcode)); }
  template <class Unsigned>
  void little_endian(Unsigned value);
  void text_with_length(std::string_view utf8);

  std::string out_;
  int protocol_;
  std::size_t num_memoized_ = 0;
  std::unordered_map<std::string, std::size_t> memo_of_global_;  // "module\nname" -> memo index
  std::unordered_map<std::string, std::size_t> memo_of_text_;
};

/// Pushes a value as Python would pickle the object. A symbol is a dtype, layout or device of
/// torch, or a complex number. A set in a set or in a dict's key becomes a frozenset, as it was
/// before it was read. Throws: Error(unsupported) for any other symbol, for text that is no Python
/// str, and for a dict key or an item of a set that Python cannot hash.
void pickle_value(Pickler& pickler, const Value& value);

}  // namespace tessera::formats::pickle

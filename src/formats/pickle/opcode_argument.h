#pragma once

#include <array>
#include <initializer_list>

#include "formats/pickle/opcode.h"

namespace tessera::formats::pickle {

/// The kind of argument that follows an opcode. `no_opcode`: the byte is not an opcode.
enum class Argument : unsigned char {
  no_opcode,
  nothing,
  bytes_1,
  bytes_2,
  bytes_4,
  bytes_8,
  length_1,  // a length of 1 byte, then as many bytes
  length_4,
  length_8,
  line,
  two_lines,
};

/// The kind of argument of each opcode.
inline constexpr std::array<Argument, 256> kArgumentOf = [] {
  std::array<Argument, 256> arguments{};
  const auto add = [&arguments](Argument argument, std::initializer_list<Opcode> opcodes) {
    for (const Opcode opcode : opcodes) arguments[static_cast<unsigned char>(opcode)] = argument;
  };
  using enum Opcode;
  add(Argument::nothing,
      {STOP,       MARK,        POP,        POP_MARK,     DUP,       NONE,           NEWTRUE,
       NEWFALSE,   TUPLE,       TUPLE1,     TUPLE2,       TUPLE3,    LIST,           DICT,
       EMPTY_LIST, EMPTY_TUPLE, APPEND,     APPENDS,      EMPTY_SET, ADDITEMS,       FROZENSET,
       SETITEM,    SETITEMS,    EMPTY_DICT, REDUCE,       NEWOBJ,    NEWOBJ_EX,      OBJ,
       BUILD,      NEXT_BUFFER, MEMOIZE,    STACK_GLOBAL, BINPERSID, READONLY_BUFFER});
  add(Argument::bytes_1, {PROTO, BININT1, BINPUT, BINGET, EXT1});
  add(Argument::bytes_2, {BININT2, EXT2});
  add(Argument::bytes_4, {BININT, LONG_BINPUT, LONG_BINGET, EXT4});
  add(Argument::bytes_8, {BINFLOAT, FRAME});
  add(Argument::length_1, {LONG1, SHORT_BINSTRING, SHORT_BINUNICODE, SHORT_BINBYTES});
  add(Argument::length_4, {LONG4, BINSTRING, BINUNICODE, BINBYTES});
  add(Argument::length_8, {BINUNICODE8, BINBYTES8, BYTEARRAY8});
  add(Argument::line, {INT, LONG, FLOAT, STRING, UNICODE, PUT, GET, PERSID});
  add(Argument::two_lines, {GLOBAL, INST});
  return arguments;
}();

/// Skips the argument of an opcode. `walk` is at the argument's first byte, and has three
/// functions: `skip_bytes(n)`; `skip_line()`; `skip_length(width)`, which reads a length of `width`
/// bytes and skips as many bytes as it says. Does nothing for Argument::no_opcode.
template <class Walk>
void skip_argument(Walk& walk, Argument argument) {
  switch (argument) {
    case Argument::no_opcode:
    case Argument::nothing:
      return;
    case Argument::bytes_1:
      return walk.skip_bytes(1);
    case Argument::bytes_2:
      return walk.skip_bytes(2);
    case Argument::bytes_4:
      return walk.skip_bytes(4);
    case Argument::bytes_8:
      return walk.skip_bytes(8);
    case Argument::length_1:
      return walk.skip_length(1);
    case Argument::length_4:
      return walk.skip_length(4);
    case Argument::length_8:
      return walk.skip_length(8);
    case Argument::line:
      return walk.skip_line();
    case Argument::two_lines:
      walk.skip_line();
      return walk.skip_line();
  }
}

}  // namespace tessera::formats::pickle

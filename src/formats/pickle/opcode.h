#pragma once

namespace tessera::formats::pickle {

/// The opcodes of pickle protocols 0 to 5, under the names that Python's pickletools gives them.
/// The reader and the writer share them. Stored on disk; never renumber.
/// Source: Lib/pickletools.py of CPython, which documents every opcode.
enum class Opcode : unsigned char {
  // Frame of the program
  PROTO = 0x80,
  FRAME = 0x95,
  STOP = '.',

  // Stack
  MARK = '(',
  POP = '0',
  POP_MARK = '1',
  DUP = '2',

  // Constants and numbers
  NONE = 'N',
  NEWTRUE = 0x88,
  NEWFALSE = 0x89,
  INT = 'I',
  BININT = 'J',
  BININT1 = 'K',
  BININT2 = 'M',
  LONG = 'L',
  LONG1 = 0x8a,
  LONG4 = 0x8b,
  FLOAT = 'F',
  BINFLOAT = 'G',

  // Text and bytes
  STRING = 'S',
  BINSTRING = 'T',
  SHORT_BINSTRING = 'U',
  UNICODE = 'V',
  BINUNICODE = 'X',
  SHORT_BINUNICODE = 0x8c,
  BINUNICODE8 = 0x8d,
  BINBYTES = 'B',
  SHORT_BINBYTES = 'C',
  BINBYTES8 = 0x8e,
  BYTEARRAY8 = 0x96,

  // Containers
  EMPTY_LIST = ']',
  EMPTY_TUPLE = ')',
  EMPTY_DICT = '}',
  EMPTY_SET = 0x8f,
  LIST = 'l',
  TUPLE = 't',
  TUPLE1 = 0x85,
  TUPLE2 = 0x86,
  TUPLE3 = 0x87,
  DICT = 'd',
  FROZENSET = 0x91,
  APPEND = 'a',
  APPENDS = 'e',
  ADDITEMS = 0x90,
  SETITEM = 's',
  SETITEMS = 'u',

  // Memo
  PUT = 'p',
  BINPUT = 'q',
  LONG_BINPUT = 'r',
  MEMOIZE = 0x94,
  GET = 'g',
  BINGET = 'h',
  LONG_BINGET = 'j',

  // Globals and calls
  GLOBAL = 'c',
  STACK_GLOBAL = 0x93,
  REDUCE = 'R',
  NEWOBJ = 0x81,
  BUILD = 'b',
  PERSID = 'P',
  BINPERSID = 'Q',
  // Only objects of classes need these opcodes. A reader that refuses foreign globals refuses these
  // opcodes too.
  INST = 'i',
  OBJ = 'o',
  NEWOBJ_EX = 0x92,

  // No checkpoint needs these; the reader refuses them.
  EXT1 = 0x82,
  EXT2 = 0x83,
  EXT4 = 0x84,
  NEXT_BUFFER = 0x97,
  READONLY_BUFFER = 0x98,
};

}  // namespace tessera::formats::pickle

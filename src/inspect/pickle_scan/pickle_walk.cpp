#include "inspect/pickle_scan/pickle_walk.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <utility>

#include "base/size_text.h"
#include "formats/pickle/opcode.h"
#include "inspect/pickle_scan/byte_window.h"
#include "inspect/pickle_scan/global_verdict.h"
#include "inspect/pickle_scan/walk_values.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

using formats::pickle::Opcode;
using Kind = Slot::Kind;

constexpr int kMaxNestedPickles = 16;
constexpr std::uint64_t kNoFrame = 0;  // as the end of a frame
constexpr std::size_t kMaxArrays = std::size_t{1} << 20;
constexpr std::uint64_t kHighestProtocol = 5;

bool is_getattr(const WalkedGlobal& global) {
  return global.name == "getattr" &&
         (global.module == "builtins" || global.module == "__builtin__");
}

std::string counted_bytes(std::uint64_t nbytes) {
  return counted(nbytes, "byte");
}

class Walk {
 public:
  Walk(const ReadableFile& file, std::uint64_t begin, AfterBreak after_break,
       const WalkLimits& limits, int depth)
      : file_(file),
        in_(file, begin),
        after_break_(after_break),
        limits_(limits),
        depth_(depth),
        memo_(limits) {}

  PickleWalk run() {
    bool goes_on = true;
    while (goes_on) {
      at_ = in_.position();
      const auto opcode = in_.next();
      if (!opcode) {
        stop_at("an opcode", "the end of the file");
        break;
      }
      const std::uint64_t frame_end = frame_end_;
      goes_on = step(static_cast<Opcode>(*opcode));
      if (frame_end_ != kNoFrame) check_within_frame(frame_end);
      goes_on = goes_on && !walk_.has_stop && !walk_.limit && is_reached();
      ++walk_.num_opcodes;
    }
    walk_.end = in_.position();
    for (const Slot& slot : stack_) consume(slot);
    return std::move(walk_);
  }

 private:
  // Notes the first place at which a loader would stop.
  void stop_at(std::string expected, std::string found) {
    if (!walk_.first_break) walk_.first_break = {at_, std::move(expected), std::move(found)};
  }
  /// Says whether the walk takes the current opcode as one that a loader reaches and runs.
  bool is_reached() const { return !walk_.first_break || after_break_ == AfterBreak::go_on; }
  bool end_at(std::string expected, std::string found) {
    stop_at(std::move(expected), std::move(found));
    return false;
  }
  void reach_limit(std::string expected, std::string found) {
    if (!walk_.limit) walk_.limit = {at_, std::move(expected), std::move(found)};
  }

  /// Handles one opcode. Returns false if the walk cannot continue.
  bool step(Opcode opcode) {
    if (const auto goes_on = frame_step(opcode)) return *goes_on;
    if (const auto goes_on = number_step(opcode)) return *goes_on;
    if (const auto goes_on = text_step(opcode)) return *goes_on;
    if (const auto goes_on = line_step(opcode)) return *goes_on;
    if (const auto goes_on = memo_step(opcode)) return *goes_on;
    if (container_step(opcode) || entry_step(opcode)) return true;
    if (const auto goes_on = global_step(opcode)) return *goes_on;
    if (call_step(opcode)) return true;
    return end_at("an opcode", "byte " + std::to_string(static_cast<int>(opcode)));
  }

  // The stack

  void push(Slot slot) {
    if (stack_.size() >= limits_.max_objects) {
      return reach_limit("at most " + std::to_string(limits_.max_objects) + " objects on the stack",
                         "more");
    }
    stack_.push_back(slot);
  }
  void push(Kind kind, std::uint64_t number = 0) { push({.kind = kind, .number = number}); }

  /// Takes the top of the stack. The caller passes it to `consume`, or to `call` if the pickle
  /// calls it.
  Slot pop() {
    if (stack_.empty() || stack_.back().kind == Kind::mark) {
      stop_at("an object on the stack", "none");
      return {};
    }
    const Slot slot = stack_.back();
    stack_.pop_back();
    return slot;
  }

  /// Records that the pickle uses a value in a way that the walk does not follow. Matters only for
  /// `getattr`, which is then judged itself, and joblib's array wrapper, which sets `walk_.limit`.
  void consume(const Slot& slot) {
    const Slot& used = slot.kind == Kind::pair ? pairs_[slot.number].first : slot;
    if (used.kind != Kind::global) return;
    WalkedGlobal& global = walk_.globals[used.number];
    global.escapes = true;
    if (is_wrapper_class(global)) {
      reach_limit("a call of NumpyArrayWrapper",
                  "another use of it; raw arrays may follow that the scan does not see");
    }
  }
  void drop() { consume(pop()); }

  /// Takes the topmost mark and all slots above it from the stack. Returns these slots.
  std::vector<Slot> pop_to_mark() {
    if (num_marks_ == 0) {
      stop_at("a mark on the stack", "none");
      return {};
    }
    std::size_t begin = stack_.size();
    while (stack_[begin - 1].kind != Kind::mark) --begin;
    std::vector<Slot> items(stack_.begin() + static_cast<std::ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin - 1);
    --num_marks_;
    return items;
  }

  void drop_to_mark() {
    for (const Slot& slot : pop_to_mark()) consume(slot);
  }

  // Frames, and opcodes that only move the stack

  std::optional<bool> frame_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::PROTO: {
        const auto version = in_.number(1);
        if (!version) return end_at("a protocol", "the end of the file");
        if (walk_.num_opcodes == 0) walk_.has_protocol = true;
        if (*version > kHighestProtocol) stop_at("a protocol up to 5", std::to_string(*version));
        return true;
      }
      case Opcode::FRAME: {
        const auto nbytes = in_.number(8);
        if (!nbytes) return end_at("the length of a frame", "the end of the file");
        begin_frame(*nbytes);
        return true;
      }
      case Opcode::STOP:
        walk_.has_stop = true;
        drop();
        check_frame_at_stop();
        return true;
      case Opcode::MARK:
        push(Kind::mark);
        ++num_marks_;
        return true;
      case Opcode::POP:
        if (!stack_.empty() && stack_.back().kind == Kind::mark) {
          stack_.pop_back();
          --num_marks_;
        } else {
          drop();
        }
        return true;
      case Opcode::POP_MARK:
        drop_to_mark();
        return true;
      case Opcode::DUP:
        push(top());
        return true;
      default:
        return std::nullopt;
    }
  }

  /// A frame that is longer than the file is no error for Python's own unpickler, only for the one
  /// in C.
  void begin_frame(std::uint64_t nbytes) {
    constexpr std::uint64_t kLongest = std::numeric_limits<std::int64_t>::max();
    if (nbytes > kLongest) {
      return stop_at("a frame of at most " + counted_bytes(kLongest), counted_bytes(nbytes));
    }
    const std::uint64_t end = in_.position() + nbytes;
    if (in_.position() >= frame_end_) {
      frame_end_ = end;
    } else if (end > frame_end_) {
      reach_limit("a frame after the end of the last one", "one that begins in it");
    }
  }

  /// Python's unpickler in C drops bytes of an opcode that goes beyond the end of a frame, if the
  /// file cannot be looked ahead into: it reads `os` of the module `xos` if the frame ends after
  /// the `x`. torch.load reads like that.
  void check_within_frame(std::uint64_t frame_end) {
    if (at_ >= frame_end || in_.position() <= frame_end) return;
    // What the walk has found wrong with the opcode says nothing about what that unpickler reads.
    if (walk_.first_break && walk_.first_break->offset == at_) walk_.first_break.reset();
    reach_limit("an opcode that ends with its frame", "one that goes on after it");
  }

  /// Where the next pickle begins depends on the unpickler, if this one ends before its frame does:
  /// Python's own unpickler has read the whole frame from the file.
  void check_frame_at_stop() {
    if (in_.position() >= frame_end_) return;
    const std::string found = counted_bytes(frame_end_ - in_.position()) + " of the frame after it";
    if (frame_end_ > in_.position() + in_.nbytes_left()) return stop_at("STOP in a frame", found);
    reach_limit("STOP at the end of its frame", found);
  }

  Slot top() {
    if (!stack_.empty() && stack_.back().kind != Kind::mark) return stack_.back();
    stop_at("an object on the stack", "none");
    return {};
  }

  // Constants

  bool push_number(int num_bytes, Kind kind) {
    const auto number = in_.number(num_bytes);
    if (!number) return end_at("a number", "the end of the file");
    push(kind, *number);
    return true;
  }

  std::optional<bool> number_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::NONE:
        push(Kind::none);
        return true;
      case Opcode::NEWTRUE:
      case Opcode::NEWFALSE:
      case Opcode::NEXT_BUFFER:
        push(Kind::other);
        return true;
      case Opcode::READONLY_BUFFER:
        top();
        return true;
      case Opcode::BININT: {
        const auto number = in_.number(4);
        if (!number) return end_at("a number", "the end of the file");
        push(integer_of(*number, 4));
        return true;
      }
      case Opcode::BININT1:
        return push_number(1, Kind::integer);
      case Opcode::BININT2:
        return push_number(2, Kind::integer);
      case Opcode::BINFLOAT:
        return push_number(8, Kind::other);
      case Opcode::LONG1:
        return push_long(1);
      case Opcode::LONG4:
        return push_long(4);
      default:
        return std::nullopt;
    }
  }

  bool push_long(int length_nbytes) {
    const auto nbytes = in_.number(length_nbytes);
    if (nbytes && *nbytes <= 8 && *nbytes <= in_.nbytes_left()) {
      push(integer_of(in_.number(static_cast<int>(*nbytes)).value_or(0), *nbytes));
      return true;
    }
    if (!nbytes || !in_.skip(*nbytes)) return end_at("a number", "the end of the file");
    push(Kind::other);
    return true;
  }

  /// Returns a slot for a little-endian number of `nbytes` bytes in two's complement. The walk does
  /// not follow negative numbers.
  static Slot integer_of(std::uint64_t number, std::uint64_t nbytes) {
    const bool is_negative = nbytes > 0 && (number >> (8 * nbytes - 1)) != 0;
    return {.kind = is_negative ? Kind::other : Kind::integer, .number = number};
  }

  bool push_sized(int length_nbytes, Kind kind) {
    const auto nbytes = in_.number(length_nbytes);
    const std::uint64_t begin = in_.position();
    if (!nbytes || !in_.skip(*nbytes)) {
      return end_at("a string of " + counted_bytes(nbytes.value_or(0)),
                    counted_bytes(file_.nbytes() - begin));
    }
    push_text(kind, {begin, begin + *nbytes});
    return true;
  }

  void push_text(Kind kind, ByteRange range) {
    constexpr std::uint64_t kLongest = std::numeric_limits<std::uint32_t>::max();
    push({.kind = kind,
          .nbytes = static_cast<std::uint32_t>(std::min(range.nbytes(), kLongest)),
          .number = range.begin});
  }

  std::optional<bool> text_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::SHORT_BINUNICODE:
      case Opcode::SHORT_BINSTRING:  // a str, if the loader is not told otherwise
        return push_sized(1, Kind::text);
      case Opcode::BINUNICODE:
      case Opcode::BINSTRING:
        return push_sized(4, Kind::text);
      case Opcode::BINUNICODE8:
        return push_sized(8, Kind::text);
      case Opcode::SHORT_BINBYTES:
        return push_sized(1, Kind::other);
      case Opcode::BINBYTES:
        return push_sized(4, Kind::other);
      case Opcode::BINBYTES8:
      case Opcode::BYTEARRAY8:
        return push_sized(8, Kind::other);
      default:
        return std::nullopt;
    }
  }

  // Arguments that are lines of text

  std::string line_text(ByteRange range) const {
    return read_some(file_, range.begin, std::min<std::uint64_t>(range.nbytes(), 64));
  }

  /// Accepts at least what Python's two unpicklers accept: the one in C reads the line up to a NUL,
  /// and takes blanks, underscores and prefixes such as `0x` as C and Python do.
  void push_text_number(ByteRange range) {
    constexpr std::string_view kInNumbers = "0123456789abcdefABCDEFxXoOlL_+-.intyINTY \t\r\v\f";
    const std::string line = line_text(range);
    const std::string text = line.substr(0, line.find('\0'));
    if (line.empty() || text.find_first_not_of(kInNumbers) != std::string::npos) {
      stop_at("a number", "'" + printable(line, 40) + "'");
    }
    // Another spelling than the usual one is no number for the walk: `010` is 8 in C.
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const std::string_view rest(end, text.data() + text.size());
    const bool is_usual = text == "0" || !text.starts_with('0');
    const bool is_whole = error == std::errc() && (rest.empty() || rest == "L");
    const bool is_integer = is_usual && is_whole && line.size() == range.nbytes();
    push(is_integer ? Kind::integer : Kind::other, number);
  }

  std::optional<bool> line_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::INT:
      case Opcode::LONG:
      case Opcode::FLOAT:
        push_text_number(in_.line());
        return true;
      case Opcode::STRING:
        push_quoted(in_.line());
        return true;
      case Opcode::UNICODE:
        push_text(Kind::escaped_text, in_.line());
        return true;
      case Opcode::PERSID:
        in_.line();
        push(Kind::other);
        return true;
      default:
        return std::nullopt;
    }
  }

  void push_quoted(ByteRange range) {
    const std::string text = line_text(range);
    if (text.empty() || (text[0] != '\'' && text[0] != '"')) {
      stop_at("a string in quotes", "'" + printable(text, 40) + "'");
    }
    push_text(Kind::quoted_text, range);
  }

  // Memo

  static constexpr std::uint64_t kNoKey = std::numeric_limits<std::uint64_t>::max();

  /// Reads the key of a memo slot from a line of text, at least as leniently as Python's two
  /// unpicklers: the one in C reads the line up to a NUL, and both take blanks, underscores, signs
  /// and zeros before the number.
  std::uint64_t key_of_line() {
    constexpr std::uint64_t kMaxLineNbytes = 65536;
    constexpr std::string_view kIgnored = " \t\r\v\f_+";
    const ByteRange line = in_.line();
    std::string text = read_some(file_, line.begin, std::min(line.nbytes(), kMaxLineNbytes));
    const std::string shown = printable(text, 40);
    text.resize(std::min(text.find('\0'), text.size()));
    std::erase_if(text, [&](char c) { return kIgnored.find(c) != kIgnored.npos; });
    const bool is_negative = text.starts_with('-');
    std::string_view digits = std::string_view(text).substr(is_negative ? 1 : 0);
    const bool has_digits = !digits.empty();
    digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
    const bool is_number = has_digits && digits.find_first_not_of("0123456789") == digits.npos;
    if (!is_number || (is_negative && !digits.empty())) {
      stop_at("the number of a memo slot", "'" + shown + "'");
      return kNoKey;
    }
    std::uint64_t key = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), key);
    if (digits.size() < 20 && line.nbytes() <= kMaxLineNbytes) return key;
    // Python's own unpickler takes numbers of any size.
    reach_limit("a memo slot below 10^19", "'" + shown + "'");
    return kNoKey;
  }

  void put(std::uint64_t key) {
    const Slot slot = top();
    if (key == kNoKey) return consume(slot);
    if (!memo_.put(key, slot)) {
      reach_limit("at most " + std::to_string(limits_.max_memo_keys) +
                      " objects in the memo, and " + std::to_string(limits_.max_memo_slots) +
                      " strings and tuples among them",
                  "more");
    }
  }
  void get(std::uint64_t key) {
    const auto slot = memo_.get(key);
    if (!slot) stop_at("a memo slot that is set", "slot " + std::to_string(key));
    push(slot.value_or(Slot{}));
  }

  std::optional<bool> memo_step(Opcode opcode) {
    const auto with_key = [&](int num_bytes, void (Walk::*use)(std::uint64_t)) {
      const auto key = in_.number(num_bytes);
      if (!key) return end_at("the number of a memo slot", "the end of the file");
      (this->*use)(*key);
      return true;
    };
    switch (opcode) {
      case Opcode::PUT:
        put(key_of_line());
        return true;
      case Opcode::GET:
        get(key_of_line());
        return true;
      case Opcode::MEMOIZE:
        put(memo_.num_set());
        return true;
      case Opcode::BINPUT:
        return with_key(1, &Walk::put);
      case Opcode::LONG_BINPUT:
        return with_key(4, &Walk::put);
      case Opcode::BINGET:
        return with_key(1, &Walk::get);
      case Opcode::LONG_BINGET:
        return with_key(4, &Walk::get);
      default:
        return std::nullopt;
    }
  }

  // Containers

  Slot tuple_with(std::span<const Slot> items) {
    const Slot tuple = tuple_slot(items, pairs_);
    for (std::size_t i = tuple.kind == Kind::pair ? 1 : 0; i < items.size(); ++i) consume(items[i]);
    return tuple;
  }

  void tuple_of(std::size_t num_items) {
    std::vector<Slot> items(num_items);
    for (std::size_t i = num_items; i-- > 0;) items[i] = pop();
    push(tuple_with(items));
  }

  /// Pushes a dict with these keys and values. If the pickle has named joblib's array wrapper, the
  /// dict may describe a raw array, so the walk collects what it says. Otherwise, it is `other`.
  void push_dict(std::span<const Slot> items) {
    for (const Slot& item : items) consume(item);
    if (!may_have_arrays_ || arrays_.size() >= kMaxArrays) return push(Kind::other);
    arrays_.emplace_back();
    push(Kind::dict, arrays_.size() - 1);
    note_entries(items);
  }

  bool container_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::EMPTY_DICT:
        push_dict({});
        return true;
      case Opcode::EMPTY_LIST:
      case Opcode::EMPTY_SET:
        push(Kind::other);
        return true;
      case Opcode::EMPTY_TUPLE:
        push(Kind::integers, 1);
        return true;
      case Opcode::TUPLE:
        push(tuple_with(pop_to_mark()));
        return true;
      case Opcode::TUPLE1:
        tuple_of(1);
        return true;
      case Opcode::TUPLE2:
        tuple_of(2);
        return true;
      case Opcode::TUPLE3:
        tuple_of(3);
        return true;
      case Opcode::DICT:
        push_dict(pop_to_mark());
        return true;
      case Opcode::LIST:
      case Opcode::FROZENSET:
        drop_to_mark();
        push(Kind::other);
        return true;
      default:
        return false;
    }
  }

  // Items and attributes that are put into an object

  void put_into_top(std::span<const Slot> items) {
    for (const Slot& item : items) consume(item);
    note_entries(items);
    change(top());
  }

  /// Records what the dict on top of the stack says about a raw array. `items` are keys and values
  /// in turn.
  void note_entries(std::span<const Slot> items) {
    constexpr std::size_t kLongestKey = 32;  // longest key that describes a raw array
    const Slot target = top();
    if (target.kind != Kind::dict) return;
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (const auto key = text_of(file_, items[i], kLongestKey)) {
        arrays_[target.number].note(*key, items[i + 1]);
      }
    }
  }

  void change(const Slot& target) {
    if (target.kind == Kind::global && is_reached()) {
      walk_.globals[target.number].is_changed = true;
    }
  }

  void build(const Slot& state) {
    consume(state);
    const Slot object = top();
    change(object);
    if (object.kind == Kind::dtype) dtypes_[object.number].build(state);
    if (is_array_wrapper(object)) pass_over_array(state);
  }

  bool entry_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::APPEND:
        put_into_top(std::vector<Slot>{pop()});
        return true;
      case Opcode::SETITEM: {
        const Slot value = pop();
        const Slot key = pop();
        put_into_top(std::vector<Slot>{key, value});
        return true;
      }
      case Opcode::APPENDS:
      case Opcode::ADDITEMS:
      case Opcode::SETITEMS:
        put_into_top(pop_to_mark());
        return true;
      case Opcode::BUILD:
        build(pop());
        return true;
      default:
        return false;
    }
  }

  // Globals

  Slot import(WalkedGlobal global) {
    const auto key = std::pair(global.module, static_cast<char>(global.kind) + global.name);
    auto [place, is_new] = index_of_.emplace(key, walk_.globals.size());
    if (is_new) {
      if (walk_.globals.size() >= limits_.max_globals) {
        index_of_.erase(place);
        reach_limit("at most " + std::to_string(limits_.max_globals) + " different names", "more");
        return {};
      }
      may_have_arrays_ = may_have_arrays_ || is_wrapper_class(global);
      global.offset = at_;
      global.escapes = !is_getattr(global);
      called_arguments_.push_back(called_arguments(global.module, global.name));
      walk_.globals.push_back(std::move(global));
    }
    ++walk_.globals[place->second].num_times;
    return {.kind = Kind::global, .number = place->second};
  }

  Slot import_computed(std::string module, std::string name) {
    return import({.kind = WalkedGlobal::Kind::computed,
                   .module = std::move(module),
                   .name = std::move(name)});
  }

  Slot import_lines(ByteRange module, ByteRange name) {
    const std::uint64_t longest = limits_.max_name_nbytes;
    if (module.nbytes() > longest || name.nbytes() > longest) {
      return import_computed(line_text(module), line_text(name));
    }
    return import({.module = read_some(file_, module.begin, module.nbytes()),
                   .name = read_some(file_, name.begin, name.nbytes())});
  }

  Slot import_from_stack() {
    const Slot name = pop();
    const Slot module = pop();
    consume(name);
    consume(module);
    const auto name_text = text_of(file_, name, limits_.max_name_nbytes);
    const auto module_text = text_of(file_, module, limits_.max_name_nbytes);
    if (name_text && module_text) return import({.module = *module_text, .name = *name_text});
    return import_computed(module_text.value_or("?"), name_text.value_or("?"));
  }

  std::optional<bool> extension(int num_bytes) {
    const auto code = in_.number(num_bytes);
    if (!code) return end_at("the code of an extension", "the end of the file");
    push(import({.kind = WalkedGlobal::Kind::extension, .name = std::to_string(*code)}));
    return true;
  }

  std::optional<bool> global_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::GLOBAL: {
        const ByteRange module = in_.line();
        push(import_lines(module, in_.line()));
        return true;
      }
      case Opcode::STACK_GLOBAL:
        push(import_from_stack());
        return true;
      case Opcode::EXT1:
        return extension(1);
      case Opcode::EXT2:
        return extension(2);
      case Opcode::EXT4:
        return extension(4);
      case Opcode::BINPERSID:
        drop();
        push(Kind::other);
        return true;
      default:
        return std::nullopt;
    }
  }

  // Calls

  void call(const Slot& callable, const Slot& arguments) {
    if (callable.kind == Kind::result) walk_.globals[callable.number].is_result_called = true;
    if (callable.kind != Kind::global) {
      consume(callable);
      consume(arguments);
      return push(callable.kind == Kind::result ? callable : Slot{});
    }
    WalkedGlobal& global = walk_.globals[callable.number];
    global.is_called = global.is_called || is_reached();
    if (is_getattr(global)) return get_attribute(callable, arguments);
    if (calls_unknown(called_arguments_[callable.number], arguments)) global.calls_unknown = true;
    Slot made{.kind = Kind::result, .number = callable.number};
    if (global.module == "numpy" && global.name == "dtype") made = dtype_slot(arguments);
    consume(arguments);
    push(made);
  }

  /// Says whether one of the arguments in `called` is a value that the walk does not know, or a
  /// function that itself calls its arguments.
  bool calls_unknown(std::uint64_t called, const Slot& arguments) const {
    if (called == 0) return false;
    if (arguments.kind == Kind::tuple) return (arguments.number & called) != 0;
    if (arguments.kind != Kind::pair) return arguments.kind != Kind::integers;
    const auto& [first, second] = pairs_[arguments.number];
    const bool calls_a_caller =
        (called & 1) != 0 && first.kind == Kind::global && called_arguments_[first.number] != 0;
    return calls_a_caller || (unknown_items(std::array{first, second}) & called) != 0;
  }

  Slot dtype_slot(const Slot& arguments) {
    constexpr std::size_t kLongestCode = 32;
    if (dtypes_.size() >= kMaxArrays) return {};
    dtypes_.emplace_back();
    if (arguments.kind == Kind::pair) {
      const auto code = text_of(file_, pairs_[arguments.number].first, kLongestCode);
      if (code) dtypes_.back() = dtype_of(*code);
    }
    return {.kind = Kind::dtype, .number = dtypes_.size() - 1};
  }

  /// Members of enumerations are pickled as `getattr(Class, 'NAME')`. This counts as an import of
  /// the global `Class.NAME`.
  void get_attribute(const Slot& callable, const Slot& arguments) {
    if (arguments.kind == Kind::pair && arguments.nbytes == 2) {
      const SlotPair pair = pairs_[arguments.number];
      const auto name = text_of(file_, pair.second, limits_.max_name_nbytes);
      if (pair.first.kind == Kind::global && name) {
        const WalkedGlobal& of = walk_.globals[pair.first.number];
        if (of.kind == WalkedGlobal::Kind::named) {
          return push(import({.module = of.module, .name = of.name + "." + *name}));
        }
      }
    }
    consume(callable);
    consume(arguments);
    push({.kind = Kind::result, .number = callable.number});
  }

  bool call_step(Opcode opcode) {
    switch (opcode) {
      case Opcode::REDUCE:
      case Opcode::NEWOBJ: {
        const Slot arguments = pop();
        call(pop(), arguments);
        return true;
      }
      case Opcode::NEWOBJ_EX: {
        drop();
        const Slot arguments = pop();
        call(pop(), arguments);
        return true;
      }
      case Opcode::OBJ: {
        const std::vector<Slot> items = pop_to_mark();
        if (items.empty()) {
          stop_at("a class after the mark", "nothing");
          push(Kind::other);
        } else {
          call(items[0], tuple_with(std::span(items).subspan(1)));
        }
        return true;
      }
      case Opcode::INST: {
        const ByteRange module = in_.line();
        const Slot made_by = import_lines(module, in_.line());
        if (num_marks_ == 0) {
          stop_at("a mark on the stack", "none");
          push(Kind::other);
        } else {
          call(made_by, tuple_with(pop_to_mark()));
        }
        return true;
      }
      default:
        return false;
    }
  }

  // Arrays of joblib

  static bool is_wrapper_class(const WalkedGlobal& global) {
    return global.name == "NumpyArrayWrapper";
  }
  bool is_array_wrapper(const Slot& object) const {
    return object.kind == Kind::result && is_wrapper_class(walk_.globals[object.number]);
  }

  void pass_over_array(const Slot& state) {
    stack_.back() = {};  // joblib replaces the wrapper by the array
    if (in_.position() < std::exchange(frame_end_, kNoFrame)) {
      return reach_limit("a raw array at the end of a frame",
                         "one within a frame, which joblib reads after the frame");
    }
    const RawArray array = state.kind == Kind::dict ? arrays_[state.number] : RawArray{};
    if (!array.dtype) return note_unknown_array();
    const ArrayDType& dtype = dtypes_[*array.dtype];
    if (dtype.has_objects) return walk_nested();
    const std::uint64_t itemsize = dtype.itemsize.value_or(0);
    const std::uint64_t numel = array.numel.value_or(0);
    std::uint64_t nbytes = 0;
    const bool is_too_large = __builtin_mul_overflow(numel, itemsize, &nbytes);
    if (!array.numel || !dtype.itemsize || is_too_large) return note_unknown_array();
    if (array.is_aligned) {
      const auto padding = in_.number(1);
      if (!padding || !in_.skip(*padding)) return stop_at("an array", "the end of the file");
    }
    if (!in_.skip(nbytes)) stop_at("an array of " + counted_bytes(nbytes), "the end of the file");
  }

  void note_unknown_array() {
    reach_limit("a raw array with a shape and dtype that NumPy writes", "another shape or dtype");
  }

  /// Walks the nested pickle of an array of objects, which begins at this place of the file. joblib
  /// reads it with a second loader before the first loader continues.
  void walk_nested() {
    if (depth_ >= kMaxNestedPickles) {
      return reach_limit("at most " + std::to_string(kMaxNestedPickles) + " nested pickles",
                         "more");
    }
    PickleWalk inner = Walk(file_, in_.position(), after_break_, limits_, depth_ + 1).run();
    for (WalkedGlobal& global : inner.globals) {
      const std::uint64_t at = std::exchange(at_, global.offset);
      const bool is_called = global.is_called;
      const bool is_changed = global.is_changed;
      const bool is_result_called = global.is_result_called;
      const bool calls_unknown = global.calls_unknown;
      const bool escapes = global.escapes;
      const Slot slot = import(std::move(global));
      at_ = at;
      if (slot.kind != Kind::global) break;
      WalkedGlobal& own = walk_.globals[slot.number];
      own.is_called |= is_called;
      own.is_changed |= is_changed;
      own.is_result_called |= is_result_called;
      own.calls_unknown |= calls_unknown;
      own.escapes |= escapes;
    }
    if (!walk_.first_break) walk_.first_break = std::move(inner.first_break);
    if (!walk_.limit) walk_.limit = std::move(inner.limit);
    in_.skip(inner.end - in_.position());
  }

  const ReadableFile& file_;
  ByteWindow in_;
  const AfterBreak after_break_;
  const WalkLimits& limits_;
  const int depth_;
  std::uint64_t at_ = 0;  // position of the current opcode
  std::uint64_t frame_end_ = kNoFrame;
  std::vector<Slot> stack_;
  std::size_t num_marks_ = 0;  // on the stack
  std::vector<SlotPair> pairs_;
  Memo memo_;
  // Index in walk_.globals, by module and name.
  std::map<std::pair<std::string, std::string>, std::size_t> index_of_;
  std::vector<std::uint64_t> called_arguments_;  // of each global
  std::vector<RawArray> arrays_;                 // what each dict says about a raw array
  std::vector<ArrayDType> dtypes_;
  bool may_have_arrays_ = false;  // the pickle names joblib's wrapper of raw arrays
  PickleWalk walk_;
};

}  // namespace

PickleWalk walk_pickle(const ReadableFile& file, std::uint64_t begin, AfterBreak after_break,
                       const WalkLimits& limits) {
  return Walk(file, begin, after_break, limits, 0).run();
}

}  // namespace tessera::inspect

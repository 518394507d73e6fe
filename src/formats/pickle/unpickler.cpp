#include "formats/pickle/unpickler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "base/utf8.h"
#include "formats/pickle/fetched_slots.h"
#include "formats/pickle/graph_tail.h"
#include "formats/pickle/opcode.h"
#include "formats/pickle/python_text.h"

namespace tessera::formats::pickle {

using detail::Call;
using detail::kNoObject;
using detail::Node;
using detail::Slice;
using detail::Text;

AllowList::AllowList(std::initializer_list<std::span<const AllowedGlobal>> tables) {
  for (const std::span<const AllowedGlobal> table : tables) {
    for (const AllowedGlobal& global : table) {
      if (global.name == "*") {
        prefixes_.push_back(global);
      } else {
        exact_.emplace(std::string(global.module) + '\n' + std::string(global.name),
                       global.meaning);
      }
    }
  }
}

std::optional<std::uint32_t> AllowList::find(std::string_view module, std::string_view name) const {
  std::string key(module);
  key += '\n';  // no listed name contains it
  key += name;
  if (const auto found = exact_.find(key); found != exact_.end()) return found->second;
  for (const AllowedGlobal& prefix : prefixes_) {
    if (module.substr(0, prefix.module.size()) != prefix.module) continue;
    const std::string_view rest = module.substr(prefix.module.size());
    if (rest.empty() || rest.front() == '.') return prefix.meaning;
  }
  return std::nullopt;
}

namespace {

enum class OpcodeGroup : unsigned char {
  unknown,  // bytes that are no opcode
  frame_and_stack,
  number,  // also None and the booleans
  text,    // and bytes
  new_container,
  fill_container,
  memo,
  global_or_call,
  refused,
};

/// Maps each byte to the function of Machine that runs it.
constexpr std::array<OpcodeGroup, 256> kGroupOfOpcode = [] {
  std::array<OpcodeGroup, 256> groups{};
  const auto add = [&groups](OpcodeGroup group, std::initializer_list<Opcode> opcodes) {
    for (const Opcode opcode : opcodes) groups[static_cast<unsigned char>(opcode)] = group;
  };
  using enum Opcode;
  add(OpcodeGroup::frame_and_stack, {PROTO, FRAME, STOP, MARK, POP, POP_MARK, DUP});
  add(OpcodeGroup::number, {NONE, NEWTRUE, NEWFALSE, INT, BININT, BININT1, BININT2, LONG, LONG1,
                            LONG4, FLOAT, BINFLOAT});
  add(OpcodeGroup::text, {STRING, BINSTRING, SHORT_BINSTRING, UNICODE, BINUNICODE, SHORT_BINUNICODE,
                          BINUNICODE8, BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8});
  add(OpcodeGroup::new_container, {EMPTY_LIST, EMPTY_TUPLE, EMPTY_DICT, EMPTY_SET, LIST, TUPLE,
                                   TUPLE1, TUPLE2, TUPLE3, DICT, FROZENSET});
  add(OpcodeGroup::fill_container, {APPEND, APPENDS, ADDITEMS, SETITEM, SETITEMS});
  add(OpcodeGroup::memo, {PUT, BINPUT, LONG_BINPUT, MEMOIZE, GET, BINGET, LONG_BINGET});
  add(OpcodeGroup::global_or_call,
      {GLOBAL, STACK_GLOBAL, REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, INST, BUILD, PERSID, BINPERSID});
  add(OpcodeGroup::refused, {EXT1, EXT2, EXT4, NEXT_BUFFER, READONLY_BUFFER});
  return groups;
}();

std::string name_of_refused(Opcode opcode) {
  switch (opcode) {
    case Opcode::INST:
      return "INST";
    case Opcode::OBJ:
      return "OBJ";
    case Opcode::EXT1:
      return "EXT1";
    case Opcode::EXT2:
      return "EXT2";
    case Opcode::EXT4:
      return "EXT4";
    case Opcode::NEWOBJ_EX:
      return "NEWOBJ_EX";
    case Opcode::NEXT_BUFFER:
      return "NEXT_BUFFER";
    case Opcode::READONLY_BUFFER:
      return "READONLY_BUFFER";
    default:
      return std::to_string(static_cast<unsigned char>(opcode));
  }
}

}  // namespace

/// The pickle machine: a stack of objects, marks on the stack, and a memo. The total cost is linear
/// in the pickle: an opcode costs as much as its own bytes, or as the objects that it pops, and
/// each popped object was pushed by another opcode.
class Machine {
 public:
  Machine(PickleBytes bytes, PickleSource source, const AllowList& allowed, ForeignGlobals foreign,
          PickleLimits limits, EntryTaker* taker)
      : allowed_(allowed), foreign_(foreign), limits_(limits), taker_(taker) {
    graph_.path_ = std::move(source.path);
    graph_.file_offset_ = source.file_offset;
    graph_.bytes_ = std::move(bytes);
    nbytes_ = graph_.bytes_.size();
    // Reserves what a pickle of this size usually needs, so that little is moved while the graph
    // grows.
    const std::size_t expected_nbytes = std::min<std::size_t>(nbytes_, std::size_t{1} << 25);
    graph_.nodes_.reserve(expected_nbytes / 5);
    graph_.links_.reserve(expected_nbytes / 5);
    graph_.calls_.reserve(expected_nbytes / 20);
    memo_.reserve(expected_nbytes / 5);
    if (taker_ != nullptr) make_constants();  // first, so that they are not dropped with an entry
  }

  ObjectGraph run() {
    if (nbytes_ > limits_.max_nbytes) {
      fail_expected(ErrorKind::corruption, "pickle size",
                    "at most " + std::to_string(limits_.max_nbytes) + " bytes",
                    std::to_string(nbytes_));
    }
    while (!stopped_) {
      opcode_position_ = position_;
      execute(take_byte("opcode"));
    }
    if (position_ != nbytes_) {
      opcode_position_ = position_;
      fail_expected(ErrorKind::corruption, "bytes after STOP", "0",
                    std::to_string(nbytes_ - position_));
    }
    unite_equal_keys_from(0);
    return std::move(graph_);
  }

 private:
  // Failure

  [[noreturn]] void fail(ErrorKind kind, const std::string& what) const {
    const std::uint64_t begin = graph_.file_offset_ + opcode_position_;
    throw Error(kind,
                {.path = graph_.path_,
                 .byte_range = ByteRange{begin, graph_.file_offset_ +
                                                    std::max(position_, opcode_position_ + 1)}},
                "pickle: " + what);
  }
  [[noreturn]] void fail_expected(ErrorKind kind, const std::string& rule,
                                  const std::string& expected, const std::string& found,
                                  const std::string& likely_cause = {}) const {
    fail(kind, rule + ": expected " + expected + ", found " + found +
                   (likely_cause.empty() ? "" : " (" + likely_cause + ")"));
  }
  // Not inlined, so that the functions of the common opcodes stay small enough to be inlined.
  [[noreturn, gnu::noinline]] void fail_cut_short(const char* what, std::uint64_t nbytes) const {
    fail_expected(ErrorKind::corruption, what, std::to_string(nbytes) + " bytes",
                  std::to_string(nbytes_ - position_), "cut short?");
  }
  [[noreturn, gnu::noinline]] void fail_too_many_objects() const {
    fail_expected(ErrorKind::corruption, "objects in one pickle",
                  "at most " + std::to_string(limits_.max_objects), "more");
  }
  [[noreturn, gnu::noinline]] void fail_large_slot(std::uint64_t slot) const {
    fail_expected(ErrorKind::corruption, "memo slot", "below " + std::to_string(nbytes_),
                  std::to_string(slot));
  }
  [[noreturn, gnu::noinline]] void fail_unset_slot(std::uint64_t slot) const {
    fail_expected(ErrorKind::corruption, "memo slot", "a slot that was set",
                  "slot " + std::to_string(slot) + " unset");
  }
  [[noreturn]] void refuse_opcode(Opcode opcode) const {
    fail(ErrorKind::unsupported,
         "opcode " + name_of_refused(opcode) + " is not in the allow-list; nothing was executed");
  }
  [[noreturn]] void fail_unknown_opcode(Opcode opcode) const {
    fail_expected(ErrorKind::corruption, "opcode", "a pickle opcode",
                  "byte " + std::to_string(static_cast<unsigned char>(opcode)),
                  "is this a pickle?");
  }

  // One opcode

  void execute(unsigned char byte);
  void run_frame_or_stack_opcode(Opcode opcode);
  void run_number_opcode(Opcode opcode);
  void run_text_opcode(Opcode opcode);
  void run_new_container_opcode(Opcode opcode);
  void run_fill_container_opcode(Opcode opcode);
  void run_memo_opcode(Opcode opcode);
  void run_global_or_call_opcode(Opcode opcode);

  // Frame of the program

  void check_protocol() {
    const unsigned version = take_byte("protocol");
    if (version > 5) {
      fail_expected(ErrorKind::unsupported, "pickle protocol", "at most 5",
                    std::to_string(version));
    }
  }
  void check_frame() {
    const auto frame_nbytes = take_little_endian<std::uint64_t>("frame length");
    if (frame_nbytes > nbytes_ - position_) {
      fail_expected(ErrorKind::corruption, "frame", std::to_string(frame_nbytes) + " bytes",
                    std::to_string(nbytes_ - position_), "cut short?");
    }
  }
  void stop() {
    graph_.root_ = pop();
    if (!stack_.empty() || !marks_.empty()) {
      fail_expected(ErrorKind::corruption, "stack at STOP", "one object",
                    std::to_string(stack_.size() + 1));
    }
    stopped_ = true;
  }

  // Input

  std::string_view take(std::uint64_t nbytes, const char* what) {
    if (nbytes > nbytes_ - position_) fail_cut_short(what, nbytes);
    graph_.bytes_.load(position_ + nbytes);
    const std::string_view taken(graph_.bytes_.data() + position_, nbytes);
    position_ += nbytes;
    return taken;
  }
  unsigned char take_byte(const char* what) {
    return static_cast<unsigned char>(take(1, what).front());
  }
  template <std::unsigned_integral T>
  T take_little_endian(const char* what) {
    return little_endian<T>(take(sizeof(T), what));
  }
  template <std::unsigned_integral T>
  static T little_endian(std::string_view bytes) {
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value =
          static_cast<T>(value | static_cast<T>(static_cast<unsigned char>(bytes[i])) << (8 * i));
    }
    return value;
  }
  std::string_view take_line(const char* what) {
    const auto end = graph_.bytes_.find('\n', position_);
    if (!end) {
      fail_expected(ErrorKind::corruption, what, "a line", "no end of line", "cut short?");
    }
    const std::string_view line(graph_.bytes_.data() + position_, *end - position_);
    position_ = *end + 1;
    return line;
  }

  // Objects

  std::uint32_t next_id() const { return static_cast<std::uint32_t>(graph_.nodes_.size()); }
  /// Makes an object in place. A Node on the stack is written in parts and then copied as a whole,
  /// for which the processor waits.
  Node& add_node(ObjectKind kind) {
    Node& added = graph_.nodes_.emplace_back(kind, false, false,
                                             static_cast<std::uint32_t>(opcode_position_));
    added.integer = 0;
    return added;
  }
  std::uint32_t make(ObjectKind kind) {
    const std::uint32_t id = next_id();
    add_node(kind);
    return id;
  }
  void push(std::uint32_t id) {
    if (++num_held_ > limits_.max_objects) fail_too_many_objects();
    stack_.push_back(id);
  }
  Node& push_new(ObjectKind kind) {
    push(next_id());
    return add_node(kind);
  }
  std::uint32_t constant(std::uint32_t& id, ObjectKind kind, bool boolean = false) {
    if (id == kNoObject) {
      id = make(kind);
      graph_.nodes_[id].offset = kNoObject;
      if (kind == ObjectKind::boolean) graph_.nodes_[id].boolean = boolean;
      if (kind == ObjectKind::tuple) graph_.nodes_[id].slice = Slice{};
    }
    return id;
  }
  std::uint32_t none() { return constant(none_, ObjectKind::none); }
  std::uint32_t boolean(bool value) {
    return constant(value ? true_ : false_, ObjectKind::boolean, value);
  }
  std::uint32_t empty_tuple() { return constant(empty_tuple_, ObjectKind::tuple); }
  void make_constants() {
    none();
    boolean(true);
    boolean(false);
    empty_tuple();
  }
  void push_boolean(bool value) { push(boolean(value)); }
  void push_integer(std::int64_t value) { push_new(ObjectKind::integer).integer = value; }
  void push_floating(double value) { push_new(ObjectKind::floating).floating = value; }
  void push_empty(ObjectKind kind) { push_new(kind).slice = Slice{}; }
  void push_bytes(std::string_view text) { push_new(ObjectKind::bytes).text = text_of(text); }
  void push_str(std::string_view text) {
    if (!::tessera::detail::is_valid_python_str(text))
      fail(ErrorKind::corruption, "str: expected UTF-8, found other bytes");
    push_new(ObjectKind::str).text = text_of(text);
  }
  /// Pushes a str, or bytes if `text` is not UTF-8: Python 2 had one type for both.
  void push_str_or_bytes(std::string_view text) {
    ::tessera::detail::is_valid_utf8(text) ? push_str(text) : push_bytes(text);
  }
  Text text_of(std::string_view text) const {
    return Text{text.data(), static_cast<std::uint32_t>(text.size())};
  }
  std::string_view keep(std::string text) { return graph_.decoded_.emplace_back(std::move(text)); }

  void push_long(std::string_view twos_complement) {
    if (twos_complement.size() <= sizeof(std::int64_t)) {
      std::uint64_t value = 0;
      for (std::size_t i = 0; i < twos_complement.size(); ++i) {
        value |= std::uint64_t{static_cast<unsigned char>(twos_complement[i])} << (8 * i);
      }
      const std::size_t width = 8 * twos_complement.size();
      if (width > 0 && width < 64 && (value >> (width - 1)) != 0)
        value |= ~std::uint64_t{0} << width;
      return push_integer(static_cast<std::int64_t>(value));
    }
    check_big_integer(twos_complement.size());
    push_decimal(decimal_of(twos_complement));
  }
  void push_long4() {
    const auto integer_nbytes = take_little_endian<std::uint32_t>("integer size");
    check_big_integer(integer_nbytes);
    push_long(take(integer_nbytes, "integer"));
  }
  /// BINFLOAT is big-endian.
  void push_binary_float() {
    std::uint64_t bits = 0;
    for (const char byte : take(8, "float")) bits = bits << 8 | static_cast<unsigned char>(byte);
    push_floating(std::bit_cast<double>(bits));
  }
  void check_big_integer(std::uint64_t nbytes) const {
    if (nbytes <= limits_.max_big_integer_nbytes) return;
    fail_expected(ErrorKind::unsupported, "integer size",
                  "at most " + std::to_string(limits_.max_big_integer_nbytes) + " bytes",
                  std::to_string(nbytes));
  }
  void push_decimal(std::string_view decimal) {
    std::int64_t value = 0;
    const auto [end, error] =
        std::from_chars(decimal.data(), decimal.data() + decimal.size(), value);
    if (error == std::errc{} && end == decimal.data() + decimal.size()) return push_integer(value);
    const std::string_view digits = decimal.substr(decimal.substr(0, 1) == "-" ? 1 : 0);
    check_big_integer(digits.size() / 3);  // one byte holds 2.4 digits
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) {
      fail_expected(ErrorKind::corruption, "integer", "decimal digits",
                    "'" + printable(decimal, 40) + "'");
    }
    const std::string_view kept = keep(canonical_decimal(decimal));
    push_new(ObjectKind::big_integer).text = text_of(kept);
  }

  // Stack

  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::uint32_t pop() {
    if (stack_.size() == floor())
      fail(ErrorKind::corruption, "stack: expected an object, found none");
    const std::uint32_t id = stack_.back();
    stack_.pop_back();
    return id;
  }
  std::uint32_t top() const {
    if (stack_.size() == floor())
      fail(ErrorKind::corruption, "stack: expected an object, found none");
    return stack_.back();
  }
  /// Pops the last mark and returns where the objects above the mark begin. These objects stay on
  /// the stack.
  std::size_t pop_mark() {
    if (marks_.empty()) fail(ErrorKind::corruption, "stack: expected a MARK, found none");
    const std::size_t begin = marks_.back();
    remove_mark();
    return begin;
  }
  void remove_mark() {
    marks_.pop_back();
    if (batch_ && marks_.size() < kMarksOfBatch) batch_.reset();
  }
  void push_mark() {
    marks_.push_back(stack_.size());
    if (taker_ != nullptr && !batch_ && marks_.size() == kMarksOfBatch) begin_batch();
  }
  void pop_object_or_mark() {
    if (!marks_.empty() && stack_.size() == marks_.back()) {
      remove_mark();
    } else {
      pop();
    }
  }
  std::span<const std::uint32_t> above(std::size_t begin) const {
    return std::span(stack_).subspan(begin);
  }
  const Node& node(std::uint32_t id) const { return graph_.nodes_[id]; }
  std::string describe(std::uint32_t id) const { return Object(&graph_, id).describe(); }

  /// Adds `ids` to a slice. If the slice is full and other links follow it, first moves it to the
  /// end of all links, with room to grow.
  void append(Slice& slice, std::span<const std::uint32_t> ids) {
    if (ids.empty()) return;
    std::vector<std::uint32_t>& links = graph_.links_;
    const std::uint64_t needed = std::uint64_t{slice.size} + ids.size();
    if (slice.capacity == 0) slice.begin = static_cast<std::uint32_t>(links.size());
    const bool is_full = slice.size == slice.capacity;
    if (is_full && std::uint64_t{slice.begin} + slice.size == links.size()) {
      for (const std::uint32_t id : ids) links.push_back(id);
      slice.size = slice.capacity = static_cast<std::uint32_t>(needed);
      return;
    }
    if (needed > slice.capacity) {
      const std::uint64_t capacity =
          std::max<std::uint64_t>(needed, 2 * std::uint64_t{slice.capacity});
      const std::size_t begin = links.size();
      links.resize(begin + capacity, kNoObject);
      std::copy_n(links.begin() + slice.begin, slice.size,
                  links.begin() + static_cast<std::ptrdiff_t>(begin));
      slice.begin = static_cast<std::uint32_t>(begin);
      slice.capacity = static_cast<std::uint32_t>(capacity);
    }
    std::copy(ids.begin(), ids.end(), links.begin() + slice.begin + slice.size);
    slice.size += static_cast<std::uint32_t>(ids.size());
  }

  void append_items(std::uint32_t target, std::span<const std::uint32_t> items, ObjectKind wanted) {
    require_open(target);
    Node& self = graph_.nodes_[target];
    if (self.kind == wanted) return append(self.slice, items);
    if (self.kind == ObjectKind::call) return append(graph_.calls_[self.index].appended, items);
    fail_expected(ErrorKind::corruption, "append target", std::string(kind_name(wanted)),
                  describe(target));
  }
  void set_items(std::uint32_t target, std::span<const std::uint32_t> keys_and_values) {
    if (keys_and_values.size() % 2 != 0) {
      fail(ErrorKind::corruption, "dict entries: expected pairs, found an odd number of objects");
    }
    require_open(target);
    Node& self = graph_.nodes_[target];
    if (self.kind == ObjectKind::dict) return append(self.slice, keys_and_values);
    if (self.kind == ObjectKind::call)
      return append(graph_.calls_[self.index].entries, keys_and_values);
    fail_expected(ErrorKind::corruption, "set-items target", "dict", describe(target));
  }
  void append_item() {
    const std::uint32_t item = pop();
    append_items(top(), std::span(&item, 1), ObjectKind::list);
  }
  void append_items_above_mark(ObjectKind wanted) {
    const std::size_t begin = pop_mark();
    append_items(object_below(begin), above(begin), wanted);
    stack_.resize(begin);
  }
  void set_item() {
    const std::uint32_t value = pop();
    const std::uint32_t pair[] = {pop(), value};
    if (taker_ != nullptr && marks_.size() + 1 == kMarksOfBatch && is_wanted()) {
      take_single_entry(pair[0], value);
    } else {
      set_items(top(), pair);
    }
  }
  void set_items_above_mark() {
    if (is_at_batch() && (stack_.size() - batch_->begin) % 2 == 0) {
      take_entries();
      remove_mark();
      return;
    }
    const std::size_t begin = pop_mark();
    set_items(object_below(begin), above(begin));
    stack_.resize(begin);
  }
  /// Returns the object below the mark that `pop_mark` removed. `begin` is what `pop_mark`
  /// returned.
  std::uint32_t object_below(std::size_t begin) const {
    if (begin == floor())
      fail(ErrorKind::corruption, "stack: expected an object below the MARK, found none");
    return stack_[begin - 1];
  }
  void push_dict_above_mark() {
    const std::size_t begin = pop_mark();
    if ((stack_.size() - begin) % 2 != 0) {
      fail(ErrorKind::corruption, "dict entries: expected pairs, found an odd number of objects");
    }
    push_collection(ObjectKind::dict, begin);
  }
  void push_collection(ObjectKind kind, std::size_t begin) {
    Slice slice;
    append(slice, above(begin));
    stack_.resize(begin);
    push_new(kind).slice = slice;
  }
  void push_tuple_of(std::size_t num_items) {
    if (stack_.size() - floor() < num_items) {
      fail_expected(ErrorKind::corruption, "stack", std::to_string(num_items) + " objects",
                    std::to_string(stack_.size() - floor()));
    }
    push_collection(ObjectKind::tuple, stack_.size() - num_items);
  }

  // Globals and calls are only recorded. Nothing is ever looked up or called.

  void push_global_lines() {
    const std::string_view module = take_line("module");
    push_global(module, take_line("name"));
  }
  void push_global_of_stack() {
    const std::uint32_t name = pop();
    const std::uint32_t module = pop();
    if (node(name).kind != ObjectKind::str || node(module).kind != ObjectKind::str) {
      fail_expected(ErrorKind::corruption, "STACK_GLOBAL", "two str",
                    describe(module) + " and " + describe(name));
    }
    push_global(node(module).text.view(), node(name).text.view());
  }
  void push_global(std::string_view module, std::string_view name) {
    const std::optional<std::uint32_t> meaning = allowed_.find(module, name);
    if (!meaning && foreign_.policy == ForeignGlobals::Policy::refuse) {
      const bool is_module = module.substr(0, 9) == "torch.nn." || module == "__main__";
      fail(ErrorKind::unsupported,
           "foreign global " + printable(module, 80) + "." + printable(name, 80) +
               ": not in the allow-list; nothing was executed" +
               (is_module ? " (a whole module was saved? save its state_dict())" : ""));
    }
    if (!meaning) stop_taking();
    push(make_global(
        {text_of(module), text_of(name), meaning ? *meaning : foreign_meaning(module, name)}));
  }
  std::uint32_t foreign_meaning(std::string_view module, std::string_view name) const {
    const auto is_named = [&](std::string_view text) {
      return text.size() == module.size() + 1 + name.size() && text.starts_with(module) &&
             text[module.size()] == '.' && text.ends_with(name);
    };
    return std::ranges::any_of(foreign_.as_dict, is_named) ? kAsDictMeaning : kForeignMeaning;
  }
  std::uint32_t make_global(detail::Global global) {
    graph_.globals_.push_back(global);
    const std::uint32_t id = make(ObjectKind::global);
    graph_.nodes_[id].index = static_cast<std::uint32_t>(graph_.globals_.size() - 1);
    return id;
  }
  enum class CallForm { function, instance };

  void push_call(const char* opcode, CallForm form) {
    const std::uint32_t arguments = pop();
    push_call_of(pop(), arguments, opcode, form);
  }
  void push_call_of(std::uint32_t callable, std::uint32_t arguments, const char* opcode,
                    CallForm form) {
    // A pickle may also call the result of a foreign call, such as a method that getattr returned.
    if (node(callable).kind == ObjectKind::call &&
        foreign_.policy == ForeignGlobals::Policy::record) {
      callable = foreign_global_like(graph_.calls_[node(callable).index].callable);
    }
    if (node(callable).kind != ObjectKind::global) {
      fail_expected(ErrorKind::corruption, std::string(opcode) + " callable", "global",
                    describe(callable));
    }
    if (node(arguments).kind != ObjectKind::tuple) {
      fail_expected(ErrorKind::corruption, std::string(opcode) + " arguments", "tuple",
                    describe(arguments));
    }
    Call made{.callable = callable, .arguments = arguments};
    if (form == CallForm::function) move_pairs(made);
    graph_.calls_.push_back(made);
    Node& call = push_new(ObjectKind::call);
    call.index = static_cast<std::uint32_t>(graph_.calls_.size() - 1);
    call.is_instance = form == CallForm::instance;
  }
  /// Python 2 pickles an OrderedDict with its entries as the argument: a list of lists of two.
  /// Makes them entries of the call, as Python 3 pickles them. Moves each list once, so that the
  /// cost stays linear; a call with a list that was moved before keeps its argument.
  void move_pairs(Call& call) {
    const detail::Global& named = graph_.globals_[node(call.callable).index];
    const Slice arguments = node(call.arguments).slice;
    if (arguments.size != 1 || named.module.view() != "collections" ||
        named.name.view() != "OrderedDict") {
      return;
    }
    Node& list = graph_.nodes_[graph_.links_[arguments.begin]];
    if (list.kind != ObjectKind::list || list.is_variant) return;
    std::vector<std::uint32_t> keys_and_values;
    for (std::uint32_t i = 0; i < list.slice.size; ++i) {
      const Node& pair = node(graph_.links_[list.slice.begin + i]);
      if (pair.kind != ObjectKind::list || pair.slice.size != 2) return;
      const auto first = graph_.links_.begin() + pair.slice.begin;
      keys_and_values.insert(keys_and_values.end(), first, first + 2);
    }
    list.is_variant = true;
    call.arguments = empty_tuple();
    append(call.entries, keys_and_values);
  }
  /// Makes a foreign global with the name of `global`. A foreign global has no meaning for Tessera.
  std::uint32_t foreign_global_like(std::uint32_t global) {
    detail::Global foreign = graph_.globals_[node(global).index];
    foreign.meaning = kForeignMeaning;
    return make_global(foreign);
  }
  std::uint32_t make_tuple(std::span<const std::uint32_t> items) {
    Slice slice;
    append(slice, items);
    const std::uint32_t id = make(ObjectKind::tuple);
    graph_.nodes_[id].slice = slice;
    return id;
  }

  void require_recording(Opcode opcode) const {
    if (foreign_.policy == ForeignGlobals::Policy::refuse) refuse_opcode(opcode);
  }
  /// Pushes the call of NEWOBJ_EX. It has keyword arguments, which no listed class takes, so the
  /// object is always foreign.
  void push_call_with_keywords() {
    require_recording(Opcode::NEWOBJ_EX);
    const std::uint32_t keywords = pop();
    const std::uint32_t arguments = pop();
    std::uint32_t callable = pop();
    if (node(callable).kind == ObjectKind::global) callable = foreign_global_like(callable);
    const std::uint32_t both[] = {arguments, keywords};
    push_call_of(callable, make_tuple(both), "NEWOBJ_EX", CallForm::instance);
  }
  void push_call_above_mark() {
    require_recording(Opcode::OBJ);
    const std::size_t begin = pop_mark();
    if (begin == stack_.size()) {
      fail(ErrorKind::corruption, "OBJ: expected a class above the MARK, found none");
    }
    const std::uint32_t callable = stack_[begin];
    const std::uint32_t arguments = make_tuple(above(begin + 1));
    stack_.resize(begin);
    push_call_of(callable, arguments, "OBJ", CallForm::instance);
  }
  void push_call_of_lines() {
    require_recording(Opcode::INST);
    const std::size_t begin = pop_mark();
    const std::uint32_t arguments = make_tuple(above(begin));
    stack_.resize(begin);
    push_global_lines();
    push_call_of(pop(), arguments, "INST", CallForm::instance);
  }
  void build() {
    set_state();
    if (is_at_batch() && (stack_.size() - batch_->begin) % 2 == 0) take_entries();
  }
  void set_state() {
    const std::uint32_t state = pop();
    require_open(top());
    const Node& self = node(top());
    if (self.kind != ObjectKind::call) {
      fail_expected(ErrorKind::corruption, "BUILD target", "object", describe(top()));
    }
    Call& call = graph_.calls_[self.index];
    const std::uint32_t meaning = graph_.globals_[node(call.callable).index].meaning;
    if (call.state != kNoObject && meaning <= kAsDictMeaning) {
      // Only the class knows how two states combine. Both are kept, in a tuple.
      const std::uint32_t both[] = {call.state, state};
      call.state = make_tuple(both);
      return;
    }
    call.state = state;
  }

  std::optional<std::uint32_t> class_of_module_id(std::uint32_t id) const {
    if (!foreign_.has_module_ids || node(id).kind != ObjectKind::tuple) return std::nullopt;
    const Slice& items = node(id).slice;
    if (items.size < 2) return std::nullopt;
    const Node& tag = node(graph_.links_[items.begin]);
    const std::uint32_t named = graph_.links_[items.begin + 1];
    const bool is_module = tag.kind == ObjectKind::str && tag.text.view() == "module";
    return is_module && node(named).kind == ObjectKind::global ? std::optional(named)
                                                               : std::nullopt;
  }

  void push_persistent() {
    const std::uint32_t id = pop();
    if (const auto named = class_of_module_id(id)) return push(*named);
    push_new(ObjectKind::persistent).index = id;
  }

  // Memo

  void put(std::uint64_t slot) {
    const std::uint32_t id = top();
    // It takes at least one opcode to fill a slot, and picklers number slots from 0. So every slot
    // number is below the number of bytes.
    if (slot >= nbytes_) fail_large_slot(slot);
    if (slot >= memo_.size()) {
      memo_.resize(std::max<std::size_t>(slot + 1, std::min(2 * memo_.size(), nbytes_)), kNoObject);
    }
    if (memo_[slot] == kNoObject) ++num_memoized_;
    memo_[slot] = batch_ && !is_kept(slot, id) ? kNeverFetched : id;
  }
  void get(std::uint64_t slot) {
    if (slot >= memo_.size() || memo_[slot] == kNoObject || memo_[slot] == kNeverFetched) {
      fail_unset_slot(slot);
    }
    push(memo_[slot]);
  }
  std::uint64_t take_slot_line() {
    const std::string_view line = take_line("memo slot");
    std::uint64_t slot = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), slot);
    if (error != std::errc{} || end != line.data() + line.size()) {
      fail_expected(ErrorKind::corruption, "memo slot", "decimal digits",
                    "'" + printable(line, 40) + "'");
    }
    return slot;
  }

  // Text opcodes of protocol 0

  void push_int_line() {
    const std::string_view line = take_line("integer");
    if (line == "00") return push_boolean(false);
    if (line == "01") return push_boolean(true);
    push_decimal(line);
  }
  void push_long_line() {
    std::string_view line = take_line("integer");
    if (!line.empty() && line.back() == 'L') line.remove_suffix(1);
    push_decimal(line);
  }
  void push_float_line() {
    const std::string_view line = take_line("float");
    double value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    if (error != std::errc{} || end != line.data() + line.size()) {
      fail_expected(ErrorKind::corruption, "float", "a number", "'" + printable(line, 40) + "'");
    }
    push_floating(value);
  }
  void push_string_line() {
    const std::string_view line = take_line("string");
    if (line.size() < 2 || line.front() != line.back() ||
        (line.front() != '\'' && line.front() != '"')) {
      fail(ErrorKind::corruption, "string: expected quotes around it, found none");
    }
    push_unescaped(unescape_python_string(line.substr(1, line.size() - 2)));
  }
  void push_unescaped(std::optional<std::string> text) {
    if (!text)
      fail(ErrorKind::corruption, "string: expected Python escapes, found a malformed escape");
    push_str_or_bytes(keep(std::move(*text)));
  }
  void push_unicode_line() {
    std::optional<std::string> text = unescape_raw_unicode(take_line("str"));
    if (!text) fail(ErrorKind::corruption, "str: expected \\u escapes, found a malformed escape");
    push_str(keep(std::move(*text)));
  }

  // Entries that a taker gets. [Note: Entries taken early]

  /// The dict entries that SETITEMS will set next. On the stack, from `begin` on: key, value, key,
  /// value, ... The `_before` counts are those before the first entry that is not taken yet.
  struct Batch {
    std::size_t begin;  // in the stack
    std::size_t num_held_before;
    std::size_t num_decoded_before;  // texts that the graph keeps, because they had escapes
  };
  /// The number of marks on the stack when a batch is complete: the attributes of the outermost
  /// object are above the first mark, the batch is above the second one.
  static constexpr std::size_t kMarksOfBatch = 2;

  bool is_at_batch() const { return batch_ && marks_.size() == kMarksOfBatch; }

  /// Says whether the taker wants the entries of the dict on top of the stack. The stack must be:
  /// object, its attributes, MARK, name, attribute, ..., name, dict.
  bool is_wanted() {
    constexpr std::size_t kAttributesBegin = 2;
    if (marks_[0] != kAttributesBegin || stack_.size() < kAttributesBegin + 2 ||
        stack_.size() % 2 != 0) {
      return false;
    }
    const std::uint32_t dict = stack_.back();
    const Node& name = node(stack_[stack_.size() - 2]);
    if (node(stack_[0]).kind != ObjectKind::call || node(stack_[1]).kind != ObjectKind::dict ||
        node(dict).kind != ObjectKind::dict || name.kind != ObjectKind::str) {
      return false;
    }
    if (!taker_->wants(Object(&graph_, stack_[0]), name.text.view(), Object(&graph_, dict))) {
      return false;
    }
    taken_dict_ = dict;
    if (outermost_[0] == kNoObject) outermost_ = {stack_[0], stack_[1]};
    return true;
  }
  void begin_batch() {
    if (!is_wanted()) return;
    batch_ = Batch{stack_.size(), num_held_, graph_.decoded_.size()};
    kept_slots_.clear();
    tail_.begin_behind_all();
    released_end_ = position_;
  }
  void stop_taking() {
    taker_ = nullptr;
    batch_.reset();
  }

  /// Gives all entries of the batch to the EntryTaker, and drops their objects.
  void take_entries() {
    unite_equal_keys_from(tail_.first_node());
    for (std::size_t i = batch_->begin; i < stack_.size(); i += 2) {
      taker_->take(Object(&graph_, stack_[i]), Object(&graph_, stack_[i + 1]));
    }
    stack_.resize(batch_->begin);
    std::erase_if(kept_slots_, [&](auto slot) { return memo_[slot] < tail_.first_node(); });
    kept_.clear();
    for (const std::uint64_t slot : kept_slots_) kept_.push_back(memo_[slot]);
    const std::uint32_t first_kept = tail_.first_node();
    num_held_ = batch_->num_held_before + tail_.drop_all_but(kept_) + graph_.decoded_.size() -
                batch_->num_decoded_before;
    *batch_ = {batch_->begin, num_held_, graph_.decoded_.size()};
    for (std::size_t i = 0; i < kept_.size(); ++i) memo_[kept_slots_[i]] = kept_[i];
    kept_slots_.clear();
    taken_end_ = tail_.first_node();
    copy_texts_from(first_kept);
    constexpr std::uint64_t kReleasedNbytes = std::uint64_t{64} << 10;
    if (position_ - released_end_ >= kReleasedNbytes) {
      released_end_ = graph_.bytes_.release(released_end_, position_);
    }
  }
  /// Copies the texts of the objects from `first` on, so that their bytes can be released.
  void copy_texts_from(std::uint32_t first) {
    const auto copy = [&](Text& text) { text = text_of(graph_.kept_.add(text.view())); };
    for (Node& node : std::span(graph_.nodes_).subspan(first)) {
      switch (node.kind) {
        case ObjectKind::str:
        case ObjectKind::bytes:
        case ObjectKind::big_integer:
          copy(node.text);
          break;
        case ObjectKind::global:
          copy(graph_.globals_[node.index].module);
          copy(graph_.globals_[node.index].name);
          break;
        default:
          break;
      }
    }
  }
  /// Gives an entry of SETITEM to the EntryTaker. Does not drop its objects, because a pickle has
  /// few such entries.
  void take_single_entry(std::uint32_t key, std::uint32_t value) {
    unite_equal_keys_from(std::max(taken_end_, taken_dict_ + 1));
    taker_->take(Object(&graph_, key), Object(&graph_, value));
    taken_end_ = static_cast<std::uint32_t>(graph_.nodes_.size());
  }

  /// Returns whether to keep an object that a batch puts into the memo: only if an opcode may fetch
  /// it.
  bool is_kept(std::uint64_t slot, std::uint32_t id) {
    const ObjectKind kind = node(id).kind;
    const bool is_atom = kind == ObjectKind::str || kind == ObjectKind::global;
    if (!is_atom && !fetched_slots_) fetched_slots_ = fetched_slots(graph_.bytes_, position_);
    if (fetched_slots_ && (slot >= fetched_slots_->size() || !(*fetched_slots_)[slot]))
      return false;
    if (id >= tail_.first_node()) kept_slots_.push_back(slot);
    return true;
  }

  /// Throws if `target` may not change any more, because a taker already has its entry. Within a
  /// batch, only its objects may change, so that no older object refers to a dropped one.
  void require_open(std::uint32_t target) const {
    if (target >= (batch_ ? tail_.first_node() : taken_end_)) return;
    const bool is_outermost = std::ranges::find(outermost_, target) != outermost_.end();
    if (!batch_ && (is_outermost || target == taken_dict_)) return;
    fail(ErrorKind::corruption,
         "change of an object: expected an object of the entry that is being read, found " +
             describe(target) + " of another entry");
  }

  // Keys

  /// The sort key of a dict's key. Sorting places equal keys next to each other. Keys of kind
  /// `other` are never equal.
  struct Key {
    enum class Kind : std::uint8_t { integer, floating, big_integer, str, bytes, none, other };
    Kind kind = Kind::other;
    std::uint64_t hash = 0;  // of the text; for a number, its bits
    std::string_view text{};
    std::uint32_t entry = 0;

    bool same(const Key& other) const {
      return kind != Kind::other && kind == other.kind && hash == other.hash && text == other.text;
    }
  };
  Key key_of(std::uint32_t id, std::uint32_t entry) const {
    const Node& self = node(id);
    Key key{.entry = entry};
    const auto integer = [&key](std::int64_t value) {
      key.kind = Key::Kind::integer;
      key.hash = static_cast<std::uint64_t>(value);
    };
    switch (self.kind) {
      case ObjectKind::none:
        key.kind = Key::Kind::none;
        break;
      case ObjectKind::boolean:
        integer(self.boolean ? 1 : 0);
        break;
      case ObjectKind::integer:
        integer(self.integer);
        break;
      case ObjectKind::floating:
        if (self.floating >= -0x1p62 && self.floating <= 0x1p62 &&
            self.floating == static_cast<double>(static_cast<std::int64_t>(self.floating))) {
          integer(static_cast<std::int64_t>(self.floating));
        } else if (self.floating == self.floating) {
          key.kind = Key::Kind::floating;
          key.hash = std::bit_cast<std::uint64_t>(self.floating);
        }
        break;
      case ObjectKind::big_integer:
      case ObjectKind::str:
      case ObjectKind::bytes:
        key.kind = self.kind == ObjectKind::str     ? Key::Kind::str
                   : self.kind == ObjectKind::bytes ? Key::Kind::bytes
                                                    : Key::Kind::big_integer;
        key.text = self.text.view();
        key.hash = std::hash<std::string_view>{}(key.text);
        break;
      default:
        break;
    }
    return key;
  }
  /// Says whether a dict has few keys and all are different strings, as in the attributes of an
  /// object.
  bool has_few_names(const Slice& slice) const {
    constexpr std::uint32_t kFew = 8;
    if (slice.size / 2 > kFew) return false;
    std::array<std::string_view, kFew> names;
    const std::uint32_t* links = graph_.links_.data() + slice.begin;
    for (std::uint32_t i = 0; i < slice.size / 2; ++i) {
      const Node& key = node(links[2 * i]);
      if (key.kind != ObjectKind::str) return false;
      names[i] = key.text.view();
      if (std::find(names.begin(), names.begin() + i, names[i]) != names.begin() + i) return false;
    }
    return true;
  }
  /// Calls unite_equal_keys for each dict, and each call's entries, of the objects from `first` on.
  void unite_equal_keys_from(std::uint32_t first) {
    for (Node& node : std::span(graph_.nodes_).subspan(first)) {
      if (node.kind == ObjectKind::dict) unite_equal_keys(node.slice);
      if (node.kind == ObjectKind::call) unite_equal_keys(graph_.calls_[node.index].entries);
    }
  }
  /// Removes repeated keys of a dict. A key stays at its first place and gets its last value, as in
  /// a Python dict.
  void unite_equal_keys(Slice& slice) {
    const std::uint32_t num_entries = slice.size / 2;
    if (num_entries < 2 || has_few_names(slice)) return;
    std::uint32_t* links = graph_.links_.data() + slice.begin;
    keys_.clear();
    for (std::uint32_t i = 0; i < num_entries; ++i) keys_.push_back(key_of(links[2 * i], i));
    std::sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
      if (a.hash != b.hash) return a.hash < b.hash;
      if (a.kind != b.kind) return a.kind < b.kind;
      if (a.text != b.text) return a.text < b.text;
      return a.entry < b.entry;
    });
    bool any_repeated = false;
    for (std::size_t i = 0; i < keys_.size();) {
      std::size_t last = i;
      while (last + 1 < keys_.size() && keys_[last + 1].same(keys_[i])) ++last;
      links[2 * keys_[i].entry + 1] = links[2 * keys_[last].entry + 1];
      for (std::size_t k = i + 1; k <= last; ++k) {
        links[2 * keys_[k].entry] = kNoObject;
        any_repeated = true;
      }
      i = last + 1;
    }
    if (!any_repeated) return;
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < num_entries; ++i) {
      if (links[2 * i] == kNoObject) continue;
      links[2 * kept] = links[2 * i];
      links[2 * kept + 1] = links[2 * i + 1];
      ++kept;
    }
    slice.size = 2 * kept;
  }

  const AllowList& allowed_;
  ForeignGlobals foreign_;
  PickleLimits limits_;
  ObjectGraph graph_;
  std::uint64_t nbytes_ = 0;
  std::uint64_t position_ = 0;
  std::uint64_t opcode_position_ = 0;
  bool stopped_ = false;
  // Objects that were pushed, less those of entries that were taken and dropped
  std::size_t num_held_ = 0;
  std::vector<std::uint32_t> stack_;
  std::vector<std::size_t> marks_;
  std::vector<std::uint32_t> memo_;
  std::size_t num_memoized_ = 0;
  std::vector<Key> keys_;

  // For the entries that a taker gets ([Note: Entries taken early])
  static constexpr std::uint32_t kNeverFetched = kNoObject - 1;  // in memo_: set, and not kept
  EntryTaker* taker_;                                            // null: the graph gets all entries
  std::optional<Batch> batch_;
  std::uint32_t taken_dict_ = kNoObject;  // the dict whose entries were taken last
  // The object that has the dict as an attribute, and the dict of its attributes
  std::array<std::uint32_t, 2> outermost_{kNoObject, kNoObject};
  std::uint32_t taken_end_ = 0;  // objects before it belong to entries that were taken
  detail::GraphTail tail_{{graph_.nodes_, graph_.links_, graph_.globals_, graph_.calls_}};
  std::vector<std::uint64_t> kept_slots_;  // that the batch filled
  std::vector<std::uint32_t> kept_;
  std::optional<std::vector<bool>> fetched_slots_;
  std::uint64_t released_end_ = 0;  // the batch's bytes before it are not needed any more

  std::uint32_t none_ = kNoObject, true_ = kNoObject, false_ = kNoObject, empty_tuple_ = kNoObject;
};

void Machine::execute(unsigned char byte) {
  const auto opcode = static_cast<Opcode>(byte);
  switch (kGroupOfOpcode[byte]) {
    case OpcodeGroup::frame_and_stack:
      return run_frame_or_stack_opcode(opcode);
    case OpcodeGroup::number:
      return run_number_opcode(opcode);
    case OpcodeGroup::text:
      return run_text_opcode(opcode);
    case OpcodeGroup::new_container:
      return run_new_container_opcode(opcode);
    case OpcodeGroup::fill_container:
      return run_fill_container_opcode(opcode);
    case OpcodeGroup::memo:
      return run_memo_opcode(opcode);
    case OpcodeGroup::global_or_call:
      return run_global_or_call_opcode(opcode);
    case OpcodeGroup::refused:
      refuse_opcode(opcode);
    case OpcodeGroup::unknown:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_frame_or_stack_opcode(Opcode opcode) {
  switch (opcode) {
    // PROTO and FRAME do not change the meaning of the opcodes after them.
    case Opcode::PROTO:
      return check_protocol();
    case Opcode::FRAME:
      return check_frame();
    case Opcode::STOP:
      return stop();
    case Opcode::MARK:
      return push_mark();
    case Opcode::POP:
      return pop_object_or_mark();
    case Opcode::POP_MARK:
      return stack_.resize(pop_mark());
    case Opcode::DUP:
      return push(top());
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_number_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::NONE:
      return push(none());
    case Opcode::NEWTRUE:
      return push_boolean(true);
    case Opcode::NEWFALSE:
      return push_boolean(false);
    case Opcode::BININT1:
      return push_integer(take_byte("integer"));
    case Opcode::BININT2:
      return push_integer(take_little_endian<std::uint16_t>("integer"));
    case Opcode::BININT:
      return push_integer(static_cast<std::int32_t>(take_little_endian<std::uint32_t>("integer")));
    case Opcode::LONG1:
      return push_long(take(take_byte("integer size"), "integer"));
    case Opcode::LONG4:
      return push_long4();
    case Opcode::BINFLOAT:
      return push_binary_float();
    case Opcode::INT:
      return push_int_line();
    case Opcode::LONG:
      return push_long_line();
    case Opcode::FLOAT:
      return push_float_line();
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_text_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::BINUNICODE:
      return push_str(take(take_little_endian<std::uint32_t>("str size"), "str"));
    case Opcode::SHORT_BINUNICODE:
      return push_str(take(take_byte("str size"), "str"));
    case Opcode::BINUNICODE8:
      return push_str(take(take_little_endian<std::uint64_t>("str size"), "str"));
    case Opcode::UNICODE:
      return push_unicode_line();
    case Opcode::BINSTRING:
      return push_str_or_bytes(take(take_little_endian<std::uint32_t>("string size"), "string"));
    case Opcode::SHORT_BINSTRING:
      return push_str_or_bytes(take(take_byte("string size"), "string"));
    case Opcode::STRING:
      return push_string_line();
    case Opcode::BINBYTES:
      return push_bytes(take(take_little_endian<std::uint32_t>("bytes size"), "bytes"));
    case Opcode::SHORT_BINBYTES:
      return push_bytes(take(take_byte("bytes size"), "bytes"));
    case Opcode::BINBYTES8:
      return push_bytes(take(take_little_endian<std::uint64_t>("bytes size"), "bytes"));
    case Opcode::BYTEARRAY8:
      push_bytes(take(take_little_endian<std::uint64_t>("bytes size"), "bytes"));
      graph_.nodes_.back().is_variant = true;
      return;
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_new_container_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::EMPTY_LIST:
      return push_empty(ObjectKind::list);
    case Opcode::EMPTY_DICT:
      return push_empty(ObjectKind::dict);
    case Opcode::EMPTY_SET:
      return push_empty(ObjectKind::set);
    case Opcode::EMPTY_TUPLE:
      return push(empty_tuple());
    case Opcode::LIST:
      return push_collection(ObjectKind::list, pop_mark());
    case Opcode::TUPLE:
      return push_collection(ObjectKind::tuple, pop_mark());
    case Opcode::FROZENSET:
      push_collection(ObjectKind::set, pop_mark());
      graph_.nodes_.back().is_variant = true;
      return;
    case Opcode::TUPLE1:
      return push_tuple_of(1);
    case Opcode::TUPLE2:
      return push_tuple_of(2);
    case Opcode::TUPLE3:
      return push_tuple_of(3);
    case Opcode::DICT:
      return push_dict_above_mark();
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_fill_container_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::APPEND:
      return append_item();
    case Opcode::APPENDS:
      return append_items_above_mark(ObjectKind::list);
    case Opcode::ADDITEMS:
      return append_items_above_mark(ObjectKind::set);
    case Opcode::SETITEM:
      return set_item();
    case Opcode::SETITEMS:
      return set_items_above_mark();
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_memo_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::BINPUT:
      return put(take_byte("memo slot"));
    case Opcode::LONG_BINPUT:
      return put(take_little_endian<std::uint32_t>("memo slot"));
    case Opcode::PUT:
      return put(take_slot_line());
    case Opcode::MEMOIZE:
      return put(num_memoized_);
    case Opcode::BINGET:
      return get(take_byte("memo slot"));
    case Opcode::LONG_BINGET:
      return get(take_little_endian<std::uint32_t>("memo slot"));
    case Opcode::GET:
      return get(take_slot_line());
    default:
      fail_unknown_opcode(opcode);
  }
}

void Machine::run_global_or_call_opcode(Opcode opcode) {
  switch (opcode) {
    case Opcode::GLOBAL:
      return push_global_lines();
    case Opcode::STACK_GLOBAL:
      return push_global_of_stack();
    case Opcode::REDUCE:
      return push_call("REDUCE", CallForm::function);
    case Opcode::NEWOBJ:
      return push_call("NEWOBJ", CallForm::instance);
    case Opcode::NEWOBJ_EX:
      return push_call_with_keywords();
    case Opcode::OBJ:
      return push_call_above_mark();
    case Opcode::INST:
      return push_call_of_lines();
    case Opcode::BUILD:
      return build();
    case Opcode::BINPERSID:
      return push_persistent();
    case Opcode::PERSID:
      push_str(take_line("persistent id"));
      return push_persistent();
    default:
      fail_unknown_opcode(opcode);
  }
}

ObjectGraph unpickle(PickleBytes bytes, PickleSource source, const AllowList& allowed,
                     ForeignGlobals foreign, PickleLimits limits, EntryTaker* taker) {
  return Machine(std::move(bytes), std::move(source), allowed, foreign, limits, taker).run();
}

}  // namespace tessera::formats::pickle
